"""Pack: from a dense tensor to kept blocks, bitmap and offsets, with static shapes and no host synchronisation.

If no block is dropped, one launch (``QuantizeLaunch``) reads and writes once, and stores no positions: block ``n`` of
all samples, counted row by row, is at place ``n``. Otherwise there are three (``PackLaunch``):

1. ``block_keys_kernel`` reads ``x`` once and writes one int32 key per block (4 / (b * itemsize) of the bytes of ``x``).
2. ``select_*_kernel`` finds the threshold of each sample, and writes bitmap and offsets.
3. ``gather_kernel``, or ``quantize_kernel`` if values are quantized, writes the kept blocks of each run to their
   places.

Bytes moved: ``x`` twice (the second time only its kept blocks, and often from L2), the values once, the keys two or
three times.

Under autocast, the product needs a 16-bit copy of an fp32 input. The first pass over the input can write it on the way
(``CAST``). Keys are then those of the rounded values, as if the copy had been read, and all later launches read the
copy. That saves a launch and one read of the copy: 6 bytes a value instead of 8.

Keys
----
The key of a block is its sum of squares as fp32, read as int32: for non-negative floats, the order of integers is that
of the floats. A block whose sum is not finite gets the key of infinity, whether it holds a NaN, an Inf or values beyond
1e19: looking at every value to tell these apart took a tenth of the kernel's time. Random selections hash these keys to
others, bit for bit as in ``codec.blocks``; ``SELECT`` says which, 0 for unchanged keys.

Selection
---------
It is exact and does not sort. For each sample it finds ``(threshold, cut)`` so that block ``n`` is kept if and only
if::

    key[n] > threshold  or  (key[n] == threshold and n <= cut)

which holds for exactly ``keep`` blocks, equal keys in order of ``n``. Then it writes the sample's bitmap and offsets.
The threshold is found by counting. At least ``keep`` keys reach ``low`` and fewer reach ``high``; a candidate between
them replaces one of the two. Candidates are interpolated, except that every third one halves the interval, and the
first one is the smallest key plus one, since most ties are blocks of zeros. The search ends when exactly ``keep`` keys
reach ``low``: after about 10 turns for 10,000 different keys, and at most 90.

There are three kernels: one program per sample with its keys in registers; one program for several small samples; and
several programs for one large sample, which exchange their counts through zeroed ``control`` words.

Values
------
A copy waits for memory, but quantizing costs arithmetic, which no lane should spend on a dropped block: there a program
reads tiles of kept blocks alone, which it finds by their ranks (see ``places``).

Unbiased selection multiplies the blocks that it keeps. One more launch after the selection finds the largest key that
each sample drops. The kernel that copies or quantizes a block computes its factor from that key and from the block's
sum of squares. All of these are int32 words of one tensor, for ``S`` samples of ``N`` blocks: keys ``[S, N]``, sums of
squares ``[S, N]`` (as bits) and the largest dropped keys ``[S]``, zero before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.codec import blocks as codec_blocks
from lightning_actprune.codec.blocks import RUN_BLOCKS, SELECTIONS, WORD_BLOCKS, ceil_div, keeps_all
from lightning_actprune.kernels.formats import (
    PAIRED_BLOCK,
    encode_format,
    load_blocks,
    load_pairs,
    load_rows,
    mix,
    quantize_pairs,
    quantize_tile,
    tile_width,
    values_layout,
    whole_blocks,
)
from lightning_actprune.kernels.launch import Launch, multiprocessors
from lightning_actprune.kernels.places import (
    RUN,
    WORD,
    blocks_of_lanes,
    choose_turns,
    count_kept,
    kept_places,
    kept_words,
    lanes_of_ranks,
    run_of,
    run_tile,
    stride_unit,
)

INFINITY_KEY = tl.constexpr(0x7F800000)
NUMBER, HALF_RANGE = tl.constexpr(codec_blocks.NUMBER), tl.constexpr(codec_blocks.HALF_RANGE)
SWAP = tl.constexpr(SELECTIONS.index("swap"))
UNBIASED = tl.constexpr(SELECTIONS.index("unbiased"))
REGISTER_BLOCKS = 32768
"""Most blocks of a sample whose keys fit into registers: 64 a thread at 16 warps."""
MOST_PARTS = 256
"""Most programs that share a sample."""
MAX_PARTS = tl.constexpr(MOST_PARTS)
MOST_TURNS = 96
MAX_TURNS = tl.constexpr(MOST_TURNS)
CONTROL_WORDS = 2 * MOST_TURNS + 3 + 2 * MOST_PARTS
"""Control words per sample of ``select_shared_kernel``: count and arrivals of each turn, extremes, two per part."""
MAX_TILE = 4096
"""Most keys of a program: 32 a thread at 4 warps."""
ONE = tl.constexpr(0x3F800000)
FP16_MAX = tl.constexpr(65504.0)


@triton.jit
def block_keys(x):
    """Return the keys ``[...]`` of the fp32 blocks ``x [..., BLOCK]``."""
    squares = tl.sum(x * x, axis=len(x.shape) - 1)
    keys = squares.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # a NaN may have its sign bit set
    return tl.minimum(keys, INFINITY_KEY)


@triton.jit
def selection_keys(keys, n, SELECT: tl.constexpr):
    """Return the keys that select; ``n``: numbers of the blocks among those of all samples, modulo 2^32."""
    if SELECT == 0:
        return keys
    h = mix(keys.to(tl.uint32) + n.to(tl.uint32) * NUMBER) >> 8
    if SELECT == SWAP:
        # Unsigned, so that no sum overflows.
        moved = tl.maximum(keys.to(tl.uint32) + (h * 3 >> 1), HALF_RANGE + 1) - HALF_RANGE
        moved = tl.minimum(moved, INFINITY_KEY - 1).to(tl.int32)
        return tl.where((keys > 0) & (keys < INFINITY_KEY), moved, keys)
    u = (h + 1).to(tl.int32).to(tl.float32) * 2.0**-24
    priorities = tl.div_rn(keys.to(tl.float32, bitcast=True), u * u).to(tl.int32, bitcast=True)
    return tl.where(keys < INFINITY_KEY, tl.minimum(priorities, INFINITY_KEY - 1), keys)


@triton.jit
def block_keys_kernel(
    x_ptr, copy_ptr, keys_ptr, control_ptr, stride_sample, stride_row, total_rows, rows, control_size,
    length: tl.constexpr, columns: tl.constexpr, UNIT: tl.constexpr, CAST: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ZEROS: tl.constexpr, SELECT: tl.constexpr,
):  # fmt: skip
    """Write the keys of ``ROWS`` x ``COLS`` blocks; grid ``(S * T / ROWS, columns / COLS)``.

    ``x_ptr: [S, T, L]``; ``copy_ptr: [S, T, L]``, contiguous, gets the rounded values if ``CAST``;
    ``keys_ptr: [S * T, columns]``, int32, followed by the sums of squares ``[S * T, columns]`` and a zero for every
    sample ``[S]`` if the selection is unbiased; ``control_ptr: [control_size]``, of which a program zeroes ``ZEROS``
    words.
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    e = tl.arange(0, BLOCK)
    start = (r // rows).to(tl.int64) * stride_sample * UNIT + (r % rows).to(tl.int64) * stride_row * UNIT
    column = j[:, None] * B + e[None, :]
    inside = (r < total_rows)[:, None, None] & ((column < length) & (e < B)[None, :])[None, :, :]
    x = tl.load(x_ptr + start[:, None, None] + column[None, :, :], mask=inside, other=0.0)
    if CAST:
        x = x.to(copy_ptr.dtype.element_ty)
        copied = (r.to(tl.int64) * length)[:, None, None] + column[None, :, :]
        tl.store(copy_ptr + copied, x, mask=inside)
    x = x.to(tl.float32)
    mask = (r < total_rows)[:, None] & (j < columns)[None, :]
    n = r.to(tl.int64)[:, None] * columns + j[None, :]
    tl.store(keys_ptr + n, selection_keys(block_keys(x), n, SELECT), mask=mask)
    if SELECT == UNBIASED:
        keys = block_keys(x)
        size = tl.cast(total_rows, tl.int64) * columns
        tl.store(keys_ptr + size + n, keys, mask=mask)
        first = (r < total_rows) & (r % rows + tl.program_id(1) == 0)
        tl.store(keys_ptr + 2 * size + r // rows, tl.zeros([ROWS], tl.int32), mask=first)
    if ZEROS > 0:
        z = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * ZEROS + tl.arange(0, ZEROS)
        tl.store(control_ptr + z, tl.zeros([ZEROS], tl.int32), mask=z < control_size)


@triton.jit
def _candidate(low, high, above_low, above_high, keep, turn):
    """Return the key to try next, between ``low`` and ``high`` exclusively."""
    share = (above_low - keep).to(tl.float32) / (above_low - above_high).to(tl.float32)
    step = ((high - low).to(tl.float32) * share).to(tl.int32)
    step = tl.where(turn == 0, 1, tl.where(turn % 3 == 2, (high - low) // 2, step))
    return low + tl.minimum(tl.maximum(step, 1), high - low - 1)


@triton.jit
def store_places(kept, bitmap_ptr, offsets_ptr, first, words, runs, BLOCKS: tl.constexpr):
    """Write bitmap words and offsets of ``BLOCKS`` blocks, of which the first kept one has place ``first``."""
    w = tl.arange(0, BLOCKS // WORD)
    bits = tl.sum(tl.reshape(kept, [BLOCKS // WORD, WORD]) << tl.arange(0, WORD)[None, :], axis=1)
    tl.store(bitmap_ptr + w, bits, mask=w < words)
    c = tl.arange(0, BLOCKS // RUN)
    counts = tl.sum(tl.reshape(kept, [BLOCKS // RUN, RUN]), axis=1)
    tl.store(offsets_ptr + c, first + tl.cumsum(counts, axis=0) - counts, mask=c < runs)


@triton.jit
def threshold(keys, n, blocks, keep):
    """Return ``(threshold, cut)`` for the keys of all blocks ``n``. Keys from ``blocks`` on must be negative."""
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
    """Select in one sample per program, which holds ``BLOCKS >= blocks`` keys in registers.

    ``keys_ptr: [S, blocks]``, ``bitmap_ptr: [S, words]``, ``offsets_ptr: [S, runs]``, int32. ``PIECE`` blocks are
    written at a time. If these are not all, keys are read again: beside 64 keys, a thread has no registers for the
    places.
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
    """Select in ``GROUP`` small samples at once, each a row of ``BLOCKS >= blocks`` keys, at most 512.

    Pointers as in ``select_kernel``. A turn finds two bits of all thresholds: one sum carries the counts of three
    candidates. It is not used for one large sample, since Triton lays out two-dimensional data with a single row badly.
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
    """Wait until all ``parts`` programs of a sample are here; all must be on the GPU (a cooperative launch)."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel") + 1
    while arrived < parts:
        arrived = tl.atomic_add(counter_ptr, 0, sem="acq_rel")


@triton.jit
def _count(keys_ptr, start, stop, limit, PIECE: tl.constexpr):
    """Return the number of keys from ``start`` to ``stop`` that reach ``limit``."""
    reaching = tl.zeros([PIECE], tl.int32)
    for piece in range(start, stop, PIECE):
        n = piece + tl.arange(0, PIECE)
        reaching += (tl.load(keys_ptr + n, mask=n < stop, other=-1) >= limit).to(tl.int32)
    return tl.sum(reaching, axis=0)


@triton.jit
def select_shared_kernel(
    keys_ptr, bitmap_ptr, offsets_ptr, control_ptr, blocks, keep, words, runs, PIECE: tl.constexpr
):  # fmt: skip
    """Select in one sample of any size: grid ``(S, parts)``, each program has some runs, ``PIECE`` keys at a time.

    Pointers as in ``select_kernel``, and ``control_ptr: [S, CONTROL_WORDS]``, int32, zero before.
    """
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

    # The blocks that earlier programs keep, above the threshold and at it, give this program its quota and first place.
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


@triton.jit
def largest_dropped_kernel(
    keys_ptr, bitmap_ptr, samples, blocks, words, GROUP: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Find the largest dropped key among ``BLOCKS`` blocks of each of ``GROUP`` samples: a maximum, in any order.

    ``keys_ptr``: keys, sums of squares and largest dropped keys (see above); ``bitmap_ptr: [S, words]``.
    """
    parts = tl.cdiv(blocks, BLOCKS)
    s = tl.program_id(0) // parts * GROUP + tl.arange(0, GROUP)
    n = tl.program_id(0) % parts * BLOCKS + tl.arange(0, BLOCKS)
    inside = (s < samples)[:, None] & (n < blocks)[None, :]
    keys = tl.load(keys_ptr + s.to(tl.int64)[:, None] * blocks + n[None, :], mask=inside, other=0)
    word = tl.load(bitmap_ptr + s.to(tl.int64)[:, None] * words + (n // WORD)[None, :], mask=inside, other=-1)
    dropped = ((word >> (n % WORD)[None, :]) & 1) == 0
    largest = tl.max(tl.where(dropped, keys, 0), axis=1)
    target = keys_ptr + 2 * tl.cast(samples, tl.int64) * blocks + s
    tl.atomic_max(target, largest, mask=s < samples, sem="relaxed")


@triton.jit
def block_factors(keys_ptr, s, n, exist, samples, blocks):
    """Return the factors of the blocks ``n`` of samples ``s`` if they are kept."""
    size = tl.cast(samples, tl.int64) * blocks
    square = tl.load(keys_ptr + size + s.to(tl.int64) * blocks + n, mask=exist, other=0)
    largest = tl.load(keys_ptr + 2 * size + s, mask=exist, other=0)
    scaled = (square > 0) & (square < INFINITY_KEY)
    ratio = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.where(scaled, square, ONE).to(tl.float32, bitcast=True))
    return tl.where(scaled, tl.maximum(tl.sqrt_rn(ratio), 1.0), 1.0)


@triton.jit
def rescaled(x, factors):
    """Return blocks ``x [R, BLOCK]`` times ``factors [R]`` in their own type; a factor of 1 changes nothing."""
    # Not a product: a compiler could fuse that with a following difference, and would not round it.
    wide = tl.fma(x.to(tl.float32), factors[:, None], 0.0)
    if x.dtype == tl.float16:
        # Other types cannot overflow: values are below 2^64 (else the key is infinity), and factors at most 2^24.
        wide = tl.minimum(tl.maximum(wide, -FP16_MAX), FP16_MAX)
    return tl.where((factors > 1.0)[:, None], wide.to(x.dtype), x)


@triton.jit
def gather_kernel(
    x_ptr, bitmap_ptr, offsets_ptr, values_ptr, keys_ptr, stride_sample, stride_row, samples, blocks, words, runs,
    length: tl.constexpr, columns: tl.constexpr, UNIT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Copy the kept blocks of one run to their places, scaled if there are keys.

    ``x_ptr: [S, T, L]``, ``bitmap_ptr: [S, words]``, ``offsets_ptr: [S, runs]``, ``values_ptr: [nnz, B]``; ``keys_ptr``
    as in ``largest_dropped_kernel``, or None.
    """
    s, n, _, kept, place = kept_places(bitmap_ptr, offsets_ptr, samples, blocks, words, runs, LANES)
    start = s.to(tl.int64) * stride_sample * UNIT + (n // columns).to(tl.int64) * stride_row * UNIT
    if keys_ptr is not None:
        factors = block_factors(keys_ptr, s, n, kept, samples, blocks)
    for piece in range(0, B, BLOCK):
        e = piece + tl.arange(0, BLOCK)
        column = (n % columns)[:, None] * B + e[None, :]
        stored = kept[:, None] & (e < B)[None, :]
        x = tl.load(x_ptr + start[:, None] + column, mask=stored & (column < length), other=0.0)
        if keys_ptr is not None:
            x = rescaled(x, factors)
        tl.store(values_ptr + place.to(tl.int64)[:, None] * B + e[None, :], x, mask=stored)


@triton.jit
def quantize_kernel(
    x_ptr, bitmap_ptr, offsets_ptr, values_ptr, keys_ptr, stride_sample, stride_row, samples, blocks, words, runs, nnz,
    length: tl.constexpr, columns: tl.constexpr, UNIT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Quantize the kept blocks of one run to their places, ``TILE`` blocks at a time; ``PARTS`` programs share a run.

    Pointers as in ``gather_kernel``, but ``values_ptr`` are the bytes of ``nnz`` blocks.
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


@triton.jit
def quantize_all_kernel(
    x_ptr, copy_ptr, values_ptr, stride_sample, stride_row, rows, nnz, length: tl.constexpr, columns: tl.constexpr,
    UNIT: tl.constexpr, CAST: tl.constexpr, FLAT: tl.constexpr, PAIRS: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Quantize ``TILE`` of all ``nnz`` blocks.

    ``x_ptr: [S, T, L]``; ``copy_ptr: [S, T, L]``, contiguous, gets the rounded values, from which codes are made, if
    ``CAST``; ``values_ptr``: bytes of ``nnz`` blocks. ``FLAT``: rows of whole blocks follow each other in memory.
    ``PAIRS``: values are read two at a time (``load_pairs``).
    """
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exist = (place >= 0) & (place < nnz)  # of nearly 2^31 blocks, the last tile reaches beyond int32
    r, first = place // columns, (place % columns) * B
    if FLAT:
        rows_ptr, first = x_ptr + place.to(tl.int64) * B, place * 0
    else:
        rows_ptr = x_ptr + (r // rows).to(tl.int64) * stride_sample * UNIT + (r % rows).to(tl.int64) * stride_row * UNIT
    if PAIRS:
        pairs = load_pairs(rows_ptr + first, exist)
        quantize_pairs(pairs, values_ptr, nnz, place, exist, x_ptr.dtype.element_ty == tl.float16, FORMAT)
        return
    x = load_rows(rows_ptr, first, exist, length, B, BLOCK)
    if CAST:
        x = x.to(copy_ptr.dtype.element_ty)
        e = tl.arange(0, BLOCK)[None, :]
        column = first[:, None] + e
        inside = exist[:, None] & ((column < length) & (e < B))
        copies_ptr = copy_ptr + (place.to(tl.int64) * B if FLAT else r.to(tl.int64) * length)
        tl.store(copies_ptr[:, None] + column, x, mask=inside)
    quantize_tile(x, values_ptr, nnz, place, exist, B, BLOCK, FORMAT)


class PackLaunch:
    """Packs inputs of one shape and layout.

    Args:
        shape: ``(S, T, L)``.
        strides: Strides of samples and rows; the last stride is 1.
        block_size: Values per block.
        keep: Blocks kept per sample.
        device: Where the kernels run.
        casts: Whether a copy in another dtype is written and packed.
        bits: Bits of a stored value, 0 for unchanged values.
        selection: Which blocks are kept, see ``config.Keep``.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        strides: tuple[int, int],
        block_size: int,
        keep: int,
        device: torch.device,
        casts: bool = False,
        bits: int = 0,
        selection: str = "largest",
    ) -> None:
        samples, rows, length = shape
        columns = ceil_div(length, block_size)
        blocks = rows * columns
        words, runs = ceil_div(blocks, WORD_BLOCKS), ceil_div(blocks, RUN_BLOCKS)
        encoded = encode_format(bits, block_size)
        self.values, self.dtype = values_layout(samples * keep, block_size, encoded)
        self.bitmap, self.offsets = (samples, words), (samples, runs)
        unbiased = selection == "unbiased"
        self.keys = (2 * blocks + 1) * samples if unbiased else samples * blocks
        programs = _programs(samples, blocks, device)
        self.control = samples * CONTROL_WORDS if programs else 0
        select = SELECTIONS.index(selection)
        self._keys = _keys_launch(shape, strides, block_size, self.control, casts, select)
        self._select = _select_launch(samples, blocks, keep, programs)
        self._largest = _largest_dropped_launch(samples, blocks, words) if unbiased else None
        tile: tuple[int, ...]
        grid, tile, options = run_tile(samples, blocks, block_size)
        gathered = (rows * length, length) if casts else strides
        unit = stride_unit(*gathered)
        scalars = (gathered[0] // unit, gathered[1] // unit, samples, blocks, words, runs)
        # The keys come before the scalars. If there are none, None compiles to a kernel without them.
        keys = () if unbiased else (None,)
        layout = length, columns, unit
        if encoded:
            block, turns = tile_width(block_size), choose_turns(tile_width(block_size), RUN_BLOCKS * keep / blocks)
            tiles = block_size, block, turns.tile, turns.parts, tile[2], encoded
            grid, options = (grid[0] * turns.parts,), {"num_warps": turns.warps}
            self._gather = Launch(quantize_kernel, grid, *keys, *scalars, samples * keep, *layout, *tiles, **options)
        else:
            self._gather = Launch(gather_kernel, grid, *keys, *scalars, *layout, *tile, **options)

    def __call__(self, x: Tensor, copy: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(values, bitmap, offsets)``; ``copy``: memory for the contiguous copy of a launch that casts."""
        source = x if copy is None else copy
        keys = x.new_empty(self.keys, dtype=torch.int32)
        bitmap = x.new_empty(*self.bitmap, dtype=torch.int32)
        offsets = x.new_empty(*self.offsets, dtype=torch.int32)
        values = source.new_empty(*self.values, dtype=self.dtype)
        if self.control:
            control = x.new_empty(self.control, dtype=torch.int32)
            self._keys(x, source, keys, control)
            self._select(keys, bitmap, offsets, control)
        else:
            self._keys(x, source, keys, keys)
            self._select(keys, bitmap, offsets)
        if self._largest is None:
            self._gather(source, bitmap, offsets, values)
        else:
            self._largest(keys, bitmap)
            self._gather(source, bitmap, offsets, values, keys)
        return values, bitmap, offsets


def _keys_launch(
    shape: tuple[int, int, int], strides: tuple[int, int], block_size: int, control: int, casts: bool, select: int
) -> Launch:
    """Return the launch that writes the keys, and the copy if it casts, and zeroes ``control`` words."""
    samples, rows, length = shape
    columns, block = ceil_div(length, block_size), triton.next_power_of_2(block_size)
    # 4096 values a program, 32 a thread at 4 warps: whole rows first, so that a warp reads along memory.
    cols = max(1, min(triton.next_power_of_2(columns), 4096 // block))
    tile_rows = max(1, 4096 // (block * cols))
    grid = ceil_div(samples * rows, tile_rows), ceil_div(columns, cols)
    zeros = triton.next_power_of_2(ceil_div(control, grid[0] * grid[1])) if control else 0
    unit = stride_unit(*strides)
    scalars = (strides[0] // unit, strides[1] // unit, samples * rows, rows, control)
    tile = (length, columns, unit, casts, block_size, block, tile_rows, cols, zeros, select)
    return Launch(block_keys_kernel, grid, *scalars, *tile, num_warps=4)


def _programs(samples: int, blocks: int, device: torch.device) -> int:
    """Return the number of programs that share a sample, 0 if its keys fit into the registers of one.

    There is one for every 8192 keys, as long as all of them are on the GPU together: they wait for each other.
    """
    if blocks <= REGISTER_BLOCKS:
        return 0
    return max(1, min(ceil_div(blocks, 8192), MOST_PARTS, multiprocessors(device) // max(samples, 1)))


def _select_launch(samples: int, blocks: int, keep: int, programs: int) -> Launch:
    """Return the launch that selects blocks and writes bitmap and offsets."""
    padded = triton.next_power_of_2(blocks)
    scalars = (blocks, keep, ceil_div(blocks, WORD_BLOCKS), ceil_div(blocks, RUN_BLOCKS))
    if programs:
        cooperative = {"launch_cooperative_grid": True} if programs > 1 else {}
        return Launch(select_shared_kernel, (samples, programs), *scalars, 8192, num_warps=16, **cooperative)
    if padded <= 512:
        group = max(1, min(4096 // padded, triton.next_power_of_2(samples)))
        return Launch(select_rows_kernel, (ceil_div(samples, group),), *scalars, samples, group, padded, num_warps=4)
    # 8 warps were faster than 4, 16 and 32 for 2,352 to 9,408 blocks: the exchange between warps decides.
    warps, piece = (16, 8192) if padded == REGISTER_BLOCKS else (min(8, padded // 256), padded)
    return Launch(select_kernel, (samples,), *scalars, padded, piece, num_warps=warps)


def _largest_dropped_launch(samples: int, blocks: int, words: int) -> Launch:
    """Return the launch of ``largest_dropped_kernel``, which takes keys and bitmap."""
    tile = min(MAX_TILE, triton.next_power_of_2(blocks))
    group = max(1, min(MAX_TILE // tile, triton.next_power_of_2(samples)))
    grid = (ceil_div(samples, group) * ceil_div(blocks, tile),)
    return Launch(largest_dropped_kernel, grid, samples, blocks, words, group, tile, num_warps=4)


class QuantizeLaunch:
    """Quantizes all blocks of inputs of one shape and layout.

    Bitmap and offsets are one empty tensor, the same in all calls: nothing is ever written to it.

    Args:
        shape: ``(S, T, L)``.
        strides: Strides of samples and rows; the last stride is 1.
        block_size: Values per block.
        casts: Whether a copy in another dtype is written and stored.
        bits: Bits of a stored value.
        paired: Whether inputs are 16-bit values at a multiple of 16 bytes.

    Attributes:
        kernel: The launch, which takes the input, its copy, or the input again, and memory for the values.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        strides: tuple[int, int],
        block_size: int,
        casts: bool,
        bits: int,
        paired: bool,
    ) -> None:
        samples, rows, length = shape
        columns, encoded = ceil_div(length, block_size), encode_format(bits, block_size)
        blocks = samples * rows * columns
        self.values, self.dtype = values_layout(blocks, block_size, encoded)
        self._samples = samples
        self._positions: Tensor | None = None
        block, tile = whole_blocks(block_size)
        unit, whole = stride_unit(*strides), length % block_size == 0
        flat = whole and strides[1] == length and (samples == 1 or strides[0] == rows * length)
        pairs = paired and not casts and block_size == PAIRED_BLOCK.value and whole and unit >= 8
        tile *= 2 if pairs else 1  # a thread has twice as many values
        scalars = strides[0] // unit, strides[1] // unit, rows, blocks
        constants = length, columns, unit, casts, flat, pairs, block_size, block, tile, encoded
        self.kernel = Launch(quantize_all_kernel, (ceil_div(blocks, tile),), *scalars, *constants, num_warps=4)

    def __call__(self, x: Tensor, copy: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(values, bitmap, offsets)``; ``copy``: memory for the contiguous copy of a launch that casts."""
        values = x.new_empty(self.values, dtype=self.dtype)
        self.kernel(x, x if copy is None else copy, values)
        if self._positions is None:
            with torch.inference_mode(False):  # inference tensors cannot be saved for backward
                self._positions = x.new_empty(self._samples, 0, dtype=torch.int32)
        return values, self._positions, self._positions


def pack_launch(
    shape: tuple[int, int, int],
    strides: tuple[int, int, int],
    block_size: int,
    keep: int,
    device: torch.device,
    cast: torch.dtype | None = None,
    bits: int = 0,
    selection: str = "largest",
    paired: bool = False,
) -> PackLaunch | QuantizeLaunch:
    """Return the launches that pack inputs ``[S, T, L]`` with a last stride of 1, or their copies in dtype ``cast``.

    The compiled kernels that they keep also depend on the dtype of the input and on whether that starts at a multiple
    of 16 bytes. Memory for the copy is new, so it always does. ``paired``: inputs do, and are values of 16 bits.
    """
    if keeps_all(keep):
        return QuantizeLaunch(shape, strides[:2], block_size, cast is not None, bits, paired)
    if keep == shape[1] * ceil_div(shape[2], block_size):
        selection = "largest"  # all blocks are kept, unscaled
    return PackLaunch(shape, strides[:2], block_size, keep, device, cast is not None, bits, selection)
