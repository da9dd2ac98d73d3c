"""Batch and group normalisation that keep their input quantized: exact outputs, gradients from what is stored."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.models import resnet

from lightning_actprune.codec import formats
from lightning_actprune.codec.dispatch import force_backend
from lightning_actprune.config import Keep
from lightning_actprune.convert import convert
from lightning_actprune.operators.channel_norm import ChannelSetting, Running, channel_norm
from tests.support import oracle
from tests.support.compressed import compressed
from tests.support.marks import in_turn
from tests.support.saving import saved_tensors
from tests.support.workload import launches

BITS = (8, 4, 3, 2)
EPS = 1e-5
FP32 = torch.finfo(torch.float32).eps

KINDS = {
    "batch": ((3, 10, 7, 7), 0, False, 32, torch.float32),
    "batch-whole": ((2, 5, 8, 16), 0, False, 32, torch.bfloat16),
    "batch-one": ((1, 3, 5, 9), 0, False, 16, torch.float32),
    "last": ((3, 64, 5, 3), 0, True, 32, torch.float32),
    "last-odd": ((3, 40, 5, 3), 0, True, 32, torch.bfloat16),
    "last-24": ((2, 27, 3, 3, 2), 0, True, 24, torch.float16),
    "rows": ((61, 33), 0, False, 32, torch.float32),
    "group": ((3, 12, 7, 7), 3, False, 32, torch.float32),
    "group-last": ((2, 12, 4, 8), 12, True, 32, torch.bfloat16),
    "group-rows": ((5, 60), 4, False, 32, torch.float32),
}
"""Shape, groups, channels last, block size and type."""


def inputs(kind: str, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    shape, _, last, _, dtype = KINDS[kind]
    x = 2 * torch.randn(shape) + torch.randn(shape[1]).view(-1, *[1] * (len(shape) - 2))
    if last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    parameters = 1 + torch.randn(2, shape[1])
    return tuple(t.to(device).requires_grad_() for t in (x.to(dtype), *parameters))


def setting_of(kind: str, bits: int = 4, relu: bool = False) -> ChannelSetting:
    _, groups, _, block_size, _ = KINDS[kind]
    return ChannelSetting(groups, EPS, block_size, bits, relu)


def normalized(x: Tensor, weight, bias, kind: str, bits: int = 4, dtype=None, **options) -> Tensor:
    return channel_norm(x, weight, bias, setting_of(kind, bits), dtype or x.dtype, **options)


def exact(x: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Return the normalised ``x [N, C, ...]``, ``mean`` and ``rstd`` in fp64 on the CPU, and what is reduced.

    That is of ``x [N, G, C/G, ...]`` for groups.
    """
    wide = x.detach().double().cpu()
    dims = [0, *range(2, x.dim())]
    if groups:
        wide = wide.reshape(x.shape[0], groups, -1)
        dims = [2]
    mean = wide.mean(dims, keepdim=True)
    rstd = ((wide - mean).square().mean(dims, keepdim=True) + EPS).rsqrt()
    return ((wide - mean) * rstd).view(x.shape), mean, rstd, dims


def gradients(grad_y: Tensor, hat: Tensor, rstd: Tensor, weight: Tensor, groups: int, dims) -> tuple[Tensor, ...]:
    """Return the gradients of input, weight and bias in fp64, as the module docstring has them."""
    g, each = grad_y.double().cpu(), [0, *range(2, grad_y.dim())]
    along = g * weight.detach().double().cpu().view(-1, *[1] * (g.dim() - 2))
    shape = (g.shape[0], groups, -1) if groups else g.shape
    wide, hats = along.reshape(shape), hat.reshape(shape)
    grad_x = wide - wide.mean(dims, keepdim=True) - hats * (wide * hats).mean(dims, keepdim=True)
    return (grad_x * rstd).reshape(g.shape), (g * hat).sum(each), g.sum(each)


