"""Quantized blocks in kernels: values to bytes and back, by the maths and storage of ``codec.formats``, bit for bit.

A kernel knows the number of bits and the block size as one integer at compile time, ``FORMAT`` (see ``encode_format``).
It is 0 if values are stored unchanged: such a kernel contains none of the code below.

Reading rounds once, and converts neither dither nor codes. ``1 - u`` has the inverted bits of ``u``; placed behind the
bits of the code, they form ``z = q + 2^v + 1 - u`` as an fp32 number. A fused multiply-add then gives ::

    base + scale (q + 1/2 - u) = start + scale z,  start = base + scale (1/2 - 2^v - 1)

where ``start`` is exact: a multiple of ``scale / 32`` below 2^15 of them, times a scale of 4 bits. A plane of codes is
split in registers.

Writing is bound by arithmetic, so its instructions are counted. It converts neither dither nor codes either:
``u + 2^v`` is composed from the hash with one exclusive or per value, and the code is v bits of the sum. The sum is a
fused multiply-add whose product is exact, of a term that was rounded before, so no further fusion by a compiler changes
a code. Codes of a plane are joined to bytes in registers, since neighbouring values of a block are in one thread.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from lightning_actprune.codec import formats
from lightning_actprune.codec.blocks import MAX_BLOCK_SIZE
from lightning_actprune.kernels.launch import INTERPRETED


def add_shifted(number: int, bits: int, count: int) -> int:
    """Return the sum, as int32, of ``number`` at the places of ``count`` codes of ``bits`` bits, lowest first."""
    total = sum(number << bits * place for place in range(count))
    return (total + 2**31) % 2**32 - 2**31


PLACE = tl.constexpr(formats.PLACE)
DITHER_STEP = tl.constexpr(1 << (23 - formats.DITHER_BITS))
"""Smallest difference of two dithers, in units of the last place of their sum with a code."""
NUMBER_BITS = tl.constexpr((MAX_BLOCK_SIZE - 1).bit_length())
"""Bits of the number of a value in its block."""
SCALE_CODES, LOST, STEPS = tl.constexpr(formats.SCALE_CODES), tl.constexpr(formats.LOST), tl.constexpr(formats.STEPS)
NAN = tl.constexpr(0x7FC00000)
ROUNDS_TWICE = tl.constexpr(INTERPRETED)
THREAD_VALUES = 64 if INTERPRETED else 16
"""Values that a thread stores or reads at once. The interpreter takes the same time for more of them."""
MIX_A, MIX_FIRST, MIX_B, MIX_SECOND = (tl.constexpr(constant) for constant in formats.MIX)
MOST_SCALE = tl.constexpr(formats.MOST_SCALE)
PER_SPREAD, PER_REACH = (tl.constexpr(tuple(formats.NEEDS[bits][part] for bits in range(1, 9))) for part in range(2))
"""Smallest scale for a spread or a reach of 1, for codes of 1 to 8 bits."""
STEPS_OF = tl.constexpr(tuple(formats.STEPS_OF[bits] for bits in range(1, 9)))
"""Steps of the base in a scale, for codes of 1 to 8 bits."""
INTEGERS = tl.constexpr(1.5 * 2.0**23)
"""An integer plus this number is in the lowest bits of the fp32 sum."""
WHOLE = tl.constexpr(0x4B000000)
"""The bits of 2^23 as an fp32 number. An integer below that plus 2^23 has the bits of their sum as integers."""
UPPER_BITS = tl.constexpr(tuple(add_shifted(0x4B000000 + 2**bits, bits, 32 // bits) for bits in range(1, 9)))
"""By the bits of a code: what is above the codes in a word of them."""
PAIRED_BLOCK = tl.constexpr(32)
"""Values of blocks that are packed from pairs: a thread has a whole block in its registers."""
WITHOUT_LIBDEVICE = tl.constexpr(INTERPRETED)
SLOW_REDUCTIONS = tl.constexpr(INTERPRETED)
"""The interpreter has a few fast reductions, and takes a hundred times as long for any other."""
LEAST_SCALE = tl.constexpr(struct.unpack("i", struct.pack("f", formats.LEAST_SCALE))[0])
"""The bits of the smallest scale."""


def encode_format(bits: int, block_size: int) -> int:
    """Return ``FORMAT``, 0 if values are stored unchanged.

    From its highest bit on: bytes of a block, bits of codes that are read and written as one number (8 bits), 8 zeros,
    bits of a code in the first plane (4) and in the second (4).
    """
    if not bits:
        return 0
    planes = formats.PLANES[bits]
    first, second = (*planes, 0)[:2]
    # If blocks are whole words, access words: a quarter of the accesses that bytes take.
    unit = 32 if all(block_size * plane % 32 == 0 for plane in planes) else 8
    return formats.row_bytes(block_size, bits, 0) << 24 | unit << 16 | first << 4 | second


@triton.jit
def mix(h):
    """Return a hash of each uint32, whose highest 16 bits and more are good."""
    h = (h ^ (h >> MIX_A)) * MIX_FIRST
    return (h ^ (h >> MIX_B)) * MIX_SECOND


def values_layout(kept: int, block_size: int, stored: int) -> tuple[tuple[int, int], torch.dtype | None]:
    """Shape and dtype of the values of ``kept`` blocks, ``None`` for the input's; ``stored`` is FORMAT."""
    return ((kept, stored >> 24), torch.uint8) if stored else ((kept, block_size), None)


