"""Which blocks of a sample are kept: keys and an exact selection without sorting.

A block's key is its sum of squares as fp32, read as int32: for non-negative floats, integer order is float order. A
block with a NaN or Inf gets INT_MAX, a finite block whose sum overflows the largest finite float. Per sample, the
selection returns ``(threshold, cut)`` so that a block ``n`` is kept if and only if::

    key[n] > threshold  or  (key[n] == threshold and n <= cut)

which holds for exactly ``keep`` blocks, equal keys in order of ``n``. Every later kernel evaluates this test; no index
list is written.

``select_kernel`` holds ``GROUP`` samples in registers and finds the threshold bit by bit: 31 counts.
``select_streaming_kernel`` reads samples too large for registers in pieces: four passes over digits of 8, 8, 8 and 7
bits with a histogram each, then one pass that counts equal keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

INT_MAX = tl.constexpr(0x7FFFFFFF)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)

REGISTER_BLOCKS = 16384
"""Largest sample that ``select_kernel`` takes: 32 keys a thread at 16 warps; twice that spills (sm_90, Triton 3.6)."""


@triton.jit
def block_keys(x, axis: tl.constexpr):
    """Return the int32 keys of the fp32 blocks that lie along the last axis of ``x``."""
    squares = tl.minimum(tl.sum(x * x, axis=axis), FLOAT_MAX)
    broken = tl.max(((x != x) | (tl.abs(x) > FLOAT_MAX)).to(tl.int32), axis=axis)
    return tl.where(broken > 0, INT_MAX, squares.to(tl.int32, bitcast=True))


@triton.jit
def block_keys_kernel(
    x_ptr, keys_ptr, stride_sample, stride_row, total_rows, rows, length,
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
    tl.store(keys_ptr + r.to(tl.int64)[:, None] * NB + j[None, :], block_keys(x, 2), mask=mask)


@triton.jit
def select_kernel(
    keys_ptr, threshold_ptr, cut_ptr, samples, blocks, keep, GROUP: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Select in ``GROUP`` samples at once, each held as one row of ``BLOCKS >= blocks`` keys."""
    s = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    n = tl.arange(0, BLOCKS)
    inside = (s < samples)[:, None] & (n < blocks)[None, :]
    keys = tl.load(keys_ptr + s.to(tl.int64)[:, None] * blocks + n[None, :], mask=inside, other=-1)
    threshold = tl.zeros([GROUP], tl.int32)
    for step in range(31):
        candidate = threshold | (1 << (30 - step))
        count = tl.sum((keys >= candidate[:, None]).to(tl.int32), axis=1)
        threshold = tl.where(count >= keep, candidate, threshold)
    quota = keep - tl.sum((keys > threshold[:, None]).to(tl.int32), axis=1)
    equal = (keys == threshold[:, None]).to(tl.int32)
    last = (equal == 1) & (tl.cumsum(equal, axis=1) == quota[:, None])
    cut = tl.max(tl.where(last, n[None, :], -1), axis=1)
    tl.store(threshold_ptr + s, threshold, mask=s < samples)
    tl.store(cut_ptr + s, cut, mask=s < samples)


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
def select_streaming_kernel(keys_ptr, threshold_ptr, cut_ptr, blocks, keep, PIECE: tl.constexpr):
    """Select in one sample of any size, ``PIECE`` keys at a time."""
    s = tl.program_id(0)
    keys_ptr += s.to(tl.int64) * blocks
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
    tl.store(threshold_ptr + s, prefix)
    tl.store(cut_ptr + s, cut)
