"""Weight gradient straight from the kept blocks.

For column block ``j`` with kept rows ``r_0 .. r_{K-1}`` (K differs from column to column)::

    dW[o, j*b + e] = sum_p  grad_y[r_p, o] * values[start_j + p, e]

a matrix product over ``p`` whose left operand is gathered by row and whose right operand is contiguous. A program
computes a tile of ``BM`` outputs x one block and walks ``BK`` kept rows a turn; the row numbers of the next turn are
loaded one turn ahead, so that the gather of ``grad_y`` can be issued early (a scalar dependency inside the turn would
stall the pipeline). The reduced dimension is cut into parts when there are too few tiles to fill the GPU: each part
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

from lightning_actprune.kernels.launch import INTERPRETED, Launch, aligned
from lightning_actprune.kernels.unpack import kept_rows_kernel
from lightning_actprune.ops.geometry import CHUNK_ROWS, WORD_ROWS, ceil_div


class Config(NamedTuple):
    """Tile sizes and launch parameters of ``weight_grad_kernel``."""

    bm: int
    bk: int
    warps: int
    stages: int
    values_first: bool


@triton.jit(do_not_specialize=["chunks"])
def weight_grad_kernel(
    grad_ptr, values_ptr, work_ptr, offsets_ptr, out_ptr, stride_grad, outputs, length, chunks, share,
    counters, partials, B: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    NARROW: tl.constexpr, VALUES_FIRST: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write ``out[BM outputs, one column block]``; grid ``(NB, outputs / BM, parts)``.

    ``work`` holds the kept rows; if ``SPLIT`` also one counter a tile at ``counters`` and the partial tiles, in fp32,
    at ``partials``. A column of ``K`` kept rows is cut into ``K / share`` parts (rounded), at most the grid's, and
    whoever finishes a tile's last part sums them up, ``SPLIT`` at once.
    ``NARROW``: offsets into ``grad_y`` fit 32 bits, which saves half of the instructions around its copies.
    """
    j = tl.program_id(0)
    low = tl.load(offsets_ptr + j * chunks)
    high = tl.load(offsets_ptr + (j + 1) * chunks)
    if SPLIT:
        kept, part = high - low, tl.program_id(2)
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
    last = tl.maximum(high - 1, 0)
    rows = tl.load(work_ptr + tl.minimum(low + k, last))
    for p in range(low, high, BK):
        place = rows if NARROW else rows.to(tl.int64)
        grad = tl.load(grad_ptr + (place[:, None] * stride_grad + o[None, :]), mask=(o < outputs)[None, :], other=0.0)
        values = tl.load(
            values_ptr + (p + k).to(tl.int64)[:, None] * B + e[None, :],
            mask=(p + k < high)[:, None] & (e < B)[None, :], other=0.0,
        )  # fmt: skip
        rows = tl.load(work_ptr + tl.minimum(p + BK + k, last))
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


@functools.cache
def machine(device: torch.device) -> Machine:
    """Return the limits of ``device``; for the CPU's interpreter, few multiprocessors."""
    if device.type != "cuda":
        return Machine(4, 232448)
    properties = torch.cuda.get_device_properties(device)
    return Machine(properties.multi_processor_count, properties.shared_memory_per_block_optin)


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


def choose_config(block_size: int, outputs: int, itemsize: int, shared_memory: int) -> Config:
    """Return tile sizes for a block size, cut down until the pipeline's buffers fit into ``shared_memory`` bytes."""
    block = max(16, triton.next_power_of_2(block_size))
    config = CONFIGS[itemsize][block]
    if itemsize == 4 and outputs <= 64:
        config = config._replace(bm=64)
    while config.stages * config.bk * (config.bm + block) * itemsize > shared_memory and config.stages > 2:
        config = config._replace(stages=config.stages - 1)
    while config.stages * config.bk * (config.bm + block) * itemsize > shared_memory and config.bk > 16:
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


