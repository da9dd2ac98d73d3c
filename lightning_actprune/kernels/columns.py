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

MAX_CHUNKS = 16
"""Most programs per column: each reads half of the column's bits on average."""
TILE_ROWS = 4096
"""Rows looked at together: as many loads are under way, and their latency is the kernel's time."""


@triton.jit
def _set_bits(word):
    """Return how many bits of each int32 are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def _tile_bits(tile, j, bitmap_ptr, samples, rows, columns, words, TILE_S: tl.constexpr, TILE_T: tl.constexpr):
    """Return samples, block numbers, whether inside, bitmap words and bits of column ``j`` in a tile of rows.

    A tile is ``TILE_S`` samples by ``TILE_T`` rows of each, so that no row number has to be divided.
    """
    across = tl.cdiv(rows, TILE_T)
    s = ((tile // across) * TILE_S + tl.arange(0, TILE_S))[:, None]
    t = ((tile % across) * TILE_T + tl.arange(0, TILE_T))[None, :]
    n = t * columns + j
    inside = (s < samples) & (t < rows)
    word = tl.load(bitmap_ptr + s.to(tl.int64) * words + n // WORD, mask=inside, other=0)
    return s, t, n, inside, word, (word >> (n % WORD)) & 1


@triton.jit
def columns_kernel(
    bitmap_ptr, offsets_ptr, work_ptr, samples, rows, columns, words, runs, share, size, counts, counters, tiles,
    TILE_S: tl.constexpr, TILE_T: tl.constexpr,
):  # fmt: skip
    """Write the list entries of ``share`` tiles of rows of one column; grid ``(chunks, NB)``.

    ``size`` is ``NB * R``, the distance from the rows to the places.
    """
    j = tl.program_id(1)
    all_tiles = tl.cdiv(samples, TILE_S) * tl.cdiv(rows, TILE_T)
    first = tl.program_id(0) * share
    above = tl.zeros([TILE_S, TILE_T], tl.int32)
    for tile in range(0, first):
        _, _, _, _, _, kept = _tile_bits(tile, j, bitmap_ptr, samples, rows, columns, words, TILE_S, TILE_T)
        above += kept
    entry = tl.sum(tl.sum(above, axis=1), axis=0)
    list_ptr = work_ptr + j.to(tl.int64) * samples * rows
    for tile in range(first, tl.minimum(first + share, all_tiles)):
        s, t, n, inside, word, kept = _tile_bits(
            tile, j, bitmap_ptr, samples, rows, columns, words, TILE_S, TILE_T
        )  # fmt: skip
        place = tl.load(offsets_ptr + s.to(tl.int64) * runs + n // RUN, mask=inside, other=0)
        place += _set_bits(word & ((1 << (n % WORD)) - 1))
        for q in tl.static_range(RUN // WORD - 1):  # the whole words of the run before this one
            before = inside & (n % RUN // WORD > q)
            start = bitmap_ptr + s.to(tl.int64) * words + n // RUN * (RUN // WORD)
            place += _set_bits(tl.load(start + q, mask=before, other=0))
        kept = tl.reshape(kept, [TILE_S * TILE_T])
        target = list_ptr + entry + tl.cumsum(kept, axis=0) - kept
        tl.store(target, tl.reshape(s * rows + t, [TILE_S * TILE_T]), mask=kept == 1)
        tl.store(target + size, tl.reshape(place, [TILE_S * TILE_T]), mask=kept == 1)
        entry += tl.sum(kept, axis=0)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(work_ptr + counts + j, entry)
    if tl.program_id(0) == 0:
        for start in range(0, tiles, 128):
            n = start + tl.arange(0, 128)
            tl.store(work_ptr + counters + j * tiles + n, tl.zeros([128], tl.int32), mask=n < tiles)
