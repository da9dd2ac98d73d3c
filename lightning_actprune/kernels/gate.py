"""Gated products that write the codes of their factors on the way: maths and storage of ``ops.gate``.

One pass forward, which reads ``a`` and ``u`` and writes ``z`` and the codes of q and p, and one back, which reads the
gradient and codes and writes two gradients. A program holds whole blocks in its registers, 16 neighbouring values of
both inputs a thread; rows of inputs and of gradients may have gaps between them, as halves of a joint tensor do.

Bytes moved per value of 16 bits with int4 in blocks of 32: 2 + 2 + 2 + 1.125 forward (torch: 2 + 2 of the function,
2 + 2 + 2 of the product), 2 + 1.125 + 2 + 2 backward (torch: 6 + 4 of the product, 4 + 2 of the function).
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.kernels.activation_functions import smooth, two_valued
from lightning_actprune.kernels.formats import dequantize_tile, encode_format, whole_blocks
from lightning_actprune.kernels.keys import stride_unit
from lightning_actprune.kernels.launch import Launch, aligned
from lightning_actprune.kernels.quantize import load_rows, quantize_tile
from lightning_actprune.ops.activations import Kept
from lightning_actprune.ops.geometry import ceil_div

Wanted = tuple[bool, bool]
"""Whether q, for the gradient of ``a``, and p, for that of ``u``, are kept."""


@triton.jit
def gate_kernel(
    a_ptr, u_ptr, z_ptr, values_ptr, stride_a, stride_u, blocks, length: tl.constexpr, columns: tl.constexpr,
    UNIT: tl.constexpr, FUNCTION: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, LOWER: tl.constexpr,
    HIGHER: tl.constexpr, EXACT: tl.constexpr, FOR_A: tl.constexpr, FOR_U: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Write ``z [R, L]`` and the codes of ``TILE`` of the ``blocks`` of q and p.

    Strides of rows are in units of ``UNIT`` values, see ``keys.stride_unit``. ``P`` and ``Q`` are the function's
    parameters, ``LOWER`` and ``HIGHER`` its derivatives if these are two (``EXACT``).
    """
    place, r, first, exist = _blocks_of(blocks, columns, B, TILE)
    inside = _inside(first, exist, length, B, BLOCK)
    a = load_rows(a_ptr + r * stride_a * UNIT, first, exist, length, B, BLOCK).to(tl.float32)
    u = load_rows(u_ptr + r * stride_u * UNIT, first, exist, length, B, BLOCK).to(tl.float32)
    if EXACT:
        p, higher = two_valued(a, FUNCTION, P, Q)
        derivative = tl.where(higher, HIGHER, LOWER)
    else:
        p, derivative = smooth(a, FUNCTION, P, Q, z_ptr.dtype.element_ty == tl.float32)
    column = first[:, None] + tl.arange(0, BLOCK)[None, :]
    tl.store(z_ptr + r[:, None] * length + column, (p * u).to(z_ptr.dtype.element_ty), mask=inside)
    count = blocks * (FOR_A + FOR_U)
    if FOR_A:
        quantize_tile(u * derivative, values_ptr, count, place, exist, B, BLOCK, FORMAT)
    if FOR_U:
        if length % B != 0 or B != BLOCK:
            p = tl.where(inside, p, 0.0)  # the function of what is not there need not be
        quantize_tile(p, values_ptr, count, place + blocks * FOR_A, exist, B, BLOCK, FORMAT)


