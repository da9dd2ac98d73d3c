"""How kernels know a value format, and blocks read back from bytes; ``kernels.quantize`` writes them.

Maths and storage are those of ``ops.formats``, bit for bit. What a kernel must know of a format and a block size is one
integer at compile time, ``FORMAT`` (see ``encode_format``), 0 if values are stored as they are: such a kernel has none
of the code below.

Reading rounds once. Neither the dither nor codes of integers are converted: ``1 - u`` has the bits of ``u`` inverted,
and next to the bits of the code they are those of ``z = q + 2^v + 1 - u`` as fp32. A fused multiply-add then gives ::

    base + scale (q + 1/2 - u) = start + scale z,  start = base + scale (1/2 - 2^v - 1)

where ``start`` is exact, a multiple of ``scale / 32`` below 2^15 of them, times a scale of 4 bits. fp8 is decoded by
integers, so that it needs no hardware for it. A plane of codes is taken apart in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_actprune.kernels.hashing import mix
from lightning_actprune.kernels.launch import INTERPRETED
from lightning_actprune.ops import formats
from lightning_actprune.ops.geometry import MAX_BLOCK_SIZE

PLACE = tl.constexpr(formats.PLACE)
DITHER_STEP = tl.constexpr(1 << (23 - formats.DITHER_BITS))
"""Least difference of two dithers, in the last places of their sum with a code."""
NUMBER_BITS = tl.constexpr((MAX_BLOCK_SIZE - 1).bit_length())
"""Bits of the number of a value in its block."""
SCALE_CODES, LOST, STEPS = tl.constexpr(formats.SCALE_CODES), tl.constexpr(formats.LOST), tl.constexpr(formats.STEPS)
NAN = tl.constexpr(0x7FC00000)
ROUNDS_TWICE = tl.constexpr(INTERPRETED)
THREAD_VALUES = 64 if INTERPRETED else 16
"""Values that a thread stores or reads at once; the interpreter takes the same time for more of them."""


def encode_format(value_format: str, block_size: int) -> int:
    """Return ``FORMAT``.

    From its highest bit on: bytes of a block, bits of codes that are read and written as one number (in 8 bits), 1 for
    fp8 (8), bits of a code in the first plane (4) and in the second (4).
    """
    made = formats.FORMATS[value_format]
    if not made.planes:
        return 0
    first, second = (*made.planes, 0)[:2]
    # Words, not bytes, where blocks consist of these: a quarter of the accesses.
    unit = 32 if all(block_size * bits % 32 == 0 for bits in made.planes) else 8
    return made.row_bytes(block_size, 0) << 24 | unit << 16 | (value_format == "fp8") << 8 | first << 4 | second


def values_layout(kept: int, block_size: int, stored: int) -> tuple[tuple[int, int], torch.dtype | None]:
    """Return shape and dtype of the values of so many blocks, ``None`` for that of the input; ``stored``: FORMAT."""
    return ((kept, stored >> 24), torch.uint8) if stored else ((kept, block_size), None)


def tile_width(block_size: int) -> int:
    """Return the values along a block of a tile of whole blocks: 8 at least, of which codes of one bit are a byte."""
    return max(8, int(triton.next_power_of_2(block_size)))


def whole_blocks(block_size: int) -> tuple[int, int]:
    """Return ``(BLOCK, TILE)``: the width of whole blocks, and how many a program of 4 warps handles at once."""
    block = tile_width(block_size)
    return block, max(1, THREAD_VALUES * 32 * 4 // block)


@triton.jit
def dequantize_tile(
    values_ptr, count, place, stored, first, B: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """Return the values ``first`` to ``first + BLOCK`` of the blocks at ``place`` (int32) of ``count`` as fp32.

    Zero where not ``stored``; what lies beyond ``B`` is not defined. ``first`` is a multiple of 64.
    """
    LOW: tl.constexpr = (FORMAT >> 4) & 15
    HIGH: tl.constexpr = FORMAT & 15
    LOW_BYTES: tl.constexpr = (B * LOW + 7) // 8
    header = tl.load(headers_of(values_ptr, count, place, FORMAT), mask=stored, other=0).to(tl.int32)
    codes = _load_plane(plane_of(values_ptr, place, B, LOW), first, stored, B, BLOCK, LOW, FORMAT)
    if (FORMAT >> 8) & 255:
        return _fp8_values(codes) * (header << 16).to(tl.float32, bitcast=True)[:, None]
    if HIGH > 0:
        highest = plane_of(values_ptr + tl.cast(count, tl.int64) * LOW_BYTES, place, B, HIGH)
        codes |= _load_plane(highest, first, stored, B, BLOCK, HIGH, FORMAT) << LOW
    scale, start = _scale_and_start(header, LOW + HIGH)
    rest = dither(header, place, first + tl.arange(0, BLOCK), B, LOW + HIGH, 0, True)
    codes = (codes << (23 - LOW - HIGH)) | rest
    return multiply_add(scale[:, None], codes.to(tl.float32, bitcast=True), start[:, None])


@triton.jit
def multiply_add(a, b, c):
    """Return ``a b + c``, rounded once; the interpreter's own fused multiply-add is rounded twice."""
    if ROUNDS_TWICE:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    return tl.fma(a, b, c)


