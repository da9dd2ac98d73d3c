r"""Batch and group normalisation that store their normalised input quantized.

A tensor ``[N, C, ...]`` is read in the order of its memory, as ``[images, channels, length]``. If it is contiguous, an
image has C channels of its pixels; with channels last, every pixel is an image with C channels of one value. All values
of a channel, in all images, share a mean, a scale and a shift. With groups, statistics read ``[1, N G, C/G pixels]``
and all else reads ``[1, N C, pixels]``. For a set of n values with one mean (a channel or a group)::

    x^ = (x - mean) rstd,  rstd = 1 / sqrt(var + eps)
    y  = x^ w + b

    grad_b = sum g     grad_w = sum g x^     grad_x = rstd (g w - sum(g w)/n - x^ sum(g w x^)/n)

The first two sums are over the values of a channel, the last over those of the set. As in ``operators.norm``, backward
reads x~, the stored x^, and the errors are the same, with n in place of the length of a row.

Blocks are ``block_size`` consecutive values in memory, and ignore where channels end: x^ has the same magnitude
everywhere, so a block may hold values of several channels, and only the last block of the tensor is short. A NaN or Inf
makes x^ of its whole set NaN; other channels are then read as NaN where they share a block with that set. With channels
last these are all channels in its blocks, else the neighbouring channels' first and last values.

Saved for backward: x^ quantized, three fp32 numbers for each set, and the weight itself. torch saves the input itself
and two such numbers. Statistics are in fp32; the variance is never a difference of large sums.

With fixed statistics, such as those of batch normalisation in eval mode, only the gradient of the weight needs the
normalised input: ``grad_x = g w rstd`` is exact. If the weight is frozen too, one number per channel is saved.

In plain eager mode on a GPU, kernels run by cached launches. The launch that merges the statistics of the batch also
updates fp32 running statistics, and a ReLU behind the norm is fused into the same kernels: its bits are stored with the
values. Everything else runs in plain torch.

torchvision's ResNet blocks compute the same as before. If a compressed norm is followed by a compressed ReLU, neither
module is called: the kernels that normalise apply the ReLU too, with the same results bit for bit. Both are called if
anybody could see the difference, as hooks on either do, and if the kernels do not take the tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_actprune.codec.blocks import ceil_div
from lightning_actprune.codec.dispatch import (
    LaunchCache,
    TensorKey,
    as_dtype,
    choose_backend,
    in_plain_eager_mode,
    make_apply,
    may_compress,
    no_view,
    on_device_of,
    once_differentiable,
)
from lightning_actprune.codec.formats import row_bytes, split
from lightning_actprune.codec.layout import is_channels_last
from lightning_actprune.codec.packed import MAX_KEPT_BLOCKS, check_storable, pack_all, unpack_all
from lightning_actprune.codec.private import is_native_batch_norm
from lightning_actprune.config import Operator
from lightning_actprune.operators.activation import CompressedReLU
from lightning_actprune.operators.base import CompressedLayer, has_hooks
from lightning_actprune.operators.norm import CompressedNorm, dense_format, laid_out_as, output_dtype

if TYPE_CHECKING:
    from lightning_actprune.kernels.channel_norm import ChannelNormGradLaunch, ChannelNormLaunch, Stored


# === Settings, and constants for backward =============================================================================


class ChannelSetting(NamedTuple):
    """Settings of the normalisation and of its storage.

    Args:
        groups: Groups of channels; 0 for batch normalisation.
        eps: Added to the variance.
        block_size: Values per block; a smaller tensor shortens it.
        bits: Bits of a stored value.
        relu: True if negative outputs become zero, which only the kernels do.
    """

    groups: int
    eps: float
    block_size: int
    bits: int
    relu: bool = False

    def cut_to(self, count: int) -> ChannelSetting:
        """Return the setting for ``count`` values."""
        return self._replace(block_size=max(1, min(self.block_size, count)))


class Running(NamedTuple):
    """The running statistics of a layer.

    Args:
        mean: fp32 or 16 bits, ``[C]``, or ``None``.
        var: As ``mean``.
        batches: Number of batches, or ``None``.
        momentum: Weight of a new batch; ``None``: all batches have the same weight.
    """

    mean: Tensor | None
    var: Tensor | None
    batches: Tensor | None
    momentum: float | None


class Cut(NamedTuple):
    """The dimensions in which the memory of a tensor is read: ``[images, channels, length]``."""

    images: int
    channels: int
    length: int


class ChannelLayout(NamedTuple):
    """Constants that backward needs from forward.

    Args:
        setting: Settings, with blocks cut to the tensor.
        shape: Shape of input and output.
        strides: Strides of the input as it was read.
        cut: The dimensions in which it was read.
        last: True if it was read with channels last.
        fixed: True if the statistics were fixed.
        types: Types of input, weight and bias, ``None`` for a missing parameter.
    """

    setting: ChannelSetting
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    cut: Cut
    last: bool
    fixed: bool
    types: tuple[torch.dtype, torch.dtype | None, torch.dtype | None]


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of input, weight and bias."""
Needed = tuple[bool, bool, bool]
"""Which gradients of input, weight and bias are needed."""


