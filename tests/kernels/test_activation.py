"""The kernels of activation functions: outputs against fp64, codes read as the reference reads them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from lightning_actprune.codec.dispatch import force_backend
from lightning_actprune.operators.activation import (
    ACTIVATIONS,
    activate_eagerly,
    activation_grad,
    encode,
    multiply,
)
from tests.support.activations import BITS, EXACT, SMOOTH, inputs, oracle, stored_of
from tests.support.marks import cover
from tests.support.packing import DTYPES, each_bits, each_dtype, rounded

each_function = pytest.mark.parametrize("name", list(ACTIVATIONS))


def tolerance(name: str, x: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return a unit in the last place of the type of ``x``, and what fp32 maths adds.

    That is a few of its own units, more of an exponential by as much as its argument is large, and of ``1 + erf``, and
    where the interpreter undoes a cancellation, a unit of a multiple of ``x``; the oracle cancels too, in fp64.
    """
    size = x.double().cpu().abs()
    argument = {"quick_gelu": 1.702 * size, "gelu_tanh": 1.6 * size * (1 + 0.045 * size.square())}.get(name, size)
    maths = 2**-22 * right.abs() * (1 + argument) + 2**-22 * size * (name in ("gelu", "mish", "softplus"))
    least = torch.finfo(x.dtype).smallest_normal * (1 + size)
    return torch.finfo(x.dtype).eps * right.abs() + maths + least + 2**-52 * size


def check(x: torch.Tensor, name: str, bits: int) -> None:
    """Compare outputs, derivatives as they are read, and gradients with fp64 and with the reference."""
    stored, dtype = stored_of(name, bits), x.dtype
    grad = torch.randn(len(x), device=x.device).to(dtype)
    with force_backend("triton"):
        y, codes = activate_eagerly(x, stored, dtype)
        found = activation_grad(grad, codes, (1,), stored, dtype, True)
    right, derivative = oracle(name, x)
    assert not ((y.double().cpu() - right).abs() > tolerance(name, x, right)).any()
    # Bit for bit, whichever codes they are.
    expected = multiply(grad.cpu(), codes.cpu(), stored, torch.float32)
    assert torch.equal(found.cpu(), rounded(expected, dtype, x.device))
    read = multiply(torch.ones(len(x)), codes.cpu(), stored, torch.float32)
    bound = 1e-7 if stored.exact() else stored.start_and_step()[1] * (0.5 + 1e-3)
    assert (read - derivative).abs().max() <= bound
    differing = (codes.cpu() != encode(x.cpu(), stored)).float().mean()
    assert differing <= 2e-3


CASES = [(name, 300, 4, torch.float32) for name in ACTIVATIONS]
CASES += cover(["gelu", "softplus", "relu"], (2500,), (4,), DTYPES)
CASES += [("gelu", *case, torch.float32) for case in itertools.product((1, 257), BITS)]


@pytest.mark.parametrize(("name", "count", "bits", "dtype"), CASES, ids=str)
def test_outputs_codes_and_gradients(kernel_device, name, count, bits, dtype):
    check(inputs(count, dtype).to(kernel_device), name, bits)


@each_bits
def test_what_is_not_finite_is_nan_with_its_run(kernel_device, bits):
    stored = stored_of("gelu", bits)
    for value in (math.nan, math.inf):
        x = inputs(600).to(kernel_device)
        x[300] = value
        with force_backend("triton"):
            y, codes = activate_eagerly(x, stored, x.dtype)
            found = activation_grad(torch.zeros_like(x), codes, (1,), stored, x.dtype, True)
        assert y[300].isnan() if math.isnan(value) else y[300].isinf()
        assert torch.equal(found.isnan().cpu(), (torch.arange(600) // 256) == 1)
    x = torch.tensor([math.nan, 1.0, math.inf, -math.inf], device=kernel_device)
    for name in EXACT:
        with force_backend("triton"):
            y, _ = activate_eagerly(x, stored_of(name), x.dtype)
        assert y.isnan().tolist() == [True, False, False, False], name


def test_a_wider_output_from_the_same_pass(kernel_device):
    x, stored = inputs(700, torch.bfloat16).to(kernel_device), stored_of("gelu_tanh")
    with force_backend("triton"):
        y, codes = activate_eagerly(x, stored, torch.float32)
        found = activation_grad(torch.ones_like(y), codes, (1,), stored, torch.bfloat16, True)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double().cpu(), oracle("gelu_tanh", x)[0], rtol=1e-6, atol=1e-7)
    assert found.dtype == torch.bfloat16
    assert (found.double().cpu() - oracle("gelu_tanh", x)[1]).abs().max() <= stored.start_and_step()[1] * 0.5 + 2**-7


def test_unaligned_and_in_place(kernel_device):
    base = inputs(1001).to(kernel_device)
    x, stored = base[1:], stored_of("silu")
    with force_backend("triton"):
        y, codes = activate_eagerly(x, stored, x.dtype)
        copy = x.clone()
        written, again = activate_eagerly(copy, stored, x.dtype, in_place=True)
    assert written is copy
    assert torch.equal(copy, y)
    assert torch.equal(codes, again)


@pytest.mark.gpu
@each_dtype
@each_function
def test_large_tensors_on_the_gpu(name, dtype):
    x = (3 * torch.randn(3, 197, 3073, device="cuda")).to(dtype).flatten()
    for bits in BITS if name in SMOOTH else (4,):
        check(x, name, bits)
