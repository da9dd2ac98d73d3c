"""Checkpoints are the plain model's; a resumed run continues the schedule."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, Keep
from lightning_actprune.schedules import CubicSchedule, LinearSchedule, SparsitySchedule
from tests.support.helpers import BATCHES, ConfiguredNet, Net, PlainNet, assert_plain, sparsities, trainer

EPOCHS = 2


def saving(path: Path, *callbacks: pl.Callback, **options) -> pl.Trainer:
    save = ModelCheckpoint(path, "{step}", every_n_train_steps=1, save_top_k=-1, **options)
    return trainer(save, *callbacks, enable_checkpointing=True, max_epochs=EPOCHS, default_root_dir=path)


def watched(make=Net) -> Net:
    model = make()
    model.watch = lambda m: (m.trainer.global_step, *sparsities(m))
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, list]:
    """An uninterrupted run with a schedule: its checkpoints and its (step, sparsities)."""
    path = tmp_path_factory.mktemp("run")
    model = watched()
    saving(path, ActivationPruning(sparsity=CubicSchedule(end=0.8, start=0.1)), ActivationMemoryMonitor()).fit(model)
    return path, model.seen


@pytest.mark.parametrize(("make", "step"), [(Net, 1), (Net, 4), (lambda: Net("setup"), 3), (ConfiguredNet, 6)])
def test_a_resumed_run_continues_the_schedule(run, step: int, make, recwarn):
    path, uninterrupted = run
    model = watched(make)
    callbacks = ActivationPruning(sparsity=CubicSchedule(end=0.8, start=0.1)), ActivationMemoryMonitor()
    trainer(*callbacks, max_epochs=EPOCHS).fit(model, ckpt_path=path / f"step={step}.ckpt")
    assert model.seen == uninterrupted[step:]
    assert not [w for w in recwarn if "other settings" in str(w.message)]


def test_a_training_of_another_length_is_reported(run):
    path, _ = run
    callback = ActivationPruning(sparsity=CubicSchedule(end=0.8, start=0.1))
    with pytest.warns(UserWarning, match=r"other settings \(total_steps: 8 -> 12\)"):
        trainer(callback, max_epochs=3).fit(Net(), ckpt_path=path / "step=6.ckpt")


class Own(SparsitySchedule):
    def __init__(self, function: Callable[[float], float]) -> None:
        self.function = function

    def __call__(self, progress: float) -> float:
        return self.function(progress)


def test_a_schedule_that_prints_an_address_is_the_same_in_another_process(tmp_path, recwarn):
    for number, ckpt in enumerate((None, tmp_path / "step=6.ckpt")):
        schedule = Own(lambda progress, of=number: 0.5 * progress + 0 * of)
        rules = {"head": Keep(sparsity=Own(lambda progress, of=number: 0.1 + 0 * of))}
        saving(tmp_path, ActivationPruning(sparsity=schedule, rules=rules)).fit(Net(), ckpt_path=ckpt)
    assert not [w for w in recwarn if "other settings" in str(w.message)]


def test_other_settings_are_used_and_reported_once(run):
    path, _ = run
    model = watched()
    callback = ActivationPruning(sparsity=LinearSchedule(end=0.5), block_size=16)
    made = trainer(callback, max_epochs=EPOCHS)
    with pytest.warns(
        UserWarning,
        match=r"other settings \(kept\['linear'\]: Keep\(sparsity=Cubic.* -> Keep\(sparsity=Linear.*block_size=16\)",
    ) as caught:
        made.fit(model, ckpt_path=path / "step=6.ckpt")
    assert len([w for w in caught if "other settings" in str(w.message)]) == 1
    assert [s for _, s, *_ in model.seen] == [0.5 * 6 / 8, 0.5 * 7 / 8]


def test_a_changed_model_is_reported(run):
    path, _ = run
    callback = ActivationPruning(sparsity=CubicSchedule(end=0.8, start=0.1))
    model = Net()
    model.head.forward = model.head.forward  # replaced, so that the layer is left as it is
    with pytest.warns(UserWarning, match=r"layers: \['body.0', 'body.2', 'head'\] -> \['body.0', 'body.2'\]"):
        trainer(callback, max_epochs=EPOCHS).fit(model, ckpt_path=path / "step=6.ckpt")


def test_a_checkpoint_read_by_another_stage_says_nothing_to_the_next_fit(run, recwarn):
    path, _ = run
    made, model = trainer(ActivationPruning(sparsity=0.5)), Net()
    made.validate(model, ckpt_path=path / "step=6.ckpt")
    assert_plain(model)
    made.fit(model)
    assert not [w for w in recwarn if "other settings" in str(w.message)]


def test_resume_without_the_callback_and_with_it_for_the_first_time(run, tmp_path):
    path, _ = run
    model = Net()
    with pytest.warns(UserWarning, match="Please add the following callbacks"):
        trainer(max_epochs=EPOCHS).fit(model, ckpt_path=path / "step=6.ckpt")
    assert model.seen == [["Linear"] * 3] * 2
    saving(tmp_path).fit(Net())
    model = watched()
    trainer(ActivationPruning(sparsity=0.5), max_epochs=EPOCHS).fit(model, ckpt_path=tmp_path / "step=6.ckpt")
    assert model.seen == [(6, 0.5, 0.5, 0.5), (7, 0.5, 0.5, 0.5)]


def test_checkpoints_have_the_keys_of_the_plain_model(run, tmp_path):
    path, _ = run
    saving(tmp_path).fit(Net())
    ours = torch.load(path / "step=6.ckpt", weights_only=True)
    plain = torch.load(tmp_path / "step=6.ckpt", weights_only=True)
    assert list(ours) == list(plain)
    assert list(ours["state_dict"]) == list(plain["state_dict"]) == list(PlainNet().state_dict())
    [key] = ours["callbacks"].keys() - {k for k in ours["callbacks"] if "ModelCheckpoint" in k}
    assert key == "ActivationPruning{'rules': []}"
    state = ours["callbacks"][key]
    assert state == {
        "kept": {"linear": "Keep(sparsity=CubicSchedule(end=0.8, start=0.1, warmup=0.0, until=1.0))"},
        "rules": [],
        "total_steps": BATCHES * EPOCHS,
        "layers": ["body.0", "body.2", "head"],
        "skip_retained": True,
        "spread": {},
        "retained": {},
        "saved": {"sites": {}, "settled": []},
    }


def test_a_checkpoint_loads_where_the_package_is_missing(run):
    path, _ = run
    script = f"""
