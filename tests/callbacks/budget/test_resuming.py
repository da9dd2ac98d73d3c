"""Fits with a budget that are resumed, tuned, or run in several processes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_actprune import ActivationPruning
from tests.support.budgets import AGAIN, DENSE, HALF, fit
from tests.support.stack import STEPS, Stack, batches


class Killed(Exception):
    pass


class Kill(pl.Callback):
    """Raises before a batch."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.at:
            raise Killed


def killed(folder: Path, budget: float | str, at: int, **options: Any) -> Path:
    """Return the last checkpoint of a run that an exception has stopped."""
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    with pytest.raises(Killed):
        fit(
            ActivationPruning(memory_budget=budget, verbose=0), Stack(), save, Kill(at), enable_checkpointing=True,
            max_epochs=2, **options,
        )  # fmt: skip
    return folder / f"step={at}.ckpt"


@pytest.mark.parametrize(("budget", "at"), [(HALF, 6), (0.8, 8)])
def test_a_killed_and_resumed_run_equals_the_uninterrupted_one(budget: float, at: int, tmp_path: Path, recwarn):
    """It goes on with the setting that was chosen, from its first step on."""
    ckpt = killed(tmp_path, budget, at)
    whole, parts = (ActivationPruning(memory_budget=budget, verbose=0) for _ in range(2))
    expected = fit(whole, Stack(), max_epochs=2)
    # In the middle of an epoch, Lightning begins that epoch's data anew: only at its end are both the same.
    found = fit(parts, Stack(), max_epochs=2, ckpt_path=ckpt)
    assert found.kinds == [expected.kinds[-1]] * (2 * STEPS - at)
    assert parts.state_dict()["memory_budget"] == whole.state_dict()["memory_budget"]
    assert parts.report.to_rows() == whole.report.to_rows()
    assert parts.spread == whole.spread
    if at == STEPS:
        torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert not [w for w in recwarn if "other settings" in str(w.message)]


def test_a_checkpoint_from_before_the_decision_decides_after_two_steps(tmp_path: Path):
    ckpt = killed(tmp_path, HALF, 1)
    found = fit(ActivationPruning(memory_budget=HALF, verbose=0), Stack(), max_epochs=2, ckpt_path=ckpt)
    assert found.kinds[:2] == [AGAIN] * 2
    assert found.kinds[2] != AGAIN[0]
    assert found.kinds[2] not in (AGAIN, DENSE)


@pytest.mark.parametrize("now", [0.5, 2.0])
def test_where_torch_may_take_less_than_before_a_resumed_fit_decides_anew(now: float, tmp_path: Path, monkeypatch):
    module, cap = importlib.import_module("lightning_actprune.callbacks.budget"), 2.0**40
    monkeypatch.setattr(module, "_cap", lambda budget, device: cap)
    ckpt = killed(tmp_path, HALF, 6)
    monkeypatch.setattr(module, "_cap", lambda budget, device: now * cap)
    pruning = ActivationPruning(memory_budget=HALF, verbose=0)
    found = fit(pruning, Stack(), max_epochs=2, ckpt_path=ckpt)
    assert (found.kinds[:2] == [AGAIN] * 2) == (now < 1)
    assert found.kinds[-1] not in (AGAIN, DENSE)
    assert pruning.state_dict()["memory_budget"]["cap"] == min(now, 1) * cap


@pytest.mark.parametrize("changes", [{"number": 1000}, {"setting": "another one"}, {"budget": 0.9}])
def test_a_checkpoint_of_other_blocks_or_another_budget_decides_anew(changes: dict[str, Any], tmp_path: Path):
    ckpt = killed(tmp_path, HALF, 6)
    saved = torch.load(ckpt, weights_only=True)
    [state] = [state for key, state in saved["callbacks"].items() if "ActivationPruning" in key]
    state["memory_budget"] |= changes
    torch.save(saved, ckpt)
    found = fit(ActivationPruning(memory_budget=HALF, verbose=0), Stack(), max_epochs=2, ckpt_path=ckpt)
    assert found.kinds[:2] == [AGAIN] * 2
    assert found.kinds[2] != AGAIN


class Sized(Stack):
    """Does not fit with more than 16 samples, and notes its sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size, self.sizes = 8, list[int]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch[0]) > 16:
            raise RuntimeError("CUDA out of memory.")
        self.sizes.append(len(batch[0]))
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> DataLoader[Any]:
        return batches(64 // self.batch_size * 2, self.batch_size)


def test_trials_have_the_fewest_bytes_and_the_fit_decides_for_the_batch_that_was_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pruning, model = ActivationPruning(memory_budget=1.0, verbose=0), Sized()
    finder = BatchSizeFinder(steps_per_trial=3, init_val=8)
    fit(pruning, model, finder, limit_val_batches=0, num_sanity_val_steps=0)
    trials = 6
    assert model.batch_size == 16
    assert model.sizes[: trials + 2] == [8] * 3 + [16] * 5
    assert model.kinds[: trials + 2] == [AGAIN] * (trials + 2)
    assert model.kinds[trials + 2 :]
    assert AGAIN not in model.kinds[trials + 2 :]
    batch = pruning._budget._allocator.step(0).batch_bytes
    assert batch == sum(tensor[:16].nbytes for tensor in batches().dataset.tensors)
