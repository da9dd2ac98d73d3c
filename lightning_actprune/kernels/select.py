"""Which blocks of a sample are kept: keys and an exact selection without sorting.

A block's key is its sum of squares as fp32, read as int32: for non-negative floats, integer order is float order. A
block with a NaN or Inf gets INT_MAX, a finite block whose sum overflows the largest finite float. Per sample, the
selection returns ``(threshold, cut)`` so that a block ``n`` is kept if and only if::

    key[n] > threshold  or  (key[n] == threshold and n <= cut)

which holds for exactly ``keep`` blocks, equal keys in order of ``n``. Every later kernel evaluates this test; no index
list is written. Threshold and cut are found two bits at a time from keys held in registers, or, for samples too large
for that, by four passes over digits of 8, 8, 8 and 7 bits with a histogram each and one pass over equal keys.

``scratch`` holds the keys of all ``size`` blocks, then thresholds and cuts of all samples, then a counter.
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
def select_kernel(scratch_ptr, samples, blocks, size, keep, BLOCKS: tl.constexpr):
    """Select in one sample, held as ``BLOCKS >= blocks`` keys in registers.

    Two bits a turn: the counts of three candidates travel in one 64-bit sum. Leading bits that all keys share need no
    turn, and as soon as exactly ``keep`` keys reach the threshold the rest of its bits does not matter: about 7 turns
    for a few thousand different keys instead of 31.
    """
    s = tl.program_id(0)
    n = tl.arange(0, BLOCKS)
    inside = n < blocks
    keys = tl.load(scratch_ptr + s.to(tl.int64) * blocks + n, mask=inside, other=-1)
    largest = tl.max(keys, axis=0)
    smallest = tl.min(tl.where(inside, keys, largest), axis=0)
    shift = s * 0 + 29
    while (shift > 1) & ((largest >> shift) == (smallest >> shift)):
        shift -= 2
    threshold = (largest >> (shift + 2)) << (shift + 2)
    reaching = s * 0 + blocks
    while (shift >= 1) & (reaching != keep):
        one = (keys >= (threshold | (1 << shift))).to(tl.int64)
        two = (keys >= (threshold | (2 << shift))).to(tl.int64)
        three = (keys >= (threshold | (3 << shift))).to(tl.int64)
        counts = tl.sum(one + (two << 20) + (three << 40), axis=0)
        of_one, of_two, of_three = (
            (counts & 0xFFFFF).to(tl.int32),
            ((counts >> 20) & 0xFFFFF).to(tl.int32),
            counts >> 40,
        )
        if of_three >= keep:
            threshold |= 3 << shift
            reaching = of_three.to(tl.int32)
        elif of_two >= keep:
            threshold |= 2 << shift
            reaching = of_two
        elif of_one >= keep:
            threshold |= 1 << shift
            reaching = of_one
        shift -= 2
    if reaching != keep:
        count = tl.sum((keys >= (threshold | 1)).to(tl.int32), axis=0)
        if count >= keep:
            threshold |= 1
            reaching = count
    cut = s * 0 + blocks
    if reaching != keep:  # more keys than wanted equal the threshold
        quota = keep - tl.sum((keys > threshold).to(tl.int32), axis=0)
        equal = (keys == threshold).to(tl.int32)
        last = (equal == 1) & (tl.cumsum(equal, axis=0) == quota)
        cut = tl.max(tl.where(last, n, -1), axis=0)
    tl.store(scratch_ptr + size + s, threshold)
    tl.store(scratch_ptr + size + samples + s, cut)
    if s == 0:
        tl.store(scratch_ptr + size + 2 * samples, 0)


@triton.jit
def select_rows_kernel(scratch_ptr, samples, blocks, size, keep, GROUP: tl.constexpr, BLOCKS: tl.constexpr):
    """Select in ``GROUP`` small samples at once, each held as one row of ``BLOCKS >= blocks`` keys, at most 512.

    Not used for one large sample: two-dimensional data with a single row is laid out badly.
    """
    s = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    n = tl.arange(0, BLOCKS)
    inside = (s < samples)[:, None] & (n < blocks)[None, :]
    keys = tl.load(scratch_ptr + s.to(tl.int64)[:, None] * blocks + n[None, :], mask=inside, other=-1)
    threshold = tl.zeros([GROUP], tl.int32)
    for step in range(15):
        shift = 29 - 2 * step
        one = (keys >= (threshold | (1 << shift))[:, None]).to(tl.int32)
        two = (keys >= (threshold | (2 << shift))[:, None]).to(tl.int32)
        three = (keys >= (threshold | (3 << shift))[:, None]).to(tl.int32)
        counts = tl.sum(one + (two << 10) + (three << 20), axis=1)
        digit = ((counts & 0x3FF) >= keep).to(tl.int32) + (((counts >> 10) & 0x3FF) >= keep).to(tl.int32)
        threshold |= (digit + ((counts >> 20) >= keep).to(tl.int32)) << shift
    last_bit = tl.sum((keys >= (threshold | 1)[:, None]).to(tl.int32), axis=1) >= keep
    threshold |= last_bit.to(tl.int32)
    quota = keep - tl.sum((keys > threshold[:, None]).to(tl.int32), axis=1)
    equal = (keys == threshold[:, None]).to(tl.int32)
    last = (equal == 1) & (tl.cumsum(equal, axis=1) == quota[:, None])
    cut = tl.max(tl.where(last, n[None, :], -1), axis=1)
    tl.store(scratch_ptr + size + s, threshold, mask=s < samples)
    tl.store(scratch_ptr + size + samples + s, cut, mask=s < samples)
    if tl.program_id(0) == 0:
        tl.store(scratch_ptr + size + 2 * samples, 0)


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
