"""Weight gradient straight from the kept blocks.

For column block ``j`` with kept rows ``r_0 .. r_{K-1}`` (K differs from column to column)::

    dW[o, j*b + e] = sum_p  grad_y[r_p, o] * values[place_p, e]

a matrix product over ``p`` of gathered rows; ``kernels.columns`` lists rows and places of each column, and makes
numbers of blocks in few bits. A program
computes a tile of ``BM`` outputs x one block and walks ``BK`` kept rows a turn; the list entries of the next turn are
loaded one turn ahead, so that the gathers can be issued early (a scalar dependency inside the turn would stall the
pipeline). The reduced dimension is cut into parts when there are too few tiles to fill the GPU, and longer columns into
more parts than others. Parts go to memory in fp32 and a second launch adds them in their order, so the result is
deterministic. (Adding them in the program that finishes last saved that launch, but made the loop itself slower.)

For ``b >= 64`` the tile is computed as ``[b, BM]`` (values first), else as ``[BM, b]``: tensor cores take tiles of at
least 64 x 8, and the longer side should be the one that is not the block.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.kernels.columns import ColumnsPlan
from lightning_actprune.kernels.launch import INTERPRETED, Launch, aligned
from lightning_actprune.kernels.tiles import (
    FP32_ROWS,
    MAX_IMBALANCE,
    SPLIT_RULES,
    Config,
    choose_config,
    choose_split,
    machine,
)
from lightning_actprune.ops.geometry import ceil_div


@triton.jit
def parts_of(kept, share, most):
    """Return into how many parts a column of ``kept`` rows is cut."""
    return tl.maximum(1, tl.minimum((kept + share // 2) // share, most))


@triton.jit
def weight_grad_kernel(
    grad_ptr, values_ptr, work_ptr, out_ptr, stride_grad, outputs, length, total_rows, lengths, share,
    B: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    NARROW: tl.constexpr, VALUES_FIRST: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write ``out[part, BM outputs, one column block]``; grid ``(NB, outputs / BM, parts)``.

    ``work`` holds the lists of the columns and, at ``lengths``, their lengths ``K``. If ``SPLIT``, a column is cut into
    ``K / share`` parts (rounded), at most the grid's.
    ``NARROW``: offsets into ``grad_y`` and the values fit 32 bits, which saves half the instructions around the copies.
    """
    j, part = tl.program_id(0), tl.program_id(2)
    low = j * 0
    high = tl.load(work_ptr + lengths + j)
    if SPLIT:
        parts = parts_of(high, share, tl.num_programs(2))
        if part >= parts:
            return
        rows_each = tl.cdiv(tl.cdiv(high, parts), BK) * BK
        low += part * rows_each
        high = tl.minimum(low + rows_each, high)
    o = tl.program_id(1) * BM + tl.arange(0, BM)
    e = tl.arange(0, BLOCK)
    k = tl.arange(0, BK)
    if VALUES_FIRST:
        acc = tl.zeros([BLOCK, BM], tl.float32)
    else:
        acc = tl.zeros([BM, BLOCK], tl.float32)
    last = tl.maximum(high - 1, low)
    rows_ptr = work_ptr + j.to(tl.int64) * total_rows
    places_ptr = rows_ptr + tl.num_programs(0).to(tl.int64) * total_rows
    # A comparison of blocks: Triton 3.9's interpreter makes integers of a scalar one, and takes no integers for a mask.
    some = tl.broadcast_to(high, [BK]) > tl.broadcast_to(low, [BK])
    rows = tl.load(rows_ptr + tl.minimum(low + k, last), mask=some, other=0)
    places = tl.load(places_ptr + tl.minimum(low + k, last), mask=some, other=0)
    for p in range(low, high, BK):
        # Past the end the last row is read again, and only the values are masked: grad_y needs no mask of its own.
        r, place = (rows, places) if NARROW else (rows.to(tl.int64), places.to(tl.int64))
        grad = tl.load(grad_ptr + (r[:, None] * stride_grad + o[None, :]), mask=(o < outputs)[None, :], other=0.0)
        stored = (p + k < high)[:, None] & (e < B)[None, :]
        values = tl.load(values_ptr + (place[:, None] * B + e[None, :]), mask=stored, other=0.0)
        rows = tl.load(rows_ptr + tl.minimum(p + BK + k, last))
        places = tl.load(places_ptr + tl.minimum(p + BK + k, last))
        if UPCAST:
            grad, values = grad.to(tl.float32), values.to(tl.float32)
        if VALUES_FIRST:
            acc = tl.dot(tl.trans(values), grad, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(tl.trans(grad), values, acc, input_precision=PRECISION)
    if VALUES_FIRST:
        column, o, e = (j * B + e)[:, None], o[None, :], e[:, None]
    else:
        column, o, e = (j * B + e)[None, :], o[:, None], e[None, :]
    inside = (o < outputs) & (column < length) & (e < B)
    target = out_ptr + part.to(tl.int64) * outputs * length + o.to(tl.int64) * length + column
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_parts_kernel(
    partial_ptr, work_ptr, out_ptr, outputs, length, lengths, share, most,
    B: tl.constexpr, OUTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Add the parts of ``OUTS`` outputs x ``COLS`` values in their order: ``[parts, OUT, L] -> [OUT, L]``."""
    o = (tl.program_id(0) * OUTS + tl.arange(0, OUTS))[:, None]
    f = tl.program_id(1) * COLS + tl.arange(0, COLS)
    parts = parts_of(tl.load(work_ptr + lengths + f // B, mask=f < length, other=0), share, most)
    inside = (o < outputs) & (f < length)[None, :]
    n = o.to(tl.int64) * length + f[None, :]
    total = tl.zeros([OUTS, COLS], tl.float32)
    for part in range(0, tl.max(parts, axis=0)):
        total += tl.load(partial_ptr + n, mask=inside & (part < parts)[None, :], other=0.0)
        partial_ptr += outputs * length
    tl.store(out_ptr + n, total.to(out_ptr.dtype.element_ty), mask=inside)


class Shape(NamedTuple):
    """What a weight gradient's launches depend on.

    Args:
        outputs: Columns of the output gradient.
        stride: Its row stride.
        samples: Samples of the packed input.
        rows: Its rows, of all samples.
        length: Its values per row.
        kept: Its kept blocks.
        block_size: Values per block.
        itemsize: Bytes per value that is multiplied.
        value_format: How values are stored.
    """

    outputs: int
    stride: int
    samples: int
    rows: int
    length: int
    kept: int
    block_size: int
    itemsize: int
    value_format: str = "same"


class WeightGradPlan:
    """Launches for one shape of gradient and packed input.

    Args:
        shape: The sizes.
        dtype: Type of the result.
        config: Tile sizes.
        split: Parts of the reduction of a column of average length.
        balance: Whether longer columns get more parts even if ``split`` is 1.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, config: Config, split: int, balance: bool = False) -> None:
        rows, outputs, length = shape.rows, shape.outputs, shape.length
        columns, block = ceil_div(length, shape.block_size), max(16, triton.next_power_of_2(shape.block_size))
        # A column may hold many more kept rows than the mean, and gets as many more parts: behind a GELU some columns
        # keep all their rows, and without parts of their own they took 458 us where the mean would have taken 180.
        mean = max(1.0, shape.kept / columns)
        parts = math.ceil(split * min(rows / mean, MAX_IMBALANCE)) if split > 1 or balance else 1
        # What the parts take for a moment is bounded by twice what unpacking the input would.
        parts = max(1, min(parts, 2 * rows * shape.itemsize // (4 * outputs)))
        share = ceil_div(max(1, round(mean / split)), 16) * 16
        self.out, self.dtype, self.parts, self.share = (outputs, length), dtype, parts, share
        stored = shape.kept, shape.block_size, shape.value_format
        self.list_columns = ColumnsPlan(shape.samples, rows // shape.samples, columns, stored)
        lengths = self.list_columns.lengths
        narrow = max(rows * shape.stride + config.bm, (shape.kept + 1) * block) < 2**31
        self.product = Launch(
            weight_grad_kernel, (columns, ceil_div(outputs, config.bm), parts), shape.stride, outputs, length, rows,
            lengths, share, shape.block_size, block, config.bm, config.bk, parts > 1, narrow, config.values_first,
            INTERPRETED, "ieee", num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        self._add = Launch(
            add_parts_kernel, (ceil_div(outputs, 16), ceil_div(length, 128)), outputs, length, lengths, share, parts,
            shape.block_size, 16, 128, num_warps=4,
        )  # fmt: skip

    def __call__(self, grad_y: Tensor, values: Tensor, bitmap: Tensor, offsets: Tensor) -> Tensor:
        """Return the weight gradient ``[OUT, length]``."""
        work = values.new_empty(self.list_columns.work, dtype=torch.int32)
        out = values.new_empty(*self.out, dtype=self.dtype)
        values = self.list_columns(values, bitmap, offsets, work, grad_y.dtype)
        if self.parts == 1:
            self.product(grad_y, values, work, out)
            return out
        partial = values.new_empty(self.parts, *self.out, dtype=torch.float32)
        self.product(grad_y, values, work, partial)
        self._add(partial, work, out)
        return out


@functools.lru_cache(maxsize=1024)
def _plan(shape: Shape, key: tuple[torch.dtype, torch.dtype, torch.device, torch.dtype, object]) -> WeightGradPlan:
    """Return the plan for a shape; ``key`` holds what a compiled kernel depends on besides."""
    limits = machine(key[2])
    config = choose_config(shape.block_size, shape.outputs, shape.itemsize, limits)
    columns = ceil_div(shape.length, shape.block_size)
    tiles = columns * ceil_div(shape.outputs, config.bm)
    rule = SPLIT_RULES[shape.itemsize]
    split = choose_split(tiles, shape.kept // columns, config, limits.multiprocessors, rule)
    if shape.itemsize == 4 and split > 1:
        split = max(split, ceil_div(shape.kept // columns, FP32_ROWS))
    # From 48 warps of tiles per multiprocessor on, the long columns' programs find others to run beside.
    return WeightGradPlan(shape, key[1], config, split, tiles * config.warps < 48 * limits.multiprocessors)


def weight_grad(
    grad_y: Tensor,
    values: Tensor,
    bitmap: Tensor,
    offsets: Tensor,
    length: int,
    dtype: torch.dtype,
    block_size: int | None = None,
    value_format: str = "same",
) -> Tensor:
    """Return ``grad_y^T @ x_hat`` as ``[OUT, length]`` in ``dtype``, from ``grad_y [R, OUT]``.

    ``block_size`` is that of the values if these are stored as they are, and must be given otherwise: those of few bits
    are read as the type of ``grad_y``.
    """
    if grad_y.stride(1) != 1:
        grad_y = grad_y.contiguous()
    (rows, outputs), (kept, width) = grad_y.shape, values.shape
    stored = kept, block_size or width, grad_y.element_size(), value_format
    shape = Shape(outputs, grad_y.stride(0), bitmap.shape[0], rows, length, *stored)
    key = values.dtype, dtype, values.device, grad_y.dtype, aligned(grad_y, values, bitmap, offsets)
    plan = _plan(shape, key)
    return plan(grad_y, values, bitmap, offsets)
