"""The kernels of activation functions and gated products: against fp64, and read as the reference reads them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_actprune.codec import formats
from lightning_actprune.codec.dispatch import force_backend
from lightning_actprune.operators.activation import (
    ACTIVATIONS,
    activate_eagerly,
    activation_grad,
    encode,
    multiply,
)
from lightning_actprune.operators.gated import (
    GATE_FIRST,
    GATE_LAST,
    SEPARATE,
    StoredFactors,
    gate_eagerly,
    gate_grad_eagerly,
    gated_halves,
)
from tests.support.activations import BITS, EXACT, SMOOTH, gated_oracle, inputs, oracle, stored_of
from tests.support.marks import cover
from tests.support.oracle import largest_error
from tests.support.packing import DTYPES, each_bits, each_dtype, rounded
from tests.support.workload import launches

each_function = pytest.mark.parametrize("name", list(ACTIVATIONS))


def tolerance(name: str, x: Tensor, right: Tensor) -> Tensor:
    """Return a unit in the last place of the type of ``x``, and what fp32 maths adds.

    That is a few of its own units, more of an exponential by as much as its argument is large, and of ``1 + erf``, and
    where the interpreter undoes a cancellation, a unit of a multiple of ``x``; the oracle cancels too, in fp64.
    """
    size = x.double().cpu().abs()
    argument = {"quick_gelu": 1.702 * size, "gelu_tanh": 1.6 * size * (1 + 0.045 * size.square())}.get(name, size)
    maths = 2**-22 * right.abs() * (1 + argument) + 2**-22 * size * (name in ("gelu", "mish", "softplus"))
    least = torch.finfo(x.dtype).smallest_normal * (1 + size)
    return torch.finfo(x.dtype).eps * right.abs() + maths + least + 2**-52 * size


def check(x: Tensor, name: str, bits: int) -> None:
    """Compare outputs, derivatives as they are read, and gradients with fp64 and with the reference."""
    stored, dtype = stored_of(name, bits), x.dtype
    grad = torch.randn(len(x), device=x.device).to(dtype)
    with force_backend("triton"):
        y, codes = activate_eagerly(x, stored, dtype)
        actual = activation_grad(grad, codes, (1,), stored, dtype, True)
    right, derivative = oracle(name, x)
    assert not ((y.double().cpu() - right).abs() > tolerance(name, x, right)).any()
    # Bit for bit, whichever codes they are.
    expected = multiply(grad.cpu(), codes.cpu(), stored, torch.float32)
    assert torch.equal(actual.cpu(), rounded(expected, dtype, x.device))
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
            actual = activation_grad(torch.zeros_like(x), codes, (1,), stored, x.dtype, True)
        assert y[300].isnan() if math.isnan(value) else y[300].isinf()
        assert torch.equal(actual.isnan().cpu(), (torch.arange(600) // 256) == 1)
    x = torch.tensor([math.nan, 1.0, math.inf, -math.inf], device=kernel_device)
    for name in EXACT:
        with force_backend("triton"):
            y, _ = activate_eagerly(x, stored_of(name), x.dtype)
        assert y.isnan().tolist() == [True, False, False, False], name


def test_a_wider_output_from_the_same_pass(kernel_device):
    x, stored = inputs(700, torch.bfloat16).to(kernel_device), stored_of("gelu_tanh")
    with force_backend("triton"):
        y, codes = activate_eagerly(x, stored, torch.float32)
        actual = activation_grad(torch.ones_like(y), codes, (1,), stored, torch.bfloat16, True)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double().cpu(), oracle("gelu_tanh", x)[0], rtol=1e-6, atol=1e-7)
    assert actual.dtype == torch.bfloat16
    assert (actual.double().cpu() - oracle("gelu_tanh", x)[1]).abs().max() <= stored.start_and_step()[1] * 0.5 + 2**-7


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


# Gated products.


def check_gate(a: Tensor, u: Tensor, name: str, bits: int, block_size: int) -> None:
    """Compare products and factors with fp64, and gradients from the same bytes with the reference's, bit for bit."""
    function, stored = stored_of(name, bits), StoredFactors(bits, block_size, True, True)
    grad = torch.randn(a.shape, device=a.device).to(a.dtype)
    with force_backend("triton"), launches() as names:
        z, values = gate_eagerly(a, u, function, stored, a.dtype)
        actual = gate_grad_eagerly(grad, values, stored, SEPARATE, a.dtype, u.dtype)
    assert names == ["gate_kernel", "gate_grad_kernel"]
    with force_backend("reference"):
        expected = gate_grad_eagerly(grad.cpu(), values.cpu(), stored, SEPARATE, torch.float32, torch.float32)
        _, same = gate_eagerly(a.cpu(), u.cpu(), function, stored, a.dtype)
    for ours, right in zip(actual, expected, strict=True):
        assert torch.equal(ours.cpu(), rounded(right, a.dtype, a.device))
    right, q, p = gated_oracle(name, a, u)
    # A unit in the last place, and of fp32 maths a few of its own, more where 1 + erf cancels.
    maths = 2**-20 * (a.double().cpu().abs() + 1) * u.double().cpu().abs()
    least = torch.finfo(a.dtype).smallest_normal
    assert not ((z.double().cpu() - right).abs() > torch.finfo(a.dtype).eps * right.abs() + maths + least).any()
    read = formats.dequantize(values.cpu(), block_size, bits, torch.float32)
    read = read.view(2, len(a), -1)[..., : a.shape[1]].double()
    for ours, factor in zip(read, (q, p), strict=True):
        assert not ((ours - factor).abs() > largest_error(factor, block_size, bits) + maths / 4).any()
    # Where functions differ in the last places, a code does, or a header with its whole block.
    assert (values.cpu() != same).float().mean() <= (0.0 if name == "relu" else 0.02)