class WeightGradPlan:
    """Launches for one shape of gradient and packed input.

    Args:
        outputs: Columns of the output gradient.
        stride: Its row stride.
        packed: ``(nnz, b)`` of the values.
        rows: Rows of the dense tensor.
        length: Values per row of the dense tensor.
        dtype: Type of the result.
        config: Tile sizes.
        split: Parts of the reduction.
    """

    def __init__(
        self,
        outputs: int,
        stride: int,
        packed: tuple[int, int],
        rows: int,
        length: int,
        dtype: torch.dtype,
        config: Config,
        split: int,
    ) -> None:
        kept, block_size = packed
        columns, chunks = ceil_div(length, block_size), ceil_div(rows, CHUNK_ROWS)
        block, tiles = max(16, triton.next_power_of_2(block_size)), ceil_div(outputs, config.bm)
        self.out, self.dtype = (outputs, length), dtype
        # Columns with more kept rows than the mean get up to half as many parts again.
        parts, share = (1, 0) if split == 1 else (split + split // 2, ceil_div(kept, columns * split))
        # Multiples of 16 elements, so that the partial tiles start at 16 bytes and the compiler knows it.
        counters = ceil_div(kept, 16) * 16
        partials = counters + (ceil_div(columns * tiles, 16) * 16 if split > 1 else 0)
        self.work = partials + (columns * tiles * parts * config.bm * block if split > 1 else 0)
        # Small tiles leave the registers to have three parts under way; large ones are enough bytes by themselves.
        at_once = 0 if split == 1 else 3 if config.bm * block <= 1024 * config.warps else 1
        self._rows = Launch(
            kept_rows_kernel, (chunks, columns), rows, ceil_div(rows, WORD_ROWS), chunks, counters,
            tiles if split > 1 else 0, num_warps=4,
        )  # fmt: skip
        self._product = Launch(
            weight_grad_kernel, (columns, tiles, parts), stride, outputs, length, chunks, ceil_div(share, 16) * 16,
            counters, partials, block_size, block, config.bm, config.bk, at_once, rows * stride + config.bm < 2**31,
            config.values_first, INTERPRETED, "ieee", num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip

    def __call__(self, grad_y: Tensor, values: Tensor, bitmap: Tensor, offsets: Tensor) -> Tensor:
        """Return the weight gradient ``[OUT, length]``."""
        work = bitmap.new_empty(self.work)
        out = values.new_empty(self.out, dtype=self.dtype)
        self._rows(bitmap, offsets, work)
        self._product(grad_y, values, work, offsets, out)
        return out


@functools.lru_cache(maxsize=1024)
def _plan(
    outputs: int,
    stride: int,
    packed: tuple[int, int],
    rows: int,
    length: int,
    key: tuple[torch.dtype, torch.dtype, torch.device, bool],
) -> WeightGradPlan:
    """Return the plan for a shape; ``key`` holds what a compiled kernel depends on besides."""
    (kept, block_size), limits = packed, machine(key[2])
    config = choose_config(block_size, outputs, key[0].itemsize, limits.shared_memory)
    columns = ceil_div(length, block_size)
    split = choose_split(columns * ceil_div(outputs, config.bm), kept // columns, config, limits.multiprocessors)
    return WeightGradPlan(outputs, stride, packed, rows, length, key[1], config, split)


def weight_grad(
    grad_y: Tensor, values: Tensor, bitmap: Tensor, offsets: Tensor, total_rows: int, length: int, dtype: torch.dtype
) -> Tensor:
    """Return ``grad_y^T @ x_hat`` as ``[OUT, length]`` in ``dtype``, from ``grad_y [R, OUT]``."""
    if grad_y.stride(1) != 1:
        grad_y = grad_y.contiguous()
    key = values.dtype, dtype, values.device, aligned(grad_y, values, bitmap, offsets)
    packed = values.shape[0], values.shape[1]
    plan = _plan(grad_y.shape[1], grad_y.stride(0), packed, total_rows, length, key)
    return plan(grad_y, values, bitmap, offsets)