def read(values: Tensor, shape: torch.Size, last: bool, block_size: int, bits: int) -> Tensor:
    wide = formats.dequantize(values.cpu(), block_size, bits, torch.float32).double().flatten()[: shape.numel()]
    return wide.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1) if last else wide.view(shape)


@pytest.mark.parametrize(
    ("kind", "bits"),
    [*in_turn(KINDS, BITS), ("batch", 2), ("last", 4), ("group", 3)],
)
def test_output_is_exact_and_gradients_are_those_of_what_is_stored(device, kind, bits):
    _, groups, last, block_size, dtype = KINDS[kind]
    x, weight, bias = inputs(kind, device)
    with saved_tensors() as saved:
        y = normalized(x, weight, bias, kind, bits)
    hat, mean, rstd, dims = exact(x, groups)
    w, b = (t.detach().double().cpu().view(-1, *[1] * (x.dim() - 2)) for t in (weight, bias))
    assert y.dtype == dtype
    right = hat * w + b
    # A few roundings of fp32, of numbers as large as x rstd; then one of the output.
    most = float((x.detach().double().cpu().abs().max() + mean.abs().max()) * rstd.max())
    bound = 8 * FP32 * (most * w.abs() + b.abs()) + torch.finfo(dtype).eps * right.abs()
    assert ((y.detach().double().cpu() - right).abs() <= bound).all()
    values, statistics, _ = saved
    for found, expected in zip(statistics[:2], (mean, rstd), strict=True):
        torch.testing.assert_close(found.double().cpu(), expected.flatten(), rtol=4 * FP32, atol=8 * FP32)
    near = read(values, x.shape, last and not groups, block_size, bits)
    # Half a step of a block's range: at most that of all, times 32/31 and 9/8 of a scale that is rounded up; the reach
    # of a block far from zero adds as much again.
    assert (near - hat).abs().max() <= 2 * float(hat.abs().max()) * 32 / 31 * 9 / 8 / (2**bits - 1)
    grad_y = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, weight, bias), grad_y)
    expected = gradients(grad_y, near, rstd, weight, groups, dims)
    assert [g.dtype for g in found] == [dtype, torch.float32, torch.float32]
    for actual, right, tolerance in zip(found, expected, (torch.finfo(dtype).eps, 0, 0), strict=True):
        assert oracle.relative_error(actual, right) <= max(tolerance, 3e-6)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "last"])
def test_statistics_far_from_zero(device, last):
    """A mean of a thousand deviations: sums of squares would leave nothing of the variance in fp32."""
    x = 1000 + torch.randn(16, 6, 9, 11)
    x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format).to(device)
    with saved_tensors() as saved:
        y = channel_norm(x.requires_grad_(), None, None, ChannelSetting(0, EPS, 32, 4), x.dtype)
    hat, mean, rstd, _ = exact(x, 0)
    unbiased = x.detach().double().cpu().var((0, 2, 3))
    statistics = saved[1].double().cpu()
    # The mean is rounded to 1000 FP32; values that lie in few tiles of a part are summed as differences.
    torch.testing.assert_close(statistics[0], mean.flatten(), rtol=2 * FP32, atol=0)
    torch.testing.assert_close(statistics[1], rstd.flatten(), rtol=64 * FP32, atol=0)
    torch.testing.assert_close(statistics[2], unbiased, rtol=64 * FP32, atol=0)
    torch.testing.assert_close(y.detach().double().cpu(), hat, rtol=0, atol=2000 * FP32)


@pytest.mark.parametrize(("kind", "value"), [("batch", math.nan), ("last", math.inf), ("group", math.nan)])
def test_what_is_not_finite_reaches_the_gradients_of_its_set(device, value, kind):
    x, weight, bias = inputs(kind, device)
    with torch.no_grad():
        x[1, 4, 2, 1] = value
    y = normalized(x, weight, bias, kind)
    of_x, of_weight = torch.autograd.grad(y, (x, weight), torch.randn_like(y))
    sets = (1, slice(4, 8)) if kind == "group" else (slice(None), 4)
    assert y[sets].isnan().all()
    assert of_x[sets].isnan().all()
    assert of_weight[4].isnan()
    untouched = {"batch": (slice(None), 8), "last": (slice(None), slice(32, 64)), "group": (2, slice(None))}[kind]
    assert of_x[untouched].isfinite().all()


