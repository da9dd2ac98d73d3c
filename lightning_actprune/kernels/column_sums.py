"""Column sums: the bias gradient ``sum_r grad_y[r, o]`` at the speed of reading ``grad_y`` once.

A program adds up one part of the rows for 64 columns, in fp32 and in a fixed order; a second launch adds the parts.
For few rows one launch does. The result does not depend on which program runs first.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.kernels.launch import Launch, multiprocessors
from lightning_actprune.ops.geometry import ceil_div

COLS = 64
"""Columns of a program."""
TILE_BYTES = 8192
"""Bytes of a tile."""
STAGES = 4
"""Tiles in a program's shared memory, all but one of them on their way. Left to itself the compiler loads 16 bytes a
thread, waits, and adds: 2 TB/s on an H200."""
PROGRAMS = 4
"""Programs wanted per multiprocessor. Of nine settings these four were the best on an H200: 34 us for 25216 x 2304
values in bf16 and 14 for 25216 x 768, where torch takes 47 and 38."""
MOST_PARTS = 128
"""Most parts: they are added by one program, all in registers."""


@triton.jit
def column_sums_kernel(
    grad_ptr, out_ptr, stride_grad, rows, outputs, share, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Write the sums of ``share`` rows, ``out [parts, OUT]``; grid ``(OUT / COLS, parts)``.

    ``WIDE``: offsets into ``grad_y`` do not fit 32 bits.
    """
    o = tl.program_id(0) * COLS + tl.arange(0, COLS)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, rows)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        r = start + tl.arange(0, ROWS)
        row = r.to(tl.int64) if WIDE else r
        inside = (r < last)[:, None] & (o < outputs)[None, :]
        total += tl.load(grad_ptr + row[:, None] * stride_grad + o[None, :], mask=inside, other=0.0).to(tl.float32)
    sums = tl.sum(total, axis=0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + tl.program_id(1) * outputs + o, sums, mask=o < outputs)


class ColumnSumsPlan:
    """The launches for one shape.

    Args:
        rows: Rows of the gradient.
        outputs: Its columns.
        stride: Its row stride.
        itemsize: Bytes per value.
        dtype: Type of the result.
        device: Where the kernels run.
    """

    def __init__(
        self, rows: int, outputs: int, stride: int, itemsize: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        tile, groups = TILE_BYTES // (COLS * itemsize), ceil_div(outputs, COLS)
        wanted = min(MOST_PARTS, ceil_div(PROGRAMS * multiprocessors(device), groups), ceil_div(rows, 2 * tile))
        share = ceil_div(ceil_div(rows, wanted), tile) * tile
        self.outputs, self.dtype, self.parts = outputs, dtype, ceil_div(rows, share)
        wide = rows * stride >= 2**31
        self._sum = Launch(
            column_sums_kernel, (groups, self.parts), stride, rows, outputs, share, tile, COLS, wide, STAGES,
            num_warps=4,
        )  # fmt: skip
        # Narrower programs, since there is only one row of them.
        self._add = Launch(
            column_sums_kernel, (ceil_div(outputs, 32),), outputs, self.parts, outputs, self.parts,
            triton.next_power_of_2(self.parts), 32, False, 1, num_warps=4,
        )  # fmt: skip

    def __call__(self, grad_y: Tensor) -> Tensor:
        """Return the sums ``[OUT]``."""
        out = grad_y.new_empty(self.outputs, dtype=self.dtype)
        if self.parts == 1:
            self._sum(grad_y, out)
            return out
        partial = grad_y.new_empty(self.parts, self.outputs, dtype=torch.float32)
        self._sum(grad_y, partial)
        self._add(partial, out)
        return out


@functools.lru_cache(maxsize=1024)
def _plan(
    shape: tuple[int, int], stride: int, source: torch.dtype, dtype: torch.dtype, device: torch.device, aligned: bool
) -> ColumnSumsPlan:
    """Return the plan for a gradient; alignment matters only to the compiled kernels that the plan keeps."""
    return ColumnSumsPlan(*shape, stride, source.itemsize, dtype, device)


def column_sums(grad_y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum over the rows of ``grad_y [R, OUT]`` in ``dtype``; ``R > 0``, and its columns lie side by side."""
    aligned = grad_y.data_ptr() % 16 == 0
    return _plan(grad_y.shape, grad_y.stride(0), grad_y.dtype, dtype, grad_y.device, aligned)(grad_y)
