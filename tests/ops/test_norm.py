"""Normalisation that keeps its input in few bits: an exact output, and gradients from what is stored."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_actprune.ops import formats
from lightning_actprune.ops.norm import NormSetting, few_bit_norm
from tests import oracle
from tests.attention import saved_tensors

FORMATS = [name for name in formats.FORMATS if name != "same"]
EPS = 1e-5

each_kind = pytest.mark.parametrize("centred", [True, False], ids=["layer", "rms"])
each_format = pytest.mark.parametrize("value_format", FORMATS)


def inputs(device, *shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``x`` whose mean is not zero, weight and bias."""
    x = (2 * torch.randn(shape) + 1).to(dtype)
    parameters = 1 + torch.randn(2, shape[-1])
    return tuple(t.to(device).requires_grad_() for t in (x, *parameters))


def norm(x: Tensor, weight, bias, centred: bool, value_format: str, block_size: int = 32, rounded: bool = False):
    shape = x.shape[-1:] if weight is None else weight.shape
    setting = NormSetting(centred, rounded, EPS, block_size, value_format)
    return few_bit_norm(x, weight, bias, tuple(shape), setting, x.dtype)


def exact(x: Tensor, centred: bool) -> tuple[Tensor, Tensor]:
    """Return the normalised rows of ``x [R, L]`` and ``rstd [R, 1]`` in fp64 on the CPU."""
    wide = x.detach().double().cpu()
    if centred:
        wide = wide - wide.mean(1, keepdim=True)
    rstd = (wide.square().mean(1, keepdim=True) + EPS).rsqrt()
    return wide * rstd, rstd


def gradients(grad_y: Tensor, hat: Tensor, rstd: Tensor, weight: Tensor, centred: bool) -> tuple[Tensor, ...]:
    """Return the gradients of input, weight and bias in fp64, as the module docstring has them."""
    g = grad_y.double().cpu()
    along = g * weight.detach().double().cpu()
    grad_x = along - hat * (along * hat).mean(1, keepdim=True)
    if centred:
        grad_x = grad_x - along.mean(1, keepdim=True)
    return grad_x * rstd, (g * hat).sum(0), g.sum(0)


def read(values: Tensor, length: int, block_size: int, value_format: str) -> Tensor:
    """Return the rows that are stored, in fp64."""
    wide = formats.dequantize(values.cpu(), block_size, value_format, torch.float32).double()
    return wide.view(-1, math.ceil(length / block_size) * block_size)[:, :length]


def largest_errors(rows: Tensor, block_size: int, value_format: str) -> Tensor:
    """Return how far each value of ``rows [R, L]`` may be from what is stored of it."""
    padded = F.pad(rows, (0, -rows.shape[1] % block_size))
    blocks = padded.view(len(rows), -1, block_size)
    if value_format == "fp8":
        most = blocks.abs().amax(2, keepdim=True)
        bounds = torch.maximum(blocks.abs() / 16, most / 448 * 1.01 / 2**9)
    else:
        low, high = blocks.amin(2, keepdim=True), blocks.amax(2, keepdim=True)
        need = torch.maximum((high - low) * 32 / 31, low.abs() * 32 / 63) / (
            2 ** formats.FORMATS[value_format].bits - 1
        )
        bounds = (need * 1.125 / 2).expand(blocks.shape)
    return bounds.reshape(padded.shape)[:, : rows.shape[1]] * (1 + 1e-5) + 1e-6


SHAPES = [((5, 70), 32, torch.float32), ((3, 300), 24, torch.bfloat16), ((9, 8), 32, torch.float16)]


