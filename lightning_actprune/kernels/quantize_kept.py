"""Kept blocks in few bits: the last launch of a pack of three, see ``pack``.

The arithmetic of a format is what this costs, where a copy waits for memory: no lane should spend it on a dropped
block. So a program reads tiles of kept blocks alone, which it finds by their ranks (see ``ranks``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_actprune.kernels.quantize import load_blocks, quantize_tile
from lightning_actprune.kernels.ranks import blocks_of_lanes, count_kept, kept_words, lanes_of_ranks, run_of
from lightning_actprune.kernels.rescale import block_factors, rescaled


@triton.jit
def quantize_kernel(
    x_ptr, bitmap_ptr, offsets_ptr, values_ptr, keys_ptr, stride_sample, stride_row, samples, blocks, words, runs, nnz,
    length: tl.constexpr, columns: tl.constexpr, UNIT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Write kept blocks of one run to their places in ``values``, of ``nnz``, as bytes; scaled if there are keys.

    ``PARTS`` programs share a run, ``TILE`` blocks at a time.
    """
    first, run = run_of(tl.program_id(0) // PARTS, runs, LANES)
    w0, w1, w2, w3 = kept_words(bitmap_ptr, first, run, samples, words, LANES)
    place, count = tl.load(offsets_ptr + first.to(tl.int64) * runs + run), count_kept(w0, w1, w2, w3)
    for start in range(tl.program_id(0) % PARTS * TILE, count, PARTS * TILE):
        p = start + tl.arange(0, TILE)
        s, n = blocks_of_lanes(first, run, lanes_of_ranks(p, w0, w1, w2, w3), LANES)
        samples_ptr = x_ptr + s.to(tl.int64) * stride_sample * UNIT
        x = load_blocks(samples_ptr, n, p < count, stride_row, length, columns, UNIT, B, BLOCK)
        if keys_ptr is not None:
            x = rescaled(x, block_factors(keys_ptr, s, n, p < count, samples, blocks))
        quantize_tile(x, values_ptr, nnz, place + p, p < count, B, BLOCK, FORMAT)
