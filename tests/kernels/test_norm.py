"""The kernels that normalise rows: whole tiles, many programs, long rows, and real sizes; see ``operators.norm``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_actprune.codec.dispatch import force_backend
from lightning_actprune.kernels import norm as kernels
from lightning_actprune.operators import norm as operators
from lightning_actprune.operators.norm import NormSetting
from tests.support import oracle
from tests.support.saving import saved_tensors
from tests.support.workload import launches

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(x: Tensor, grad_y: Tensor, weight: Tensor, centred: bool, bits: int) -> tuple[Tensor, ...]:
    """Return output, what is stored, and gradients of input, weight and, if there is one, bias, which is zero."""
    bias = torch.zeros_like(weight).requires_grad_() if centred else None
    given = [t for t in (x.detach().requires_grad_(), weight.detach().requires_grad_(), bias) if t is not None]
    setting = NormSetting(centred, False, 1e-5, 32, bits)
    with saved_tensors() as saved:
        y = operators.norm(given[0], given[1], bias, x.shape[1:], setting, x.dtype)
    return y.detach(), saved[0], *torch.autograd.grad(y, given, grad_y)


@pytest.fixture
def fresh_launches():
    """Launches made under the sizes of a test, and for it alone."""
    caches = operators._launches, operators._grad_launches
    for cache in caches:
        cache.clear()
    yield
    for cache in caches:
        cache.clear()


@pytest.mark.parametrize(("rows", "length"), [(1, 33), (29, 100), (7, 1500)])
def test_sums_of_many_programs_are_those_of_the_reference(kernel_device, rows, length, monkeypatch, fresh_launches):
    """Programs that have several tiles, one that is not full, or none."""
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(kernels, "TILE_VALUES", 512)
    monkeypatch.setattr(kernels, "WARPS", 2)
    x, grad_y = torch.randn(2, rows, length, device=kernel_device)
    weight, found = torch.randn(length, device=kernel_device), []
    for backend in ("triton", "reference"):
        with force_backend(backend), launches() as names:
            found.append(run(x, grad_y, weight, True, 8))
        assert bool(names) == (backend == "triton")
    (y, _, grad_x, *sums), (right_y, _, right_x, *right_sums) = found
    torch.testing.assert_close(y, right_y, rtol=0, atol=1e-5)
    # Codes may differ where a value was rounded differently: by a step of 1/255 of a block's range.
    assert oracle.relative_error(grad_x, right_x) < 3e-3
    assert oracle.relative_error(sums[0], right_sums[0]) < 1e-2
    torch.testing.assert_close(sums[1], right_sums[1], rtol=0, atol=1e-4)


def test_rows_that_no_program_holds_are_normalised_by_torch(kernel_device, monkeypatch, fresh_launches):
    monkeypatch.setattr(kernels, "MOST_VALUES", 64)
    x, grad_y = torch.randn(2, 5, 100, device=kernel_device)
    with force_backend("triton"), launches() as names:
        y, _, grad_x, _ = run(x, grad_y, torch.ones(100, device=kernel_device), False, 8)
    assert names == []
    torch.testing.assert_close(y, F.rms_norm(x, (100,), eps=1e-5), rtol=0, atol=1e-5)
    assert grad_x.isfinite().all()


def test_one_launch_forward_and_two_backward(kernel_device):
    x, grad_y = torch.randn(2, 40, 64, device=kernel_device)
    with force_backend("triton"), launches() as names:
        run(x, grad_y, torch.ones(64, device=kernel_device), True, 4)
    assert names == ["normalize_kernel", "normalize_grad_kernel", "add_sets_kernel"]


def test_rows_may_have_gaps_and_start_anywhere(kernel_device):
    base = torch.randn(30, 110, device=kernel_device)
    for x in (base[::2, 3:80], base[1:, 1:], base[:1].expand(30, 110)):
        with force_backend("triton"):
            y, *_, of_bias = run(x, x, torch.ones(x.shape[1], device=kernel_device), True, 8)
        torch.testing.assert_close(y, F.layer_norm(x, x.shape[1:], eps=1e-5), rtol=0, atol=1e-5)
        torch.testing.assert_close(of_bias, x.sum(0), rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("shape", [(25216, 768), (12544, 384), (8192, 4096), (1000, 8192), (517, 8190)], ids=str)
@pytest.mark.parametrize("centred", [True, False], ids=["layer", "rms"])
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
