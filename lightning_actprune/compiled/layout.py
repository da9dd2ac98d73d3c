"""Find in which order to read a value of a graph to pack it: that of its memory, cut into rows (``codec.layout``).

Runs that make no rows, such as 196 of every 200 features where inductor has padded a product, are copied first. Blocks
that may be dropped compete within a sample, the first dimension. As in eager mode, a row of a linear layer has all
features of a token, and a row of a convolution is a block.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lightning_actprune.codec import layout
from lightning_actprune.codec.layout import Run, cut_rows, join_runs
from lightning_actprune.compiled.graphs import hint, hints
from lightning_actprune.compiled.readers import Refusal, Values


class Layout(NamedTuple):
    """The order in which to read a value.

    Args:
        order: Its dimensions in the order of memory, the outermost first.
        copied: Whether to copy it to that order first.
        shape: ``[S, T, L]``; -1 for a size that follows from the others.
        block: Values per block, at most a row.
    """

    order: tuple[int, ...]
    copied: bool
    shape: tuple[int, int, int]
    block: int


def memory_order(x: Tensor) -> tuple[int, ...]:
    """Return the dimensions of ``x`` in the order of memory.

    Raises:
        Refusal: If two values share an address.
    """
    strides = hints(x.stride())
    if any(stride == 0 and hint(size) != 1 for stride, size in zip(strides, x.shape, strict=True)):
        raise Refusal("it is expanded")
    return tuple(layout.memory_order(strides))


def _joined(x: Tensor, order: tuple[int, ...]) -> list[Run]:
    """Return the runs of ``x``, the outermost first.

    Raises:
        Refusal: If values overlap.
    """
    runs = join_runs(x.shape, x.stride(), order, hint)
    if runs is None:
        raise Refusal("its values overlap")
    return runs


def layout_of(x: Tensor, way: Values) -> Layout:
    """Return the layout of ``x`` if no block is dropped.

    Raises:
        Refusal: If it makes no rows of blocks.
    """
    order = memory_order(x)
    copy = [Run([x.shape[dim] for dim in order], 1)]
    for copied, runs in (False, _joined(x, order)), (True, copy):
        rows = cut_rows(runs, way.block_size)
        shape = None if rows is None else _view(runs, *rows)
        if shape is not None:
            return Layout(order, copied, shape, min(way.block_size, shape[2]))
    inner, _ = copy[-1].innermost()
    raise Refusal(f"{inner} values side by side make no rows of blocks of {way.block_size}")


def _view(runs: list[Run], length: int, is_cut: bool) -> tuple[int, int, int] | None:
    """Return the sizes ``[S, T, L]`` of ``runs``, one of them -1, or ``None`` if more than one is a symbol."""
    products = [run.innermost() for run in runs]
    sizes = [product if whole else -1 for product, whole in products]
    sizes[-1:] = [sizes[-1] // length if sizes[-1] > 0 else -1] if is_cut else []
    missing = 2 - len(sizes)
    sizes = [1] * missing + sizes
    if -1 not in sizes:
        sizes[min(missing, 1)] = -1
    return None if sizes.count(-1) > 1 else (sizes[0], sizes[1], length)


def layout_with_drops(x: Tensor, like: Tensor, way: Values) -> Layout:
    """Return the layout of ``x`` if blocks are dropped: that of the layer in eager mode.

    Args:
        x: The value to pack.
        like: The value that the layer has marked, which has the same values in the same memory.
        way: How to pack it.

    Raises:
        Refusal: If blocks cannot compete as in eager mode.
    """
    order, marked = memory_order(x), memory_order(like)
    runs = [*_joined(x, order), *_joined(like, marked)]
    if len(runs) > 2 or not all(statically_known_true(run.stride == 1) for run in runs) or marked[0] != 0:
        raise Refusal("its samples do not follow each other in memory, so that the blocks of one cannot compete")
    last, inner = like.shape[marked[-1]], [like.shape[dim] for dim in marked[1:]]
    if not isinstance(last, int):
        raise Refusal("the length of its rows is a symbol")
    if way.operator == "linear" and marked[-1] != like.dim() - 1:
        raise Refusal("its features are not side by side in memory")
    if way.topk_over == "token" or like.dim() == 2:
        shape = -1, 1, last
    elif all(isinstance(size, int) for size in inner):
        values = math.prod(hints(inner))
        length = last if way.operator == "linear" else way.block_size if values % way.block_size == 0 else values
        shape = -1, values // length, length
    elif isinstance(like.shape[0], int) and way.operator == "linear":
        shape = like.shape[0], -1, last
    else:
        raise Refusal("how many blocks compete is not known")
    return Layout(order, False, shape, min(way.block_size, shape[2]))