@pytest.mark.parametrize(("kind", "momentum"), [("batch", 0.1), ("last-odd", 0.7), ("rows", 0.1)])
def test_running_statistics_move_by_the_share_of_the_batch(device, kind, momentum):
    x, weight, bias = inputs(kind, device)
    mean, var = torch.randn(2, x.shape[1], device=device).abs() + 0.5
    batches = torch.tensor(3, device=device)
    before, versions = [t.double().cpu() for t in (mean, var)], [t._version for t in (mean, var, batches)]
    with launches() as names:
        normalized(x, weight, bias, kind, running=Running(mean, var, batches, momentum))
    assert names in ([], ["channel_statistics_kernel", "merge_statistics_kernel", "normalize_channels_kernel"])
    wide, others = x.detach().double().cpu(), [0, *range(2, x.dim())]
    for actual, old, new in zip((mean, var), before, (wide.mean(others), wide.var(others)), strict=True):
        # A few roundings each of the old number, the new one and their difference.
        bound = 8 * FP32 * (old.abs() + new.abs())
        assert ((actual.double().cpu() - (old + momentum * (new - old))).abs() <= bound).all()
    assert batches == 4
    assert all(t._version > version for t, version in zip((mean, var, batches), versions, strict=True))


def test_a_checkpoint_moves_running_statistics_as_often_as_the_dense_layers(device):
    """Run again, it stops at the last tensor that is saved, which is the norm's."""
    for momentum in (0.1, None):
        dense = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8, momentum=momentum)).to(device)
        ours = compressed(dense, "norm", bits=8)
        x = torch.randn(4, 8, 5, 5, device=device)
        for model in (dense, ours):
            checkpoint(model, x, use_reentrant=False).square().sum().backward()
        for actual, right in zip(ours[1].buffers(), dense[1].buffers(), strict=True):
            torch.testing.assert_close(actual, right)


def in_eval_mode(sequence: bool = False) -> tuple[nn.Module, nn.Module, Tensor]:
    """Return a converted layer and the dense one in eval mode, with statistics that are not those of the input."""
    dense, shape = (nn.BatchNorm1d(24), (5, 24, 9)) if sequence else (nn.BatchNorm2d(24), (5, 24, 4, 3))
    for parameter in dense.parameters():
        nn.init.normal_(parameter, 1.0)
    for _ in range(3):
        dense(torch.randn(shape) + 0.5)
    return compressed(dense, "norm", bits=8).eval(), dense.eval(), (2 * torch.randn(shape) + 1).requires_grad_()


@pytest.mark.parametrize("sequence", [False, True])
def test_with_frozen_weights_in_eval_mode_nothing_of_the_input_is_kept(sequence):
    layer, dense, x = in_eval_mode(sequence)
    x = x.detach().bfloat16().requires_grad_()
    for with_bias in (False, True):
        for module in (layer, dense):
            module.weight.requires_grad_(False)
            module.bias.requires_grad_(with_bias)
        with saved_tensors() as saved:
            y = layer(x)
        assert torch.equal(y, dense(x))
        assert sum(tensor.numel() for tensor in saved) == 24
        grad = torch.randn(x.shape).bfloat16()
        found, right = (torch.autograd.grad(m(x), [x, m.bias][: 1 + with_bias], grad) for m in (layer, dense))
        for actual, expected in zip(found, right, strict=True):
            assert actual.dtype == expected.dtype
            torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-7 * len(actual) ** 0.5)


def test_second_derivatives_of_a_frozen_layer_are_torchs():
    layer, dense, _ = in_eval_mode()
    seconds = []
    for module in (layer.requires_grad_(False).double(), dense.requires_grad_(False).double()):
        x = torch.linspace(-1, 1, 5 * 24 * 12, dtype=torch.float64).view(5, 24, 4, 3).requires_grad_()
        (grad,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(grad.square().sum(), x)[0])
    torch.testing.assert_close(*seconds)


