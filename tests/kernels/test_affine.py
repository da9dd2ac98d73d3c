"""The kernel of an affine layer's gradients: many programs, long rows, real sizes; see ``tests/ops/test_affine``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_actprune.kernels import affine as kernels
from lightning_actprune.kernels import norm
from lightning_actprune.ops import affine_grad as operators
from lightning_actprune.ops.dispatch import force_backend
from lightning_actprune.ops.geometry import block_and_keep, sparsity_parts
from lightning_actprune.ops.pack import pack
from tests import oracle
from tests.kernels.workload import launches

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(
    x: Tensor, grad_y: Tensor, weight: Tensor | None, biased: bool, block_size: int, value_format: str
) -> tuple[Tensor, Tensor]:
    """Return gradients of input and parameters at a sparsity of .6 of ``x [S, T, L]``."""
    block, keep = block_and_keep(x, block_size, sparsity_parts(0.6), value_format)
    packed = pack(x, block, keep, value_format)
    return operators.affine_grad(grad_y, *packed, weight, x.dtype, block, value_format, biased)


@pytest.mark.parametrize("value_format", ["same", "int3"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("shape", "block"), [((1, 1, 33), 16), ((3, 29, 100), 24), ((2, 150, 64), 8), ((7, 1, 1500), 32)]
)
def test_sums_of_many_programs_are_those_of_the_reference(
    kernel_device, shape, block, biased, value_format, monkeypatch
):
    """Programs that have several tiles, one that is not full, or none; samples of many runs of blocks, and of one."""
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(norm, "TILE_VALUES", 512)
    monkeypatch.setattr(kernels, "WARPS", 2)
    kernels.grad_launch.cache_clear()
    x = torch.randn(shape, device=kernel_device)
    grad_y = torch.randn(x.shape[0] * x.shape[1], shape[-1], device=kernel_device)
    weight, found = torch.randn(shape[-1], device=kernel_device), []
    for backend in ("triton", "reference"):
        with force_backend(backend), launches() as names:
            found.append(run(x, grad_y, weight, biased, block, value_format))
        assert (names[-2:] == ["affine_grad_kernel", "add_sets_kernel"]) == (backend == "triton")
    kernels.grad_launch.cache_clear()
    (grad_x, sums), (right_x, right_sums) = found
    assert torch.equal(grad_x, right_x)
    assert sums.shape == (1 + biased, shape[-1])
    # Both add up at most 300 products of up to 20 in fp32, in another order.
    torch.testing.assert_close(sums, right_sums, rtol=0, atol=300 * 20 * torch.finfo(torch.float32).eps)


def test_rows_that_no_program_holds_are_unpacked(kernel_device, monkeypatch):
    monkeypatch.setattr(norm, "MOST_VALUES", 64)
    x = torch.randn(2, 5, 100, device=kernel_device)
    grad_y, weight = torch.randn(10, 100, device=kernel_device), torch.randn(100, device=kernel_device)
    with force_backend("triton"), launches() as names:
        grad_x, sums = run(x, grad_y, weight, True, 32, "same")
    assert names[-1] == "unpack_kernel"
    assert torch.equal(grad_x, grad_y * weight)
    hat = oracle.pruned(x.cpu(), 32, 0.6).view(10, 100).double()
    assert oracle.relative_error(sums[0], (grad_y.double().cpu() * hat).sum(0)) < 1e-6


def test_gradients_may_have_gaps_and_start_anywhere(kernel_device):
    base, x = torch.randn(30, 110, device=kernel_device), torch.randn(3, 5, 77, device=kernel_device)
    weight = torch.randn(78, device=kernel_device)[1:]
    for grad_y in (
        base[::2, 3:80],
        base[1:16, 1:78],
        base[:1, :77].expand(15, 77),
        base[:15, :77].t().contiguous().t(),
    ):
        with force_backend("triton"):
            found = run(x, grad_y, weight, True, 16, "same")
            right = run(x, grad_y.contiguous(), weight, True, 16, "same")
        assert all(torch.equal(mine, other) for mine, other in zip(found, right, strict=True))


def test_without_an_input_gradient_none_is_written(kernel_device):
    x, grad_y = torch.randn(2, 5, 64, device=kernel_device), torch.randn(10, 64, device=kernel_device)
    with force_backend("triton"):
        grad_x, sums = run(x, grad_y, None, True, 16, "int4")
        _, right = run(x, grad_y, torch.ones(64, device=kernel_device), True, 16, "int4")
    assert grad_x.shape == (0, 64)
    assert torch.equal(sums, right)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value_format", ["same", "int8", "int4", "int2", "fp8"])
@pytest.mark.parametrize("shape", [(128, 197, 768), (64, 196, 384), (8, 1024, 4096), (3, 17, 8190)], ids=str)
def test_large_inputs_on_the_gpu(shape, value_format, dtype):
    x, grad_y = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    grad_y, weight = grad_y.flatten(0, 1), torch.randn(shape[-1], device="cuda")
    found = run(x, grad_y, weight, True, 32, value_format)
    with force_backend("reference"):
        right = run(x, grad_y, weight, True, 32, value_format)
    assert torch.equal(found[0], right[0])
    assert oracle.relative_error(found[1], right[1]) < 1e-5
    again = run(x, grad_y, weight, True, 32, value_format)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.gpu
def test_addresses_beyond_32_bits():
    x = torch.randn(2**31 // 4096 + 100, 4096, dtype=torch.bfloat16, device="cuda")[:, None]
    grad_y, weight = x[:, 0], torch.ones(4096, device="cuda")
    grad_x, sums = run(x, grad_y, weight, False, 32, "same")
    assert torch.equal(grad_x[-100:], grad_y[-100:])
    # Kept blocks hold the larger part of each column's squares: 52 to 100 % at a sparsity of .6 within rows.
    assert (sums[0] > 0.4 * len(x)).all()
