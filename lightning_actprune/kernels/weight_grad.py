"""Weight gradient straight from the kept blocks.

For column block ``j`` with kept rows ``r_0 .. r_{K-1}`` (K differs from column to column)::

    dW[o, j*b + e] = sum_p  grad_y[r_p, o] * values[start_j + p, e]

a matrix product over ``p`` whose left operand is gathered by row and whose right operand is contiguous. A program
computes a tile of ``BM`` outputs x one block and walks ``BK`` kept rows a turn; the row numbers of the next turn are
loaded one turn ahead, so that the gather of ``grad_y`` can be issued early (a scalar dependency inside the turn would
stall the pipeline). The reduced dimension is cut into ``SPLIT`` parts when there are too few tiles to fill the GPU; the
parts are summed by a second launch in a fixed order, so the result is deterministic.

For ``b >= 64`` the tile is computed as ``[b, BM]`` (values first), else as ``[BM, b]``: tensor cores take tiles of at
least 64 x 8, and the longer side should be the one that is not the block.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.kernels.unpack import kept_rows
from lightning_actprune.ops.geometry import CHUNK_ROWS, ceil_div


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
    B: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    VALUES_FIRST: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write ``out[part, BM outputs, one column block]``; grid ``(NB, outputs / BM, SPLIT)``."""
    j = tl.program_id(0)
    part = tl.program_id(2)
    start = tl.load(offsets_ptr + j * chunks)
    end = tl.load(offsets_ptr + (j + 1) * chunks)
    share = tl.cdiv(tl.cdiv(end - start, SPLIT), BK) * BK
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
        config = Config(bm=128, bk=64, warps=4 if block == 64 else 8, stages=4, values_first=True)
    else:
        config = Config(bm=128 if outputs <= 128 else 256, bk=64, warps=8, stages=4, values_first=False)
    while config.stages * config.bk * (config.bm + block) * itemsize > shared_memory and config.stages > 2:
        config = config._replace(stages=config.stages - 1)
    while config.stages * config.bk * (config.bm + block) * itemsize > shared_memory and config.bk > 16:
        config = config._replace(bk=config.bk // 2)
    return config


def choose_split(tiles: int, kept_per_column: int, bk: int, multiprocessors: int) -> int:
    """Return into how many parts the reduction is cut: enough to fill the GPU twice, each part four turns or more."""
    wanted = ceil_div(2 * multiprocessors, tiles)
    return max(1, min(wanted, kept_per_column // (4 * bk), 16))


def weight_grad(
    grad_y: Tensor, values: Tensor, bitmap: Tensor, offsets: Tensor, total_rows: int, length: int, dtype: torch.dtype
) -> Tensor:
    """Return ``grad_y^T @ x_hat`` as ``[OUT, length]`` in ``dtype``, from ``grad_y [R, OUT]``."""
    if grad_y.stride(1) != 1:
        grad_y = grad_y.contiguous()
    outputs, (kept, block_size), columns = grad_y.shape[1], values.shape, bitmap.shape[0]
    limits = machine(values.device)
    config = choose_config(block_size, outputs, values.element_size(), limits.shared_memory)
    tiles = columns * ceil_div(outputs, config.bm)
    split = choose_split(tiles, kept // columns, config.bk, limits.multiprocessors)
    rows = kept_rows(bitmap, offsets, total_rows, kept)
    chunks = ceil_div(total_rows, CHUNK_ROWS)
    return launch(grad_y, values, rows, (offsets, chunks), length, dtype, config, split)


def launch(
    grad_y: Tensor,
    values: Tensor,
    rows: Tensor,
    starts: tuple[Tensor, int],
    length: int,
    dtype: torch.dtype,
    config: Config,
    split: int,
) -> Tensor:
    """Run the kernel with given tile sizes; ``starts`` are the offsets and how many of them belong to one column."""
    offsets, chunks = starts
    outputs, block_size = grad_y.shape[1], values.shape[1]
    out = values.new_empty(split, outputs, length, dtype=torch.float32 if split > 1 else dtype)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # whose dot product is wrong in bf16
    weight_grad_kernel[(ceil_div(length, block_size), ceil_div(outputs, config.bm), split)](
        grad_y, values, rows, offsets, out, grad_y.stride(0), outputs, length, chunks, outputs * length,
        B=block_size, BLOCK=max(16, triton.next_power_of_2(block_size)), BM=config.bm, BK=config.bk, SPLIT=split,
        VALUES_FIRST=config.values_first, UPCAST=interpreted, PRECISION="ieee", num_warps=config.warps,
        num_stages=config.stages,
    )  # fmt: skip
    return out[0] if split == 1 else out.sum(0).to(dtype)
