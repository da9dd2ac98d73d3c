r"""Batch and group normalisation whose normalised values are stored in few bits: ``actprune::normalize_lines*``.

A tensor ``[N, C, ...]`` is read in the order of its memory, as ``[images, lines, length]``: contiguous, an image has C
lines of so many pixels; channels last, every pixel is an image of C lines of one value. The values of a line, in all
images, share a mean, a scale and a shift. Groups are lines too: of ``[1, N G, C/G pixels]`` for the statistics, of
``[1, N C, pixels]`` for the rest. Of a set of n values that have one mean (a line; a group)::

    x^ = (x - mean) rstd,  rstd = 1 / sqrt(var + eps)
    y  = x^ w + b

    grad_b = sum g     grad_w = sum g x^     grad_x = rstd (g w - sum(g w)/n - x^ sum(g w x^)/n)

the first two over the values of a channel, the last over those of the set. As in ``ops.normalize``, backward reads x~,
which is what few bits hold of x^, and what that costs is the same, with n in place of the length of a row.

Blocks are ``block_size`` values one after another in memory, wherever lines end: x^ has the same size everywhere, so
that a block may hold values of several channels, and none is cut off but the last of the tensor. Hence a NaN or Inf,
which makes x^ of all its set NaN, makes NaN what is read of other channels too: channels last, of those that share
its blocks, else of the next channel's first and last values.

Statistics are in fp32; the variance is never a difference of large sums (``kernels.line_statistics``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_actprune.ops import formats, reference
from lightning_actprune.ops.activate import in_memory
from lightning_actprune.ops.dispatch import choose_backend, on_device_of
from lightning_actprune.ops.geometry import ceil_div

_library = torch.library.Library("actprune", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_library.define(
    "normalize_lines(Tensor x, Tensor? weight, Tensor? bias, Tensor? fixed, int groups, float eps, int block_size, "
    "str value_format, ScalarType dtype) -> (Tensor y, Tensor values, Tensor statistics)",
    tags=_TAGS,
)
_library.define(
    "normalize_lines_grad(Tensor grad_y, Tensor values, Tensor statistics, Tensor? weight, SymInt[] strides, "
    "bool fixed, int groups, int block_size, str value_format, ScalarType dtype) -> (Tensor grad_x, Tensor sums)",
    tags=_TAGS,
)


class Lines(NamedTuple):
    """How the memory of a tensor is cut: ``[images, lines, length]``."""

    images: int
    lines: int
    length: int

    @property
    def each(self) -> int:
        """Values of a line, in all images."""
        return self.images * self.length


def is_channels_last(x: Tensor) -> bool:
    """Return whether the channels of a pixel of ``x [N, C, ...]`` lie side by side, and pixels without gaps."""
    return x.movedim(1, -1).is_contiguous()


def readable(x: Tensor, groups: int) -> Tensor:
    """Return ``x [N, C, ...]`` such that it can be read as lines: a contiguous copy if it is not dense.

    Groups are read from contiguous tensors only.
    """
    return x if not groups and is_channels_last(x) else x.contiguous()


def lines_of(x: Tensor) -> Lines:
    """Return how ``x``, as ``readable`` returns it, is cut: a line for each channel."""
    images, channels, pixels = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    return Lines(images, channels, pixels) if x.is_contiguous() else Lines(images * pixels, channels, 1)


def normalize_lines(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    fixed: Tensor | None,
    groups: int,
    eps: float,
    block_size: int,
    value_format: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise each channel of ``x`` over all else, or each group of channels of an image.

    Args:
        x: ``[N, C, ...]`` in fp32 or 16 bits, not empty.
        weight: ``[C]`` or ``None``.
        bias: ``[C]`` or ``None``.
        fixed: ``statistics`` to take instead of those of ``x``, whose gradient they are no part of.
        groups: Groups of channels; 0 for batch normalisation.
        eps: Added to the variance.
        block_size: Values per block, in [1, values of x].
        value_format: How values are stored, not ``"same"``.
        dtype: Type of the output.

    Returns:
        ``y``, laid out as ``x`` if that is dense, the bytes of all blocks, and ``statistics [3, sets]`` in fp32: mean,
        rstd and unbiased variance.
    """
    x = readable(x, groups)
    cut = lines_of(x)
    sets = _sets(cut, groups)
    if _by_kernels(x, block_size):
        from lightning_actprune.kernels import line_norm as kernels
        from lightning_actprune.kernels import line_statistics

        with on_device_of(x):
            statistics = line_statistics.statistics(x, sets, eps) if fixed is None else fixed.clone()
            shared, cut = _spread(statistics, weight, bias, cut, groups)
            return *kernels.normalize(x, *shared, cut, block_size, value_format, dtype), statistics
    statistics = _statistics(in_memory(x).view(sets).float(), eps) if fixed is None else fixed.clone()
    ((mean, rstd, _), weight, bias), cut = _spread(statistics, weight, bias, cut, groups)
    hat = (in_memory(x).view(cut).float() - mean[:, None]) * rstd[:, None]
    wide = hat if weight is None else hat * weight.float()[:, None]
    if bias is not None:
        wide = wide + bias.float()[:, None]
    y = torch.empty_like(x, dtype=dtype)
    in_memory(y).copy_(wide.view(-1))
    blocks = reference.split_blocks(hat.view(1, 1, -1), block_size).reshape(-1, block_size)
    return y, formats.quantize(blocks, value_format), statistics


