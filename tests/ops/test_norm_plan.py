"""What is looked up once per layout computes the same, bit for bit, as the operators that compilers see."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lightning_actprune.ops import library, norm_plan
from lightning_actprune.ops.dispatch import force_backend
from lightning_actprune.ops.norm import FewBitNormFunction, NormSetting, few_bit_norm
from lightning_actprune.ops.norm_plan import NormPlan
from tests.kernels.workload import launches

LAYER = NormSetting(True, False, 1e-5, 32, "int4")
RMS = NormSetting(False, True, 1e-5, 32, "int2")
AFFINE = NormSetting(False, False, 0.0, 32, "int2", normed=False)
each_setting = pytest.mark.parametrize("setting", [LAYER, RMS, AFFINE], ids=["layer", "rms", "affine"])


def inputs(device, *shape: int, dtype=torch.bfloat16, of_parameters=torch.float32) -> list[Tensor]:
    made = torch.randn(shape, dtype=dtype), *torch.randn(2, shape[-1], dtype=of_parameters)
    return [t.to(device).requires_grad_() for t in made]


def results(given: list[Tensor], setting: NormSetting, grad_y: Tensor, eager: bool) -> list[Tensor]:
    y = FewBitNormFunction.apply(*given, given[1].shape, setting, grad_y.dtype, eager)
    return [y, *torch.autograd.grad(y, given, grad_y)]


@pytest.fixture
def planned(monkeypatch):
    """Count forward and backward passes by plans."""
    calls = []

    def counted(name: str):
        call = getattr(NormPlan, name)
        return lambda *args: (calls.append(name), call(*args))[1]

    for name in ("forward", "backward"):
        monkeypatch.setattr(NormPlan, name, counted(name))
    return calls


@each_setting
@pytest.mark.parametrize("of_parameters", [torch.float32, torch.float16], ids=str)  # the interpreter cuts bf16 off
def test_plans_and_operators_give_the_same_bits(kernel_device, setting, of_parameters, planned, monkeypatch):
    given = inputs(kernel_device, 3, 5, 70, of_parameters=of_parameters)
    grad_y = torch.randn(3, 5, 70, device=kernel_device)
    with force_backend("triton"):
        first = results(given, setting, grad_y, True)
        assert planned == ["forward", "backward"]
        monkeypatch.setattr(library, "in_plain_eager_mode", lambda x: False)
        monkeypatch.setattr(norm_plan, "in_plain_eager_mode", lambda x: False)
        second = results(given, setting, grad_y, False)
    assert planned == ["forward", "backward"]
    assert [t.dtype for t in first] == [torch.float32, torch.bfloat16, of_parameters, of_parameters]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@each_setting
def test_tensors_may_start_anywhere(kernel_device, setting):
    """Input, parameters and gradient from the second of two values on: other addresses, other orders of summation."""
    given = inputs(kernel_device, 5, 64)
    with torch.no_grad():  # integers of mean zero: no order changes mean and variance, and so no code
        half = torch.randint(-8, 9, (5, 32), device=kernel_device)
        given[0].copy_(torch.cat([half, -half], 1))
    grad_y = torch.randn(5, 64, device=kernel_device)

    def moved(x: Tensor) -> Tensor:
        return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x.detach())

    with force_backend("triton"):
        right = results(given, setting, grad_y, True)
        for which in itertools.product((False, True), repeat=4):
            *others, grad = [moved(t) if m else t.detach() for t, m in zip((*given, grad_y), which, strict=True)]
            found = results([t.requires_grad_() for t in others], setting, grad, True)
            torch.testing.assert_close(found, right)


def test_nothing_is_copied_and_what_is_returned_is_no_view(kernel_device):
    base = torch.randn(4, 6, 80, device=kernel_device)
    weight = torch.ones(1, 1, 33, device=kernel_device, requires_grad=True)
    for x in (base[:, :, 7:40], base.view(24, 80)[:, :33].requires_grad_()):
        with force_backend("triton"), launches() as names:
            y = few_bit_norm(x, weight, None, (33,), LAYER, x.dtype)
            (grad,) = torch.autograd.grad(y, weight, torch.ones(33, device=kernel_device).expand(x.shape))
        assert names == ["normalize_kernel", "normalize_grad_kernel", "add_sets_kernel"]
        assert y._base is None
        assert y.shape == x.shape
        assert grad.shape == weight.shape


def test_a_layer_used_twice_adds_its_gradients(device):
    x, weight, bias = inputs(device, 5, 70, dtype=torch.float32)
    single = few_bit_norm(x, weight, bias, (70,), AFFINE, x.dtype)
    twice = single + few_bit_norm(x, weight, bias, (70,), AFFINE, x.dtype)
    grad_y = torch.randn_like(single)
    alone = torch.autograd.grad(single, (x, weight, bias), grad_y, retain_graph=True)
    both = torch.autograd.grad(twice, (x, weight, bias), grad_y)
    assert all(torch.equal(2 * a, b) for a, b in zip(alone, both, strict=True))


@pytest.mark.parametrize("backends", [("triton", "reference"), ("reference", "triton")], ids="-".join)
@each_setting
def test_backward_may_run_on_another_backend(backends, setting):
    given, grad_y = inputs("cpu", 5, 70, dtype=torch.float32), torch.randn(5, 70)
    found = []
    for backward in backends:
        with force_backend(backends[0]):
            y = few_bit_norm(*given, (70,), setting, torch.float32)
        with force_backend(backward):
            found.append(torch.autograd.grad(y, given, grad_y))
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


def test_parameters_with_gaps_are_read_as_they_lie(device, planned):
    x, *_ = inputs(device, 5, 70, dtype=torch.float32)
    weight = torch.randn(140, device=device)[::2].requires_grad_()
    y = few_bit_norm(x, weight, None, (70,), AFFINE, x.dtype)
    assert planned == []
    torch.testing.assert_close(y, x * weight)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(grad, weight.detach().expand(5, 70))


def test_the_gradient_of_a_bias_alone(device):
    x, weight, bias = inputs(device, 40, 70, dtype=torch.float32)
    y = few_bit_norm(x.detach(), weight.detach(), bias, (70,), LAYER, x.dtype)
    grad_y = torch.randn_like(y)
    (grad,) = torch.autograd.grad(y, bias, grad_y)
    # A sum of 40 values in fp32, in any order.
    torch.testing.assert_close(grad, grad_y.sum(0), rtol=0, atol=40 * 2.0**-24 * 4 * 40)
