"""Which blocks of a sample are kept: keys and an exact selection without sorting.

A block's key is its sum of squares as fp32, read as int32: for non-negative floats, integer order is float order. A
block with a NaN or Inf gets INT_MAX, a finite block whose sum overflows the largest finite float. Per sample, the
selection returns ``(threshold, cut)`` so that a block ``n`` is kept if and only if::

    key[n] > threshold  or  (key[n] == threshold and n <= cut)

which holds for exactly ``keep`` blocks, equal keys in order of ``n``. Every later kernel evaluates this test; no index
list is written. Threshold and cut are found bit by bit from keys held in registers (31 counts), or, for samples too
large for that, by four passes over digits of 8, 8, 8 and 7 bits with a histogram each and one pass over equal keys.

``scratch`` holds the keys of all ``size`` blocks, then thresholds and cuts of all samples, then one counter (see ``kernels.pack``).
"""

from __future__ import annotations

import triton
import triton.language as tl

INT_MAX = tl.constexpr(0x7FFFFFFF)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)

REGISTER_BLOCKS = 16384
"""Largest sample whose keys are held in registers: 32 a thread at 16 warps; twice that spills (sm_90, Triton 3.6)."""


@triton.jit
def block_keys(x, axis: tl.constexpr):
    """Return the int32 keys of the fp32 blocks that lie along the last axis of ``x``."""
    squares = tl.minimum(tl.sum(x * x, axis=axis), FLOAT_MAX)
    broken = tl.max(((x != x) | (tl.abs(x) > FLOAT_MAX)).to(tl.int32), axis=axis)
    return tl.where(broken > 0, INT_MAX, squares.to(tl.int32, bitcast=True))


@triton.jit
def _select_one(keys, n, keep):
    """Return threshold and cut of ``keys [BLOCKS]``, padded with -1.

    Not a case of ``_select_rows``: of a row vector made from one-dimensional data, Triton gives every thread all values
    (2.4 ms instead of a few microseconds for 2352 keys, H200, Triton 3.6).
    """
    threshold = tl.program_id(0) * 0  # 0, as a device scalar that the loop can carry
    for step in range(31):
        candidate = threshold | (1 << (30 - step))
        count = tl.sum((keys >= candidate).to(tl.int32), axis=0)
        threshold = tl.where(count >= keep, candidate, threshold)
    quota = keep - tl.sum((keys > threshold).to(tl.int32), axis=0)
    equal = (keys == threshold).to(tl.int32)
    last = (equal == 1) & (tl.cumsum(equal, axis=0) == quota)
    return threshold, tl.max(tl.where(last, n, -1), axis=0)


@triton.jit
def _select_rows(keys, n, keep):
    """Return threshold and cut of each row of ``keys [GROUP, BLOCKS]``, padded with -1."""
    threshold = tl.sum(keys * 0, axis=1)
    for step in range(31):
        candidate = threshold | (1 << (30 - step))
        count = tl.sum((keys >= candidate[:, None]).to(tl.int32), axis=1)
        threshold = tl.where(count >= keep, candidate, threshold)
    quota = keep - tl.sum((keys > threshold[:, None]).to(tl.int32), axis=1)
    equal = (keys == threshold[:, None]).to(tl.int32)
    last = (equal == 1) & (tl.cumsum(equal, axis=1) == quota[:, None])
    return threshold, tl.max(tl.where(last, n[None, :], -1), axis=1)


