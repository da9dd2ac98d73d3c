"""Unpack: from kept blocks back to the dense tensor, zeros included, in one pass; and the list of kept rows.

Each program handles 128 rows of one column block: it finds the kept blocks and their places from the bitmap and the
offsets, and writes the whole tile. The target may be transposed: then the tile is turned on its way out, so that both
the reads of ``values`` and the writes stay along memory.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.kernels.launch import Launch, aligned
from lightning_actprune.kernels.pack import CHUNK, kept_slots
from lightning_actprune.ops.geometry import CHUNK_ROWS, WORD_ROWS, ceil_div


@triton.jit
def unpack_kernel(
    values_ptr, bitmap_ptr, offsets_ptr, out_ptr, stride_batch, stride_row, stride_value, total_rows, rows, length,
    words, chunks, B: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write ``CHUNK`` rows of one column block of the dense tensor."""
    j = tl.program_id(1)
    r, kept, slot = kept_slots(bitmap_ptr, offsets_ptr, tl.program_id(0), j, total_rows, words, chunks)
    e = tl.arange(0, BLOCK)
    block = (e < B)[None, :]
    x = tl.load(values_ptr + slot.to(tl.int64)[:, None] * B + e[None, :], mask=kept[:, None] & block, other=0.0)
    start = (r // rows).to(tl.int64) * stride_batch + (r % rows).to(tl.int64) * stride_row
    column = j * B + e
    inside = (r < total_rows)[:, None] & (column < length)[None, :] & block
    tl.store(out_ptr + start[:, None] + column.to(tl.int64)[None, :] * stride_value, x, mask=inside)


@triton.jit(do_not_specialize=["total_rows", "words", "chunks", "tiles"])
def kept_rows_kernel(bitmap_ptr, offsets_ptr, work_ptr, total_rows, words, chunks, counters, tiles):
    """Write the row number of every kept block, in the order of the stored values; zero ``tiles`` counters a column.

    The counters lie at ``counters`` behind the rows; the weight gradient counts the finished parts of its tiles there.
    """
    chunk, j = tl.program_id(0), tl.program_id(1)
    r, kept, slot = kept_slots(bitmap_ptr, offsets_ptr, chunk, j, total_rows, words, chunks)
    tl.store(work_ptr + slot, r, mask=kept)
    if chunk == 0:
        for start in range(0, tiles, CHUNK):
            n = start + tl.arange(0, CHUNK)
            tl.store(work_ptr + counters + j * tiles + n, tl.zeros_like(n), mask=n < tiles)


@functools.lru_cache(maxsize=1024)
def _unpack_launch(
    shape: tuple[int, int, int], transposed: bool, block_size: int, key: tuple[torch.dtype, torch.device, bool]
) -> Launch:
    batch, rows, length = shape
    total, columns = batch * rows, ceil_div(length, block_size)
    words, chunks = ceil_div(total, WORD_ROWS), ceil_div(total, CHUNK_ROWS)
    strides = (1, rows) if transposed else (length, 1)
    return Launch(
        unpack_kernel, (chunks, columns), rows * length, *strides, total, rows, length, words, chunks, block_size,
        triton.next_power_of_2(block_size), num_warps=4,
    )  # fmt: skip


def unpack(values: Tensor, bitmap: Tensor, offsets: Tensor, shape: tuple[int, int, int], transposed: bool) -> Tensor:
    """Return the pruned tensor of ``shape [batch, rows, length]``, or ``[batch, length, rows]`` if transposed."""
    batch, rows, length = shape
    out = values.new_empty((batch, length, rows) if transposed else shape)
    key = values.dtype, values.device, aligned(values, bitmap, offsets)
    _unpack_launch(shape, transposed, values.shape[1], key)(values, bitmap, offsets, out)
    return out
