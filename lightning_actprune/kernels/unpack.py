"""Unpack: from kept blocks back to the dense tensor, zeros included, in one pass.

Each program handles one run of 128 blocks: it finds the kept ones and their places from bitmap and offsets, and writes
the whole tile. Values stored in few bits are taken apart on the way.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.kernels.formats import dequantize_tile, encode_format, tile_width
from lightning_actprune.kernels.keys import stride_unit
from lightning_actprune.kernels.launch import Launch, aligned
from lightning_actprune.kernels.pack import kept_places, run_tile
from lightning_actprune.kernels.select import RUN
from lightning_actprune.ops.geometry import RUN_BLOCKS, WORD_BLOCKS, ceil_div


@triton.jit
def unpack_kernel(
    values_ptr, bitmap_ptr, offsets_ptr, out_ptr, stride_outer, stride_inner, inner, samples, rows, blocks, words, runs,
    nnz, length: tl.constexpr, columns: tl.constexpr, UNIT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, FORMAT: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Write one run of blocks; row ``r`` of the tensor starts at ``(r // inner, r % inner)`` by its two strides.

    ``nnz`` is the number of stored blocks if these are in few bits. ``ALL``: of one sample, all in order.
    """
    if ALL:
        n = tl.program_id(0) * RUN + tl.arange(0, RUN)
        exists = n < blocks
        s, kept, place = n * 0, exists, n
    else:
        s, n, exists, kept, place = kept_places(bitmap_ptr, offsets_ptr, samples, blocks, words, runs, LANES)
    r = s * rows + n // columns
    start = (r // inner).to(tl.int64) * stride_outer * UNIT + (r % inner).to(tl.int64) * stride_inner * UNIT
    for piece in range(0, B, BLOCK):
        e = piece + tl.arange(0, BLOCK)
        block = (e < B)[None, :]
        if FORMAT:
            x = dequantize_tile(values_ptr, nnz, place, kept, piece, B, BLOCK, FORMAT)
            x = x.to(out_ptr.dtype.element_ty)
        else:
            x = tl.load(
                values_ptr + place.to(tl.int64)[:, None] * B + e[None, :], mask=kept[:, None] & block, other=0.0
            )
        column = (n % columns)[:, None] * B + e[None, :]
        tl.store(out_ptr + start[:, None] + column, x, mask=exists[:, None] & (column < length) & block)


@functools.lru_cache(maxsize=1024)
def _launch(
    samples: int, kept: int, shape: tuple[int, int, int], features_first: bool, block_size: int, value_format: str,
    *key: object,
) -> Launch:  # fmt: skip
    """Return the launch for a shape, of no samples if all blocks are stored, without positions.

    ``key`` holds what a compiled kernel depends on besides.
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
    stored = encode_format(value_format, block_size)
    if stored:
        tile = block_size, min(64, tile_width(block_size)), tile[2]
    return Launch(unpack_kernel, grid, *scalars, length, columns, unit, *tile, stored, everything, **options)


def unpack(
    values: Tensor,
    bitmap: Tensor,
    offsets: Tensor,
    shape: tuple[int, int, int],
    features_first: bool = False,
    block_size: int | None = None,
    value_format: str = "same",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the pruned tensor of ``shape [batch, rows, length]``, or permuted to ``[rows, batch, length]``.

    ``block_size`` and ``dtype`` of the result are those of the values if these are stored as they are, and must be
    given otherwise.
    """
    batch, rows, length = shape
    sizes = (rows, batch, length) if features_first else shape
    out = values.new_empty(*sizes, dtype=dtype)
    key = out.dtype, values.device, aligned(values, bitmap, offsets)
    kept = 0 if value_format == "same" else values.shape[0]
    samples = bitmap.shape[0] if bitmap.shape[1] else 0
    launch = _launch(samples, kept, shape, features_first, block_size or values.shape[1], value_format, *key)
    launch(values, bitmap, offsets, out)
    return out
