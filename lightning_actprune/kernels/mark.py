"""Mark: from keys, threshold and cut to the bitmap and the offsets.

Called by the selection kernels for the rows of their samples. Samples share bitmap words and runs of 128 rows, so bits
and counts are added with atomics to zeroed memory; they are integers, so the order does not matter. The program that
finishes last turns the counts of all runs into offsets: an exclusive sum over a few thousand numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_actprune.ops.geometry import CHUNK_ROWS, WORD_ROWS

CHUNK = tl.constexpr(CHUNK_ROWS)
WORD = tl.constexpr(WORD_ROWS)


@triton.jit
def mark_rows(
    scratch_ptr, bitmap_ptr, offsets_ptr, threshold, cut, low, high, rows, columns, words, chunks, COLS: tl.constexpr
):  # fmt: skip
    """Mark the kept blocks of rows ``low`` to ``high``: ``key > threshold``, or equal and number ``n <= cut``.

    ``threshold`` and ``cut`` are those of one sample, or pointers to those of all samples.
    """
    for chunk in range(low // CHUNK, tl.cdiv(high, CHUNK)):
        r = chunk * CHUNK + tl.arange(0, CHUNK)
        mine = (r >= low) & (r < high)
        if threshold.dtype.is_ptr():
            limit = tl.load(threshold + r // rows, mask=mine, other=0)[:, None]
            last = tl.load(cut + r // rows, mask=mine, other=-1)[:, None]
        else:
            limit, last = threshold, cut
        w = chunk * (CHUNK // WORD) + tl.arange(0, CHUNK // WORD)
        for first in range(0, columns, COLS):
            j = first + tl.arange(0, COLS)
            inside = mine[:, None] & (j < columns)[None, :]
            keys = tl.load(scratch_ptr + r.to(tl.int64)[:, None] * columns + j[None, :], mask=inside, other=-1)
            n = (r % rows)[:, None] * columns + j[None, :]
            kept = ((keys > limit) | ((keys == limit) & (n <= last))).to(tl.int32)
            tl.atomic_add(offsets_ptr + j * chunks + chunk, tl.sum(kept, axis=0), mask=j < columns, sem="relaxed")
            bit = tl.arange(0, WORD)[None, :, None]
            bits = tl.sum(tl.reshape(kept, [CHUNK // WORD, WORD, COLS]) << bit, axis=1)
            target = bitmap_ptr + j.to(tl.int64)[None, :] * words + w[:, None]
            tl.atomic_or(target, bits, mask=(w < words)[:, None] & (j < columns)[None, :], sem="relaxed")


@triton.jit
def finish(finished_ptr, offsets_ptr, size, programs, PIECE: tl.constexpr):
    """Say that this program has marked its rows; the last one replaces ``size`` counts by the sums of those before."""
    tl.debug_barrier()  # every thread's counts are written before the counter says so
    if tl.atomic_add(finished_ptr, 1, sem="acq_rel") == programs - 1:
        total = tl.program_id(0) * 0
        for start in range(0, size, PIECE):
            n = start + tl.arange(0, PIECE)
            # Past the L1 cache: the counts come from other multiprocessors.
            counts = tl.load(offsets_ptr + n, mask=n < size, other=0, cache_modifier=".cg")
            tl.store(offsets_ptr + n, total + tl.cumsum(counts, axis=0) - counts, mask=n < size)
            total += tl.sum(counts, axis=0)
        tl.store(offsets_ptr + size, total)
