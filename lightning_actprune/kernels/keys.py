"""Keys: one int32 per block by which blocks are compared.

A block's key is its sum of squares as fp32, read as int32: for non-negative floats, integer order is float order. A
block whose sum is not finite gets the key of infinity, whether it holds a NaN, an Inf or values beyond 1e19: telling
these apart by looking at every value cost a tenth of the kernel's time.

Under autocast the product needs a copy of an fp32 input in 16 bits. The pass over the input that computes the keys can
write it on the way (``CAST``): keys are then those of the rounded values, just as if the copy had been read, and
everything later reads the copy. That spares a launch and one read of the copy: 6 bytes a value move instead of 8.

Other keys are made of these by a hash, bit for bit as in ``ops.block_selection``; ``SELECT`` says which, 0 for these.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from lightning_actprune.kernels.hashing import mix
from lightning_actprune.ops import block_selection

INFINITY_KEY = tl.constexpr(0x7F800000)
NUMBER, HALF_RANGE = tl.constexpr(block_selection.NUMBER), tl.constexpr(block_selection.HALF_RANGE)
SWAP = tl.constexpr(block_selection.BLOCK_SELECTIONS.index("swap"))
UNBIASED = tl.constexpr(block_selection.BLOCK_SELECTIONS.index("unbiased"))


def stride_unit(*strides: int) -> int:
    """Return the largest power of two up to 16 that divides ``strides``: the values that kernels count them in.

    An access is as wide as the compiler knows its address to be aligned. Of a number known at run time Triton tells it
    whether 16 divides it and nothing else, so that rows of 196 values were read two bytes at a time. As compile-time
    constants strides would do as well, but then every number of rows would be compiled for.
    """
    return math.gcd(16, *strides)


@triton.jit
def block_keys(x):
    """Return the keys ``[...]`` of the fp32 blocks ``x [..., BLOCK]``."""
    squares = tl.sum(x * x, axis=len(x.shape) - 1)
    keys = squares.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # a NaN may have its sign bit set
    return tl.minimum(keys, INFINITY_KEY)


@triton.jit
def selection_keys(keys, n, SELECT: tl.constexpr):
    """Return the keys that select; ``n``: numbers of the blocks among those of all samples, or what 32 bits hold."""
    if SELECT == 0:
        return keys
    h = mix(keys.to(tl.uint32) + n.to(tl.uint32) * NUMBER) >> 8
    if SELECT == SWAP:
        # Unsigned, where no sum overflows.
        moved = tl.maximum(keys.to(tl.uint32) + (h * 3 >> 1), HALF_RANGE + 1) - HALF_RANGE
        moved = tl.minimum(moved, INFINITY_KEY - 1).to(tl.int32)
        return tl.where((keys > 0) & (keys < INFINITY_KEY), moved, keys)
    u = (h + 1).to(tl.int32).to(tl.float32) * 2.0**-24
    priorities = tl.div_rn(keys.to(tl.float32, bitcast=True), u * u).to(tl.int32, bitcast=True)
    return tl.where(keys < INFINITY_KEY, tl.minimum(priorities, INFINITY_KEY - 1), keys)


@triton.jit
def block_keys_kernel(
    x_ptr, copy_ptr, keys_ptr, control_ptr, stride_sample, stride_row, total_rows, rows, control_size,
    length: tl.constexpr, columns: tl.constexpr, UNIT: tl.constexpr, CAST: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ZEROS: tl.constexpr, SELECT: tl.constexpr,
):  # fmt: skip
    """Write the key of every block: ``x [S, T, L] -> keys [S * T, NB]``. Tile ``[ROWS, COLS, BLOCK]``.

    Strides are in units of ``UNIT`` values, see ``stride_unit``. ``CAST``: also writes the rounded values to the
    contiguous ``copy [S, T, L]``. Also sets ``ZEROS`` of the ``control_size`` words to zero with which programs of the
    next launch find each other. To select without bias, the sums of squares follow the keys, and a zero for every
    sample follows these.
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    e = tl.arange(0, BLOCK)
    start = (r // rows).to(tl.int64) * stride_sample * UNIT + (r % rows).to(tl.int64) * stride_row * UNIT
    column = j[:, None] * B + e[None, :]
    inside = (r < total_rows)[:, None, None] & ((column < length) & (e < B)[None, :])[None, :, :]
    x = tl.load(x_ptr + start[:, None, None] + column[None, :, :], mask=inside, other=0.0)
    if CAST:
        x = x.to(copy_ptr.dtype.element_ty)
        copied = (r.to(tl.int64) * length)[:, None, None] + column[None, :, :]
        tl.store(copy_ptr + copied, x, mask=inside)
    x = x.to(tl.float32)
    mask = (r < total_rows)[:, None] & (j < columns)[None, :]
    n = r.to(tl.int64)[:, None] * columns + j[None, :]
    tl.store(keys_ptr + n, selection_keys(block_keys(x), n, SELECT), mask=mask)
    if SELECT == UNBIASED:
        keys = block_keys(x)
        size = tl.cast(total_rows, tl.int64) * columns
        tl.store(keys_ptr + size + n, keys, mask=mask)
        first = (r < total_rows) & (r % rows + tl.program_id(1) == 0)
        tl.store(keys_ptr + 2 * size + r // rows, tl.zeros([ROWS], tl.int32), mask=first)
    if ZEROS > 0:
        z = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * ZEROS + tl.arange(0, ZEROS)
        tl.store(control_ptr + z, tl.zeros([ZEROS], tl.int32), mask=z < control_size)
