"""Normalisation of lines, backward: ``[images, lines, length]`` in memory, see ``ops.normalize_lines``.

Three launches, as forward: programs that each read a part of some lines, gradient and codes, write their sums of ``g``
and ``g x~``; a small kernel adds the parts in a fixed order, and turns the sums into gradients of the parameters and
three factors a line; then one pass over the flat memory writes ``grad_x = f0 g + f1 x~ + f2``.

Where lines have one value (channels last), rows of whole blocks are as many pixels as it takes for both to end
together: a program keeps its columns and goes through the rows. Longer lines are covered by blocks, of which the first
and the last may be shared with the next line, and are read for each of the two.

Bytes moved per value of 16 bits with int4 in blocks of 32: 2 + 0.56, then 2 + 0.56 + 2 (torch: 2 + 2, then 2 + 2 + 2).
After a ReLU of the same pass, each reads 0.125 more (a pass of its own: 2 + 0.125 + 2).
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.kernels.formats import dequantize_tile, encode_format, whole_blocks
from lightning_actprune.kernels.launch import Launch, aligned
from lightning_actprune.kernels.line_factors import add_launch
from lightning_actprune.kernels.line_norm import (
    flat_launch,
    inside_flat,
    lines_at,
    load_bits,
    load_flat,
    per_line,
    row_of,
    store_flat,
)
from lightning_actprune.kernels.line_statistics import least_waste, parts_of
from lightning_actprune.ops.geometry import ceil_div

MOST_COLS = 32
"""Most blocks side by side in a tile of the sums."""


@triton.jit
def pixel_sums_kernel(
    grad_ptr, values_ptr, partial_ptr, count, nnz, rows, tiles, share, columns: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
    """Write the sums of ``g x~`` and ``g`` over ``share`` tiles of rows of ``columns`` blocks: ``[2, parts, row]``.

    Grid ``(columns / COLS, parts)``; the last row may be cut off. ``RELU``: ``g`` is zero where the bit of one is.
    """
    n = tl.arange(0, ROWS * COLS)
    j = tl.program_id(0) * COLS + n % COLS
    along = tl.zeros([ROWS * COLS, BLOCK], tl.float32)
    sums = tl.zeros([ROWS * COLS, BLOCK], tl.float32)
    first = tl.program_id(1) * share
    for tile in range(first, tl.minimum(first + share, tiles)):
        r = tile * ROWS + n // COLS
        place = r * columns + j
        exist = (r < rows) & (j < columns) & (place >= 0) & (place < nnz)
        inside = inside_flat(place, exist, count, EXACT, B, BLOCK)
        grad = load_flat(grad_ptr, place, exist, inside, EXACT, B, BLOCK).to(tl.float32)
        if RELU:
            inside &= load_bits(values_ptr, nnz, place, exist, B, BLOCK, FORMAT)
        grad = tl.where(inside, grad, 0.0)
        x = dequantize_tile(values_ptr, nnz, place, exist, 0, B, BLOCK, FORMAT)
        along += grad * x
        sums += grad
    column = (tl.program_id(0) * COLS + tl.arange(0, COLS))[:, None] * B + tl.arange(0, BLOCK)[None, :]
    inside = (column < columns * B) & (tl.arange(0, BLOCK) < B)[None, :]
    out_ptr = partial_ptr + tl.program_id(1).to(tl.int64) * (columns * B) + column
    tl.store(out_ptr, tl.sum(tl.reshape(along, [ROWS, COLS, BLOCK]), axis=0), mask=inside)
    out_ptr += tl.num_programs(1).to(tl.int64) * (columns * B)
    tl.store(out_ptr, tl.sum(tl.reshape(sums, [ROWS, COLS, BLOCK]), axis=0), mask=inside)


@triton.jit
def line_sums_kernel(
    grad_ptr, values_ptr, partial_ptr, nnz, lines, units, share, LENGTH: tl.constexpr, PIECES: tl.constexpr,
    LINES: tl.constexpr, COLS: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
    """Write the sums of ``g x~`` and ``g`` over ``share`` units of each line: ``[2, parts, lines]``.

    A unit is one of ``PIECES`` of a line of an image, ``COLS`` of the blocks that cover it; grid
    ``(lines / LINES, parts)``.
    """
    n = tl.arange(0, LINES * COLS)
    line = tl.program_id(0) * LINES + n // COLS
    along = tl.zeros([LINES * COLS, BLOCK], tl.float32)
    sums = tl.zeros([LINES * COLS, BLOCK], tl.float32)
    first = tl.program_id(1) * share
    for u in range(first, tl.minimum(first + share, units)):
        start = ((n * 0 + u // PIECES).to(tl.int64) * lines + line) * LENGTH
        place = (start // B).to(tl.int32) + (u % PIECES) * COLS + n % COLS
        at = place.to(tl.int64) * B - start  # of a block's first value, in its line
        exist = (line < lines) & (place >= 0) & (place < nnz) & (at < LENGTH)
        if LENGTH % B == 0:
            inside = inside_flat(place, exist, 0, True, B, BLOCK)
            grad = load_flat(grad_ptr, place, exist, inside, True, B, BLOCK).to(tl.float32)
        else:
            e = at[:, None] + tl.arange(0, BLOCK)[None, :]
            inside = inside_flat(place, exist, 0, True, B, BLOCK) & (e >= 0) & (e < LENGTH)
            grad = load_flat(grad_ptr, place, exist, inside, False, B, BLOCK).to(tl.float32)
        if RELU:
            inside &= load_bits(values_ptr, nnz, place, exist, B, BLOCK, FORMAT)
        grad = tl.where(inside, grad, 0.0)
        x = dequantize_tile(values_ptr, nnz, place, exist, 0, B, BLOCK, FORMAT)
        along += grad * x
        sums += grad
    group = tl.program_id(0) * LINES + tl.arange(0, LINES)
    out_ptr = partial_ptr + tl.program_id(1).to(tl.int64) * lines + group
    tl.store(out_ptr, _of_lines(along, LINES, COLS), mask=group < lines)
    out_ptr += tl.num_programs(1).to(tl.int64) * lines
    tl.store(out_ptr, _of_lines(sums, LINES, COLS), mask=group < lines)


@triton.jit
def _of_lines(x, LINES: tl.constexpr, COLS: tl.constexpr):
    """Return the sum of each line of a tile."""
    return tl.sum(tl.reshape(tl.sum(x, axis=1), [LINES, COLS]), axis=1)


@triton.jit
def line_grad_kernel(
    grad_ptr, values_ptr, factors_ptr, grad_x_ptr, count, nnz, lines, RELU: tl.constexpr, LINES: tl.constexpr,
    LENGTH: tl.constexpr, EXACT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Write ``grad_x = scale g + slope x~ + shift`` of ``TILE`` blocks; as ``normalize_lines_kernel``."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exist = (place >= 0) & (place < nnz)
    inside = inside_flat(place, exist, count, EXACT, B, BLOCK)
    line = lines_at(place, LINES, LENGTH, B, BLOCK)
    grad = load_flat(grad_ptr, place, exist, inside, EXACT, B, BLOCK).to(tl.float32)
    if RELU:
        grad = tl.where(load_bits(values_ptr, nnz, place, exist, B, BLOCK, FORMAT), grad, 0.0)
    x = dequantize_tile(values_ptr, nnz, place, exist, 0, B, BLOCK, FORMAT)
    slope = per_line(row_of(factors_ptr, 1, lines, LINES), line, exist, inside)
    rest = x * slope + per_line(row_of(factors_ptr, 2, lines, LINES), line, exist, inside)
    store_flat(grad_x_ptr, grad * per_line(factors_ptr, line, exist, inside) + rest, place, inside, B, BLOCK)


def pixel_tile(lines: int, block_size: int) -> dict[str, int]:
    """Return the sizes at compile time of ``pixel_sums_kernel`` for pixels of so many channels."""
    block, tile = whole_blocks(block_size)
    columns = math.lcm(lines, block_size) // block_size
    cols = min(least_waste(columns, MOST_COLS), tile)
    return {"columns": columns, "ROWS": tile // cols, "COLS": cols, "B": block_size, "BLOCK": block}


def line_tile(lines: int, length: int, block_size: int) -> dict[str, int]:
    """Return the sizes at compile time of ``line_sums_kernel``."""
    block, tile = whole_blocks(block_size)
    # Blocks that a line may touch, wherever it starts.
    cover = length // block_size if length % block_size == 0 else (length + block_size - 2) // block_size + 1
    cols = min(least_waste(cover, MOST_COLS), tile)
    group = min(tile // cols, int(triton.next_power_of_2(lines)))
    sizes = {"LENGTH": length, "PIECES": ceil_div(cover, cols), "LINES": group, "COLS": cols}
    return sizes | {"B": block_size, "BLOCK": block}


class SumsPlan:
    """The launch that sums the lines of one kind of gradient, and its parts ``[2, parts, lines]``.

    Args:
        cut: Images, lines and length.
        block_size: Values per block.
        value_format: How values are stored.
        device: Where the kernel runs.
        relu: Whether gradients are those of a ReLU, whose bits are with the values.
    """

    def __init__(
        self, cut: tuple[int, int, int], block_size: int, value_format: str, device: torch.device, relu: bool = False
    ) -> None:
        images, lines, length = cut
        count, stored = images * lines * length, encode_format(value_format, block_size)
        blocks = ceil_div(count, block_size)
        if length == 1:
            sizes = pixel_tile(lines, block_size)
            columns = sizes["columns"]
            rows = ceil_div(blocks, columns)
            groups, tiles = ceil_div(columns, sizes["COLS"]), ceil_div(rows, sizes["ROWS"])
            parts, share = parts_of(tiles, groups, device)
            scalars = count, blocks, rows, tiles, share, columns, count % block_size == 0, *list(sizes.values())[1:]
            kernel, folded = pixel_sums_kernel, parts * (columns * block_size // lines)
        else:
            sizes = line_tile(lines, length, block_size)
            groups, units = ceil_div(lines, sizes["LINES"]), images * sizes["PIECES"]
            parts, share = parts_of(units, groups, device)
            scalars = blocks, lines, units, share, *sizes.values()
            kernel, folded = line_sums_kernel, parts
        self.shape = 2, folded, lines
        self._sum = Launch(kernel, (groups, parts), *scalars, stored, relu, num_warps=4)

    def __call__(self, grad_y: Tensor, values: Tensor) -> Tensor:
        """Return the sums of ``g x~`` and of ``g``, in parts."""
        partial = grad_y.new_empty(self.shape, dtype=torch.float32)
        self._sum(grad_y, values, partial)
        return partial


@functools.lru_cache(maxsize=1024)
def _sums_plan(key: object, *arguments: object) -> SumsPlan:
    """Return the plan; ``key``: dtypes and alignment, which matter to the compiled kernel that it keeps."""
    return SumsPlan(*arguments)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _add_launch(key: object, rows: int, cut: tuple[int, int, int], weighted: bool, fixed: bool) -> Launch:
    return add_launch(rows, cut, weighted, fixed, (True, True))


@functools.lru_cache(maxsize=1024)
def _grad_launch(key: object, *arguments: object) -> Launch:
    return flat_launch(line_grad_kernel, *arguments)  # type: ignore[arg-type]


def line_sums(grad_y: Tensor, values: Tensor, cut: tuple[int, int, int], block_size: int, value_format: str) -> Tensor:
    """Return the sums of ``g x~`` and of ``g`` of the lines of a dense ``grad_y``, in parts: ``[2, parts, lines]``."""
    key = grad_y.dtype, *aligned(grad_y, values)
    return _sums_plan(key, tuple(cut), block_size, value_format, grad_y.device)(grad_y, values)


def sums_and_factors(
    grad_y: Tensor,
    values: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    fixed: bool,
    cut: tuple[int, int, int],
    block_size: int,
    value_format: str,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the parameters, ``[2, lines]``, and the factors of ``grad_x``, ``[3, lines]``."""
    partial = line_sums(grad_y, values, cut, block_size, value_format)
    sums, factors = (grad_y.new_empty(rows, cut[1], dtype=torch.float32) for rows in (2, 3))
    read = statistics, statistics if weight is None else weight
    key = grad_y.device, weight is not None and weight.dtype, *aligned(*read)
    launch = _add_launch(key, partial.shape[1], tuple(cut), weight is not None, fixed)
    launch(partial, *read, *sums, factors)
    return sums, factors


def input_grad(
    grad_y: Tensor,
    values: Tensor,
    factors: Tensor,
    cut: tuple[int, int, int],
    block_size: int,
    value_format: str,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``grad_x`` in ``dtype``, laid out as the dense ``grad_y``."""
    grad_x = torch.empty_like(grad_y, dtype=dtype)
    key = grad_y.device, grad_y.dtype, dtype, *aligned(grad_y, values, factors)
    _grad_launch(key, tuple(cut), (False,), block_size, value_format)(grad_y, values, factors, grad_x)
    return grad_x
