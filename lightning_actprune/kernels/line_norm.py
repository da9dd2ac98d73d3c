"""Normalisation of lines, forward: ``[images, lines, length]`` in memory, see ``ops.normalize_lines``.

After ``line_statistics``, one pass over the flat memory normalises, writes the output and quantises. The lines of a
block follow from its place alone; where lengths and blocks fit, it has one, or one for each value, side by side.

Bytes moved per value of 16 bits with int4 in blocks of 32: 2 for the statistics, 2 + 2 + 0.56 after them (torch: 2 and
2 + 2). A ReLU that follows costs the same pass 0.125 more, its bits: behind what is stored of the values, whole bytes
for each block (a pass of its own: 2 + 2 + 0.125).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.kernels.formats import encode_format, values_layout, whole_blocks
from lightning_actprune.kernels.launch import Launch, aligned
from lightning_actprune.kernels.quantize import load_rows, quantize_tile
from lightning_actprune.ops.geometry import ceil_div


@triton.jit
def normalize_lines_kernel(
    x_ptr, statistics_ptr, weight_ptr, bias_ptr, y_ptr, values_ptr, count, nnz, lines, WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr, RELU: tl.constexpr, LINES: tl.constexpr, LENGTH: tl.constexpr, EXACT: tl.constexpr,
    B: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Write ``y`` and the normalised values in few bits of ``TILE`` of ``nnz`` blocks of ``count`` values.

    Of the statistics ``[2 or more, lines]``, mean and rstd are read. ``LINES`` is 0 for one image, whose lines the
    compiler need not know. ``EXACT``: the last block is whole. ``RELU``: negative values of ``y`` are zero.
    """
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exist = (place >= 0) & (place < nnz)  # of nearly 2^31 blocks, the last tile reaches beyond int32
    inside = inside_flat(place, exist, count, EXACT, B, BLOCK)
    line = lines_at(place, LINES, LENGTH, B, BLOCK)
    x = load_flat(x_ptr, place, exist, inside, EXACT, B, BLOCK).to(tl.float32)
    mean = per_line(statistics_ptr, line, exist, inside)
    x = (x - mean) * per_line(row_of(statistics_ptr, 1, lines, LINES), line, exist, inside)
    x = tl.where(inside, x, 0.0)
    y = x
    if WEIGHTED:
        y *= per_line(weight_ptr, line, exist, inside)
    if BIASED:
        y += per_line(bias_ptr, line, exist, inside)
    if RELU:
        higher = (y.to(y_ptr.dtype.element_ty).to(tl.float32) <= 0.0) == 0  # NaN stays NaN
        y = tl.where(higher, y, 0.0)
        store_bits(values_ptr, nnz, place, higher, exist, B, BLOCK, FORMAT)
    store_flat(y_ptr, y, place, inside, B, BLOCK)
    quantize_tile(x, values_ptr, nnz, place, exist, B, BLOCK, FORMAT)


