"""The kernels of activation functions: outputs against fp64, codes read as the reference reads them."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_actprune.ops import activations
from lightning_actprune.ops.activate import activate, activation_grad
from lightning_actprune.ops.activations import ACTIVATIONS
from lightning_actprune.ops.dispatch import force_backend
from tests.activations import EXACT, FORMATS, SMOOTH, inputs, kept_of, oracle
from tests.kernels.formats import rounded

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
each_function = pytest.mark.parametrize("name", list(ACTIVATIONS))
each_format = pytest.mark.parametrize("value_format", FORMATS)


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


def check(x: torch.Tensor, name: str, value_format: str) -> None:
    """Compare outputs, derivatives as they are read, and gradients with fp64 and with the reference."""
    kept, dtype = kept_of(name, value_format), x.dtype
    grad = torch.randn(len(x), device=x.device).to(dtype)
    with force_backend("triton"):
        y, codes = activate(x, kept, dtype)
        found = activation_grad(grad, codes, (1,), kept, dtype)
    right, derivative = oracle(name, x)
    assert not ((y.double().cpu() - right).abs() > tolerance(name, x, right)).any()
    # Bit for bit, whichever codes they are.
    expected = activations.multiply(grad.cpu(), codes.cpu(), kept, torch.float32)
    assert torch.equal(found.cpu(), rounded(expected, dtype, x.device))
    read = activations.multiply(torch.ones(len(x)), codes.cpu(), kept, torch.float32)
    bound = 1e-7 if kept.exact else kept.start_and_step[1] * (0.5 + 1e-3)
    assert (read - derivative).abs().max() <= bound
    differing = (codes.cpu() != activations.encode(x.cpu(), kept)).float().mean()
    assert differing <= 2e-3


@each_dtype
@each_function
def test_outputs_codes_and_gradients(kernel_device, name, dtype):
    check(inputs(2500, dtype).to(kernel_device), name, "int4")


@each_format
@pytest.mark.parametrize("count", [1, 7, 8, 257, 4099])
def test_formats_and_sizes(kernel_device, count, value_format):
    check(inputs(count).to(kernel_device), "gelu", value_format)


@each_format
def test_what_is_not_finite_is_nan_with_its_run(kernel_device, value_format):
    kept = kept_of("gelu", value_format)
    for value in (math.nan, math.inf):
        x = inputs(600).to(kernel_device)
        x[300] = value
        with force_backend("triton"):
            y, codes = activate(x, kept, x.dtype)
            found = activation_grad(torch.zeros_like(x), codes, (1,), kept, x.dtype)
        assert y[300].isnan() if math.isnan(value) else y[300].isinf()
        assert torch.equal(found.isnan().cpu(), (torch.arange(600) // 256) == 1)


@pytest.mark.parametrize("name", EXACT)
def test_a_nan_stays_in_the_output_of_exact_functions(kernel_device, name):
    x = torch.tensor([math.nan, 1.0, math.inf, -math.inf], device=kernel_device)
    with force_backend("triton"):
        y, _ = activate(x, kept_of(name), x.dtype)
    assert torch.equal(y.isnan().cpu(), torch.tensor([True, False, False, False]))


def test_a_wider_output_from_the_same_pass(kernel_device):
    x, kept = inputs(700, torch.bfloat16).to(kernel_device), kept_of("gelu_tanh")
    with force_backend("triton"):
        y, codes = activate(x, kept, torch.float32)
        found = activation_grad(torch.ones_like(y), codes, (1,), kept, torch.bfloat16)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double().cpu(), oracle("gelu_tanh", x)[0], rtol=1e-6, atol=1e-7)
    assert found.dtype == torch.bfloat16
    assert (found.double().cpu() - oracle("gelu_tanh", x)[1]).abs().max() <= kept.start_and_step[1] * 0.5 + 2**-7


def test_unaligned_and_in_place(kernel_device):
    base = inputs(1001).to(kernel_device)
    x, kept = base[1:], kept_of("silu")
    with force_backend("triton"):
        y, codes = activate(x, kept, x.dtype)
        copy = x.clone()
        written, again = activate(copy, kept, x.dtype, in_place=True)
    assert written is copy
    assert torch.equal(copy, y)
    assert torch.equal(codes, again)


@pytest.mark.gpu
@each_dtype
@each_function
def test_large_tensors_on_the_gpu(name, dtype):
    x = (3 * torch.randn(3, 197, 3073, device="cuda")).to(dtype).flatten()
    for value_format in FORMATS if name in SMOOTH else ("int4",):
        check(x, name, value_format)


@pytest.mark.gpu
@each_dtype
@each_function
def test_outputs_are_those_of_torch_on_the_gpu(name, dtype):
    x, kept = (3 * torch.randn(2**20, device="cuda")).to(dtype), kept_of(name)
    y, _ = activate(x, kept, dtype)
    expected = ACTIVATIONS[name].forward(x, *kept.parameters)
    if name == "quick_gelu":  # torch rounds after each of its operators
        expected = ACTIVATIONS[name].forward(x.float()).to(dtype)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y, expected, rtol=2 * eps * (1 + 3 * (dtype == torch.float32)), atol=2e-6)
