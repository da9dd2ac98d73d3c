r"""Activation functions ``y = f(x)``, and their derivative in few bits.

Backward needs ``f'(x)`` and nothing else, ``dx = f'(x) g``, and a derivative lies in a range that is known, ``[low,
high]``. It is kept by subtractive dither as values are (``ops.formats``), without a scale or a header to store: of v
bits, m = 2^v - 1, u_e uniform in (0, 1) and not stored::

    q_e = floor((f'_e - start) / step + u_e)        in 0 .. m
    f'_e ~ start + step (q_e + 1/2 - u_e)           step = (high - low) (1 + 2^-11) / m,  start = low - step m 2^-12

The error is uniform in +-step/2 whatever f' is, so also where f' is exactly 0 or 1: it is unbiased, and sums over rows
cancel it. The range is wider than it must be by 2^-12 of it on either side, which is more than all roundings, so that
no code has to be clamped.

The dither is a hash of the position alone: nothing to seed, to save or to advance, the same in a resumed training,
under ``torch.compile`` and in a replayed CUDA graph. Values are numbered in the order of memory, row
``r = e // 8`` of ``ROW`` = 8 of them has one hash (``formats.mix``), and within a row the dithers are spread evenly::

    h = mix(r A)        u_e = ((h xor r(e mod 8)) + 1/2) / 2^n, of h and r the highest n = 22 - v bits

where r(e) has the bits of e in reverse order. With 2^v added, u_e has 23 bits behind the point, as fp32 numbers have.
A reader rounds once: ``z = q + 2^v + 1 - u`` is put together from bits, and ``shift + step z`` is one fused
multiply-add, with ``shift = start + step (1/2 - 2^v - 1)``.

Functions whose derivative takes two values only (ReLU and its like) take one bit, and are exact.

What is stored: the codes of a row in ``v`` bytes, lowest first, by planes as in ``ops.formats`` (three bits are two
planes); a last row that is cut off is filled up with the codes of zeros. Then a byte for each ``RUN`` of 256 values,
which is 1 if a derivative in it is not finite, else 0: these 256 are NaN when they are read, as a block with a NaN is
elsewhere in this package. So whatever makes torch's ``dx`` NaN, such as a NaN in ``x``, or an Inf in that of a GELU,
reaches ours, even where ``g`` is zero. Functions of one bit have no such bytes, and NaN goes where torch lets it.

All maths is done in fp32, whatever the type of ``x``. fp64 is refused, except where one bit is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_actprune.ops import formats

ROW = 8
"""Values that share a hash; their codes of v bits are v bytes."""
RUN = 256
"""Values that are read as NaN together."""
FORMAT_NAMES = ("int8", "int4", "int3", "int2")
ONE_BIT = formats.ValueFormat("bit", (1,))
"""Of derivatives with two values."""
MARGIN = 2.0**-12
"""By what the range is widened on either side, as a part of it."""
TANH_SCALE, TANH_CUBE = math.sqrt(2 / math.pi), 0.044715
QUICK = 1.702
"""Of the GELU by a sigmoid."""

Pair = tuple[float, float]


class Activation(NamedTuple):
    """An activation function.

    Args:
        forward: ``f(x, *parameters)`` as torch computes it.
        derivative: ``f'(x, *parameters)`` of fp32 ``x``; of a function with two values, whether it is the higher one.
        bounds: ``(low, high)`` for given parameters.
        parameters: Names of the parameters, as those of the modules of torch.
        exact: Whether the derivative takes the two values ``bounds`` only.
        widens: Whether autocast on a GPU computes it in fp32.
    """

    forward: Callable[..., Tensor]
    derivative: Callable[..., Tensor]
    bounds: Callable[..., Pair]
    parameters: tuple[str, ...] = ()
    exact: bool = False
    widens: bool = False


class Kept(NamedTuple):
    """What is kept of a function's derivative.

    Args:
        function: Name in ``ACTIVATIONS``.
        parameters: Its parameters.
        value_format: One of ``FORMAT_NAMES``; without a meaning where one bit is exact.
    """

    function: str
    parameters: tuple[float, ...]
    value_format: str

    @property
    def exact(self) -> bool:
        """Whether it is one bit."""
        return ACTIVATIONS[self.function].exact

    @property
    def stored(self) -> formats.ValueFormat:
        """How codes are stored."""
        return ONE_BIT if self.exact else formats.FORMATS[self.value_format]

    @property
    def bounds(self) -> Pair:
        """Least and largest derivative."""
        return ACTIVATIONS[self.function].bounds(*self.parameters)

    @property
    def start_and_step(self) -> Pair:
        """What code 0 stands for, and the distance of two codes, as fp32."""
        low, high = self.bounds
        most = 2**self.stored.bits - 1
        step = formats.fp32((high - low) * (1 + 2 * MARGIN) / most)
        return formats.fp32(low - step * most * MARGIN), step

    @property
    def shift(self) -> float:
        """What is added to ``step (q + 2^v + 1 - u)``, as fp32."""
        start, step = self.start_and_step
        return formats.fp32(start - step * (2**self.stored.bits + 0.5))

    def stored_bytes(self, count: int) -> int:
        """Return the bytes of ``count`` values; ``count`` may be a symbol."""
        rows = -(-count // ROW)
        return rows * self.stored.bits + (0 if self.exact else -(-count // RUN))


class KeptMask(NamedTuple):
    """What is kept of a random mask: a bit a value, of what is not dropped but multiplied by ``factor``."""

    factor: float

    @property
    def exact(self) -> bool:
        """Whether it is one bit."""
        return True

    @property
    def stored(self) -> formats.ValueFormat:
        """How the mask is stored."""
        return ONE_BIT

    @property
    def bounds(self) -> Pair:
        """By what values are multiplied."""
        return 0.0, self.factor


def encode_mask(mask: Tensor) -> Tensor:
    """Return what is kept of ``mask [N]``, bool, in the order of memory, as ``uint8 [bytes]``."""
    return _planes(F.pad(mask, (0, -len(mask) % ROW)).long(), ONE_BIT)


def encode(x: Tensor, kept: Kept) -> Tensor:
    """Return what is kept of ``f'(x)``, of ``x [N]`` in the order of memory, as ``uint8 [bytes]``."""
    rows = F.pad(x if x.dtype == torch.float64 else x.float(), (0, -len(x) % ROW))
    derivative = ACTIVATIONS[kept.function].derivative(rows, *kept.parameters)
    if kept.exact:
        return _planes(derivative.long(), ONE_BIT)
    (start, step), made = kept.start_and_step, kept.stored
    finite = derivative.isfinite()
    u = dither(len(derivative), made.bits, x.device)
    codes = ((torch.where(finite, derivative, start) - start) / step + u).floor().long()
    runs = F.pad(~finite, (0, -len(finite) % RUN)).view(-1, RUN).any(1)
    return torch.cat([_planes(codes, made), runs.to(torch.uint8)])


