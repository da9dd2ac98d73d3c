"""Weight gradient straight from the kept blocks.

For column block ``j`` with kept rows ``r_0 .. r_{K-1}`` (K differs from column to column)::

    dW[o, j*b + e] = sum_p  grad_y[r_p, o] * values[start_j + p, e]

a matrix product over ``p`` whose left operand is gathered by row and whose right operand is contiguous. A program
computes a tile of ``BM`` outputs x one block and walks ``BK`` kept rows a turn; the row numbers of the next turn are
loaded one turn ahead, so that the gather of ``grad_y`` can be issued early (a scalar dependency inside the turn would
stall the pipeline). The reduced dimension is cut into parts when there are too few tiles to fill the GPU; the
parts are summed by a second launch in a fixed order, so the result is deterministic.

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


@triton.jit
def weight_grad_kernel(
    grad_ptr, values_ptr, rows_ptr, offsets_ptr, out_ptr, stride_grad, outputs, length, chunks, stride_split,
    B: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    VALUES_FIRST: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write ``out[part, BM outputs, one column block]``; grid ``(NB, outputs / BM, parts)``."""
    j = tl.program_id(0)
    part = tl.program_id(2)
    start = tl.load(offsets_ptr + j * chunks)
    end = tl.load(offsets_ptr + (j + 1) * chunks)
    share = tl.cdiv(tl.cdiv(end - start, tl.num_programs(2)), BK) * BK
    low = start + part * share
    high = tl.minimum(low + share, end)
    o = tl.program_id(1) * BM + tl.arange(0, BM)
    e = tl.arange(0, BLOCK)
    k = tl.arange(0, BK)
    if VALUES_FIRST:
        acc = tl.zeros([BLOCK, BM], tl.float32)
    else:
        acc = tl.zeros([BM, BLOCK], tl.float32)
    rows = tl.load(rows_ptr + low + k, mask=low + k < high, other=0)
    for p in range(low, high, BK):
        valid = p + k < high
        grad = tl.load(
            grad_ptr + rows.to(tl.int64)[:, None] * stride_grad + o[None, :],
            mask=valid[:, None] & (o < outputs)[None, :], other=0.0,
        )  # fmt: skip
        values = tl.load(
            values_ptr + (p + k).to(tl.int64)[:, None] * B + e[None, :],
            mask=valid[:, None] & (e < B)[None, :], other=0.0,
        )  # fmt: skip
        rows = tl.load(rows_ptr + p + BK + k, mask=p + BK + k < high, other=0)
        if UPCAST:
            grad, values = grad.to(tl.float32), values.to(tl.float32)
        if VALUES_FIRST:
            acc = tl.dot(tl.trans(values), grad, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(tl.trans(grad), values, acc, input_precision=PRECISION)
    column = j * B + e
    inside = (column < length) & (e < B)
    out_ptr += part.to(tl.int64) * stride_split
    if VALUES_FIRST:
        target = out_ptr + o.to(tl.int64)[None, :] * length + column[:, None]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=(o < outputs)[None, :] & inside[:, None])
    else:
        target = out_ptr + o.to(tl.int64)[:, None] * length + column[None, :]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=(o < outputs)[:, None] & inside[None, :])


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


def choose_config(block_size: int, outputs: int, itemsize: int, shared_memory: int) -> Config:
    """Return tile sizes for a block size, cut down until the pipeline's buffers fit into ``shared_memory`` bytes.

    The starting points follow from the reuse of a tile, not from a sweep: the one in the benchmark notes found better.
    """
    block = max(16, triton.next_power_of_2(block_size))
    if itemsize == 4:
        config = Config(bm=64 if outputs <= 64 else 128, bk=16, warps=4, stages=3, values_first=block >= 64)
    elif block >= 64:
        config = Config(bm=128, bk=64, warps=8, stages=3, values_first=True)
    elif block == 32:
        config = Config(bm=128, bk=32, warps=4, stages=3, values_first=False)
    else:
        config = Config(bm=128, bk=64, warps=8, stages=3, values_first=False)
    while config.stages * config.bk * (config.bm + block) * itemsize > shared_memory and config.stages > 2:
        config = config._replace(stages=config.stages - 1)
    while config.stages * config.bk * (config.bm + block) * itemsize > shared_memory and config.bk > 16:
        config = config._replace(bk=config.bk // 2)
    return config


def choose_split(tiles: int, kept_per_column: int, config: Config, multiprocessors: int) -> int:
    """Return into how many parts the reduction is cut.

    Not at all once there are 8 warps of tiles for each multiprocessor (further parts then cost up to twice the time, by
    the writing and reading of partial results); otherwise to 16 warps, in at most 6 parts of four turns or more.
    Within 8 % of the best of 1 to 8 parts on an H200, on tiles from 36 to 4096.
    """
    warps = tiles * config.warps
    if warps >= 8 * multiprocessors:
        return 1
    return max(1, min(ceil_div(16 * multiprocessors, warps), 6, kept_per_column // (4 * config.bk)))


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
        self.kept, self.out, self.split = kept, (split, outputs, length), split
        self.dtype, self.partial = dtype, torch.float32 if split > 1 else dtype
        self._rows = Launch(kept_rows_kernel, (chunks, columns), rows, ceil_div(rows, WORD_ROWS), chunks, num_warps=4)
        self._product = Launch(
            weight_grad_kernel, (columns, ceil_div(outputs, config.bm), split), stride, outputs, length, chunks,
            outputs * length, block_size, max(16, triton.next_power_of_2(block_size)), config.bm, config.bk,
            config.values_first, INTERPRETED, "ieee", num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip

    def __call__(self, grad_y: Tensor, values: Tensor, bitmap: Tensor, offsets: Tensor) -> Tensor:
        """Return the weight gradient ``[OUT, length]``."""
        rows = bitmap.new_empty(self.kept)
        out = values.new_empty(self.out, dtype=self.partial)
        self._rows(bitmap, offsets, rows)
        self._product(grad_y, values, rows, offsets, out)
        return out[0] if self.split == 1 else out.sum(0).to(self.dtype)


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
