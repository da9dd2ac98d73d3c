"""Choose the order in which a tensor's memory is read when it is packed, and the rows into which it is cut.

Dimensions are sorted by stride, and dimensions that follow each other in memory are joined to runs. All views of one
region of memory, transposed or not, are therefore read in the order of their addresses. A tensor ``[B, H, N, d]`` cut
out of a joint projection ``[B, N, 3, H, d]``, for example, is read in place as ``B N`` rows of ``H d`` values.

Kernels take ``[S, T, L]`` with contiguous values in the last dimension, and cut blocks from ``L``. If a run of values
is a multiple of the block, it is read as rows of one block each: no block is cut short, and one compiled kernel serves
all shapes. A tensor is copied first if it still has more than three dimensions, or no contiguous values.

Sizes may be symbols of a compiler. The length of a row never is, so values can be cut to rows even if the number of
rows is a symbol. Comparisons that would specialize a symbol to a constant are avoided.
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
        sizes: Their sizes, outermost first.
        stride: Stride of the innermost dimension.
    """

    sizes: list[Size]
    stride: Size

    def innermost(self) -> tuple[int, bool]:
        """Return the product of the innermost sizes up to the first symbol, and True if there is no symbol."""
        product = 1
        for size in reversed(self.sizes):
            if not isinstance(size, int):
                return product, False
            product *= size
        return product, True


def is_channels_last(x: torch.Tensor) -> bool:
    """Return True if ``x [N, C, ...]`` is contiguous with its channels as the last dimension."""
    if x.dim() == 4:  # avoids a view, which takes the host longer
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.movedim(1, -1).is_contiguous()


def memory_order(strides: Sequence[Size]) -> list[int]:
    """Return the dimensions of a dense tensor in the order of memory, outermost first.

    This does not use ``sorted``, because symbols cannot be its keys.
    """
    order: list[int] = []
    for dim, stride in enumerate(strides):
        place = 0
        while place < len(order) and strides[order[place]] >= stride:
            place += 1
        order.insert(place, dim)
    return order


def inverse_order(order: Sequence[int]) -> list[int]:
    """Return the permutation that undoes ``order``."""
    return [order.index(dim) for dim in range(len(order))]


def join_runs(
    shape: Sequence[Size], strides: Sequence[Size], order: Sequence[int], hint: Callable[[Size], int] = int
) -> list[Run] | None:
    """Return the runs of a tensor, outermost first, or ``None`` if values overlap in memory.

    Args:
        shape: Sizes of the tensor.
        strides: Its strides.
        order: Its dimensions in the order of memory, outermost first.
        hint: Returns the value that a size had when its symbol was created.
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
    """Return the length of the rows into which ``runs`` are cut, and True if this cuts the last run into several rows.

    The result is ``None`` if the runs cannot be read as at most three dimensions with contiguous values.
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
    """Return the possible lengths of rows for a run of ``run`` contiguous values, the best first."""
    longest = block_size * MAX_COLUMNS
    if run % block_size == 0:
        return [block_size, run] if run <= longest else [block_size]
    if run < block_size:
        return [run]
    fewest, most = ceil_div(run, longest), run // (block_size * MIN_ROW_BLOCKS)
    return next(([run // rows] for rows in range(fewest, most + 1) if run % rows == 0), [])
