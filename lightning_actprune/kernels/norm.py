"""Normalisation of rows: one pass forward that also stores the normalised values in few bits, one backward.

A program holds whole rows as blocks, ``[ROWS * COLS, BLOCK]``: it reads the input once, finds mean and variance in its
registers (the variance of what is left without the mean, no difference of sums), writes the output, and quantises.
Backward, a fixed number of programs go through the rows, each in the same order: every one writes the input gradient of
its rows and keeps its sums for weight and bias in registers, which ``column_sums`` adds up. So nothing depends on which
program runs first, and the same input gives the same gradients.

Bytes moved per value of fp32 with int4 in blocks of 32: 4 + 4 + 0.56 forward (torch: 4 + 4), 4 + 0.56 + 4 backward
(torch: 4 + 4 + 4, and gradient and input a second time for the sums).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.kernels.column_sums import column_sums
from lightning_actprune.kernels.formats import dequantize_tile, encode_format, tile_width, values_layout
from lightning_actprune.kernels.keys import stride_unit
from lightning_actprune.kernels.launch import INTERPRETED, Launch, aligned, multiprocessors
from lightning_actprune.kernels.quantize import load_rows, quantize_tile
from lightning_actprune.ops.geometry import ceil_div

MOST_VALUES = 8192
"""Most values of a row, filled up to a power of two of blocks: 16 a thread of 16 warps. Backward holds five numbers for
each; with 32 it would not fit the registers."""
TILE_VALUES = 8192 if INTERPRETED else 2048
"""Values of a tile of rows that are shorter: 16 a thread of 4 warps."""
WARPS, REGISTERS = 16, 128
"""Of backward, whose programs stay until all rows are done: warps per multiprocessor, and registers of a thread. So all
of these run at once; left to itself the compiler takes up to 164, and with 128 it spills nothing (sm_90)."""


def takes_rows(length: int, block_size: int) -> bool:
    """Return whether a program can hold a row."""
    return _padded(length, block_size) <= MOST_VALUES


@functools.cache  # Triton's own function of powers of two is slow on the host
def _padded(length: int, block_size: int) -> int:
    return int(triton.next_power_of_2(ceil_div(length, block_size))) * tile_width(block_size)


def tile_of(length: int, block_size: int) -> tuple[dict[str, int], int]:
    """Return the sizes of a tile of whole rows at compile time, and its warps."""
    block, padded = tile_width(block_size), _padded(length, block_size)
    rows = max(1, TILE_VALUES // padded)
    sizes = {"ROWS": rows, "COLS": padded // block, "B": block_size, "BLOCK": block}
    return sizes, max(1, min(16, rows * padded // 512))


@triton.jit
def normalize_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, values_ptr, rstd_ptr, stride_row, rows, eps, length: tl.constexpr,
    columns: tl.constexpr, UNIT: tl.constexpr, WEIGHTED: tl.constexpr, BIASED: tl.constexpr, CENTRED: tl.constexpr,
    ROUNDED: tl.constexpr, NORMED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Write ``y [R, L]``, the normalised values in few bits, and ``rstd [R]`` of ``x [R, L]``.

    ``stride_row`` is in units of ``UNIT`` values, see ``keys.stride_unit``. ``CENTRED``: less the mean. ``ROUNDED``:
    values are rounded to the type of ``x`` before they are multiplied by the weight. Without ``NORMED`` there is no
    ``rstd``.
    """
    r, j, exist = _blocks_of(tl.program_id(0), rows, columns, ROWS, COLS)
    inside = _inside(j, exist, length, B, BLOCK)
    x = load_rows(x_ptr + r.to(tl.int64) * stride_row * UNIT, j * B, exist, length, B, BLOCK).to(tl.float32)
    x = tl.where(inside, x, 0.0)
    if CENTRED:
        x = tl.where(inside, x - (_row_sums(x, ROWS, COLS) / length)[:, None], 0.0)
    if NORMED:
        rstd = tl.rsqrt(_row_sums(x * x, ROWS, COLS) / length + eps)
        x *= rstd[:, None]
        tl.store(rstd_ptr + r, rstd, mask=exist & (j == 0))
    y = x.to(x_ptr.dtype.element_ty).to(tl.float32) if ROUNDED else x
    if WEIGHTED:
        y *= _parameters(weight_ptr, j, columns, length, B, BLOCK)
    if BIASED:
        y += _parameters(bias_ptr, j, columns, length, B, BLOCK)
    column = j[:, None] * B + tl.arange(0, BLOCK)[None, :]
    tl.store(y_ptr + r.to(tl.int64)[:, None] * length + column, y.to(y_ptr.dtype.element_ty), mask=inside)
    quantize_tile(x, values_ptr, rows * columns, r * columns + j, exist, B, BLOCK, FORMAT)


