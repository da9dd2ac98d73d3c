r"""How the values of a kept block are stored: as they are, or in few bits each, with a scale per block.

``same``
    the values in their own type: pruning alone, the method of arXiv:2311.16883.

``int8``, ``int4``, ``int3``, ``int2`` (v bits, m = 2^v - 1)
    Subtractive dither: with u_e uniform in [0, 1), which is not stored since the reader computes it again::

        q_e = floor((x_e - base) / scale + u_e)      in 0 .. m
        x_e ~ base + scale (q_e + 1/2 - u_e)

    The error, scale times 1/2 - frac(.. + u_e), is uniform in +-scale/2 whatever x_e is: unbiased, so that errors of
    many rows cancel in the weight gradient, and of a variance of scale^2/12, half of what stochastic rounding has on
    average. Values that are read may lie up to scale/2 outside of those of the block.

    Scale and base take 16 bits, a code k of 9 and a code o of 7::

        scale = 2^-40 (1 + (k' mod 8)/8) 2^floor(k'/8),  k' = k - 1        3 bits of mantissa, up to 1.36e7
        base  = o step,  step = scale m / 32,  o in -64 .. 63

        need  = max((high - low) 32/31, |low| 32/63) / m                   of the block's extremes low and high
        k     : need rounded up;  0 if need is 0, since all values are (or below 1e-42): so they are read
        o     = floor(low / step)

    With 32 steps in the range of the codes, base reaches down to less than a step below low, which is what 32/31 leaves
    room for. A block that lies further from zero than twice its spread has its scale widened so that ``low`` is within
    63 steps of zero: its error becomes larger, of a size with |low| / (2 m), and stays unbiased.

``fp8``
    x_e ~ scale e_e with e_e in fp8 (e4m3, largest 448), rounded to nearest, and scale = max |x| / 448 in bf16, rounded
    up. No base.

The random numbers come from the block itself, so there is no generator to seed, to save or to advance: the same input
gives the same bytes, in any process, after a resumed checkpoint, under ``torch.compile`` and in a replayed CUDA graph.
With H the 16 bits of k and o as they are stored, and p the place of the block among the kept ones::

    h   = mix(2^16 H + p A)       u_e = ((h xor r(e)) + 1/2) / 2^n, of h and r(e) the highest n = 19 - v bits

modulo 2^32; ``mix`` is a 32-bit finalizer (constants: C. Wellons, "lowbias32"; its last step, which changes the lower
half, is left out), and r(e) has the bits of e in reverse order, lowest first: so the u_e of a block are spread evenly,
and a kernel needs one instruction a value for them. All of it is one to one: places less than 2^16 from each other
never share an h, whatever their blocks are. Each u_e is uniform over blocks, and blocks are independent of
each other, which is what matters: a weight gradient adds over them. Equal blocks, of padding tokens say, differ in
their place. In the next step a place has another dither if its scale or base is another; if not, its error still moves
with its values. Within a block the u_e depend on each other, which no sum over rows can see.

What is computed is chosen for its number of instructions, and such that no order of operations is left open. A multiple
of 2^-n and a half is neither 0 nor 1: the sum of quotient and u_e stays within 0 and 2^v even where all roundings go
one way (``need`` is 2^-20 larger than it must be), so that no code has to be clamped, and with 2^v added v bits of an
fp32 number are the code. The inverse of the scale is the same whichever way 1 / scale was rounded (``_refine``). A
reader adds ``base + scale/2``, 19 bits, and ``scale (q_e - u_e)``, 4 times 20 bits: both are exact, and their sum is
rounded once.

A block with a NaN or Inf is NaN when it is read again: an overflow still reaches the weight gradient. So is, in the
integer formats (k = 511), a block that would need a larger scale than there is: values 4e7 (int2) to 3e9 (int8) from
each other or 8e7 to 7e9 from zero.

Stored blocks take ``row_bytes`` each, and lie in memory by planes: the codes of all blocks, lowest bits of a code
first, then the headers of all blocks, 16 bits each, so that neither costs the other its alignment. Each block's part of
a plane of codes starts at a byte of its own. Three bits are two planes, one with the lower two bits of each code and
one with the highest. Where the codes of a block are an odd number of bytes, as many zero bytes as there are blocks come
before the headers.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MASK = 0xFFFFFFFF
PLACE = 0x85EBCA6B
MIX = (16, 0x7FEB352D, 15, 0x846CA68B)
DITHER_BITS = 19
"""Bits of a code and of its dither together: with the half and a scale of 4 bits, a product has the 24 of fp32."""
SCALE_CODES = 695
"""Of a scale with the code k, the highest 12 bits as fp32 are k + 695."""
LOST = 511
"""Header of a block that is NaN when it is read."""
LEAST_SCALE, MOST_SCALE = 2.0**-40, 1.625 * 2.0**23
"""Of the integer formats: codes 1 and 510."""
STEPS = 32
"""Steps of the base in the range of the codes."""
FP8_MAX = 448.0
FP8_LEAST_SCALE = 2.0**-126
"""Below, its inverse is no fp32 number."""
FP8_TINY = 2.0**-120
"""Times this, e4m3 numbers are fp32 ones with the same exponent bits, subnormals included."""
HEADER_BYTES = 2


class ValueFormat(NamedTuple):
    """A way to store the values of a block.

    Args:
        name: How it is asked for.
        planes: Bits of each plane of codes, lowest first; empty for values stored as they are.
    """

    name: str
    planes: tuple[int, ...]

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return sum(self.planes)

    def row_bytes(self, block_size: int, itemsize: int) -> int:
        """Return the bytes of a stored block."""
        if not self.planes:
            return block_size * itemsize
        codes = sum(plane_bytes(block_size, bits) for bits in self.planes)
        return HEADER_BYTES + codes + codes % 2


def plane_bytes(block_size: int, bits: int) -> int:
    """Return the bytes of a block in a plane of so many bits of each code."""
    return -(-block_size * bits // 8)


FORMATS = {
    made.name: made
    for made in (
        ValueFormat("same", ()),
        ValueFormat("fp8", (8,)),
        ValueFormat("int8", (8,)),
        ValueFormat("int4", (4,)),
        ValueFormat("int3", (2, 1)),
        ValueFormat("int2", (2,)),
    )
}


def quantize(blocks: Tensor, value_format: str) -> Tensor:
    """Return ``blocks [nnz, b]``, in the order of their places, as bytes: planes, as ``uint8 [nnz, row_bytes]``."""
    made, (count, size) = FORMATS[value_format], blocks.shape
    row = made.row_bytes(size, 0)
    if not count:
        return blocks.new_empty(0, row, dtype=torch.uint8)
    wide = blocks.float()
    headers, codes = _fp8(wide) if value_format == "fp8" else _integers(wide, made.bits)
    planes = []
    for bits in made.planes:
        planes.append(join(codes & (2**bits - 1), bits).flatten())
        codes = codes >> bits
    joined = torch.cat(planes)
    filled = F.pad(joined, (0, count * (row - HEADER_BYTES) - len(joined)))
    return torch.cat([filled, headers.to(torch.int16).view(torch.uint8)]).view(count, row)


def dequantize(values: Tensor, block_size: int, value_format: str, dtype: torch.dtype) -> Tensor:
    """Return the values ``[nnz, block_size]`` in ``dtype`` of stored blocks, contiguous ``uint8 [nnz, row_bytes]``."""
    made, count, flat = FORMATS[value_format], len(values), values.flatten()
    if not count:
        return values.new_empty(0, block_size, dtype=dtype)
    codes, start, shift = torch.zeros((), dtype=torch.int64, device=values.device), 0, 0
    for bits in made.planes:
        size = plane_bytes(block_size, bits)
        plane = flat[start : start + count * size].view(count, size)
        codes = codes + (split(plane, bits, block_size) << shift)
        start, shift = start + count * size, shift + bits
    headers = flat[-count * HEADER_BYTES :].view(torch.int16).int()
    if value_format == "fp8":
        scale = (headers << 16).view(torch.float32)[:, None]
        return (scale * codes.to(torch.uint8).view(torch.float8_e4m3fn).float()).to(dtype)
    scale, middle = _scale_and_middle(headers, made.bits)
    u = dither(headers.long() & 0xFFFF, block_size, made.bits)
    return (middle + scale * (codes.float() - u)).to(dtype)


def dither(headers: Tensor, block_size: int, bits: int) -> Tensor:
    """Return the uniform numbers ``u [nnz, block_size]`` of blocks for codes of so many bits.

    ``headers`` are their 16-bit numbers ``H [nnz]`` as int64, in the order of their places.
    """
    places, e = (torch.arange(count, device=headers.device) for count in (len(headers), block_size))
    h = mix(((headers << 16) + places * PLACE) & MASK)
    kept = DITHER_BITS - bits
    turned = sum((e >> bit & 1) << (31 - bit) for bit in range(32))
    return (((h[:, None] ^ turned) >> (32 - kept)).float() + 0.5) * 2.0**-kept


def mix(h: Tensor) -> Tensor:
    """Return a hash, good in its highest 16 bits and more, of 32-bit numbers held as int64."""
    a, first, b, second = MIX
    h = (h ^ (h >> a)) * first & MASK
    return (h ^ (h >> b)) * second & MASK


def inverse_of(most: float) -> float:
    """Return ``1 / most`` cut off to fp32: then a multiple of ``most`` gives no more than the exact quotient."""
    fraction, exponent = math.frexp(1 / most)
    return math.ldexp(math.floor(math.ldexp(fraction, 24)), exponent - 24)


def needs(bits: int) -> tuple[float, float]:
    """Return the least scale of codes of so many bits, per spread of a block and per distance of its low from zero."""
    least = STEPS / (2**bits - 1) * (1 + 2.0**-20)
    return fp32(least / (STEPS - 1)), fp32(least / (2 * STEPS - 1))


def steps_of(bits: int) -> float:
    """Return the steps of the base in a scale."""
    return fp32(STEPS / (2**bits - 1))


def fp32(x: float) -> float:
    """Return ``x`` rounded to fp32."""
    rounded: float = struct.unpack("f", struct.pack("f", x))[0]
    return rounded


def _integers(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return headers and codes of an integer format."""
    most, (per_spread, per_reach) = 2**bits - 1, needs(bits)
    # Adding zero: whether the least of zero and negative zero is the one or the other is left open.
    low, high = blocks.amin(1, keepdim=True) + 0.0, blocks.amax(1, keepdim=True) + 0.0
    need = torch.maximum((high - low) * per_spread, low.abs() * per_reach)
    finite = need <= MOST_SCALE
    blocks, low, need = (torch.where(finite, values, 0.0) for values in (blocks, low, need))
    scale = _round_up(need, 20).clamp(min=LEAST_SCALE)
    inverse, step = _refine(1 / scale, scale), scale * (most / STEPS)
    offset = (low * inverse * steps_of(bits)).floor()
    offset = torch.where(offset * step > low, offset - 1, offset)  # the quotient was rounded
    code = torch.where(need > 0, (scale.view(torch.int32) >> 20) - SCALE_CODES, 0)
    headers = torch.where(finite, (offset.int() & 127) << 9 | code, LOST).flatten().long()
    u = dither(headers, blocks.shape[1], bits)
    codes = ((blocks - offset * step) * inverse + (u + 2.0**bits)).floor() - 2.0**bits
    return headers, codes.long()