@triton.jit
def gate_grad_kernel(
    grad_ptr, values_ptr, grad_a_ptr, grad_u_ptr, stride_grad, stride_out, blocks, length: tl.constexpr,
    columns: tl.constexpr, UNIT: tl.constexpr, FOR_A: tl.constexpr, FOR_U: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Write ``TILE`` blocks of both gradients, whose rows are ``stride_out`` apart."""
    place, r, first, exist = _blocks_of(blocks, columns, B, TILE)
    inside = _inside(first, exist, length, B, BLOCK)
    grad = load_rows(grad_ptr + r * stride_grad * UNIT, first, exist, length, B, BLOCK).to(tl.float32)
    out = (r * stride_out * UNIT)[:, None] + (first[:, None] + tl.arange(0, BLOCK)[None, :])
    count = blocks * (FOR_A + FOR_U)
    if FOR_A:
        q = dequantize_tile(values_ptr, count, place, exist, 0, B, BLOCK, FORMAT)
        tl.store(grad_a_ptr + out, (q * grad).to(grad_a_ptr.dtype.element_ty), mask=inside)
    if FOR_U:
        p = dequantize_tile(values_ptr, count, place + blocks * FOR_A, exist, 0, B, BLOCK, FORMAT)
        tl.store(grad_u_ptr + out, (p * grad).to(grad_u_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _blocks_of(blocks, columns: tl.constexpr, B: tl.constexpr, TILE: tl.constexpr):
    """Return number, row (int64) and first column of the blocks of a program, and whether they exist."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    return place, (place // columns).to(tl.int64), (place % columns) * B, place < blocks


@triton.jit
def _inside(first, exist, length: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
    """Return which values of a tile belong to a row."""
    e = tl.arange(0, BLOCK)[None, :]
    return exist[:, None] & ((e < B) & (first[:, None] + e < length))


def gate(a: Tensor, u: Tensor, z: Tensor, values: Tensor, kept: Kept, block_size: int, wanted: Wanted) -> None:
    """Write ``z``, contiguous, and the bytes of q and p, of rows ``a`` and ``u [R, L]`` that are not empty."""
    key = a.device, a.dtype, u.dtype, z.dtype, *aligned(a, u)
    _forward(key, a.shape, (a.stride(0), u.stride(0)), kept, block_size, wanted)(a, u, z, values)


def gate_grad(grad: Tensor, values: Tensor, grad_a: Tensor, grad_u: Tensor, value_format: str, block_size: int) -> None:
    """Write the gradients that have rows; these are equally far apart in both."""
    wanted = len(grad_a) > 0, len(grad_u) > 0
    stride = grad_a.stride(0) if wanted[0] else grad_u.stride(0)
    key = grad.device, grad.dtype, grad_a.dtype, grad_u.dtype, *aligned(grad, values, grad_a, grad_u)
    launch = _backward(key, grad.shape, (grad.stride(0), stride), value_format, block_size, wanted)
    launch(grad, values, grad_a, grad_u)


def forward_constants(kept: Kept, wanted: Wanted) -> dict[str, object]:
    """Return what ``gate_kernel`` knows at compile time of a function."""
    first, second = (*kept.parameters, 0.0, 0.0)[:2]
    names = "FUNCTION", "P", "Q", "LOWER", "HIGHER", "EXACT", "FOR_A", "FOR_U"
    return dict(zip(names, (kept.function, first, second, *kept.bounds, kept.exact, *map(int, wanted)), strict=True))


def block_constants(block_size: int, value_format: str) -> dict[str, int]:
    """Return what both kernels know at compile time of blocks."""
    block, tile = whole_blocks(block_size)
    return {"B": block_size, "BLOCK": block, "TILE": tile, "FORMAT": encode_format(value_format, block_size)}


@functools.lru_cache(maxsize=1024)
def _forward(
    key: object, shape: tuple[int, int], strides: tuple[int, int], kept: Kept, block_size: int, wanted: Wanted
) -> Launch:
    """Return the launch; ``key``: dtypes, device and alignment, which matter to the compiled kernel that it keeps."""
    constants = *forward_constants(kept, wanted).values(), *block_constants(block_size, kept.value_format).values()
    return _launch(gate_kernel, shape, strides, block_size, constants)


@functools.lru_cache(maxsize=1024)
def _backward(
    key: object, shape: tuple[int, int], strides: tuple[int, int], value_format: str, block_size: int, wanted: Wanted
) -> Launch:
    constants = *map(int, wanted), *block_constants(block_size, value_format).values()
    return _launch(gate_grad_kernel, shape, strides, block_size, constants)


def _launch(
    kernel: triton.JITFunction,
    shape: tuple[int, int],
    strides: tuple[int, int],
    block_size: int,
    constants: tuple[object, ...],
) -> Launch:
    (rows, length), unit = shape, stride_unit(*strides)
    columns = ceil_div(length, block_size)
    scalars = strides[0] // unit, strides[1] // unit, rows * columns, length, columns, unit
    grid = (ceil_div(rows * columns, whole_blocks(block_size)[1]),)
    return Launch(kernel, grid, *scalars, *constants, num_warps=4)