@each_kind
@each_format
@pytest.mark.parametrize(("shape", "block", "dtype"), SHAPES, ids=str)
def test_output_is_exact_and_gradients_are_those_of_what_is_stored(device, centred, value_format, shape, block, dtype):
    x, weight, bias = inputs(device, *shape, dtype=dtype)
    with saved_tensors() as saved:
        y = norm(x, weight, bias, centred, value_format, block)
    hat, rstd = exact(x, centred)
    w, b = (t.detach().double().cpu() for t in (weight, bias))
    assert y.dtype == dtype
    scale = w.abs() * x.detach().double().cpu().abs().amax(1, keepdim=True) * rstd + b.abs()
    bound = 8 * torch.finfo(torch.float32).eps * scale + torch.finfo(dtype).eps * (hat * w + b).abs()
    assert ((y.detach().double().cpu() - (hat * w + b)).abs() <= bound).all()
    stored, kept_rstd, _ = saved
    block = min(block, shape[1])
    near = read(stored, shape[1], block, value_format)
    assert ((near - hat).abs() <= largest_errors(hat, block, value_format)).all()
    assert oracle.relative_error(kept_rstd, rstd[:, 0]) < 1e-6
    grad_y = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, weight, bias), grad_y)
    expected = gradients(grad_y, near, rstd, weight, centred)
    assert [g.dtype for g in found] == [dtype, torch.float32, torch.float32]
    for actual, right, tolerance in zip(found, expected, (torch.finfo(dtype).eps, 2e-6, 2e-6), strict=True):
        assert oracle.relative_error(actual, right) <= max(tolerance, 2e-6)


@each_kind
def test_errors_of_the_gradients_are_those_of_the_module_docstring(centred):
    """Of a random g, and of one with a cosine of 0.6 to the normalised input; ``grad_w`` over 400 rows."""
    x, weight, bias = inputs("cpu", 400, 768)
    hat, rstd = exact(x, centred)
    g = torch.randn(400, 768).double() / weight.detach().double()
    for cosine in (0.0, 0.6):
        mixed = math.sqrt(1 - cosine**2) * g * weight.detach().double() + cosine * hat
        grad_y = (mixed / weight.detach().double()).float()
        right = gradients(grad_y, hat, rstd, weight, centred)
        for value_format, error in (("int8", 0.0055), ("int4", 0.1), ("int2", 0.5)):
            y = norm(x, weight, bias, centred, value_format)
            found = torch.autograd.grad(y, (x, weight, bias), grad_y)
            of_input, of_weight, of_bias = (oracle.relative_error(a, b) for a, b in zip(found, right, strict=True))
            along = math.hypot(cosine, math.sqrt(2 / 768)) / math.sqrt(1 - cosine**2)
            assert error * along / 2 < of_input < 1.2 * error * along
            assert of_bias < 1e-5
            if cosine == 0:  # errors and terms of 400 rows both grow as the root of their number
                assert of_weight < 1.2 * error


def test_the_gradient_of_the_weight_is_unbiased():
    """Rows that are alike but for their places: the error of the mean shrinks as the root of their number."""
    row = torch.randn(1, 64)
    weight = torch.ones(64, requires_grad=True)
    hat, _ = exact(row, True)
    errors = []
    for rows in (16, 4096):
        y = norm(row.expand(rows, 64), weight, None, True, "int2")
        (grad,) = torch.autograd.grad(y, weight, torch.full((rows, 64), 1 / rows))
        errors.append(oracle.relative_error(grad, hat[0]))
    assert errors[1] < errors[0] / 6


@each_format
@each_kind
def test_bytes_that_autograd_keeps(value_format, centred):
    x, weight, bias = inputs("cpu", 4, 10, 96)
    with saved_tensors() as saved:
        norm(x, weight, bias, centred, value_format)
    kept = sum(t.nbytes for t in saved if t.data_ptr() != weight.data_ptr())
    assert kept == 40 * 3 * formats.FORMATS[value_format].row_bytes(32, 4) + 4 * 40


def test_only_what_needs_a_gradient_gets_one(device):
    x, weight, bias = inputs(device, 6, 40)
    grad_y = torch.randn(6, 40, device=device)
    full = torch.autograd.grad(norm(x, weight, bias, True, "int4"), (x, weight, bias), grad_y)
    for needed in ((True, False, False), (False, True, False), (True, False, True), (False, True, True)):
        given = [t.detach().requires_grad_(wanted) for t, wanted in zip((x, weight, bias), needed, strict=True)]
        norm(*given, True, "int4").backward(grad_y)
        for tensor, wanted, right in zip(given, needed, full, strict=True):
            assert torch.equal(tensor.grad, right) if wanted else tensor.grad is None


