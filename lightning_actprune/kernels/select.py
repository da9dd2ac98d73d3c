"""Which blocks of a sample are kept: an exact selection without sorting.

Per sample the selection finds ``(threshold, cut)`` so that a block ``n`` is kept if and only if::

    key[n] > threshold  or  (key[n] == threshold and n <= cut)

which holds for exactly ``keep`` blocks, equal keys in order of ``n``; then it marks them in the bitmap. The threshold
is found two bits a turn, by counting the keys that reach each of three candidates. Leading bits that all keys share
need no turn, and as soon as exactly ``keep`` keys reach the threshold the rest of its bits does not matter: about 7
turns for a few thousand different keys instead of 31.

Three kernels: one program per sample with its keys in registers; one program for several small samples; several
programs for one large sample, which exchange their counts through zeroed ``control`` words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_actprune.kernels.keys import INT_MAX
from lightning_actprune.kernels.mark import finish, mark_rows

REGISTER_BLOCKS = 16384
"""Largest sample whose keys are held in registers: 32 a thread at 16 warps; twice that spills (sm_90, Triton 3.6)."""
MAX_PARTS = tl.constexpr(256)
"""Most programs that share one sample."""
WORDS_PER_TURN = tl.constexpr(4)
TIE_WORD = tl.constexpr(18 * 4)
"""Control words of the turns of one sample: one for the extremes, 15 of two bits, one of a bit, one for the ties."""
CONTROL_WORDS = 18 * 4 + 256
"""Control words per sample of ``select_shared_kernel``."""


@triton.jit
def select_kernel(
    scratch_ptr, bitmap_ptr, offsets_ptr, size, keep, rows, columns, words, chunks,
    BLOCKS: tl.constexpr, COLS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Select in one sample, held as ``BLOCKS >= rows * columns`` keys in registers."""
    s = tl.program_id(0)
    blocks = s * 0 + rows * columns
    n = tl.arange(0, BLOCKS)
    inside = n < blocks
    keys = tl.load(scratch_ptr + s.to(tl.int64) * blocks + n, mask=inside, other=-1)
    largest = tl.max(keys, axis=0)
    smallest = tl.min(tl.where(inside, keys, largest), axis=0)
    shift = s * 0 + 29
    while (shift > 1) & ((largest >> shift) == (smallest >> shift)):
        shift -= 2
    threshold = (largest >> (shift + 2)) << (shift + 2)
    reaching = blocks
    while (shift >= 1) & (reaching != keep):  # the counts of three candidates travel in one 64-bit sum
        one = (keys >= (threshold | (1 << shift))).to(tl.int64)
        two = (keys >= (threshold | (2 << shift))).to(tl.int64)
        three = (keys >= (threshold | (3 << shift))).to(tl.int64)
        counts = tl.sum(one + (two << 20) + (three << 40), axis=0)
        of_one, of_two = (counts & 0xFFFFF).to(tl.int32), ((counts >> 20) & 0xFFFFF).to(tl.int32)
        threshold, reaching = _digit(threshold, reaching, shift, of_one, of_two, (counts >> 40).to(tl.int32), keep)
        shift -= 2
    if reaching != keep:
        count = tl.sum((keys >= (threshold | 1)).to(tl.int32), axis=0)
        if count >= keep:
            threshold |= 1
            reaching = count
    cut = blocks
    if reaching != keep:  # more keys than wanted equal the threshold
        quota = keep - tl.sum((keys > threshold).to(tl.int32), axis=0)
        equal = (keys == threshold).to(tl.int32)
        last = (equal == 1) & (tl.cumsum(equal, axis=0) == quota)
        cut = tl.max(tl.where(last, n, -1), axis=0)
    low = s * rows
    mark_rows(scratch_ptr, bitmap_ptr, offsets_ptr, threshold, cut, low, low + rows, rows, columns, words, chunks, COLS)
    finish(scratch_ptr + size, offsets_ptr, columns * chunks, tl.num_programs(0), PIECE)


@triton.jit
def _digit(threshold, reaching, shift, of_one, of_two, of_three, keep):
    """Return the threshold with its next two bits, and how many keys reach it."""
    if of_three >= keep:
        threshold |= 3 << shift
        reaching = of_three
    elif of_two >= keep:
        threshold |= 2 << shift
        reaching = of_two
    elif of_one >= keep:
        threshold |= 1 << shift
        reaching = of_one
    return threshold, reaching


@triton.jit
def select_rows_kernel(
    scratch_ptr, bitmap_ptr, offsets_ptr, size, keep, rows, columns, words, chunks, samples,
    GROUP: tl.constexpr, BLOCKS: tl.constexpr, COLS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Select in ``GROUP`` small samples at once, each a row of ``BLOCKS >= rows * columns`` keys, at most 512.

    Not used for one large sample: two-dimensional data with a single row is laid out badly.
    """
    s = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    blocks = rows * columns
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
    threshold_ptr = scratch_ptr + size + 1
    cut_ptr = threshold_ptr + samples
    tl.store(threshold_ptr + s, threshold, mask=s < samples)
    tl.store(cut_ptr + s, cut, mask=s < samples)
    tl.debug_barrier()  # mark_rows reads them by row
    low = tl.program_id(0) * GROUP * rows
    high = tl.minimum(low + GROUP * rows, samples * rows)
    mark_rows(
        scratch_ptr, bitmap_ptr, offsets_ptr, threshold_ptr, cut_ptr, low, high, rows, columns, words, chunks, COLS
    )
    finish(scratch_ptr + size, offsets_ptr, columns * chunks, tl.num_programs(0), PIECE)


@triton.jit
def _meet(counter_ptr, parts):
    """Wait until all ``parts`` programs of a sample are here; they must all be on the GPU (a cooperative launch)."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel") + 1
    while arrived < parts:
        arrived = tl.atomic_add(counter_ptr, 0, sem="acq_rel")


