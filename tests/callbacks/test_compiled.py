"""Fits of compiled models: layers are marked, and what the compiler keeps is packed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning
from lightning_actprune.callbacks import first_batch
from lightning_actprune.callbacks.memory import _find_compiled_rows
from lightning_actprune.codec.private import joint_passes
from tests.support.helpers import BATCHES, assert_plain, fit
from tests.support.stack import Residual

pytestmark = pytest.mark.integration


class Wide(pl.LightningModule):
    """Residual blocks, wide enough to be packed; is validated by batches of another size."""

    def __init__(self, blocks: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Sequential(*(Residual() for _ in range(blocks))), nn.Linear(64, 4)
        self.scores = list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).mean(1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        assert not torch.is_grad_enabled()
        self.scores.append(self(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Tensor]:
        draws = torch.Generator().manual_seed(1)
        return DataLoader([torch.randn(32, 64, 64, generator=draws) for _ in range(BATCHES)], batch_size=None)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader([torch.ones(16, 64, 64)], batch_size=None)


def installed() -> tuple[object, object]:
    places = joint_passes()
    return places.inductor.joint_custom_post_pass, places.functorch.joint_custom_pass


def losses_of(
    model: pl.LightningModule, *callbacks: pl.Callback, backend: str | None = "aot_eager", **options: Any
) -> list[Tensor]:
    """Return the losses of a fit, of a model that is compiled as a whole."""
    torch._dynamo.reset()
    losses: list[Tensor] = []
    note = LambdaCallback(on_train_batch_end=lambda _, __, outputs, *___: losses.append(outputs["loss"].clone()))
    whole = model if backend is None else torch.compile(model, backend=backend)
    fit(whole, note, *callbacks, **({"limit_val_batches": 0} | options))
    return losses


@pytest.fixture(scope="module")
def eager() -> Callable[[int], tuple[list[Tensor], int]]:
    """Return the losses and the bytes kept of a dense fit that is not compiled, by the number of blocks."""

    @functools.cache
    def run(blocks: int) -> tuple[list[Tensor], int]:
        losses = losses_of(Wide(blocks), monitor := ActivationMemoryMonitor(2), backend=None)
        return losses, monitor.report.stored_bytes

    return run


def assert_learned_alike(losses: list[Tensor], right: list[Tensor]) -> None:
    """The first loss is the same, and later ones are off by less than a twentieth of what was learned."""
    torch.testing.assert_close(losses[0], right[0], rtol=1e-5, atol=0)
    learned = right[0] - right[-1]
    assert learned > 0.5 * right[0]
    assert all((one - other).abs() < learned / 20 for one, other in zip(losses, right, strict=True))


def test_a_compiled_fit_packs_and_learns_as_the_dense_one(eager, caplog):
    caplog.set_level("INFO")
    before, model, (right, dense_bytes) = installed(), Wide(), eager(1)
    caplog.clear()
    pruning, monitor = ActivationPruning("balanced", verbose=2), ActivationMemoryMonitor(2, verbose=2)
    losses = losses_of(model, pruning, monitor)
    assert_learned_alike(losses, right)
    assert {row.how for row in pruning.compiled} >= {"packed"}
    stored = sum(row.stored_bytes for row in pruning.compiled)
    assert 0 < stored < 0.3 * sum(row.dense_bytes for row in pruning.compiled)
    assert monitor.report.stored_bytes < 0.5 * dense_bytes
    assert caplog.text.count("that backward reads in compiled code") == 1
    assert monitor.report.describe_sizes()[0] in caplog.text
    table = caplog.text[caplog.text.index("Kept for backward") :].splitlines()
    packed = [row for row in pruning.compiled if row.how == "packed"]
    assert all(any(row.name in line and f"{row.bits} bits" in line for line in table) for row in packed)
    assert 0 < monitor.report.compiled_bytes <= monitor.report.stored_bytes
    metrics = {name: float(value) for name, value in model.trainer.callback_metrics.items() if "actprune" in name}
    assert metrics == {"actprune/stored_mib": pytest.approx(monitor.report.stored_bytes / 2**20)}
    rows, told = pruning._compiled.rows, pruning.compiled
    assert copy.deepcopy(pruning).compiled == told
    listed = told[: len(told) // told.count(told[0])]
    assert _find_compiled_rows(model.trainer, monitor.report) == listed != []
    rows.extend(told)  # compiled again
    assert _find_compiled_rows(model.trainer, monitor.report) == listed
    rows.append(told[0])  # of another batch size
    assert _find_compiled_rows(model.trainer, monitor.report) == []
    assert installed() == before
    assert_plain(model)


@pytest.mark.parametrize("settings", [{"preset": "balanced"}, {"max_error": 0.005}])
def test_accumulation_and_validation_in_between(settings, monkeypatch):
    """Two epochs, of two batches a step; bits are chosen before the compiler sees them, and measured once again."""
    monkeypatch.setattr(first_batch, "points_of", lambda _: [1])
    options = {"max_epochs": 2, "accumulate_grad_batches": 2, "num_sanity_val_steps": 1, "limit_val_batches": 1.0}
    pruning, ours, dense = ActivationPruning(**settings, verbose=0), Wide(), Wide()
    losses, right = losses_of(ours, pruning, **options), losses_of(dense, backend=None, **options)
    assert (len(losses), len(ours.scores)) == (2 * BATCHES, 3)
    torch.testing.assert_close(losses[:2], right[:2], rtol=1e-5, atol=0)
    torch.testing.assert_close(losses, right, rtol=0, atol=0.05 * right[0].item())
    torch.testing.assert_close(ours.scores, dense.scores, rtol=0, atol=0.05 * dense.scores[0].item())
    assert "packed" in {row.how for row in pruning.compiled}
    assert pruning.state_dict().get("again") == (1 if pruning.max_error else None)
    chosen = {layer.keep.bits for layer in pruning.converted if layer.fqn == "head"}
    assert chosen <= {row.bits for row in pruning.compiled if row.name == "head"}


@pytest.mark.parametrize(("preset", "part"), [("max", "all"), ("recompute", "blocks")])
def test_blocks_of_a_compiled_fit_keep_little_between_them(eager, part: str, preset: str):
    model, (_, dense_bytes) = Wide(4), eager(4)
    if part == "blocks":
        for block in model.body:
            block.compile(backend="aot_eager")
    pruning, monitor = ActivationPruning(preset, verbose=0), ActivationMemoryMonitor(2)
    losses = losses_of(model, pruning, monitor, backend="aot_eager" if part == "all" else None)
    assert_learned_alike(losses, losses_of(Wide(4), ActivationPruning(preset, verbose=0), backend=None))
    inputs = [row for row in pruning.compiled if row.shape == (32, 64, 64) and row.how == "packed"]
    # The first block is given the batch, which is there anyway; the others are compiled once.
    assert len([row for row in inputs if row.name.startswith("body")]) >= (1 if part == "blocks" else 3)
    assert "uncompressed" not in {row.how for row in pruning.compiled if row.shape == (32, 64, 256)}
    assert monitor.report.stored_bytes < {"max": 0.3, "recompute": 0.2}[preset] * dense_bytes


def test_a_compiler_without_joint_graphs_is_warned_of_and_layers_pack_by_themselves(eager):
    ours, pruning, (right, dense_bytes) = ActivationMemoryMonitor(2), ActivationPruning(verbose=0), eager(1)
    with pytest.warns(UserWarning, match="runs no pass over the graphs .*HINT"):
        losses = losses_of(Wide(), pruning, ours, backend="eager")
    assert_learned_alike(losses, right)
    assert not pruning.compiled
    assert ours.report.stored_bytes < 0.5 * dense_bytes
