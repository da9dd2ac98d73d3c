"""The kernels of gated products: read bit for bit as the reference reads, strided rows, real sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_actprune.codec import formats
from lightning_actprune.codec.dispatch import force_backend
from lightning_actprune.operators.gated import (
    GATE_FIRST,
    GATE_LAST,
    SEPARATE,
    StoredFactors,
    gate_eagerly,
    gate_grad_eagerly,
    gated_halves,
)
from tests.support.activations import BITS, gated_oracle, inputs, stored_of
from tests.support.marks import cover
from tests.support.oracle import largest_error
from tests.support.packing import DTYPES, each_dtype, rounded
from tests.support.workload import launches


def check(a: Tensor, u: Tensor, name: str, bits: int, block_size: int) -> None:
    """Compare products and factors with fp64, and gradients from the same bytes with the reference's, bit for bit."""
    function, stored = stored_of(name, bits), StoredFactors(bits, block_size, True, True)
    grad = torch.randn(a.shape, device=a.device).to(a.dtype)
    with force_backend("triton"), launches() as names:
        z, values = gate_eagerly(a, u, function, stored, a.dtype)
        found = gate_grad_eagerly(grad, values, stored, SEPARATE, a.dtype, u.dtype)
    assert names == ["gate_kernel", "gate_grad_kernel"]
    with force_backend("reference"):
        expected = gate_grad_eagerly(grad.cpu(), values.cpu(), stored, SEPARATE, torch.float32, torch.float32)
        _, same = gate_eagerly(a.cpu(), u.cpu(), function, stored, a.dtype)
    for ours, right in zip(found, expected, strict=True):
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
    check(*pair(7, 100, dtype, kernel_device), name, 4, 32)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("rows", "length", "block_size"), [(1, 1, 1), (5, 130, 24)], ids=str)
def test_formats_and_blocks(kernel_device, rows, length, block_size, bits):
    check(*pair(rows, length, torch.float32, kernel_device), "silu", bits, block_size)


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
            found = gate_grad_eagerly(z, values, stored, SEPARATE, *types)
        with force_backend("reference"):
            expected = gate_grad_eagerly(z.cpu(), values.cpu(), stored, SEPARATE, *types)
            _, same = gate_eagerly(a.cpu(), u.cpu(), stored_of("silu"), stored, torch.float32)
        for ours, right, needed in zip(found, expected, wanted, strict=True):
            assert (ours is not None) == needed
            assert ours is right is None or torch.equal(ours.cpu(), right)
        assert values.shape == same.shape
        assert (values.cpu() != same).float().mean() <= 0.02


def test_rows_may_have_gaps_and_start_anywhere(kernel_device):
    base = torch.randn(30, 210, device=kernel_device).to(torch.bfloat16)
    for a, u in (base[:, :-10].chunk(2, 1), base[::2, 3:205].chunk(2, 1), (base[:1, 1:].expand(30, 209), base[:, :-1])):
        check(a, u, "relu", 8, 32)


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
def test_large_inputs_on_the_gpu(shape, bits, dtype):
    x = torch.randn(shape[0], 2 * shape[1], device="cuda").to(dtype).requires_grad_()
    a, u = x.chunk(2, 1)
    expected = F.silu(a) * u
    z = gated_halves(x, stored_of("silu", bits), 32)
    eps = torch.finfo(dtype).eps
    exact = F.silu(a.double()) * u.double()
    assert ((z.double() - exact).abs() <= eps * exact.abs() + 2**-20 * u.double().abs() + 1e-7).all()
    grad = torch.randn_like(z)
    (found,), (right,) = (torch.autograd.grad(y, x, grad) for y in (z, expected))
    # Root mean squares of normal values, see `ops.gate`, of q; p has less.
    error = {8: 0.0062, 4: 0.105, 3: 0.225, 2: 0.53}[bits]
    assert (found - right).float().norm() <= (error + 2 * eps) * right.float().norm()
    again = gated_halves(x, stored_of("silu", bits), 32)
    assert torch.equal(z, again)
    assert torch.equal(torch.autograd.grad(again, x, grad)[0], found)


@pytest.mark.gpu
def test_addresses_beyond_32_bits():
    x = torch.randn(2**31 // 8192 + 100, 8192, dtype=torch.bfloat16, device="cuda").requires_grad_()
    z = gated_halves(x, stored_of("silu", 8), 32)
    short = gated_halves(x[-100:], stored_of("silu", 8), 32)
    assert torch.equal(z[-100:], short)
    (found,) = torch.autograd.grad(z, x, z)
    (right,) = torch.autograd.grad(short, x, short)
    # Places, and so dithers, differ: both are off by at most a step of 1/255 of a range below 12, times a product.
    assert (found[-100:] - right[-100:]).abs().max() < 0.06 * z[-100:].abs().max()
