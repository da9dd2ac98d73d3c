"""Gated products whose factors are stored quantized on the way: maths and storage of ``operators.gated``.

Forward reads ``a`` and ``u`` in one pass and writes ``z`` and the codes of q and p; backward reads the gradient and
codes and writes two gradients. A program holds whole blocks in registers, 16 neighbouring values of both inputs a
thread. Rows of inputs and gradients may have gaps between them, as the halves of a joint tensor have.

Bytes moved per value of 16 bits with int4 in blocks of 32: 2 + 2 + 2 + 1.125 forward (torch: 2 + 2 for the function,
2 + 2 + 2 for the product), 2 + 1.125 + 2 + 2 backward (torch: 6 + 4 for the product, 4 + 2 for the function).
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_actprune.codec.blocks import ceil_div
from lightning_actprune.kernels.activation import smooth, two_valued
from lightning_actprune.kernels.formats import dequantize_tile, encode_format, load_rows, quantize_tile, whole_blocks
from lightning_actprune.kernels.launch import Launch
from lightning_actprune.kernels.places import stride_unit


@triton.jit
def gate_kernel(
    a_ptr, u_ptr, z_ptr, values_ptr, stride_a, stride_u, blocks, length: tl.constexpr, columns: tl.constexpr,
    UNIT: tl.constexpr, FUNCTION: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, LOWER: tl.constexpr,
    HIGHER: tl.constexpr, EXACT: tl.constexpr, FOR_A: tl.constexpr, FOR_U: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Write ``z`` and the codes of ``TILE`` of the ``blocks`` of q and of p.

    ``a_ptr``, ``u_ptr`` and ``z_ptr: [R, L]``; ``values_ptr``: bytes of the blocks of q, then of p. ``P`` and ``Q`` are
    parameters of the function, ``LOWER`` and ``HIGHER`` its derivatives if it has only two (``EXACT``).
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
            p = tl.where(inside, p, 0.0)  # the function of zero need not be zero
        quantize_tile(p, values_ptr, count, place + blocks * FOR_A, exist, B, BLOCK, FORMAT)


@triton.jit
def gate_grad_kernel(
    grad_ptr, values_ptr, grad_a_ptr, grad_u_ptr, stride_grad, stride_out, blocks, length: tl.constexpr,
    columns: tl.constexpr, UNIT: tl.constexpr, FOR_A: tl.constexpr, FOR_U: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Write ``TILE`` blocks of both gradients.

    ``grad_ptr``, ``grad_a_ptr`` and ``grad_u_ptr: [R, L]``; ``values_ptr`` as in ``gate_kernel``.
    """
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
    """Return number, row (int64) and first column of the blocks of a program, and which exist."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    return place, (place // columns).to(tl.int64), (place % columns) * B, place < blocks


@triton.jit
def _inside(first, exist, length: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
    """Return which values of a tile belong to a row."""
    e = tl.arange(0, BLOCK)[None, :]
    return exist[:, None] & ((e < B) & (first[:, None] + e < length))


def gate_launch(
    shape: tuple[int, int], strides: tuple[int, int], function: tuple[object, ...], wanted: tuple[bool, bool],
    block_size: int, bits: int,
) -> Launch:  # fmt: skip
    """Return the launch that writes ``z``, contiguous, and the bytes of q and p, given ``a``, ``u`` and both.

    Args:
        shape: ``[R, L]`` of ``a`` and ``u``, not empty.
        strides: Row strides of ``a`` and ``u``.
        function: The constants ``FUNCTION`` to ``EXACT`` of ``gate_kernel``.
        wanted: Whether q is stored, for the gradient of ``a``, and p, for that of ``u``.
        block_size: Values per block, at most ``L``.
        bits: Bits of a stored value.
    """
    constants = *function, *map(int, wanted), *block_constants(block_size, bits).values()
    return _launch(gate_kernel, shape, strides, block_size, constants)


def gate_grad_launch(
    shape: tuple[int, int], strides: tuple[int, int], wanted: tuple[bool, bool], block_size: int, bits: int
) -> Launch:
    """Return the launch that writes both gradients, given ``g``, the bytes of q and p, and the gradients.

    ``strides`` are the row strides of ``g`` and of the gradients. A gradient that is not ``wanted`` is not accessed.
    """
    constants = *map(int, wanted), *block_constants(block_size, bits).values()
    return _launch(gate_grad_kernel, shape, strides, block_size, constants)


def block_constants(block_size: int, bits: int) -> dict[str, int]:
    """Return the sizes of blocks and tiles that both kernels take at compile time."""
    block, tile = whole_blocks(block_size)
    return {"B": block_size, "BLOCK": block, "TILE": tile, "FORMAT": encode_format(bits, block_size)}


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
