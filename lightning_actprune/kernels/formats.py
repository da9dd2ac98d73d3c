"""How kernels know a value format, and blocks read back from rows of bytes; ``kernels.quantize`` writes them.

Maths and storage are those of ``ops.formats``, bit for bit. What a kernel must know of a format and a block size is one
integer at compile time, ``FORMAT`` (see ``encode_format``), 0 if values are stored as they are: such a kernel has none
of the code below.

Reading is exact before its one addition, since a scale of 8 bits times a code of 8 bits fits into fp32. fp8 is decoded
by integers, so that it needs no hardware for it. A plane of codes is taken apart in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_actprune.ops.formats import FORMATS


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
def _fp8_values(codes):
    """Return the fp32 values of e4m3 codes; their subnormals become those of fp32, then both are scaled up."""
    bits = ((codes & 0x7F) << 20) | ((codes & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * 2.0**120


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
