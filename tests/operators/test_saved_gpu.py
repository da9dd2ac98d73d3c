"""SavedTensorCompression on a GPU: fused attention and convolutions take what they get back, the allocator agrees."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_actprune.operators.saved import SavedTensorCompression
from tests.support.compression import Runs, activation, gradients, typical

pytestmark = pytest.mark.gpu

SHAPE = (4, 256, 384)
HEADS = 6


def attention(x: Tensor, qkv: Tensor) -> Tensor:
    q, k, v = (x @ qkv).reshape(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def made(run=attention, *parameters: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return Runs(run, *(parameters or ((384, 3 * 384),))).to("cuda", dtype)


def assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    rounding = 4 * torch.finfo(expected[0].dtype).eps
    for gradient, exact in zip(actual, expected, strict=True):
        assert (gradient - exact).norm() <= (3 * typical(8) + rounding) * exact.norm()


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
def test_attention_takes_q_k_and_v_as_they_come_back(backend: str):
    model, x = made(), activation(*SHAPE, dtype=torch.bfloat16, device="cuda")
    with sdpa_kernel(getattr(SDPBackend, backend)):
        expected = gradients(model, x, lambda y: y.float().square().sum())
        with SavedTensorCompression(model, min_values=256) as saving:
            actual = gradients(model, x, lambda y: y.float().square().sum())
    if backend == "MATH":  # saves products, in shapes of its own
        assert len(saving.rows) > 1
    else:
        assert [row.count for row in saving.rows if row.shape == (4, HEADS, 256, 64)] == [4]
    assert_close(actual, expected)


def test_the_allocator_sees_what_is_counted():
    """What no row counts is the same with and without: the sum, logsumexp, the random state."""
    model, x = made(), activation(*SHAPE, dtype=torch.bfloat16, device="cuda")

    def left_allocated(saving: SavedTensorCompression | None) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        y = model(x * 1).sum()  # which keeps nothing of what it sums up
        torch.cuda.synchronize()
        grown = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
        del y
        return grown

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        left_allocated(None)
        dense = left_allocated(None)
        with SavedTensorCompression(model) as saving:
            left_allocated(saving)
            saving.reset()
            packed = left_allocated(saving)
    dense_bytes = sum(row.dense_bytes for row in saving.rows)
    assert dense_bytes == 5 * x.nbytes  # x, q, k and v, and the result
    assert dense - packed == dense_bytes - sum(row.stored_bytes for row in saving.rows)


def test_backward_on_another_thread_and_with_values_moved_to_the_host():
    model, x = made(), activation(*SHAPE, dtype=torch.bfloat16, device="cuda")
    with SavedTensorCompression(model):
        expected = gradients(model, x)
        with save_on_cpu(pin_memory=True):
            actual = gradients(model, x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
