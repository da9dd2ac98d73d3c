"""Find kept blocks and their places in the stored values, from bitmap and offsets.

A run is 128 blocks ("lanes"), so four words of the bitmap. Its kept blocks are stored one after the other from its
offset on. The place of a kept block is therefore that offset plus the number of kept blocks before it in the run
(``kept_places``).

Kernels that work on kept blocks alone ask the other way round: which block of a run is the p-th kept one? With ``c(w)``
the number of set bits in ``w``, seven halvings find the block of rank ``p`` (0, 1, ..) in registers::

    p <  c(lower half)    it is in the lower half, at rank p
    p >= c(lower half)    it is in the upper half, at rank p - c(lower half)

first among the words, whose counts all ranks share, then inside a word by halves of 16, 8, 4, 2 and 1 bits. Numbers are
unsigned: where ``p - c`` would be negative it is larger than ``p``, so the rank in the right half is always the smaller
of the two. The block is stored at the run's offset plus ``p``. So no list of kept blocks is written to memory, waited
for and read again: each thread finds its own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl

from lightning_actprune.codec.blocks import RUN_BLOCKS, WORD_BLOCKS, ceil_div
from lightning_actprune.kernels.formats import THREAD_VALUES

WORD = tl.constexpr(WORD_BLOCKS)
RUN = tl.constexpr(RUN_BLOCKS)


def stride_unit(*strides: int) -> int:
    """Return the largest power of two up to 16 that divides ``strides``: the unit in which kernels count them.

    An access is as wide as the compiler knows its address to be aligned. All that Triton knows about a number at run
    time is whether 16 divides it, so rows of 196 values were read two bytes at a time. Strides as compile-time
    constants would help too, but then a kernel would be compiled for every number of rows.
    """
    return math.gcd(16, *strides)


def run_tile(samples: int, blocks: int, block_size: int) -> tuple[tuple[int], tuple[int, int, int], dict[str, int]]:
    """Return grid, ``(B, BLOCK, LANES)`` and options of a kernel with one run of blocks per program."""
    block, lanes = min(64, triton.next_power_of_2(block_size)), min(RUN_BLOCKS, triton.next_power_of_2(max(blocks, 1)))
    programs = samples * ceil_div(blocks, RUN_BLOCKS) if lanes == RUN_BLOCKS else ceil_div(samples * lanes, RUN_BLOCKS)
    # At most 64 values a thread, which fit into registers. Longer blocks are copied piece by piece.
    return (programs,), (block_size, block, lanes), {"num_warps": 4}


class Turns(NamedTuple):
    """How programs share the kept blocks of a run.

    Args:
        tile: Blocks of a tile.
        warps: Warps of a program.
        parts: Programs per run, a power of two up to 128. Program ``q`` takes the tiles ``q``, ``q + parts``, ...
    """

    tile: int
    warps: int
    parts: int


def choose_turns(block: int, kept: float) -> Turns:
    """Return the turns for blocks of ``block`` values, of which a run keeps ``kept`` on average.

    One warp with 16 values a thread, and at most two tiles a program on average. Of 16 choices this was the fastest, or
    within 4 % of it, to pack and to unpack 4 and 8 bits at b = 32 and a sparsity of .6 (64 samples of 196 x 1536
    values, H200, ``benchmarks/tune.py formats``).
    """
    tile = min(RUN_BLOCKS, max(1, THREAD_VALUES * 32 // block))
    return Turns(tile, 1, min(RUN_BLOCKS // tile, triton.next_power_of_2(max(1, math.ceil(kept / (2 * tile))))))


@triton.jit
def run_of(program, runs, LANES: tl.constexpr):
    """Return the first sample and the run of program ``program``.

    Its lanes are one run of one sample. If samples have at most ``LANES < RUN`` blocks, they are several samples, which
    follow each other in the values too.
    """
    if LANES == RUN:
        return program // runs, program % runs
    return program * (RUN // LANES), program * 0


@triton.jit
def blocks_of_lanes(first, run, lane, LANES: tl.constexpr):
    """Return the samples and block numbers of lanes."""
    if LANES == RUN:
        return first + lane * 0, run * RUN + lane
    # Not `lane % LANES`: for the remainder of a remainder (a block's column in its row), Triton up to 3.6 assumes that
    # all values are multiples, and masks a group of up to 8 values by the first one alone.
    return first + lane // LANES, lane & (LANES - 1)


@triton.jit
def kept_places(bitmap_ptr, offsets_ptr, samples, blocks, words, runs, LANES: tl.constexpr):
    """Return, for one run of blocks, ``[RUN]``: samples, block numbers, which exist, which are kept, and their places.

    ``bitmap_ptr: [S, words]`` and ``offsets_ptr: [S, runs]``, int32.
    """
    lane = tl.arange(0, RUN)
    first, run = run_of(tl.program_id(0), runs, LANES)
    s, n = blocks_of_lanes(first, run, lane, LANES)
    exists = (s < samples) & (n < blocks)
    word = tl.load(bitmap_ptr + s.to(tl.int64) * words + n // WORD, mask=exists, other=0)
    kept = (word >> (n % WORD)) & 1
    place = tl.load(offsets_ptr + first.to(tl.int64) * runs + run) + tl.cumsum(kept, axis=0) - kept
    return s, n, exists, kept == 1, place


@triton.jit
def set_bits(word):
    """Return the number of set bits in each 32-bit word."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def kept_words(bitmap_ptr, first, run, samples, words, LANES: tl.constexpr):
    """Return the bits of a run's blocks, set for kept ones, as four uint32 scalars."""
    w0 = _kept_word(bitmap_ptr, first, run, 0, samples, words, LANES)
    w1 = _kept_word(bitmap_ptr, first, run, 1, samples, words, LANES)
    w2 = _kept_word(bitmap_ptr, first, run, 2, samples, words, LANES)
    w3 = _kept_word(bitmap_ptr, first, run, 3, samples, words, LANES)
    return w0, w1, w2, w3


