"""Kernels of activation functions: output and codes of the derivative in one pass, the gradient in another.

Maths and storage are those of ``operators.activation``. Forward reads ``x`` and writes ``y`` and codes; backward reads
the gradient and codes and writes ``dx``. Bytes moved per value of v bytes with w bits: 2 v + w / 8 each way. A row is
eight values in the order of memory, in one thread if they have 16 bits, in two if they have 32: so loads and stores
have 16 bytes without gaps, and codes are joined in registers. Reading is bitwise that of the plain-torch form. Writing
is so up to the last places of ``exp`` and the like, by which derivatives differ.

Forward is bound by arithmetic: at 4.5 bytes a value an H200 has time for 33 instructions. So a 16-bit ``y`` is computed
with the hardware's approximate exponential and inverse, whose errors are a thousandth of its last place, and GELU
derives the normal distribution from the density that its derivative needs::

    cdf(-|x|) = pdf(x) (c_1 t + .. + c_6 t^6),  t = 1 / (1 + 0.31 |x|),  pdf(x) = exp(-x^2/2) / sqrt(2 pi)

The c were fitted in fp64 for |x| up to 13, to a relative error below 5e-6, a hundredth of the last place of fp16. So
there is no cancellation in the tail, as in ``1 + erf``. Factors of exponents are multiplied out beforehand. A ``y`` in
fp32 is computed with the functions of CUDA's library, as torch's is. The interpreter has neither these instructions nor
the library, so each of these functions has a second form.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from triton.language.extra import libdevice

from lightning_actprune.codec import formats
from lightning_actprune.codec.blocks import ceil_div
from lightning_actprune.kernels import launch
from lightning_actprune.kernels.formats import add_shifted, mix, multiply_add
from lightning_actprune.kernels.launch import Launch

INTERPRETED = tl.constexpr(launch.INTERPRETED)
TANH_SCALE, TANH_CUBE, QUICK = tl.constexpr(math.sqrt(2 / math.pi)), tl.constexpr(0.044715), tl.constexpr(1.702)
"""Constants of ``operators.activation``, which imports no Triton."""
LOG2_E = tl.constexpr(1.4426950408889634)
CDF = tl.constexpr((0.31047263, 0.30190285, 0.33445307, 0.03947777, 0.452311, -0.18530896))
LOG2_PDF = tl.constexpr(-1.3257480647361593)
"""Logarithm of the density at zero."""
PLACE = tl.constexpr(formats.PLACE)
ROW = tl.constexpr(8)
"""Values that share a hash."""
RUN_ROWS = tl.constexpr(32)
"""Rows that are read as NaN together if one value of them is not finite."""


INTEGERS = tl.constexpr(1.5 * 2.0**23)
"""An fp32 number plus this one is rounded to an integer, which is in the lowest bits of the sum."""
UPPER_BITS = tl.constexpr(tuple(add_shifted(0x4B400000, bits, min(8, 32 // bits)) for bits in range(1, 9)))
"""By the bits of a code: the bits of ``INTEGERS`` above eight codes joined to one number, or four bytes."""
TILE = 128
"""Rows that a program handles at once, twice: one for each thread of 4 warps, so that no code moves between threads."""


@triton.jit
def activate_kernel(
    x_ptr, y_ptr, codes_ptr, count, FUNCTION: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, MIDDLE: tl.constexpr,
    INVERSE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, EXACT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write ``y`` and codes for ``2 TILE`` rows of ``x``.

    ``x_ptr`` and ``y_ptr: [count]``, the same memory or not; ``codes_ptr``: bytes of the planes, then of lost runs.
    ``P`` and ``Q`` are parameters of the function. ``MIDDLE`` is the mean of what is read for code 0, ``INVERSE`` the
    inverse of the step, ``LOW`` and ``HIGH`` the bits of the planes. ``EXACT``: the derivative is one bit.
    """
    first = tl.program_id(0).to(tl.int64) * (2 * TILE)
    x = _load_tile(x_ptr, first, count, TILE)
    next_x = _load_tile(x_ptr, first + TILE, count, TILE)  # before `y` is written, which may be `x`
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
    """Write ``dx`` for ``2 TILE`` rows.

    ``grad_ptr`` and ``out_ptr: [count]``; ``codes_ptr`` as in ``activate_kernel``. A code is read as
    ``SHIFT + STEP z``. ``EXACT``: it is read as ``STEP`` if it is 1, else as ``SHIFT``, and a product with zero is
    zero, as in torch.
    """
    first = tl.program_id(0).to(tl.int64) * (2 * TILE)
    rows = tl.cast(tl.cdiv(count, ROW), tl.int64)
    grad = _load_tile(grad_ptr, first, count, TILE)
    next_grad = _load_tile(grad_ptr, first + TILE, count, TILE)  # before any store: one wait for both loads
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
    """Return codes ``[TILE, ROW]`` of derivatives, with other bits above them, and as int32 which runs are lost."""
    # MIDDLE subtracts a half, so rounding to nearest truncates.
    dither = _dither(first + tl.arange(0, TILE), BITS, False).to(tl.float32, bitcast=True)
    total = tl.fma(derivative - MIDDLE, INVERSE, dither)
    # Zero times a sum that is not finite is NaN, so not zero. A maximum of integers is one instruction.
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
    """Write ``TILE`` rows of a mask as bits; ``mask_ptr: [count]``, bytes 0 or 1, ``codes_ptr: [count / 8]`` bytes."""
    first = tl.program_id(0).to(tl.int64) * TILE
    at = ((first + tl.arange(0, TILE)) * ROW)[:, None] + tl.arange(0, ROW)[None, :]
    kept = tl.load(mask_ptr + at, mask=at < count, other=0).to(tl.int32)
    _store_plane(codes_ptr, kept, first, tl.cdiv(count, ROW), 1, 0, TILE)


