"""Normalisation of rows that keeps its input quantized: an exact output, and gradients from what is stored."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_actprune.codec import formats
from lightning_actprune.codec.dispatch import force_backend
from lightning_actprune.operators.norm import NormSetting, norm
from lightning_actprune.operators.registry import compressed_class, operator_of
from tests.support import oracle
from tests.support.compressed import compressed
from tests.support.marks import pairs
from tests.support.saving import saved_tensors
from tests.support.workload import launches

BITS = (8, 4, 3, 2)
EPS = 1e-5
LAYOUTS = [((5, 70), 32, torch.float32), ((3, 300), 24, torch.bfloat16), ((9, 8), 32, torch.float16)]
"""Shapes, block sizes and types."""


def inputs(device, *shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    x = (2 * torch.randn(shape) + 1).to(dtype)
    parameters = 1 + torch.randn(2, shape[-1])
    return tuple(t.to(device).requires_grad_() for t in (x, *parameters))


def normalized(x: Tensor, weight, bias, centred: bool, bits: int, block_size: int = 32) -> Tensor:
    shape = x.shape[-1:] if weight is None else weight.shape
    return norm(x, weight, bias, tuple(shape), NormSetting(centred, False, EPS, block_size, bits), x.dtype)


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


def read(values: Tensor, length: int, block_size: int, bits: int) -> Tensor:
    wide = formats.dequantize(values.cpu(), block_size, bits, torch.float32).double()
    return wide.view(-1, math.ceil(length / block_size) * block_size)[:, :length]


def largest_errors(rows: Tensor, block_size: int, bits: int) -> Tensor:
    """Return how far each value of ``rows [R, L]`` may be from what is stored of it."""
    padded = F.pad(rows, (0, -rows.shape[1] % block_size))
    blocks = padded.view(len(rows), -1, block_size)
    low, high = blocks.amin(2, keepdim=True), blocks.amax(2, keepdim=True)
    need = torch.maximum((high - low) * 32 / 31, low.abs() * 32 / 63) / (2**bits - 1)
    bounds = (need * 1.125 / 2).expand(blocks.shape)
    return bounds.reshape(padded.shape)[:, : rows.shape[1]] * (1 + 1e-5) + 1e-6


@pytest.mark.parametrize(("bits", "layout", "centred"), pairs(BITS, LAYOUTS, [True, False]), ids=str)
def test_output_is_exact_and_gradients_are_those_of_what_is_stored(device, centred, bits, layout):
    shape, block, dtype = layout
    x, weight, bias = inputs(device, *shape, dtype=dtype)
    with saved_tensors() as saved:
        y = normalized(x, weight, bias, centred, bits, block)
    hat, rstd = exact(x, centred)
    w, b = (t.detach().double().cpu() for t in (weight, bias))
    assert y.dtype == dtype
    scale = w.abs() * x.detach().double().cpu().abs().amax(1, keepdim=True) * rstd + b.abs()
    bound = 8 * torch.finfo(torch.float32).eps * scale + torch.finfo(dtype).eps * (hat * w + b).abs()
    assert ((y.detach().double().cpu() - (hat * w + b)).abs() <= bound).all()
    stored, kept_rstd, _ = saved
    block = min(block, shape[1])
    near = read(stored, shape[1], block, bits)
    assert ((near - hat).abs() <= largest_errors(hat, block, bits)).all()
    assert oracle.relative_error(kept_rstd, rstd[:, 0]) < 1e-6
    grad_y = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, weight, bias), grad_y)
    expected = gradients(grad_y, near, rstd, weight, centred)
    assert [g.dtype for g in found] == [dtype, torch.float32, torch.float32]
    for actual, right, tolerance in zip(found, expected, (torch.finfo(dtype).eps, 2e-6, 2e-6), strict=True):
        assert oracle.relative_error(actual, right) <= max(tolerance, 2e-6)


def test_rounded_values_are_multiplied_in_the_wider_type(device):
    x, weight, _ = inputs(device, 5, 70, dtype=torch.float16)
    y = norm(x, weight, None, (70,), NormSetting(False, True, EPS, 32, 8), torch.float32)
    hat, _ = exact(x, False)
    near = (hat.to(torch.float16).double() * weight.detach().double().cpu()).float()
    assert y.dtype == torch.float32
    assert (y.detach().cpu() == near).double().mean() > 0.95  # others were rounded the other way by an error of fp32
    y.sum().backward()
    assert x.grad.dtype == torch.float16


@pytest.mark.parametrize(("centred", "value"), [(True, math.nan), (False, math.inf)])
def test_what_is_not_finite_reaches_the_gradients_of_its_row_alone(device, value, centred):
    x, weight, bias = inputs(device, 5, 70)
    with torch.no_grad():
        x[2, 3] = value
    y = normalized(x, weight, bias, centred, 4)
    of_x, of_weight = torch.autograd.grad(y, (x, weight), torch.randn_like(y))
    assert of_x[2].isnan().all()
    assert of_x[[0, 1, 3, 4]].isfinite().all()
    assert of_weight[3].isnan()


def test_what_cannot_be_stored_is_refused():
    huge = torch.empty(1, 8, requires_grad=True).expand(2**31, 8)
    with pytest.raises(ValueError, match="2147483648"):
        normalized(huge, None, None, True, 4)


def test_other_modes_and_parameters_run_in_plain_torch(kernel_device):
    x, weight, bias = inputs(kernel_device, 6, 40)
    apart = torch.stack([weight.detach()] * 2, 1)[:, 0].requires_grad_()
    grad = torch.randn_like(x)
    with force_backend("triton"):
        y = normalized(x, weight, bias, True, 8)
        right = torch.autograd.grad(y, (x, weight, bias), grad, retain_graph=True)
        with launches() as names:
            found = torch.autograd.grad(y, (x, weight, bias), torch.stack([grad] * 2), is_grads_batched=True)
            torch.testing.assert_close(normalized(x, apart, bias, True, 8), y)
    assert names == []
    for batched, expected in zip(found, right, strict=True):
        torch.testing.assert_close(batched[1], expected)


def test_only_exact_classes_are_known():
    for base in (nn.LayerNorm, nn.BatchNorm2d):
        other = type("Other", (base,), {})
        assert compressed_class(other) is None
        assert operator_of(other(8)) == "norm"
    assert operator_of(nn.SyncBatchNorm(8)) == "norm"
    assert all(compressed_class(c) is None for c in (nn.InstanceNorm2d, nn.LazyBatchNorm2d, nn.SyncBatchNorm))


@pytest.mark.foreign
@pytest.mark.parametrize(("module", "name"), [("norm", "LayerNorm"), ("norm_act", "GroupNormAct")])
def test_fast_norm_of_timm_is_left_alone(module, name):
    dense = getattr(importlib.import_module(f"timm.layers.{module}"), name)(
        24, **({"num_groups": 4} if "G" in name else {})
    )
    layer = compressed(nn.Sequential(dense), "norm", bits=8)[0]
    assert type(layer) is not type(dense)
    layer._fast_norm = True
    x = torch.randn(4, 24, *([] if name == "LayerNorm" else [3, 2]), requires_grad=True)
    with saved_tensors() as saved:
        layer(x)
    assert any(tensor.data_ptr() == x.data_ptr() for tensor in saved)
