"""Gradients of an affine layer from its packed input: one pass over the output gradient, nothing unpacked in memory.

A program holds whole rows as blocks, ``[ROWS * COLS, BLOCK]``. Which of them are stored, and where, it finds from the
words of the bitmap: the place of a block is the offset of its run of 128 blocks and as many more as bits are set before
its own. A fixed number of programs go through the rows, each in the same order: every one writes the input gradient of
its rows and keeps its sums for weight and bias in registers, which ``AddSetsPlan`` adds up. So nothing depends on which
program runs first, and the same input gives the same gradients.

Bytes moved per value of fp32 with half of the blocks kept as they are: 4 + 2 + 4 (torch, with the whole input: 28,
since it writes and reads the product of gradient and input, and reads the gradient three times).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.kernels.column_sums import AddSetsPlan
from lightning_actprune.kernels.columns import set_bits
from lightning_actprune.kernels.formats import dequantize_tile, encode_format
from lightning_actprune.kernels.keys import stride_unit
from lightning_actprune.kernels.launch import Launch, aligned, multiprocessors
from lightning_actprune.kernels.norm import tile_of
from lightning_actprune.kernels.norm_launch import REGISTERS, WARPS
from lightning_actprune.kernels.quantize import load_rows
from lightning_actprune.kernels.select import RUN, WORD
from lightning_actprune.ops.geometry import ceil_div


@triton.jit
def affine_grad_kernel(
    grad_ptr, values_ptr, bitmap_ptr, offsets_ptr, weight_ptr, grad_x_ptr, partial_ptr, stride_row, rows, rows_each,
    words, runs, kept, length: tl.constexpr, columns: tl.constexpr, UNIT: tl.constexpr, INPUT: tl.constexpr,
    SUMS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Write ``grad_x [R, L]`` if ``INPUT``, and each program's share ``[SUMS, L]`` of the parameters' gradients.

    A sample has ``rows_each`` rows, ``words`` of the bitmap and ``runs`` offsets; ``kept`` blocks are stored in all.
    ``stride_row`` is in units of ``UNIT`` values, see ``keys.stride_unit``. ``SUMS``: 1 without a bias, 2 with one.
    """
    lane = tl.arange(0, ROWS * COLS)
    j = lane % COLS
    column = j[:, None] * B + tl.arange(0, BLOCK)[None, :]
    of_row = (j < columns)[:, None] & ((tl.arange(0, BLOCK)[None, :] < B) & (column < length))
    if INPUT:
        weight = load_rows(weight_ptr + j * 0, j * B, j < columns, length, B, BLOCK).to(tl.float32)
    of_weight = tl.zeros([ROWS * COLS, BLOCK], tl.float32)
    if SUMS > 1:
        of_bias = tl.zeros([ROWS * COLS, BLOCK], tl.float32)
    for tile in range(tl.program_id(0), (rows + ROWS - 1) // ROWS, tl.num_programs(0)):
        r = tile * ROWS + lane // COLS
        exist = (r < rows) & (j < columns)
        inside = exist[:, None] & of_row
        rows_ptr = grad_ptr + r.to(tl.int64) * stride_row * UNIT
        grad = load_rows(rows_ptr, j * B, exist, length, B, BLOCK).to(tl.float32)
        grad = tl.where(inside, grad, 0.0)
        stored, place = _places(
            bitmap_ptr, offsets_ptr, r // rows_each, (r % rows_each) * columns + j, exist, words, runs
        )
        # Beyond a row this is any number, of a column that is not stored.
        if FORMAT:
            x = dequantize_tile(values_ptr, kept, place, stored, 0, B, BLOCK, FORMAT)
        else:
            x = load_rows(values_ptr + place.to(tl.int64) * B, j * 0, stored, B, B, BLOCK).to(tl.float32)
        of_weight += grad * tl.where(stored[:, None], x, 0.0)
        if SUMS > 1:
            of_bias += grad
        if INPUT:
            grad_x = (grad * weight).to(grad_x_ptr.dtype.element_ty)
            tl.store(grad_x_ptr + r.to(tl.int64)[:, None] * length + column, grad_x, mask=inside)
    out_ptr = partial_ptr + tl.program_id(0).to(tl.int64) * SUMS * length
    _store_sums(out_ptr, of_weight, length, columns, ROWS, COLS, B, BLOCK)
    if SUMS > 1:
        _store_sums(out_ptr + length, of_bias, length, columns, ROWS, COLS, B, BLOCK)


@triton.jit
def _places(bitmap_ptr, offsets_ptr, s, n, exist, words, runs):
    """Return which of the blocks ``n`` of samples ``s`` are stored, and their places (int32)."""
    words_ptr = bitmap_ptr + s.to(tl.int64) * words
    word = tl.load(words_ptr + n // WORD, mask=exist, other=0).to(tl.uint32, bitcast=True)
    bit = (n % WORD).to(tl.uint32)
    run = n // RUN
    place = tl.load(offsets_ptr + s.to(tl.int64) * runs + run, mask=exist, other=0)
    place += set_bits(word & ((1 << bit) - 1)).to(tl.int32)
    for q in tl.static_range(RUN // WORD - 1):
        before = run * (RUN // WORD) + q
        bits = tl.load(words_ptr + before, mask=exist & (before < n // WORD), other=0).to(tl.uint32, bitcast=True)
        place += set_bits(bits).to(tl.int32)
    return exist & (((word >> bit) & 1) == 1), place


@triton.jit
def _store_sums(
    out_ptr, x, length: tl.constexpr, columns: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sum over the rows of a tile, ``[L]``."""
    sums = tl.sum(tl.reshape(x, [ROWS, COLS, BLOCK]), axis=0)
    j, e = tl.arange(0, COLS)[:, None], tl.arange(0, BLOCK)[None, :]
    tl.store(out_ptr + j * B + e, sums, mask=(j < columns) & ((e < B) & (j * B + e < length)))


class AffineGradLaunch:
    """The launches for one kind of gradient and packed input.

    Args:
        shape: ``(R, L)``.
        stride: Of the gradient's rows; values of a row lie side by side.
        stored: Samples, words and offsets of a sample, and stored blocks of all.
        flags: ``INPUT`` and ``SUMS`` of the kernel.
        block_size: Values per block.
        value_format: How values are stored.
        device: Where the kernel runs.
    """

    def __init__(
        self, shape: tuple[int, int], stride: int, stored: tuple[int, int, int, int], flags: tuple[bool, int],
        block_size: int, value_format: str, device: torch.device,
    ) -> None:  # fmt: skip
        (rows, length), (samples, *places) = shape, stored
        unit, (sizes, warps) = stride_unit(stride), tile_of(length, block_size)
        programs = min(ceil_div(rows, sizes["ROWS"]), multiprocessors(device) * max(1, WARPS // warps))
        scalars = stride // unit, rows, rows // samples, *places
        constants = length, ceil_div(length, block_size), unit, *flags, *sizes.values()
        options = {"num_warps": warps, "maxnreg": REGISTERS}
        encoded = encode_format(value_format, block_size)
        self._run = Launch(affine_grad_kernel, (programs,), *scalars, *constants, encoded, **options)
        self._add = AddSetsPlan(programs, flags[1], length, device)

    def __call__(self, given: tuple[Tensor, ...], grad_x: Tensor, sums: Sequence[Tensor]) -> None:
        """Write the gradients of the input and, to ``sums``, of weight and bias, or of the weight alone.

        ``given``: ``grad_y``, values, bitmap, offsets and weight. Without ``INPUT`` the weight and ``grad_x`` may be
        any tensors.
        """
        scratch = grad_x.new_empty(self._add.scratch, dtype=torch.float32)
        self._run(*given, grad_x, scratch)
        self._add(scratch, sums[0], sums[-1])


@functools.lru_cache(maxsize=1024)
def grad_launch(key: object, *arguments: object) -> AffineGradLaunch:
    """Return the launches; ``key``: types and alignment, which matter to the compiled kernels that they keep."""
    return AffineGradLaunch(*arguments)  # type: ignore[arg-type]


def affine_grad(
    grad_y: Tensor,
    values: Tensor,
    bitmap: Tensor,
    offsets: Tensor,
    weight: Tensor | None,
    dtype: torch.dtype,
    block_size: int,
    value_format: str,
    biased: bool,
) -> tuple[Tensor, Tensor]:
    """Return ``(grad_x, sums)`` of ``grad_y [R, L]``, not empty; see ``ops.affine_grad``."""
    (rows, length), of_input = grad_y.shape, weight is not None
    given = grad_y, values, bitmap, offsets, grad_y if weight is None else weight
    totals = grad_y.new_empty(1 + biased, length, dtype=torch.float32)
    key = dtype, *[tensor.dtype for tensor in given], aligned(*given, *totals)
    stored = *bitmap.shape, offsets.shape[1], values.shape[0]
    layout = (rows, length), grad_y.stride(0), stored, (of_input, 1 + biased), block_size, value_format, grad_y.device
    grad_x = grad_y.new_empty(rows if of_input else 0, length, dtype=dtype)
    grad_launch(key, *layout)(given, grad_x, totals.unbind())
    return grad_x, totals
