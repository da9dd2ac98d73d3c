"""Mean and variance of lines: ``[images, lines, length]`` in memory, see ``ops.normalize_lines``.

Two launches. Programs that each read a part of some lines write their mean and squared deviations: sums of differences
from the mean of the part's first tile. Then a small kernel merges the parts of a line in a fixed order: the same input
gives the same statistics. It moves running statistics on as well, which are as many numbers, in a launch that is there
anyway: ``running += momentum (found - running)``.

With d the distance of that first mean from the mean of the part, which has t times as many values, the part's variance
is at least d^2 / t: so subtracting d^2 from the mean of squares loses no more than a factor of t + 1 in precision.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.kernels.launch import Launch, aligned, multiprocessors
from lightning_actprune.ops.geometry import ceil_div

TILE_VALUES = 4096
"""Values of a tile of the statistics: two sums for each of 32 a thread."""
MOST_LINE, MOST_LINES = 1024, 64
"""Most values of a line, and most lines, in such a tile."""
STAGES = 4
"""Tiles in shared memory, all but one of them on their way, as in ``column_sums``."""
PROGRAMS = 4
"""Programs wanted per multiprocessor, of four warps."""
MOST_PARTS = 1024
"""Most parts: those of a line are merged by one program, all in registers."""
MERGED_VALUES = 2048
"""Parts times lines of such a program: three numbers for each of 16 a thread."""

RunningTensors = tuple[Tensor, Tensor, Tensor | None]
"""Running mean and variance ``[lines]`` in fp32, and the number of batches in int64, all without gaps."""


@triton.jit
def line_statistics_kernel(
    x_ptr, partial_ptr, images, lines, units, share, LENGTH: tl.constexpr, PIXEL: tl.constexpr, LINES: tl.constexpr,
    VALUES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write mean, squared deviations and number of values of ``share`` units of each line: ``[3, parts, lines]``.

    A unit is a piece of a line of one image or, of lines of one value, ``VALUES`` images; grid
    ``(lines / LINES, parts)``.
    """
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, units)
    at, inside, count = _unit(first, line, images, lines, LENGTH, PIXEL, VALUES)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    shift = tl.sum(x, axis=1) / count
    sums = tl.zeros([LINES, VALUES], tl.float32)
    squares = tl.zeros([LINES, VALUES], tl.float32)
    total = count * 0
    for u in tl.range(first, last, num_stages=STAGES):
        at, inside, count = _unit(u, line, images, lines, LENGTH, PIXEL, VALUES)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(inside, x - shift[:, None], 0.0)
        sums += x
        squares += x * x
        total += count
    mean = tl.sum(sums, axis=1) / total
    deviations = tl.sum(squares, axis=1) - mean * mean * total
    out_ptr = partial_ptr + tl.program_id(1).to(tl.int64) * lines + line
    size = tl.num_programs(1).to(tl.int64) * lines
    tl.store(out_ptr, shift + mean, mask=line < lines)
    tl.store(out_ptr + size, tl.where(deviations < 0.0, 0.0, deviations), mask=line < lines)
    tl.store(out_ptr + 2 * size, mean * 0.0 + total, mask=line < lines)


