"""Checkpoints are the plain model's, and a resumed run equals the one that was never stopped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, Keep
from lightning_actprune.schedules import CubicSchedule, LinearSchedule, SparsitySchedule
from tests.support.everything import Everything
from tests.support.helpers import BATCHES, ConfiguredNet, Net, assert_plain, fit, sparsities, trainer

pytestmark = pytest.mark.filterwarnings("error:.*other settings:UserWarning")

EPOCHS = 2
CUBIC = CubicSchedule(end=0.8, start=0.1)


def fit_and_save(model: pl.LightningModule, path: Path, *callbacks: pl.Callback, **options: Any) -> None:
    save = ModelCheckpoint(path, "{step}", every_n_train_steps=1, save_top_k=-1)
    fit(model, save, *callbacks, enable_checkpointing=True, max_epochs=EPOCHS, default_root_dir=path, **options)


def watched(make: Callable[[], Net] = Net) -> Net:
    model = make()
    model.watch = lambda m: (m.trainer.global_step, *sparsities(m))
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, list]:
    """An uninterrupted run with a schedule: its checkpoints and its (step, sparsities)."""
    path, model = tmp_path_factory.mktemp("run"), watched()
    fit_and_save(model, path, ActivationPruning(sparsity=CUBIC), ActivationMemoryMonitor())
    return path, model.seen


@pytest.mark.parametrize(("make", "step"), [(Net, 1), (lambda: Net("setup"), 4), (ConfiguredNet, 6)])
def test_a_resumed_run_continues_the_schedule(run, step: int, make):
    path, uninterrupted = run
    model = watched(make)
    callbacks = ActivationPruning(sparsity=CUBIC), ActivationMemoryMonitor()
    fit(model, *callbacks, max_epochs=EPOCHS, ckpt=path / f"step={step}.ckpt")
    assert model.seen == uninterrupted[step:]


class Own(SparsitySchedule):
    def __init__(self, function: Callable[[float], float]) -> None:
        self.function = function

    def __call__(self, progress: float) -> float:
        return self.function(progress)


def test_a_schedule_that_prints_an_address_is_the_same_in_another_process():
    schedules = [Own(lambda progress, of=number: 0.5 * progress + 0 * of) for number in range(2)]
    states = [ActivationPruning(sparsity=own, rules={"head": Keep(sparsity=own)}).state_dict() for own in schedules]
    assert repr(schedules[0]) != repr(schedules[1])
    assert states[0] == states[1]


def test_other_settings_are_used_and_reported_once(run):
    path, model = run[0], watched()
    pruning = ActivationPruning(sparsity=LinearSchedule(end=0.5), block_size=16)
    with pytest.warns(
        UserWarning, match=r"Keep\(sparsity=Cubic.* -> Keep\(sparsity=Linear.*total_steps: 8 -> 12"
    ) as result:
        fit(model, pruning, max_epochs=3, ckpt=path / "step=6.ckpt")
    assert len([w for w in result if "other settings" in str(w.message)]) == 1
    assert [s for _, s, *_ in model.seen] == pytest.approx([0.5 * step / 12 for step in range(6, 12)])


def test_a_checkpoint_read_by_another_stage_says_nothing_to_the_next_fit(run):
    made, model = trainer(ActivationPruning(sparsity=0.5)), Net()
    made.validate(model, ckpt_path=run[0] / "step=6.ckpt")
    assert_plain(model)
    made.fit(model)


def test_checkpoints_have_the_keys_of_the_plain_model_and_resume_with_and_without_ours(run, tmp_path):
    fit_and_save(Net(), tmp_path)
    ours, plain = (torch.load(path / "step=6.ckpt", weights_only=True) for path in (run[0], tmp_path))
    assert list(ours) == list(plain)
    assert list(ours["state_dict"]) == list(plain["state_dict"]) == list(Net().state_dict())
    [key] = [key for key in ours["callbacks"] if "ModelCheckpoint" not in key]
    assert key == "ActivationPruning{'rules': []}"
    assert ours["callbacks"][key] == {
        "kept": {"linear": "Keep(sparsity=CubicSchedule(end=0.8, start=0.1, warmup=0.0, until=1.0))"},
        "rules": [],
        "total_steps": BATCHES * EPOCHS,
        "layers": ["body.0", "body.2", "head"],
        "skip_retained": True,
        "spread": {},
        "retained": {},
        "saved": {"sites": [], "quiet": {}},
    }
    model = Net()
    with pytest.warns(UserWarning, match="Please add the following callbacks"):
        fit(model, max_epochs=EPOCHS, ckpt=run[0] / "step=6.ckpt")
    assert model.seen == [["Linear"] * 3] * 2
    model = watched()
    fit(model, ActivationPruning(sparsity=0.5), max_epochs=EPOCHS, ckpt=tmp_path / "step=6.ckpt")
    assert model.seen == [(6, 0.5, 0.5, 0.5), (7, 0.5, 0.5, 0.5)]


class Nested(Net):
    def __init__(self, parts: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.parts = nn.ModuleList((parts or {}).get("nets", []))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.parts[0](x).mean()


def test_modules_in_a_checkpoint_are_dense(tmp_path):
    """Among hyperparameters, as copies, beside averages of Lightning's, and in a logger's file."""
    parts = {"nets": [nn.Sequential(nn.Linear(64, 64), nn.GELU())]}
    copies = LambdaCallback(on_save_checkpoint=lambda _, model, saved: saved.update(own=[copy.deepcopy(model.body)]))
    callbacks = ActivationPruning("max"), EMAWeightAveraging(decay=0.5), copies
    fit_and_save(Nested(parts), tmp_path, *callbacks, logger=CSVLogger(tmp_path))
    assert b"lightning_actprune" not in (tmp_path / "step=6.ckpt").read_bytes()
    assert "lightning_actprune" not in next(tmp_path.rglob("hparams.yaml")).read_text()
    loaded = Nested.load_from_checkpoint(tmp_path / "step=6.ckpt", weights_only=False)
    assert_plain(loaded)
    fit(loaded, ActivationPruning("max"))


def test_two_instances_have_layers_and_a_state_of_their_own(tmp_path):
    def key(**arguments: Any) -> str:
        return ActivationPruning(**arguments).state_key

    def callbacks() -> list[pl.Callback]:
        return [ActivationPruning(sparsity=s, rules={name: None}) for s, name in ((0.2, "head"), (0.7, "body.*"))]

    assert key(sparsity=0.5, rules={"a": Keep(bits=4)}) == key(block_size=16, rules={"a": Keep(bits=3)})
    assert len({key(), key(rules={"a": "max"}), key(rules={"a": None}), key(rules={"a": None, "b": None})}) == 4
    first, second = callbacks()
    assert first.state_key is first.state_key  # no text is made in each hook of each step
    fit_and_save(Net(), tmp_path, first, second)
    assert [[layer.fqn for layer in each.converted] for each in (first, second)] == [["body.0", "body.2"], ["head"]]
    model = watched()
    fit(model, *callbacks(), max_epochs=EPOCHS, ckpt=tmp_path / "step=6.ckpt")
    assert model.seen == [(6, 0.2, 0.2, 0.7), (7, 0.2, 0.2, 0.7)]
    assert_plain(model)


def test_the_best_checkpoint_of_a_tuned_fit_is_tested_by_the_plain_model(tmp_path):
    """A callback that changes the model's keys fails here: the finder saves and restores, and so does ``test``."""
    best, finder = ModelCheckpoint(tmp_path, monitor="val_loss"), LearningRateFinder(num_training_steps=3)
    pruning, model = ActivationPruning("max", verbose=False), Net()
    run = fit(model, pruning, finder, best, enable_checkpointing=True, default_root_dir=tmp_path)
    losses = [run.test(model, ckpt_path="best", verbose=False), trainer().test(model, verbose=False)]
    losses.append(trainer().test(Net.load_from_checkpoint(best.best_model_path), verbose=False))
    assert losses[0] == losses[1] == losses[2]
    assert len(run.predict(model, ckpt_path="best")) == 1
    assert_plain(model)


