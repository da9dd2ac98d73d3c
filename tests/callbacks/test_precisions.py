"""Precisions of the Trainer in one process: sparsity 0 is the dense fit, and the scaler skips the steps it skips."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_actprune import ActivationPruning, Keep
from tests.support.helpers import Gradients, Net, assert_plain, trainer

ACCELERATORS = pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
WIDTH = 256


@ACCELERATORS
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-mixed", "bf16-mixed", "64-true"])
def test_sparsity_0_is_the_dense_fit(precision: str, accelerator: str):
    """With accumulation and clipping; on CPU Lightning takes "16-mixed" for "bf16-mixed" and says so."""
    found = []
    for pruning in ([], [ActivationPruning(sparsity=0.0, verbose=False)]):
        torch.manual_seed(0)
        model, noted = Net(), Gradients()
        options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
        trainer(*pruning, noted, accelerator=accelerator, precision=precision, **options).fit(model)
        found.append([noted.seen, model.state_dict()])
        assert_plain(model)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


class Mixed(pl.LightningModule):
    """Batches of which the second and the last but one hold an Inf, and a scale that starts too high."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
        self.before: dict[str, Tensor] = {}
        self.seen: list[tuple[float, bool]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).float().mean()  # of an Inf tanh makes a one: only the weight's gradient shows it

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.before = copy.deepcopy(self.state_dict())

    def on_train_batch_end(self, *args: Any) -> None:
        skipped = all(torch.equal(value, self.before[name]) for name, value in self.state_dict().items())
        self.seen.append((self.trainer.precision_plugin.scaler.get_scale(), skipped))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-6)

    def train_dataloader(self) -> DataLoader[Any]:
        # One row, so that no sum overflows in fp16 that does not in fp32.
        x = torch.rand(10, WIDTH, generator=torch.Generator().manual_seed(1))
        x[1, 3] = math.inf
        x[8, 200] = -math.inf
        return DataLoader(x, batch_size=1)


@ACCELERATORS
def test_16_mixed_decides_as_the_dense_model(accelerator: str):
    seen = []
    for callbacks in ([], [ActivationPruning(rules={"*": Keep(sparsity=0.9, block_size=16)}, skip_retained=False)]):
        torch.manual_seed(0)
        model = Mixed()
        device = {"cpu": "cpu", "gpu": "cuda"}[accelerator]
        plugin = MixedPrecision("16-mixed", device, torch.amp.GradScaler(device, init_scale=2.0**20))
        trainer(*callbacks, accelerator=accelerator, plugins=[plugin]).fit(model)
        seen.append(model.seen)
    assert seen[1] == seen[0]
    skipped = [skip for _, skip in seen[1]]
    assert skipped == [True, True, True, False, False, False, False, False, True, False]
    # d loss / d output is a quarter of the scale, and 2^16 is no fp16 any more.
    scales = [2.0**20, *(scale for scale, _ in seen[1])]
    assert [after / before for before, after in pairwise(scales)] == [0.5 if skip else 1.0 for skip in skipped]
