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

from lightning_actprune.kernels.activation_functions import smooth, two_valued, widened
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
TILE = 128
"""Rows that a program handles at once, twice: one a thread of 4 warps, so that no code changes its thread."""


@triton.jit
def activate_kernel(
    x_ptr, y_ptr, codes_ptr, count, FUNCTION: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, MIDDLE: tl.constexpr,
    INVERSE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, EXACT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write ``y`` and the codes of ``2 TILE`` rows of ``x``.

    ``P`` and ``Q`` are the function's parameters, ``MIDDLE`` what is read of code 0 on average, ``INVERSE`` that of the
    step, ``LOW`` and ``HIGH`` the bits of the planes; ``EXACT``: the derivative is one bit.
    """
    first = tl.program_id(0).to(tl.int64) * (2 * TILE)
    x = _load_tile(x_ptr, first, count, TILE)
    next_x = _load_tile(x_ptr, first + TILE, count, TILE)  # before `y`, which may be `x`, is written
    for half in tl.static_range(2):
        row = first + half * TILE
        if EXACT:
            y, higher = two_valued((x if half == 0 else next_x).to(tl.float32), FUNCTION, P, Q)
            _store_codes(codes_ptr, higher.to(tl.int32), row, count, LOW, HIGH, 0, TILE)
        else:
            wide = widened(x if half == 0 else next_x)
            y, derivative = smooth(wide, FUNCTION, P, Q, y_ptr.dtype.element_ty == tl.float32)
            codes, lost = _codes(derivative, row, MIDDLE, INVERSE, LOW + HIGH, TILE)
            if half == 0:
                first_lost = lost
            else:
                rows = tl.cast(tl.cdiv(count, ROW), tl.int64)
                runs_ptr = codes_ptr + rows * (LOW + HIGH)
                _store_lost(runs_ptr, tl.join(first_lost, lost), first, rows, TILE)
            _store_codes(codes_ptr, codes, row, count, LOW, HIGH, UPPER_BITS[LOW - 1], TILE)
        _store_tile(y_ptr, y, row, count, TILE)


@triton.jit
def activation_grad_kernel(
    grad_ptr, codes_ptr, out_ptr, count, STEP: tl.constexpr, SHIFT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    EXACT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write ``dx`` of ``2 TILE`` rows.

    A code is read as ``SHIFT + STEP z``; ``EXACT``: as ``STEP`` if it is 1, else as ``SHIFT``, and by zero nothing is
    multiplied, as in torch.
    """
    first = tl.program_id(0).to(tl.int64) * (2 * TILE)
    rows = tl.cast(tl.cdiv(count, ROW), tl.int64)
    grad = _load_tile(grad_ptr, first, count, TILE)
    next_grad = _load_tile(grad_ptr, first + TILE, count, TILE)  # before anything is written, to wait for both at once
    stored = _load_codes(codes_ptr, first, rows, LOW, HIGH, EXACT, TILE)
    next_stored = _load_codes(codes_ptr, first + TILE, rows, LOW, HIGH, EXACT, TILE)
    for half in tl.static_range(2):
        row = first + half * TILE
        g = grad if half == 0 else next_grad
        codes, lost = stored if half == 0 else next_stored
        if EXACT:
            g = g.to(tl.float32)
            lower = tl.zeros_like(g) if SHIFT == 0 else g * SHIFT
            out = tl.where(codes == 1, g * STEP, lower)
        else:
            step = tl.where(lost != 0, float("nan"), STEP)
            rest = _dither(row + tl.arange(0, TILE), LOW + HIGH, True)
            z = ((codes << (23 - LOW - HIGH)) | rest).to(tl.float32, bitcast=True)
            out = widened(g) * multiply_add(step[:, None], z, tl.full([1, 1], SHIFT, tl.float32))
        _store_tile(out_ptr, out, row, count, TILE)


@triton.jit
def _load_tile(x_ptr, first, count, TILE: tl.constexpr):
    """Return the values ``[TILE, ROW]`` from row ``first`` (int64) on."""
    at = (tl.arange(0, TILE) * ROW)[:, None] + tl.arange(0, ROW)[None, :]
    return tl.load(x_ptr + first * ROW + at, mask=at < count - first * ROW, other=0.0)


@triton.jit
def _store_tile(y_ptr, y, first, count, TILE: tl.constexpr):
    at = (tl.arange(0, TILE) * ROW)[:, None] + tl.arange(0, ROW)[None, :]
    tl.store(y_ptr + first * ROW + at, y.to(y_ptr.dtype.element_ty), mask=at < count - first * ROW)


@triton.jit
def _codes(derivative, first, MIDDLE: tl.constexpr, INVERSE: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr):
    """Return codes ``[TILE, ROW]`` of derivatives, with bits above them, and which runs are lost, as int32."""
    # Less a half, which MIDDLE is for, and rounded to nearest: cut off.
    dither = _dither(first + tl.arange(0, TILE), BITS, False).to(tl.float32, bitcast=True)
    total = tl.fma(derivative - MIDDLE, INVERSE, dither)
    # Zero times a sum of what is not finite is NaN, which is not zero; a maximum of integers is one instruction.
    lost = (tl.sum(total, axis=1) * 0.0 != 0.0).to(tl.int32)
    lost = tl.max(tl.reshape(lost, [TILE // RUN_ROWS, RUN_ROWS]), axis=1)
    return (total + (INTEGERS - (1 << BITS))).to(tl.int32, bitcast=True), lost


@triton.jit
def _store_lost(runs_ptr, lost, first, rows, TILE: tl.constexpr):
    """Write which runs ``[TILE / RUN_ROWS, 2]`` from row ``first`` on are lost, those of the first half first."""
    RUNS: tl.constexpr = TILE // RUN_ROWS
    run = tl.arange(0, RUNS)[:, None] + tl.arange(0, 2)[None, :] * RUNS
    tl.store(runs_ptr + first // RUN_ROWS + run, lost.to(tl.uint8), mask=run * RUN_ROWS < rows - first)


@triton.jit
def pack_mask_kernel(mask_ptr, codes_ptr, count, TILE: tl.constexpr):
    """Write ``TILE`` rows of a mask of ``count`` bytes that are 0 or 1, a bit each."""
    first = tl.program_id(0).to(tl.int64) * TILE
    at = ((first + tl.arange(0, TILE)) * ROW)[:, None] + tl.arange(0, ROW)[None, :]
    kept = tl.load(mask_ptr + at, mask=at < count, other=0).to(tl.int32)
    _store_plane(codes_ptr, kept, first, tl.cdiv(count, ROW), 1, 0, TILE)


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
def _store_codes(
    codes_ptr, codes, first, count, LOW: tl.constexpr, HIGH: tl.constexpr, UPPER: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Write the codes ``[TILE, ROW]`` of the rows from ``first`` on; ``UPPER`` as in ``_store_plane``."""
    rows = tl.cast(tl.cdiv(count, ROW), tl.int64)
    if HIGH > 0:
        _store_plane(codes_ptr, codes & ((1 << LOW) - 1), first, rows, LOW, 0, TILE)
        highest = (codes >> LOW) & ((1 << HIGH) - 1)
        _store_plane(codes_ptr + rows * LOW, highest, first, rows, HIGH, 0, TILE)
    else:
        _store_plane(codes_ptr, codes, first, rows, LOW, UPPER, TILE)


@triton.jit
def _store_plane(plane_ptr, codes, first, rows, BITS: tl.constexpr, UPPER: tl.constexpr, TILE: tl.constexpr):
    """Write the codes ``[TILE, ROW]`` of rows in a plane of ``BITS`` bits, a row as one number or as two.

    ``UPPER`` is what the bits above the codes add up to in a number.
    """
    r, numbers_ptr = tl.arange(0, TILE), _numbers(plane_ptr, first, BITS)
    if BITS == 8:
        pairs = tl.reshape(codes, [TILE, 2, 4]) << (tl.arange(0, 4) * BITS)[None, None, :]
        at = (r * 2)[:, None] + tl.arange(0, 2)[None, :]
        tl.store(numbers_ptr + at, tl.sum(pairs, axis=2) - UPPER, mask=(r < rows - first)[:, None])
    else:
        joined = tl.sum(codes << (tl.arange(0, ROW) * BITS)[None, :], axis=1) - UPPER
        tl.store(numbers_ptr + r, joined.to(numbers_ptr.dtype.element_ty), mask=r < rows - first)


@triton.jit
def _load_codes(
    codes_ptr, first, rows, LOW: tl.constexpr, HIGH: tl.constexpr, EXACT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Return the codes ``[TILE, ROW]`` of the rows from ``first`` on, and whether their runs are lost ``[TILE]``."""
    codes, r = _load_plane(codes_ptr, first, rows, LOW, TILE), tl.arange(0, TILE)
    if HIGH > 0:
        codes |= _load_plane(codes_ptr + rows * LOW, first, rows, HIGH, TILE) << LOW
    if EXACT:
        lost = tl.zeros_like(r).to(tl.uint8)
    else:
        runs_ptr = codes_ptr + rows * (LOW + HIGH) + first // RUN_ROWS
        lost = tl.load(runs_ptr + r // RUN_ROWS, mask=r < rows - first, other=0)
    return codes, lost


@triton.jit
def _load_plane(plane_ptr, first, rows, BITS: tl.constexpr, TILE: tl.constexpr):
    """Return codes ``[TILE, ROW]`` as int32."""
    r, numbers_ptr = tl.arange(0, TILE), _numbers(plane_ptr, first, BITS)
    if BITS == 8:
        at = (r * 2)[:, None] + tl.arange(0, 2)[None, :]
        pairs = tl.load(numbers_ptr + at, mask=(r < rows - first)[:, None], other=0)
        codes = (pairs[:, :, None] >> (tl.arange(0, 4) * BITS)[None, None, :]) & 255
        codes = tl.reshape(codes, [TILE, ROW])
    else:
        joined = tl.load(numbers_ptr + r, mask=r < rows - first, other=0).to(tl.int32)
        codes = (joined[:, None] >> (tl.arange(0, ROW) * BITS)[None, :]) & ((1 << BITS) - 1)
    return codes


@triton.jit
def _numbers(plane_ptr, first, BITS: tl.constexpr):
    """Return the plane from row ``first`` on, as integers of eight codes, or of four bytes."""
    plane_ptr += first * BITS
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
    return Launch(pack_mask_kernel, _grid(count), count, 2 * TILE, num_warps=4)


def _grid(count: int) -> tuple[int]:
    return (ceil_div(count, 2 * TILE * activations.ROW),)


def _planes(kept: Kept | KeptMask) -> tuple[int, int]:
    first, second = (*kept.stored.planes, 0)[:2]
    return first, second
