"""Activation functions that write the codes of their derivative on the way: maths and storage of ``ops.activations``.

One pass forward, which reads ``x`` and writes ``y`` and codes, and one back. Rows of eight values in the order of
memory are whole in a thread if these are of 16 bits, in two if they are of 32: loads and stores have 16 bytes and
follow each other without gaps, and codes are joined in registers. Reading is bitwise that of the
reference. Codes are so up to the last places of ``exp`` and the like: they are of derivatives that differ by as much.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.kernels.activation_functions import smooth, two_valued
from lightning_actprune.kernels.formats import multiply_add
from lightning_actprune.kernels.hashing import mix
from lightning_actprune.kernels.launch import Launch, aligned
from lightning_actprune.ops import activations, formats
from lightning_actprune.ops.activations import Kept, KeptMask
from lightning_actprune.ops.geometry import ceil_div

PLACE, ROW = tl.constexpr(formats.PLACE), tl.constexpr(activations.ROW)
RUN_ROWS = tl.constexpr(activations.RUN // activations.ROW)


def _upper_bits(bits: int) -> int:
    """Return the sum of eight codes' worth of the bits of ``INTEGERS``, or four bytes' worth, as int32."""
    total = sum(0x4B400000 << bits * place for place in range(min(8, 32 // bits)))
    return (total + 2**31) % 2**32 - 2**31


INTEGERS = tl.constexpr(1.5 * 2.0**23)
"""With this added, an fp32 number is rounded to an integer, which is its lowest bits."""
UPPER_BITS = tl.constexpr(tuple(_upper_bits(bits) for bits in range(1, 9)))
TILE = 256
"""Rows of a program: two a thread of 4 warps."""


@triton.jit
def activate_kernel(
    x_ptr, y_ptr, codes_ptr, count, FUNCTION: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, MIDDLE: tl.constexpr,
    INVERSE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, EXACT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write ``y`` and the codes of ``TILE`` rows of ``x``.

    ``P`` and ``Q`` are the function's parameters, ``MIDDLE`` what is read of code 0 on average, ``INVERSE`` that of the
    step, ``LOW`` and ``HIGH`` the bits of the
    planes; ``EXACT``: the derivative is one bit.
    """
    BITS: tl.constexpr = LOW + HIGH
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    rows = tl.cdiv(count, ROW)
    at = (row * ROW)[:, None] + tl.arange(0, ROW)[None, :]
    inside = at < count
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if EXACT:
        y, higher = two_valued(x, FUNCTION, P, Q)
        codes = higher.to(tl.int32)
    else:
        y, derivative = smooth(x, FUNCTION, P, Q, y_ptr.dtype.element_ty == tl.float32)
        # Less a half, which MIDDLE is for, and rounded to nearest: cut off.
        total = tl.fma(derivative - MIDDLE, INVERSE, _dither(row, BITS, False).to(tl.float32, bitcast=True))
        codes = (total + (INTEGERS - (1 << BITS))).to(tl.int32, bitcast=True)
        # Zero times what is not finite is NaN, which is not zero.
        lost = tl.sum(tl.reshape(tl.sum(derivative * 0.0, axis=1), [TILE // RUN_ROWS, RUN_ROWS]), axis=1) != 0.0
        run = tl.program_id(0).to(tl.int64) * (TILE // RUN_ROWS) + tl.arange(0, TILE // RUN_ROWS)
        runs_ptr = codes_ptr + tl.cast(rows, tl.int64) * BITS
        tl.store(runs_ptr + run, lost.to(tl.uint8), mask=run < tl.cdiv(rows, RUN_ROWS))
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)
    if HIGH > 0:
        _store_plane(codes_ptr, codes & ((1 << LOW) - 1), row, rows, LOW, 0)
        _store_plane(codes_ptr + tl.cast(rows, tl.int64) * LOW, (codes >> LOW) & ((1 << HIGH) - 1), row, rows, HIGH, 0)
    else:
        _store_plane(codes_ptr, codes, row, rows, LOW, 0 if EXACT else UPPER_BITS[LOW - 1])


@triton.jit
def activation_grad_kernel(
    grad_ptr, codes_ptr, out_ptr, count, STEP: tl.constexpr, SHIFT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    EXACT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write ``dx`` of ``TILE`` rows.

    A code is read as ``SHIFT + STEP z``; ``EXACT``: as ``STEP`` if it is 1, else as ``SHIFT``, and by zero nothing is
    multiplied, as in torch.
    """
    BITS: tl.constexpr = LOW + HIGH
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    rows = tl.cdiv(count, ROW)
    at = (row * ROW)[:, None] + tl.arange(0, ROW)[None, :]
    inside = at < count
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    codes = _load_plane(codes_ptr, row, rows, LOW)
    if HIGH > 0:
        codes |= _load_plane(codes_ptr + tl.cast(rows, tl.int64) * LOW, row, rows, HIGH) << LOW
    if EXACT:
        lower = tl.zeros_like(grad) if SHIFT == 0 else grad * SHIFT
        out = tl.where(codes == 1, grad * STEP, lower)
    else:
        runs_ptr = codes_ptr + tl.cast(rows, tl.int64) * BITS
        lost = tl.load(runs_ptr + row // RUN_ROWS, mask=row < rows, other=0)
        step = tl.where(lost != 0, float("nan"), STEP)
        z = ((codes << (23 - BITS)) | _dither(row, BITS, True)).to(tl.float32, bitcast=True)
        out = grad * multiply_add(step[:, None], z, tl.full([1, 1], SHIFT, tl.float32))
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def pack_mask_kernel(mask_ptr, codes_ptr, count, TILE: tl.constexpr):
    """Write ``TILE`` rows of a mask of ``count`` bytes that are 0 or 1, a bit each."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    at = (row * ROW)[:, None] + tl.arange(0, ROW)[None, :]
    kept = tl.load(mask_ptr + at, mask=at < count, other=0).to(tl.int32)
    _store_plane(codes_ptr, kept, row, tl.cdiv(count, ROW), 1, 0)


@triton.jit
def _dither(row, BITS: tl.constexpr, REST: tl.constexpr):
    """Return ``u + 2^BITS`` as the bits of fp32 ``[R, ROW]``; ``REST``: with ``1 - u`` for ``u``."""
    h = mix(row.to(tl.uint32) * PLACE)
    if REST:
        h ^= 0xFFFFFFFF
    h = ((h >> (9 + BITS)) & ((1 << (23 - BITS)) - 2)) | (((127 + BITS) << 23) + 1)
    e = tl.arange(0, ROW)
    turned = ((e & 1) << (22 - BITS)) | (((e >> 1) & 1) << (21 - BITS)) | ((e >> 2) << (20 - BITS))
    return h.to(tl.int32, bitcast=True)[:, None] ^ turned[None, :]


@triton.jit
def _store_plane(plane_ptr, codes, row, rows, BITS: tl.constexpr, UPPER: tl.constexpr):
    """Write the codes ``[R, ROW]`` of rows in a plane of ``BITS`` bits, a row as one number or as two.

    ``UPPER`` is what the bits above the codes add up to in a number.
    """
    if BITS == 8:
        pairs = tl.reshape(codes, [codes.shape[0], 2, 4]) << (tl.arange(0, 4) * BITS)[None, None, :]
        at = (row * 2)[:, None] + tl.arange(0, 2)[None, :]
        tl.store(_numbers(plane_ptr, BITS) + at, tl.sum(pairs, axis=2) - UPPER, mask=(row < rows)[:, None])
    else:
        numbers_ptr = _numbers(plane_ptr, BITS)
        joined = tl.sum(codes << (tl.arange(0, ROW) * BITS)[None, :], axis=1) - UPPER
        tl.store(numbers_ptr + row, joined.to(numbers_ptr.dtype.element_ty), mask=row < rows)


@triton.jit
def _load_plane(plane_ptr, row, rows, BITS: tl.constexpr):
    """Return codes ``[R, ROW]`` as int32."""
    if BITS == 8:
        at = (row * 2)[:, None] + tl.arange(0, 2)[None, :]
        pairs = tl.load(_numbers(plane_ptr, BITS) + at, mask=(row < rows)[:, None], other=0)
        codes = (pairs[:, :, None] >> (tl.arange(0, 4) * BITS)[None, None, :]) & 255
        codes = tl.reshape(codes, [row.shape[0], ROW])
    else:
        joined = tl.load(_numbers(plane_ptr, BITS) + row, mask=row < rows, other=0).to(tl.int32)
        codes = (joined[:, None] >> (tl.arange(0, ROW) * BITS)[None, :]) & ((1 << BITS) - 1)
    return codes


@triton.jit
def _numbers(plane_ptr, BITS: tl.constexpr):
    """Return the plane as integers of eight codes, or of four bytes."""
    if BITS >= 4:
        numbers_ptr = plane_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    elif BITS == 2:
        numbers_ptr = plane_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        numbers_ptr = plane_ptr.to(tl.pointer_type(tl.int8), bitcast=True)
    return numbers_ptr


def activate(x: Tensor, y: Tensor, codes: Tensor, kept: Kept) -> None:
    """Write ``y``, laid out as ``x``, which is dense and may be ``y`` itself, and what is kept."""
    _forward(x.numel(), x.dtype, y.dtype, x.device, aligned(x, y, codes), kept)(x, y, codes)


def pack_mask(mask: Tensor) -> Tensor:
    """Return the bits of ``mask``, ``uint8 [N]`` of 0 and 1, not empty."""
    codes = mask.new_empty(ceil_div(len(mask), activations.ROW))
    _mask(len(mask), mask.device, aligned(mask))(mask, codes)
    return codes


def activation_grad(grad: Tensor, codes: Tensor, out: Tensor, kept: Kept | KeptMask) -> None:
    """Write ``dx`` to ``out``, laid out as ``grad``, which is dense."""
    _backward(out.numel(), grad.dtype, out.dtype, out.device, aligned(grad, codes, out), kept)(grad, codes, out)


def forward_constants(kept: Kept) -> tuple[object, ...]:
    """Return the compile-time constants of ``activate_kernel``."""
    first, second = (*kept.parameters, 0.0, 0.0)[:2]
    start, step = kept.start_and_step
    return kept.function, first, second, start + step / 2, formats.fp32(1 / step), *_planes(kept), kept.exact, TILE


def backward_constants(kept: Kept | KeptMask) -> tuple[object, ...]:
    """Return the compile-time constants of ``activation_grad_kernel``."""
    low, high = kept.bounds
    factors = (high, low)
    if isinstance(kept, Kept) and not kept.exact:
        factors = kept.start_and_step[1], kept.shift
    return *factors, *_planes(kept), kept.exact, TILE


@functools.lru_cache(maxsize=1024)
def _forward(
    count: int, x: torch.dtype, y: torch.dtype, device: torch.device, at_16: tuple[bool, ...], kept: Kept
) -> Launch:
    return Launch(activate_kernel, _grid(count), count, *forward_constants(kept), num_warps=4)


@functools.lru_cache(maxsize=1024)
def _backward(
    count: int,
    grad: torch.dtype,
    out: torch.dtype,
    device: torch.device,
    at_16: tuple[bool, ...],
    kept: Kept | KeptMask,
) -> Launch:
    return Launch(activation_grad_kernel, _grid(count), count, *backward_constants(kept), num_warps=4)


@functools.lru_cache(maxsize=1024)
def _mask(count: int, device: torch.device, at_16: tuple[bool, ...]) -> Launch:
    return Launch(pack_mask_kernel, _grid(count), count, TILE, num_warps=4)


def _grid(count: int) -> tuple[int]:
    return (ceil_div(count, TILE * activations.ROW),)


def _planes(kept: Kept | KeptMask) -> tuple[int, int]:
    first, second = (*kept.stored.planes, 0)[:2]
    return first, second
