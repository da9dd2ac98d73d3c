"""Normalisation of lines, forward: ``[images, lines, length]`` in memory, see ``ops.normalize_lines``.

Three launches. Programs that each read a part of some lines write their mean and squared deviations, the sums of
differences from the mean of the part's first tile; a small kernel merges the parts of a line in a fixed order; then one
pass over the flat memory normalises, writes the output and quantises. So the same input gives the same statistics.

Bytes moved per value of 16 bits with int4 in blocks of 32: 2 for the statistics, 2 + 2 + 0.56 after them (torch: 2 and
2 + 2).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.kernels.formats import encode_format, values_layout, whole_blocks
from lightning_actprune.kernels.launch import Launch, aligned, multiprocessors
from lightning_actprune.kernels.quantize import load_rows, quantize_tile
from lightning_actprune.ops.geometry import ceil_div

TILE_VALUES = 4096
"""Values of a tile of the statistics: two sums for each of 32 a thread."""
MOST_LINE, MOST_LINES = 1024, 64
"""Most values of a line, and most lines, in such a tile."""
STAGES = 4
"""Tiles in shared memory, all but one of them on their way, as in ``column_sums``."""
PROGRAMS = 4
"""Programs wanted per multiprocessor."""
MOST_PARTS = 128
"""Most parts: they are merged by one program, all in registers."""




@triton.jit
def line_statistics_kernel(
    x_ptr, partial_ptr, images, lines, units, share, LENGTH: tl.constexpr, LINES: tl.constexpr, VALUES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Write mean, squared deviations and number of values of ``share`` units of each line: ``[3, parts, lines]``.

    A unit is a piece of a line of one image or, of lines of one value, ``VALUES`` images; grid
    ``(lines / LINES, parts)``.
    """
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, units)
    at, inside, count = _unit(first, line, images, lines, LENGTH, VALUES)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    shift = tl.sum(x, axis=1) / count
    sums = tl.zeros([LINES, VALUES], tl.float32)
    squares = tl.zeros([LINES, VALUES], tl.float32)
    total = count * 0
    for u in tl.range(first, last, num_stages=STAGES):
        at, inside, count = _unit(u, line, images, lines, LENGTH, VALUES)
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
def _unit(u, line, images, lines, LENGTH: tl.constexpr, VALUES: tl.constexpr):
    """Return where the values ``[LINES, VALUES]`` of unit ``u`` are, which there are, and how many of a line."""
    v = tl.arange(0, VALUES)
    if LENGTH == 1:
        n = u * VALUES + v
        at = n.to(tl.int64)[None, :] * lines + line[:, None]
        inside = (n < images)[None, :] & (line < lines)[:, None]
        count = tl.minimum(images - u * VALUES, VALUES)
    else:
        PIECES: tl.constexpr = (LENGTH + VALUES - 1) // VALUES
        i = (u % PIECES) * VALUES + v
        plane = (line * 0 + u // PIECES).to(tl.int64) * lines + line
        at = plane[:, None] * LENGTH + i[None, :]
        inside = (line < lines)[:, None] & (i < LENGTH)[None, :]
        count = tl.minimum(LENGTH - (u % PIECES) * VALUES, VALUES)
    return at, inside, count


@triton.jit
def merge_statistics_kernel(partial_ptr, out_ptr, parts, lines, eps, PARTS: tl.constexpr, LINES: tl.constexpr):
    """Write mean, rstd and unbiased variance ``[3, lines]`` of parts ``[3, parts, lines]``."""
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
    out_ptr += line
    tl.store(out_ptr, mean, mask=line < lines)
    tl.store(out_ptr + lines, tl.rsqrt(total / tl.maximum(count, 1.0) + eps), mask=line < lines)
    tl.store(out_ptr + 2 * lines, total / tl.maximum(count - 1.0, 1.0), mask=line < lines)


@triton.jit
def normalize_lines_kernel(
    x_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, y_ptr, values_ptr, count, nnz, WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr, LINES: tl.constexpr, LENGTH: tl.constexpr, EXACT: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Write ``y`` and the normalised values in few bits of ``TILE`` of ``nnz`` blocks of ``count`` values.

    ``LINES`` is 0 for one image, whose lines need not be known. ``EXACT``: the last block is whole.
    """
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exist = (place >= 0) & (place < nnz)  # of nearly 2^31 blocks, the last tile reaches beyond int32
    inside = inside_flat(place, exist, count, EXACT, B, BLOCK)
    line = lines_at(place, LINES, LENGTH, B, BLOCK)
    x = load_flat(x_ptr, place, exist, inside, EXACT, B, BLOCK).to(tl.float32)
    x = (x - per_line(mean_ptr, line, exist, inside)) * per_line(rstd_ptr, line, exist, inside)
    x = tl.where(inside, x, 0.0)
    y = x
    if WEIGHTED:
        y *= per_line(weight_ptr, line, exist, inside)
    if BIASED:
        y += per_line(bias_ptr, line, exist, inside)
    store_flat(y_ptr, y, place, inside, B, BLOCK)
    quantize_tile(x, values_ptr, nnz, place, exist, B, BLOCK, FORMAT)


@triton.jit
def lines_at(place, LINES: tl.constexpr, LENGTH: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
    """Return the line of each value of blocks, ``[R, BLOCK]``, or ``[R, 1]`` where no block has two."""
    e = tl.arange(0, BLOCK)[None, :]
    first = place.to(tl.int64) * B
    plane = first // LENGTH
    if LINES > 0:
        plane = (plane % LINES).to(tl.int32)
    if LENGTH % B == 0:
        line = plane[:, None]
    elif LENGTH == 1 and LINES > 0 and LINES % B == 0:
        line = plane[:, None] + e
    else:
        line = plane[:, None] + ((first % LENGTH).to(tl.int32)[:, None] + e) // LENGTH
        if LINES > 0:
            line = line % LINES
    return line


@triton.jit
def per_line(ptr, line, exist, inside):
    """Return the fp32 number of each line; of what does not exist, zero."""
    if line.shape[1] == 1:
        return tl.load(ptr + line, mask=exist[:, None], other=0.0).to(tl.float32)
    return tl.load(ptr + line, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def inside_flat(place, exist, count, EXACT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
    """Return which values of blocks there are, ``[R, BLOCK]``."""
    e = tl.arange(0, BLOCK)[None, :]
    inside = exist[:, None] & (e < B)
    if not EXACT:
        inside &= place.to(tl.int64)[:, None] * B + e < count
    return inside


@triton.jit
def load_flat(x_ptr, place, exist, inside, EXACT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
    """Return the values ``[R, BLOCK]`` of blocks of a flat tensor; not defined where not ``inside``."""
    first_ptr = x_ptr + place.to(tl.int64) * B
    if EXACT:
        return load_rows(first_ptr, place * 0, exist, B, B, BLOCK)
    return tl.load(first_ptr[:, None] + tl.arange(0, BLOCK)[None, :], mask=inside, other=0.0)


@triton.jit
def store_flat(y_ptr, y, place, inside, B: tl.constexpr, BLOCK: tl.constexpr):
    """Write the values of blocks to a flat tensor."""
    at = place.to(tl.int64)[:, None] * B + tl.arange(0, BLOCK)[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


def statistics_tile(lines: int, length: int) -> tuple[int, int]:
    """Return ``(LINES, VALUES)``."""
    if length == 1:
        group = min(MOST_LINES, int(triton.next_power_of_2(lines)))
        return group, TILE_VALUES // group
    values = least_waste(length, MOST_LINE)
    return min(TILE_VALUES // values, int(triton.next_power_of_2(lines))), values


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
    """

    def __init__(self, cut: tuple[int, int, int], eps: float, device: torch.device) -> None:
        images, lines, length = cut
        group, values = statistics_tile(lines, length)
        units = ceil_div(images, values) if length == 1 else images * ceil_div(length, values)
        groups = ceil_div(lines, group)
        parts, share = parts_of(units, groups, device)
        self.partial, self.shape = (3, parts, lines), (3, lines)
        sizes = images, lines, units, share, length, group, values, STAGES
        self._find = Launch(line_statistics_kernel, (groups, parts), *sizes, num_warps=4)
        merged = parts, lines, eps, int(triton.next_power_of_2(parts)), MERGED_LINES
        self._merge = Launch(merge_statistics_kernel, (ceil_div(lines, MERGED_LINES),), *merged, num_warps=4)

    def __call__(self, x: Tensor) -> Tensor:
        """Return mean, rstd and unbiased variance ``[3, lines]``."""
        partial = x.new_empty(self.partial, dtype=torch.float32)
        found = x.new_empty(self.shape, dtype=torch.float32)
        self._find(x, partial)
        self._merge(partial, found)
        return found


MERGED_LINES = 16
"""Lines of a program that merges parts: of each three times 128 numbers, 48 a thread."""


def flat_constants(cut: tuple[int, int, int], block_size: int, value_format: str) -> dict[str, int | bool]:
    """Return the last compile-time constants of a kernel that goes through the flat memory."""
    images, lines, length = cut
    block, tile = whole_blocks(block_size)
    exact = images * lines * length % block_size == 0
    found = {"LINES": lines if images > 1 else 0, "LENGTH": length, "EXACT": exact, "B": block_size, "BLOCK": block}
    return found | {"TILE": tile, "FORMAT": encode_format(value_format, block_size)}


def flat_launch(
    kernel: object, cut: tuple[int, int, int], flags: tuple[bool, ...], block_size: int, value_format: str
) -> Launch:
    """Return the launch of such a kernel, whose numbers are the values and the blocks."""
    constants = flat_constants(cut, block_size, value_format)
    count = cut[0] * cut[1] * cut[2]
    blocks = ceil_div(count, block_size)
    grid = (ceil_div(blocks, int(constants["TILE"])),)
    return Launch(kernel, grid, count, blocks, *flags, *constants.values(), num_warps=4)


@functools.lru_cache(maxsize=1024)
def _statistics_plan(key: object, *arguments: object) -> StatisticsPlan:
    """Return the plan; ``key``: dtype and alignment, which matter to the compiled kernels that it keeps."""
    return StatisticsPlan(*arguments)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _normalize_launch(key: object, *arguments: object) -> Launch:
    return flat_launch(normalize_lines_kernel, *arguments)  # type: ignore[arg-type]


def statistics(x: Tensor, cut: tuple[int, int, int], eps: float) -> Tensor:
    """Return mean, rstd and unbiased variance of the lines of a dense ``x``, ``[3, lines]``, fp32."""
    return _statistics_plan((x.dtype, *aligned(x)), tuple(cut), eps, x.device)(x)


def normalize(
    x: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    cut: tuple[int, int, int],
    block_size: int,
    value_format: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return ``y`` in ``dtype``, laid out as the dense ``x``, and the normalised values in few bits."""
    y = torch.empty_like(x, dtype=dtype)
    shape, kind = values_layout(ceil_div(x.numel(), block_size), block_size, encode_format(value_format, block_size))
    values = x.new_empty(shape, dtype=kind)
    given = [x, *statistics[:2], *[p for p in (weight, bias) if p is not None]]
    key = x.device, dtype, *[tensor.dtype for tensor in given], *aligned(*given)
    flags = weight is not None, bias is not None
    launch = _normalize_launch(key, tuple(cut), flags, block_size, value_format)
    launch(x, *statistics[:2], x if weight is None else weight, x if bias is None else bias, y, values)
    return y, values
