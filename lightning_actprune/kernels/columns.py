"""Columns: the kept blocks of each column, which is how the weight gradient needs them, as numbers.

Values are stored row by row; the weight gradient of a column block reduces over the rows in which it is kept. Each
column gets a list with room for all ``R`` rows: row and place in the values of each of its kept blocks, in order of
rows. Two launches, since a list entry's position depends on all rows above: the first counts per 128 rows or more (a
``chunk``), the second adds up the counts of the chunks above its own and writes. A program handles one chunk of some
columns as one tile, without a loop, since what counts is how many reads follow each other.

Blocks in few bits become numbers ``[nnz, b]`` here: the product meets a block once for every tile of outputs, and would
decode it as often. The numbers wait for nothing and only the product waits for them, so that they need no launch of
their own: further programs of the first make them, beside those that count. Such a program needs 32 to 40 registers a
thread (Triton 3.6, sm_90), and one that counts 80: all programs of a launch would get as many, and fewer of them run at
once. So beside numbers a program counts half as many columns, for which 32 to 40 are enough. In the second launch all
would get 212.

``work`` holds the rows ``[NB, R]``, the places ``[NB, R]``, and at ``counts`` those of the chunks ``[chunks, NB]`` and
the length of each list ``[NB]``. It lives only as long as one weight gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.kernels.formats import dequantize_tile, encode_format, whole_blocks
from lightning_actprune.kernels.launch import Launch
from lightning_actprune.kernels.select import RUN, WORD
from lightning_actprune.ops.geometry import RUN_BLOCKS, WORD_BLOCKS, ceil_div

MIN_ROWS = 128
"""Least rows of a chunk."""
MAX_CHUNKS = 256
"""Chunks up to which they stay small: the second launch reads half of all counts on average."""
MAX_TILE = 4096
"""Most blocks of a program."""


@triton.jit
def set_bits(word):
    """Return how many bits of each word of 32 bits are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def _tile(r, j, stop, bitmap_ptr, rows, columns, words):
    """Return samples and first block numbers of rows ``r``, and their bits ``[COLS, TILE]`` in columns ``j``.

    Rows run along the last axis: neighbouring lanes then store to neighbouring places of the same list.
    """
    s, t = (r // rows).to(tl.int64), r % rows
    n = (t * columns)[None, :] + j[:, None]
    inside = (r < stop)[None, :] & (j < columns)[:, None]
    word = tl.load(bitmap_ptr + (s * words)[None, :] + n // WORD, mask=inside, other=0)
    return s, t * columns, (word >> (n % WORD)) & 1


@triton.jit
def _kept_before(n, s, inside, bitmap_ptr, offsets_ptr, words, runs):
    """Return the place of block ``n`` if it is kept: offset of its run, whole words of the run, bits before it."""
    place = tl.load(offsets_ptr + s * runs + n // RUN, mask=inside, other=0)
    word = tl.load(bitmap_ptr + s * words + n // WORD, mask=inside, other=0)
    place += set_bits(word & ((1 << (n % WORD)) - 1))
    for q in tl.static_range(RUN // WORD - 1):
        before = inside & (n % RUN // WORD > q)
        place += set_bits(tl.load(bitmap_ptr + s * words + n // RUN * (RUN // WORD) + q, mask=before, other=0))
    return place


@triton.jit
def count_columns_kernel(
    bitmap_ptr, work_ptr, total_rows, rows, columns, words, counts, TILE: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Count the kept blocks of ``TILE`` rows in each column; grid ``(chunks, NB / COLS)``."""
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    r = tl.program_id(0) * TILE + tl.arange(0, TILE)
    _, _, kept = _tile(r, j, total_rows, bitmap_ptr, rows, columns, words)
    tl.store(work_ptr + counts + tl.program_id(0) * columns + j, tl.sum(kept, axis=1), mask=j < columns)


@triton.jit
def count_and_dequantize_kernel(
    bitmap_ptr, work_ptr, values_ptr, numbers_ptr, total_rows, rows, columns, words, counts, chunks, kept,
    TILE: tl.constexpr, COLS: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Count, and write the ``kept`` blocks to ``numbers [kept, B]``; grid ``(chunks + more, NB / COLS)``.

    A program past the chunks writes ``BLOCKS`` blocks.
    """
    if tl.program_id(0) < chunks:
        count_columns_kernel(bitmap_ptr, work_ptr, total_rows, rows, columns, words, counts, TILE, COLS)
    else:
        tile = (tl.program_id(0) - chunks) * tl.num_programs(1) + tl.program_id(1)
        p = tile * BLOCKS + tl.arange(0, BLOCKS)
        exist = (p >= 0) & (p < kept)  # of nearly 2^31 blocks, the last tiles reach beyond int32
        e = tl.arange(0, BLOCK)
        x = dequantize_tile(values_ptr, kept, p, exist, 0, B, BLOCK, FORMAT).to(numbers_ptr.dtype.element_ty)
        inside = exist[:, None] & (e < B)[None, :]
        tl.store(numbers_ptr + p.to(tl.int64)[:, None] * B + e[None, :], x, mask=inside)


@triton.jit
def list_columns_kernel(
    bitmap_ptr, offsets_ptr, work_ptr, total_rows, rows, columns, words, runs, size, counts,
    TILE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write the list entries of ``TILE`` rows; ``size`` is ``NB * R``, the distance from the rows to the places.

    A block's place is that of its row's first block in the tile, plus the kept blocks between them.
    """
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    r = chunk * TILE + tl.arange(0, TILE)
    # Read before the counts, whose sum would have to be waited for.
    s, n, kept = _tile(r, j, total_rows, bitmap_ptr, rows, columns, words)
    place = _kept_before(n + tl.program_id(1) * COLS, s, r < total_rows, bitmap_ptr, offsets_ptr, words, runs)
    above = tl.zeros([COLS, TILE], tl.int32)
    for start in range(0, chunk, TILE):
        c = start + tl.arange(0, TILE)
        read = (c < chunk)[None, :] & (j < columns)[:, None]
        above += tl.load(work_ptr + counts + (c * columns)[None, :] + j[:, None], mask=read, other=0)
    entry = tl.sum(above, axis=1)
    places = place[None, :] + tl.cumsum(kept, axis=0) - kept
    target = (j.to(tl.int64) * total_rows + entry)[:, None] + tl.cumsum(kept, axis=1) - kept
    tl.store(work_ptr + target, tl.broadcast_to(r[None, :], [COLS, TILE]), mask=kept == 1)
    tl.store(work_ptr + size + target, places, mask=kept == 1)
    if chunk == chunks - 1:
        tl.store(work_ptr + counts + chunks * columns + j, entry + tl.sum(kept, axis=1), mask=j < columns)


class ColumnsPlan:
    """The two launches for one shape.

    Args:
        samples: Samples of the packed input.
        rows: Rows of each.
        columns: Blocks per row.
        stored: Number of kept blocks, values of each, and their format.
    """

    def __init__(self, samples: int, rows: int, columns: int, stored: tuple[int, int, str]) -> None:
        total = samples * rows
        tile = min(MAX_TILE, max(MIN_ROWS, triton.next_power_of_2(ceil_div(total, MAX_CHUNKS))))
        cols = min(32, MAX_TILE // tile, triton.next_power_of_2(columns))
        chunks = ceil_div(total, tile)
        words, runs = ceil_div(rows * columns, WORD_BLOCKS), ceil_div(rows * columns, RUN_BLOCKS)
        size = columns * total
        counts = ceil_div(2 * size, 16) * 16
        self.lengths = counts + chunks * columns
        self.work = self.lengths + columns
        grid, scalars = (chunks, ceil_div(columns, cols)), (total, rows, columns, words, counts)
        kept, block_size, value_format = stored
        self._numbers = None if value_format == "same" else (kept, block_size)
        if self._numbers is None:
            self._count = Launch(count_columns_kernel, grid, *scalars, tile, cols, num_warps=4)
        else:
            block, blocks = whole_blocks(block_size)
            counted = max(1, min(cols, MAX_TILE // 2 // tile))
            groups = ceil_div(columns, counted)
            self._count = Launch(
                count_and_dequantize_kernel, (chunks + ceil_div(kept, blocks * groups), groups), *scalars, chunks, kept,
                tile, counted, block_size, block, blocks, encode_format(value_format, block_size), num_warps=4,
            )  # fmt: skip
        self._list = Launch(
            list_columns_kernel, grid, total, rows, columns, words, runs, size, counts, tile, cols, num_warps=8
        )

    def __call__(self, values: Tensor, bitmap: Tensor, offsets: Tensor, work: Tensor, dtype: torch.dtype) -> Tensor:
        """Write the lists into ``work``; return the values as numbers, of ``dtype`` if they are stored in few bits."""
        if self._numbers is None:
            self._count(bitmap, work)
        else:
            stored, values = values, values.new_empty(self._numbers, dtype=dtype)
            self._count(bitmap, work, stored, values)
        self._list(bitmap, offsets, work)
        return values