@pytest.mark.parametrize(("kind", "bits"), [("batch-one", 4), ("last-24", 3), ("rows", 4)])
@force_backend("triton")
def test_a_relu_of_the_same_passes_is_that_after_them(kernel_device, kind, bits):
    """Bit for bit, of NaN too, by as many launches, for a bit a value: in whole bytes for each block."""
    given, grad = inputs(kind, kernel_device), None
    with torch.no_grad():
        given[0][0, 1] = math.nan
    results, kept, names_of = [], [], []
    for fused in (True, False):
        with launches() as names, saved_tensors() as saved:
            y = channel_norm(*given, setting_of(kind, bits, fused), given[0].dtype)
        kept.append(sum(t.nbytes for t in saved))
        y = y if fused else torch.relu(y)
        if grad is None:  # one that is NaN does not pass where the output is zero
            grad = torch.where(y == 0, math.nan, torch.randn_like(y))
        with launches() as backward:
            grads = torch.autograd.grad(y, given, grad)
        results.append((y, *grads))
        names_of.append(names + backward)
    for actual, right in zip(*results, strict=True):
        assert (actual.dtype, actual.stride()) == (right.dtype, right.stride())
        torch.testing.assert_close(actual, right, rtol=0, atol=0, equal_nan=True)
    assert (y == 0).any()
    assert names_of[0] == names_of[1]
    count, block = given[0].numel(), min(KINDS[kind][3], given[0].numel())
    bits_bytes = -(-count // block) * -(-block // 8)
    assert bits_bytes <= kept[0] - kept[1] < bits_bytes + 16


def compressed_block(block: nn.Module, **rules) -> nn.Module:
    block = copy.deepcopy(block)
    convert(block, rules={**rules, "type:norm": Keep(bits=4), "type:activation": Keep(bits=8), "*": None})
    return block


def activations(names: list[str]) -> int:
    """Return how many of the launched kernels are not those of a norm."""
    return sum("normalize" not in name and "statistics" not in name for name in names)


@pytest.mark.integration
@pytest.mark.parametrize(("name", "most"), [("BasicBlock", 1), ("Bottleneck", 2)])
@force_backend("triton")
def test_resnet_blocks_compute_in_one_pass_what_their_layers_do(kernel_device, name, most):
    """Unless somebody may see that their layers are called."""
    cls = getattr(resnet, name)
    block = nn.Sequential(cls(16, 16 // cls.expansion, 2, nn.Sequential(nn.Conv2d(16, 16, 1, 2), nn.BatchNorm2d(16))))
    for parameter in block.to(kernel_device).parameters():
        nn.init.normal_(parameter, 0.5, 0.5)
    ours, x = compressed_block(block), torch.randn(3, 16, 6, 4, device=kernel_device).requires_grad_()
    results, seen, separate = [], [], copy.deepcopy(ours)
    separate[0].relu.register_forward_hook(lambda module, arguments, y: None)  # which is called, therefore
    for module in (ours, separate):
        with launches() as names:
            y = module(x)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
        results.append((y, *torch.autograd.grad(y, (x, *module.parameters()), grad), *module.buffers()))
        seen.append(activations(names))
    assert seen[1] - seen[0] == most
    for actual, right in zip(*results, strict=True):
        assert torch.equal(actual, right)

    def fused(changed: nn.Module) -> int:
        with launches() as names:
            changed(x)
        return most + 1 - activations(names)

    hooked = copy.deepcopy(ours)
    hooked[0].bn1.register_forward_pre_hook(lambda module, arguments: None)
    assert fused(hooked) == fused(compressed_block(block, **{"0.bn1": None})) == most - 1
    assert fused(copy.deepcopy(ours).eval()) == 0
    handle = nn.modules.module.register_module_forward_hook(lambda module, arguments, y: None)
    try:
        assert fused(ours) == 0
    finally:
        handle.remove()