# === Autograd =========================================================================================================


class ChannelNormFunction(torch.autograd.Function):
    """Autograd function of batch or group normalisation that saves its normalised input quantized."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        fixed: Tensor | None,
        setting: ChannelSetting,
        dtype: torch.dtype,
        running: Running | None,
        eager: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the exact output in ``dtype``, and update ``running``.

        Without ``eager``, the statistics of the batch are returned too, and ``running`` is not updated.
        """
        # x [N, C, ...], weight and bias [C], fixed and statistics [3, sets]: mean, rstd and variance
        bound = find_launch(x, weight, bias, fixed, setting, dtype, running) if eager else None
        ctx.launched = bound is not None
        moved: Any = None
        if bound is None:
            y, values, statistics, ctx.layout = _normalize(x, weight, bias, fixed, setting, dtype)
        else:
            launch, ctx.layout, moves = bound
            if running is not None and moves:
                moved = running[:3]
            with on_device_of(x):
                y, values, statistics = launch(x, weight, bias, fixed, moved)
        if eager and running is not None and moved is None:
            move(running, statistics, x)  # before saving, because a checkpoint that runs again may stop there
        ctx.save_for_backward(values, statistics, weight)
        if x.device.type == "cpu":
            y = no_view(y.contiguous(memory_format=dense_format(x, setting.groups == 0)))
        elif not setting.groups:
            y = _laid_out(y, x, weight, bias, fixed is None, setting.eps, eager)
        if eager:
            return y
        ctx.mark_non_differentiable(statistics)
        return y, statistics

    @staticmethod
    @once_differentiable("a normalisation layer that keeps its input quantized")
    def backward(ctx: Any, eager: bool, grad_output: Tensor, *_: Tensor | None) -> Gradients:
        """Return the gradients of input, weight and bias from ``grad_output [N, C, ...]``."""
        values, statistics, weight = ctx.saved_tensors  # the bytes of x~, [3, sets], [C]
        compute = _launch_grad if eager and ctx.launched else normalize_grad
        return compute(grad_output, values, statistics, weight, ctx.layout, ctx.needs_input_grad[:3])


_channel_norm = make_apply(ChannelNormFunction)


def _laid_out(
    y: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, eps: float, eager: bool
) -> Tensor:
    """Return the output of a batch norm with the strides of torch's own on a GPU.

    Kernels of torch write it with the strides of ``x``; cuDNN writes it contiguous or with the channels of images last.
    """
    if x.is_contiguous():
        return y
    order = dense_format(x)
    if order != torch.contiguous_format and x.is_contiguous(memory_format=order):
        return y
    if x.dim() == 2 or (eager and is_native_batch_norm(x, weight, bias, training, eps)):
        return laid_out_as(x, y)
    return y.contiguous(memory_format=order) if eager else y