@triton.jit
def block_keys_kernel(
    x_ptr, scratch_ptr, stride_sample, stride_row, total_rows, rows, length,
    NB: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write the key of every block: ``x [S, T, L] -> keys [S * T, NB]``. Tile ``[ROWS, COLS, BLOCK]``."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    e = tl.arange(0, BLOCK)
    start = (r // rows).to(tl.int64) * stride_sample + (r % rows).to(tl.int64) * stride_row
    column = j[:, None] * B + e[None, :]
    inside = (r < total_rows)[:, None, None] & ((column < length) & (e < B)[None, :])[None, :, :]
    x = tl.load(x_ptr + start[:, None, None] + column[None, :, :], mask=inside, other=0.0).to(tl.float32)
    mask = (r < total_rows)[:, None] & (j < NB)[None, :]
    tl.store(scratch_ptr + r.to(tl.int64)[:, None] * NB + j[None, :], block_keys(x, 2), mask=mask)


@triton.jit
def select_kernel(scratch_ptr, samples, blocks, size, keep, GROUP: tl.constexpr, BLOCKS: tl.constexpr):
    """Select in ``GROUP`` samples at once, each held as one row of ``BLOCKS >= blocks`` keys."""
    s = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    n = tl.arange(0, BLOCKS)
    inside = (s < samples)[:, None] & (n < blocks)[None, :]
    keys = tl.load(scratch_ptr + s.to(tl.int64)[:, None] * blocks + n[None, :], mask=inside, other=-1)
    threshold, cut = _select_rows(keys, n, keep)
    result_ptr = scratch_ptr + size
    tl.store(result_ptr + s, threshold, mask=s < samples)
    tl.store(result_ptr + samples + s, cut, mask=s < samples)
    if tl.program_id(0) == 0:
        tl.store(result_ptr + 2 * samples, 0)


@triton.jit
def keys_select_kernel(
    x_ptr, scratch_ptr, stride_sample, stride_row, samples, rows, length, size, keep,
    NB: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Keys and selection of one sample in one program, ``TILE`` blocks at a time.

    The keys go through global memory (the caches, in fact): a register tensor cannot be filled piece by piece.
    """
    s = tl.program_id(0)
    blocks = rows * NB
    x_ptr += s.to(tl.int64) * stride_sample
    keys_ptr = scratch_ptr + s.to(tl.int64) * blocks
    e = tl.arange(0, BLOCK)
    for first in range(0, blocks, TILE):
        n = first + tl.arange(0, TILE)
        column = (n % NB)[:, None] * B + e[None, :]
        inside = (n < blocks)[:, None] & (column < length) & (e < B)[None, :]
        start = (n // NB).to(tl.int64) * stride_row
        x = tl.load(x_ptr + start[:, None] + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(keys_ptr + n, block_keys(x, 1), mask=n < blocks)
    tl.debug_barrier()
    n = tl.arange(0, BLOCKS)
    keys = tl.load(keys_ptr + n, mask=n < blocks, other=-1)
    threshold, cut = _select_one(keys, n, keep)
    result_ptr = scratch_ptr + size
    tl.store(result_ptr + s, threshold)
    tl.store(result_ptr + samples + s, cut)
    if s == 0:
        tl.store(result_ptr + 2 * samples, 0)


@triton.jit
def _next_digit(keys_ptr, blocks, prefix, need, SHIFT: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr):
    """Extend ``prefix`` by the digit of the ``need``-th largest key that starts with it; ``need`` goes on from it."""
    digits = tl.arange(0, 256)
    histogram = tl.zeros([256], tl.int32)
    for start in range(0, blocks, PIECE):
        n = start + tl.arange(0, PIECE)
        keys = tl.load(keys_ptr + n, mask=n < blocks, other=-1) >> SHIFT
        match = (n < blocks) & (keys >> WIDTH == prefix)  # keys are below 2**31: the first prefix, 0, fits all
        # Two casts: some interpreters return int64 data that is labelled int32.
        histogram += tl.histogram(keys & ((1 << WIDTH) - 1), 256, mask=match).to(tl.int64).to(tl.int32)
    at_least = tl.cumsum(histogram, axis=0, reverse=True)
    digit = tl.max(tl.where(at_least >= need, digits, -1), axis=0)
    need -= tl.sum(tl.where(digits > digit, histogram, 0), axis=0)
    return (prefix << WIDTH) | digit, need


@triton.jit
def select_streaming_kernel(scratch_ptr, samples, blocks, size, keep, PIECE: tl.constexpr):
    """Select in one sample of any size, ``PIECE`` keys at a time."""
    s = tl.program_id(0)
    keys_ptr = scratch_ptr + s.to(tl.int64) * blocks
    prefix, need = _next_digit(keys_ptr, blocks, 0, keep, 23, 8, PIECE)
    prefix, need = _next_digit(keys_ptr, blocks, prefix, need, 15, 8, PIECE)
    prefix, need = _next_digit(keys_ptr, blocks, prefix, need, 7, 8, PIECE)
    prefix, need = _next_digit(keys_ptr, blocks, prefix, need, 0, 7, PIECE)
    cut = need * 0 - 1
    seen = need * 0
    for start in range(0, blocks, PIECE):
        n = start + tl.arange(0, PIECE)
        equal = (tl.load(keys_ptr + n, mask=n < blocks, other=-1) == prefix).to(tl.int32)
        last = (equal == 1) & (seen + tl.cumsum(equal, axis=0) == need)
        cut = tl.maximum(cut, tl.max(tl.where(last, n, -1), axis=0))
        seen += tl.sum(equal, axis=0)
    result_ptr = scratch_ptr + size
    tl.store(result_ptr + s, prefix)
    tl.store(result_ptr + samples + s, cut)
    if s == 0:
        tl.store(result_ptr + 2 * samples, 0)