@triton.jit
def _kept_word(bitmap_ptr, first, run, q: tl.constexpr, samples, words, LANES: tl.constexpr):
    """Return word ``q`` of a run: a word of the bitmap, or those of the several samples that it has room for."""
    if LANES == RUN:
        w = run * (RUN // WORD) + q
        word = tl.load(bitmap_ptr + first.to(tl.int64) * words + w, mask=w < words, other=0)
    else:
        EACH: tl.constexpr = WORD // LANES if LANES < WORD else 1
        j = tl.arange(0, EACH)
        s = first + q * WORD // LANES + j
        bits = tl.load(bitmap_ptr + s.to(tl.int64) * words + q * WORD % LANES // WORD, mask=s < samples, other=0)
        word = tl.sum(bits << j * LANES, axis=0)
    return word.to(tl.uint32, bitcast=True)


@triton.jit
def count_kept(w0, w1, w2, w3):
    """Return the number of kept blocks of a run, int32."""
    return (set_bits(w0) + set_bits(w1) + set_bits(w2) + set_bits(w3)).to(tl.int32)


@triton.jit
def lanes_of_ranks(p, w0, w1, w2, w3):
    """Return the lanes (int32) of the kept blocks of ranks ``p`` (int32); any lane if there is no such block."""
    p = p.to(tl.uint32)
    c0, c2 = set_bits(w0), set_bits(w2)
    half = c0 + set_bits(w1)
    upper, p = p >= half, tl.minimum(p, p - half)
    low, high, below = tl.where(upper, w2, w0), tl.where(upper, w3, w1), tl.where(upper, c2, c0)
    lane = tl.where(upper, 2 * WORD, 0) + tl.where(p >= below, WORD, 0)
    word, p = tl.where(p >= below, high, low), tl.minimum(p, p - below)
    # Set bits in each two, four and eight bits. The sum below has those of sixteen in its lowest bits.
    c2 = word - ((word >> 1) & 0x55555555)
    c4 = (c2 & 0x33333333) + ((c2 >> 2) & 0x33333333)
    c8 = (c4 + (c4 >> 4)) & 0x0F0F0F0F
    p, bit = _halve(p, 0, c8 + (c8 >> 8), 16)
    p, bit = _halve(p, bit, c8, 8)
    p, bit = _halve(p, bit, c4, 4)
    p, bit = _halve(p, bit, c2, 2)
    p, bit = _halve(p, bit, word, 1)
    return (lane + bit).to(tl.int32)


@triton.jit
def _halve(p, bit, counts, HALF: tl.constexpr):
    """Return ranks and first bits of the halves of ``HALF`` bits that hold the ranks ``p`` counted from ``bit``."""
    below = (counts >> bit) & (2 * HALF - 1)
    return tl.minimum(p, p - below), tl.where(p >= below, bit + HALF, bit)


@triton.jit
def is_kept(lane, w0, w1, w2, w3):
    """Return True for lanes that are kept."""
    word = tl.where(lane < 2 * WORD, tl.where(lane < WORD, w0, w1), tl.where(lane < 3 * WORD, w2, w3))
    return ((word >> (lane % WORD).to(tl.uint32)) & 1) == 1