def test_without_parameters(device):
    x, *_ = inputs(device, 6, 40)
    y, grad_y = norm(x, None, None, True, "int8"), torch.randn(6, 40, device=device)
    torch.testing.assert_close(y, F.layer_norm(x, (40,), eps=EPS), rtol=0, atol=3e-6)
    (grad,) = torch.autograd.grad(y, x, grad_y)
    (right,) = torch.autograd.grad(F.layer_norm(x, (40,), eps=EPS), x, grad_y)
    assert oracle.relative_error(grad, right) < 0.01


def test_several_dimensions_and_any_strides(device):
    base, weight, bias = inputs(device, 4, 6, 10, 21)
    weight, bias = (torch.randn(10, 21, device=device, requires_grad=True) for _ in range(2))
    for x in (base, base[:, ::2], base.transpose(0, 1), base.transpose(0, 1).contiguous().transpose(0, 1)):
        grad_y = torch.randn(21, *x.shape[:-1], device=device).movedim(0, -1)
        ours, torchs = norm(x, weight, bias, True, "int8"), F.layer_norm(x, (10, 21), weight, bias, EPS)
        torch.testing.assert_close(ours, torchs, rtol=0, atol=1e-5)
        grads = (torch.autograd.grad(y, (x, weight, bias), grad_y) for y in (ours, torchs))
        for actual, right in zip(*grads, strict=True):
            assert actual.shape == right.shape
            assert oracle.relative_error(actual, right) < 0.01


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0,)], ids=str)
def test_empty_inputs(device, shape):
    x = torch.ones(shape, device=device, requires_grad=True)
    weight = torch.ones(shape[-1], device=device, requires_grad=True)
    y = norm(x, weight, None, True, "int4")
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
    assert not weight.grad.any()


def test_rounded_values_are_multiplied_in_the_wider_type(device):
    x, weight, _ = inputs(device, 5, 70, dtype=torch.float16)
    setting = NormSetting(False, True, EPS, 32, "int8")
    y = few_bit_norm(x, weight, None, (70,), setting, torch.float32)
    hat, _ = exact(x, False)
    near = (hat.to(torch.float16).double() * weight.detach().double().cpu()).float()
    assert y.dtype == torch.float32
    assert (y.detach().cpu() == near).double().mean() > 0.95  # others were rounded the other way by an error of fp32
    y.sum().backward()
    assert x.grad.dtype == torch.float16


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@each_kind
def test_what_is_not_finite_reaches_the_gradients_of_its_row_alone(device, value, centred):
    x, weight, bias = inputs(device, 5, 70)
    with torch.no_grad():
        x[2, 3] = value
    y = norm(x, weight, bias, centred, "int4")
    grads = torch.autograd.grad(y, (x, weight), torch.randn_like(y))
    assert grads[0][2].isnan().all()
    assert grads[0][[0, 1, 3, 4]].isfinite().all()
    assert grads[1][3].isnan()


def test_constant_rows_are_zero(device):
    x = torch.full((3, 64), 5.0, device=device, requires_grad=True)
    y = norm(x, None, None, True, "int2")
    y.backward(torch.randn_like(y))
    assert not y.any()
    assert x.grad.isfinite().all()


def test_the_same_input_gives_the_same_gradients(device):
    x, weight, bias = inputs(device, 30, 70)
    grad_y = torch.randn(30, 70, device=device)
    first, second = (
        torch.autograd.grad(norm(x, weight, bias, True, "int2"), (x, weight, bias), grad_y) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_second_derivative_is_a_clear_error():
    x, weight, bias = inputs("cpu", 5, 70)
    with pytest.raises(RuntimeError, match=r"Second derivatives .* are not defined"):
        torch.autograd.grad(norm(x, weight, bias, True, "int4").square().sum(), x, create_graph=True)


def test_what_cannot_be_stored_is_refused():
    x, weight, bias = inputs("cpu", 5, 70, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"float64 values cannot be stored as 'int4'.* HINT"):
        norm(x, weight, bias, True, "int4")
    huge = torch.empty(1, 8, requires_grad=True).expand(2**31, 8)
    with pytest.raises(ValueError, match=r"2147483648 blocks, more than 2\^31 - 1.* HINT: .* than 8"):
        norm(huge, None, None, True, "int4")
