"""In which order the memory of a tensor is read when it is packed, and into which rows it is cut.

Dimensions are sorted by stride, and those that follow each other in memory are joined to runs, so that views of one
region of memory, transposed or not, are read in one and the same order, that of their addresses. A tensor
``[B, H, N, d]`` that is cut out of a joint projection ``[B, N, 3, H, d]`` is ``B N`` rows of ``H d`` values so, and
read where it lies.

Kernels take ``[S, T, L]`` with values side by side in the last dimension, and blocks are cut from ``L``. A run of
values that is a multiple of the block is read as rows of one block each: no block is cut short, and one compiled kernel
does for all shapes. What has more than three dimensions even so, or no values side by side, is copied first.

Sizes may be a compiler's symbols. The length of a row never is, so that values can be cut to rows whose number may be a
symbol; comparisons that would make a constant of a symbol are not made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lightning_actprune.codec.blocks import MIN_ROW_BLOCKS, ceil_div
from lightning_actprune.codec.dispatch import MAX_COLUMNS
from lightning_actprune.config import MIN_QUANTIZED_BLOCK

Size: TypeAlias = int | torch.SymInt


class Run(NamedTuple):
    """Dimensions that follow each other in memory.

    Args:
        sizes: Their sizes, the outermost first.
        stride: That of the innermost one.
    """

    sizes: list[Size]
    stride: Size

    def innermost(self) -> tuple[int, bool]:
        """Return the product of the innermost sizes that are numbers, and whether all are."""
        product = 1
        for size in reversed(self.sizes):
            if not isinstance(size, int):
                return product, False
            product *= size
        return product, True


def memory_order(strides: Sequence[Size]) -> list[int]:
    """Return the dimensions of a dense tensor in the order of memory, outermost first.

    Not by ``sorted``, to which a compiler's symbols are no keys.
    """
    order: list[int] = []
    for dim, stride in enumerate(strides):
        place = 0
        while place < len(order) and strides[order[place]] >= stride:
            place += 1
        order.insert(place, dim)
    return order


def inverse_order(order: Sequence[int]) -> list[int]:
    """Return how to permute dimensions back."""
    return [order.index(dim) for dim in range(len(order))]


def join_runs(
    shape: Sequence[Size], strides: Sequence[Size], order: Sequence[int], hint: Callable[[Size], int] = int
) -> list[Run] | None:
    """Return the runs of a tensor, the outermost first, ``None`` if values overlap.

    Args:
        shape: Sizes of the tensor.
        strides: Its strides.
        order: Its dimensions in the order of memory, the outermost first.
        hint: Returns a size as it was when a symbol was made.
    """
    runs: list[Run] = []
    reach: Size = 1
    for dim in reversed(order):
        size, stride = shape[dim], strides[dim]
        if statically_known_true(size == 1):
            continue
        if runs and statically_known_true(stride == reach):
            runs[0].sizes.insert(0, size)
        elif hint(stride) < hint(reach):
            return None
        else:
            runs.insert(0, Run([size], stride))
        reach = stride * size
    return runs or [Run([1], 1)]


def cut_rows(runs: Sequence[Run], block_size: int) -> tuple[int, bool] | None:
    """Return the length of the rows as which ``runs`` are read, and whether the last run is cut to several of them.

    ``None`` if they are no more than three dimensions of values side by side in no way.
    """
    inner, whole = runs[-1].innermost()
    if not statically_known_true(runs[-1].stride == 1) or inner < MIN_QUANTIZED_BLOCK:
        return None
    for length in _row_lengths(inner, block_size):
        is_cut = not whole or length != inner
        if len(runs) - 1 + is_cut <= 2 and (whole or length >= block_size):
            return length, is_cut
    return None


def _row_lengths(run: int, block_size: int) -> list[int]:
    """Return the lengths of rows that ``run`` values side by side may be cut to, the best first."""
    longest = block_size * MAX_COLUMNS
    if run % block_size == 0:
        return [block_size, run] if run <= longest else [block_size]
    if run < block_size:
        return [run]
    fewest, most = ceil_div(run, longest), run // (block_size * MIN_ROW_BLOCKS)
    return next(([run // rows] for rows in range(fewest, most + 1) if run % rows == 0), [])
