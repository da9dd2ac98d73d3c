"""Activation functions and their derivatives in registers, of ``x`` in fp32; which ones, ``ops.activations`` says.

Arithmetic is what the way forward costs: at 4.5 bytes a value an H200 has time for 33 instructions. So 16-bit ``y`` are
made with the hardware's approximate exponential and inverse, whose errors are a thousandth of their last place, and the
normal distribution of the GELU shares the density that its derivative needs::

    cdf(-|x|) = pdf(x) (c_1 t + .. + c_6 t^6),  t = 1 / (1 + 0.31 |x|),  pdf(x) = exp(-x^2/2) / sqrt(2 pi)

The c were fitted in fp64 to a relative error below 5e-6, a hundredth of the last place of fp16, for |x| up to 13, so
that there are none of the cancellations in the tail that ``1 + erf`` has. Factors of exponents are multiplied out.
``y`` in fp32 is made with the functions of CUDA's library, as torch's is. The interpreter knows neither instructions
nor library, so that there is a second form of each of these.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from lightning_actprune.kernels import launch
from lightning_actprune.ops import activations

INTERPRETED = tl.constexpr(launch.INTERPRETED)
TANH_SCALE, TANH_CUBE = tl.constexpr(activations.TANH_SCALE), tl.constexpr(activations.TANH_CUBE)
QUICK = tl.constexpr(activations.QUICK)
LOG2_E = tl.constexpr(1.4426950408889634)
CDF = tl.constexpr((0.31047263, 0.30190285, 0.33445307, 0.03947777, 0.452311, -0.18530896))
LOG2_PDF = tl.constexpr(-1.3257480647361593)
"""Of the density at zero."""


@triton.jit
def two_valued(x, FUNCTION: tl.constexpr, P: tl.constexpr, Q: tl.constexpr):
    """Return ``f(x)``, and whether the derivative is the higher one; a NaN stays NaN."""
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
        e = _exp(tl.minimum(x * P, Q, propagate_nan=tl.PropagateNan.ALL), FP32)
        y = tl.where(x * P > Q, x, _log1p(e) / P)
        derivative = tl.where(x * P > Q, 1.0, e / (1.0 + e))
    elif FUNCTION == "elu":
        y = tl.where(x > 0.0, x, P * _expm1(x))
        derivative = tl.where(x > 0.0, 1.0, P * _exp(x, False))
    elif FUNCTION == "mish":
        # From 20 on all is constant in fp32; an Inf is left to become NaN, as in torch.
        e = _exp(tl.where((x > 20.0) & (x < float("inf")), 20.0, x), FP32)
        n = e * (e + 2.0)
        y = tl.where(x > 20.0, x, x * (n / (n + 2.0)))
        part = 4.0 * e * (1.0 + e) / ((n + 2.0) * (n + 2.0))
        derivative = n / (n + 2.0) + tl.where((x > 20.0) & (x < float("inf")), 0.0, x) * part
    else:
        y = x * tl.minimum(tl.maximum(x + 3.0, 0.0, propagate_nan=tl.PropagateNan.ALL), 6.0,
                           propagate_nan=tl.PropagateNan.ALL) * (1.0 / 6.0)  # fmt: skip
        derivative = tl.where(x <= -3.0, 0.0, tl.where(x >= 3.0, 1.0, x * (1.0 / 3.0) + 0.5))
    return y, derivative


@triton.jit
def widened(x):
    """Return ``x`` in fp32; a pair of bf16 is taken apart by an instruction each, where the compiler takes three."""
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
        # W. Kahan's: the rounding of exp(x) is undone by its own logarithm.
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
