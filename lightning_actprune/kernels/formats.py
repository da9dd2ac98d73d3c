"""Blocks as rows of bytes in the kernels, and back; maths and storage are those of ``ops.formats``, bit for bit.

What a kernel must know of a format and a block size is one integer at compile time, ``FORMAT`` (see ``encode_format``),
0 if values are stored as they are: such a kernel has none of the code below.

The dither ``u`` and its hash are 32-bit integers; ``u`` as a fraction of 2^24 is added by a fused multiply-add, whose
product is exact, to a product that is rounded before: what a compiler fuses besides can change no code. Reading is
exact before its one addition, since a scale of 8 bits times a code of 8 bits fits into fp32. fp8 is encoded and decoded
by integers, so that it needs no hardware for it.

A plane of codes is joined to bytes, or taken apart, in registers: neighbouring values of a block are in one thread.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl

from lightning_actprune.ops import formats
from lightning_actprune.ops.formats import FORMATS

CONTENT, NUMBER, GOLDEN = tl.constexpr(formats.CONTENT), tl.constexpr(formats.NUMBER), tl.constexpr(formats.GOLDEN)
MIX_A, MIX_FIRST, MIX_B, MIX_SECOND, MIX_C = (tl.constexpr(constant) for constant in formats.MIX)
FP8_MAX = tl.constexpr(formats.FP8_MAX)
LEAST_SCALE = tl.constexpr(struct.unpack("i", struct.pack("f", formats.LEAST_SCALE))[0])
"""As bits."""
NAN = tl.constexpr(0x7FC00000)


def encode_format(value_format: str, block_size: int) -> int:
    """Return ``FORMAT``.

    From its highest bit on: bytes of a row, bits that are read and written as one number (in 8 bits), bytes of the
    header (8), bits of a code in the first plane (4) and in the second (4).
    """
    made = FORMATS[value_format]
    if not made.planes:
        return 0
    first, second = (*made.planes, 0)[:2]
    # Words, not bytes, where header and planes consist of these: they can be copied in the background.
    unit = 32 if made.header == 4 and all(block_size * bits % 32 == 0 for bits in made.planes) else 8
    return made.row_bytes(block_size, 0) << 24 | unit << 16 | made.header << 8 | first << 4 | second


def values_layout(kept: int, block_size: int, stored: int) -> tuple[tuple[int, int], torch.dtype | None]:
    """Return shape and dtype of the values of so many blocks, ``None`` for that of the input; ``stored``: FORMAT."""
    return ((kept, stored >> 24), torch.uint8) if stored else ((kept, block_size), None)


def tile_width(block_size: int) -> int:
    """Return the values along a block of a tile of whole blocks: 8 at least, of which codes of one bit are a byte."""
    return max(8, int(triton.next_power_of_2(block_size)))


@triton.jit
def quantize_tile(
    x, n, values_ptr, place, stored, B: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """Write the fp32 blocks ``x [R, BLOCK]`` to the rows ``place`` (int64) where ``stored``.

    Values from ``B`` on must be zero. ``n``: numbers of the blocks among those of all samples, uint32.
    """
    HEADER: tl.constexpr = (FORMAT >> 8) & 255
    LOW: tl.constexpr = (FORMAT >> 4) & 15
    HIGH: tl.constexpr = FORMAT & 15
    LOW_BYTES: tl.constexpr = (B * LOW + 7) // 8
    USED: tl.constexpr = HEADER + LOW_BYTES + (B * HIGH + 7) // 8
    row = values_ptr + place * (FORMAT >> 24)
    if HEADER == 2:
        codes, scale, finite = _fp8_codes(x)
        offset = scale
    else:
        codes, scale, offset, finite = _integer_codes(x, n, B, BLOCK, (1 << (LOW + HIGH)) - 1)
    _store_header(row, tl.where(finite, scale, NAN), tl.where(finite, offset, 0), stored, FORMAT)
    if HIGH > 0:
        _store_plane(row + HEADER, codes & ((1 << LOW) - 1), finite, stored, B, BLOCK, LOW, FORMAT)
        _store_plane(row + HEADER + LOW_BYTES, codes >> LOW, finite, stored, B, BLOCK, HIGH, FORMAT)
    else:
        _store_plane(row + HEADER, codes, finite, stored, B, BLOCK, LOW, FORMAT)
    if USED % 2 == 1:
        tl.store(row + USED, tl.zeros_like(place).to(tl.uint8), mask=stored)


@triton.jit
def dequantize_tile(
    values_ptr, place, stored, first, B: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """Return the values ``first`` to ``first + BLOCK`` of the rows ``place`` as fp32, zero where not ``stored``.

    What lies beyond ``B`` is not defined. ``first`` is a multiple of 64.
    """
    HEADER: tl.constexpr = (FORMAT >> 8) & 255
    LOW: tl.constexpr = (FORMAT >> 4) & 15
    HIGH: tl.constexpr = FORMAT & 15
    LOW_BYTES: tl.constexpr = (B * LOW + 7) // 8
    row = values_ptr + place * (FORMAT >> 24)
    scale, offset = _load_header(row, stored, FORMAT)
    codes = _load_plane(row + HEADER, first, stored, B, BLOCK, LOW, FORMAT)
    if HEADER == 2:
        return _fp8_values(codes) * scale[:, None]
    if HIGH > 0:
        codes |= _load_plane(row + HEADER + LOW_BYTES, first, stored, B, BLOCK, HIGH, FORMAT) << LOW
    return offset[:, None] + scale[:, None] * codes.to(tl.float32)


@triton.jit
def _integer_codes(x, n, B: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr):
    """Return codes ``[R, BLOCK]``, the bits of scale and offset, and which blocks are finite."""
    e = tl.arange(0, BLOCK)
    inside = (e < B)[None, :]
    # Adding zero turns a negative zero, of which it is open whether it is less than zero, into a positive one.
    low = tl.min(x if B == BLOCK else tl.where(inside, x, float("inf")), axis=1) + 0.0
    high = tl.max(x if B == BLOCK else tl.where(inside, x, -float("inf")), axis=1) + 0.0
    offset = low.to(tl.int32, bitcast=True)
    offset = tl.where(low < 0.0, offset + 0xFFFF, offset) & -0x10000
    base = offset.to(tl.float32, bitcast=True)
    spread = high - base
    # Extremes pass over a NaN; a sum does not.
    finite = (tl.sum(x * 0.0, axis=1) == 0.0) & (spread < float("inf"))
    scale, inverse = _scale(spread, MOST)
    dither = ((_hash(x, n, e)[:, None] + (e.to(tl.uint32) * GOLDEN)[None, :]) >> 8).to(tl.int32).to(tl.float32)
    codes = tl.fma(dither, 2.0**-24, (x - base[:, None]) * inverse[:, None])
    codes = tl.where(inside, tl.minimum(codes, MOST * 1.0), 0.0) if B != BLOCK else tl.minimum(codes, MOST * 1.0)
    return codes.to(tl.int32), scale, offset, finite


@triton.jit
def _hash(x, n, e):
    """Return a random uint32 of each block ``x [R, BLOCK]`` with number ``n``, equal for equal blocks and numbers."""
    bits = x.to(tl.uint32, bitcast=True)
    return mix(tl.sum(bits * ((2 * e + 1).to(tl.uint32) * CONTENT)[None, :], axis=1) + n * NUMBER)


@triton.jit
def mix(h):
    """Return a hash of each uint32."""
    h = (h ^ (h >> MIX_A)) * MIX_FIRST
    h = (h ^ (h >> MIX_B)) * MIX_SECOND
    return h ^ (h >> MIX_C)


@triton.jit
def _scale(spread, MOST: tl.constexpr):
    """Return the bits of ``spread / MOST`` rounded up to bf16, and the inverse of that scale."""
    bits = (tl.div_rn(spread, tl.full(spread.shape, MOST, tl.float32)).to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    bits = tl.maximum(bits, LEAST_SCALE)
    return bits, tl.div_rn(tl.full(spread.shape, 1.0, tl.float32), bits.to(tl.float32, bitcast=True))


@triton.jit
def _fp8_codes(x):
    """Return codes (e4m3), the bits of the scale, and which blocks are finite."""
    finite = tl.sum(x * 0.0, axis=1) == 0.0
    size = tl.abs(x)
    scale, inverse = _scale(tl.max(size, axis=1), FP8_MAX)
    size = tl.minimum(size * inverse[:, None], FP8_MAX)
    bits = size.to(tl.int32, bitcast=True)
    # Half of the last place kept is added, or a bit less if that place is even; 120 is between the exponents' biases.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 places are 2^-9 apart, as those of an fp32 number around 2^14 are.
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(size < 2.0**-6, subnormal, normal) | sign, scale, finite


@triton.jit
def _fp8_values(codes):
    """Return the fp32 values of e4m3 codes; their subnormals become those of fp32, then both are scaled up."""
    bits = ((codes & 0x7F) << 20) | ((codes & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def _store_header(row, scale, offset, stored, FORMAT: tl.constexpr):
    """Write the upper halves of ``scale`` and, if the format has it, ``offset``."""
    if ((FORMAT >> 16) & 255) == 32:
        both = offset | ((scale >> 16) & 0xFFFF)
        tl.store(row.to(tl.pointer_type(tl.int32), bitcast=True), both, mask=stored)
    else:
        halves = row.to(tl.pointer_type(tl.int16), bitcast=True)
        tl.store(halves, (scale >> 16).to(tl.int16), mask=stored)
        if ((FORMAT >> 8) & 255) == 4:
            tl.store(halves + 1, (offset >> 16).to(tl.int16), mask=stored)


@triton.jit
def _load_header(row, stored, FORMAT: tl.constexpr):
    """Return scale and offset as fp32 (the scale twice if there is no offset), zero where not ``stored``."""
    if ((FORMAT >> 16) & 255) == 32:
        # At once: four bytes can be copied to shared memory in the background, two cannot.
        both = tl.load(row.to(tl.pointer_type(tl.int32), bitcast=True), mask=stored, other=0)
        scale, offset = both << 16, both & -0x10000
    else:
        halves = row.to(tl.pointer_type(tl.int16), bitcast=True)
        scale = tl.load(halves, mask=stored, other=0).to(tl.int32) << 16
        offset = scale
        if ((FORMAT >> 8) & 255) == 4:
            offset = tl.load(halves + 1, mask=stored, other=0).to(tl.int32) << 16
    return scale.to(tl.float32, bitcast=True), offset.to(tl.float32, bitcast=True)


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


@triton.jit
def _load_plane(
    row, first, stored, B: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """Return codes ``[R, BLOCK]`` of ``BITS`` bits as int32, from value ``first`` on."""
    UNIT: tl.constexpr = (FORMAT >> 16) & 255
    EACH: tl.constexpr = UNIT // BITS
    if UNIT == 32:
        row = row.to(tl.pointer_type(tl.int32), bitcast=True)
    k = first // EACH + tl.arange(0, BLOCK // EACH)
    inside = stored[:, None] & (k < (B + EACH - 1) // EACH)[None, :]
    codes = tl.load(row[:, None] + k[None, :], mask=inside, other=0).to(tl.int32)
    if EACH > 1:
        shifts = tl.arange(0, EACH) * BITS
        codes = (codes[:, :, None] >> shifts[None, None, :]) & ((1 << BITS) - 1)
        codes = tl.reshape(codes, [row.shape[0], BLOCK])
    return codes