def tile_width(block_size: int) -> int:
    """Return the values of a block in a tile of whole blocks: at least 8, whose codes of one bit are a byte."""
    return max(8, int(triton.next_power_of_2(block_size)))


def whole_blocks(block_size: int) -> tuple[int, int]:
    """Return ``(BLOCK, TILE)``: the width of whole blocks, and the blocks that a program of 4 warps handles at once."""
    block = tile_width(block_size)
    return block, max(1, THREAD_VALUES * 32 * 4 // block)


@triton.jit
def dequantize_tile(
    values_ptr, count, place, stored, first, B: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    BY_VALUE: tl.constexpr = False,
):  # fmt: skip
    """Return the values ``first`` to ``first + BLOCK`` of blocks as fp32 ``[R, BLOCK]``.

    ``values_ptr``: bytes of ``count`` blocks; ``place: [R]``, int32. Values are zero where not ``stored``, and
    undefined from ``B`` on. ``first`` is a multiple of 64. ``BY_VALUE``: each value has the address of its own word,
    and a thread with whole blocks reads each word once; else words are read side by side and handed on to the threads
    of their values.
    """
    LOW: tl.constexpr = (FORMAT >> 4) & 15
    HIGH: tl.constexpr = FORMAT & 15
    LOW_BYTES: tl.constexpr = (B * LOW + 7) // 8
    place = tl.where(stored, place, 0)
    header = tl.load(headers_of(values_ptr, count, place, FORMAT)).to(tl.int32)
    codes = _load_plane(plane_of(values_ptr, place, B, LOW), first, B, BLOCK, LOW, 23 - LOW - HIGH, FORMAT, BY_VALUE)
    if HIGH > 0:
        highest = plane_of(values_ptr + tl.cast(count, tl.int64) * LOW_BYTES, place, B, HIGH)
        codes |= _load_plane(highest, first, B, BLOCK, HIGH, 23 - HIGH, FORMAT, BY_VALUE)
    scale, start = _scale_and_start(header, LOW + HIGH)
    scale, start = tl.where(stored, scale, 0.0), tl.where(stored, start, 0.0)
    codes |= dither(header, place, first + tl.arange(0, BLOCK), B, LOW + HIGH, 0, True)
    return multiply_add(scale[:, None], codes.to(tl.float32, bitcast=True), start[:, None])


@triton.jit
def multiply_add(a, b, c):
    """Return ``a b + c``, rounded once. The interpreter's own fused multiply-add rounds twice."""
    if ROUNDS_TWICE:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    return tl.fma(a, b, c)


@triton.jit
def plane_of(plane_ptr, place, B: tl.constexpr, BITS: tl.constexpr):
    """Return pointers to the codes in a plane of the blocks at ``place``."""
    return plane_ptr + place.to(tl.int64) * ((B * BITS + 7) // 8)


@triton.jit
def headers_of(values_ptr, count, place, FORMAT: tl.constexpr):
    """Return pointers to the headers, int16, of the blocks at ``place``."""
    headers_ptr = values_ptr + tl.cast(count, tl.int64) * ((FORMAT >> 24) - 2)
    return headers_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + place


@triton.jit
def dither(header, place, e, B: tl.constexpr, BITS: tl.constexpr, MORE: tl.constexpr, REST: tl.constexpr):
    """Return ``2^MORE (u + 2^BITS)`` as the bits of fp32 ``[R, len(e)]``: sign and exponent, hash, a half, zeros.

    ``REST``: with ``1 - u`` in place of ``u``.
    """
    h = mix((header.to(tl.uint32, bitcast=True) << 16) + place.to(tl.uint32) * PLACE)
    if REST:
        h ^= 0xFFFFFFFF  # here, since per value it would be one more instruction
    SHIFT: tl.constexpr = 9 + BITS
    FRACTION: tl.constexpr = (1 << (23 - BITS)) - DITHER_STEP
    h = ((h >> SHIFT) & FRACTION) | (((127 + MORE + BITS) << 23) + DITHER_STEP // 2)
    return h.to(tl.int32, bitcast=True)[:, None] ^ _reversed(e, B, 22 - BITS)[None, :]


@triton.jit
def _reversed(e, B: tl.constexpr, HIGHEST: tl.constexpr):
    """Return the bits of ``e`` (int32, below ``B``) in reverse order, from ``HIGHEST`` down.

    A thread has 8 or 16 neighbours, whose lowest bits the compiler knows: these become constants.
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
    """Return the scale of blocks, and ``start`` of the formula above.

    ``header`` is int32, with its upper half filled with the sign of the lower.
    """
    code = header & 511
    scale = tl.where(code == 0, 0, tl.where(code == LOST, NAN, (code + SCALE_CODES) << 20))
    scale = scale.to(tl.float32, bitcast=True)
    start = (header >> 9) * ((1 << BITS) - 1) + STEPS // 2 - STEPS * ((1 << BITS) + 1)
    return scale, scale * (start.to(tl.float32) * (1.0 / STEPS))


@triton.jit
def _load_plane(
    block, first, B: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, AT: tl.constexpr, FORMAT: tl.constexpr,
    BY_VALUE: tl.constexpr,
):  # fmt: skip
    """Return codes ``[R, BLOCK]`` of the blocks at ``block`` from value ``first`` on, as bits from ``AT`` on: int32."""
    UNIT: tl.constexpr = (FORMAT >> 16) & 255
    EACH: tl.constexpr = UNIT // BITS
    if UNIT == 32:
        block = block.to(tl.pointer_type(tl.int32), bitcast=True)
    e = tl.arange(0, BLOCK)
    k = (first + e) // EACH if BY_VALUE else first // EACH + tl.arange(0, BLOCK // EACH)
    units_ptr = block[:, None] + k[None, :]
    if B % BLOCK == 0:
        units = tl.load(units_ptr).to(tl.int32)
    else:
        units = tl.load(units_ptr, mask=(k < (B + EACH - 1) // EACH)[None, :], other=0).to(tl.int32)
    if BY_VALUE:
        codes = units >> (e % EACH * BITS)[None, :]
    else:
        codes = tl.reshape(units[:, :, None] >> (tl.arange(0, EACH) * BITS)[None, None, :], [block.shape[0], BLOCK])
    return (codes << AT) & (((1 << BITS) - 1) << AT)


@triton.jit
def load_blocks(
    x_ptr, n, exist, stride_row, length: tl.constexpr, columns: tl.constexpr, UNIT: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the values ``[R, BLOCK]`` of the blocks ``n`` of samples.

    ``x_ptr`` is one pointer for all blocks or ``[R]``, to the first value of a sample.
    """
    x_ptr += (n // columns).to(tl.int64) * stride_row * UNIT
    return load_rows(x_ptr, (n % columns) * B, exist, length, B, BLOCK)


@triton.jit
def load_pairs(x_ptr, exist):
    """Return blocks of 32 values of 16 bits at ``x_ptr [R]``, aligned to 16 bytes, as pairs: int32 ``[R, 16]``.

    A thread gets a whole block, read 16 bytes at a time.
    """
    pairs_ptr, start = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True), exist.to(tl.int32) * 0
    low = tl.join(
        _load_part(pairs_ptr, start, exist, 0, 16, 16, 16, 16, 4),
        _load_part(pairs_ptr, start, exist, 4, 16, 16, 16, 16, 4),
    )
    high = tl.join(
        _load_part(pairs_ptr, start, exist, 8, 16, 16, 16, 16, 4),
        _load_part(pairs_ptr, start, exist, 12, 16, 16, 16, 16, 4),
    )
    return tl.reshape(tl.permute(tl.join(low, high), (1, 0, 4, 3, 2)), [exist.shape[0], 16])


@triton.jit
def load_rows(x_ptr, first, exist, length: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
    """Return the values ``[R, BLOCK]`` from column ``first`` on of the rows at ``x_ptr [R]``.

    A thread gets sixteen neighbours (all eight of a block of eight), read 16 bytes at a time if rows are aligned: what
    is computed once per block is computed by each of its threads. Values are undefined where a block does not
    ``exist``, and zero behind the end of a row or a block.
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

    Groups come first, so that neighbouring threads get neighbouring groups.
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
    """Write the blocks ``x [R, BLOCK]`` to their places if they are ``stored``.

    ``values_ptr``: bytes of ``count`` blocks; ``place: [R]``, int32. Values from ``B`` on must be zero.
    """
    x, inside = x.to(tl.float32), (tl.arange(0, BLOCK) < B)[None, :]
    low = tl.min(x if B == BLOCK else tl.where(inside, x, float("inf")), axis=1)
    high = _largest(x if B == BLOCK else tl.where(inside, x, -float("inf")), (FORMAT >> 16) & 255 == 8)
    _store_blocks(x, low, high, values_ptr, count, place, stored, B, BLOCK, FORMAT)


@triton.jit
def quantize_pairs(pairs, values_ptr, count, place, stored, FP16: tl.constexpr, FORMAT: tl.constexpr):
    """Do as ``quantize_tile`` for blocks of 16-bit values, two in each number of ``pairs [R, 16]``: fp16 or bf16."""
    first, second = split_pairs(pairs, FP16)
    if SLOW_REDUCTIONS:
        low = tl.minimum(tl.min(first, axis=1), tl.min(second, axis=1))
        high = _larger(_largest(first, False), _largest(second, False))
    else:
        lows, highs = pairs, pairs
        for _ in tl.static_range(4):
            lows, highs = _fold(lows, "min", FP16), _fold(highs, "max.NaN", FP16)
        low_first, low_second = split_pairs(lows, FP16)
        high_first, high_second = split_pairs(highs, FP16)
        low = tl.reshape(tl.minimum(low_first, low_second), [pairs.shape[0]])
        high = tl.reshape(_larger(high_first, high_second), [pairs.shape[0]])
    x = tl.reshape(tl.join(first, second), [pairs.shape[0], PAIRED_BLOCK])
    _store_blocks(x, low, high, values_ptr, count, place, stored, PAIRED_BLOCK, PAIRED_BLOCK, FORMAT)


@triton.jit
def split_pairs(pairs, FP16: tl.constexpr):
    """Return the first and the second value of each pair in fp32."""
    if FP16:
        first, second = (pairs & 0xFFFF).to(tl.int16), (pairs >> 16).to(tl.int16)
        return first.to(tl.float16, bitcast=True).to(tl.float32), second.to(tl.float16, bitcast=True).to(tl.float32)
    return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _fold(pairs, OPERATION: tl.constexpr, FP16: tl.constexpr):
    """Return the smaller or larger ones of the two halves of each row of pairs."""
    one, other = tl.split(tl.reshape(pairs, [pairs.shape[0], pairs.shape[1] // 2, 2]))
    CODE: tl.constexpr = OPERATION + (".f16x2" if FP16 else ".bf16x2") + " $0, $1, $2;"
    return tl.inline_asm_elementwise(CODE, "=r,r,r", [one, other], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _store_blocks(
    x, low, high, values_ptr, count, place, stored, B: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """Write blocks ``x [R, BLOCK]``, fp32, whose extremes are ``low`` and ``high [R]``, NaN if a value is NaN."""
    LOW: tl.constexpr = (FORMAT >> 4) & 15
    HIGH: tl.constexpr = FORMAT & 15
    LOW_BYTES: tl.constexpr = (B * LOW + 7) // 8
    USED: tl.constexpr = LOW_BYTES + (B * HIGH + 7) // 8
    header, base, inverse, finite = _header(low, high, LOW + HIGH)
    tl.store(headers_of(values_ptr, count, place, FORMAT), tl.where(finite, header, LOST).to(tl.int16), mask=stored)
    codes = _codes(x, header, place, base, inverse, B, LOW + HIGH)
    if B != BLOCK:
        codes = tl.where((tl.arange(0, BLOCK) < B)[None, :], codes, WHOLE + (1 << (LOW + HIGH)))
    lowest = plane_of(values_ptr, place, B, LOW)
    if HIGH > 0:
        _store_plane(lowest, codes & ((1 << LOW) - 1), finite, stored, B, BLOCK, LOW, 0, FORMAT)
        highest = plane_of(values_ptr + tl.cast(count, tl.int64) * LOW_BYTES, place, B, HIGH)
        _store_plane(highest, (codes >> LOW) & ((1 << HIGH) - 1), finite, stored, B, BLOCK, HIGH, 0, FORMAT)
    else:
        _store_plane(lowest, codes, finite, stored, B, BLOCK, LOW, UPPER_BITS[LOW - 1], FORMAT)
    if USED % 2 == 1:
        fill_ptr = values_ptr + tl.cast(count, tl.int64) * USED
        tl.store(fill_ptr + place, tl.zeros_like(place).to(tl.uint8), mask=stored)


@triton.jit
def _header(low, high, BITS: tl.constexpr):
    """Return headers, base and inverse scale of blocks, and which are finite, all ``[R]``."""
    # Adding zero makes negative zeros positive: min and max may return either of the two.
    low, high = low + 0.0, high + 0.0
    of_spread, of_reach = (high - low) * PER_SPREAD[BITS - 1], tl.abs(low) * PER_REACH[BITS - 1]
    finite = (of_spread <= MOST_SCALE) & (of_reach <= MOST_SCALE)
    need = tl.maximum(of_spread, of_reach)
    bits, scale, inverse = _scale(need, 20, LEAST_SCALE)
    step = scale * (((1 << BITS) - 1) / STEPS)
    offset = tl.floor(low * inverse * STEPS_OF[BITS - 1])
    offset = tl.where(offset * step > low, offset - 1.0, offset)  # the quotient was rounded
    header = ((offset + INTEGERS).to(tl.int32, bitcast=True) & 127) << 9
    return header | tl.where(need > 0.0, (bits >> 20) - SCALE_CODES, 0), offset * step, inverse, finite


@triton.jit
def _codes(x, header, place, base, inverse, B: tl.constexpr, BITS: tl.constexpr):
    """Return codes ``[R, BLOCK]`` plus ``WHOLE + 2^BITS``."""
    # This dither is 2^8 times the real one, and its product with a power of two is exact.
    shifted = dither(header, place, tl.arange(0, x.shape[1]), B, BITS, 8, False).to(tl.float32, bitcast=True)
    total = tl.fma(shifted, 2.0**-8, (x - base[:, None]) * inverse[:, None])
    if WITHOUT_LIBDEVICE:
        codes = (total.to(tl.int32, bitcast=True) >> (23 - BITS)) & ((1 << BITS) - 1)
        return codes + (WHOLE + (1 << BITS))
    # A sum with 2^23 that is rounded down has the integer part in its lowest bits.
    return libdevice.add_rz(total, 2.0**23).to(tl.int32, bitcast=True)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(x, BYTES: tl.constexpr):
    """Return the largest value of each row, NaN if a value of it is NaN.

    A kernel that writes single ``BYTES`` does it without the instruction for both. Beside this instruction, Triton 3.8
    may write wrong bytes (its issue 11111).
    """
    if SLOW_REDUCTIONS or BYTES:
        return tl.max(x, axis=1) + tl.sum(tl.where(x != x, x, 0.0), axis=1)
    return tl.reduce(x, 1, _larger)


@triton.jit
def _scale(need, PLACES: tl.constexpr, LEAST: tl.constexpr):
    """Return ``need`` rounded up to ``PLACES`` zero bits, at least ``LEAST``: as bits, as fp32, and its inverse."""
    bits = (need.to(tl.int32, bitcast=True) + ((1 << PLACES) - 1)) & -(1 << PLACES)
    bits = tl.maximum(bits, LEAST)
    scale = bits.to(tl.float32, bitcast=True)
    # The inverse of positive normal numbers up to six units in the last place: 8 instructions less than 1 / x.
    root = tl.rsqrt(scale)
    rounded = (((root * root).to(tl.int32, bitcast=True) + 0x100) & -0x200).to(tl.float32, bitcast=True)
    return bits, scale, rounded + rounded * (1.0 - scale * rounded)


@triton.jit
def _store_plane(
    block, codes, finite, stored, B: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, UPPER: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Write codes ``[R, BLOCK]`` of ``BITS`` bits to the blocks at ``block``, zeros to blocks that are not finite.

    ``UPPER`` is the sum of the bits above the codes in a number that is written.
    """
    UNIT: tl.constexpr = (FORMAT >> 16) & 255
    EACH: tl.constexpr = UNIT // BITS
    if EACH > 1:
        shifts = tl.arange(0, EACH) * BITS
        codes = tl.sum(tl.reshape(codes, [codes.shape[0], BLOCK // EACH, EACH]) << shifts[None, None, :], axis=2)
    codes = tl.where(finite[:, None], codes - UPPER, 0)
    k = tl.arange(0, BLOCK // EACH)
    inside = stored[:, None] & (k < (B + EACH - 1) // EACH)[None, :]
    if UNIT == 32:
        block = block.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(block[:, None] + k[None, :], codes, mask=inside)
    else:
        tl.store(block[:, None] + k[None, :], codes.to(tl.uint8), mask=inside)