def pair(rows: int, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    a = inputs(rows * length, dtype).view(rows, length)
    return a.to(device), torch.randn(rows, length).to(dtype).to(device)


@each_dtype
@pytest.mark.parametrize("name", ["silu", "relu"])
def test_products_factors_and_gradients(kernel_device, name, dtype):
    check_gate(*pair(7, 100, dtype, kernel_device), name, 4, 32)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("rows", "length", "block_size"), [(1, 1, 1), (5, 130, 24)], ids=str)
def test_formats_and_blocks_of_products(kernel_device, rows, length, block_size, bits):
    check_gate(*pair(rows, length, torch.float32, kernel_device), "silu", bits, block_size)


def test_halves_of_a_gradient_and_one_factor_alone(kernel_device):
    a, u = pair(9, 70, torch.float32, kernel_device)
    types, both = (torch.float32, torch.float32), StoredFactors(4, 32, True, True)
    with force_backend("triton"):
        z, values = gate_eagerly(a, u, stored_of("silu"), both, torch.float32)
        apart = gate_grad_eagerly(z, values, both, SEPARATE, *types)
        for layout in (GATE_FIRST, GATE_LAST):
            joint, nothing = gate_grad_eagerly(z, values, both, layout, *types)
            assert nothing is None
            assert torch.equal(joint, torch.cat(apart if layout == GATE_FIRST else apart[::-1], 1))
    for wanted in ((True, False), (False, True)):  # one of the inputs needs no gradient
        stored = StoredFactors(4, 32, *wanted)
        with force_backend("triton"):
            z, values = gate_eagerly(a, u, stored_of("silu"), stored, torch.float32)
            actual = gate_grad_eagerly(z, values, stored, SEPARATE, *types)
        with force_backend("reference"):
            expected = gate_grad_eagerly(z.cpu(), values.cpu(), stored, SEPARATE, *types)
            _, same = gate_eagerly(a.cpu(), u.cpu(), stored_of("silu"), stored, torch.float32)
        for ours, right, needed in zip(actual, expected, wanted, strict=True):
            assert (ours is not None) == needed
            assert ours is right is None or torch.equal(ours.cpu(), right)
        assert values.shape == same.shape
        assert (values.cpu() != same).float().mean() <= 0.02


def test_rows_may_have_gaps_and_start_anywhere(kernel_device):
    base = torch.randn(30, 210, device=kernel_device).to(torch.bfloat16)
    for a, u in (base[:, :-10].chunk(2, 1), base[::2, 3:205].chunk(2, 1), (base[:1, 1:].expand(30, 209), base[:, :-1])):
        check_gate(a, u, "relu", 8, 32)


def test_one_launch_each_way_and_no_copy(kernel_device):
    """Of a joint projection in 16 bits too, as any MLP has it."""
    x = torch.randn(4, 10, 128, device=kernel_device).to(torch.bfloat16).requires_grad_()
    with force_backend("triton"), launches() as names, torch.profiler.profile() as profile:
        z = gated_halves(x, stored_of("silu"), 32)
        torch.autograd.grad(z, x, torch.ones_like(z))
    assert names == ["gate_kernel", "gate_grad_kernel"]
    if kernel_device.type == "cuda":  # the interpreter copies what it reads
        called = {event.key for event in profile.key_averages()}
        assert not {"aten::copy_", "aten::cat", "aten::clone"} & called


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "bits", "dtype"),
    cover([(8192, 11008), (1000, 8192), (517, 4099)], BITS, DTYPES),
    ids=str,
)
def test_large_products_on_the_gpu(shape, bits, dtype):
    x = torch.randn(shape[0], 2 * shape[1], device="cuda").to(dtype).requires_grad_()
    a, u = x.chunk(2, 1)
    expected = F.silu(a) * u
    z = gated_halves(x, stored_of("silu", bits), 32)
    eps = torch.finfo(dtype).eps
    exact = F.silu(a.double()) * u.double()
    assert ((z.double() - exact).abs() <= eps * exact.abs() + 2**-20 * u.double().abs() + 1e-7).all()
    grad = torch.randn_like(z)
    (actual,), (right,) = (torch.autograd.grad(y, x, grad) for y in (z, expected))
    # Root mean squares of normal values, see `ops.gate`, of q; p has less.
    error = {8: 0.0062, 4: 0.105, 3: 0.225, 2: 0.53}[bits]
    assert (actual - right).float().norm() <= (error + 2 * eps) * right.float().norm()
    again = gated_halves(x, stored_of("silu", bits), 32)
    assert torch.equal(z, again)
    assert torch.equal(torch.autograd.grad(again, x, grad)[0], actual)


@pytest.mark.gpu
def test_addresses_beyond_32_bits():
    x = torch.randn(2**31 // 8192 + 100, 8192, dtype=torch.bfloat16, device="cuda").requires_grad_()
    z = gated_halves(x, stored_of("silu", 8), 32)
    short = gated_halves(x[-100:], stored_of("silu", 8), 32)
    assert torch.equal(z[-100:], short)
    (actual,) = torch.autograd.grad(z, x, z)
    (right,) = torch.autograd.grad(short, x, short)
    # Places, and so dithers, differ: both are off by at most a step of 1/255 of a range below 12, times a product.
    assert (actual[-100:] - right[-100:]).abs().max() < 0.06 * z[-100:].abs().max()