@triton.jit
def select_shared_kernel(
    scratch_ptr, bitmap_ptr, offsets_ptr, size, keep, rows, columns, words, chunks,
    COLS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Select in one sample of any size: each program of the grid's second axis has some rows, ``PIECE`` keys a time."""
    s, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    control_ptr = scratch_ptr + size + 1 + s * (TIE_WORD + MAX_PARTS)
    share = tl.cdiv(rows, parts)
    first_row = tl.minimum(part * share, rows)
    last_row = tl.minimum(first_row + share, rows)
    keys_ptr = scratch_ptr + s.to(tl.int64) * rows * columns
    low, high = first_row * columns, last_row * columns

    largest = s * 0
    smallest = largest + INT_MAX
    for start in range(low, high, PIECE):
        n = start + tl.arange(0, PIECE)
        keys = tl.load(keys_ptr + n, mask=n < high, other=-1)
        largest = tl.maximum(largest, tl.max(keys, axis=0))
        smallest = tl.minimum(smallest, tl.min(tl.where(n < high, keys, INT_MAX), axis=0))
    tl.atomic_max(control_ptr, largest)
    tl.atomic_max(control_ptr + 1, INT_MAX - smallest)  # the control words start at zero
    _meet(control_ptr + 3, parts)
    largest = tl.atomic_add(control_ptr, 0)
    smallest = INT_MAX - tl.atomic_add(control_ptr + 1, 0)

    shift = s * 0 + 29
    while (shift >= 1) & ((largest >> shift) == (smallest >> shift)):
        shift -= 2
    threshold = (largest >> (shift + 2)) << (shift + 2)
    blocks = s * 0 + rows * columns
    reaching = blocks
    turn_ptr = control_ptr + WORDS_PER_TURN
    while (shift >= -1) & (reaching != keep):
        bits = tl.maximum(shift, 0)
        of_one, of_two, of_three = s * 0, s * 0, s * 0
        for start in range(low, high, PIECE):
            n = start + tl.arange(0, PIECE)
            keys = tl.load(keys_ptr + n, mask=n < high, other=-1)
            of_one += tl.sum((keys >= (threshold | (1 << bits))).to(tl.int32), axis=0)
            of_two += tl.sum((keys >= (threshold | (2 << bits))).to(tl.int32), axis=0)
            of_three += tl.sum((keys >= (threshold | (3 << bits))).to(tl.int32), axis=0)
        tl.atomic_add(turn_ptr, of_one)
        tl.atomic_add(turn_ptr + 1, of_two)
        tl.atomic_add(turn_ptr + 2, of_three)
        _meet(turn_ptr + 3, parts)
        of_one, of_two = tl.atomic_add(turn_ptr, 0), tl.atomic_add(turn_ptr + 1, 0)
        of_three = tl.atomic_add(turn_ptr + 2, 0)
        if shift < 0:  # one bit was left
            of_two, of_three = s * 0, s * 0
        threshold, reaching = _digit(threshold, reaching, bits, of_one, of_two, of_three, keep)
        shift -= 2
        turn_ptr += WORDS_PER_TURN

    cut = blocks
    if reaching != keep:  # more keys than wanted equal the threshold: those of earlier parts come first
        equals = s * 0
        for start in range(low, high, PIECE):
            n = start + tl.arange(0, PIECE)
            keys = tl.load(keys_ptr + n, mask=n < high, other=-1)
            equals += tl.sum((keys == threshold).to(tl.int32), axis=0)
        tl.atomic_add(control_ptr + TIE_WORD + part, equals)
        _meet(control_ptr + TIE_WORD - 1, parts)
        p = tl.arange(0, MAX_PARTS)
        found = tl.load(control_ptr + TIE_WORD + p, cache_modifier=".cg")
        quota = keep - reaching + tl.sum(found, axis=0) - tl.sum(tl.where(p < part, found, 0), axis=0)
        cut = s * 0 - 1
        if quota >= equals:
            cut = blocks
        elif quota > 0:
            seen = s * 0
            for start in range(low, high, PIECE):
                n = start + tl.arange(0, PIECE)
                equal = (tl.load(keys_ptr + n, mask=n < high, other=-1) == threshold).to(tl.int32)
                last = (equal == 1) & (seen + tl.cumsum(equal, axis=0) == quota)
                cut = tl.maximum(cut, tl.max(tl.where(last, n, -1), axis=0))
                seen += tl.sum(equal, axis=0)
    mark_rows(
        scratch_ptr, bitmap_ptr, offsets_ptr, threshold, cut, s * rows + first_row, s * rows + last_row, rows,
        columns, words, chunks, COLS,
    )  # fmt: skip
    finish(scratch_ptr + size, offsets_ptr, columns * chunks, tl.num_programs(0) * parts, PIECE)
