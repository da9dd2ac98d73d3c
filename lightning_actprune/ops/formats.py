r"""How the values of a kept block are stored: as they are, or in few bits each, with a scale per block.

``same``
    the values in their own type: pruning alone, the method of arXiv:2311.16883.

``int8``, ``int4``, ``int3``, ``int2`` (v bits)
    x_e ~ offset + scale q_e with q_e in 0 .. 2^v - 1, scale and offset in bf16::

        offset = min x rounded down          scale = (max x - offset) / (2^v - 1) rounded up
        q_e    = floor((x_e - offset) / scale + u_e),  u_e uniform in [0, 1)

    Rounding is stochastic, hence unbiased: E[offset + scale q_e] = x_e, since both are rounded outwards before. Errors
    of many rows then cancel in the weight gradient, where rounding to nearest would leave a bias.

``fp8``
    x_e ~ scale e_e with e_e in fp8 (e4m3, largest 448), rounded to nearest, and scale = max |x| / 448 in bf16, rounded
    up. No offset.

The random numbers come from the block itself, so there is no generator to seed, to save or to advance: the same input
gives the same bytes, in any process, after a resumed checkpoint, under ``torch.compile`` and in a replayed CUDA graph.
With H the 32 bits of scale and offset as they are stored, and p the place of the block among the kept ones::

    h   = mix(H + p A)       u_e = ((h xor e phi) + 1/2) / 2^k, of h and e phi the highest k = 20 - v bits

modulo 2^32; ``mix`` is a 32-bit finalizer (constants: C. Wellons, "lowbias32"; its last step, which changes the lower
half, is left out), and phi the golden ratio as a fraction of 2^32. Each u_e is uniform over blocks, and blocks are
independent of each other, which is what matters: a weight gradient adds over them. Equal blocks, of padding tokens say,
differ in their place. A place sees another dither in the next step, since extremes change from step to step; as long as
those of a block do not, neither does its dither. Within a block the u_e depend on each other, which no sum over rows
can see.

What is computed is chosen for its number of instructions, and such that no order of operations is left open. A multiple
of 2^-k and a half is neither 0 nor 1: the sum of quotient and u_e stays below 2^v even where three roundings (inverse
of the scale, scale, product) were upwards, so that no code has to be clamped, and with 2^v added v bits of an fp32
number are the code. The inverse of the scale is the same whichever way 1 / scale was rounded (``_refine``).

A block with a NaN or Inf is NaN when it is read again: an overflow still reaches the weight gradient. So is, in the
integer formats, a block whose values lie 2^126 (9e37) or more from each other.

A stored block is a row of bytes: scale, offset (not for fp8), then the codes of all values, lowest bits first, filled
up to an even number. Three bits are two planes, one with the lower two bits of each code and one with the highest.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MASK = 0xFFFFFFFF
PLACE, GOLDEN = 0x85EBCA6B, 0x9E3779B9
MIX = (16, 0x7FEB352D, 15, 0x846CA68B)
DITHER_BITS = 20
"""Bits of a code and of its dither together."""
FP8_MAX = 448.0
LEAST_SCALE = 2.0**-126
"""Least scale: below, its inverse is no fp32 number."""
MOST_SPREAD = 2.0**126
"""Bound on the distance of values: above, the inverse of the scale is no normal fp32 number."""


class ValueFormat(NamedTuple):
    """A way to store the values of a block.

    Args:
        name: How it is asked for.
        planes: Bits of each plane of codes, lowest first; empty for values stored as they are.
        header: Bytes of scale and offset.
    """

    name: str
    planes: tuple[int, ...]
    header: int

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return sum(self.planes)

    def row_bytes(self, block_size: int, itemsize: int) -> int:
        """Return the bytes of a stored block."""
        if not self.planes:
            return block_size * itemsize
        codes = sum(plane_bytes(block_size, bits) for bits in self.planes)
        return self.header + codes + codes % 2


def plane_bytes(block_size: int, bits: int) -> int:
    """Return the bytes of a plane of so many bits of each code."""
    return -(-block_size * bits // 8)


FORMATS = {
    made.name: made
    for made in (
        ValueFormat("same", (), 0),
        ValueFormat("fp8", (8,), 2),
        ValueFormat("int8", (8,), 4),
        ValueFormat("int4", (4,), 4),
        ValueFormat("int3", (2, 1), 4),
        ValueFormat("int2", (2,), 4),
    )
}


def quantize(blocks: Tensor, value_format: str) -> Tensor:
    """Return ``blocks [nnz, b]``, in the order of their places, as rows of bytes ``uint8 [nnz, row_bytes]``."""
    made = FORMATS[value_format]
    if not len(blocks):
        return blocks.new_empty(0, made.row_bytes(blocks.shape[1], 0), dtype=torch.uint8)
    wide = blocks.float()
    header, codes = _fp8(wide) if value_format == "fp8" else _integers(wide, made.bits)
    parts = [header]
    for bits in made.planes:
        parts.append(_join(codes & (2**bits - 1), bits))
        codes = codes >> bits
    row = torch.cat(parts, 1)
    return F.pad(row, (0, made.row_bytes(blocks.shape[1], 0) - row.shape[1]))


def dequantize(rows: Tensor, block_size: int, value_format: str, dtype: torch.dtype) -> Tensor:
    """Return the values ``[nnz, block_size]`` of stored blocks in ``dtype``."""
    made = FORMATS[value_format]
    if not len(rows):
        return rows.new_empty(0, block_size, dtype=dtype)
    header = rows[:, : made.header].contiguous().view(torch.bfloat16).float()
    codes, start, shift = torch.zeros((), dtype=torch.int64, device=rows.device), made.header, 0
    for bits in made.planes:
        size = plane_bytes(block_size, bits)
        codes = codes + (_split(rows[:, start : start + size], bits, block_size) << shift)
        start, shift = start + size, shift + bits
    if value_format == "fp8":
        return (header * codes.to(torch.uint8).view(torch.float8_e4m3fn).float()).to(dtype)
    return (header[:, 1:] + header[:, :1] * codes.float()).to(dtype)


def dither(headers: Tensor, block_size: int, bits: int) -> Tensor:
    """Return the uniform numbers ``u [nnz, block_size]`` of blocks for codes of so many bits.

    ``headers`` are their 32-bit numbers ``H [nnz]`` as int64, in the order of their places.
    """
    places, e = (torch.arange(count, device=headers.device) for count in (len(headers), block_size))
    h = mix((headers + places * PLACE) & MASK)
    kept = DITHER_BITS - bits
    return (((h[:, None] ^ (e * GOLDEN & MASK)) >> (32 - kept)).float() + 0.5) * 2.0**-kept


def mix(h: Tensor) -> Tensor:
    """Return a hash, good in its highest 16 bits and more, of 32-bit numbers held as int64."""
    a, first, b, second = MIX
    h = (h ^ (h >> a)) * first & MASK
    return (h ^ (h >> b)) * second & MASK


def inverse_of(most: float) -> float:
    """Return ``1 / most`` cut off to fp32: then a multiple of ``most`` gives no more than the exact quotient."""
    fraction, exponent = math.frexp(1 / most)
    return math.ldexp(math.floor(math.ldexp(fraction, 24)), exponent - 24)


def _integers(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return header and codes of an integer format."""
    most = 2**bits - 1
    # Adding zero: whether the least of zero and negative zero is the one or the other is left open.
    low, high = blocks.amin(1, keepdim=True) + 0.0, blocks.amax(1, keepdim=True) + 0.0
    offset = _bf16(low, up=False)
    finite = high - offset < MOST_SPREAD
    safe, offset, high = (torch.where(finite, values, 0.0) for values in (blocks, offset, high))
    scale, inverse = _scale(high - offset, most)
    header = _header(torch.where(finite, scale, torch.nan), offset)
    u = dither(header.view(torch.int32).flatten().long() & MASK, blocks.shape[1], bits)
    codes = ((safe - offset) * inverse + (u + 2.0**bits)).floor() - 2.0**bits
    return header, codes.long()


