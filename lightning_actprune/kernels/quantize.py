"""Blocks to bytes: maths and storage of ``ops.formats``, bit for bit; ``FORMAT`` as in ``kernels.formats``.

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

from lightning_actprune.kernels.formats import LOST, NAN, SCALE_CODES, STEPS, dither, headers_of, plane_of
from lightning_actprune.kernels.launch import INTERPRETED
from lightning_actprune.ops import formats

FP8_TINY = tl.constexpr(formats.FP8_TINY)
FP8_INVERSE = tl.constexpr(formats.inverse_of(formats.FP8_MAX))
MOST_SCALE = tl.constexpr(formats.MOST_SCALE)
PER_SPREAD, PER_REACH = (tl.constexpr(tuple(formats.needs(bits)[part] for bits in range(1, 9))) for part in range(2))
"""What the scale is at least, of codes of 1 to 8 bits."""
STEPS_OF = tl.constexpr(tuple(formats.steps_of(bits) for bits in range(1, 9)))
"""Steps of the base in a scale."""
INTEGERS = tl.constexpr(1.5 * 2.0**23)
"""With this added, an integer is the lowest bits of an fp32 number."""
SLOW_REDUCTIONS = tl.constexpr(INTERPRETED)
"""The interpreter knows a few reductions, and takes a hundred times as long for any other."""
LEAST_SCALE, FP8_LEAST_SCALE = (
    tl.constexpr(struct.unpack("i", struct.pack("f", scale))[0])
    for scale in (formats.LEAST_SCALE, formats.FP8_LEAST_SCALE)
)
"""As bits."""


@triton.jit
def load_blocks(
    x_ptr, n, exist, stride_row, length: tl.constexpr, columns: tl.constexpr, UNIT: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the values ``[R, BLOCK]`` of the blocks ``n`` of samples at ``x_ptr``, which is one pointer or ``[R]``."""
    x_ptr += (n // columns).to(tl.int64) * stride_row * UNIT
    return load_rows(x_ptr, (n % columns) * B, exist, length, B, BLOCK)


@triton.jit
def load_rows(x_ptr, first, exist, length: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
    """Return the values ``[R, BLOCK]`` from column ``first`` of the rows at ``x_ptr [R]`` on.

    A thread gets sixteen neighbours (of a block of eight all), read 16 bytes at a time where rows are aligned: all that
    is done per block is done by each of its threads. What there is where a block does not ``exist`` is not defined;
    behind the end of a row or a block there are zeros.
    """
    WIDTH: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    GROUP: tl.constexpr = 16 if BLOCK > 16 else BLOCK
    if GROUP == WIDTH:
        x = _load_part(x_ptr, first, exist, 0, length, B, BLOCK, GROUP, WIDTH)
        x = tl.permute(x, (1, 0, 2))
    elif GROUP == 2 * WIDTH:
        x = tl.join(
            _load_part(x_ptr, first, exist, 0, length, B, BLOCK, GROUP, WIDTH),
            _load_part(x_ptr, first, exist, WIDTH, length, B, BLOCK, GROUP, WIDTH),
        )
        x = tl.permute(x, (1, 0, 3, 2))
    else:
        low = tl.join(
            _load_part(x_ptr, first, exist, 0, length, B, BLOCK, GROUP, WIDTH),
            _load_part(x_ptr, first, exist, WIDTH, length, B, BLOCK, GROUP, WIDTH),
        )
        high = tl.join(
            _load_part(x_ptr, first, exist, 2 * WIDTH, length, B, BLOCK, GROUP, WIDTH),
            _load_part(x_ptr, first, exist, 3 * WIDTH, length, B, BLOCK, GROUP, WIDTH),
        )
        x = tl.permute(tl.join(low, high), (1, 0, 4, 3, 2))
    return tl.reshape(x, [first.shape[0], BLOCK])


@triton.jit
def _load_part(
    x_ptr, first, exist, AT: tl.constexpr, length: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return ``WIDTH`` values from ``AT`` on of each ``GROUP`` of a block: ``[BLOCK / GROUP, R, WIDTH]``.

    Groups come first, so that neighbours among the threads get neighbouring ones.
    """
    e = (AT + tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, WIDTH)[None, :])[:, None, :]
    column, there = first[None, :, None] + e, exist[None, :, None]
    if length % B == 0 and B == BLOCK:
        return tl.load(x_ptr[None, :, None] + column, mask=there)
    return tl.load(x_ptr[None, :, None] + column, mask=there & ((column < length) & (e < B)), other=0.0)


@triton.jit
def quantize_tile(
    x, values_ptr, count, place, stored, B: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """Write the blocks ``x [R, BLOCK]`` to ``place`` (int32) of ``count`` where ``stored``.

    Values from ``B`` on must be zero.
    """
    LOW: tl.constexpr = (FORMAT >> 4) & 15
    HIGH: tl.constexpr = FORMAT & 15
    LOW_BYTES: tl.constexpr = (B * LOW + 7) // 8
    USED: tl.constexpr = LOW_BYTES + (B * HIGH + 7) // 8
    if (FORMAT >> 8) & 255:
        codes, header, finite = _fp8_codes(x.to(tl.float32))
    else:
        codes, header, finite = _integer_codes(x.to(tl.float32), place, B, BLOCK, LOW + HIGH)
    tl.store(headers_of(values_ptr, count, place, FORMAT), header.to(tl.int16), mask=stored)
    lowest = plane_of(values_ptr, place, B, LOW)
    if HIGH > 0:
        _store_plane(lowest, codes & ((1 << LOW) - 1), finite, stored, B, BLOCK, LOW, FORMAT)
        highest = plane_of(values_ptr + tl.cast(count, tl.int64) * LOW_BYTES, place, B, HIGH)
        _store_plane(highest, codes >> LOW, finite, stored, B, BLOCK, HIGH, FORMAT)
    else:
        _store_plane(lowest, codes, finite, stored, B, BLOCK, LOW, FORMAT)
    if USED % 2 == 1:
        fill_ptr = values_ptr + tl.cast(count, tl.int64) * USED
        tl.store(fill_ptr + place, tl.zeros_like(place).to(tl.uint8), mask=stored)


@triton.jit
def _integer_codes(x, place, B: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Return codes ``[R, BLOCK]``, headers, and which blocks are finite."""
    e = tl.arange(0, BLOCK)
    inside = (e < B)[None, :]
    # Adding zero turns a negative zero, of which it is open whether it is less than zero, into a positive one.
    low = tl.min(x if B == BLOCK else tl.where(inside, x, float("inf")), axis=1) + 0.0
    high = _largest(x if B == BLOCK else tl.where(inside, x, -float("inf"))) + 0.0
    of_spread, of_reach = (high - low) * PER_SPREAD[BITS - 1], tl.abs(low) * PER_REACH[BITS - 1]
    finite = (of_spread <= MOST_SCALE) & (of_reach <= MOST_SCALE)
    need = tl.maximum(of_spread, of_reach)
    bits, scale, inverse = _scale(need, 20, LEAST_SCALE)
    step = scale * (((1 << BITS) - 1) / STEPS)
    offset = tl.floor(low * inverse * STEPS_OF[BITS - 1])
    offset = tl.where(offset * step > low, offset - 1.0, offset)  # the quotient was rounded
    header = ((offset + INTEGERS).to(tl.int32, bitcast=True) & 127) << 9
    header |= tl.where(need > 0.0, (bits >> 20) - SCALE_CODES, 0)
    # The dither is 2^8 times what it is to be, and the product with a power of two exact.
    shifted = dither(header, place, e, B, BITS, 8, False).to(tl.float32, bitcast=True)
    total = tl.fma(shifted, 2.0**-8, (x - (offset * step)[:, None]) * inverse[:, None]).to(tl.int32, bitcast=True)
    codes = (total >> (23 - BITS)) & ((1 << BITS) - 1)
    return codes if B == BLOCK else tl.where(inside, codes, 0), tl.where(finite, header, LOST), finite


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
def _scale(need, PLACES: tl.constexpr, LEAST: tl.constexpr):
    """Return ``need`` with its last bits rounded up to zero, ``LEAST`` (bits) at least: as bits, and its inverse."""
    bits = (need.to(tl.int32, bitcast=True) + ((1 << PLACES) - 1)) & -(1 << PLACES)
    bits = tl.maximum(bits, LEAST)
    scale = bits.to(tl.float32, bitcast=True)
    # Of positive normal numbers this is an inverse within six units in the last place: 8 instructions less than 1 / x.
    root = tl.rsqrt(scale)
    rounded = (((root * root).to(tl.int32, bitcast=True) + 0x100) & -0x200).to(tl.float32, bitcast=True)
    return bits, scale, rounded + rounded * (1.0 - scale * rounded)


@triton.jit
def _fp8_codes(x):
    """Return codes (e4m3), headers, and which blocks are finite."""
    most = _largest(tl.abs(x))
    finite = most < float("inf")  # not so if it is NaN
    scale, _, inverse = _scale(most * FP8_INVERSE, 16, FP8_LEAST_SCALE)
    # A rounded product may exceed the largest number, but by so little that it is rounded to that.
    bits = ((tl.abs(x) * inverse[:, None]) * FP8_TINY).to(tl.int32, bitcast=True)
    # Half of the last place kept is added, or a bit less if that place is even.
    codes = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    codes |= (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return codes, tl.where(finite, scale, NAN) >> 16, finite


@triton.jit
def _store_plane(
    block, codes, finite, stored, B: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """Write codes ``[R, BLOCK]`` of ``BITS`` bits to the blocks at ``block``, all zero if not ``finite``."""
    UNIT: tl.constexpr = (FORMAT >> 16) & 255
    EACH: tl.constexpr = UNIT // BITS
    if EACH > 1:
        shifts = tl.arange(0, EACH) * BITS
        codes = tl.sum(tl.reshape(codes, [codes.shape[0], BLOCK // EACH, EACH]) << shifts[None, None, :], axis=2)
    codes = tl.where(finite[:, None], codes, 0)
    k = tl.arange(0, BLOCK // EACH)
    inside = stored[:, None] & (k < (B + EACH - 1) // EACH)[None, :]
    if UNIT == 32:
        block = block.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(block[:, None] + k[None, :], codes, mask=inside)
    else:
        tl.store(block[:, None] + k[None, :], codes.to(tl.uint8), mask=inside)
