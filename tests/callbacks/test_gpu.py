"""The callbacks on a GPU: what is announced is what the allocator measures."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning
from lightning_actprune.analysis.memory import MemoryReport

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
        x = batch
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def fit(precision: str, *callbacks: L.Callback) -> tuple[MemoryReport, float]:
    torch.manual_seed(0)
    model, monitor = Mlp(), ActivationMemoryMonitor(verbose=False)
    data = DataLoader(torch.randn(96, 196, 256), batch_size=16)
    trainer = L.Trainer(
        max_epochs=1, accelerator="gpu", devices=1, precision=precision, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[*callbacks, monitor],
    )  # fmt: skip
    trainer.fit(model, data)
    assert monitor.report is not None
    return monitor.report, float(sum(p.detach().square().sum() for p in model.parameters()))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_measured_saving_is_the_announced_one(precision):
    dense, _ = fit(precision)
    pruned, norm = fit(precision, ActivationPruning(sparsity=0.6, block_size=32, verbose=False))
    measured = dense.measured_activation_bytes - pruned.measured_activation_bytes
    assert len(pruned.rows) == 16
    assert [row.stored_bytes for row in pruned.rows] == [row.accounted_bytes for row in pruned.rows]
    # Under autocast the dense layers also keep a 16-bit copy of each weight, which the pruned ones do not.
    assert pruned.dense_bytes == dense.stored_bytes
    for report in (dense, pruned):
        assert report.measured_activation_bytes == pytest.approx(report.stored_bytes, rel=0.02)
    assert measured == pytest.approx(pruned.saved_bytes, rel=0.02)
    assert pruned.measured_peak_bytes < dense.measured_peak_bytes
    assert norm == norm


def test_a_training_step_waits_for_nothing():
    """Every launch is asynchronous: no value is read back from the GPU inside a step."""
    from lightning_actprune import convert

    model = Mlp().cuda()
    convert(model, sparsity=0.6)
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    x = torch.randn(16, 196, 256, device="cuda")
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            model.training_step(x, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(p).all() for p in model.parameters())
