"""All blocks of a tensor in few bits: one read, one write, and no positions, as none is dropped.

Block ``n`` of all samples, counted row by row, is stored at place ``n``. Under autocast the same pass also writes the
16-bit copy that the product reads (see ``keys``), and quantises that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.kernels.formats import encode_format, values_layout, whole_blocks
from lightning_actprune.kernels.keys import stride_unit
from lightning_actprune.kernels.launch import Launch
from lightning_actprune.kernels.quantize import load_rows, quantize_tile
from lightning_actprune.ops.geometry import ceil_div
from lightning_actprune.ops.operators import in_operator


@triton.jit
def quantize_all_kernel(
    x_ptr, copy_ptr, values_ptr, stride_sample, stride_row, rows, nnz, length: tl.constexpr, columns: tl.constexpr,
    UNIT: tl.constexpr, CAST: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Store ``TILE`` of the ``nnz`` blocks of ``x [S, T, L]``.

    Strides are in units of ``UNIT`` values, see ``keys.stride_unit``. ``CAST``: values are rounded to the contiguous
    ``copy``, and stored from there.
    """
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exist = (place >= 0) & (place < nnz)  # of nearly 2^31 blocks, the last tile reaches beyond int32
    r, first = place // columns, (place % columns) * B
    rows_ptr = x_ptr + (r // rows).to(tl.int64) * stride_sample * UNIT + (r % rows).to(tl.int64) * stride_row * UNIT
    x = load_rows(rows_ptr, first, exist, length, B, BLOCK)
    if CAST:
        x = x.to(copy_ptr.dtype.element_ty)
        e = tl.arange(0, BLOCK)[None, :]
        column = first[:, None] + e
        inside = exist[:, None] & ((column < length) & (e < B))
        tl.store(copy_ptr + r.to(tl.int64)[:, None] * length + column, x, mask=inside)
    quantize_tile(x, values_ptr, nnz, place, exist, B, BLOCK, FORMAT)


class QuantizePlan:
    """The launch and output shapes for one shape of input, as ``PackPlan``.

    Bitmap and offsets are one tensor without memory, the same one in all calls: nobody has anything to write to it.

    Args:
        shape: ``(S, T, L)``.
        strides: Strides of samples and rows; the last one is 1.
        block_size: Values per block.
        casts: Whether a copy in another dtype is written and stored.
        value_format: How values are stored, not ``"same"``.
    """

    def __init__(
        self, shape: tuple[int, int, int], strides: tuple[int, int], block_size: int, casts: bool, value_format: str
    ) -> None:
        samples, rows, length = shape
        columns, stored = ceil_div(length, block_size), encode_format(value_format, block_size)
        blocks = samples * rows * columns
        self.values, self.dtype = values_layout(blocks, block_size, stored)
        self._samples = samples
        self._positions: Tensor | None = None
        block, tile = whole_blocks(block_size)
        unit = stride_unit(*strides)
        scalars = strides[0] // unit, strides[1] // unit, rows, blocks
        constants = length, columns, unit, casts, block_size, block, tile, stored
        self._store = Launch(quantize_all_kernel, (ceil_div(blocks, tile),), *scalars, *constants, num_warps=4)

    def __call__(self, x: Tensor, copy: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(values, bitmap, offsets)``; ``copy``: memory for the contiguous copy of a plan that casts."""
        values = x.new_empty(*self.values, dtype=self.dtype)
        self._store(x, x if copy is None else copy, values)
        if in_operator():
            return values, self._no_positions(x), self._no_positions(x)
        if self._positions is None:
            with torch.inference_mode(False):  # else nothing could save it for backward
                self._positions = self._no_positions(x)
        return values, self._positions, self._positions

    def _no_positions(self, x: Tensor) -> Tensor:
        return x.new_empty(self._samples, 0, dtype=torch.int32)
