r"""Store the values of a kept block: in their own type, or quantized to a few bits each with a scale per block.

0 bits
    the values in their own type: pruning alone, the method of arXiv:2311.16883.

8, 4, 3 or 2 bits (v bits, m = 2^v - 1)
    Subtractive dither: with u_e uniform in [0, 1), which is not stored because the reader computes it again::

        q_e = floor((x_e - base) / scale + u_e)      in 0 .. m
        x_e ~ base + scale (q_e + 1/2 - u_e)

    The error, scale times 1/2 - frac(.. + u_e), is uniform in +-scale/2 for any x_e. It is unbiased, so errors of many
    rows cancel in the weight gradient, and its variance of scale^2/12 is half the average variance of stochastic
    rounding. Dequantized values may exceed the range of the block by up to scale/2.

    Scale and base take 16 bits, a code k of 9 and a code o of 7::

        scale = 2^-40 (1 + (k' mod 8)/8) 2^floor(k'/8),  k' = k - 1        3 bits of mantissa, up to 1.36e7
        base  = o step,  step = scale m / 32,  o in -64 .. 63

        need  = max((high - low) 32/31, |low| 32/63) / m                   of the block's extremes low and high
        k     : need rounded up;  0 if need is 0: all values are 0 (or below 1e-42), and are read as 0
        o     = floor(low / step)

    The range of the codes has 32 steps, so base is less than a step below low; the factor 32/31 leaves room for that.
    If a block is further from zero than twice its spread, its scale is widened until ``low`` is within 63 steps of
    zero. The error then grows to about |low| / (2 m), and stays unbiased.

The random numbers are computed from the block itself, so there is no generator to seed, save or advance. The same input
gives the same bytes in any process, after a resumed checkpoint, under ``torch.compile`` and in a replayed CUDA graph.
With H the 16 bits of k and o as they are stored, and p the place of the block among the kept ones::

    h   = mix(2^16 H + p A)       u_e = ((h xor r(e)) + 1/2) / 2^n, of h and r(e) the highest n = 19 - v bits

modulo 2^32. ``mix`` is a 32-bit finalizer (constants: C. Wellons, "lowbias32"; without its last step, which changes the
lower half). r(e) has the bits of e in reverse order, lowest first, which spreads the u_e of a block evenly and costs a
kernel one instruction per value. All steps are one to one: two places less than 2^16 apart never share an h, whatever
their blocks contain. Each u_e is uniform over blocks and blocks are independent of each other; that suffices, because a
weight gradient sums over blocks. Equal blocks, of padding tokens for example, differ in their place. In the next step a
place has another dither if its scale or base has changed; if not, its error still moves with its values. Within a block
the u_e depend on each other, which a sum over rows cannot show.

The arithmetic is chosen for few instructions, and leaves no order of operations open. u_e is an odd multiple of
2^-(n+1), so it is neither 0 nor 1. The sum of quotient and u_e therefore stays between 0 and 2^v even if all roundings
go one way (``need`` is 2^-20 larger than necessary), and no code has to be clamped. With 2^v added, v bits of the fp32
number are the code. The inverse of the scale is the same for either rounding of 1 / scale (``_refine``). A reader adds
``base + scale/2``, 19 bits, and ``scale (q_e - u_e)``, 4 times 20 bits: both are exact, and their sum is rounded once.

A block with NaN or Inf is read as NaN (k = 511), so an overflow still reaches the weight gradient. The same holds for a
block that would need a larger scale than there is: if its values are 4e7 (2 bits) to 3e9 (8 bits) apart, or 8e7 to 7e9
away from zero.

Stored blocks take ``row_bytes`` each. Memory holds planes of codes, lowest bits of a code first, and then the headers
of all blocks, 16 bits each; this keeps both aligned. In a plane, each block starts at a byte of its own. Three bits are
two planes, one with the lower two bits of each code and one with the highest. If the codes of a block are an odd number
of bytes, one zero byte per block is inserted before the headers.

Everything here is plain torch that a compiler can trace, with fixed or symbolic sizes, and compiled code stores the
same bytes. A compiler may fuse a product and a sum and round once instead of twice; so either the product is exact, or
a ``torch.where`` separates the two. Numbers that exist once per block are written to memory (``_in_memory``): fused
code would otherwise compute them again for each value, where the hash alone costs more than all else. Codes are written
with at most a byte each.
"""

from __future__ import annotations

import struct
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.compiler import is_compiling

