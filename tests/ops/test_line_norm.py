"""Batch and group normalisation that keep their input in few bits: exact outputs, gradients from what is stored."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_actprune.ops import formats
from lightning_actprune.ops.line_norm import LineNormSetting, few_bit_line_norm
from lightning_actprune.ops.normalize_lines import in_memory
from tests import oracle
from tests.attention import saved_tensors

FORMATS = [name for name in formats.FORMATS if name != "same"]
EPS = 1e-5
FP32 = torch.finfo(torch.float32).eps

KINDS = {
    "batch": ((3, 10, 7, 7), 0, False, 32, torch.float32),
    "batch-whole": ((2, 5, 8, 16), 0, False, 32, torch.bfloat16),
    "batch-one": ((1, 3, 5, 9), 0, False, 16, torch.float32),
    "last": ((3, 64, 5, 3), 0, True, 32, torch.float32),
    "last-odd": ((3, 40, 5, 3), 0, True, 32, torch.bfloat16),
    "last-24": ((2, 27, 3, 3, 2), 0, True, 24, torch.float16),
    "rows": ((61, 33), 0, False, 32, torch.float32),
    "sequence": ((4, 6, 50), 0, False, 32, torch.float32),
    "group": ((3, 12, 7, 7), 3, False, 32, torch.float32),
    "group-last": ((2, 12, 4, 8), 12, True, 32, torch.bfloat16),
    "group-rows": ((5, 60), 4, False, 32, torch.float32),
}
"""Shape, groups, channels last, block size and type."""
each_kind = pytest.mark.parametrize("kind", list(KINDS))


def inputs(kind: str, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``x`` whose means differ and are not zero, weight and bias."""
    shape, _, last, _, dtype = KINDS[kind]
    x = 2 * torch.randn(shape) + torch.randn(shape[1]).view(-1, *[1] * (len(shape) - 2))
    if last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    parameters = 1 + torch.randn(2, shape[1])
    return tuple(t.to(device).requires_grad_() for t in (x.to(dtype), *parameters))


def norm(x: Tensor, weight, bias, kind: str, value_format: str = "int4", dtype: torch.dtype | None = None) -> Tensor:
    _, groups, _, block_size, _ = KINDS[kind]
    return few_bit_line_norm(x, weight, bias, LineNormSetting(groups, EPS, block_size, value_format), dtype or x.dtype)


