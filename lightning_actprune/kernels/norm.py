"""Normalisation of rows: one pass forward, which also stores the normalised values quantized, and one backward.

A program holds whole rows as blocks, ``[ROWS * COLS, BLOCK]``. Forward it reads the input once, computes mean and
variance in registers (the variance from differences to the mean, not from a difference of sums), writes the output, and
quantizes. Backward, a fixed number of programs go through the rows, each in the same order. A program writes the input
gradient of its rows, and keeps its sums for weight and bias in registers, which ``kernels.sums`` adds up. So nothing
depends on which program runs first, and the same input gives the same gradients.

Bytes moved per value of fp32 with 4 bits in blocks of 32: 4 + 4 + 0.56 forward (torch: 4 + 4), 4 + 0.56 + 4 backward
(torch: 4 + 4 + 4, and gradient and input once more for the sums). A 16-bit branch that is scaled and added to an fp32
residual: 2 + 4 + 4 + 0.56 forward (torch: 2 + 4 for the product, 4 + 4 + 4 for the sum).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.codec.blocks import ceil_div
from lightning_actprune.kernels.formats import (
    dequantize_tile,
    encode_format,
    load_rows,
    quantize_tile,
    tile_width,
    values_layout,
)
from lightning_actprune.kernels.launch import INTERPRETED, Launch, multiprocessors
from lightning_actprune.kernels.places import stride_unit
from lightning_actprune.kernels.sums import AddSetsLaunch

MOST_VALUES = 8192
"""Most values of a row, filled up to a power of two of blocks: 16 a thread of 16 warps. Backward holds five numbers for
each of them; those of 32 values would not fit into registers."""
TILE_VALUES = 8192 if INTERPRETED else 2048
"""Values of a tile of shorter rows: 16 a thread of 4 warps."""
WARPS, REGISTERS = 16, 128
"""Warps per multiprocessor in backward, whose programs stay until all rows are done, and registers of a thread, so that
all of them run at once. By default the compiler takes up to 164 registers; with 128 it spills nothing (sm_90)."""

Parameter = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a weight or a bias."""


def takes_rows(length: int, block_size: int) -> bool:
    """Return True if a program can hold a row."""
    return _padded(length, block_size) <= MOST_VALUES


def _padded(length: int, block_size: int) -> int:
    return int(triton.next_power_of_2(ceil_div(length, block_size))) * tile_width(block_size)