import sys
sys.modules["lightning_actprune"] = None  # importing it is an error
import torch
from torch import nn
saved = torch.load({str(path / "step=6.ckpt")!r}, weights_only=True)
model = nn.Module()
model.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU())
model.head = nn.Linear(64, 4)
print(model.load_state_dict(saved["state_dict"]))
full = torch.load({str(path / "step=6.ckpt")!r}, weights_only=False)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "All keys matched" in done.stdout


def test_state_is_keyed_by_the_layers_and_not_by_the_settings():
    def key(**arguments) -> str:
        return ActivationPruning(**arguments).state_key

    assert key(sparsity=0.5, rules={"a": Keep(bits=4)}) == key(block_size=16, rules={"a": Keep(bits=3)})
    assert len({key(), key(rules={"a": "max"}), key(rules={"a": None}), key(rules={"a": None, "b": None})}) == 4


def test_two_instances_find_their_own_state(tmp_path, recwarn):
    def callbacks() -> tuple[pl.Callback, ...]:
        return ActivationPruning(sparsity=0.2, rules={"head": None}), ActivationPruning(
            sparsity=0.7, rules={"body.*": None}
        )

    saving(tmp_path, *callbacks()).fit(Net())
    model = watched()
    trainer(*callbacks(), max_epochs=EPOCHS).fit(model, ckpt_path=tmp_path / "step=6.ckpt")
    assert model.seen == [(6, 0.2, 0.2, 0.7), (7, 0.2, 0.2, 0.7)]
    assert not [w for w in recwarn if "other settings" in str(w.message)]


def test_the_best_checkpoint_of_a_tuned_fit_is_tested_by_the_plain_model(tmp_path):
    """A callback that changes the model's keys fails here: the finder saves and restores, and so does ``test``."""
    best, finder = ModelCheckpoint(tmp_path, monitor="val_loss"), LearningRateFinder(num_training_steps=3)
    pruning, model = ActivationPruning("max", verbose=False), Net()
    made = trainer(pruning, finder, best, enable_checkpointing=True, default_root_dir=tmp_path)
    made.fit(model)
    losses = [made.test(model, ckpt_path="best", verbose=False), trainer().test(model, verbose=False)]
    losses.append(trainer().test(Net.load_from_checkpoint(best.best_model_path), verbose=False))
    assert losses[0] == losses[1] == losses[2]
    assert len(made.predict(model, ckpt_path="best")) == 1
    assert_plain(model)