def _of_parameters(sums: Tensor, layout: ChannelLayout, needed: Needed) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weight and bias from ``sums [2, C]`` in their own types, ``None`` if not needed."""
    of_weight, of_bias = (
        as_dtype(total, dtype) if wanted and dtype is not None else None
        for total, dtype, wanted in zip(sums, layout.types[1:], needed[1:], strict=True)
    )
    return of_weight, of_bias


class FrozenBatchNormFunction(torch.autograd.Function):
    """Batch normalisation in eval mode with a frozen weight: it saves only the factors ``[C]`` of its input.

    Its gradients are differentiable themselves, so it uses neither ``make_apply`` nor ``once_differentiable``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        eps: float,
    ) -> Tensor:
        """Return torch's output."""
        scale = torch.rsqrt(var.to(torch.promote_types(x.dtype, torch.float32)) + eps)  # [C]
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)
        ctx.save_for_backward(scale if weight is None else scale * weight)
        ctx.dtype, ctx.bias = x.dtype, None if bias is None else bias.dtype
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of input and bias."""
        if grad_output is None:  # the loss does not depend on the output
            return (None,) * 6
        (scale,) = ctx.saved_tensors  # [C]
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            scale = scale.view(-1, *[1] * (grad_output.dim() - 2))
            if torch.is_grad_enabled() or not in_plain_eager_mode(grad_output):
                grad_x = (grad_output * scale).to(ctx.dtype)
            else:  # in one kernel
                grad_x = torch.mul(grad_output, scale, out=torch.empty_like(grad_output, dtype=ctx.dtype))
        if ctx.needs_input_grad[2]:
            grad_bias = grad_output.sum([0, *range(2, grad_output.dim())], dtype=scale.dtype).to(ctx.bias)
        return grad_x, None, grad_bias, None, None, None


# === Reference in plain torch =========================================================================================


def _normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    fixed: Tensor | None,
    setting: ChannelSetting,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, ChannelLayout]:
    """Return output, values, statistics and layout, in plain torch."""
    setting = setting.cut_to(x.numel())
    check_storable(x, setting.bits, ceil_div(x.numel(), setting.block_size), setting.block_size)
    last = reads_last(x, setting.groups)
    cut, ordered = cut_of(x.shape, last), x.movedim(1, -1) if last else x
    y, values, statistics = normalize(ordered.float(), weight, bias, fixed, setting, cut)
    y = as_dtype(y, dtype).view(ordered.shape)
    y = y.movedim(-1, 1).clone() if last else no_view(y)
    types = x.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype
    return y, values, statistics, ChannelLayout(setting, x.shape, y.stride(), cut, last, fixed is not None, types)


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, fixed: Tensor | None, setting: ChannelSetting, cut: Cut
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise each channel, or each group of channels of an image, in plain torch.

    Args:
        x: In the order of memory, in fp32.
        weight: ``[C]`` or ``None``.
        bias: ``[C]`` or ``None``.
        fixed: ``statistics`` to use instead of those of ``x``; no gradient flows through them.
        setting: Settings, with blocks cut to the tensor.
        cut: The dimensions in which memory is read.

    Returns:
        The output in fp32 in the dimensions of ``cut``, the bytes of all blocks, and ``statistics [3, sets]`` in fp32:
        mean, rstd and unbiased variance.
    """
    if fixed is None:
        sets = x.reshape(_sets(cut, setting.groups))  # [images, sets, length]
        var, mean = torch.var_mean(sets, (0, 2), correction=0)
        each = sets.shape[0] * sets.shape[2]
        statistics = torch.stack([mean, torch.rsqrt(var + setting.eps), var * (each / max(each - 1, 1))])
    else:
        statistics = fixed.clone()
    (mean, rstd, _), weight, bias = spread(statistics, weight, bias, cut, setting.groups)
    hat = (x.reshape(_each(cut, setting.groups)) - mean[:, None]) * rstd[:, None]
    y = hat if weight is None else hat * weight.float()[:, None]
    if bias is not None:
        y = y + bias.float()[:, None]
    return y, pack_all(hat.reshape(1, -1), setting.block_size, setting.bits), statistics


