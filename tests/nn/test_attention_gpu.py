"""Attention on a GPU: the allocator measures what the meter announces, and results are torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune.footprint import SavedTensorMeter
from tests import oracle
from tests.attention import pruned_copy

pytestmark = pytest.mark.gpu

T, N, E = 512, 16, 512


def run(model: nn.Module, x: Tensor, autocast: bool) -> Tensor:
    """Return the output, in a region of autocast of its own: the copies of weights are made anew."""
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        return model(x)


def kept_bytes(model: nn.Module, x: Tensor, autocast: bool) -> int:
    """Return by how much the requested bytes grow over a forward, after one that sets everything up."""
    requested = lambda: torch.cuda.memory_stats()["requested_bytes.all.current"]  # noqa: E731
    run(model, x, autocast).sum().backward()
    model.zero_grad(set_to_none=True)
    before = requested()
    y = run(model, x, autocast)
    grown = requested() - before
    del y
    return grown


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_allocator_measures_what_is_announced(autocast: bool, batch_first: bool):
    layer = nn.TransformerEncoderLayer(E, 8, 4 * E, dropout=0.0, batch_first=batch_first, activation="gelu")
    dense = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda()
    pruned = pruned_copy(dense, block_size=32)
    x = torch.randn((N, T, E) if batch_first else (T, N, E), device="cuda")
    with SavedTensorMeter(pruned, x) as meter:
        found = run(pruned, x, autocast)
    wanted = run(dense, x, autocast)
    assert oracle.relative_error(found.detach(), wanted.detach()) < (1e-2 if autocast else 1e-3)
    del found, wanted
    report, saved = meter.report(), kept_bytes(dense, x, autocast) - kept_bytes(pruned, x, autocast)
    assert saved == pytest.approx(report.saved_bytes, rel=0.02)
    assert all(row.stored_bytes == row.accounted_bytes for row in report.rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_are_those_of_the_reference(dtype: torch.dtype):
    from lightning_actprune.ops.dispatch import force_backend

    model = pruned_copy(nn.MultiheadAttention(E, 8, dtype=dtype).cuda(), block_size=32)
    query, key = (torch.randn(length, N, E, dtype=dtype, device="cuda") for length in (T, 300))
    grads = []
    for backend in (None, "reference"):
        model.zero_grad()
        with force_backend(backend):
            model(query, key, key, need_weights=False)[0].square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for mine, its in zip(*grads, strict=True):
        assert oracle.relative_error(mine, its) < (2e-2 if dtype == torch.bfloat16 else 2e-3)
