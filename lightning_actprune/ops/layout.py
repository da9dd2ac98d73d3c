"""How a tensor of any layout is read for packing, and laid out when it is unpacked.

Dimensions are sorted by stride and those that follow each other in memory joined, so that views of one region of
memory, transposed or not, are read in one and the same order, that of their addresses. A tensor ``[B, H, N, d]`` that
is cut out of a joint projection ``[B, N, 3, H, d]`` is ``B N`` rows of ``H d`` values so, and read where it lies.

The kernels take ``[S, T, L]`` with values side by side in the last dimension, and blocks are cut from ``L``. A run of
values that is a multiple of the block is read as rows of one block each: no block is cut short, and one compiled kernel
does for all shapes. What has more than three dimensions even so, or no values side by side, is copied first.

Unpacked values lie in the same order without gaps. For a tensor without gaps these are its own strides.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from lightning_actprune.arguments import MIN_QUANTIZED_BLOCK
from lightning_actprune.ops.dispatch import MAX_COLUMNS
from lightning_actprune.ops.geometry import ceil_div
from lightning_actprune.ops.pack import MAX_KEPT_BLOCKS

Dims = tuple[tuple[int, int], ...]
"""Sizes and strides, the largest stride first."""
MIN_ROW_BLOCKS = 16
"""Least blocks in a row that is no multiple of them: its short last block takes up to a sixteenth more."""


class Layout(NamedTuple):
    """How a tensor is read and written.

    Args:
        region: Its joined dimensions: equal for views of one region of memory.
        copied: Whether the region is copied before it is read.
        shape: ``(S, T, L)`` as read.
        strides: Strides of these in the region or in its copy.
        block: Values per block, cut to a row.
        dense_strides: Strides of the tensor when it is unpacked.
    """

    region: Dims
    copied: bool
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    block: int
    dense_strides: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def layout_of(shape: tuple[int, ...], strides: tuple[int, ...], block_size: int) -> Layout | None:
    """Return how a tensor is read, ``None`` if it is empty or expanded, overlaps itself or has no sensible rows."""
    sizes = sorted((strides[dim], size, dim) for dim, size in enumerate(shape) if size != 1)
    reach, dense, dense_strides, joined = 1, 1, list(strides), list[tuple[int, int]]()
    for stride, size, dim in sizes:
        if size == 0 or stride < reach:
            return None
        if joined and stride == reach:
            joined[-1] = joined[-1][0] * size, joined[-1][1]
        else:
            joined.append((size, stride))
        dense_strides[dim] = dense
        reach, dense = stride * size, dense * size
    region = tuple(reversed(joined)) or ((1, 1),)
    read, copied = _rows(region, block_size), False
    if read is None:
        read, copied = _rows(((dense, 1),), block_size), True
    if read is None:
        return None
    (samples, of_sample), (rows, of_row), (length, _) = read
    block = min(block_size, length)
    if samples * rows * ceil_div(length, block) > MAX_KEPT_BLOCKS:
        return None
    view = (samples, rows, length), (of_sample, of_row, 1)
    return Layout(region, copied, *view, block, tuple(dense_strides))


def _rows(region: Dims, block_size: int) -> Dims | None:
    """Return ``region`` as three dimensions, the last one of values side by side, ``None`` if it is not that simple."""
    *outer, (run, stride) = region
    if stride != 1 or run < MIN_QUANTIZED_BLOCK:
        return None
    for length in _lengths(run, block_size):
        rows = [] if length == run else [(run // length, length)]
        if len(outer) + len(rows) <= 2:
            filled = *outer, *rows
            missing = 2 - len(filled)
            return (*([(1, math.prod(size for size, _ in region))] * missing), *filled, (length, 1))
    return None


def _lengths(run: int, block_size: int) -> list[int]:
    """Return the lengths of rows that ``run`` values side by side may be cut to, the best first."""
    longest = block_size * MAX_COLUMNS
    if run % block_size == 0:
        return [block_size, run] if run <= longest else [block_size]
    if run < block_size:
        return [run]
    fewest, most = ceil_div(run, longest), run // (block_size * MIN_ROW_BLOCKS)
    return next(([run // rows] for rows in range(fewest, most + 1) if run % rows == 0), [])