@triton.jit
def _dither(row, BITS: tl.constexpr, REST: tl.constexpr):
    """Return ``u + 2^BITS`` as the bits of fp32 ``[R, ROW]``; ``REST``: with ``1 - u`` in place of ``u``."""
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
    """Write the codes ``[TILE, ROW]`` of rows to a plane of ``BITS`` bits, each row as one number, or as two of 8 bits.

    ``UPPER`` is the sum of the bits above the codes in such a number.
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
    """Return the codes ``[TILE, ROW]`` of the rows from ``first`` on, and which are in lost runs ``[TILE]``."""
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
    """Return the plane from row ``first`` on as integers that each hold eight codes, or four bytes."""
    plane_ptr += first * BITS
    if BITS >= 4:
        numbers_ptr = plane_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    elif BITS == 2:
        numbers_ptr = plane_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        numbers_ptr = plane_ptr.to(tl.pointer_type(tl.int8), bitcast=True)
    return numbers_ptr


@triton.jit
def two_valued(x, FUNCTION: tl.constexpr, P: tl.constexpr, Q: tl.constexpr):
    """Return ``f(x)``, and where the derivative is the higher of its two values. A NaN stays NaN."""
    if FUNCTION == "relu":
        higher = (x <= 0.0) == 0
        y = tl.where(higher, x, 0.0)
    elif FUNCTION == "leaky_relu":
        higher = x > 0.0
        y = tl.where(higher, x, x * P)
    elif FUNCTION == "hardsigmoid":
        higher = (x > -3.0) & (x < 3.0)
        y = tl.where(x <= -3.0, 0.0, tl.where(x >= 3.0, 1.0, (x + 3.0) * (1.0 / 6.0)))
    else:
        LEAST: tl.constexpr = 0.0 if FUNCTION == "relu6" else P
        MOST: tl.constexpr = 6.0 if FUNCTION == "relu6" else Q
        higher = ((x <= LEAST) | (x >= MOST)) == 0
        y = tl.where(higher, x, tl.where(x <= LEAST, LEAST, MOST))
    return y, higher


@triton.jit
def smooth(x, FUNCTION: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, FP32: tl.constexpr):
    """Return ``f(x)`` and ``f'(x)``; ``FP32``: ``f(x)`` is stored as fp32."""
    if FUNCTION == "gelu":
        pdf = _exp2(tl.fma(x * x, -0.5 * LOG2_E, LOG2_PDF))
        if FP32:
            cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        else:
            t = _inverse(tl.fma(tl.abs(x), 0.31, 1.0))
            part = tl.full([1, 1], CDF[5], tl.float32)
            for power in tl.static_range(5):
                part = part * t + CDF[4 - power]
            part *= t * pdf
            cdf = tl.where(x > 0.0, 1.0 - part, part)
        y = x * cdf
        derivative = cdf + x * pdf
    elif FUNCTION == "gelu_tanh":
        square = x * x
        if FP32:
            s = _sigmoid(x * (2 * TANH_SCALE + (2 * TANH_SCALE * TANH_CUBE) * square), True)
        else:
            SCALE: tl.constexpr = -2 * TANH_SCALE * LOG2_E
            s = _inverse(1.0 + _exp2(x * (SCALE + (SCALE * TANH_CUBE) * square)))
        y = x * s
        derivative = s + (y - y * s) * (2 * TANH_SCALE + (6 * TANH_SCALE * TANH_CUBE) * square)
    elif FUNCTION == "silu":
        s = _sigmoid(x, FP32)
        y = x * s
        derivative = s + (y - y * s)
    elif FUNCTION == "quick_gelu":
        s = _sigmoid(x * QUICK, True) if FP32 else _inverse(1.0 + _exp2(x * (-QUICK * LOG2_E)))
        y = x * s
        derivative = s + (y - y * s) * QUICK
    elif FUNCTION == "sigmoid":
        y = _sigmoid(x, FP32)
        derivative = y - y * y
    elif FUNCTION == "tanh":
        y = _tanh(x)
        derivative = 1.0 - y * y
    elif FUNCTION == "softplus":
        e = _exp(tl.where(x * P > Q, Q, x * P), FP32)
        y = tl.where(x * P > Q, x, _log1p(e) / P)
        derivative = tl.where(x * P > Q, 1.0, e / (1.0 + e))
    elif FUNCTION == "elu":
        y = tl.where(x > 0.0, x, P * _expm1(x))
        derivative = tl.where(x > 0.0, 1.0, P * _exp(x, False))
    elif FUNCTION == "mish":
        # From 20 on, results are constant in fp32. An Inf becomes NaN, as in torch.
        e = _exp(tl.where((x > 20.0) & (x < float("inf")), 20.0, x), FP32)
        n = e * (e + 2.0)
        y = tl.where(x > 20.0, x, x * (n / (n + 2.0)))
        part = 4.0 * e * (1.0 + e) / ((n + 2.0) * (n + 2.0))
        derivative = n / (n + 2.0) + tl.where((x > 20.0) & (x < float("inf")), 0.0, x) * part
    else:
        y = x * tl.where(x < -3.0, 0.0, tl.where(x > 3.0, 6.0, x + 3.0)) * (1.0 / 6.0)
        derivative = tl.where(x <= -3.0, 0.0, tl.where(x >= 3.0, 1.0, x * (1.0 / 3.0) + 0.5))
    return y, derivative


