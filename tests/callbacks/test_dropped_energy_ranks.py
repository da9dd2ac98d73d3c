"""Keep(max_dropped_energy=...) in two processes with different data: both decide alike, by all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_actprune import ActivationPruning, Keep
from tests.support.helpers import BATCHES, FEATURES, Net, trainer

LIMITS = {"low": 0.1, "high": 0.3}
"""By the layer's name: below and above the share of all samples, which is half of that of the spread ones, .41."""


class Forked(Net):
    """Two layers that read the same input: every other sample has all its energy in one of two blocks."""

    def make(self) -> None:
        self.low, self.high = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.layer_norm(x, (FEATURES,))
        return self.head(nn.functional.gelu(self.low(x)) + nn.functional.gelu(self.high(x))).mean(1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(), self.batch_size)  # of which Lightning gives each process every other one


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 8, FEATURES, generator=generator)
    x[::2, :, FEATURES // 2 :] *= 1e-3
    return TensorDataset(x, torch.randint(4, (16,), generator=generator))


def pruning() -> list[ActivationPruning]:
    return [
        ActivationPruning(rules={name: Keep(4, 0.5, max_dropped_energy=limit), "*": None})
        for name, limit in LIMITS.items()
    ]


class Notes(pl.Callback):
    """Writes down what this process has decided, and by what shares."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: Forked) -> None:
        callbacks = [callback for callback in trainer.callbacks if isinstance(callback, ActivationPruning)]
        spread = {name: share for callback in callbacks for name, share in callback.spread.items()}
        noted = {"spread": spread, "low": pl_module.low.sparsity, "high": pl_module.high.sparsity}
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(noted))


@pytest.mark.parametrize(("first", "expected"), [(0, []), (1, ["low", "high"])])
def test_alone_either_process_would_decide_differently(first, expected):
    callbacks = pruning()
    trainer(*callbacks).fit(Forked(), DataLoader(Subset(samples(), range(first, 16, 2)), batch_size=4))
    assert [name for callback in callbacks for name in callback.spread] == expected


@pytest.mark.slow
def test_both_processes_decide_alike_by_the_energy_of_all_their_data(tmp_path):
    options = {"strategy": "ddp_spawn", "devices": 2, "num_sanity_val_steps": 0, "default_root_dir": tmp_path}
    trainer(*pruning(), Notes(tmp_path), **options).fit(Forked(batch_size=BATCHES))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert (first["low"], first["high"]) == (0.0, 0.5)
    [(name, share)] = first["spread"].items()
    assert name == "low"
    assert LIMITS["low"] < share < LIMITS["high"]
