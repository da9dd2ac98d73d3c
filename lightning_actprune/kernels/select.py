"""Which blocks of a sample are kept: an exact selection without sorting, and where each is stored.

Per sample the selection finds ``(threshold, cut)`` so that a block ``n`` is kept if and only if::

    key[n] > threshold  or  (key[n] == threshold and n <= cut)

which holds for exactly ``keep`` blocks, equal keys in order of ``n``; then it writes the sample's bitmap and offsets.
The threshold is found by counting: with ``low`` reached by ``keep`` keys or more and ``high`` by fewer, a candidate
between them replaces one of the two. Candidates are interpolated, every third one halves the interval, and the first is
the smallest key but one, since most ties are blocks of zeros. It ends as soon as exactly ``keep`` keys reach ``low``:
after about 10 turns for 10,000 different keys, and at most 90 in all.

Three kernels: one program per sample with its keys in registers; one program for several small samples; several
programs for one large sample, which exchange their counts through zeroed ``control`` words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_actprune.ops.geometry import RUN_BLOCKS, WORD_BLOCKS

WORD = tl.constexpr(WORD_BLOCKS)
RUN = tl.constexpr(RUN_BLOCKS)
REGISTER_BLOCKS = 32768
"""Largest sample whose keys are held in registers: 64 a thread at 16 warps."""
MOST_PARTS = 256
"""Most programs that share one sample."""
MAX_PARTS = tl.constexpr(MOST_PARTS)
MOST_TURNS = 96
MAX_TURNS = tl.constexpr(MOST_TURNS)
CONTROL_WORDS = 2 * MOST_TURNS + 3 + 2 * MOST_PARTS
"""Control words per sample of ``select_shared_kernel``: count and arrivals of each turn, extremes, two per part."""


@triton.jit
def _candidate(low, high, above_low, above_high, keep, turn):
    """Return the key to try next, between ``low`` and ``high`` exclusively."""
    share = (above_low - keep).to(tl.float32) / (above_low - above_high).to(tl.float32)
    step = ((high - low).to(tl.float32) * share).to(tl.int32)
    step = tl.where(turn == 0, 1, tl.where(turn % 3 == 2, (high - low) // 2, step))
    return low + tl.minimum(tl.maximum(step, 1), high - low - 1)


@triton.jit
def store_places(kept, bitmap_ptr, offsets_ptr, first, words, runs, BLOCKS: tl.constexpr):
    """Write the words and offsets of ``BLOCKS`` blocks, of which the first is stored at ``first``."""
    w = tl.arange(0, BLOCKS // WORD)
    bits = tl.sum(tl.reshape(kept, [BLOCKS // WORD, WORD]) << tl.arange(0, WORD)[None, :], axis=1)
    tl.store(bitmap_ptr + w, bits, mask=w < words)
    c = tl.arange(0, BLOCKS // RUN)
    counts = tl.sum(tl.reshape(kept, [BLOCKS // RUN, RUN]), axis=1)
    tl.store(offsets_ptr + c, first + tl.cumsum(counts, axis=0) - counts, mask=c < runs)


@triton.jit
def list_kept(kept, n, list_ptr, BLOCKS: tl.constexpr):
    """Write which of the ``BLOCKS`` blocks ``n`` are kept to a list."""
    by_word = tl.reshape(kept, [BLOCKS // WORD, WORD])
    counts = tl.sum(by_word, axis=1)
    # Two sums, within words and over them: one over all blocks is long and goes through all warps.
    place = (tl.cumsum(counts, axis=0) - counts)[:, None] + tl.cumsum(by_word, axis=1) - by_word
    # As a matrix the places would be turned to columns before they are stored.
    tl.store(list_ptr + tl.reshape(place, [BLOCKS]), n, mask=kept == 1)


@triton.jit
def threshold(keys, n, blocks, keep):
    """Return ``(threshold, cut)`` for the keys of all blocks ``n``; those from ``blocks`` on have a negative one."""
    high = tl.max(keys, axis=0) + 1
    low = tl.min(tl.where(n < blocks, keys, high), axis=0)
    above_low = keep * 0 + blocks
    above_high = keep * 0
    turn = keep * 0
    while (above_low != keep) & (high - low > 1):
        middle = _candidate(low, high, above_low, above_high, keep, turn)
        count = tl.sum((keys >= middle).to(tl.int32), axis=0)
        if count >= keep:
            low = middle
            above_low = count
        else:
            high = middle
            above_high = count
        turn += 1
    cut = keep * 0 + blocks
    if above_low != keep:  # more keys than wanted equal the threshold
        quota = keep - tl.sum((keys > low).to(tl.int32), axis=0)
        equal = (keys == low).to(tl.int32)
        last = (equal == 1) & (tl.cumsum(equal, axis=0) == quota)
        cut = tl.max(tl.where(last, n, -1), axis=0)
    return low, cut


@triton.jit
def select_kernel(
    keys_ptr, bitmap_ptr, offsets_ptr, blocks, keep, words, runs, BLOCKS: tl.constexpr, PIECE: tl.constexpr
):  # fmt: skip
    """Select in one sample, held as ``BLOCKS >= blocks`` keys in registers, and write ``PIECE`` blocks at a time.

    If not all at once, keys are read again: beside 64 of them a thread has no room for the places.
    """
    s = tl.program_id(0)
    keys_ptr += s.to(tl.int64) * blocks
    bitmap_ptr += s.to(tl.int64) * words
    offsets_ptr += s.to(tl.int64) * runs
    n = tl.arange(0, BLOCKS)
    keys = tl.load(keys_ptr + n, mask=n < blocks, other=-1)
    low, cut = threshold(keys, n, blocks, keep)
    if PIECE == BLOCKS:
        kept = ((keys > low) | ((keys == low) & (n <= cut))).to(tl.int32)
        store_places(kept, bitmap_ptr, offsets_ptr, s * keep, words, runs, BLOCKS)
    else:
        first = s * keep
        for piece in range(0, blocks, PIECE):
            m = piece + tl.arange(0, PIECE)
            again = tl.load(keys_ptr + m, mask=m < blocks, other=-1)
            kept = ((again > low) | ((again == low) & (m <= cut))).to(tl.int32)
            w, c = piece // WORD, piece // RUN
            store_places(kept, bitmap_ptr + w, offsets_ptr + c, first, words - w, runs - c, PIECE)
            first += tl.sum(kept, axis=0)


@triton.jit
def select_rows_kernel(
    keys_ptr, bitmap_ptr, offsets_ptr, blocks, keep, words, runs, samples, GROUP: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Select in ``GROUP`` small samples at once, each a row of ``BLOCKS >= blocks`` keys, 512 at most.

    Two bits of all thresholds a turn: the counts of three candidates travel in one sum. Not used for one large sample:
    two-dimensional data with a single row is laid out badly.
    """
    s = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    n = tl.arange(0, BLOCKS)
    inside = (s < samples)[:, None] & (n < blocks)[None, :]
    keys = tl.load(keys_ptr + s.to(tl.int64)[:, None] * blocks + n[None, :], mask=inside, other=-1)
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
    threshold = (threshold | last_bit.to(tl.int32))[:, None]
    quota = keep - tl.sum((keys > threshold).to(tl.int32), axis=1)
    equal = (keys == threshold).to(tl.int32)
    kept = ((keys > threshold) | ((equal == 1) & (tl.cumsum(equal, axis=1) <= quota[:, None]))).to(tl.int32)

    BITS: tl.constexpr = BLOCKS if BLOCKS < WORD else WORD
    w = tl.arange(0, BLOCKS // BITS)
    bits = tl.sum(tl.reshape(kept, [GROUP, BLOCKS // BITS, BITS]) << tl.arange(0, BITS)[None, None, :], axis=2)
    target = bitmap_ptr + s.to(tl.int64)[:, None] * words + w[None, :]
    tl.store(target, bits, mask=(s < samples)[:, None] & (w < words)[None, :])
    PART: tl.constexpr = BLOCKS if BLOCKS < RUN else RUN
    c = tl.arange(0, BLOCKS // PART)
    counts = tl.sum(tl.reshape(kept, [GROUP, BLOCKS // PART, PART]), axis=2)
    first = (s * keep)[:, None] + tl.cumsum(counts, axis=1) - counts
    target = offsets_ptr + s.to(tl.int64)[:, None] * runs + c[None, :]
    tl.store(target, first, mask=(s < samples)[:, None] & (c < runs)[None, :])


@triton.jit
def _meet(counter_ptr, parts):
    """Wait until all ``parts`` programs of a sample are here; they must all be on the GPU (a cooperative launch)."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel") + 1
    while arrived < parts:
        arrived = tl.atomic_add(counter_ptr, 0, sem="acq_rel")


@triton.jit
def _count(keys_ptr, start, stop, limit, PIECE: tl.constexpr):
    """Return how many keys from ``start`` to ``stop`` reach ``limit``."""
    reaching = tl.zeros([PIECE], tl.int32)
    for piece in range(start, stop, PIECE):
        n = piece + tl.arange(0, PIECE)
        reaching += (tl.load(keys_ptr + n, mask=n < stop, other=-1) >= limit).to(tl.int32)
    return tl.sum(reaching, axis=0)


@triton.jit
def select_shared_kernel(
    keys_ptr, bitmap_ptr, offsets_ptr, control_ptr, blocks, keep, words, runs, PIECE: tl.constexpr
):  # fmt: skip
    """Select in one sample of any size: each program of the second axis has some runs, ``PIECE`` keys at a time."""
    s, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    keys_ptr += s.to(tl.int64) * blocks
    control_ptr += s * (2 * MAX_TURNS + 3 + 2 * MAX_PARTS)
    share = tl.cdiv(tl.cdiv(blocks, parts), RUN) * RUN
    start = tl.minimum(part * share, blocks)
    stop = tl.minimum(start + share, blocks)

    largest = tl.zeros([PIECE], tl.int32)
    smallest = largest + 0x7FFFFFFF
    for piece in range(start, stop, PIECE):
        n = piece + tl.arange(0, PIECE)
        largest = tl.maximum(largest, tl.load(keys_ptr + n, mask=n < stop, other=0))
        smallest = tl.minimum(smallest, tl.load(keys_ptr + n, mask=n < stop, other=0x7FFFFFFF))
    high = tl.max(largest, axis=0) + 1
    low = tl.min(smallest, axis=0)
    if parts > 1:
        tl.atomic_max(control_ptr, high)
        tl.atomic_max(control_ptr + 1, 0x7FFFFFFF - low)  # a maximum too, since the control words start at zero
        _meet(control_ptr + 2, parts)
        high = tl.atomic_add(control_ptr, 0)
        low = 0x7FFFFFFF - tl.atomic_add(control_ptr + 1, 0)

    turn_ptr = control_ptr + 3
    above_low = s * 0 + blocks
    above_high = s * 0
    turn = s * 0
    while (above_low != keep) & (high - low > 1):
        middle = _candidate(low, high, above_low, above_high, keep, turn)
        count = _count(keys_ptr, start, stop, middle, PIECE)
        if parts > 1:
            tl.atomic_add(turn_ptr, count)
            _meet(turn_ptr + 1, parts)
            count = tl.atomic_add(turn_ptr, 0)
        if count >= keep:
            low = middle
            above_low = count
        else:
            high = middle
            above_high = count
        turn += 1
        turn_ptr += 2

    # How many blocks earlier programs keep, above the threshold and at it, gives this one its quota and first place.
    greater = _count(keys_ptr, start, stop, low + 1, PIECE)
    equals = _count(keys_ptr, start, stop, low, PIECE) - greater
    part_ptr = control_ptr + 3 + 2 * MAX_TURNS
    tl.atomic_add(part_ptr + part, greater)
    tl.atomic_add(part_ptr + MAX_PARTS + part, equals)
    _meet(control_ptr + 3 + 2 * MAX_TURNS - 1, parts)
    p = tl.arange(0, MAX_PARTS)
    all_greater = tl.load(part_ptr + p, cache_modifier=".cg")
    all_equals = tl.load(part_ptr + MAX_PARTS + p, cache_modifier=".cg")
    quota = keep - tl.sum(all_greater, axis=0)
    before = tl.sum(tl.where(p < part, all_equals, 0), axis=0)
    first = s * keep + tl.sum(tl.where(p < part, all_greater, 0), axis=0) + tl.minimum(before, quota)
    quota -= tl.minimum(before, quota)

    bitmap_ptr += s.to(tl.int64) * words
    offsets_ptr += s.to(tl.int64) * runs
    for piece in range(start, stop, PIECE):
        n = piece + tl.arange(0, PIECE)
        keys = tl.load(keys_ptr + n, mask=n < stop, other=-1)
        equal = (keys == low).to(tl.int32)
        kept = ((keys > low) | ((equal == 1) & (tl.cumsum(equal, axis=0) <= quota))).to(tl.int32)
        w, c = piece // WORD, piece // RUN
        last_word, last_run = tl.cdiv(stop, WORD) - w, tl.cdiv(stop, RUN) - c
        store_places(kept, bitmap_ptr + w, offsets_ptr + c, first, last_word, last_run, PIECE)
        quota -= tl.minimum(tl.sum(equal, axis=0), quota)
        first += tl.sum(kept, axis=0)