@triton.jit
def lines_at(place, LINES: tl.constexpr, LENGTH: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
    """Return the line of each value of blocks, ``[R, BLOCK]``, or ``[R, 1]`` where no block has two."""
    e = tl.arange(0, BLOCK)[None, :]
    first = place.to(tl.int64) * B
    plane = first // LENGTH
    if LINES > 0:
        plane = (plane % LINES).to(tl.int32)
    if LENGTH % B == 0:
        line = plane[:, None]
    elif LENGTH == 1 and LINES > 0 and LINES % B == 0:
        line = plane[:, None] + e
    else:
        line = plane[:, None] + ((first % LENGTH).to(tl.int32)[:, None] + e) // LENGTH
        if LINES > 0:
            line = line % LINES
    return line


@triton.jit
def row_of(ptr, row: tl.constexpr, lines, LINES: tl.constexpr):
    """Return row ``row`` of a tensor ``[rows, lines]``; known to the compiler, the lines say whether it is aligned."""
    if LINES > 0:
        row_ptr = ptr + row * LINES
    else:
        row_ptr = ptr + tl.cast(lines, tl.int64) * row
    return row_ptr


@triton.jit
def per_line(ptr, line, exist, inside):
    """Return the fp32 number of each line; of what does not exist, zero."""
    mask = inside
    if line.shape[1] == 1:
        mask = exist[:, None]
    return tl.load(ptr + line, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def inside_flat(place, exist, count, EXACT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
    """Return which values of blocks there are, ``[R, BLOCK]``."""
    e = tl.arange(0, BLOCK)[None, :]
    inside = exist[:, None] & (e < B)
    if not EXACT:
        inside &= place.to(tl.int64)[:, None] * B + e < count
    return inside


@triton.jit
def load_flat(x_ptr, place, exist, inside, EXACT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
    """Return the values ``[R, BLOCK]`` of blocks of a flat tensor; not defined where not ``inside``."""
    first_ptr = x_ptr + place.to(tl.int64) * B
    if EXACT:
        return load_rows(first_ptr, place * 0, exist, B, B, BLOCK)
    return tl.load(first_ptr[:, None] + tl.arange(0, BLOCK)[None, :], mask=inside, other=0.0)


@triton.jit
def store_flat(y_ptr, y, place, inside, B: tl.constexpr, BLOCK: tl.constexpr):
    """Write the values of blocks to a flat tensor."""
    at = place.to(tl.int64)[:, None] * B + tl.arange(0, BLOCK)[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _bits_of(values_ptr, nnz, place, B: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    """Return pointers ``[R, units]`` to the bits of blocks, in units of 16 where these are whole, and which there are.

    They start at the first multiple of 16 bytes behind what is stored of ``nnz`` blocks, see ``bits_start``.
    """
    EACH: tl.constexpr = 16 if B % 16 == 0 else 8
    UNITS: tl.constexpr = (B + EACH - 1) // EACH
    start = (tl.cast(nnz, tl.int64) * (FORMAT >> 24) + 15) // 16
    bits_ptr = values_ptr + start * 16
    if EACH == 16:
        bits_ptr = bits_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    k = tl.arange(0, BLOCK // EACH)
    return bits_ptr + place.to(tl.int64)[:, None] * UNITS + k[None, :], (k < UNITS)[None, :]


@triton.jit
def store_bits(values_ptr, nnz, place, bits, exist, B: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    """Write a bit for each value of blocks, ``[R, BLOCK]``."""
    EACH: tl.constexpr = 16 if B % 16 == 0 else 8
    bits_ptr, inside = _bits_of(values_ptr, nnz, place, B, BLOCK, FORMAT)
    parts = tl.reshape(bits.to(tl.int32), [place.shape[0], BLOCK // EACH, EACH])
    joined = tl.sum(parts << tl.arange(0, EACH)[None, None, :], axis=2)
    tl.store(bits_ptr, joined.to(bits_ptr.dtype.element_ty), mask=inside & exist[:, None])


@triton.jit
def load_bits(values_ptr, nnz, place, exist, B: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    """Return the bits ``[R, BLOCK]`` of blocks as booleans."""
    EACH: tl.constexpr = 16 if B % 16 == 0 else 8
    bits_ptr, inside = _bits_of(values_ptr, nnz, place, B, BLOCK, FORMAT)
    joined = tl.load(bits_ptr, mask=inside & exist[:, None], other=0).to(tl.int32)
    bits = (joined[:, :, None] >> tl.arange(0, EACH)[None, None, :]) & 1
    return tl.reshape(bits, [place.shape[0], BLOCK]) != 0


def bits_start(blocks: int, row_bytes: int) -> int:
    """Return where the bits of a ReLU start, behind so many blocks."""
    return ceil_div(blocks * row_bytes, 16) * 16


def flat_constants(cut: tuple[int, int, int], block_size: int, value_format: str) -> dict[str, int | bool]:
    """Return the last compile-time constants of a kernel that goes through the flat memory."""
    images, lines, length = cut
    block, tile = whole_blocks(block_size)
    exact = images * lines * length % block_size == 0
    found = {"LINES": lines if images > 1 else 0, "LENGTH": length, "EXACT": exact, "B": block_size, "BLOCK": block}
    return found | {"TILE": tile, "FORMAT": encode_format(value_format, block_size)}


def flat_launch(
    kernel: object, cut: tuple[int, int, int], flags: tuple[bool, ...], block_size: int, value_format: str
) -> Launch:
    """Return the launch of such a kernel, whose numbers are the values, the blocks and the lines."""
    constants = flat_constants(cut, block_size, value_format)
    count = cut[0] * cut[1] * cut[2]
    blocks = ceil_div(count, block_size)
    grid = (ceil_div(blocks, int(constants["TILE"])),)
    lines = cut[1]
    return Launch(kernel, grid, count, blocks, lines, *flags, *constants.values(), num_warps=4)


@functools.lru_cache(maxsize=1024)
def _normalize_launch(key: object, *arguments: object) -> Launch:
    return flat_launch(normalize_lines_kernel, *arguments)  # type: ignore[arg-type]


def normalize(
    x: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    cut: tuple[int, int, int],
    block_size: int,
    value_format: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return ``y`` in ``dtype``, laid out as the dense ``x``, and the normalised values in few bits.

    ``statistics``: ``[2 or more, lines]``, mean and rstd first.
    """
    y = torch.empty_like(x, dtype=dtype)
    shape, kind = values_layout(ceil_div(x.numel(), block_size), block_size, encode_format(value_format, block_size))
    values = x.new_empty(shape, dtype=kind)
    given = [x, statistics, *[p for p in (weight, bias) if p is not None]]
    key = x.device, dtype, *[tensor.dtype for tensor in given], *aligned(*given)
    flags = weight is not None, bias is not None, False
    launch = _normalize_launch(key, tuple(cut), flags, block_size, value_format)
    launch(x, statistics, x if weight is None else weight, x if bias is None else bias, y, values)
    return y, values
