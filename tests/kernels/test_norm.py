"""The kernels that normalise, shift or scale rows: many programs, long rows, and real sizes; see ``operators.norm``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_actprune.codec.dispatch import force_backend
from lightning_actprune.kernels import norm as kernels
from lightning_actprune.operators import norm as operators
from lightning_actprune.operators.norm import NormSetting
from tests.kernels.agreement import compare, small_tiles
from tests.support import oracle
from tests.support.marks import cover
from tests.support.saving import saved_tensors
from tests.support.workload import launches

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(x: Tensor, grad_y: Tensor, weight: Tensor, centred: bool, bits: int) -> tuple[Tensor, ...]:
    """Return output, what is stored, and gradients."""
    bias = torch.zeros_like(weight).requires_grad_() if centred else None
    given = [t for t in (x.detach().requires_grad_(), weight.detach().requires_grad_(), bias) if t is not None]
    setting = NormSetting(centred, False, 1e-5, 32, bits)
    with saved_tensors() as saved:
        y = operators.norm(given[0], given[1], bias, x.shape[1:], setting, x.dtype)
    return y.detach(), saved[0], *torch.autograd.grad(y, given, grad_y)


@pytest.fixture
def small():
    with small_tiles(operators, kernels, TILE_VALUES=512, WARPS=2):
        yield


ROWS = [(5, 70, 32), (7, 100, 24), (2, 1500, 32)]
"""Rows, their length and the block size."""
KINDS = {
    "layer": (True, False, True, "wb"),
    "layer-plain": (True, False, True, ""),
    "rms": (False, False, True, "w"),
    "rms-rounded": (False, True, True, "w"),
    "affine": (False, False, False, "wb"),
    "scale": (False, False, False, "w"),
    "scaled-branch": (False, False, False, "wr"),
}
"""Whether rows are centred, rounded and normalised, and what there is of weight, bias and residual."""


@pytest.mark.parametrize(("kind", "rows", "bits", "dtype"), cover(list(KINDS), ROWS, (8, 3), DTYPES), ids=str)
@pytest.mark.usefixtures("small")
def test_kernels_do_what_plain_torch_does(kernel_device, kind, rows, bits, dtype):
    (count, length, block), (centred, rounded, normed, others) = rows, KINDS[kind]
    x = (2 * torch.randn(count, length) + 1).to(dtype).to(kernel_device)
    if kind == "layer-plain":  # what is not finite stays in its row
        x[1, 3], x[-1, 60] = float("nan"), float("inf")
    made = {"w": 1 + torch.randn(length), "b": torch.randn(length), "r": torch.randn(count, length).to(dtype)}
    weight, bias, residual = (made[name].to(kernel_device) if name in others else None for name in "wbr")
    setting = NormSetting(centred, rounded, 1e-5, block, bits, normed)
    if normed:
        compare(lambda x, w, b: operators.norm(x, w, b, (length,), setting, dtype), (x, weight, bias))
    else:
        compare(lambda *given: operators.scaled(*given, block, bits), (x, weight, bias, residual))


def test_rows_that_no_program_holds_are_normalised_by_torch(kernel_device, monkeypatch, small):
    monkeypatch.setattr(kernels, "MOST_VALUES", 64)
    x, grad_y = torch.randn(2, 5, 100, device=kernel_device)
    with force_backend("triton"), launches() as names:
        y, _, grad_x, _ = run(x, grad_y, torch.ones(100, device=kernel_device), False, 8)
    assert names == []
    torch.testing.assert_close(y, F.rms_norm(x, (100,), eps=1e-5), rtol=0, atol=1e-5)
    assert grad_x.isfinite().all()


def test_rows_may_have_gaps_and_start_anywhere_with_three_launches(kernel_device):
    base = torch.randn(30, 110, device=kernel_device)
    for x in (base[::2, 3:80], base[1:, 1:], base[:1].expand(30, 110)):
        with force_backend("triton"), launches() as names:
            y, *_, of_bias = run(x, x, torch.ones(x.shape[1], device=kernel_device), True, 8)
        torch.testing.assert_close(y, F.layer_norm(x, x.shape[1:], eps=1e-5), rtol=0, atol=1e-5)
        torch.testing.assert_close(of_bias, x.sum(0), rtol=0, atol=1e-4)
        assert names == ["normalize_kernel", "normalize_grad_kernel", "add_sets_kernel"]


LARGE = [(25216, 768), (12544, 384), (8192, 4096), (1000, 8192), (517, 8190)]
LARGE = cover(LARGE, (8, 4, 2), DTYPES, (True, False))


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "bits", "dtype", "centred"), LARGE, ids=str)
def test_large_inputs_on_the_gpu(shape, bits, dtype, centred):
    x, grad_y = ((2 * torch.randn(shape, device="cuda") + k).to(dtype) for k in (1, 0))
    weight = torch.randn(shape[1], device="cuda", dtype=dtype)
    operator = F.layer_norm if centred else F.rms_norm
    given = [t.detach().requires_grad_() for t in (x, weight)]
    torchs = operator(given[0], shape[1:], given[1], eps=1e-5)
    right = torch.autograd.grad(torchs, given, grad_y)
    y, values, *grads = run(x, grad_y, weight, centred, bits)
    exact = operator(x.double(), shape[1:], weight.double(), eps=1e-5)
    theirs = (torchs.double() - exact).abs().max()
    assert (y.double() - exact).abs().max() <= 2 * theirs + 2e-6
    error = {8: 0.006, 4: 0.1, 2: 0.5}[bits]
    assert oracle.relative_error(grads[1], right[1]) < error + torch.finfo(dtype).eps
    assert oracle.relative_error(grads[0], right[0]) < 3 * error * shape[1] ** -0.5 + torch.finfo(dtype).eps
    again = run(x, grad_y, weight, centred, bits)
    assert all(torch.equal(a, b) for a, b in zip((y, values, *grads), again, strict=True))


@pytest.mark.gpu
def test_addresses_beyond_32_bits():
    x = torch.randn(2**31 // 4096 + 100, 4096, dtype=torch.bfloat16, device="cuda")
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    y, _, grad_x, _ = run(x, x, weight, False, 8)
    torch.testing.assert_close(y[-100:], F.rms_norm(x[-100:], (4096,), eps=1e-5), rtol=0, atol=2**-6)
    short = run(x[-100:], x[-100:], weight, False, 8)
    # The place of a block decides its dither, so that errors differ: by a step at most, 1.16 / 255 of a range below 10.
    assert (grad_x[-100:] - short[2]).abs().max() < 0.05