def _scale_and_middle(headers: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the scale of blocks with ``headers`` int32, and ``base + scale/2``, ``[nnz, 1]`` each."""
    code, offset = headers & 511, headers >> 9
    scale = ((code + SCALE_CODES) << 20).view(torch.float32)
    scale = torch.where(code == 0, 0.0, torch.where(code == LOST, torch.nan, scale))
    middle = scale * ((offset * (2**bits - 1) + STEPS // 2).float() * (1 / STEPS))
    return scale[:, None], middle[:, None]


def _fp8(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return headers, the upper halves of the scales' bits, and codes."""
    finite = blocks.isfinite().all(1, keepdim=True)
    safe = torch.where(finite, blocks, 0.0)
    scale = _round_up(safe.abs().amax(1, keepdim=True) * inverse_of(FP8_MAX), 16).clamp(min=FP8_LEAST_SCALE)
    inverse = _refine(1 / scale, scale)
    # Rounded to 2^-29, as kernels do, which take the codes from the bits of tiny numbers. A product may exceed FP8_MAX
    # by its rounding, which the next one undoes.
    tiny = (safe * inverse) * FP8_TINY
    codes = (tiny / FP8_TINY).to(torch.float8_e4m3fn).view(torch.uint8)
    headers = torch.where(finite, scale, torch.nan).flatten().view(torch.int32) >> 16
    return headers, codes.long()


def _refine(inverse: Tensor, scale: Tensor) -> Tensor:
    """Return the inverse of ``scale``, which bf16 has, from one that is off by up to 8 units in the last place.

    Rounded to 15 bits, all of these are the same; both products have 24 bits at most, so that they are exact.
    """
    rounded = ((inverse.view(torch.int32) + 0x100) & -0x200).view(torch.float32)
    return rounded + rounded * (1 - scale * rounded)


def _round_up(x: Tensor, places: int) -> Tensor:
    """Return finite fp32 ``x``, not negative, rounded up to a number whose last ``places`` bits are zero."""
    bits: Tensor = (x.view(torch.int32) + (2**places - 1)) & -(2**places)
    return bits.view(torch.float32)


def join(codes: Tensor, bits: int) -> Tensor:
    """Return codes ``[nnz, b]`` of ``bits`` bits as bytes, lowest first."""
    each = 8 // bits
    padded = F.pad(codes, (0, -codes.shape[1] % each)).reshape(len(codes), -(-codes.shape[1] // each), each)
    joined: Tensor = (padded << (bits * torch.arange(each, device=codes.device))).sum(-1)
    return joined.to(torch.uint8)


def split(joined: Tensor, bits: int, count: int) -> Tensor:
    """Undo ``join``: ``[nnz, bytes]`` to ``count`` codes."""
    shifts = bits * torch.arange(8 // bits, device=joined.device)
    codes: Tensor = (joined.long().unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.flatten(1)[:, :count]
