"""From sums over lines to gradients of the parameters and factors of the input gradient, see ``line_norm_grad``."""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_actprune.kernels.launch import Launch
from lightning_actprune.ops.geometry import ceil_div

ADDED_ROWS, ADDED_LINES = 256, 8
"""Parts and lines that are added at once: there are hundreds of parts where there are few lines."""


@triton.jit(do_not_specialize_on_alignment=["of_weight_ptr", "of_bias_ptr"])
def add_sums_kernel(
    partial_ptr, statistics_ptr, weight_ptr, of_weight_ptr, of_bias_ptr, factors_ptr, rows, lines, each,
    WEIGHTED: tl.constexpr, FIXED: tl.constexpr, OF_WEIGHT: tl.constexpr, OF_BIAS: tl.constexpr, ROWS: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """Add ``rows`` sums of each line, ``[2, rows, lines]``, and write the factors ``[3, lines]``.

    ``each``: values of a line. ``FIXED``: mean and rstd were given, and depend on nothing. ``OF_WEIGHT``, ``OF_BIAS``:
    whether the sums, gradients of the parameters, are written.
    """
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    along = tl.zeros([ROWS, LINES], tl.float32)
    sums = tl.zeros([ROWS, LINES], tl.float32)
    size = tl.cast(rows, tl.int64) * lines
    for start in range(0, rows, ROWS):
        r = start + tl.arange(0, ROWS)
        inside = (r < rows)[:, None] & (line < lines)[None, :]
        at_ptr = partial_ptr + r.to(tl.int64)[:, None] * lines + line[None, :]
        along += tl.load(at_ptr, mask=inside, other=0.0)
        sums += tl.load(at_ptr + size, mask=inside, other=0.0)
    of_weight, of_bias = tl.sum(along, axis=0), tl.sum(sums, axis=0)
    if OF_WEIGHT:
        tl.store(of_weight_ptr + line, of_weight.to(of_weight_ptr.dtype.element_ty), mask=line < lines)
    if OF_BIAS:
        tl.store(of_bias_ptr + line, of_bias.to(of_bias_ptr.dtype.element_ty), mask=line < lines)
    scale = tl.load(statistics_ptr + lines + line, mask=line < lines, other=0.0)
    if WEIGHTED:
        scale *= tl.load(weight_ptr + line, mask=line < lines, other=0.0).to(tl.float32)
    tl.store(factors_ptr + line, scale, mask=line < lines)
    slope, shift = -scale * of_weight / each, -scale * of_bias / each
    if FIXED:
        slope, shift = tl.zeros_like(slope), tl.zeros_like(shift)
    tl.store(factors_ptr + lines + line, slope, mask=line < lines)
    tl.store(factors_ptr + 2 * lines + line, shift, mask=line < lines)


def add_launch(rows: int, cut: tuple[int, int, int], weighted: bool, fixed: bool, wanted: tuple[bool, bool]) -> Launch:
    """Return the launch that adds ``rows`` sums of each line; ``wanted``: of the gradients of weight and bias."""
    images, lines, length = cut
    constants = rows, lines, float(images * length), weighted, fixed, *wanted, ADDED_ROWS, ADDED_LINES
    return Launch(add_sums_kernel, (ceil_div(lines, ADDED_LINES),), *constants, num_warps=4)