@triton.jit
def _unit(u, line, images, lines, LENGTH: tl.constexpr, PIXEL: tl.constexpr, VALUES: tl.constexpr):
    """Return where the values ``[LINES, VALUES]`` of unit ``u`` are, which there are, and how many of a line.

    ``PIXEL``: the lines once more, if they have one value; known to the compiler, they say how far it can read at once.
    """
    v = tl.arange(0, VALUES)
    if LENGTH == 1:
        n = (v * 0 + u).to(tl.int64) * VALUES + v
        at = n[None, :] * PIXEL + line[:, None]
        inside = (n < images)[None, :] & (line < PIXEL)[:, None]
        count = tl.minimum(images - u * VALUES, VALUES)
    else:
        PIECES: tl.constexpr = (LENGTH + VALUES - 1) // VALUES
        i = (u % PIECES) * VALUES + v
        plane = (line * 0 + u // PIECES).to(tl.int64) * lines + line
        at = plane[:, None] * LENGTH + i[None, :]
        inside = (line < lines)[:, None] & (i < LENGTH)[None, :]
        count = tl.minimum(LENGTH - (u % PIECES) * VALUES, VALUES)
    return at, inside, count


@triton.jit(do_not_specialize_on_alignment=["mean_ptr", "var_ptr", "batches_ptr"])
def merge_statistics_kernel(
    partial_ptr, out_ptr, mean_ptr, var_ptr, batches_ptr, parts, lines, eps, momentum, TRACKED: tl.constexpr,
    COUNTED: tl.constexpr, PARTS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Write mean, rstd and unbiased variance ``[3, lines]`` of parts ``[3, parts, lines]``.

    ``TRACKED``: and move the running mean and variance, in fp32, towards them; ``COUNTED``: and count the batch.
    """
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    p = tl.arange(0, PARTS)
    inside = (p < parts)[:, None] & (line < lines)[None, :]
    at_ptr = partial_ptr + p.to(tl.int64)[:, None] * lines + line[None, :]
    size = tl.cast(parts, tl.int64) * lines
    means = tl.load(at_ptr, mask=inside, other=0.0)
    deviations = tl.load(at_ptr + size, mask=inside, other=0.0)
    counts = tl.load(at_ptr + 2 * size, mask=inside, other=0.0)
    count = tl.sum(counts, axis=0)
    mean = tl.sum(means * counts, axis=0) / tl.maximum(count, 1.0)
    off = tl.where(inside, means - mean[None, :], 0.0)
    total = tl.sum(deviations + off * off * counts, axis=0)
    unbiased = total / tl.maximum(count - 1.0, 1.0)
    out_ptr += line
    tl.store(out_ptr, mean, mask=line < lines)
    tl.store(out_ptr + lines, tl.rsqrt(total / tl.maximum(count, 1.0) + eps), mask=line < lines)
    tl.store(out_ptr + 2 * lines, unbiased, mask=line < lines)
    if TRACKED:
        _move(mean_ptr + line, mean, momentum, line < lines)
        _move(var_ptr + line, unbiased, momentum, line < lines)
    if COUNTED:
        first = tl.program_id(0) == 0
        tl.store(batches_ptr, tl.load(batches_ptr, mask=first, other=0) + 1, mask=first)


@triton.jit
def _move(running_ptr, found, share, mask):
    """Move running numbers towards those found, as ``torch.lerp`` does."""
    running = tl.load(running_ptr, mask=mask, other=0.0)
    way = found - running
    tl.store(running_ptr, tl.where(share < 0.5, running + share * way, found - way * (1.0 - share)), mask=mask)


def statistics_tile(lines: int, length: int) -> tuple[int, int]:
    """Return ``(LINES, VALUES)``."""
    if length == 1:
        group = min(MOST_LINES, int(triton.next_power_of_2(lines)))
        return group, TILE_VALUES // group
    values = least_waste(length, MOST_LINE)
    # Lines that are not aligned are read one value at a time, each with an address of its own in registers.
    most = TILE_VALUES if length % 8 == 0 else TILE_VALUES // 2
    return min(max(most // values, 1), int(triton.next_power_of_2(lines))), values


def merge_tile(parts: int) -> tuple[int, int]:
    """Return ``(PARTS, LINES)`` of the kernel that merges so many parts."""
    padded = int(triton.next_power_of_2(parts))
    return padded, min(max(1, MERGED_VALUES // padded), 16)


def least_waste(count: int, most: int) -> int:
    """Return the power of two up to ``most``, and not less than a quarter, by which ``count`` is filled up least."""
    sizes = [min(most // part, int(triton.next_power_of_2(count))) for part in (1, 2, 4)]
    return min(sizes, key=lambda size: ceil_div(count, size) * size)


def parts_of(units: int, groups: int, device: torch.device) -> tuple[int, int]:
    """Return into how many parts ``units`` are cut, of which each of ``groups`` is to be read, and units of a part."""
    wanted = min(MOST_PARTS, ceil_div(PROGRAMS * multiprocessors(device), groups), units)
    share = ceil_div(units, wanted)
    return ceil_div(units, share), share


class StatisticsPlan:
    """The launches that find the statistics of one kind of input.

    Args:
        cut: Images, lines and length.
        eps: Added to the variance.
        device: Where the kernels run.
        momentum: Of the running statistics, ``None`` if there are none to move.
        counted: Whether batches are counted.
    """

    def __init__(
        self,
        cut: tuple[int, int, int],
        eps: float,
        device: torch.device,
        momentum: float | None = None,
        counted: bool = False,
    ) -> None:
        images, lines, length = cut
        group, values = statistics_tile(lines, length)
        units = ceil_div(images, values) if length == 1 else images * ceil_div(length, values)
        groups = ceil_div(lines, group)
        parts, share = parts_of(units, groups, device)
        self.partial, self.shape = (3, parts, lines), (3, lines)
        sizes = images, lines, units, share, length, lines if length == 1 else 0, group, values, STAGES
        self._find = Launch(line_statistics_kernel, (groups, parts), *sizes, num_warps=4)
        padded, merged = merge_tile(parts)
        grid = (ceil_div(lines, merged),)
        moved = float(momentum or 0.0), momentum is not None, counted
        self._merge = Launch(merge_statistics_kernel, grid, parts, lines, eps, *moved, padded, merged, num_warps=4)

    def __call__(self, x: Tensor, running: RunningTensors | None = None) -> Tensor:
        """Return mean, rstd and unbiased variance ``[3, lines]``, and move ``running`` on."""
        partial = x.new_empty(self.partial, dtype=torch.float32)
        found = x.new_empty(self.shape, dtype=torch.float32)
        self._find(x, partial)
        if running is None:
            self._merge(partial, found, found, found, found)
        else:
            mean, var, batches = running
            self._merge(partial, found, mean, var, mean if batches is None else batches)
        return found


@functools.lru_cache(maxsize=1024)
def _statistics_plan(key: object, *arguments: object) -> StatisticsPlan:
    """Return the plan; ``key``: dtype and alignment, which matter to the compiled kernels that it keeps."""
    return StatisticsPlan(*arguments)  # type: ignore[arg-type]


def statistics(x: Tensor, cut: tuple[int, int, int], eps: float) -> Tensor:
    """Return mean, rstd and unbiased variance of the lines of a dense ``x``, ``[3, lines]``, fp32."""
    return _statistics_plan((x.dtype, *aligned(x)), tuple(cut), eps, x.device)(x)
