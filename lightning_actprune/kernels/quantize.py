"""Blocks to rows of bytes: maths and storage of ``ops.formats``, bit for bit; ``FORMAT`` as in ``kernels.formats``.

Arithmetic is what this costs, so that its instructions are counted. Dither and code are never converted: ``u + 2^v`` is
put together from the hash, an exclusive or a value, and the code is v bits of the sum. That is added by a fused
multiply-add, whose product is exact, to a product that is rounded before: what a compiler fuses besides can change no
code. fp8 is encoded by integers, so that it needs no hardware for it. A plane of codes is joined to bytes in registers:
neighbouring values of a block are in one thread.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from lightning_actprune.kernels.launch import INTERPRETED
from lightning_actprune.ops import formats

PLACE, GOLDEN = tl.constexpr(formats.PLACE), tl.constexpr(formats.GOLDEN)
MIX_A, MIX_FIRST, MIX_B, MIX_SECOND = (tl.constexpr(constant) for constant in formats.MIX)
DITHER_STEP = tl.constexpr(1 << (23 - formats.DITHER_BITS))
"""Least difference of two dithers, in the last places of their sum with a code."""
FP8_MAX = tl.constexpr(formats.FP8_MAX)
MOST_SPREAD = tl.constexpr(formats.MOST_SPREAD)
INVERSES = tl.constexpr(tuple(formats.inverse_of(2.0**bits - 1) for bits in range(1, 9)))
"""Of the most that a code of 1 to 8 bits can be."""
FP8_INVERSE = tl.constexpr(formats.inverse_of(formats.FP8_MAX))
SLOW_REDUCTIONS = tl.constexpr(INTERPRETED)
"""The interpreter knows a few reductions, and takes a hundred times as long for any other."""
LEAST_SCALE = tl.constexpr(struct.unpack("i", struct.pack("f", formats.LEAST_SCALE))[0])
"""As bits."""
INFINITY, NAN = tl.constexpr(0x7F800000), tl.constexpr(0x7FC00000)


@triton.jit
def load_blocks(
    x_ptr, n, exist, stride_row, length: tl.constexpr, columns: tl.constexpr, UNIT: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the values ``[R, BLOCK]`` of the blocks ``n`` of samples at ``x_ptr``, which is one pointer or ``[R]``.

    A thread gets eight neighbours, since all that is done per block is done by each of its threads: of fp32, which it
    reads four at a time, in two parts. What there is where a block does not ``exist`` is not defined; behind the end
    of a row or a block there are zeros.
    """
    x_ptr += (n // columns).to(tl.int64) * stride_row * UNIT
    first = (n % columns) * B
    if x_ptr.dtype.element_ty.primitive_bitwidth == 32:
        # Eights come first, so that neighbours among the threads get neighbouring ones.
        e = (tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 4)[None, :])[:, None, :]
        column = first[None, :, None] + e
        pointers, there = x_ptr[None, :, None] + column, exist[None, :, None]
        if length % B == 0 and B == BLOCK:
            low, high = tl.load(pointers, mask=there), tl.load(pointers + 4, mask=there)
        else:
            low = tl.load(pointers, mask=there & ((column < length) & (e < B)), other=0.0)
            high = tl.load(pointers + 4, mask=there & ((column + 4 < length) & (e + 4 < B)), other=0.0)
        return tl.reshape(tl.permute(tl.join(low, high), (1, 0, 3, 2)), [n.shape[0], BLOCK])
    e = tl.arange(0, BLOCK)[None, :]
    column = first[:, None] + e
    if length % B == 0 and B == BLOCK:
        return tl.load(x_ptr[:, None] + column, mask=exist[:, None])
    return tl.load(x_ptr[:, None] + column, mask=exist[:, None] & ((column < length) & (e < B)), other=0.0)


