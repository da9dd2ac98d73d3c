"""Columns: the kept blocks of each column, which is how the weight gradient needs them.

Values are stored row by row; the weight gradient of a column block reduces over the rows in which it is kept. Each
column gets a list with room for all ``R`` rows: row and place in the values of each of its kept blocks, in order of
rows. A program handles some rows of one column, and counts the column's blocks above them by itself, so that no
launch has to come before. The lists live only as long as one weight gradient.

``work`` holds the rows ``[NB, R]``, the places ``[NB, R]``, the counts of all columns, and what the weight gradient
keeps there for itself: counters, which are set to zero here, and partial sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_actprune.kernels.select import RUN, WORD

MAX_CHUNKS = 32
"""Most programs per column: each reads half of the column's bits on average."""


@triton.jit
def _set_bits(word):
    """Return how many bits of each int32 are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def _block_of_row(r, j, rows, columns):
    """Return sample and number of block ``j`` of rows ``r``."""
    return (r // rows).to(tl.int64), (r % rows) * columns + j


@triton.jit
def columns_kernel(
    bitmap_ptr, offsets_ptr, work_ptr, total_rows, rows, columns, words, runs, share, counts, counters, tiles,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Write the list entries of ``share`` rows of one column; grid ``(chunks, NB)``."""
    j = tl.program_id(1)
    first = tl.minimum(tl.program_id(0) * share, total_rows)
    stop = tl.minimum(first + share, total_rows)
    above = tl.zeros([PIECE], tl.int32)
    for start in range(0, first, PIECE):
        r = start + tl.arange(0, PIECE)
        s, n = _block_of_row(r, j, rows, columns)
        word = tl.load(bitmap_ptr + s * words + n // WORD, mask=r < first, other=0)
        above += (word >> (n % WORD)) & 1
    entry = tl.sum(above, axis=0)
    for start in range(first, stop, PIECE):
        r = start + tl.arange(0, PIECE)
        s, n = _block_of_row(r, j, rows, columns)
        inside = r < stop
        word = tl.load(bitmap_ptr + s * words + n // WORD, mask=inside, other=0)
        kept = (word >> (n % WORD)) & 1
        place = tl.load(offsets_ptr + s * runs + n // RUN, mask=inside, other=0)
        place += _set_bits(word & ((1 << (n % WORD)) - 1))
        for q in tl.static_range(RUN // WORD - 1):  # the whole words of the run before this one
            before = inside & (n % RUN // WORD > q)
            place += _set_bits(tl.load(bitmap_ptr + s * words + n // RUN * (RUN // WORD) + q, mask=before, other=0))
        target = work_ptr + j.to(tl.int64) * total_rows + entry + tl.cumsum(kept, axis=0) - kept
        tl.store(target, r, mask=kept == 1)
        tl.store(target + columns.to(tl.int64) * total_rows, place, mask=kept == 1)
        entry += tl.sum(kept, axis=0)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(work_ptr + counts + j, entry)
    if tl.program_id(0) == 0:
        for start in range(0, tiles, PIECE):
            n = start + tl.arange(0, PIECE)
            tl.store(work_ptr + counters + j * tiles + n, tl.zeros([PIECE], tl.int32), mask=n < tiles)