MASK = 0xFFFFFFFF
PLACE = 0x85EBCA6B
SIGNED_PLACE = PLACE - 2**32
"""``PLACE`` modulo 2^32 as a signed 32-bit number: compilers multiply indices in 32 bits."""
MIX = (16, 0x7FEB352D, 15, 0x846CA68B)
OTHER = 0x9E3779B1
"""Makes other numbers of those that dithers are computed from."""
DITHER_BITS = 19
"""Bits of a code plus its dither: with the half and the 4 bits of a scale, a product has the 24 bits of fp32."""
SCALE_CODES = 695
"""The highest 12 bits of the fp32 scale with code k are k + 695."""
LOST = 511
"""Header, and scale code, of a block that is read as NaN."""
LEAST_SCALE, MOST_SCALE = 2.0**-40, 1.625 * 2.0**23
"""Scales with the codes 1 and 510."""
STEPS = 32
"""Steps of the base in the range of the codes."""
HEADER_BYTES = 2
PLANES = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}
"""The bits of each plane, lowest first, by the bits of a code."""
PIECE = 2**20
"""Values that are read at once with other errors: plain torch takes many times their memory."""
_reading = threading.local()


def fp32(x: float) -> float:
    """Return ``x`` rounded to fp32."""
    rounded: float = struct.unpack("f", struct.pack("f", x))[0]
    return rounded


_LEAST = {bits: STEPS / (2**bits - 1) * (1 + 2.0**-20) for bits in range(1, 9)}
NEEDS = {bits: (fp32(least / (STEPS - 1)), fp32(least / (2 * STEPS - 1))) for bits, least in _LEAST.items()}
"""The least scale per spread of a block, and per distance of its low from zero, by the bits of a code."""
STEPS_OF = {bits: fp32(STEPS / (2**bits - 1)) for bits in range(1, 9)}
"""The steps of the base in a scale, by the bits of a code."""