def _fp8(blocks: Tensor) -> tuple[Tensor, Tensor]:
    finite = blocks.isfinite().all(1, keepdim=True)
    safe = torch.where(finite, blocks, 0.0)
    scale, inverse = _scale(safe.abs().amax(1, keepdim=True), FP8_MAX)
    codes = (safe * inverse).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return _header(torch.where(finite, scale, torch.nan)), codes.long()


def _header(*numbers: Tensor) -> Tensor:
    """Return fp32 numbers ``[nnz, 1]`` that bf16 has as bytes: by their bits, so that a NaN is the same everywhere."""
    halves = (torch.cat(numbers, 1).view(torch.int32) >> 16).to(torch.int16)
    return halves.flatten().view(torch.uint8).view(halves.shape[0], 2 * halves.shape[1])


def _scale(spread: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """Return the scale of values that reach so far, and its inverse."""
    scale = _bf16(spread * inverse_of(most), up=True).clamp(min=LEAST_SCALE)
    return scale, _refine(1 / scale, scale)


def _refine(inverse: Tensor, scale: Tensor) -> Tensor:
    """Return the inverse of ``scale``, which bf16 has, from one that is off by up to 8 units in the last place.

    Rounded to 15 bits, all of these are the same; both products have 24 bits at most, so that they are exact.
    """
    rounded = ((inverse.view(torch.int32) + 0x100) & -0x200).view(torch.float32)
    return rounded + rounded * (1 - scale * rounded)


def _bf16(x: Tensor, up: bool) -> Tensor:
    """Return finite fp32 ``x`` rounded up or down to a value that bf16 has."""
    away = (x < 0) != up
    bits = x.view(torch.int32)
    bits = torch.where(away, bits + 0xFFFF, bits) & -0x10000
    return bits.view(torch.float32)


def _join(codes: Tensor, bits: int) -> Tensor:
    """Return codes ``[nnz, b]`` of ``bits`` bits as bytes, lowest first."""
    each = 8 // bits
    padded = F.pad(codes, (0, -codes.shape[1] % each)).reshape(len(codes), -(-codes.shape[1] // each), each)
    joined: Tensor = (padded << (bits * torch.arange(each, device=codes.device))).sum(-1)
    return joined.to(torch.uint8)


def _split(joined: Tensor, bits: int, count: int) -> Tensor:
    """Undo ``_join``: ``[nnz, bytes]`` to ``count`` codes."""
    shifts = bits * torch.arange(8 // bits, device=joined.device)
    codes: Tensor = (joined.long().unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.flatten(1)[:, :count]
