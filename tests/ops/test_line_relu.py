"""Batch normalisation and the ReLU after it in the same passes: bit for bit what the two are one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lightning_actprune.ops.dispatch import force_backend
from lightning_actprune.ops.line_norm import LineNormSetting, few_bit_batch_norm, few_bit_batch_norm_relu
from lightning_actprune.ops.line_plan import Running
from tests.attention import saved_tensors
from tests.kernels.workload import launches

KINDS = {
    "lines": ((3, 10, 7, 7), False, 32, torch.float32),
    "lines-whole": ((2, 5, 8, 16), False, 32, torch.float16),
    "lines-24": ((4, 3, 5, 5), False, 24, torch.float32),
    "one": ((1, 3, 5, 9), False, 20, torch.float32),
    "last": ((3, 64, 5, 3), True, 32, torch.float16),
    "last-bfloat16": ((2, 32, 3, 3), True, 16, torch.bfloat16),
    "last-odd": ((3, 40, 5, 3), True, 32, torch.float32),
    "last-21": ((2, 21, 5, 3), True, 128, torch.float16),
    "rows": ((61, 33), False, 32, torch.float32),
    "few": ((3, 2), False, 32, torch.float32),
}
"""Shape, channels last, block size and type."""
each_kind = pytest.mark.parametrize("kind", list(KINDS))


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with force_backend("triton"):
        yield


def inputs(kind: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    shape, last, _, dtype = KINDS[kind]
    x = 2 * torch.randn(shape) + 1
    x = x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x
    weight, bias = torch.randn(2, shape[1]).unbind()
    return tuple(t.to(device).clone().requires_grad_() for t in (x.to(dtype), weight, bias))


def setting(kind: str, value_format: str = "int4") -> LineNormSetting:
    return LineNormSetting(0, 1e-5, KINDS[kind][2], value_format)


def both(kind: str, device: torch.device, value_format: str = "int4") -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Return inputs, and the outputs of one function and of two."""
    given, chosen = inputs(kind, device), setting(kind, value_format)
    fused = few_bit_batch_norm_relu(*given, chosen, given[0].dtype)
    assert fused is not None
    return given, fused, torch.relu(few_bit_batch_norm(*given, chosen, given[0].dtype))


@each_kind
@pytest.mark.parametrize("value_format", ["int4", "int3", "fp8"])
def test_both_at_once_are_one_after_the_other(kernel_device, kind, value_format):
    given, fused, two = both(kind, kernel_device, value_format)
    assert fused.dtype == two.dtype
    assert fused.stride() == two.stride()
    assert torch.equal(fused, two)
    assert (fused == 0).any()
    grad = torch.randn_like(two)
    grads = (torch.autograd.grad(y, given, grad) for y in (fused, two))
    for actual, right in zip(*grads, strict=True):
        assert actual.dtype == right.dtype
        assert torch.equal(actual, right)


@each_kind
def test_a_bit_more_is_kept(kernel_device, kind):
    given, chosen = inputs(kind, kernel_device), setting(kind)
    kept = []
    for function in (few_bit_batch_norm, few_bit_batch_norm_relu):
        with saved_tensors() as saved:
            function(*given, chosen, given[0].dtype)
        kept.append(sum(t.nbytes for t in saved))
    count = given[0].numel()
    block = min(chosen.block_size, count)
    # Whole bytes for each block, from a multiple of 16 bytes on.
    bits = -(-count // block) * -(-block // 8)
    assert bits <= kept[1] - kept[0] < bits + 16


def test_the_same_launches_do_both(kernel_device):
    with launches() as fused:
        given = inputs("last", kernel_device)
        y = few_bit_batch_norm_relu(*given, setting("last"), torch.float16)
        torch.autograd.grad(y, given, torch.ones_like(y))
    with launches() as alone:
        y = few_bit_batch_norm(*given, setting("last"), torch.float16)
        torch.autograd.grad(y, given, torch.ones_like(y))
    assert fused == alone


@pytest.mark.parametrize("kind", ["lines", "lines-24", "last", "last-21"])
def test_gradients_of_any_kind(kernel_device, kind):
    given, y, _ = both(kind, kernel_device)
    dense = torch.randn_like(y)
    start = torch.empty(dense.numel() + 1, dtype=dense.dtype, device=kernel_device)[1:]
    moved = start.as_strided(dense.shape, dense.stride(), start.storage_offset()).copy_(dense)
    others = {"turned": dense.transpose(2, 3).contiguous().transpose(2, 3), "shifted": moved}
    right = torch.autograd.grad(y, given, dense, retain_graph=True)
    for name, grad in others.items():
        found = torch.autograd.grad(y, given, grad, retain_graph=True)
        assert name == "shifted" or all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
        torch.testing.assert_close(found, right)  # values that are not aligned are added in another order
    batched = torch.autograd.grad(y, given, torch.stack([dense, dense]), is_grads_batched=True)
    assert all(torch.equal(a[0], b) for a, b in zip(batched, right, strict=True))
    torch.testing.assert_close([a[1] for a in batched], list(right))


def test_what_is_not_finite(kernel_device):
    """NaN outputs stay NaN and pass gradients on; a gradient that is NaN where the output is zero does not pass."""
    given = inputs("lines", kernel_device)
    with torch.no_grad():
        given[0][1, 4, 2, 1] = float("nan")
    fused = few_bit_batch_norm_relu(*given, setting("lines"), torch.float32)
    two = torch.relu(few_bit_batch_norm(*given, setting("lines"), torch.float32))
    assert fused[:, 4].isnan().all()
    assert torch.equal(fused.isnan(), two.isnan())
    grad = torch.where(two == 0, float("nan"), torch.randn_like(two))
    grads = (torch.autograd.grad(y, given, grad) for y in (fused, two))
    for actual, right in zip(*grads, strict=True):
        torch.testing.assert_close(actual, right, rtol=0, atol=0, equal_nan=True)
    assert actual.isfinite().any()


def test_running_statistics_move_too(kernel_device):
    given, found = inputs("last-odd", kernel_device), []
    for function in (few_bit_batch_norm, few_bit_batch_norm_relu):
        moved = torch.zeros(40, device=kernel_device), torch.ones(40, device=kernel_device)
        batches = torch.zeros((), dtype=torch.int64, device=kernel_device)
        function(*given, setting("last-odd"), torch.float32, Running(*moved, batches, 0.1))
        found.append((*moved, batches))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_nothing_is_done_where_no_kernel_does_it(kernel_device):
    given = inputs("lines", kernel_device)
    mean, var = torch.zeros(10, device=kernel_device), torch.ones(10, device=kernel_device)
    assert few_bit_batch_norm_relu(*given, setting("lines"), torch.float32, Running(mean, var, None, None)) is None
    with force_backend("reference"):
        assert few_bit_batch_norm_relu(*given, setting("lines"), torch.float32, Running(mean, var, None, 0.1)) is None
    assert not mean.any()
