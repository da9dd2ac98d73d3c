"""Pack: from a dense tensor to kept blocks, bitmap and offsets, with static shapes and no host synchronisation.

Four launches:

1. ``block_keys_kernel``  reads ``x`` once and writes one int32 key per block (4 / (b * itemsize) of ``x``);
2. ``select_kernel``      per sample: threshold and cut;
3. ``mark_kernel``        per 128 rows x columns: bitmap words and counts of kept blocks; the program that finishes last
   turns the counts into the offsets (an exclusive sum over a few thousand numbers);
4. ``gather_kernel``      per 128 rows of one column: copies the kept blocks to their places.

Samples matter only in step 2; the others see ``R = S * T`` rows. Bytes moved: ``x`` twice (the second time only its
kept blocks, and often from L2), the values once, keys twice. Everything but the tensors is worked out once per shape
and kept in a ``PackPlan``.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.kernels.launch import Launch, aligned
from lightning_actprune.kernels.select import (
    REGISTER_BLOCKS,
    block_keys_kernel,
    select_kernel,
    select_rows_kernel,
    select_streaming_kernel,
)
from lightning_actprune.ops.geometry import CHUNK_ROWS, WORD_ROWS, ceil_div

CHUNK = tl.constexpr(CHUNK_ROWS)
WORD = tl.constexpr(WORD_ROWS)


@triton.jit
def mark_kernel(
    scratch_ptr, bitmap_ptr, offsets_ptr, total_rows, samples, rows, words, chunks, size,
    NB: tl.constexpr, COLS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Write the bitmap words of ``CHUNK`` rows and ``COLS`` columns; the last program writes all offsets."""
    chunk = tl.program_id(0)
    r = chunk * CHUNK + tl.arange(0, CHUNK)
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (r < total_rows)[:, None] & (j < NB)[None, :]
    keys = tl.load(scratch_ptr + r.to(tl.int64)[:, None] * NB + j[None, :], mask=inside, other=-1)
    result_ptr = scratch_ptr + size
    threshold = tl.load(result_ptr + r // rows, mask=r < total_rows, other=0)[:, None]
    cut = tl.load(result_ptr + samples + r // rows, mask=r < total_rows, other=-1)[:, None]
    n = (r % rows)[:, None] * NB + j[None, :]
    kept = ((keys > threshold) | ((keys == threshold) & (n <= cut))).to(tl.int32)
    tl.store(offsets_ptr + j * chunks + chunk, tl.sum(kept, axis=0), mask=j < NB)
    bit = tl.arange(0, WORD)[None, :, None]
    bits = tl.sum(tl.reshape(kept, [CHUNK // WORD, WORD, COLS]) << bit, axis=1)
    w = chunk * (CHUNK // WORD) + tl.arange(0, CHUNK // WORD)
    target = bitmap_ptr + j.to(tl.int64)[None, :] * words + w[:, None]
    tl.store(target, bits, mask=(w < words)[:, None] & (j < NB)[None, :])
    tl.debug_barrier()  # every thread's counts are written before the counter says so
    finished = tl.atomic_add(result_ptr + 2 * samples, 1, sem="acq_rel")
    if finished == tl.num_programs(0) * tl.num_programs(1) - 1:
        _counts_to_offsets(offsets_ptr, NB * chunks, PIECE)


@triton.jit
def _counts_to_offsets(offsets_ptr, size, PIECE: tl.constexpr):
    """Replace ``size`` counts by the sum of those before each, and write the total behind them."""
    total = tl.program_id(0) * 0
    for start in range(0, size, PIECE):
        n = start + tl.arange(0, PIECE)
        # Past the L1 cache: the counts come from other multiprocessors.
        counts = tl.load(offsets_ptr + n, mask=n < size, other=0, cache_modifier=".cg")
        tl.store(offsets_ptr + n, total + tl.cumsum(counts, axis=0) - counts, mask=n < size)
        total += tl.sum(counts, axis=0)
    tl.store(offsets_ptr + size, total)


@triton.jit
def kept_slots(bitmap_ptr, offsets_ptr, chunk, j, total_rows, words, chunks):
    """Return, for ``CHUNK`` rows of column ``j``: row numbers, whether each block is kept, and its place in values."""
    r = chunk * CHUNK + tl.arange(0, CHUNK)
    word = tl.load(bitmap_ptr + j.to(tl.int64) * words + r // WORD, mask=r < total_rows, other=0)
    kept = (word >> (r % WORD)) & 1
    slot = tl.load(offsets_ptr + j * chunks + chunk) + tl.cumsum(kept, axis=0) - kept
    return r, kept == 1, slot


@triton.jit
def gather_kernel(
    x_ptr, bitmap_ptr, offsets_ptr, values_ptr, stride_sample, stride_row, total_rows, rows, length, words, chunks,
    B: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the kept blocks of ``CHUNK`` rows of one column to their places in ``values [nnz, B]``."""
    j = tl.program_id(1)
    r, kept, slot = kept_slots(bitmap_ptr, offsets_ptr, tl.program_id(0), j, total_rows, words, chunks)
    e = tl.arange(0, BLOCK)
    start = (r // rows).to(tl.int64) * stride_sample + (r % rows).to(tl.int64) * stride_row
    column = j * B + e
    stored = kept[:, None] & (e < B)[None, :]
    x = tl.load(x_ptr + start[:, None] + column[None, :], mask=stored & (column < length)[None, :], other=0.0)
    tl.store(values_ptr + slot.to(tl.int64)[:, None] * B + e[None, :], x, mask=stored)


class PackPlan:
    """Launches and output shapes for one shape of input.

    Args:
        shape: ``(S, T, L)``.
        strides: Strides of samples and rows; the last one is 1.
        block_size: Values per block.
        keep: Blocks kept per sample.
    """

    def __init__(self, shape: tuple[int, int, int], strides: tuple[int, int], block_size: int, keep: int) -> None:
        samples, rows, length = shape
        total, columns = samples * rows, ceil_div(length, block_size)
        words, chunks = ceil_div(total, WORD_ROWS), ceil_div(total, CHUNK_ROWS)
        block = triton.next_power_of_2(block_size)
        self.values = (samples * keep, block_size)
        self.bitmap = (columns, words)
        self.offsets = columns * chunks + 1
        self.scratch = total * columns + 2 * samples + 1
        self._keys = _keys(shape, strides, block_size)
        self._select = _select(samples, rows * columns, keep)
        cols = min(32, triton.next_power_of_2(columns))
        self._mark = Launch(
            mark_kernel, (chunks, ceil_div(columns, cols)), total, samples, rows, words, chunks, total * columns,
            columns, cols, 4096,
            num_warps=4,
        )  # fmt: skip
        self._gather = Launch(
            gather_kernel, (chunks, columns), *strides, total, rows, length, words, chunks, block_size, block,
            num_warps=4,
        )  # fmt: skip

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(values, bitmap, offsets)``."""
        scratch = x.new_empty(self.scratch, dtype=torch.int32)
        bitmap = x.new_empty(self.bitmap, dtype=torch.int32)
        offsets = x.new_empty(self.offsets, dtype=torch.int32)
        values = x.new_empty(self.values)
        self._keys(x, scratch)
        self._select(scratch)
        self._mark(scratch, bitmap, offsets)
        self._gather(x, bitmap, offsets, values)
        return values, bitmap, offsets


def _keys(shape: tuple[int, int, int], strides: tuple[int, int], block_size: int) -> Launch:
    """Return the launch that writes the keys."""
    samples, rows, length = shape
    columns, block = ceil_div(length, block_size), triton.next_power_of_2(block_size)
    # 4096 values a program, 32 a thread at 4 warps: whole rows first, so that a warp reads along memory.
    cols = max(1, min(triton.next_power_of_2(columns), 4096 // block))
    tile_rows = max(1, 4096 // (block * cols))
    grid = ceil_div(samples * rows, tile_rows), ceil_div(columns, cols)
    scalars = (*strides, samples * rows, rows, length, columns, block_size, block, tile_rows, cols)
    return Launch(block_keys_kernel, grid, *scalars, num_warps=4)


def _select(samples: int, blocks: int, keep: int) -> Launch:
    """Return the launch that finds threshold and cut of every sample."""
    scalars = (samples, blocks, samples * blocks, keep)
    padded = triton.next_power_of_2(blocks)
    if blocks > REGISTER_BLOCKS:
        return Launch(select_streaming_kernel, (samples,), *scalars, 8192, num_warps=16)
    if padded <= 512:
        group = max(1, min(2048 // padded, triton.next_power_of_2(samples)))
        return Launch(select_rows_kernel, (ceil_div(samples, group),), *scalars, group, padded, num_warps=4)
    return Launch(select_kernel, (samples,), *scalars, padded, num_warps=min(16, padded // 256))


@functools.lru_cache(maxsize=1024)
def _plan(
    shape: tuple[int, int, int],
    strides: tuple[int, int],
    block_size: int,
    keep: int,
    key: tuple[torch.dtype, torch.device, bool],
) -> PackPlan:
    """Return the plan for a shape; ``key`` holds what a compiled kernel depends on besides."""
    return PackPlan(shape, strides, block_size, keep)


def pack(x: Tensor, block_size: int, keep: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(values, bitmap, offsets)`` of ``x [S, T, L]``, last stride 1; see ``ops.reference.pack``."""
    key = x.dtype, x.device, aligned(x)
    return _plan(tuple(x.shape), x.stride()[:2], block_size, keep, key)(x)