@triton.jit
def plane_of(plane_ptr, place, B: tl.constexpr, BITS: tl.constexpr):
    """Return pointers to the codes of the blocks at ``place`` in a plane."""
    return plane_ptr + place.to(tl.int64) * ((B * BITS + 7) // 8)


@triton.jit
def headers_of(values_ptr, count, place, FORMAT: tl.constexpr):
    """Return pointers to the headers of the blocks at ``place``, int16."""
    headers_ptr = values_ptr + tl.cast(count, tl.int64) * ((FORMAT >> 24) - 2)
    return headers_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + place


@triton.jit
def dither(header, place, e, B: tl.constexpr, BITS: tl.constexpr, MORE: tl.constexpr, REST: tl.constexpr):
    """Return ``2^MORE (u + 2^BITS)`` as the bits of fp32 ``[R, len(e)]``: sign and exponent, hash, a half, zeros.

    ``REST``: with ``1 - u`` for ``u``.
    """
    h = mix((header.to(tl.uint32, bitcast=True) << 16) + place.to(tl.uint32) * PLACE)
    if REST:
        h ^= 0xFFFFFFFF  # here and not per value, where it would be an instruction more
    SHIFT: tl.constexpr = 9 + BITS
    FRACTION: tl.constexpr = (1 << (23 - BITS)) - DITHER_STEP
    h = ((h >> SHIFT) & FRACTION) | (((127 + MORE + BITS) << 23) + DITHER_STEP // 2)
    return h.to(tl.int32, bitcast=True)[:, None] ^ _reversed(e, B, 22 - BITS)[None, :]


@triton.jit
def _reversed(e, B: tl.constexpr, HIGHEST: tl.constexpr):
    """Return the bits of ``e`` (int32), which is below ``B``, in reverse order, from ``HIGHEST`` down.

    A thread has 8 or 16 neighbours, whose lowest bits are known to the compiler: of these nothing is left but a number.
    """
    low, high = e * 0, e * 0
    for bit in tl.static_range(4):
        low |= ((e >> bit) & 1) << (HIGHEST - bit)
    for bit in tl.static_range(4, NUMBER_BITS):
        if ((B - 1) >> bit) > 0:
            high |= ((e >> bit) & 1) << (HIGHEST - bit)
    return high | low


@triton.jit
def _scale_and_start(header, BITS: tl.constexpr):
    """Return the scale of blocks, and what is read less ``scale (q + 2^BITS + 1 - u)``: see above.

    ``header`` is int32, its upper half the sign of the lower.
    """
    code = header & 511
    scale = tl.where(code == 0, 0, tl.where(code == LOST, NAN, (code + SCALE_CODES) << 20))
    scale = scale.to(tl.float32, bitcast=True)
    start = (header >> 9) * ((1 << BITS) - 1) + STEPS // 2 - STEPS * ((1 << BITS) + 1)
    return scale, scale * (start.to(tl.float32) * (1.0 / STEPS))


@triton.jit
def _fp8_values(codes):
    """Return the fp32 values of e4m3 codes; their subnormals become those of fp32, then both are scaled up."""
    bits = ((codes & 0x7F) << 20) | ((codes & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def _load_plane(
    block, first, stored, B: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """Return codes ``[R, BLOCK]`` of ``BITS`` bits as int32, from value ``first`` on, of the blocks at ``block``."""
    UNIT: tl.constexpr = (FORMAT >> 16) & 255
    EACH: tl.constexpr = UNIT // BITS
    if UNIT == 32:
        block = block.to(tl.pointer_type(tl.int32), bitcast=True)
    k = first // EACH + tl.arange(0, BLOCK // EACH)
    inside = stored[:, None] & (k < (B + EACH - 1) // EACH)[None, :]
    codes = tl.load(block[:, None] + k[None, :], mask=inside, other=0).to(tl.int32)
    if EACH > 1:
        shifts = tl.arange(0, EACH) * BITS
        codes = (codes[:, :, None] >> shifts[None, None, :]) & ((1 << BITS) - 1)
        codes = tl.reshape(codes, [block.shape[0], BLOCK])
    return codes