@triton.jit
def normalize_grad_kernel(
    grad_ptr, values_ptr, rstd_ptr, weight_ptr, grad_x_ptr, partial_ptr, stride_row, rows, length: tl.constexpr,
    columns: tl.constexpr, UNIT: tl.constexpr, WEIGHTED: tl.constexpr, CENTRED: tl.constexpr, NORMED: tl.constexpr,
    SUMS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Write ``grad_x [R, L]`` and, with ``SUMS``, each program's share ``[2, L]`` of the parameters' gradients."""
    j = tl.arange(0, ROWS * COLS) % COLS
    column = j[:, None] * B + tl.arange(0, BLOCK)[None, :]
    if WEIGHTED:
        weight = _parameters(weight_ptr, j, columns, length, B, BLOCK)
    if SUMS:
        of_weight = tl.zeros([ROWS * COLS, BLOCK], tl.float32)
        of_bias = tl.zeros([ROWS * COLS, BLOCK], tl.float32)
    for tile in range(tl.program_id(0), (rows + ROWS - 1) // ROWS, tl.num_programs(0)):
        r, _, exist = _blocks_of(tile, rows, columns, ROWS, COLS)
        inside = _inside(j, exist, length, B, BLOCK)
        rows_ptr = grad_ptr + r.to(tl.int64) * stride_row * UNIT
        grad = load_rows(rows_ptr, j * B, exist, length, B, BLOCK).to(tl.float32)
        grad = tl.where(inside, grad, 0.0)
        # Outside of a row this is any number, times a gradient of zero; a block that is NaN makes its row so anyway.
        x = dequantize_tile(values_ptr, rows * columns, r * columns + j, exist, 0, B, BLOCK, FORMAT)
        if SUMS:
            of_weight += grad * x
            of_bias += grad
        if WEIGHTED:
            grad *= weight
        rest = grad
        if NORMED:
            along = _row_sums(grad * x, ROWS, COLS) / length
            rest = grad - x * along[:, None]
        if CENTRED:
            rest -= (_row_sums(grad, ROWS, COLS) / length)[:, None]
        if NORMED:
            rest *= tl.load(rstd_ptr + r, mask=exist, other=0.0)[:, None]
        grad_x = rest.to(grad_x_ptr.dtype.element_ty)
        tl.store(grad_x_ptr + r.to(tl.int64)[:, None] * length + column, grad_x, mask=inside)
    if SUMS:
        out_ptr = partial_ptr + tl.program_id(0).to(tl.int64) * 2 * length
        _store_sums(out_ptr, of_weight, length, columns, ROWS, COLS, B, BLOCK)
        _store_sums(out_ptr + length, of_bias, length, columns, ROWS, COLS, B, BLOCK)


@triton.jit
def _blocks_of(tile, rows, columns: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return the row, the column block, and whether it exists, of each block ``[ROWS * COLS]`` of a tile."""
    n = tl.arange(0, ROWS * COLS)
    r, j = tile * ROWS + n // COLS, n % COLS
    return r, j, (r < rows) & (j < columns)


@triton.jit
def _inside(j, exist, length: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
    """Return which values of a tile belong to a row."""
    e = tl.arange(0, BLOCK)[None, :]
    return exist[:, None] & ((e < B) & (j[:, None] * B + e < length))


@triton.jit
def _parameters(ptr, j, columns: tl.constexpr, length: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
    """Return a vector of parameters ``[L]`` for every row of a tile; zero, or not defined, beyond it."""
    return load_rows(ptr + j * 0, j * B, j < columns, length, B, BLOCK).to(tl.float32)


@triton.jit
def _row_sums(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return, for each block ``[ROWS * COLS]``, the sum of its row of ``x [ROWS * COLS, BLOCK]``."""
    sums = tl.sum(tl.reshape(tl.sum(x, axis=1), [ROWS, COLS]), axis=1)
    return tl.reshape(tl.broadcast_to(sums[:, None], [ROWS, COLS]), [ROWS * COLS])


@triton.jit
def _store_sums(
    out_ptr, x, length: tl.constexpr, columns: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sum over the rows of a tile, ``[L]``."""
    sums = tl.sum(tl.reshape(x, [ROWS, COLS, BLOCK]), axis=0)
    j = tl.arange(0, COLS)
    inside = _inside(j, j < columns, length, B, BLOCK)
    tl.store(out_ptr + j[:, None] * B + tl.arange(0, BLOCK)[None, :], sums, mask=inside)


class NormPlan:
    """The forward launch for one kind of input.

    Args:
        shape: ``(R, L)``.
        stride: Of rows; values of a row lie side by side.
        flags: ``WEIGHTED``, ``BIASED``, ``CENTRED``, ``ROUNDED`` and ``NORMED`` of the kernel.
        eps: Added to the variance.
        block_size: Values per block.
        value_format: How values are stored.
    """

    def __init__(
        self, shape: tuple[int, int], stride: int, flags: tuple[bool, ...], eps: float, block_size: int,
        value_format: str,
    ) -> None:  # fmt: skip
        (rows, length), stored = shape, encode_format(value_format, block_size)
        columns, unit = ceil_div(length, block_size), stride_unit(stride)
        self.shape, self.stored_rows = shape, rows if flags[-1] else 0
        self.values, self.dtype = values_layout(rows * columns, block_size, stored)
        sizes, warps = tile_of(length, block_size)
        constants = length, columns, unit, *flags, *sizes.values(), stored
        grid = (ceil_div(rows, sizes["ROWS"]),)
        self._run = Launch(normalize_kernel, grid, stride // unit, rows, eps, *constants, num_warps=warps)

    def __call__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(y, values, rstd)``; ``y`` in ``dtype``."""
        y, values = x.new_empty(self.shape, dtype=dtype), x.new_empty(self.values, dtype=self.dtype)
        rstd = x.new_empty(self.stored_rows, dtype=torch.float32)
        self._run(x, x if weight is None else weight, x if bias is None else bias, y, values, rstd)
        return y, values, rstd


class NormGradPlan:
    """The backward launch for one kind of gradient.

    Args:
        shape: ``(R, L)``.
        stride: Of the gradient's rows; values of a row lie side by side.
        flags: ``WEIGHTED``, ``CENTRED``, ``NORMED`` and ``SUMS`` of the kernel.
        block_size: Values per block.
        value_format: How values are stored.
        device: Where the kernel runs.
    """

    def __init__(
        self, shape: tuple[int, int], stride: int, flags: tuple[bool, ...], block_size: int, value_format: str,
        device: torch.device,
    ) -> None:  # fmt: skip
        rows, length = shape
        columns, unit, (*_, sums) = ceil_div(length, block_size), stride_unit(stride), flags
        sizes, warps = tile_of(length, block_size)
        programs = min(ceil_div(rows, sizes["ROWS"]), multiprocessors(device) * max(1, WARPS // warps))
        self.shape, self.partial = shape, (programs if sums else 0, 2 * length)
        constants = length, columns, unit, *flags, *sizes.values(), encode_format(value_format, block_size)
        options = {"num_warps": warps, "maxnreg": REGISTERS}
        self._run = Launch(normalize_grad_kernel, (programs,), stride // unit, rows, *constants, **options)

    def __call__(
        self, grad_y: Tensor, values: Tensor, rstd: Tensor, weight: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return the input gradient in ``dtype``, and the sums ``[2, L]``, or ``[0, L]`` if they are not wanted."""
        grad_x = grad_y.new_empty(self.shape, dtype=dtype)
        partial = grad_y.new_empty(self.partial, dtype=torch.float32)
        self._run(grad_y, values, rstd, grad_y if weight is None else weight, grad_x, partial)
        if not len(partial):
            return grad_x, partial.view(0, self.shape[1])
        return grad_x, column_sums(partial, torch.float32).view(2, self.shape[1])


@functools.lru_cache(maxsize=1024)
def _plan(key: object, *arguments: object) -> NormPlan:
    """Return the plan; ``key``: dtypes, device and alignment, which matter to the compiled kernel that it keeps."""
    return NormPlan(*arguments)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _grad_plan(key: object, *arguments: object) -> NormGradPlan:
    return NormGradPlan(*arguments)  # type: ignore[arg-type]


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    centred: bool,
    rounded: bool,
    eps: float,
    block_size: int,
    value_format: str,
    normed: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(y, values, rstd)`` of ``x [R, L]``, not empty; see ``ops.normalize``."""
    given = [x, *[p for p in (weight, bias) if p is not None]]
    key = x.device, dtype, *[tensor.dtype for tensor in given], *aligned(*given)
    flags = weight is not None, bias is not None, centred, rounded, normed
    return _plan(key, x.shape, x.stride(0), flags, eps, block_size, value_format)(x, weight, bias, dtype)


def normalize_grad(
    grad_y: Tensor,
    values: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    centred: bool,
    block_size: int,
    value_format: str,
    normed: bool,
    dtype: torch.dtype,
    sums: bool,
) -> tuple[Tensor, Tensor]:
    """Return ``(grad_x, sums)`` of ``grad_y [R, L]``, not empty; see ``ops.normalize``."""
    given = [grad_y, values, rstd, *([] if weight is None else [weight])]
    key = dtype, *[tensor.dtype for tensor in given], *aligned(*given)
    layout = grad_y.shape, grad_y.stride(0), (weight is not None, centred, normed, sums), block_size, value_format
    return _grad_plan(key, *layout, grad_y.device)(grad_y, values, rstd, weight, dtype)