def multiply(grad: Tensor, codes: Tensor, kept: Kept | KeptMask, dtype: torch.dtype) -> Tensor:
    """Return ``dx [N]`` in ``dtype`` from ``g [N]`` in the order of memory and what was kept."""
    count, made = len(grad), kept.stored
    rows, q, start = -(-count // ROW), torch.zeros((), dtype=torch.int64, device=grad.device), 0
    for place, bits in enumerate(made.planes):
        plane = codes[start : start + rows * bits].view(rows, bits)
        q = q + (formats.split(plane, bits, ROW).flatten()[:count] << sum(made.planes[:place]))
        start += rows * bits
    if isinstance(kept, KeptMask) or kept.exact:
        low, high = kept.bounds
        wide = grad if grad.dtype == torch.float64 else grad.float()
        lower = wide * low if low else torch.zeros_like(wide)
        return torch.where(q == 1, wide * high, lower).to(dtype)
    # Exact in fp64: product and sum are rounded once, as by the fused multiply-add of a kernel.
    z = (q + (2**made.bits + 1)).double() - dither(rows * ROW, made.bits, grad.device)[:count].double()
    derivative = (z * kept.start_and_step[1] + kept.shift).float()
    lost = codes[start:].repeat_interleave(RUN)[:count] != 0
    return (torch.where(lost, torch.nan, derivative) * grad.float()).to(dtype)


def dither(count: int, bits: int, device: torch.device) -> Tensor:
    """Return the fp32 numbers ``u [count]`` of codes of so many bits; ``count`` is a multiple of ``ROW``."""
    rows = torch.arange(count // ROW, device=device)
    h = formats.mix(rows * formats.PLACE & formats.MASK)
    e = torch.arange(ROW, device=device)
    turned = (e & 1) << 31 | (e >> 1 & 1) << 30 | (e >> 2) << 29
    kept = 22 - bits
    return ((((h[:, None] ^ turned) >> (32 - kept)).float() + 0.5) * 2.0**-kept).flatten()


def _planes(codes: Tensor, made: formats.ValueFormat) -> Tensor:
    """Return the bytes of codes ``[rows * ROW]``, plane by plane."""
    planes, rows = [], codes.view(-1, ROW)
    for bits in made.planes:
        planes.append(formats.join(rows & (2**bits - 1), bits).flatten())
        rows = rows >> bits
    return torch.cat(planes)


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _gelu_tanh(x: Tensor) -> Tensor:
    s = torch.sigmoid(2 * TANH_SCALE * (x + TANH_CUBE * x * x * x))
    return s + x * s * (1 - s) * (2 * TANH_SCALE * (1 + 3 * TANH_CUBE * x * x))


def _silu(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s + x * s * (1 - s)


def _sigmoid(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s)


def _mish(x: Tensor) -> Tensor:
    t = torch.tanh(F.softplus(x))
    return t + x * (1 - t * t) * torch.sigmoid(x)


def _softplus(x: Tensor, beta: float, threshold: float) -> Tensor:
    return torch.where(x * beta > threshold, 1.0, torch.sigmoid(x * beta))


def _elu(x: Tensor, alpha: float) -> Tensor:
    return torch.where(x > 0, 1.0, alpha * torch.exp(x))


def _hardswish(x: Tensor) -> Tensor:
    return torch.where(x <= -3, 0.0, torch.where(x >= 3, 1.0, x / 3 + 0.5))


def _between(x: Tensor, low: float, high: float) -> Tensor:
    return ~((x <= low) | (x >= high))


# The GELU's extremes are where x^2 = 2; the others were found in fp64 and rounded away from the middle.
_SILU_BOUNDS = -0.0998394, 1.0998394
ACTIVATIONS = {
    "gelu": Activation(F.gelu, _gelu, lambda: (-0.1289043, 1.1289043)),
    "gelu_tanh": Activation(lambda x: F.gelu(x, approximate="tanh"), _gelu_tanh, lambda: (-0.1289931, 1.1289931)),
    "quick_gelu": Activation(lambda x: x * torch.sigmoid(QUICK * x), lambda x: _silu(QUICK * x), lambda: _SILU_BOUNDS),
    "silu": Activation(F.silu, _silu, lambda: _SILU_BOUNDS),
    "mish": Activation(F.mish, _mish, lambda: (-0.1125262, 1.0884982)),
    "sigmoid": Activation(torch.sigmoid, _sigmoid, lambda: (0.0, 0.25)),
    "tanh": Activation(torch.tanh, lambda x: 1 - torch.tanh(x).square(), lambda: (0.0, 1.0)),
    "softplus": Activation(
        F.softplus, _softplus, lambda beta, threshold: (0.0, 1.0), ("beta", "threshold"), widens=True
    ),
    "elu": Activation(F.elu, _elu, lambda alpha: (min(0.0, alpha), max(1.0, alpha)), ("alpha",)),
    "hardswish": Activation(F.hardswish, _hardswish, lambda: (-0.5, 1.5)),
    "relu": Activation(F.relu, lambda x: ~(x <= 0), lambda: (0.0, 1.0), exact=True),
    "relu6": Activation(F.relu6, lambda x: _between(x, 0.0, 6.0), lambda: (0.0, 1.0), exact=True),
    "hardtanh": Activation(F.hardtanh, _between, lambda low, high: (0.0, 1.0), ("min_val", "max_val"), exact=True),
    "leaky_relu": Activation(
        F.leaky_relu, lambda x, slope: x > 0, lambda slope: (slope, 1.0), ("negative_slope",), exact=True
    ),
    "hardsigmoid": Activation(
        F.hardsigmoid, lambda x: (x > -3) & (x < 3), lambda: (0.0, formats.fp32(1 / 6)), exact=True
    ),
}


def check_kept(function: Any, parameters: Sequence[Any], value_format: Any) -> Kept:
    """Return what is kept of a function if there is one of that name, with such parameters, and such a format."""
    if function not in ACTIVATIONS:
        raise ValueError(f"`function` must be one of {', '.join(map(repr, ACTIVATIONS))}, got {function!r}.")
    names = ACTIVATIONS[function].parameters
    if len(parameters) != len(names):
        raise ValueError(
            f"{function!r} has {len(names)} parameters ({', '.join(names) or 'none'}), got {tuple(parameters)!r}."
        )
    if value_format not in FORMAT_NAMES:
        raise ValueError(
            f"`value_format` of an activation function must be one of {', '.join(map(repr, FORMAT_NAMES))}, got "
            f"{value_format!r}. HINT: 'int4' keeps the derivative in four bits a value."
        )
    return Kept(function, tuple(map(float, parameters)), value_format)
