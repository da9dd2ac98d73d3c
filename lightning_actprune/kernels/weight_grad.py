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
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.kernels.columns import MAX_CHUNKS, columns_kernel
from lightning_actprune.kernels.launch import INTERPRETED, Launch, aligned
from lightning_actprune.ops.geometry import RUN_BLOCKS, WORD_BLOCKS, ceil_div


class Config(NamedTuple):
    """Tile sizes and launch parameters of ``weight_grad_kernel``."""

    bm: int
    bk: int
    warps: int
    stages: int
    values_first: bool


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
        tl.store(first + part * (BM * BLOCK), acc)
        tl.debug_barrier()  # every thread's part is written before the counter says so
        finished = tl.atomic_add(work_ptr + counters + tile, 1, sem="acq_rel")
        if finished != parts - 1:
            return
        # Past the L1 cache: the other parts come from other multiprocessors.
        acc = tl.load(first, cache_modifier=".cg")
        for q in tl.range(1, parts, loop_unroll_factor=SPLIT):
            acc += tl.load(first + q * (BM * BLOCK), cache_modifier=".cg")
    inside = (o < outputs) & (column < length) & (e < B)
    tl.store(out_ptr + o.to(tl.int64) * length + column, acc.to(out_ptr.dtype.element_ty), mask=inside)


class Machine(NamedTuple):
    """What the choice of a configuration needs to know about a device."""

    multiprocessors: int
    shared_memory: int
    major: int


@functools.cache
def machine(device: torch.device) -> Machine:
    """Return the limits of ``device``; for the CPU's interpreter, few multiprocessors."""
    if device.type != "cuda":
        return Machine(4, 232448, 9)
    found = torch.cuda.get_device_properties(device)
    return Machine(found.multi_processor_count, found.shared_memory_per_block_optin, found.major)


CONFIGS = {
    2: {
        16: Config(128, 64, 8, 3, False),
        32: Config(128, 32, 4, 3, False),
        64: Config(128, 64, 8, 3, True),
        128: Config(128, 64, 8, 3, True),
        256: Config(128, 64, 8, 3, True),
    },
    4: {
        16: Config(256, 16, 4, 3, False),
        32: Config(128, 16, 4, 3, True),
        64: Config(128, 16, 4, 3, False),
        128: Config(64, 16, 4, 3, True),
        256: Config(64, 16, 8, 3, True),
    },
}
"""By bytes per value and block size. 16 bits: by the reuse of a tile. fp32, which has no tensor cores: by the share of
FMAs in the compiled loop (0.77, 0.82, 0.85 and 0.84 for b = 16 to 128); larger tiles or twice the rows a turn gain up
to 0.05, but spill with Triton 3.9 on capability 8.0."""


def choose_config(block_size: int, outputs: int, itemsize: int, machine: Machine) -> Config:
    """Return tile sizes for a block size, cut down until the pipeline's buffers fit into the shared memory."""
    block = max(16, triton.next_power_of_2(block_size))
    config = CONFIGS[itemsize][block]
    if itemsize == 4 and outputs <= 64:
        config = config._replace(bm=64)
    if itemsize == 2 and block <= 32 and machine.major not in (9, 10):
        # mma.sync takes a turned operand from registers only, so that grad_y could not be copied asynchronously.
        config = Config(128, 64, 8, 3, True)
    while config.stages * config.bk * (config.bm + block) * itemsize > machine.shared_memory and config.stages > 2:
        config = config._replace(stages=config.stages - 1)
    while config.stages * config.bk * (config.bm + block) * itemsize > machine.shared_memory and config.bk > 16:
        config = config._replace(bk=config.bk // 2)
    return config


class SplitRule(NamedTuple):
    """When and how far the reduction is cut into parts.

    Args:
        full: Warps of tiles per multiprocessor from which on it is not cut: further parts then cost up to twice the
            time, by the writing and reading of partial results.
        aim: Warps per multiprocessor wanted otherwise.
        most: Largest number of parts.
        turns: Least turns of the loop that a part is worth.
    """

    full: int = 8
    aim: int = 16
    most: int = 6
    turns: int = 4


SPLIT_RULE = SplitRule()


def choose_split(
    tiles: int, kept_per_column: int, config: Config, multiprocessors: int, rule: SplitRule = SPLIT_RULE
) -> int:
    """Return into how many parts the reduction of a column of average length is cut."""
    warps = tiles * config.warps
    if warps >= rule.full * multiprocessors:
        return 1
    wanted = ceil_div(rule.aim * multiprocessors, warps)
    return max(1, min(wanted, rule.most, kept_per_column // (rule.turns * config.bk)))


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
        split: Parts of the reduction.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, config: Config, split: int) -> None:
        rows, columns = shape.rows, ceil_div(shape.length, shape.block_size)
        block, tiles = max(16, triton.next_power_of_2(shape.block_size)), ceil_div(shape.outputs, config.bm)
        self.out, self.dtype = (shape.outputs, shape.length), dtype
        # Columns with more kept rows than the mean get up to half as many parts again.
        parts, share = (1, 0) if split == 1 else (split + split // 2, ceil_div(shape.kept, columns * split))
        # Multiples of 16 elements, so that the partial tiles start at 16 bytes and the compiler knows it.
        self.counts = _padded(2 * columns * rows)
        counters = self.counts + _padded(columns)
        partials = counters + (_padded(columns * tiles) if split > 1 else 0)
        self.work = partials + (columns * tiles * parts * config.bm * block if split > 1 else 0)
        # Small tiles leave the registers to have three parts under way; large ones are enough bytes by themselves.
        at_once = 0 if split == 1 else 3 if config.bm * block <= 1024 * config.warps else 1
        blocks = rows // shape.samples * columns
        chunk = ceil_div(rows, min(MAX_CHUNKS, ceil_div(rows, 512)))
        self.list_columns = Launch(
            columns_kernel, (ceil_div(rows, chunk), columns), rows, rows // shape.samples, columns,
            ceil_div(blocks, WORD_BLOCKS), ceil_div(blocks, RUN_BLOCKS), chunk, self.counts, counters,
            tiles if split > 1 else 0, 1024, num_warps=4,
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
    return WeightGradPlan(shape, key[1], config, split)


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
