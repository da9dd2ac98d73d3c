"""Keys: one int32 per block by which blocks are compared.

A block's key is its sum of squares as fp32, read as int32: for non-negative floats, integer order is float order. A
block with a NaN or Inf gets INT_MAX, a finite block whose sum overflows the largest finite float.

``scratch`` holds the keys of all ``size`` blocks ``[R, NB]``, then the ``control`` words with which the programs of the
next launch find each other; these, the bitmap and the offsets are set to zero here.
"""

from __future__ import annotations

import triton
import triton.language as tl

INT_MAX = tl.constexpr(0x7FFFFFFF)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def block_keys(x, axis: tl.constexpr):
    """Return the int32 keys of the fp32 blocks that lie along the last axis of ``x``."""
    squares = tl.minimum(tl.sum(x * x, axis=axis), FLOAT_MAX)
    broken = tl.max(((x != x) | (tl.abs(x) > FLOAT_MAX)).to(tl.int32), axis=axis)
    return tl.where(broken > 0, INT_MAX, squares.to(tl.int32, bitcast=True))


@triton.jit
def block_keys_kernel(
    x_ptr, scratch_ptr, bitmap_ptr, offsets_ptr, stride_sample, stride_row, total_rows, rows, length, columns, size,
    control_size, bitmap_size, offsets_size,
    B: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Write the key of every block: ``x [S, T, L] -> keys [S * T, NB]``. Tile ``[ROWS, COLS, BLOCK]``."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    e = tl.arange(0, BLOCK)
    start = (r // rows).to(tl.int64) * stride_sample + (r % rows).to(tl.int64) * stride_row
    column = j[:, None] * B + e[None, :]
    inside = (r < total_rows)[:, None, None] & ((column < length) & (e < B)[None, :])[None, :, :]
    x = tl.load(x_ptr + start[:, None, None] + column[None, :, :], mask=inside, other=0.0).to(tl.float32)
    mask = (r < total_rows)[:, None] & (j < columns)[None, :]
    tl.store(scratch_ptr + r.to(tl.int64)[:, None] * columns + j[None, :], block_keys(x, 2), mask=mask)
    z = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * ZEROS + tl.arange(0, ZEROS)
    zeros = tl.zeros([ZEROS], tl.int32)
    tl.store(scratch_ptr + size + z, zeros, mask=z < control_size)
    tl.store(bitmap_ptr + z, zeros, mask=z < bitmap_size)
    tl.store(offsets_ptr + z, zeros, mask=z < offsets_size)
