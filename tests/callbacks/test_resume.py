"""A run that is killed and resumed from its last checkpoint equals the one that was never stopped, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, LearningRateFinder, ModelCheckpoint
from torch import Tensor

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, Keep
from lightning_actprune.schedules import CubicSchedule
from tests.support.everything import BATCHES, Everything
from tests.support.helpers import trainer
from tests.support.marks import only

pytestmark = pytest.mark.integration

EPOCHS = 2
KILLED = 6
"""In the second epoch of four batches, two after its first."""
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


def fit(*callbacks: pl.Callback, killed_at: int | None = None, ckpt: Path | None = None, **options: Any) -> Stopped:
    model = Stopped(killed_at)
    trainer(*callbacks, max_epochs=EPOCHS, limit_val_batches=1, **options).fit(model, ckpt_path=ckpt)
    return model


def killed(folder: Path, *callbacks: pl.Callback) -> Path:
    """Return the last checkpoint of a run that an exception has stopped; others are beside it."""
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    with pytest.raises(Killed):
        fit(save, *callbacks, killed_at=KILLED, enable_checkpointing=True, default_root_dir=folder)
    return folder / f"step={KILLED}.ckpt"


SETTINGS: dict[str, Callable[[], list[pl.Callback]]] = {
    "dense": list,
    "paper": lambda: [ActivationPruning("paper")],
    "balanced": lambda: [ActivationPruning("balanced")],
    "max": lambda: [ActivationPruning("max")],
    "max that drops": lambda: [ActivationPruning("max", sparsity=0.5)],
    "whatever is retained": lambda: [ActivationPruning("max", sparsity=0.5, skip_retained=False)],
    "cubic": lambda: [ActivationPruning(sparsity=CubicSchedule(end=0.8))],
    "judged at the end of a schedule": lambda: [
        ActivationPruning(rules={"type:linear": Keep(4, CubicSchedule(end=0.8), max_dropped_energy=0.5)})
    ],
    "at random": lambda: [ActivationPruning(rules={"type:linear": Keep(4, 0.5, selection="unbiased"), "*": "max"})],
    "two of them": lambda: [
        ActivationPruning("max", sparsity=0.5, rules={"late": None, "spread.1": None}),
        ActivationPruning("paper", rules={"late": "paper", "spread.1": "paper", "*": None}),
    ],
}


@pytest.mark.parametrize(
    "name", only(SETTINGS, "max that drops", "judged at the end of a schedule", "at random", "two of them")
)
def test_a_killed_and_resumed_run_equals_the_uninterrupted_one(name: str, tmp_path: Path, recwarn):
    """In the middle of an epoch and at its end, also with a monitor, which measures another batch of that epoch."""

    def callbacks() -> list[pl.Callback]:
        return [*SETTINGS[name](), ActivationMemoryMonitor(1, verbose=False)]

    whole = callbacks()
    expected = fit(*whole).state_dict()
    last = killed(tmp_path, *callbacks())
    for ckpt in (last, tmp_path / f"step={BATCHES}.ckpt"):
        parts = callbacks()
        found = fit(*parts, ckpt=ckpt).state_dict()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        for one, other in zip(whole[:-1], parts[:-1], strict=True):
            assert other.report.to_rows() == one.report.to_rows()
            assert other.spread == one.spread
    assert not [w for w in recwarn if "other settings" in str(w.message)]


def state_of(saved: dict[str, Any]) -> dict[str, Any]:
    [state] = [state for key, state in saved["callbacks"].items() if "ActivationPruning" in key]
    return state


def edited(ckpt: Path, **changes: Any) -> Path:
    """Return a copy of a checkpoint with other decisions, or none of that name (``...``)."""
    saved = torch.load(ckpt, weights_only=True)
    state = state_of(saved)
    state.update(changes)
    for name in [name for name, value in changes.items() if value is ...]:
        del state[name]
    torch.save(saved, ckpt.with_name("edited.ckpt"))
    return ckpt.with_name("edited.ckpt")


def reasons(pruning: ActivationPruning) -> dict[str, str | None]:
    return {layer.fqn: layer.reason for layer in pruning.skipped if "rule" not in (layer.reason or "")}


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return killed(tmp_path_factory.mktemp("run"), ActivationPruning("max", sparsity=0.5, verbose=False))


def test_a_checkpoint_holds_what_was_decided(ckpt: Path):
    state = state_of(torch.load(ckpt, weights_only=True))
    assert state["skip_retained"] is True
    assert state["retained"].keys() == {"first", "late", "attention.out_proj"}
    assert state["retained"]["late"] == SQUARE
    assert "spread.1" in state["spread"]


@pytest.mark.parametrize("tuner", [[], [LearningRateFinder(num_training_steps=2)]], ids=["", "with a tuner"])
def test_what_a_checkpoint_says_counts_and_is_shown(ckpt: Path, tuner: list[pl.Callback], monkeypatch, caplog):
    """Neither the first batch after it decides anew nor the first batch of a tuner."""
    monkeypatch.chdir(ckpt.parent)  # where tuners write
    caplog.set_level("INFO")
    pruning = ActivationPruning("max", sparsity=0.5)
    fit(pruning, *tuner, ckpt=edited(ckpt, retained={"head": "as it was"}, spread={"spread.1": 0.5}))
    assert reasons(pruning) == {"head": "as it was"}
    assert pruning.spread == {"spread.1": 0.5}
    if not tuner:  # of which the lines before the training tell
        assert "1 linear layer stays dense" in " ".join(caplog.text.split())


def test_an_older_checkpoint_says_only_what_drops_no_block(ckpt: Path, recwarn):
    pruning = ActivationPruning("max", sparsity=0.5, verbose=False)
    fit(pruning, ckpt=edited(ckpt, retained=..., skip_retained=..., spread={"head": 0.5}))
    assert reasons(pruning)["late"] == SQUARE
    assert pruning.spread == {"head": 0.5}
    assert not [w for w in recwarn if "other settings" in str(w.message)]


@pytest.mark.parametrize("then", [True, False])
def test_other_settings_are_judged_anew(ckpt: Path, then: bool):
    fresh, pruning = (ActivationPruning("max", sparsity=0.5, skip_retained=not then, verbose=False) for _ in range(2))
    fit(fresh)
    then_retained = {"head": "as it was"} if then else {}
    path = edited(ckpt, skip_retained=then, retained=then_retained, spread={"head": 0.5})
    with pytest.warns(UserWarning, match=rf"other settings \(skip_retained: {then} -> {not then}\)"):
        fit(pruning, ckpt=path)
    assert reasons(pruning) == reasons(fresh)
    assert "spread.1" in pruning.spread


def test_what_a_checkpoint_says_of_another_model_is_not_taken_over(ckpt: Path):
    pruning = ActivationPruning("max", sparsity=0.5, verbose=False)
    path = edited(ckpt, layers=["head"], retained={"head": "as it was"})
    with pytest.warns(UserWarning, match="other settings"):
        fit(pruning, ckpt=path)
    assert reasons(pruning)["late"] == SQUARE
    assert "head" not in reasons(pruning)


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_end"])
def test_a_checkpoint_from_before_the_decision_leaves_it_to_the_next_batch(hook: str, tmp_path: Path):
    """Before training, or by a callback that comes before ours."""
    path = tmp_path / "first.ckpt"
    save = LambdaCallback(**{hook: lambda made, *_: made.global_step < 2 and made.save_checkpoint(path)})
    pruning = ActivationPruning("max", sparsity=0.5, verbose=False)
    with pytest.raises(Killed):
        fit(save, ActivationPruning("max", sparsity=0.5, verbose=False), killed_at=1)
    state = state_of(torch.load(path, weights_only=True))
    assert state["retained"] is state["spread"] is None
    found = fit(pruning, ckpt=path).state_dict()
    assert reasons(pruning)["late"] == SQUARE
    if hook == "on_train_start":
        expected = fit(ActivationPruning("max", sparsity=0.5, verbose=False)).state_dict()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
