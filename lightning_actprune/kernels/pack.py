"""Pack: from a dense tensor to kept blocks, bitmap and offsets, with static shapes and no host synchronisation.

Five launches, each with one job:

1. ``block_keys_kernel``  reads ``x`` once and writes one int32 key per block (4 / (b * itemsize) of ``x``);
2. ``select_kernel``      threshold and cut per sample;
3. ``mark_kernel``        per 128 rows x columns: bitmap words and counts of kept blocks;
4. ``scan_kernel``        exclusive sum of the counts: where each run of rows starts in the stored values;
5. ``gather_kernel``      per 128 rows of one column: copies the kept blocks to their places.

Samples matter only in step 2; the others see ``R = S * T`` rows. Bytes moved: ``x`` twice (the second time only its
kept blocks, and often from L2), the values once, keys twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.kernels.select import (
    REGISTER_BLOCKS,
    block_keys_kernel,
    select_kernel,
    select_streaming_kernel,
)
from lightning_actprune.ops.geometry import CHUNK_ROWS, WORD_ROWS, ceil_div

CHUNK = tl.constexpr(CHUNK_ROWS)
WORD = tl.constexpr(WORD_ROWS)


@triton.jit
def mark_kernel(
    keys_ptr, threshold_ptr, cut_ptr, bitmap_ptr, counts_ptr, total_rows, rows, words, chunks,
    NB: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write the bitmap words and the number of kept blocks of ``CHUNK`` rows and ``COLS`` columns."""
    chunk = tl.program_id(0)
    r = chunk * CHUNK + tl.arange(0, CHUNK)
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (r < total_rows)[:, None] & (j < NB)[None, :]
    keys = tl.load(keys_ptr + r.to(tl.int64)[:, None] * NB + j[None, :], mask=inside, other=-1)
    threshold = tl.load(threshold_ptr + r // rows, mask=r < total_rows, other=0)[:, None]
    cut = tl.load(cut_ptr + r // rows, mask=r < total_rows, other=-1)[:, None]
    n = (r % rows)[:, None] * NB + j[None, :]
    kept = ((keys > threshold) | ((keys == threshold) & (n <= cut))).to(tl.int32)
    tl.store(counts_ptr + j * chunks + chunk, tl.sum(kept, axis=0), mask=j < NB)
    bit = tl.arange(0, WORD)[None, :, None]
    bits = tl.sum(tl.reshape(kept, [CHUNK // WORD, WORD, COLS]) << bit, axis=1)
    w = chunk * (CHUNK // WORD) + tl.arange(0, CHUNK // WORD)
    target = bitmap_ptr + j.to(tl.int64)[None, :] * words + w[:, None]
    tl.store(target, bits, mask=(w < words)[:, None] & (j < NB)[None, :])


@triton.jit
def scan_kernel(counts_ptr, offsets_ptr, size, PIECE: tl.constexpr):
    """Write the exclusive sum of ``counts``, and the total behind it; one program."""
    total = tl.program_id(0)  # 0, as a device scalar
    for start in range(0, size, PIECE):
        n = start + tl.arange(0, PIECE)
        counts = tl.load(counts_ptr + n, mask=n < size, other=0)
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


def pack(x: Tensor, block_size: int, keep: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(values, bitmap, offsets)`` of ``x [S, T, L]``, last stride 1; see ``ops.reference.pack``."""
    samples, rows, length = x.shape
    total_rows, columns = samples * rows, ceil_div(length, block_size)
    words, chunks = ceil_div(total_rows, WORD_ROWS), ceil_div(total_rows, CHUNK_ROWS)
    block = triton.next_power_of_2(block_size)
    keys = _keys(x, block_size, columns)
    threshold, cut = _select(keys, samples, rows * columns, keep)
    bitmap = x.new_empty(columns, words, dtype=torch.int32)
    counts = x.new_empty(columns * chunks, dtype=torch.int32)
    offsets = x.new_empty(columns * chunks + 1, dtype=torch.int32)
    values = x.new_empty(samples * keep, block_size)
    cols = min(32, triton.next_power_of_2(columns))
    mark_kernel[(chunks, ceil_div(columns, cols))](
        keys, threshold, cut, bitmap, counts, total_rows, rows, words, chunks, NB=columns, COLS=cols, num_warps=4
    )
    scan_kernel[(1,)](counts, offsets, columns * chunks, PIECE=4096, num_warps=8)
    gather_kernel[(chunks, columns)](
        x, bitmap, offsets, values, x.stride(0), x.stride(1), total_rows, rows, length, words, chunks,
        B=block_size, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return values, bitmap, offsets


def _keys(x: Tensor, block_size: int, columns: int) -> Tensor:
    """Return the keys of all blocks, int32 ``[S * T, NB]``."""
    samples, rows, length = x.shape
    block = triton.next_power_of_2(block_size)
    # 4096 values a program, 32 a thread at 4 warps: whole rows first, so that a warp reads along memory.
    cols = max(1, min(triton.next_power_of_2(columns), 4096 // block))
    tile_rows = max(1, 4096 // (block * cols))
    keys = x.new_empty(samples * rows, columns, dtype=torch.int32)
    block_keys_kernel[(ceil_div(samples * rows, tile_rows), ceil_div(columns, cols))](
        x, keys, x.stride(0), x.stride(1), samples * rows, rows, length,
        NB=columns, B=block_size, BLOCK=block, ROWS=tile_rows, COLS=cols, num_warps=4,
    )  # fmt: skip
    return keys


def _select(keys: Tensor, samples: int, blocks: int, keep: int) -> tuple[Tensor, Tensor]:
    """Return threshold and cut of each sample, int32 ``[S]`` each."""
    threshold, cut = keys.new_empty(samples), keys.new_empty(samples)
    if blocks > REGISTER_BLOCKS:
        select_streaming_kernel[(samples,)](keys, threshold, cut, blocks, keep, PIECE=8192, num_warps=16)
        return threshold, cut
    padded = triton.next_power_of_2(blocks)
    group = max(1, min(1024 // padded, triton.next_power_of_2(samples)))
    warps = max(4, min(16, padded * group // 512))
    select_kernel[(ceil_div(samples, group),)](
        keys, threshold, cut, samples, blocks, keep, GROUP=group, BLOCKS=padded, num_warps=warps
    )  # fmt: skip
    return threshold, cut
