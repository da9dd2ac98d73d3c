"""How a value of a graph is read when it is packed: in the order of its memory, cut into rows.

Dimensions are sorted by stride, and those that follow each other in memory joined, as ``operators.regions`` does. What
is one run of values then, permuted or not, is read as rows of one block each if their number is a multiple of it; a
query cut out of a joint projection is rows of all heads side by side, read where it lies. What has more than three
joined dimensions is copied first, and so are runs that make no rows, such as 196 of every 200 features where inductor
has padded a product. Where blocks are dropped they compete within a sample, which is the first dimension: a linear
layer's rows are its features, a convolution's a block each, as in eager mode.

Sizes may be symbols. A row's length never is, so that values can be cut to rows whose number may be one; comparisons
that would make a constant of a symbol are not made.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lightning_actprune.codec.blocks import MIN_ROW_BLOCKS, ceil_div
from lightning_actprune.codec.dispatch import MAX_COLUMNS
from lightning_actprune.compiled.graphs import Size, hint, hints
from lightning_actprune.compiled.readers import Refused, Values
from lightning_actprune.config import MIN_QUANTIZED_BLOCK


class Layout(NamedTuple):
    """How a value is read.

    Args:
        order: Its dimensions in the order of memory, the outermost first.
        copied: Whether it is copied to that order first.
        shape: ``[S, T, L]`` as read; -1 for what follows from the others.
        block: Values per block, cut to a row.
    """

    order: tuple[int, ...]
    copied: bool
    shape: tuple[int, int, int]
    block: int


def memory_order(x: Tensor) -> tuple[int, ...]:
    """Return the dimensions of ``x`` in the order of memory.

    Raises:
        Refused: If two values share a place.
    """
    strides = hints(x.stride())
    order = sorted(range(x.dim()), key=lambda dim: (-strides[dim], dim))
    if any(strides[dim] == 0 and hint(x.shape[dim]) != 1 for dim in order):
        raise Refused("it is expanded")
    return tuple(order)


def _joined(x: Tensor, order: tuple[int, ...]) -> list[list[Size]]:
    """Return the sizes that are joined to each run of memory, from the outermost run to the innermost.

    Raises:
        Refused: If values overlap, or the innermost ones do not lie side by side.
    """
    runs: list[list[Size]] = [[]]
    reach: Size = 1
    for dim in reversed(order):
        size, stride = x.shape[dim], x.stride(dim)
        if statically_known_true(size == 1):
            continue
        if not statically_known_true(stride == reach):
            if hint(stride) < hint(reach) or not runs[0]:
                raise Refused("its values overlap, or do not lie side by side")
            runs.insert(0, [])
        runs[0].insert(0, size)
        reach = stride * size
    return runs


def _known(sizes: list[Size]) -> int:
    """Return the product of the innermost sizes that are numbers."""
    product = 1
    for size in reversed(sizes):
        if not isinstance(size, int):
            break
        product *= size
    return product


def _length(run: list[Size], block: int) -> int | None:
    """Return the length of the rows that a run is cut to, ``None`` if there is no sensible one."""
    inner = _known(run)
    whole = all(isinstance(size, int) for size in run)
    if inner % block == 0:
        return block
    if inner < block and whole and inner >= MIN_QUANTIZED_BLOCK:
        return inner
    for rows in range(ceil_div(inner, block * MAX_COLUMNS), inner // (block * MIN_ROW_BLOCKS) + 1):
        if inner % rows == 0:
            return inner // rows
    return None


def layout_of(x: Tensor, way: Values) -> Layout:
    """Return how ``x`` is read where all blocks are kept.

    Raises:
        Refused: If it cannot be.
    """
    order = memory_order(x)
    runs = _joined(x, order)
    symbols = sum(any(not isinstance(size, int) for size in run) for run in runs)
    run = runs[-1]
    length = _length(run, way.block_size) if len(runs) <= 2 and symbols <= 1 else None
    copied = length is None and len(runs) > 1
    if copied:
        run = [x.shape[dim] for dim in order]
        length = _length(run, way.block_size)
    if length is None:
        raise Refused(f"{_known(run)} values side by side make no rows of blocks of {way.block_size}")
    block = min(way.block_size, length)
    if copied or len(runs) == 1:
        return Layout(order, copied, (1, -1, length), block)
    if not all(isinstance(size, int) for size in run):
        outer = math.prod(hints(runs[0]))
        return Layout(order, False, (outer, -1, length), block)
    return Layout(order, False, (-1, math.prod(hints(run)) // length, length), block)


def dropped_layout(x: Tensor, like: Tensor, way: Values) -> Layout:
    """Return how ``x`` is read where blocks compete, as the layer would read it in eager mode.

    Args:
        x: What is packed.
        like: What the layer has marked, the same values in the same memory.
        way: How they are kept.

    Raises:
        Refused: If it cannot be.
    """
    order, marked = memory_order(x), memory_order(like)
    if len(_joined(x, order)) > 1 or len(_joined(like, marked)) > 1 or marked[0] != 0:
        raise Refused("its samples do not follow each other in memory, so that the blocks of one cannot compete")
    last, inner = like.shape[marked[-1]], [like.shape[dim] for dim in marked[1:]]
    if not isinstance(last, int):
        raise Refused("the length of its rows is a symbol")
    if way.operator == "linear" and marked[-1] != like.dim() - 1:
        raise Refused("its features do not lie side by side")
    if way.scope == "token" or like.dim() == 2:
        return Layout(order, False, (-1, 1, last), min(way.block_size, last))
    if not all(isinstance(size, int) for size in inner):
        if not isinstance(like.shape[0], int) or way.operator != "linear":
            raise Refused("how many blocks compete is not known")
        return Layout(order, False, (like.shape[0], -1, last), min(way.block_size, last))
    values = math.prod(hints(inner))
    length = last if way.operator == "linear" else way.block_size if values % way.block_size == 0 else values
    return Layout(order, False, (-1, values // length, length), min(way.block_size, length))