def normalize_lines_grad(
    grad_y: Tensor,
    values: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    strides: Sequence[int],
    fixed: bool,
    groups: int,
    block_size: int,
    value_format: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``normalize_lines``.

    Args:
        grad_y: ``[N, C, ...]``, of any layout.
        values: The bytes of all blocks.
        statistics: ``[3, sets]``.
        weight: ``[C]`` or ``None``.
        strides: Those of ``y``.
        fixed: Whether statistics were given: ``grad_x = rstd g w``.
        groups: As forward.
        block_size: Values per block.
        value_format: How they are stored.
        dtype: Type of the input gradient.

    Returns:
        ``grad_x``, laid out as ``y``, and in fp32 the gradients of weight and bias, ``[2, C]``.
    """
    grad_y = as_laid_out(grad_y, strides)
    cut, rstd = lines_of(grad_y), statistics[1]
    if _by_kernels(grad_y, block_size):
        from lightning_actprune.kernels import line_norm_grad as kernels

        stored = block_size, value_format
        with on_device_of(grad_y):
            if not groups:
                sums, factors = kernels.sums_and_factors(grad_y, values, statistics, weight, fixed, cut, *stored)
            else:
                cut = Lines(1, cut.images * cut.lines, cut.length)
                each = kernels.line_sums(grad_y, values, cut, *stored).sum(1)
                sums, factors = _factors(each.view(2, *grad_y.shape[:2]), rstd, weight, groups, cut.length)
            return kernels.input_grad(grad_y, values, factors, cut, *stored, dtype), sums
    flat = in_memory(grad_y)
    x = formats.dequantize(values, block_size, value_format, torch.float32).view(-1)[: len(flat)].view(cut)
    grad = flat.view(cut).float()
    if groups:
        each = torch.stack([(grad * x).sum(2), grad.sum(2)])
        sums, factors = _factors(each, rstd, weight, groups, cut.length)
    else:
        sums = torch.stack([(grad * x).sum((0, 2)), grad.sum((0, 2))])
        scale = rstd if weight is None else rstd * weight.float()
        shared = torch.zeros_like(sums) if fixed else -scale * sums / cut.each
        factors = torch.stack([scale, *shared])
    of_grad, of_x, shift = factors.view(3, -1, cut.lines, 1)
    grad_x = torch.empty_like(grad_y, dtype=dtype)
    in_memory(grad_x).copy_((grad * of_grad + (x * of_x + shift)).view(-1))
    return grad_x, sums


def as_laid_out(x: Tensor, strides: Sequence[int]) -> Tensor:
    """Return ``x`` with ``strides``, which are those of a dense tensor."""
    if x.stride() == tuple(strides):
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _statistics(x: Tensor, eps: float) -> Tensor:
    """Return mean, rstd and unbiased variance, ``[3, lines]``, of ``x [images, lines, length]``."""
    var, mean = torch.var_mean(x, (0, 2), correction=0)
    each = x.shape[0] * x.shape[2]
    return torch.stack([mean, torch.rsqrt(var + eps), var * (each / max(each - 1, 1))])


def _sets(cut: Lines, groups: int) -> Lines:
    """Return the lines whose values have one mean."""
    if not groups:
        return cut
    return Lines(1, cut.images * groups, cut.lines // groups * cut.length)


def _spread(
    statistics: Tensor, weight: Tensor | None, bias: Tensor | None, cut: Lines, groups: int
) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], Lines]:
    """Return numbers for each line, of statistics ``[3, sets]`` and of parameters, and these lines."""
    if not groups:
        return (statistics, weight, bias), cut
    weight, bias = (None if p is None else p.repeat(cut.images) for p in (weight, bias))
    lines = Lines(1, cut.images * cut.lines, cut.length)
    return (statistics.repeat_interleave(cut.lines // groups, 1), weight, bias), lines


def _factors(each: Tensor, rstd: Tensor, weight: Tensor | None, groups: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of the parameters, and by what a line is multiplied, from ``each [2, N, C]``.

    These are the sums of ``g x~`` and of ``g``. Factors ``[3, N C]``: ``grad_x = f0 g + f1 x~ + f2``.
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


def _by_kernels(x: Tensor, block_size: int) -> bool:
    return choose_backend(x.shape, x.dtype, x.device, block_size, 1) == "triton"


_library.impl("normalize_lines", normalize_lines, "CompositeExplicitAutograd")
_library.impl("normalize_lines_grad", normalize_lines_grad, "CompositeExplicitAutograd")


@torch.library.register_fake("actprune::normalize_lines", lib=_library)
def _normalize_lines_fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    fixed: Tensor | None,
    groups: int,
    eps: float,
    block_size: int,
    value_format: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    x = readable(x, groups)
    row = formats.FORMATS[value_format].row_bytes(block_size, x.element_size())
    sets = x.shape[0] * groups if groups else x.shape[1]
    return (
        torch.empty_like(x, dtype=dtype),
        x.new_empty(ceil_div(x.numel(), block_size), row, dtype=torch.uint8),
        x.new_empty(3, sets, dtype=torch.float32),
    )


@torch.library.register_fake("actprune::normalize_lines_grad", lib=_library)
def _normalize_lines_grad_fake(
    grad_y: Tensor,
    values: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    strides: Sequence[int],
    fixed: bool,
    groups: int,
    block_size: int,
    value_format: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    grad_x = torch.empty_strided(grad_y.shape, strides, dtype=dtype, device=grad_y.device)
    return grad_x, grad_y.new_empty(2, grad_y.shape[1], dtype=torch.float32)
