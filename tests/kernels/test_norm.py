"""The kernels of norms, of rows and of channels: many programs, every cut of the memory, long rows, real sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_actprune.codec.dispatch import force_backend
from lightning_actprune.kernels import channel_norm as channel_kernels
from lightning_actprune.kernels import norm as kernels
from lightning_actprune.operators import channel_norm as channel_operators
from lightning_actprune.operators import norm as operators
from lightning_actprune.operators.channel_norm import ChannelSetting, Running
from lightning_actprune.operators.norm import NormSetting
from tests.kernels.agreement import compare, small_tiles
from tests.support import oracle
from tests.support.compressed import laid_out
from tests.support.marks import cover
from tests.support.saving import saved_tensors
from tests.support.workload import launches

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(x: Tensor, grad_y: Tensor, weight: Tensor, centred: bool, bits: int) -> tuple[Tensor, ...]:
    """Return output, what is stored, and gradients."""
    bias = torch.zeros_like(weight).requires_grad_() if centred else None
    inputs = [t for t in (x.detach().requires_grad_(), weight.detach().requires_grad_(), bias) if t is not None]
    setting = NormSetting(centred, False, 1e-5, 32, bits)
    with saved_tensors() as saved:
        y = operators.norm(inputs[0], inputs[1], bias, x.shape[1:], setting, x.dtype)
    return y.detach(), saved[0], *torch.autograd.grad(y, inputs, grad_y)


@pytest.fixture
def small():
    with small_tiles(operators, kernels, TILE_VALUES=512, WARPS=2):
        yield


@pytest.fixture
def small_channels():
    sizes = {"PROGRAMS": 3, "TILE_VALUES": 256, "MOST_CHANNEL": 32, "MOST_COLS": 4}
    with small_tiles(channel_operators, channel_kernels, **sizes):
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
    parameters = {"w": 1 + torch.randn(length), "b": torch.randn(length), "r": torch.randn(count, length).to(dtype)}
    weight, bias, residual = (parameters[name].to(kernel_device) if name in others else None for name in "wbr")
    setting = NormSetting(centred, rounded, 1e-5, block, bits, normed)
    if normed:
        compare(lambda x, w, b: operators.norm(x, w, b, (length,), setting, dtype), (x, weight, bias))
    else:
        compare(lambda *inputs: operators.scaled(*inputs, block, bits), (x, weight, bias, residual))


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
    inputs = [t.detach().requires_grad_() for t in (x, weight)]
    torchs = operator(inputs[0], shape[1:], inputs[1], eps=1e-5)
    right = torch.autograd.grad(torchs, inputs, grad_y)
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


# Of channels, and of groups of them.


def run_channels(x: Tensor, grad_y: Tensor, weight: Tensor, groups: int, bits: int) -> tuple[Tensor, ...]:
    """Return output, what is stored, statistics, and gradients."""
    inputs = [t.detach().requires_grad_() for t in (x, weight, torch.zeros_like(weight))]
    with saved_tensors() as saved:
        y = channel_operators.channel_norm(*inputs, ChannelSetting(groups, 1e-5, 32, bits), x.dtype)
    values, statistics, *_ = saved
    return y.detach(), values, statistics, *torch.autograd.grad(y, inputs, grad_y)


CUTS = {
    "last-odd": ((1, 34, 3), 0, True),
    "channels-odd": ((3, 5, 7, 7), 0, False),
    "channels-short": ((12, 7, 3), 0, False),
    "channels-long": ((2, 2, 280), 0, False),
    "groups": ((2, 8, 5, 9), 4, False),
    "groups-last": ((2, 6, 4, 5), 6, True),
}
"""Shape, groups, and whether channels are last in memory."""
MODES = ["affine", "plain", "fixed"]
"""Of batch normalisation; there are no groups but of the first two."""
CASES = cover([cut for cut in CUTS if not CUTS[cut][1]], MODES, (8, 3), DTYPES)
CASES += cover([cut for cut in CUTS if CUTS[cut][1]], MODES[:2], (8, 3), DTYPES)


@pytest.mark.parametrize(("cut", "mode", "bits", "dtype"), CASES, ids=str)
@pytest.mark.usefixtures("small_channels")
def test_channel_kernels_do_what_plain_torch_does(kernel_device, cut, mode, bits, dtype):
    (shape, groups, last), device = CUTS[cut], kernel_device
    x = laid_out(3 * torch.randn(shape, device=device) + 2, last).to(dtype)
    weight, bias = 1 + torch.randn(2, shape[1], device=device)
    inputs = (x, None, None) if mode == "plain" else (x, weight, bias)
    fixed = None
    if mode == "fixed":
        var = torch.rand(shape[1], device=device) + 0.5
        fixed = torch.stack([torch.randn(shape[1], device=device), (var + 1e-5).rsqrt(), var])
    moved = []

    def call(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        running = None
        if mode == "affine" and not groups:
            mean, var = torch.zeros(shape[1], device=device), torch.ones(shape[1], device=device)
            running = Running(mean, var, torch.zeros((), dtype=torch.int64, device=device), 0.3)
            moved.append(running)
        setting = ChannelSetting(groups, 1e-5, 32, bits)
        return channel_operators.channel_norm(x, weight, bias, setting, dtype, fixed, running)

    compare(call, inputs)
    for mine, theirs in zip(*moved, strict=True) if moved else ():
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert not moved or int(moved[0].batches) == 1


@pytest.mark.parametrize("groups", [0, 2])
def test_what_is_not_finite_stays_in_its_set(kernel_device, groups):
    x = torch.randn(4, 8, 4, 4, device=kernel_device)
    # The sum of 64 fives and its 64th are exact, in any order.
    x[1, 3, 2, 2], x[2, 6, 0, 0], x[:, 7] = float("nan"), float("inf"), 5.0
    setting = ChannelSetting(groups, 1e-5, 32, 4)
    compare(lambda x: channel_operators.channel_norm(x, None, None, setting, x.dtype), (x,))


def test_statistics_far_from_zero(kernel_device):
    """A mean of a thousand deviations: sums of squares would leave nothing of the variance in fp32."""
    for last in (False, True):
        x = laid_out(1000 + torch.randn(6, 6, 5, 7, device=kernel_device), last)
        inputs = channel_operators.channel_norm, ChannelSetting(0, 1e-5, 32, 4), x.dtype
        with force_backend("triton"), saved_tensors() as saved:
            inputs[0](x.requires_grad_(), None, None, *inputs[1:])
        rstd = (x.detach().double().cpu().var((0, 2, 3), unbiased=False) + 1e-5).rsqrt()
        torch.testing.assert_close(saved[1][1].double().cpu(), rstd, rtol=1e-3, atol=0)


@pytest.mark.parametrize("last", [True, False], ids=["last", "contiguous"])
def test_values_may_start_anywhere_with_six_launches(kernel_device, last):
    x = torch.randn(2 * 8 * 49 + 1, device=kernel_device)[1:]
    x = x.view(2, 7, 7, 8).movedim(-1, 1) if last else x.view(2, 8, 7, 7)
    with force_backend("triton"), launches() as names:
        y, *_, of_bias = run_channels(x, x, torch.ones(8, device=kernel_device), 0, 8)
    forward = ["channel_statistics_kernel", "merge_statistics_kernel", "normalize_channels_kernel"]
    sums = "pixel_sums_kernel" if last else "channel_sums_kernel"
    assert names == [*forward, sums, "add_sums_kernel", "channel_grad_kernel"]
    torch.testing.assert_close(y, F.batch_norm(x, None, None, training=True), rtol=0, atol=1e-5)
    torch.testing.assert_close(of_bias, x.sum((0, 2, 3)), rtol=0, atol=1e-4)


LARGE_CHANNELS = [(32, 64, 112, 112), (64, 256, 28, 28), (256, 2048, 7, 7), (64, 40, 33, 31)]
LARGE_CHANNELS = cover(LARGE_CHANNELS, (0, 8), (True, False), (8, 4, 2), DTYPES)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "groups", "last", "bits", "dtype"), LARGE_CHANNELS, ids=str)
def test_large_channels_on_the_gpu(shape, groups, last, bits, dtype):
    x, grad_y = (laid_out(torch.randn(shape, device="cuda").to(dtype), last) for _ in range(2))
    x, weight = (2 * x + 1).to(dtype), torch.randn(shape[1], device="cuda")
    y, values, statistics, grad_x, *sums = run_channels(x, grad_y, weight, groups, bits)
    both = [t.detach().requires_grad_() for t in (x.float(), weight)]
    right_y = (
        F.group_norm(both[0], groups, both[1]) if groups else F.batch_norm(both[0], None, None, both[1], None, True)
    )
    right = torch.autograd.grad(right_y, both, grad_y.float())
    torch.testing.assert_close(y.float(), right_y, rtol=torch.finfo(dtype).eps, atol=2e-5)
    error = {8: 0.005, 4: 0.09, 2: 0.44}[bits]  # operators.norm
    # Of a random gradient both are vectors of normal numbers, whose norms have a deviation of (2 C)^-1/2 each.
    assert oracle.relative_error(sums[0], right[1]) < error * (1 + 5 / shape[1] ** 0.5) + 1e-5
    assert oracle.relative_error(grad_x, right[0]) < error / 10 + torch.finfo(dtype).eps
    again = run_channels(x, grad_y, weight, groups, bits)
    assert all(torch.equal(a, b) for a, b in zip((y, values, statistics, grad_x, *sums), again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("last", [True, False], ids=["last", "contiguous"])
def test_addresses_of_channels_beyond_32_bits(last):
    shape = (2**31 // (64 * 4096) + 3, 64, 64, 64)
    x = torch.randn(shape[0], 64, 64, 64, dtype=torch.bfloat16, device="cuda")
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    y, _, statistics, grad_x, *sums = run_channels(x, x, torch.ones(64, device="cuda"), 0, 8)
    part = x[-2:].float()
    right = (part - statistics[0].view(-1, 1, 1)) * statistics[1].view(-1, 1, 1)
    torch.testing.assert_close(y[-2:].float(), right, rtol=2**-7, atol=2**-7)
    right = sum(part.sum((0, 2, 3), dtype=torch.float64) for part in x.split(1024))  # whole, it takes 16 GiB more
    torch.testing.assert_close(sums[1], right.float(), rtol=1e-4, atol=2.0)
    assert grad_x[-2:].isfinite().all()