def normalize_grad(
    grad_output: Tensor,
    values: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    layout: ChannelLayout,
    needed: Needed = (True, True, True),
) -> Gradients:
    """Return the gradients of a normalisation in plain torch.

    Args:
        grad_output: ``[N, C, ...]``, of any layout.
        values: The bytes of all blocks.
        statistics: ``[3, sets]``.
        weight: ``[C]`` or ``None``.
        layout: Constants of forward.
        needed: Which gradients are needed.
    """
    groups, _, block_size, bits, relu = layout.setting
    cut, rstd, count = _each(layout.cut, groups), statistics[1], math.prod(layout.cut)
    ordered = grad_output.movedim(1, -1) if layout.last else grad_output
    grad = ordered.reshape(cut).float()
    if relu:
        values, passed = _split(values, count, block_size, bits)
        grad = torch.where(passed.view(cut), grad, 0.0)
    x = unpack_all(values, 1, count, block_size, bits, torch.float32).reshape(cut)
    if groups:
        each = torch.stack([(grad * x).view(layout.cut).sum(2), grad.view(layout.cut).sum(2)])
        sums, factors = _group_factors(each, rstd, weight, groups, cut.length)
    else:
        sums = torch.stack([(grad * x).sum((0, 2)), grad.sum((0, 2))])
        scale = rstd if weight is None else rstd * weight.float()
        shared = torch.zeros_like(sums) if layout.fixed else -scale * sums / (cut.images * cut.length)
        factors = torch.stack([scale, *shared])
    grad_x = None
    if needed[0]:
        of_grad, of_x, shift = factors.view(3, -1, cut.channels, 1)
        grad_x = (grad * of_grad + (x * of_x + shift)).to(layout.types[0]).reshape(ordered.shape)
        grad_x = grad_x.movedim(-1, 1) if layout.last else grad_x
    return grad_x, *_of_parameters(sums, layout, needed)


def _group_factors(
    each: Tensor, rstd: Tensor, weight: Tensor | None, groups: int, length: int
) -> tuple[Tensor, Tensor]:
    """Return the sums ``[2, C]`` for the parameters, and the factors ``[3, N C]`` of the input gradient.

    ``each [2, N, C]`` has the sums of ``g x~`` and ``g`` of each channel; ``grad_x = f0 g + f1 x~ + f2``.
    """
    sums = each.sum(1)
    _, images, channels = each.shape
    weighted = each if weight is None else each * weight.float()
    size = channels // groups
    means = weighted.view(2, images, groups, size).sum(3) / max(size * length, 1)
    shared = -(means * rstd.view(images, groups)).repeat_interleave(size, 2)
    scale = rstd.view(images, groups).repeat_interleave(size, 1)
    scale = scale if weight is None else scale * weight.float()
    return sums, torch.stack([scale, *shared]).view(3, -1)


def _split(stored: Tensor, count: int, block_size: int, bits: int) -> tuple[Tensor, Tensor]:
    """Split ``stored`` into values ``[blocks, bytes]`` and the mask of a ReLU, bool ``[count]``."""
    from lightning_actprune.kernels.channel_norm import bits_start

    blocks, row = ceil_div(count, block_size), row_bytes(block_size, bits, 0)
    passed = split(stored[bits_start(blocks, row) :].view(blocks, -1), 1, block_size)
    return stored[: blocks * row].view(blocks, row), passed.reshape(-1)[:count] != 0


# === Dimensions in the order of memory ================================================================================


def reads_last(x: Tensor, groups: int) -> bool:
    """Return True if ``x [N, C, ...]`` is read with channels last; otherwise it is made contiguous.

    Groups are read from contiguous tensors only.
    """
    return not groups and not x.is_contiguous() and is_channels_last(x)


def cut_of(shape: Sequence[int], last: bool) -> Cut:
    """Return the dimensions of a tensor ``[N, C, ...]`` that is contiguous, or has its channels ``last``."""
    images, channels, pixels = shape[0], shape[1], math.prod(shape[2:])
    return Cut(images * pixels, channels, 1) if last else Cut(images, channels, pixels)