# A model with a layer of each operator, killed in the second epoch, two batches after the first.

KILLED = 6
SQUARE = "its input is kept for backward by square"


class Killed(Exception):
    pass


class Stopped(Everything):
    """Drops out, and raises an exception in a batch."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(dropout=0.1)
        self.killed_at = killed_at

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.trainer.global_step == self.killed_at:
            raise Killed
        torch.manual_seed(self.trainer.global_step)  # Lightning does not restore the generator that dropout draws from
        return super().training_step(batch, batch_idx)


def trained(*callbacks: pl.Callback, ckpt: Path | None = None) -> dict[str, Tensor]:
    fit(model := Stopped(), *callbacks, max_epochs=EPOCHS, limit_val_batches=1, ckpt=ckpt)
    return model.state_dict()


def killed(folder: Path, *callbacks: pl.Callback) -> Path:
    """Return the last checkpoint of a run that an exception has stopped; others are beside it."""
    with pytest.raises(Killed):
        fit_and_save(Stopped(KILLED), folder, *callbacks, limit_val_batches=1)
    return folder / f"step={KILLED}.ckpt"


def quiet(**options: Any) -> ActivationPruning:
    return ActivationPruning("max", sparsity=0.5, verbose=False, **options)


SETTINGS: dict[str, Callable[[], list[pl.Callback]]] = {
    "max that drops": lambda: [quiet()],
    "judged at the end of a schedule": lambda: [
        ActivationPruning(
            rules={"type:linear": Keep(4, CubicSchedule(end=0.8), max_dropped_energy=0.5, min_rows_for_low_bits=0)}
        )
    ],
    "at random": lambda: [
        ActivationPruning(
            rules={"type:linear": Keep(4, 0.5, selection="unbiased", min_rows_for_low_bits=0), "*": "max"}
        )
    ],
    "two of them": lambda: [
        quiet(rules={"late": None, "spread.1": None}, skip_retained=False),
        ActivationPruning("paper", rules={"late": "paper", "spread.1": "paper", "*": None}),
    ],
}


@pytest.mark.integration
@pytest.mark.parametrize("name", SETTINGS)
def test_a_killed_and_resumed_run_equals_the_uninterrupted_one(name: str, tmp_path: Path):
    """In the middle of an epoch and at its end, also with a monitor, which measures another batch of that epoch."""

    def callbacks() -> list[pl.Callback]:
        return [*SETTINGS[name](), ActivationMemoryMonitor(1, verbose=False)]

    whole = callbacks()
    expected = trained(*whole)
    last = killed(tmp_path, *callbacks())
    for ckpt in (last, tmp_path / f"step={BATCHES}.ckpt"):
        parts = callbacks()
        torch.testing.assert_close(trained(*parts, ckpt=ckpt), expected, rtol=0, atol=0)
        for one, other in zip(whole[:-1], parts[:-1], strict=True):
            assert other.report.to_rows() == one.report.to_rows()
            assert other.spread == one.spread


def edited(ckpt: Path, **changes: Any) -> Path:
    """Return a copy of a checkpoint with other decisions, or none of that name (``...``)."""
    saved = torch.load(ckpt, weights_only=True)
    state = state_of(saved)
    state.update(changes)
    for name in [name for name, value in changes.items() if value is ...]:
        del state[name]
    torch.save(saved, ckpt.with_name("edited.ckpt"))
    return ckpt.with_name("edited.ckpt")


def state_of(saved: dict[str, Any]) -> dict[str, Any]:
    [state] = [state for key, state in saved["callbacks"].items() if "ActivationPruning" in key]
    return state


def reasons(pruning: ActivationPruning) -> dict[str, str | None]:
    return {layer.fqn: layer.reason for layer in pruning.skipped if "rule" not in (layer.reason or "")}


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return killed(tmp_path_factory.mktemp("run"), quiet())


def test_what_a_checkpoint_says_counts(ckpt: Path):
    """The first batch after it does not decide anew; see test_tuners for the first batch of a tuner."""
    state = state_of(torch.load(ckpt, weights_only=True))
    assert state["retained"].keys() == {"first", "late", "attention.out_proj"}
    assert state["retained"]["late"] == SQUARE
    assert "spread.1" in state["spread"]
    pruning = quiet()
    trained(pruning, ckpt=edited(ckpt, retained={"head": "as it was"}, spread={"spread.1": 0.5}))
    assert reasons(pruning) == {"head": "as it was"}
    assert pruning.spread == {"spread.1": 0.5}


@pytest.mark.parametrize(
    ("changes", "skips"),
    [
        ({"skip_retained": True}, False),
        pytest.param({"skip_retained": False}, True, marks=pytest.mark.integration),
        pytest.param({"layers": ["head"]}, True, marks=pytest.mark.integration),
    ],
)
def test_other_settings_and_other_layers_are_judged_anew(ckpt: Path, changes: dict[str, Any], skips: bool, recwarn):
    pruning = quiet(skip_retained=skips)
    trained(pruning, ckpt=edited(ckpt, **{"retained": {"head": "as it was"}, "spread": {"head": 0.5}} | changes))
    said = [str(w.message) for w in recwarn if "other settings" in str(w.message)]
    assert [next(iter(changes)) in text for text in said] == [True]
    assert "spread.1" in pruning.spread
    assert "as it was" not in reasons(pruning).values()
    assert reasons(pruning).get("late") == (SQUARE if skips else None)


@pytest.mark.integration
@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_end"])
def test_a_checkpoint_from_before_the_decision_leaves_it_to_the_next_batch(hook: str, tmp_path: Path):
    """Before training, or by a callback that comes before ours."""
    path, pruning = tmp_path / "first.ckpt", quiet()
    save = LambdaCallback(**{hook: lambda made, *_: made.global_step < 2 and made.save_checkpoint(path)})
    with pytest.raises(Killed):
        fit(Stopped(1), save, quiet(), max_epochs=EPOCHS, limit_val_batches=1)
    state = state_of(torch.load(path, weights_only=True))
    assert state["retained"] is state["spread"] is None
    result = trained(pruning, ckpt=path)
    assert reasons(pruning)["late"] == SQUARE
    if hook == "on_train_start":
        torch.testing.assert_close(result, trained(quiet()), rtol=0, atol=0)