def exact(x: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Return the normalised ``x [N, C, ...]``, ``mean`` and ``rstd`` in fp64 on the CPU, and what is reduced.

    That is of ``x [N, G, C/G, ...]`` for groups.
    """
    wide = x.detach().double().cpu()
    dims = [0, *range(2, x.dim())]
    if groups:
        wide = wide.reshape(x.shape[0], groups, -1)
        dims = [2]
    mean = wide.mean(dims, keepdim=True)
    rstd = ((wide - mean).square().mean(dims, keepdim=True) + EPS).rsqrt()
    return ((wide - mean) * rstd).view(x.shape), mean, rstd, dims


def gradients(grad_y: Tensor, hat: Tensor, rstd: Tensor, weight: Tensor, groups: int, dims) -> tuple[Tensor, ...]:
    """Return the gradients of input, weight and bias in fp64, as the module docstring has them."""
    g, each = grad_y.double().cpu(), [0, *range(2, grad_y.dim())]
    along = g * weight.detach().double().cpu().view(-1, *[1] * (g.dim() - 2))
    shape = (g.shape[0], groups, -1) if groups else g.shape
    wide, hats = along.reshape(shape), hat.reshape(shape)
    grad_x = wide - wide.mean(dims, keepdim=True) - hats * (wide * hats).mean(dims, keepdim=True)
    return (grad_x * rstd).reshape(g.shape), (g * hat).sum(each), g.sum(each)


def read(values: Tensor, like: Tensor, block_size: int, value_format: str) -> Tensor:
    """Return what is stored, in fp64, laid out as ``like``."""
    wide = formats.dequantize(values.cpu(), block_size, value_format, torch.float32).double().flatten()
    out = torch.empty_strided(like.shape, like.stride(), dtype=torch.float64)
    in_memory(out).copy_(wide[: like.numel()])
    return out


STEP = {"int8": 255, "int4": 15, "int3": 7, "int2": 3, "fp8": 16}


@each_kind
@pytest.mark.parametrize("value_format", FORMATS)
def test_output_is_exact_and_gradients_are_those_of_what_is_stored(device, kind, value_format):
    _, groups, _, block_size, dtype = KINDS[kind]
    x, weight, bias = inputs(kind, device)
    with saved_tensors() as saved:
        y, statistics = norm(x, weight, bias, kind, value_format)
    hat, mean, rstd, dims = exact(x, groups)
    w, b = (t.detach().double().cpu().view(-1, *[1] * (x.dim() - 2)) for t in (weight, bias))
    assert y.dtype == dtype
    right = hat * w + b
    # A few roundings of fp32, of numbers as large as x rstd; then one of the output.
    most = float((x.detach().double().cpu().abs().max() + mean.abs().max()) * rstd.max())
    bound = 8 * FP32 * (most * w.abs() + b.abs()) + torch.finfo(dtype).eps * right.abs()
    assert ((y.detach().double().cpu() - right).abs() <= bound).all()
    assert not statistics.requires_grad
    for found, expected in zip(statistics[:2], (mean, rstd), strict=True):
        torch.testing.assert_close(found.double().cpu(), expected.flatten(), rtol=4 * FP32, atol=8 * FP32)
    near = read(saved[0], y, block_size, value_format)
    # Half a step of a block's range: at most that of all, times 32/31 and 9/8 of a scale that is rounded up; the reach
    # of a block far from zero adds as much again. fp8: half of its last place.
    spread = 2 * float(hat.abs().max()) * 32 / 31 * 9 / 8 / STEP[value_format]
    assert (near - hat).abs().max() <= spread
    grad_y = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, weight, bias), grad_y)
    expected = gradients(grad_y, near, rstd, weight, groups, dims)
    assert [g.dtype for g in found] == [dtype, torch.float32, torch.float32]
    for actual, right, tolerance in zip(found, expected, (torch.finfo(dtype).eps, 0, 0), strict=True):
        assert oracle.relative_error(actual, right) <= max(tolerance, 3e-6)


@each_kind
def test_bytes_that_autograd_keeps(kind):
    shape, groups, _, block_size, _ = KINDS[kind]
    x, weight, bias = inputs(kind, "cpu")
    with saved_tensors() as saved:
        norm(x, weight, bias, kind)
    kept = sum(t.nbytes for t in saved if t.data_ptr() != weight.data_ptr())
    row = formats.FORMATS["int4"].row_bytes(block_size, 4)
    sets = shape[0] * groups if groups else shape[1]
    assert kept == math.ceil(math.prod(shape) / block_size) * row + 12 * sets


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "last"])
def test_statistics_far_from_zero(device, last):
    """A mean of a thousand deviations: sums of squares would leave nothing of the variance in fp32."""
    x = 1000 + torch.randn(16, 6, 9, 11)
    x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format).to(device)
    y, statistics = few_bit_line_norm(x.requires_grad_(), None, None, LineNormSetting(0, EPS, 32, "int4"), x.dtype)
    hat, mean, rstd, _ = exact(x, 0)
    unbiased = x.detach().double().cpu().var((0, 2, 3))
    # The mean is rounded to 1000 FP32; values that lie in few tiles of a part are summed as differences.
    torch.testing.assert_close(statistics[0].double().cpu(), mean.flatten(), rtol=2 * FP32, atol=0)
    torch.testing.assert_close(statistics[1].double().cpu(), rstd.flatten(), rtol=64 * FP32, atol=0)
    torch.testing.assert_close(statistics[2].double().cpu(), unbiased, rtol=64 * FP32, atol=0)
    torch.testing.assert_close(y.detach().double().cpu(), hat, rtol=0, atol=2000 * FP32)


def test_only_what_needs_a_gradient_gets_one(device):
    x, weight, bias = inputs("last-odd", device)
    y, _ = norm(x, weight, bias, "last-odd")
    grad_y = torch.randn_like(y)
    full = torch.autograd.grad(y, (x, weight, bias), grad_y)
    for needed in ((True, False, False), (False, True, False), (True, False, True), (False, True, True)):
        given = [t.detach().requires_grad_(wanted) for t, wanted in zip((x, weight, bias), needed, strict=True)]
        norm(*given, "last-odd")[0].backward(grad_y)
        for tensor, wanted, right in zip(given, needed, full, strict=True):
            assert torch.equal(tensor.grad, right) if wanted else tensor.grad is None


@pytest.mark.parametrize("groups", [0, 2])
def test_any_strides(device, groups):
    base = torch.randn(4, 6, 8, 10, device=device)
    weight, bias = (torch.randn(6, device=device, requires_grad=True) for _ in range(2))
    views = {
        "dense": base,
        "last": base.contiguous(memory_format=torch.channels_last),
        "gaps": base[..., ::2],
        "turned": base.transpose(2, 3),
        "expanded": base[:1].expand(4, 6, 8, 10),
        "short": base.flatten(2).transpose(1, 2).contiguous().transpose(1, 2),
    }
    for name, view in views.items():
        x = view.detach().requires_grad_()
        setting = LineNormSetting(groups, EPS, 32, "int8")
        ours, _ = few_bit_line_norm(x, weight, bias, setting, x.dtype)
        if groups:
            torchs = F.group_norm(x, groups, weight, bias, EPS)
        else:
            torchs = F.batch_norm(x, None, None, weight, bias, True, 0.0, EPS)
        torch.testing.assert_close(ours, torchs, rtol=0, atol=1e-5)
        if name in ("dense", "last", "short") and not groups:
            assert ours.stride() == x.stride()
        grad_y = torch.randn(10, *x.shape[:-1], device=device).movedim(0, -1)[..., : x.shape[-1]]
        grad_y = grad_y if grad_y.shape == x.shape else torch.randn_like(x)
        grads = (torch.autograd.grad(y, (x, weight, bias), grad_y) for y in (ours, torchs))
        for actual, right in zip(*grads, strict=True):
            assert actual.shape == right.shape
            assert oracle.relative_error(actual, right) < 0.015, name


def test_a_wider_output_from_the_same_pass(device):
    x, weight, bias = inputs("group-last", device)
    y, _ = norm(x, weight, bias, "group-last", "int8", torch.float32)
    right = F.group_norm(x.float(), 12, weight, bias, EPS)
    torch.testing.assert_close(y, right, rtol=0, atol=1e-5)
    (grad,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert grad.dtype == torch.bfloat16


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["batch", "last", "group"])
def test_what_is_not_finite_reaches_the_gradients_of_its_set(device, value, kind):
    x, weight, bias = inputs(kind, device)
    with torch.no_grad():
        x[1, 4, 2, 1] = value
    y, statistics = norm(x, weight, bias, kind)
    grads = torch.autograd.grad(y, (x, weight), torch.randn_like(y))
    sets = (1, slice(4, 8)) if kind == "group" else (slice(None), 4)
    assert y[sets].isnan().all()
    assert grads[0][sets].isnan().all()
    assert grads[1][4].isnan()
    assert statistics[1].isnan().sum() == 1
    untouched = {"batch": (slice(None), 8), "last": (slice(None), slice(32, 64)), "group": (2, slice(None))}[kind]
    assert grads[0][untouched].isfinite().all()


@pytest.mark.parametrize("shape", [(2, 1), (2, 3), (3, 5, 1), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("value_format", ["int8", "int3"])
def test_fewer_values_than_a_block(device, shape, value_format):
    x = torch.randn(shape, device=device, requires_grad=True)
    y, _ = few_bit_line_norm(x, None, None, LineNormSetting(0, EPS, 32, value_format), x.dtype)
    right = F.batch_norm(x, None, None, training=True)
    torch.testing.assert_close(y, right, rtol=0, atol=1e-5)
    y.backward(torch.randn_like(y))
    assert x.grad.isfinite().all()


def test_constant_channels_are_zero(device):
    x = torch.full((3, 8, 4, 4), 5.0, device=device, requires_grad=True)
    y, _ = few_bit_line_norm(x, None, None, LineNormSetting(0, EPS, 32, "int2"), x.dtype)
    y.backward(torch.randn_like(y))
    assert not y.any()
    assert x.grad.isfinite().all()


@each_kind
def test_the_same_input_gives_the_same_gradients(device, kind):
    x, weight, bias = inputs(kind, device)
    grad_y = torch.randn_like(x)
    first, second = (
        torch.autograd.grad(norm(x, weight, bias, kind, "int2")[0], (x, weight, bias), grad_y) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_second_derivative_is_a_clear_error():
    x, weight, bias = inputs("batch", "cpu")
    with pytest.raises(RuntimeError, match=r"Second derivatives .* are not defined"):
        torch.autograd.grad(norm(x, weight, bias, "batch")[0].square().sum(), x, create_graph=True)


def test_what_cannot_be_stored_is_refused():
    x, weight, bias = (t.detach().double().requires_grad_() for t in inputs("batch", "cpu"))
    with pytest.raises(TypeError, match=r"float64 values cannot be stored as 'int4'.* HINT"):
        norm(x, weight, bias, "batch")
    huge = torch.empty(1, 8, requires_grad=True).expand(2**33, 8)
    with pytest.raises(ValueError, match=r"2147483648 blocks, more than 2\^31 - 1.* HINT: .* than 32"):
        few_bit_line_norm(huge, None, None, LineNormSetting(0, EPS, 32, "int4"), huge.dtype)


@pytest.mark.parametrize("kind", ["batch", "last-odd", "group"])
def test_operators_are_sound(kind):
    _, groups, _, block_size, _ = KINDS[kind]
    x, weight, bias = (t.detach() for t in inputs(kind, "cpu"))
    stored = groups, EPS, block_size, "int4"
    y, values, statistics = torch.ops.actprune.normalize_lines(x, weight, bias, None, *stored, x.dtype)
    torch.library.opcheck(
        torch.ops.actprune.normalize_lines.default, (x, weight, bias, statistics, *stored, torch.float32)
    )
    kept = torch.randn(x.shape), values, statistics, weight, y.stride(), False, groups, block_size, "int4", x.dtype
    torch.library.opcheck(torch.ops.actprune.normalize_lines_grad.default, kept)