@triton.jit
def widened(x):
    """Return ``x`` in fp32. A pair of bf16 takes one instruction each, and not the compiler's three."""
    if INTERPRETED or x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, b; shl.b32 a, $2, 16; and.b32 b, $2, 0xffff0000; mov.b32 $0, a; mov.b32 $1, b; }",
        "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _exp(x, FP32: tl.constexpr):
    if FP32 and not INTERPRETED:
        return libdevice.exp(x)
    return _exp2(x * LOG2_E)


@triton.jit
def _exp2(x):
    """Return ``2^x`` to two units in the last place, zero below 2^-126."""
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _inverse(x):
    """Return ``1 / x`` to two units in the last place, zero from 2^126 on."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _sigmoid(x, FP32: tl.constexpr):
    if FP32:
        return 1.0 / (1.0 + _exp(-x, True))
    return _inverse(1.0 + _exp(-x, False))


@triton.jit
def _tanh(x):
    if INTERPRETED:
        m = _expm1(-2.0 * tl.abs(x))
        return tl.where(x < 0.0, m, -m) / (m + 2.0)
    return libdevice.tanh(x)


@triton.jit
def _expm1(x):
    if INTERPRETED:
        # W. Kahan's method: the logarithm of the rounded exp(x) undoes its rounding.
        e = tl.exp(x)
        safe = tl.where((e == 1.0) | (e < 0.5), 2.0, e)
        return tl.where(e == 1.0, x, tl.where(e < 0.5, e - 1.0, (e - 1.0) * x / tl.log(safe)))
    return libdevice.expm1(x)


@triton.jit
def _log1p(x):
    if INTERPRETED:
        w = 1.0 + x
        safe = tl.where(w == 1.0, 2.0, w)
        return tl.where(w == 1.0, x, tl.log(safe) * x / (safe - 1.0))
    return libdevice.log1p(x)


def activate_launch(count: int, *constants: object) -> Launch:
    """Return the launch that writes ``y`` and codes of ``count`` values, given ``x``, ``y`` and codes.

    ``x`` has no gaps and may be ``y``. ``constants`` are those of ``activate_kernel`` without ``TILE``.
    """
    return Launch(activate_kernel, _grid(count), count, *constants, TILE, num_warps=4)


def activation_grad_launch(count: int, *constants: object) -> Launch:
    """Return the launch that writes ``dx`` of ``count`` values, given gradient, codes and ``dx`` without gaps."""
    return Launch(activation_grad_kernel, _grid(count), count, *constants, TILE, num_warps=4)


def pack_mask_launch(count: int) -> Launch:
    """Return the launch that writes the bits of a mask of ``count`` bytes, each 0 or 1, given both."""
    return Launch(pack_mask_kernel, _grid(count), count, 2 * TILE, num_warps=4)


def _grid(count: int) -> tuple[int]:
    return (ceil_div(count, 2 * TILE * ROW.value),)