def plane_bytes(block_size: int, bits: int) -> int:
    """Return the bytes of a block in a plane that has ``bits`` bits of each code."""
    return -(-block_size * bits // 8)


def row_bytes(block_size: int, bits: int, itemsize: int) -> int:
    """Return the bytes of a stored block; ``itemsize`` is the size of a value that is not quantized (``bits`` 0)."""
    if not bits:
        return block_size * itemsize
    codes = sum(plane_bytes(block_size, plane) for plane in PLANES[bits])
    return HEADER_BYTES + codes + codes % 2


def scale_of(low: Tensor, high: Tensor, bits: int) -> Tensor:
    """Return the scales of blocks with these extremes, fp32; NaN for a block that is read as NaN."""
    need = _need(low, high, bits)
    scale = _round_up(need.clamp(max=MOST_SCALE)).clamp(min=LEAST_SCALE)
    return torch.where(need <= MOST_SCALE, torch.where(need > 0, scale, 0.0), torch.nan)


def quantize(blocks: Tensor, bits: int) -> Tensor:
    """Return ``blocks [nnz, b]``, in the order of their places, as planes of bytes: ``uint8 [nnz, row_bytes]``."""
    count, size = blocks.shape
    headers, codes = _codes(blocks.float(), bits)
    row, used = row_bytes(size, bits, 0), sum(plane_bytes(size, plane) for plane in PLANES[bits])
    filling = codes.new_zeros(count * (row - HEADER_BYTES - used))
    pairs = torch.cat([headers & 255, headers >> 8], 1).to(torch.uint8)
    return torch.cat([*join_planes(codes, PLANES[bits]), filling, pairs.flatten()]).view(count, row)


def dequantize(values: Tensor, block_size: int, bits: int, dtype: torch.dtype) -> Tensor:
    """Return the values ``[nnz, block_size]`` in ``dtype`` of stored blocks, contiguous ``uint8 [nnz, row_bytes]``."""
    if not errs_again(bits, len(values) * block_size):
        return _read(values, block_size, bits, dtype)
    planes = [plane_bytes(block_size, plane) for plane in PLANES[bits]]
    parts = [*planes, values.shape[1] - HEADER_BYTES - sum(planes), HEADER_BYTES]
    dense = values.new_empty(len(values), block_size, dtype=dtype)
    for first, piece in cut(values.flatten(), len(values), parts, max(1, PIECE // block_size)):
        read = _read(piece.view(-1, values.shape[1]), block_size, bits, dtype, first=first)
        dense[first : first + len(read)] = read
    return dense


def cut(joined: Tensor, count: int, parts: Sequence[int], most: int) -> Iterator[tuple[int, Tensor]]:
    """Yield pieces of bytes in which each part has some bytes for each of ``count`` things, and where they begin.

    Args:
        joined: The parts, one behind the other.
        count: Number of things.
        parts: Bytes of each part for one.
        most: Things in a piece, at most.
    """
    for first in range(0, count, most):
        last, start, pieces = min(first + most, count), 0, []
        for size in parts:
            pieces.append(joined[start + first * size : start + last * size])
            start += count * size
        yield first, torch.cat(pieces)


def _read(values: Tensor, block_size: int, bits: int, dtype: torch.dtype, first: int | None = None) -> Tensor:
    """Return stored values, with one more error if ``first`` says how many blocks are before these."""
    count, flat = len(values), values.flatten()
    codes = split_planes(flat, count, block_size, PLANES[bits]) << DITHER_BITS - bits
    pairs = flat[count * (values.shape[1] - HEADER_BYTES) :].view(count, HEADER_BYTES).int()
    headers = pairs[:, :1] | pairs[:, 1:] << 8
    step, middle = _in_memory(*_step_and_middle(headers, bits))
    offsets = codes - dither(headers, block_size, bits, first or 0)
    if first is not None:
        offsets = offsets + dither(headers, block_size, bits, first, again=True) - 2 ** (DITHER_BITS - bits - 1)
    return (middle + step * (offsets.float() - 0.5)).to(dtype)


@contextmanager
def other_errors(counts: Counter[int], only: int | None = None) -> Iterator[None]:
    """In this thread, stored values that plain torch reads err once more: by as much, and independently.

    Args:
        counts: Gets the number of values that were read so by their bits.
        only: Bits of the values that do; by default all.
    """
    before, _reading.how = getattr(_reading, "how", None), (counts, only)
    try:
        yield
    finally:
        _reading.how = before


def errs_again(bits: int, count: int) -> bool:
    """Return True if values err once more (``other_errors``), and count them."""
    how = None if is_compiling() else getattr(_reading, "how", None)
    if how is None or how[1] not in (None, bits):
        return False
    how[0][bits] += count
    return True


def dither(headers: Tensor, block_size: int, bits: int, first: int = 0, again: bool = False) -> Tensor:
    """Return ``2^n u - 1/2`` of blocks for codes of ``bits`` bits, int32 ``[nnz, block_size]``, with u uniform.

    ``headers`` are the 16-bit numbers ``H [nnz, 1]`` of the blocks, not negative, in the order of their places, of
    which ``first`` is the first. ``again``: as in ``spread_dither``.
    """
    kept, places = DITHER_BITS - bits, torch.arange(first, first + len(headers), device=headers.device)
    return spread_dither((headers.flatten().long() << 16) + places * SIGNED_PLACE, block_size, kept, again)


def spread_dither(numbers: Tensor, block_size: int, places: int, again: bool = False) -> Tensor:
    """Return ``2^places u - 1/2``, int32 ``[nnz, block_size]``, of blocks with the int64 ``numbers [nnz]``.

    They are spread evenly over a block. Errors are not, since a value may lie anywhere in its step. So with ``again``,
    numbers are independent, of each other and of those without it.
    """
    if again:
        each = mix(numbers & MASK ^ OTHER)[:, None] + torch.arange(block_size, device=numbers.device) * PLACE
        return (mix(each & MASK) >> (32 - places)).int()
    h = mix(numbers & MASK) >> (32 - places)
    turned = _reversed(torch.arange(block_size, device=numbers.device), places)
    # Lower halves of 64-bit numbers. A view of another width needs the numbers in memory; if a compiler fused all of
    # this, it would compute the hash again for each value of a block.
    h, turned = (wide.view(torch.int32)[::2] for wide in (h, turned))
    return h[:, None] ^ turned


def mix(h: Tensor) -> Tensor:
    """Return a hash of 32-bit numbers in int64; at least its highest 16 bits are well mixed."""
    a, first, b, second = MIX
    h = (h ^ (h >> a)) * first & MASK
    return (h ^ (h >> b)) * second & MASK


def _codes(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return headers ``[nnz, 1]`` in 0 .. 2^16 - 1, int32, and codes ``[nnz, b]``, uint8, of fp32 blocks."""
    most = 2**bits - 1
    # Adding zero turns -0 into 0: torch leaves open which of the two is the smaller one.
    low, high = blocks.amin(1, keepdim=True) + 0.0, blocks.amax(1, keepdim=True) + 0.0
    need = _need(low, high, bits)
    finite = need <= MOST_SCALE
    low, need = torch.where(finite, low, 0.0), torch.where(finite, need, 0.0)
    scale = _round_up(need).clamp(min=LEAST_SCALE)
    inverse, step = _refine(1 / scale, scale), scale * (most / STEPS)
    offset = (low * inverse * STEPS_OF[bits]).floor()
    offset = torch.where(offset * step > low, offset - 1, offset)  # the quotient was rounded
    code = torch.where(need > 0, (scale.view(torch.int32) >> 20) - SCALE_CODES, 0)
    headers = torch.where(finite, (offset.int() & 127) << 9 | code, LOST)
    inverse, base = _in_memory(torch.where(finite, inverse, 0.0), offset * step)
    # `where` keeps a compiler from fusing the product with the sum below, which would round once instead of twice.
    quotients = torch.where(inverse > 0, (blocks - base) * inverse, 0.0)
    u = (dither(headers, blocks.shape[1], bits) + 2**DITHER_BITS).float() + 0.5
    codes = (quotients + u * 2.0 ** (bits - DITHER_BITS)).int() & most  # int() drops the fraction, the mask 2^bits
    return headers, codes.to(torch.uint8)


def _need(low: Tensor, high: Tensor, bits: int) -> Tensor:
    """Return the least scale of blocks with these extremes, fp32."""
    per_spread, per_reach = NEEDS[bits]
    return torch.maximum((high - low) * per_spread, low.abs() * per_reach)


def _in_memory(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return two fp32 numbers per block, ``[nnz, 1]`` each, by way of memory: views of another width are not fused."""
    low, high = (numbers.flatten().view(torch.int32).long() for numbers in (first, second))
    pairs = (low & MASK | high << 32).view(torch.float32).view(-1, 2)
    return pairs[:, :1], pairs[:, 1:]


def _step_and_middle(headers: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return ``2^-n scale`` and ``base + scale/2`` of blocks with ``headers``, ``[nnz, 1]`` each."""
    code, offset = headers & 511, ((headers >> 9) ^ 64) - 64
    scale = ((code + SCALE_CODES) << 20).view(torch.float32)
    scale = torch.where(code == 0, 0.0, torch.where(code == LOST, torch.nan, scale))
    middle = scale * ((offset * (2**bits - 1) + STEPS // 2).float() * (1 / STEPS))
    return scale * 2.0 ** (bits - DITHER_BITS), middle


def _refine(inverse: Tensor, scale: Tensor) -> Tensor:
    """Return the inverse of ``scale``, a bf16 number, from one that is off by up to 8 units in the last place.

    Rounded to 15 bits, all such inverses are equal. Both products have at most 24 bits, so they are exact.
    """
    rounded = ((inverse.view(torch.int32) + 0x100) & -0x200).view(torch.float32)
    return rounded + rounded * (1 - scale * rounded)


def _round_up(x: Tensor) -> Tensor:
    """Return finite fp32 ``x >= 0`` rounded up to a number with 3 bits of mantissa, whose last 20 bits are zero."""
    bits: Tensor = (x.view(torch.int32) + (2**20 - 1)) & -(2**20)
    return bits.view(torch.float32)


def _reversed(e: Tensor, width: int) -> Tensor:
    """Return the lowest 16 bits of ``e`` in reverse order: its lowest bit becomes the highest of ``width`` bits."""
    for by, mask in ((1, 0x5555), (2, 0x3333), (4, 0x0F0F), (8, 0x00FF)):
        e = (e >> by) & mask | (e & mask) << by
    return e >> (16 - width) if width < 16 else e << (width - 16)


def join_planes(codes: Tensor, planes: Sequence[int]) -> list[Tensor]:
    """Return the bytes of uint8 codes ``[nnz, b]``, plane by plane; ``planes`` has the bits of each, lowest first."""
    joined = []
    for bits in planes:
        joined.append(join(codes & (2**bits - 1), bits).flatten())
        codes = codes >> bits
    return joined


def split_planes(joined: Tensor, count: int, block_size: int, planes: Sequence[int]) -> Tensor:
    """Undo ``join_planes``; bytes after the last plane are ignored: int32 ``[count, block_size]``."""
    codes, start, place = joined.new_zeros((), dtype=torch.int32), 0, 0
    for bits in planes:
        size = plane_bytes(block_size, bits)
        plane = joined[start : start + count * size].view(count, size)
        codes = codes + (split(plane, bits, block_size) << place)
        start, place = start + count * size, place + bits
    return codes


def join(codes: Tensor, bits: int) -> Tensor:
    """Return uint8 codes ``[nnz, b]`` of ``bits`` bits packed into bytes, lowest first: ``[nnz, plane_bytes]``."""
    each = 8 // bits
    if each == 1:
        return codes
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % each))
    padded = padded.reshape(len(codes), plane_bytes(codes.shape[1], bits), each)
    return sum(padded[:, :, place] << bits * place for place in range(each))  # type: ignore[return-value]


def split(joined: Tensor, bits: int, count: int) -> Tensor:
    """Undo ``join``: bytes ``[nnz, plane_bytes]`` to int32 codes ``[nnz, count]``."""
    shifts = bits * torch.arange(8 // bits, dtype=torch.int32, device=joined.device)
    codes: Tensor = (joined.int().unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.flatten(1)[:, :count]
