"""The callbacks on a GPU: the allocator measures what is announced, and a step waits for nothing."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning
from lightning_actprune.analysis.memory import MemoryReport
from tests.support.helpers import trainer

pytestmark = pytest.mark.gpu


class Mlp(L.LightningModule):
    """Eight residual blocks of the kind that pruning is for."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(8)
        )

    def training_step(self, batch, batch_idx):
        for block in self.blocks:
            batch = batch + block(batch)
        return batch.square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), capturable=True)


def report_of(precision: str, *callbacks: L.Callback) -> MemoryReport:
    torch.manual_seed(0)
    monitor, data = ActivationMemoryMonitor(verbose=False), DataLoader(torch.randn(96, 196, 256), batch_size=16)
    trainer(*callbacks, monitor, accelerator="gpu", precision=precision).fit(Mlp(), data)
    return monitor.report


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_measured_saving_is_the_announced_one(precision):
    dense = report_of(precision)
    pruned = report_of(precision, ActivationPruning(sparsity=0.6, block_size=32, verbose=False))
    assert len(pruned.rows) == 16
    assert [row.stored_bytes for row in pruned.rows] == [row.accounted_bytes for row in pruned.rows]
    # Under autocast the dense layers also keep a 16-bit copy of each weight, which the pruned ones do not.
    assert pruned.dense_bytes == dense.stored_bytes
    for report in (dense, pruned):
        assert report.measured_activation_bytes == pytest.approx(report.stored_bytes, rel=0.02)
    measured = dense.measured_activation_bytes - pruned.measured_activation_bytes
    assert measured == pytest.approx(pruned.saved_bytes, rel=0.02)
    assert pruned.measured_activation_bytes < pruned.measured_peak_bytes < dense.measured_peak_bytes
