"""Weight gradient straight from the kept blocks.

For column block ``j`` with kept rows ``r_0 .. r_{K-1}`` (K differs from column to column)::

    dW[o, j*b + e] = sum_p  grad_y[r_p, o] * values[place_p, e]

a matrix product over ``p`` of gathered rows; ``kernels.columns`` lists rows and places of each column. A program
computes a tile of ``BM`` outputs x one block and walks ``BK`` kept rows a turn; the list entries of the next turn are
loaded one turn ahead, so that the gathers can be issued early (a scalar dependency inside the turn would stall the
pipeline). The reduced dimension is cut into parts when there are too few tiles to fill the GPU: each part
goes to memory in fp32, and the program that finishes a tile's last part adds all of them in the order of the parts, so
the result is deterministic. Nothing waits for another program.

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

from lightning_actprune.kernels.columns import MAX_CHUNKS, TILE_ROWS, columns_kernel
from lightning_actprune.kernels.launch import INTERPRETED, Launch, aligned
from lightning_actprune.kernels.tiles import FP32_ROWS, MAX_IMBALANCE, Config, choose_config, choose_split, machine
from lightning_actprune.ops.geometry import RUN_BLOCKS, WORD_BLOCKS, ceil_div


@triton.jit
def weight_grad_kernel(
    grad_ptr, values_ptr, work_ptr, out_ptr, stride_grad, outputs, length, total_rows, share,
    counts, counters, partials,
    B: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    NARROW: tl.constexpr, VALUES_FIRST: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write ``out[BM outputs, one column block]``; grid ``(NB, outputs / BM, parts)``.

    ``work`` holds the lists of the columns and, at ``counts``, their lengths; if ``SPLIT`` also one counter a tile at
    ``counters`` and the partial tiles, in fp32, at ``partials``. A column of ``K`` kept rows is cut into ``K / share``
    parts (rounded), at most the grid's, and whoever finishes a tile's last part sums them up, ``SPLIT`` at once.
    ``NARROW``: offsets into ``grad_y`` and the values fit 32 bits, which saves half the instructions around the copies.
    """
    j = tl.program_id(0)
    low = j * 0
    high = tl.load(work_ptr + counts + j)
    if SPLIT:
        kept, part = high, tl.program_id(2)
        parts = tl.maximum(1, tl.minimum((kept + share // 2) // share, tl.num_programs(2)))
        if part >= parts:
            return
        rows_each = tl.cdiv(tl.cdiv(kept, parts), BK) * BK
        low += part * rows_each
        high = tl.minimum(low + rows_each, high)
    o = tl.program_id(1) * BM + tl.arange(0, BM)
    e = tl.arange(0, BLOCK)
    k = tl.arange(0, BK)
    if VALUES_FIRST:
        acc = tl.zeros([BLOCK, BM], tl.float32)
    else:
        acc = tl.zeros([BM, BLOCK], tl.float32)
    # Past the end the last row is read again, and only the values are masked: grad_y needs no mask of its own.
    last = tl.maximum(high - 1, low)
    rows_ptr = work_ptr + j.to(tl.int64) * total_rows
    places_ptr = rows_ptr + tl.num_programs(0).to(tl.int64) * total_rows
    rows = tl.load(rows_ptr + tl.minimum(low + k, last), mask=high > low, other=0)
    places = tl.load(places_ptr + tl.minimum(low + k, last), mask=high > low, other=0)
    for p in range(low, high, BK):
        r, place = (rows, places) if NARROW else (rows.to(tl.int64), places.to(tl.int64))
        grad = tl.load(grad_ptr + (r[:, None] * stride_grad + o[None, :]), mask=(o < outputs)[None, :], other=0.0)
        values = tl.load(
            values_ptr + (place[:, None] * B + e[None, :]), mask=(p + k < high)[:, None] & (e < B)[None, :], other=0.0
        )
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
        within = tl.arange(0, BM)[None, :] * BLOCK + e
    else:
        column, o, e = (j * B + e)[None, :], o[:, None], e[None, :]
        within = tl.arange(0, BM)[:, None] * BLOCK + e
    if SPLIT:
        tile = j * tl.num_programs(1) + tl.program_id(1)
        first = (work_ptr + partials).to(tl.pointer_type(tl.float32), bitcast=True)
        first += (tile.to(tl.int64) * tl.num_programs(2)) * (BM * BLOCK) + within
        tl.store(first + part * (BM * BLOCK), acc, mask=(within >= 0) & (parts > 1))
        tl.debug_barrier()  # every thread's part is written before the counter says so
        finished = tl.atomic_add(work_ptr + counters + tile, 1, sem="acq_rel")
        if finished != parts - 1:
            return
        if parts > 1:
            # Past the L1 cache: the other parts come from other multiprocessors.
            acc = tl.load(first, cache_modifier=".cg")
            for q in tl.range(1, parts, loop_unroll_factor=SPLIT):
                acc += tl.load(first + q * (BM * BLOCK), cache_modifier=".cg")
    inside = (o < outputs) & (column < length) & (e < B)
    tl.store(out_ptr + o.to(tl.int64) * length + column, acc.to(out_ptr.dtype.element_ty), mask=inside)


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
    """

    outputs: int
    stride: int
    samples: int
    rows: int
    length: int
    kept: int
    block_size: int


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
        rows, columns = shape.rows, ceil_div(shape.length, shape.block_size)
        block, tiles = max(16, triton.next_power_of_2(shape.block_size)), ceil_div(shape.outputs, config.bm)
        self.out, self.dtype = (shape.outputs, shape.length), dtype
        # A column may hold many more kept rows than the mean, and gets as many more parts: behind a GELU some columns
        # keep all their rows, and without parts of their own they took 458 us where the mean would have taken 180.
        mean = max(1.0, shape.kept / columns)
        parts = math.ceil(split * min(rows / mean, MAX_IMBALANCE)) if split > 1 or balance else 1
        share = max(1, round(mean / split))
        # Multiples of 16 elements, so that the partial tiles start at 16 bytes and the compiler knows it.
        self.counts = _padded(2 * columns * rows)
        counters = self.counts + _padded(columns)
        partials = counters + (_padded(columns * tiles) if parts > 1 else 0)
        self.work = partials + (columns * tiles * parts * config.bm * block if parts > 1 else 0)
        # Small tiles leave the registers to have three parts under way; large ones are enough bytes by themselves.
        at_once = 0 if parts == 1 else 3 if config.bm * block <= 1024 * config.warps else 1
        per_sample = rows // shape.samples
        words, runs = ceil_div(per_sample * columns, WORD_BLOCKS), ceil_div(per_sample * columns, RUN_BLOCKS)
        tile_t = min(TILE_ROWS, triton.next_power_of_2(per_sample))
        tile_s = min(TILE_ROWS // tile_t, triton.next_power_of_2(shape.samples))
        row_tiles = ceil_div(shape.samples, tile_s) * ceil_div(per_sample, tile_t)
        chunk = ceil_div(row_tiles, MAX_CHUNKS)
        self.list_columns = Launch(
            columns_kernel, (ceil_div(row_tiles, chunk), columns), shape.samples, per_sample, columns, words, runs,
            chunk, columns * rows, self.counts, counters, tiles if parts > 1 else 0, tile_s, tile_t, num_warps=8,
        )  # fmt: skip
        narrow = max(rows * shape.stride + config.bm, (shape.kept + 1) * block) < 2**31
        self._product = Launch(
            weight_grad_kernel, (columns, tiles, parts), shape.stride, shape.outputs, shape.length, rows,
            _padded(share), self.counts, counters, partials, shape.block_size, block, config.bm, config.bk, at_once,
            narrow, config.values_first, INTERPRETED, "ieee", num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip

    def __call__(self, grad_y: Tensor, values: Tensor, bitmap: Tensor, offsets: Tensor) -> Tensor:
        """Return the weight gradient ``[OUT, length]``."""
        work = torch.empty(self.work, dtype=torch.int32, device=values.device)
        out = torch.empty(self.out, dtype=self.dtype, device=values.device)
        self.list_columns(bitmap, offsets, work)
        self._product(grad_y, values, work, out)
        return out


def _padded(words: int) -> int:
    return ceil_div(words, 16) * 16


@functools.lru_cache(maxsize=1024)
def _plan(shape: Shape, key: tuple[torch.dtype, torch.dtype, torch.device, bool]) -> WeightGradPlan:
    """Return the plan for a shape; ``key`` holds what a compiled kernel depends on besides."""
    limits = machine(key[2])
    config = choose_config(shape.block_size, shape.outputs, key[0].itemsize, limits)
    columns = ceil_div(shape.length, shape.block_size)
    tiles = columns * ceil_div(shape.outputs, config.bm)
    split = choose_split(tiles, shape.kept // columns, config, limits.multiprocessors)
    if key[0] == torch.float32 and split > 1:  # the vendor's product cuts such reductions further, and errs less
        split = max(split, ceil_div(shape.kept // columns, FP32_ROWS))
    # From 48 warps of tiles per multiprocessor on, the long columns' programs find others to run beside.
    return WeightGradPlan(shape, key[1], config, split, tiles * config.warps < 48 * limits.multiprocessors)


def weight_grad(
    grad_y: Tensor, values: Tensor, bitmap: Tensor, offsets: Tensor, length: int, dtype: torch.dtype
) -> Tensor:
    """Return ``grad_y^T @ x_hat`` as ``[OUT, length]`` in ``dtype``, from ``grad_y [R, OUT]``."""
    if grad_y.stride(1) != 1:
        grad_y = grad_y.contiguous()
    rows, outputs = grad_y.shape
    kept, block_size = values.shape
    shape = Shape(outputs, grad_y.stride(0), bitmap.shape[0], rows, length, kept, block_size)
    plan = _plan(shape, (values.dtype, dtype, values.device, aligned(grad_y, values, bitmap, offsets)))
    return plan(grad_y, values, bitmap, offsets)