def _sets(cut: Cut, groups: int) -> Cut:
    """Return the dimensions in which values of one set share a mean."""
    if not groups:
        return cut
    return Cut(1, cut.images * groups, cut.channels // groups * cut.length)


def _each(cut: Cut, groups: int) -> Cut:
    """Return the dimensions in which values share a factor and a shift: with groups, the channels of each image."""
    return Cut(1, cut.images * cut.channels, cut.length) if groups else cut


def spread(
    statistics: Tensor, weight: Tensor | None, bias: Tensor | None, cut: Cut, groups: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return statistics ``[3, sets]`` and parameters as one number for each channel of ``_each``."""
    if not groups:
        return statistics, weight, bias
    weight, bias = (None if p is None else p.repeat(cut.images) for p in (weight, bias))
    return statistics.repeat_interleave(cut.channels // groups, 1), weight, bias


# === Launches =========================================================================================================


class BoundChannelNorm(NamedTuple):
    """Launches for inputs of one layout.

    Args:
        launch: The launches.
        layout: Constants that backward needs.
        moves: True if the launches update running statistics.
    """

    launch: ChannelNormLaunch
    layout: ChannelLayout
    moves: bool


def find_launch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    fixed: Tensor | None,
    setting: ChannelSetting,
    dtype: torch.dtype,
    running: Running | None,
) -> BoundChannelNorm | None:
    """Return how the kernels take these tensors, or ``None`` if they do not."""
    momentum, counted = None, False
    if running is not None and _movable(running, x.shape[1], x.device):
        momentum, counted = running.momentum, running.batches is not None
    return _launches.find((setting, dtype, momentum, counted), x, weight, bias, fixed)


def _movable(running: Running, channels: int, device: torch.device) -> bool:
    """Return True if the kernels can update the running statistics."""
    mean, var, batches, momentum = running
    if mean is None or var is None or momentum is None:
        return False
    if not mean.dtype == var.dtype == torch.float32 or not mean.device == var.device == device:
        return False
    if not type(mean) is type(var) is Tensor or not mean.numel() == var.numel() == channels:
        return False
    if not (mean.is_contiguous() and var.is_contiguous()):
        return False
    return batches is None or (batches.dtype == torch.int64 and batches.device == device and type(batches) is Tensor)


def _launch_grad(
    grad_output: Tensor,
    values: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    layout: ChannelLayout,
    needed: Needed,
) -> Gradients:
    """Return the gradients that are needed, by the kernels if these take the gradient."""
    if grad_output.stride() != layout.strides:
        empty = torch.empty_strided(
            grad_output.shape, layout.strides, dtype=grad_output.dtype, device=grad_output.device
        )
        grad_output = empty.copy_(grad_output)
    launch = _grad_launches.find((layout, needed), grad_output, values, statistics, weight)
    if launch is None:
        return normalize_grad(grad_output, values, statistics, weight, layout, needed)
    (groups, *_), cut, (of_x, *types) = layout.setting, layout.cut, layout.types
    grad_x = of_weight = of_bias = None
    if needed[0]:
        grad_x = torch.empty_strided(grad_output.shape, layout.strides, dtype=of_x, device=grad_output.device)
    with on_device_of(grad_output):
        partial = launch.sums(grad_output, values)
        if groups:
            each = partial.sum(1).view(2, cut.images, cut.channels)
            sums, factors = _group_factors(each, statistics[1], weight, groups, cut.length)
            of_weight, of_bias = _of_parameters(sums, layout, needed)
        else:
            of_weight = statistics.new_empty(cut.channels, dtype=types[0]) if needed[1] else None
            of_bias = statistics.new_empty(cut.channels, dtype=types[1]) if needed[2] else None
            factors = launch.factors(partial, statistics, weight, of_weight, of_bias)
        if grad_x is not None:
            launch.input_grad(grad_output, values, factors, grad_x)
    return grad_x, of_weight, of_bias


def _channel_norm_launch(
    device: torch.device,
    key: TensorKey,
    weight: TensorKey | None,
    bias: TensorKey | None,
    fixed: TensorKey | None,
    setting: ChannelSetting,
    output: torch.dtype,
    momentum: float | None,
    counted: bool,
) -> BoundChannelNorm | None:
    shape, strides, dtype, _ = key
    count = shape.numel()
    setting = setting.cut_to(count)
    apart = any(parameter is not None and parameter[1] != (1,) for parameter in (weight, bias))
    if not count or dtype == torch.float64 or ceil_div(count, setting.block_size) > MAX_KEPT_BLOCKS or apart:
        return None
    if choose_backend(shape, dtype, device, setting.block_size, 1) == "reference":
        return None
    from lightning_actprune.kernels.channel_norm import ChannelNormLaunch

    x = torch.empty_strided(shape, strides, device="meta")
    last, groups = reads_last(x, setting.groups), setting.groups
    copied, cut = not last and not x.is_contiguous(), cut_of(shape, last)
    types = dtype, None if weight is None else weight[2], None if bias is None else bias[2]
    laid_out = torch.empty_like(x.contiguous() if copied else x).stride()
    layout = ChannelLayout(setting, shape, laid_out, cut, last, fixed is not None, types)
    present = weight is not None, bias is not None
    each = functools.partial(spread, cut=cut, groups=groups) if groups else None
    of_sets = _sets(cut, groups), setting.eps, present, momentum, counted
    launch = ChannelNormLaunch(_stored(layout, device), *of_sets, dtype=output, copied=copied, spread=each)
    return BoundChannelNorm(launch, layout, momentum is not None)


def _channel_norm_grad_launch(
    device: torch.device,
    grad_output: TensorKey,
    values: TensorKey,
    statistics: TensorKey,
    weight: TensorKey | None,
    layout: ChannelLayout,
    needed: Needed,
) -> ChannelNormGradLaunch:
    from lightning_actprune.kernels.channel_norm import ChannelNormGradLaunch

    return ChannelNormGradLaunch(_stored(layout, device), layout.types[1] is not None, layout.fixed, needed)


def _stored(layout: ChannelLayout, device: torch.device) -> Stored:
    """Return the layout as the kernels take it."""
    from lightning_actprune.kernels.channel_norm import Stored

    groups, _, block_size, bits, relu = layout.setting
    return Stored(_each(layout.cut, groups), block_size, bits, device, relu)


_launches = LaunchCache(_channel_norm_launch)
_grad_launches = LaunchCache(_channel_norm_grad_launch)


# === Functional form ==================================================================================================


def channel_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    setting: ChannelSetting,
    dtype: torch.dtype,
    fixed: Tensor | None = None,
    running: Running | None = None,
) -> Tensor:
    """Return ``x [N, C, ...]`` normalised, in ``dtype``, and update ``running``.

    Args:
        x: Not empty.
        weight: ``[C]`` or ``None``.
        bias: ``[C]`` or ``None``.
        setting: Settings of the normalisation and of its storage.
        dtype: Type of the output.
        fixed: Mean, rstd and variance of each channel, ``[3, C]`` in fp32, to use instead of those of ``x``.
        running: Running statistics to update, of batch normalisation.
    """
    output: Tensor | tuple[Tensor, Tensor] = _channel_norm(x, weight, bias, fixed, setting, dtype, running)
    if isinstance(output, Tensor):
        return output
    if running is not None:
        move(running, output[1])
    return output[0]


@torch.no_grad()
def move(running: Running, statistics: Tensor, batch: Tensor | None = None) -> None:
    """Move the running statistics towards those of a batch.

    With a ``batch`` on the CPU, torch itself updates them, so they equal those of the dense layer bit for bit.
    """
    mean, var, batches, momentum = running
    share: float | Tensor | None = momentum
    if batches is not None:
        batches.add_(1)
        if share is None:  # the mean of all batches; torch reads the number back and waits for the device
            share = batches.float().reciprocal()
    share = 0.0 if share is None else share
    if batch is not None and _moves_as_torch(batch, mean, var):
        torch.batch_norm_update_stats(batch, mean, var, float(share))
        torch.autograd.graph.increment_version((mean, var))  # type: ignore[arg-type]  # autograd does not see the update
        return
    for average, value in ((mean, statistics[0]), (var, statistics[2])):
        if average is None:
            continue
        if average.dtype == torch.float32:
            average.lerp_(value, share)
        else:
            average.copy_(average.float().lerp_(value, share))


def _moves_as_torch(batch: Tensor, mean: Tensor | None, var: Tensor | None) -> bool:
    """Return True if torch can update statistics of these types: those of the batch, or fp32."""
    if batch.device.type != "cpu" or mean is None or var is None:
        return False
    return mean.dtype == var.dtype and mean.dtype in (torch.float32, batch.dtype)


# === Module classes ===================================================================================================


def _keeps(layer: Any, x: Tensor) -> bool:
    """Return ``layer.keeps`` for a layer that normalises all dimensions of ``x``, in less time."""
    weight = layer.weight
    plain = weight is None or (type(weight) is nn.Parameter and weight.device == x.device)
    if type(x) is not Tensor or not x.is_floating_point() or not plain:
        return bool(layer.keeps(x, weight, tuple(x.shape)))
    return x.requires_grad or (weight is not None and weight.requires_grad)


class CompressedBatchNorm(CompressedNorm):
    """Mixin of batch normalisation layers; see ``CompressedNorm``.

    Running statistics are updated as in the dense layers. If torch refuses an input, such as one with a single value
    per channel, its own error is raised.
    """

    training: bool
    num_features: int
    eps: float
    momentum: float | None
    track_running_stats: bool
    weight: Any
    bias: Any
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input: ``[N, C, ...]``."""
        if not self.keeps_batch(input):
            return cast(Tensor, super().forward(input))  # type: ignore[misc]
        return self.normalized(input)

    def keeps_batch(self, x: Tensor) -> bool:
        """Return True if anything is saved of ``x``; inputs that torch refuses are left to torch."""
        if not may_compress(x) or x.dim() < 2 or x.shape[1] != self.num_features:
            return False
        if (self.running_mean is None) != (self.running_var is None):
            return False
        if x.numel() <= self.num_features or not _keeps(self, x):
            return False
        check = getattr(self, "_check_input_dim", None)
        if check is None:
            return False
        check(x)
        return True

    def normalized(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised, and update the running statistics; in eval mode, use them if there are any."""
        weight, bias, setting, dtype = self._arguments(x)
        if self.training:
            return channel_norm(x, weight, bias, setting, dtype, running=self._running())
        mean, var = self.running_mean, self.running_var
        if mean is None or var is None:
            return channel_norm(x, weight, bias, setting, dtype)
        if weight is None or not weight.requires_grad:
            return cast(Tensor, FrozenBatchNormFunction.apply(x, weight, bias, mean, var, self.eps))
        fixed = torch.stack([mean.float(), torch.rsqrt(var.float() + self.eps), var.float()])
        return channel_norm(x, weight, bias, setting, dtype, fixed=fixed)

    def rectified(self, x: Tensor) -> Tensor | None:
        """Return the ReLU of the normalised ``x`` from the same kernels, or ``None`` if they do not run.

        They run only in training, if they take ``x``. With ``None``, nothing has been computed or changed.
        """
        if not self.training or not self.keeps_batch(x) or not in_plain_eager_mode(x):
            return None
        weight, bias, setting, dtype = self._arguments(x)
        setting, running = setting._replace(relu=True), self._running()
        if find_launch(x, weight, bias, None, setting, dtype, running) is None:
            return None
        return channel_norm(x, weight, bias, setting, dtype, running=running)

    def _arguments(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, ChannelSetting, torch.dtype]:
        """Return weight, bias, setting and output type."""
        blocks = self._state.blocks
        setting = ChannelSetting(0, self.eps, blocks.block_size, blocks.bits)
        dtype = x.dtype if x.dtype == torch.float32 else output_dtype(x, "batch_norm")
        return self.weight, self.bias, setting, dtype

    def _running(self) -> Running | None:
        """Return the running statistics that training updates."""
        if not self.track_running_stats:
            return None
        return Running(self.running_mean, self.running_var, self.num_batches_tracked, self.momentum)


class CompressedBatchNorm1d(CompressedBatchNorm, nn.BatchNorm1d):
    """``nn.BatchNorm1d`` that keeps its normalised input quantized; see ``CompressedBatchNorm``."""

    dense_class = nn.BatchNorm1d


class CompressedBatchNorm2d(CompressedBatchNorm, nn.BatchNorm2d):
    """``nn.BatchNorm2d`` that keeps its normalised input quantized; see ``CompressedBatchNorm``."""

    dense_class = nn.BatchNorm2d


class CompressedBatchNorm3d(CompressedBatchNorm, nn.BatchNorm3d):
    """``nn.BatchNorm3d`` that keeps its normalised input quantized; see ``CompressedBatchNorm``."""

    dense_class = nn.BatchNorm3d


class CompressedTimmBatchNormAct2d(CompressedBatchNorm):
    """Mixin of timm's ``BatchNormAct2d``: batch normalisation, then dropout and an activation function."""

    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised and activated input: ``[N, C, H, W]``."""
        if not self.keeps_batch(x):
            return cast(Tensor, self.dense_class.forward(self, x))
        return cast(Tensor, self.act(self.drop(self.normalized(x))))


class CompressedGroupNorm(CompressedNorm, nn.GroupNorm):
    """``nn.GroupNorm`` that keeps its normalised input quantized; see ``CompressedNorm``.

    An input that is not contiguous is copied.
    """

    dense_class = nn.GroupNorm

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input: ``[N, C, ...]``."""
        return self.normalized(input) if self.keeps_groups(input) else super().forward(input)

    def normalized(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised."""
        blocks = self._state.blocks
        setting = ChannelSetting(self.num_groups, self.eps, blocks.block_size, blocks.bits)
        dtype = x.dtype if x.dtype == torch.float32 else output_dtype(x, "group_norm")
        return channel_norm(x, self.weight, self.bias, setting, dtype)

    def keeps_groups(self, x: Tensor) -> bool:
        """Return True if anything is saved of ``x``; inputs that torch refuses are left to torch."""
        if not may_compress(x) or x.dim() < 2 or x.shape[1] != self.num_channels or not x.numel():
            return False
        values = x.shape[0] * math.prod(x.shape[2:]) * self.num_channels // self.num_groups
        return values > 1 and _keeps(self, x)


class CompressedTimmGroupNorm(CompressedGroupNorm):
    """Mixin of timm's ``GroupNorm`` and ``GroupNorm1``, which are torch's unless "fast norm" is switched on."""

    _fast_norm: bool

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input: ``[N, C, ...]``."""
        return self.dense_class.forward(self, x) if self._fast_norm else super().forward(x)


class CompressedTimmGroupNormAct(CompressedTimmGroupNorm):
    """Mixin of timm's ``GroupNormAct``: group normalisation, then dropout and an activation function."""

    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised and activated input: ``[N, C, ...]``."""
        if self._fast_norm or not self.keeps_groups(x):
            return self.dense_class.forward(self, x)
        return cast(Tensor, self.act(self.drop(self.normalized(x))))


class CompressedResNetBlock(CompressedLayer):
    """Mixin of torchvision's ResNet blocks, which save nothing themselves."""

    operator: ClassVar[Operator] = "norm"
    stores = False

    conv1: nn.Module
    bn1: nn.Module
    conv2: nn.Module
    bn2: nn.Module
    relu: nn.Module
    downsample: nn.Module | None

    def added(self, branch: Tensor, x: Tensor) -> Tensor:
        """Add ``x``, or its downsampled copy, to ``branch`` in place, and return the ReLU of the sum."""
        branch += x if self.downsample is None else self.downsample(x)
        return cast(Tensor, self.relu(branch))

    def rectified(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Return the ReLU of the normalised ``x``."""
        relu = self.relu
        if (
            type(norm) is CompressedBatchNorm2d
            and type(relu) is CompressedReLU
            and not has_hooks(norm)
            and not has_hooks(relu)
        ):
            y = norm.rectified(x)
            if y is not None:
                return y
        return cast(Tensor, relu(norm(x)))


class CompressedBasicBlock(CompressedResNetBlock):
    """Mixin of ``BasicBlock``."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` after the block: ``[N, C, H, W]``."""
        return self.added(self.bn2(self.conv2(self.rectified(self.bn1, self.conv1(x)))), x)


class CompressedBottleneck(CompressedResNetBlock):
    """Mixin of ``Bottleneck``."""

    conv3: nn.Module
    bn3: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` after the block: ``[N, C, H, W]``."""
        y = self.rectified(self.bn1, self.conv1(x))
        y = self.rectified(self.bn2, self.conv2(y))
        return self.added(self.bn3(self.conv3(y)), x)


# === Classes covered ==================================================================================================

CLASSES: dict[type[nn.Module], type[CompressedLayer]] = {
    nn.BatchNorm1d: CompressedBatchNorm1d,
    nn.BatchNorm2d: CompressedBatchNorm2d,
    nn.BatchNorm3d: CompressedBatchNorm3d,
    nn.GroupNorm: CompressedGroupNorm,
}
"""The compressed class of each class of torch."""
FOREIGN: dict[tuple[str, str], type[CompressedLayer]] = {
    ("timm.layers.norm", "GroupNorm"): CompressedTimmGroupNorm,
    ("timm.layers.norm", "GroupNorm1"): CompressedTimmGroupNorm,
    ("timm.layers.norm_act", "BatchNormAct2d"): CompressedTimmBatchNormAct2d,
    ("timm.layers.norm_act", "GroupNormAct"): CompressedTimmGroupNormAct,
    ("torchvision.models.resnet", "BasicBlock"): CompressedBasicBlock,
    ("torchvision.models.resnet", "Bottleneck"): CompressedBottleneck,
}
"""The mixin that replaces the forward of each class of another package; it comes first among the bases."""
LEFT_DENSE: dict[type[nn.Module], tuple[Operator, str]] = {
    nn.SyncBatchNorm: ("norm", "finds its statistics together with other processes, by kernels of its own"),
}
"""Classes that stay dense: the operator of each, and the reason."""