def tile_of(length: int, block_size: int) -> tuple[dict[str, int], int]:
    """Return the compile-time sizes of a tile of whole rows, and its warps."""
    block, padded = tile_width(block_size), _padded(length, block_size)
    rows = max(1, TILE_VALUES // padded)
    sizes = {"ROWS": rows, "COLS": padded // block, "B": block_size, "BLOCK": block}
    return sizes, max(1, min(16, rows * padded // 512))


@triton.jit
def normalize_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr, values_ptr, rstd_ptr, stride_row, rows, eps,
    length: tl.constexpr, columns: tl.constexpr, UNIT: tl.constexpr, WEIGHTED: tl.constexpr, BIASED: tl.constexpr,
    ADDED: tl.constexpr, CENTRED: tl.constexpr, ROUNDED: tl.constexpr, NORMED: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Write ``y``, the quantized normalised values and ``rstd`` for ``ROWS`` rows of ``x``.

    ``x_ptr: [R, L]``, with rows ``stride_row`` apart; ``y_ptr`` and ``residual_ptr: [R, L]``, contiguous;
    ``weight_ptr`` and ``bias_ptr: [L]``; ``rstd_ptr: [R]`` in fp32; ``values_ptr``: bytes of ``R * columns`` blocks.
    ``WEIGHTED``, ``BIASED``, ``ADDED``: weight, bias and residual are used. ``CENTRED``: the mean is subtracted.
    ``NORMED``: values are divided by their deviation, ``1 / rstd``. ``ROUNDED``: they are rounded to the type of ``x``
    before the weight multiplies them.
    """
    r, j, exist = _blocks_of(tl.program_id(0), rows, columns, ROWS, COLS)
    inside = _inside(j, exist, length, B, BLOCK)
    x = load_rows(x_ptr + r.to(tl.int64) * stride_row * UNIT, j * B, exist, length, B, BLOCK).to(tl.float32)
    x = tl.where(inside, x, 0.0)
    if ADDED:
        residual = load_rows(residual_ptr + r.to(tl.int64) * length, j * B, exist, length, B, BLOCK)
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
    if ADDED:
        y += residual.to(tl.float32)
    column = j[:, None] * B + tl.arange(0, BLOCK)[None, :]
    tl.store(y_ptr + r.to(tl.int64)[:, None] * length + column, y.to(y_ptr.dtype.element_ty), mask=inside)
    quantize_tile(x, values_ptr, rows * columns, r * columns + j, exist, B, BLOCK, FORMAT)


@triton.jit
def normalize_grad_kernel(
    grad_ptr, values_ptr, rstd_ptr, weight_ptr, grad_x_ptr, partial_ptr, stride_row, rows, length: tl.constexpr,
    columns: tl.constexpr, UNIT: tl.constexpr, WEIGHTED: tl.constexpr, CENTRED: tl.constexpr, NORMED: tl.constexpr,
    OF_WEIGHT: tl.constexpr, OF_BIAS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Write the input gradient of rows, and each program's share of the gradients of weight and bias.

    ``grad_ptr: [R, L]``, with rows ``stride_row`` apart; ``grad_x_ptr: [R, L]``, contiguous; ``values_ptr`` and
    ``rstd_ptr`` as written by forward; ``weight_ptr: [L]``; ``partial_ptr: [programs, sets, L]`` in fp32, with a set
    for each gradient that is wanted (``OF_WEIGHT``, ``OF_BIAS``).
    """
    j = tl.arange(0, ROWS * COLS) % COLS
    column = j[:, None] * B + tl.arange(0, BLOCK)[None, :]
    if WEIGHTED:
        weight = _parameters(weight_ptr, j, columns, length, B, BLOCK)
    if OF_WEIGHT:
        of_weight = tl.zeros([ROWS * COLS, BLOCK], tl.float32)
    if OF_BIAS:
        of_bias = tl.zeros([ROWS * COLS, BLOCK], tl.float32)
    for tile in range(tl.program_id(0), (rows + ROWS - 1) // ROWS, tl.num_programs(0)):
        r, _, exist = _blocks_of(tile, rows, columns, ROWS, COLS)
        inside = _inside(j, exist, length, B, BLOCK)
        rows_ptr = grad_ptr + r.to(tl.int64) * stride_row * UNIT
        grad = load_rows(rows_ptr, j * B, exist, length, B, BLOCK).to(tl.float32)
        grad = tl.where(inside, grad, 0.0)
        # Outside of a row this is any number, times a gradient of zero. A block of NaN makes all of its row NaN anyway.
        x = dequantize_tile(values_ptr, rows * columns, r * columns + j, exist, 0, B, BLOCK, FORMAT)
        if OF_WEIGHT:
            of_weight += grad * x
        if OF_BIAS:
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
    out_ptr = partial_ptr + tl.program_id(0).to(tl.int64) * (OF_WEIGHT + OF_BIAS) * length
    if OF_WEIGHT:
        _store_sums(out_ptr, of_weight, length, columns, ROWS, COLS, B, BLOCK)
    if OF_BIAS:
        _store_sums(out_ptr + OF_WEIGHT * length, of_bias, length, columns, ROWS, COLS, B, BLOCK)


@triton.jit
def _blocks_of(tile, rows, columns: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return the row, the block column, and whether it exists, of each block ``[ROWS * COLS]`` of a tile."""
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
    """Return parameters ``[L]`` for every row of a tile; zero or undefined beyond it."""
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
    """Write the sums ``[L]`` over the rows of a tile."""
    sums = tl.sum(tl.reshape(x, [ROWS, COLS, BLOCK]), axis=0)
    j = tl.arange(0, COLS)
    inside = _inside(j, j < columns, length, B, BLOCK)
    tl.store(out_ptr + j[:, None] * B + tl.arange(0, BLOCK)[None, :], sums, mask=inside)


class NormLaunch:
    """The launch of forward for one layout of the input.

    Args:
        shape: Shape of input and output.
        length: Values of a row.
        stride: Distance of rows with stride 1 inside; ``None`` if the input has to be copied.
        flags: ``WEIGHTED``, ``BIASED``, ``ADDED``, ``CENTRED``, ``ROUNDED`` and ``NORMED`` of the kernel.
        eps: Added to the variance.
        block_size: Values per block.
        bits: Bits of a stored value.
        dtype: Type of the output.
        device: Where the kernel runs.
    """

    __slots__ = ("_copied", "_new_rstd", "_new_values", "_new_y", "_run")

    def __init__(
        self,
        shape: tuple[int, ...],
        length: int,
        stride: int | None,
        flags: tuple[bool, ...],
        eps: float,
        block_size: int,
        bits: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rows, columns = math.prod(shape) // length, ceil_div(length, block_size)
        stored = encode_format(bits, block_size)
        self._copied, stride = stride is None, length if stride is None else stride
        sizes, warps = tile_of(length, block_size)
        unit = stride_unit(stride)
        constants = length, columns, unit, *flags, *sizes.values(), stored
        grid = (ceil_div(rows, sizes["ROWS"]),)
        self._run = Launch(normalize_kernel, grid, stride // unit, rows, eps, *constants, num_warps=warps)
        values, _ = values_layout(rows * columns, block_size, stored)
        self._new_y, self._new_values = _maker(shape, dtype, device), _maker(values, torch.uint8, device)
        self._new_rstd = _maker((rows,), torch.float32, device) if flags[-1] else None

    def __call__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return ``y`` like ``x``, the bytes of the normalised values, and ``rstd`` if rows are normalised."""
        if self._copied:
            x = x.contiguous()
        w, b, r = x if weight is None else weight, x if bias is None else bias, x
        if residual is not None:
            r = residual.contiguous()
        y, values = self._new_y(), self._new_values()
        rstd = None if self._new_rstd is None else self._new_rstd()
        self._run(x, w, b, r, y, values, values if rstd is None else rstd)
        return y, values, rstd


class NormGradLaunch:
    """The launches of backward for one layout of the gradient; the second adds up the gradients of parameters.

    Args:
        shape: Shape of the gradient.
        length: Values of a row.
        stride: Distance of rows with stride 1 inside; ``None`` if the gradient has to be copied.
        flags: ``WEIGHTED``, ``CENTRED`` and ``NORMED`` of the kernel.
        block_size: Values per block.
        bits: Bits of a stored value.
        dtype: Type of the input gradient.
        wanted: Shapes and types of weight and bias; ``None`` where no gradient is wanted.
        device: Where the kernels run.
    """

    __slots__ = ("_add", "_copied", "_new_bias", "_new_weight", "_new_x", "_run")

    def __init__(
        self,
        shape: tuple[int, ...],
        length: int,
        stride: int | None,
        flags: tuple[bool, ...],
        block_size: int,
        bits: int,
        dtype: torch.dtype,
        wanted: tuple[Parameter | None, Parameter | None],
        device: torch.device,
    ) -> None:
        rows, sets = math.prod(shape) // length, sum(given is not None for given in wanted)
        self._copied, stride = stride is None, length if stride is None else stride
        columns, unit = ceil_div(length, block_size), stride_unit(stride)
        sizes, warps = tile_of(length, block_size)
        programs = min(ceil_div(rows, sizes["ROWS"]), multiprocessors(device) * max(1, WARPS // warps))
        self._add = AddSetsLaunch(programs, sets, length, device) if sets else None
        flags = *flags, *[given is not None for given in wanted]
        constants = length, columns, unit, *flags, *sizes.values(), encode_format(bits, block_size)
        options = {"num_warps": warps, "maxnreg": REGISTERS}
        self._run = Launch(normalize_grad_kernel, (programs,), stride // unit, rows, *constants, **options)
        self._new_x = _maker(shape, dtype, device)
        self._new_weight, self._new_bias = (None if given is None else _maker(*given, device) for given in wanted)

    def __call__(
        self, grad_y: Tensor, values: Tensor, rstd: Tensor | None, weight: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of the input, the weight and the bias; ``None`` where none is wanted."""
        if self._copied:
            grad_y = grad_y.contiguous()
        grad_x = self._new_x()
        given = grad_y, values, values if rstd is None else rstd, grad_y if weight is None else weight, grad_x
        if self._add is None:
            self._run(*given, grad_x)
            return grad_x, None, None
        of_weight = None if self._new_weight is None else self._new_weight()
        of_bias = None if self._new_bias is None else self._new_bias()
        first = of_bias if of_weight is None else of_weight
        assert first is not None
        scratch = grad_x.new_empty(self._add.scratch, dtype=torch.float32)
        self._run(*given, scratch)
        self._add(scratch, first, first if of_bias is None else of_bias)
        return grad_x, of_weight, of_bias


def _maker(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that allocates a contiguous tensor. With given strides torch takes half the time."""
    strides = torch.empty(shape, device="meta").stride()
    return functools.partial(torch.empty_strided, tuple(shape), strides, dtype=dtype, device=device)
