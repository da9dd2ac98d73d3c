"""Unpack: from kept blocks back to the dense tensor, zeros included, in one pass.

Bytes moved: the values, bitmap and offsets once, and the dense tensor once. A program handles one run of 128 blocks. It
finds the kept ones and their places from bitmap and offsets, and writes the whole tile. Quantized values cost
arithmetic, which no lane should spend on a dropped block: there a program first writes zeros to the dropped blocks, and
then finds the kept ones by their ranks (see ``places``). If no block is dropped, it decodes the whole tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_actprune.codec.blocks import RUN_BLOCKS, WORD_BLOCKS, ceil_div
from lightning_actprune.kernels.formats import dequantize_tile, encode_format, tile_width
from lightning_actprune.kernels.launch import Launch
from lightning_actprune.kernels.places import (
    RUN,
    blocks_of_lanes,
    choose_turns,
    count_kept,
    is_kept,
    kept_places,
    kept_words,
    lanes_of_ranks,
    run_of,
    run_tile,
    stride_unit,
)


@triton.jit
def unpack_kernel(
    values_ptr, bitmap_ptr, offsets_ptr, out_ptr, stride_outer, stride_inner, inner, samples, rows, blocks, words, runs,
    nnz, length: tl.constexpr, columns: tl.constexpr, UNIT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, FLAT: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Write one run of blocks per program.

    ``values_ptr: [nnz, B]``, or the bytes of ``nnz`` blocks; ``bitmap_ptr: [S, words]`` and ``offsets_ptr: [S, runs]``,
    int32; ``out_ptr``: row ``r`` starts at ``(r // inner, r % inner)`` by its two strides. Quantized blocks are all
    blocks of one sample in order; ``unpack_kept_kernel`` reads them where some are dropped. ``FLAT``: rows of whole
    blocks follow each other in memory.
    """
    if FORMAT:
        n = tl.program_id(0) * RUN + tl.arange(0, RUN)
        exists = n < blocks
        s, kept, place = n * 0, exists, n
    else:
        s, n, exists, kept, place = kept_places(bitmap_ptr, offsets_ptr, samples, blocks, words, runs, LANES)
    if FLAT:
        row, column = (s * blocks + n).to(tl.int64) * B, n * 0
    else:
        row = _row_start(s * rows + n // columns, stride_outer, stride_inner, inner, UNIT)
        column = n % columns * B
    for piece in range(0, B, BLOCK):
        e = piece + tl.arange(0, BLOCK)
        block = (e < B)[None, :]
        if FORMAT:
            x = dequantize_tile(values_ptr, nnz, place, kept, piece, B, BLOCK, FORMAT, True)
            x = x.to(out_ptr.dtype.element_ty)
        else:
            x = tl.load(
                values_ptr + place.to(tl.int64)[:, None] * B + e[None, :], mask=kept[:, None] & block, other=0.0
            )
        columns_of = column[:, None] + e[None, :]
        inside = exists[:, None] & block & (FLAT | (columns_of < length))
        tl.store(out_ptr + row[:, None] + columns_of, x, mask=inside)


@triton.jit
def unpack_kept_kernel(
    values_ptr, bitmap_ptr, offsets_ptr, out_ptr, stride_outer, stride_inner, inner, samples, rows, blocks, words, runs,
    nnz, length: tl.constexpr, columns: tl.constexpr, UNIT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Write one run of quantized blocks with ``PARTS`` programs; pointers as in ``unpack_kernel``.

    Each program writes zeros to its part of the dropped blocks, and then kept ones, ``TILE`` at a time.
    """
    part = tl.program_id(0) % PARTS
    first, run = run_of(tl.program_id(0) // PARTS, runs, LANES)
    w0, w1, w2, w3 = kept_words(bitmap_ptr, first, run, samples, words, LANES)
    place, count = tl.load(offsets_ptr + first.to(tl.int64) * runs + run), count_kept(w0, w1, w2, w3)

    # 1024 zeros at a time: in unaligned rows each has an address and a mask in registers.
    PIECE: tl.constexpr = BLOCK if BLOCK < 64 else 64
    ZEROED: tl.constexpr = RUN // PARTS if RUN // PARTS * PIECE < 1024 else 1024 // PIECE
    zeros = tl.zeros([ZEROED, PIECE], out_ptr.dtype.element_ty)
    for start in range(part * (RUN // PARTS), (part + 1) * (RUN // PARTS), ZEROED):
        lane = start + tl.arange(0, ZEROED)
        s, n = blocks_of_lanes(first, run, lane, LANES)
        dropped = (s < samples) & (n < blocks) & ~is_kept(lane, w0, w1, w2, w3)
        row = _row_start(s * rows + n // columns, stride_outer, stride_inner, inner, UNIT)
        for piece in range(0, B, PIECE):
            _store_blocks(out_ptr, row, n % columns, dropped, zeros, piece, length, B)

    for start in range(part * TILE, count, PARTS * TILE):
        p = start + tl.arange(0, TILE)
        x = dequantize_tile(values_ptr, nnz, place + p, p < count, 0, B, BLOCK, FORMAT)
        s_kept, n_kept = blocks_of_lanes(first, run, lanes_of_ranks(p, w0, w1, w2, w3), LANES)
        row_kept = _row_start(s_kept * rows + n_kept // columns, stride_outer, stride_inner, inner, UNIT)
        _store_blocks(out_ptr, row_kept, n_kept % columns, p < count, x.to(out_ptr.dtype.element_ty), 0, length, B)


@triton.jit
def _row_start(r, stride_outer, stride_inner, inner, UNIT: tl.constexpr):
    """Return the first value of each row ``r``."""
    return (r // inner).to(tl.int64) * stride_outer * UNIT + (r % inner).to(tl.int64) * stride_inner * UNIT


@triton.jit
def _store_blocks(out_ptr, row, column, exist, x, first, length: tl.constexpr, B: tl.constexpr):
    """Write ``x [R, BLOCK]``, values of blocks from ``first`` on, to rows at ``row`` and block columns ``column``."""
    e = first + tl.arange(0, x.shape[1])
    columns = column[:, None] * B + e[None, :]
    tl.store(out_ptr + row[:, None] + columns, x, mask=exist[:, None] & (columns < length) & (e < B)[None, :])


def unpack_launch(
    samples: int,
    kept: int,
    shape: tuple[int, int, int],
    features_first: bool,
    block_size: int,
    bits: int,
    device: torch.device,
) -> Launch:
    """Return the launch that writes the pruned tensor, given values, bitmap and offsets, and memory for it.

    The compiled kernel that it keeps also depends on the dtype of the tensor, and on which of those that are read start
    at a multiple of 16 bytes; the one that is written always does.

    Args:
        samples: Samples within which blocks compete; 0 if all blocks are stored, without bitmap and offsets.
        kept: Stored blocks of all samples if they are quantized, else 0: then nothing depends on their number.
        shape: ``[batch, rows, length]`` of the pruned tensor.
        features_first: Whether it is written as ``[rows, batch, length]``.
        block_size: Values per block.
        bits: Bits of a stored value, 0 for unchanged values.
        device: Where all tensors are.
    """
    everything, samples = samples == 0, max(samples, 1)
    batch, inner, length = shape
    columns = ceil_div(length, block_size)
    rows = batch * inner // samples
    blocks = rows * columns
    strides = (length, batch * length) if features_first else (inner * length, length)
    words, runs = ceil_div(blocks, WORD_BLOCKS), ceil_div(blocks, RUN_BLOCKS)
    unit = stride_unit(*strides)
    scalars = (strides[0] // unit, strides[1] // unit, inner, samples, rows, blocks, words, runs, kept)
    grid, tile, options = run_tile(samples, blocks, block_size)
    encoded = encode_format(bits, block_size)
    if not encoded or everything:
        tile = (block_size, min(64, tile_width(block_size)), tile[2]) if encoded else tile
        flat = length % block_size == 0 and not features_first and samples * blocks < 2**31
        return Launch(unpack_kernel, grid, *scalars, length, columns, unit, *tile, flat, encoded, **options)
    if not features_first:  # rows follow each other; inner = 1 saves the kernel two divisions a block
        scalars = (length // unit, length // unit, 1, *scalars[3:])
    turns = choose_turns(tile_width(block_size), RUN_BLOCKS * kept / max(1, samples * blocks))
    tiles = block_size, tile_width(block_size), turns.tile, turns.parts, tile[2], encoded
    grid, options = (grid[0] * turns.parts,), {"num_warps": turns.warps}
    return Launch(unpack_kept_kernel, grid, *scalars, length, columns, unit, *tiles, **options)
