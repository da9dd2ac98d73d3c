"""ActivationSensitivity in two processes with different data: both report what all of it shows."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_actprune import ActivationSensitivity, measure_sensitivity
from tests.support.helpers import Net, loader, trainer

GRID: dict[str, Any] = {"sparsities": [0.5], "bits": [None, 4]}


class Notes(pl.Callback):
    """Writes down what this process reports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        [callback] = [callback for callback in trainer.callbacks if isinstance(callback, ActivationSensitivity)]
        if callback.result is not None:
            (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(callback.result.to_dict()["rows"]))


class Two(Net):
    """Trained on two samples, one for each process, whichever that is."""

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(2, 1)


@pytest.mark.slow
def test_both_processes_report_what_all_their_data_shows(tmp_path):
    model = Two()
    expected = copy.deepcopy(model)
    options = {"strategy": "ddp_spawn", "devices": 2, "num_sanity_val_steps": 0, "default_root_dir": tmp_path}
    callback = ActivationSensitivity(**GRID, batches=1, verbose=False)
    trainer(callback, Notes(tmp_path), limit_val_batches=0, **options).fit(model)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second

    def loss(batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(expected(batch[0]), batch[1])

    alone = measure_sensitivity(expected, loss, model.train_dataloader(), **GRID)
    for row, other in zip(first, alone.to_dict()["rows"], strict=True):
        assert row == pytest.approx(other)