@triton.jit
def quantize_tile(
    x, values_ptr, place, stored, B: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """Write the blocks ``x [R, BLOCK]`` to the rows ``place`` (int32) where ``stored``.

    Values from ``B`` on must be zero.
    """
    HEADER: tl.constexpr = (FORMAT >> 8) & 255
    LOW: tl.constexpr = (FORMAT >> 4) & 15
    HIGH: tl.constexpr = FORMAT & 15
    LOW_BYTES: tl.constexpr = (B * LOW + 7) // 8
    USED: tl.constexpr = HEADER + LOW_BYTES + (B * HIGH + 7) // 8
    row = values_ptr + place.to(tl.int64) * (FORMAT >> 24)
    if HEADER == 2:
        codes, header, finite = _fp8_codes(x.to(tl.float32))
    else:
        codes, header, finite = _integer_codes(x.to(tl.float32), place, B, BLOCK, LOW + HIGH)
    _store_header(row, header, stored, FORMAT)
    if HIGH > 0:
        _store_plane(row + HEADER, codes & ((1 << LOW) - 1), finite, stored, B, BLOCK, LOW, FORMAT)
        _store_plane(row + HEADER + LOW_BYTES, codes >> LOW, finite, stored, B, BLOCK, HIGH, FORMAT)
    else:
        _store_plane(row + HEADER, codes, finite, stored, B, BLOCK, LOW, FORMAT)
    if USED % 2 == 1:
        tl.store(row + USED, tl.zeros_like(place).to(tl.uint8), mask=stored)


@triton.jit
def _integer_codes(x, place, B: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Return codes ``[R, BLOCK]``, headers, and which blocks are finite."""
    e = tl.arange(0, BLOCK)
    inside = (e < B)[None, :]
    # Adding zero turns a negative zero, of which it is open whether it is less than zero, into a positive one.
    low = tl.min(x if B == BLOCK else tl.where(inside, x, float("inf")), axis=1) + 0.0
    high = _largest(x if B == BLOCK else tl.where(inside, x, -float("inf"))) + 0.0
    offset = low.to(tl.int32, bitcast=True)
    offset = tl.where(low < 0.0, offset + 0xFFFF, offset) & -0x10000
    base = offset.to(tl.float32, bitcast=True)
    spread = high - base
    finite = spread < MOST_SPREAD
    scale, inverse = _scale(spread, INVERSES[BITS - 1])
    dither = _dither(offset | (scale >> 16), place, e, BITS)
    # The dither is 2^8 times what it is to be, and the product with a power of two exact.
    total = tl.fma(dither, 2.0**-8, (x - base[:, None]) * inverse[:, None]).to(tl.int32, bitcast=True)
    codes = (total >> (23 - BITS)) & ((1 << BITS) - 1)
    header = tl.where(finite, offset | (scale >> 16), NAN >> 16)
    return codes if B == BLOCK else tl.where(inside, codes, 0), header, finite


@triton.jit
def _dither(header, place, e, BITS: tl.constexpr):
    """Return ``2^8 (u + 2^BITS)`` as fp32 ``[R, BLOCK]``: sign and exponent, a hash, a half, and zeros."""
    h = header.to(tl.uint32, bitcast=True) + place.to(tl.uint32) * PLACE
    h = (h ^ (h >> MIX_A)) * MIX_FIRST
    h = (h ^ (h >> MIX_B)) * MIX_SECOND
    SHIFT: tl.constexpr = 9 + BITS
    FRACTION: tl.constexpr = (1 << (23 - BITS)) - DITHER_STEP
    h = ((h >> SHIFT) & FRACTION) | (((127 + 8 + BITS) << 23) + DITHER_STEP // 2)
    steps = ((e.to(tl.uint32) * GOLDEN) >> SHIFT) & FRACTION
    return (h[:, None] ^ steps[None, :]).to(tl.float32, bitcast=True)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(x):
    """Return the largest value of each row, NaN if one of them is."""
    if SLOW_REDUCTIONS:
        return tl.max(x, axis=1) + tl.sum(tl.where(x != x, x, 0.0), axis=1)
    return tl.reduce(x, 1, _larger)


@triton.jit
def _scale(spread, INVERSE: tl.constexpr):
    """Return the bits of ``spread * INVERSE`` rounded up to bf16, and the inverse of that scale."""
    bits = ((spread * INVERSE).to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    bits = tl.maximum(bits, LEAST_SCALE)
    scale = bits.to(tl.float32, bitcast=True)
    # Of positive normal numbers this is an inverse within six units in the last place: 8 instructions less than 1 / x.
    root = tl.rsqrt(scale)
    rounded = (((root * root).to(tl.int32, bitcast=True) + 0x100) & -0x200).to(tl.float32, bitcast=True)
    return bits, rounded + rounded * (1.0 - scale * rounded)


@triton.jit
def _fp8_codes(x):
    """Return codes (e4m3), headers, and which blocks are finite."""
    x = x.to(tl.int32, bitcast=True)
    most = tl.max(x & 0x7FFFFFFF, axis=1)  # as integers: a NaN is larger than all numbers
    finite = most < INFINITY
    scale, inverse = _scale(most.to(tl.float32, bitcast=True), FP8_INVERSE)
    size = tl.minimum((x & 0x7FFFFFFF).to(tl.float32, bitcast=True) * inverse[:, None], FP8_MAX)
    bits = size.to(tl.int32, bitcast=True)
    # Half of the last place kept is added, or a bit less if that place is even; 120 is between the exponents' biases.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 places are 2^-9 apart, as those of an fp32 number around 2^14 are.
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF
    codes = tl.where(size < 2.0**-6, subnormal, normal) | ((x >> 24) & 0x80)
    return codes, tl.where(finite, scale >> 16, NAN >> 16), finite


@triton.jit
def _store_header(row, header, stored, FORMAT: tl.constexpr):
    """Write the scale, which is the lower half of ``header``, and, if the format has it, the offset."""
    if ((FORMAT >> 16) & 255) == 32:
        tl.store(row.to(tl.pointer_type(tl.int32), bitcast=True), header, mask=stored)
    else:
        halves = row.to(tl.pointer_type(tl.int16), bitcast=True)
        tl.store(halves, header.to(tl.int16), mask=stored)
        if ((FORMAT >> 8) & 255) == 4:
            tl.store(halves + 1, (header >> 16).to(tl.int16), mask=stored)


@triton.jit
def _store_plane(
    row, codes, finite, stored, B: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """Write codes ``[R, BLOCK]`` of ``BITS`` bits from ``row`` on, all zero if the block is not ``finite``."""
    UNIT: tl.constexpr = (FORMAT >> 16) & 255
    EACH: tl.constexpr = UNIT // BITS
    if EACH > 1:
        shifts = tl.arange(0, EACH) * BITS
        codes = tl.sum(tl.reshape(codes, [codes.shape[0], BLOCK // EACH, EACH]) << shifts[None, None, :], axis=2)
    codes = tl.where(finite[:, None], codes, 0)
    k = tl.arange(0, BLOCK // EACH)
    inside = stored[:, None] & (k < (B + EACH - 1) // EACH)[None, :]
    if UNIT == 32:
        row = row.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(row[:, None] + k[None, :], codes, mask=inside)
    else:
        tl.store(row[:, None] + k[None, :], codes.to(tl.uint8), mask=inside)
