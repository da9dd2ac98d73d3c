"""A branch that is scaled and added to a residual in one pass: exact but for the gradient of the factors."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lightning_actprune.ops import formats
from lightning_actprune.ops.dispatch import force_backend
from lightning_actprune.ops.norm import NormSetting
from lightning_actprune.ops.scaled_sum import scaled_sum
from tests import oracle
from tests.attention import saved_tensors
from tests.kernels.workload import launches

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = ["int8", "int4", "int2", "fp8"]


def setting(value_format: str = "int4", block_size: int = 32) -> NormSetting:
    return NormSetting(False, False, 0.0, block_size, value_format, normed=False)


def inputs(device, *shape: int, dtypes=(torch.float32,) * 3) -> tuple[Tensor, Tensor, Tensor]:
    """Return branch, factors and residual."""
    made = torch.randn(shape), 1 + torch.randn(shape[-1]), torch.randn(shape)
    return tuple(t.to(device, dtype).requires_grad_() for t, dtype in zip(made, dtypes, strict=True))


def read(values: Tensor, rows: int, length: int, block_size: int, value_format: str) -> Tensor:
    """Return the rows that are stored, in fp64."""
    wide = formats.dequantize(values.cpu(), block_size, value_format, torch.float32).double()
    return wide.view(rows, -1)[:, :length]


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize(("shape", "block"), [((3, 5, 70), 32), ((2, 300), 24), ((9, 8), 32)], ids=str)
@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES[:2], (torch.float32,), DTYPES)), ids=str)
def test_all_but_the_gradient_of_the_factors_is_exact(device, value_format, shape, block, dtypes):
    x, weight, residual = inputs(device, *shape, dtypes=dtypes)
    with saved_tensors() as saved:
        y = scaled_sum(x, weight, residual, setting(value_format, block), torch.float32)
    wide, w, r = (t.detach().double().cpu() for t in (x, weight, residual))
    # Rounded once or twice: by half a unit of the product, and of the sum.
    bound = torch.finfo(torch.float32).eps * ((wide * w).abs() + r.abs())
    assert ((y.detach().double().cpu() - (r + wide * w)).abs() <= bound).all()
    grad_y = torch.randn_like(y)
    of_x, of_weight, of_residual = torch.autograd.grad(y, (x, weight, residual), grad_y)
    assert [g.dtype for g in (of_x, of_weight, of_residual)] == list(dtypes)
    assert torch.equal(of_residual, grad_y.to(dtypes[2]))
    g = grad_y.double().cpu()
    assert ((of_x.double().cpu() - g * w).abs() <= torch.finfo(dtypes[0]).eps * (g * w).abs()).all()
    rows, length = x.numel() // shape[-1], shape[-1]
    near = read(saved[0], rows, length, min(block, length), value_format)
    assert oracle.relative_error(of_weight, (g.view(rows, length) * near).sum(0)) < 2e-6
    own = weight.data_ptr()
    assert sum(t.nbytes for t in saved if t.data_ptr() != own) == saved[0].nbytes


def test_one_launch_forward_and_two_backward(kernel_device):
    x, weight, residual = inputs(kernel_device, 4, 10, 64, dtypes=(torch.bfloat16, torch.float32, torch.float32))
    with force_backend("triton"), launches() as names:
        y = scaled_sum(x, weight, residual, setting(), torch.float32)
        grad_y = torch.randn_like(y)
        (*_, of_residual) = torch.autograd.grad(y, (x, weight, residual), grad_y)
    assert names == ["normalize_kernel", "normalize_grad_kernel", "add_sets_kernel"]
    assert of_residual.data_ptr() == grad_y.data_ptr()


def test_only_what_needs_a_gradient_gets_one(device):
    x, weight, residual = inputs(device, 6, 40)
    grad_y = torch.randn(6, 40, device=device)
    full = torch.autograd.grad(scaled_sum(x, weight, residual, setting(), x.dtype), (x, weight, residual), grad_y)
    for needed in itertools.product((True, False), repeat=3):
        if any(needed):
            given = [t.detach().requires_grad_(n) for t, n in zip((x, weight, residual), needed, strict=True)]
            scaled_sum(*given, setting(), x.dtype).backward(grad_y)
            for tensor, wanted, right in zip(given, needed, full, strict=True):
                assert torch.equal(tensor.grad, right) if wanted else tensor.grad is None


def test_any_strides(device):
    """Of branch, residual and gradient, alone and together; tensors may start anywhere."""
    shape = (4, 6, 33)
    makers = (
        lambda: torch.randn(shape, device=device),
        lambda: torch.randn(4, 33, 6, device=device).transpose(1, 2),
        lambda: torch.randn(8, 6, 70, device=device)[::2, :, 5:38],
        lambda: torch.randn(33, device=device).expand(shape),
    )
    weight = torch.randn(1, 1, 33, device=device, requires_grad=True)
    for of_x, of_residual, of_grad in itertools.product(makers, repeat=3):
        x, residual, grad_y = of_x().requires_grad_(), of_residual().requires_grad_(), of_grad()
        y = scaled_sum(x, weight, residual, setting("int8"), x.dtype)
        torch.testing.assert_close(y, residual + weight * x, rtol=3e-7, atol=3e-7)
        grads = torch.autograd.grad(y, (x, weight, residual), grad_y)
        torch.testing.assert_close(grads[0], grad_y * weight.detach())
        assert grads[1].shape == weight.shape
        assert torch.equal(grads[2], grad_y)


@pytest.mark.parametrize("shape", [(0, 16), (3, 0)], ids=str)
def test_empty_inputs(device, shape):
    x, weight, residual = inputs(device, *shape)
    y = scaled_sum(x, weight, residual, setting(), x.dtype)
    y.sum().backward()
    assert y.shape == x.grad.shape == residual.grad.shape == shape
    assert not weight.grad.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_place(device, value):
    x, weight, residual = inputs(device, 5, 70)
    with torch.no_grad():
        x[2, 3], residual[1, 5] = value, value
    y = scaled_sum(x, weight, residual, setting(), x.dtype)
    assert (~y.isfinite()).nonzero().tolist() == [[1, 5], [2, 3]]
    of_x, of_weight = torch.autograd.grad(y, (x, weight), torch.randn_like(y))
    assert of_x.isfinite().all()
    assert of_weight[:32].isnan().all()  # of the block that cannot be stored
    assert of_weight[32:].isfinite().all()


def test_a_tensor_added_to_itself_scaled(device):
    x, weight, _ = inputs(device, 5, 70)
    y = scaled_sum(x, weight, x, setting("int8"), x.dtype)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(grad, (1 + weight.detach()).expand(5, 70))


def test_compiled_equals_eager(device):
    x, weight, residual = inputs(
        device, 5, 70, dtypes=(torch.float16, torch.float32, torch.float32)
    )  # the interpreter cuts bf16 off

    def step(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        return scaled_sum(x, weight, residual, setting(), torch.float32)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    first, second = (function(x, weight, residual) for function in (step, compiled))
    torch.testing.assert_close(first, second)  # kernels round product and sum once
    grad_y = torch.randn_like(first)
    of_x, of_weight, of_residual = torch.autograd.grad(first, (x, weight, residual), grad_y)
    found = torch.autograd.grad(second, (x, weight, residual), grad_y)
    assert torch.equal(found[0], of_x)
    assert torch.equal(found[2], of_residual)
    # A compiled layer reads values in the type of `x`, rounded to that; int2 reads twice the largest one at most.
    rounding = 2 * x.detach().float().abs().max() * torch.finfo(x.dtype).eps
    assert ((found[1] - of_weight).abs() <= grad_y.abs().sum(0) * rounding).all()


def test_second_derivative_is_a_clear_error():
    x, weight, residual = inputs("cpu", 5, 70)
    y = scaled_sum(x, weight, residual, setting(), x.dtype).square().sum()
    with pytest.raises(RuntimeError, match=r"Second derivatives .* are not defined"):
        torch.autograd.grad(y, x, create_graph=True)


def test_operator_with_a_residual_passes_opcheck(device):
    x, weight, residual = (t.detach() for t in inputs(device, 5, 70))
    arguments = x, weight, None, *setting(), torch.float32, residual
    torch.library.opcheck(torch.ops.actprune.normalize.default, arguments)
