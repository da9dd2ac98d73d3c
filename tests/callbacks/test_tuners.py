"""What Lightning's tuners find is found with the layers that the fit will have."""

from __future__ import annotations

import pickle
from itertools import groupby
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

from lightning_actprune import ActivationPruning, LinearSchedule
from lightning_actprune.footprint import SavedTensorMeter
from tests.callbacks.test_dropped_energy import CONCENTRATED, SPREAD, Uneven
from tests.helpers import BATCHES, assert_plain, pruned_layers, trainer

SIZE = 4


class Judged(Uneven):
    """Of its layers one is spread, one is concentrated, and the input of the head is held by a ReLU.

    ``kept`` has a row for each training step: whether a callback saw it, the batch size and the bytes kept.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kept: list[tuple[bool, int, int]] = []
        self.fails_at = 10**6

    def make(self) -> None:
        super().make()
        self.body[3] = nn.ReLU()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with SavedTensorMeter(self, batch) as meter:
            loss = super().training_step(batch, batch_idx)
        in_fit = any(isinstance(callback, ActivationPruning) for callback in self.trainer.callbacks)
        self.kept.append((in_fit, len(batch[0]), meter.report().total_bytes))
        if not in_fit and len(batch[0]) >= self.fails_at:
            raise RuntimeError("CUDA out of memory.")
        return loss

    @property
    def phases(self) -> list[tuple[bool, int, list[int]]]:
        """The bytes of every trial and of the fit."""
        phases = groupby(self.kept, lambda row: row[:2])
        return [(*phase, [nbytes for *_, nbytes in rows]) for phase, rows in phases]


def fitted(pruning: ActivationPruning, *others: pl.Callback, model: Judged | None = None, **options: Any) -> Judged:
    model = model or Judged()
    trainer(pruning, *others, **options).fit(model)
    assert_plain(model)
    assert not {"configure_model", "on_train_start"} & vars(model).keys()
    return model


def finder(steps: int, first: int, trials: int) -> BatchSizeFinder:
    return BatchSizeFinder(steps_per_trial=steps, init_val=first, max_trials=trials)


SETTINGS: dict[str, dict[str, Any]] = {
    "max": {"preset": "max"},
    "max, others": {"preset": "max", "others": True},
    "balanced": {"preset": "balanced"},
    "paper": {"sparsity": 0.6},
    "judged, values as they are": {"sparsity": 0.5, "max_dropped_energy": 0.2},
    "up": {"schedule": LinearSchedule(end=0.6), "value_format": "int4", "max_dropped_energy": 0.2},
    "down": {"schedule": LinearSchedule(start=0.8, end=0.1)},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("steps", "first", "trials"), [(1, SIZE, 1), (2, SIZE // 2, 2)])
def test_no_step_of_the_fit_keeps_more_than_the_trial_of_its_batch_size(name: str, steps: int, first: int, trials: int):
    """Also if that trial is the only one, of one step."""
    pruning = ActivationPruning(**SETTINGS[name], verbose=False)
    model = fitted(pruning, finder(steps, first, trials), tmp_path_factory=None) if False else fitted(
        pruning, finder(steps, first, trials)
    )
    *_, (_, tried, in_trial), (_, size, in_fit) = model.phases
    assert [phase[0] for phase in model.phases] == [False] * trials + [True]
    assert tried == size == SIZE
    assert max(in_fit) <= max(in_trial)
    assert len(in_fit) == BATCHES
    if "schedule" not in SETTINGS[name] and trials > 1:
        assert set(in_fit) == set(in_trial)
