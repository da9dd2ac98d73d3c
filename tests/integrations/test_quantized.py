"""Frozen layers whose weights bitsandbytes or torchao stores in few bits, with adapters that train."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, convert
from lightning_actprune.analysis.memory import SavedTensorMeter

pytestmark = pytest.mark.foreign
WIDTH, ROWS = 128, 1024


class Block(nn.Module):
    """An MLP whose wide layers are frozen, beside an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.GELU()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)
        for layer in (self.norm, self.fc1, self.fc2):
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.fc2(self.act(self.fc1(y))) + self.up(self.down(y))


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[Block() for _ in range(3)]).to(torch.bfloat16)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch.to(torch.bfloat16)).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def quantize_by_bitsandbytes(kind: str, model: nn.Module) -> None:
    classes = pytest.importorskip("bitsandbytes").nn
    for block in model.children():
        for name in ("fc1", "fc2"):
            layer = block.get_submodule(name)
            sizes = layer.in_features, layer.out_features
            options = {"compute_dtype": torch.bfloat16} if kind == "Linear4bit" else {"has_fp16_weights": False}
            quantized = getattr(classes, kind)(*sizes, **options)
            quantized.load_state_dict(layer.state_dict())
            setattr(block, name, quantized.requires_grad_(False).to("cpu"))


def quantize_by_torchao(kind: str, model: nn.Module) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    wide = lambda module, name: isinstance(module, nn.Linear) and "fc" in name  # noqa: E731
    quantization.quantize_(model, getattr(quantization, kind)(), filter_fn=wide)
    model.requires_grad_(False)
    for block in model.children():
        block.down.requires_grad_(True)
        block.up.requires_grad_(True)


@pytest.mark.parametrize(
    ("quantize", "kind"),
    [
        (quantize_by_bitsandbytes, "Linear4bit"),
        (quantize_by_bitsandbytes, "Linear8bitLt"),
        (quantize_by_torchao, "Int8WeightOnlyConfig"),
    ],
)
def test_frozen_layers_keep_nothing_and_the_rest_is_packed(quantize: Any, kind: str) -> None:
    model = Net().blocks
    quantize(kind, model)
    x = torch.randn(4, ROWS // 4, WIDTH, dtype=torch.bfloat16).requires_grad_()
    found = []
    for preset in (None, "balanced"):
        report = None if preset is None else convert(model, preset)
        with SavedTensorMeter(model, x) as meter:
            loss = model(x).float().square().mean()
        loss.backward()
        adapters = [p.grad.flatten().float() for p in model.parameters() if p.requires_grad]
        found.append((loss.item(), torch.cat(adapters), meter.report()))
        model.zero_grad()
    (dense_loss, dense_grad, dense), (ours_loss, ours_grad, ours) = found
    assert ours_loss == pytest.approx(dense_loss, rel=1e-5)
    assert torch.nn.functional.cosine_similarity(ours_grad, dense_grad, dim=0) > 0.99
    weights = 0 if quantize is quantize_by_bitsandbytes else 6 * 256 * WIDTH * 2  # which torchao keeps in bf16, too
    assert weights <= dense.stored_bytes - ours.dense_bytes <= 1.01 * weights
    assert ours.stored_bytes - weights < 0.45 * ours.dense_bytes
    assert not any("fc" in row.fqn for row in ours.rows)
    assert report is not None
    reasons = {layer.reason for layer in report.skipped if "fc" in layer.fqn}
    assert reasons <= {"its weight is frozen and quantized, so it keeps no input"}


def test_lightnings_plugin() -> None:
    pytest.importorskip("bitsandbytes")
    from lightning.pytorch.plugins.precision import BitsandbytesPrecision

    adapters = {f"blocks.{block}.{name}" for block in range(3) for name in ("down", "up")}
    monitor, pruning = ActivationMemoryMonitor(measure_batch=2, verbose=0), ActivationPruning("balanced", verbose=0)
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
    trainer = L.Trainer(accelerator="cpu", max_steps=4, callbacks=[pruning, monitor], **silent)
    # The Trainer takes this plugin on GPUs only; bitsandbytes itself runs on CPUs, too.
    trainer.strategy._precision_plugin = BitsandbytesPrecision("nf4", torch.bfloat16, adapters)
    model = Net()
    trainer.fit(model, DataLoader(torch.randn(64, 64, WIDTH), batch_size=16))
    assert {layer.kind for layer in pruning.skipped if "fc" in layer.fqn} == {"_NF4Linear"}
    assert [layer.fqn for layer in pruning.converted if "down" in layer.fqn] == [f"blocks.{n}.down" for n in range(3)]
    assert monitor.report.stored_bytes < 0.45 * monitor.report.dense_bytes
    assert model.blocks[0].fc1.weight.dtype == torch.uint8
