r"""Gated products ``z = f(a) u`` (SwiGLU, GeGLU and their like), and what backward needs of them in few bits.

Backward is linear in two numbers per value, and needs nothing else::

    da = q g,  q = u f'(a)        du = p g,  p = f(a)

torch keeps ``a``, ``f(a)`` and ``u``. Here p and q are kept, in blocks with a scale each as a layer's input is
(``ops.formats``, an integer format), never ``a``, ``u`` or ``z``. What is read of them is off by a random error of mean
zero, so that both gradients are unbiased. ``a`` and ``u`` in as many bits would be no better: p is off by a fifth more
then, and has a bias, and backward would compute f and f' once more.

Root mean square errors of p and q, in parts of their own, for SiLU of 2^20 normal ``a`` and ``u`` in blocks of 32; in
brackets those of p and q from ``a`` and ``u`` in few bits, and the bias of that p:

======  ============  ===========================
int8    0.4 %, 0.6 %  (0.5 %, 0.6 %, bias 0.001 %)
int4    7.6 %, 10 %   (9.1 %, 10 %, bias 0.2 %)
int3    16 %, 22 %    (19 %, 22 %, bias 1.0 %)
int2    38 %, 52 %    (45 %, 51 %, bias 5.4 %)
======  ============  ===========================

Rows ``[R, L]`` are cut into ``N = R ceil(L / b)`` blocks, numbered row by row. Those of q come first, then those of p,
as one tensor ``[2 R, L]`` of which ``pack`` keeps ``ALL_BLOCKS``; what no gradient is wanted for is left out. A block
with a NaN or Inf is NaN when it is read. ``z`` is computed in fp32 and rounded once.

==============  ======================================================================================================
``gate``        ``a [R, L]`` and ``u [R, L]`` -> ``z [R, L]`` and the bytes of q and p
``gate_grad``   ``g [R, L]`` and these -> ``da`` and ``du``, or both side by side as the halves of one tensor
==============  ======================================================================================================

Halves of a joint projection are read where they lie, and their gradients written where they belong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_actprune.ops import formats
from lightning_actprune.ops.activations import ACTIVATIONS, Kept
from lightning_actprune.ops.dispatch import choose_backend, on_device_of
from lightning_actprune.ops.geometry import ceil_div
from lightning_actprune.ops.reference import split_blocks

SEPARATE, GATE_FIRST, GATE_LAST = range(3)
"""How gradients lie: two tensors, or the halves of one."""


class Stored(NamedTuple):
    """How what backward needs is stored.

    Args:
        value_format: One of ``activations.FORMAT_NAMES``.
        block_size: Values per block, in [1, max(L, 1)].
        for_a: Whether q is kept, for the gradient of ``a``.
        for_u: Whether p is kept, for the gradient of ``u``.
    """

    value_format: str
    block_size: int
    for_a: bool
    for_u: bool

    def shape(self, rows: int, length: int) -> tuple[int, int]:
        """Return blocks and bytes of each; ``rows`` and ``length`` may be symbols."""
        blocks = rows * ceil_div(length, self.block_size) * (self.for_a + self.for_u)
        return blocks, formats.FORMATS[self.value_format].row_bytes(self.block_size, 0)


_library = torch.library.Library("actprune", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_library.define(
    "gate(Tensor a, Tensor u, str function, float[] parameters, str value_format, int block_size, bool for_a, "
    "bool for_u, ScalarType dtype) -> (Tensor z, Tensor values)",
    tags=_TAGS,
)
_library.define(
    "gate_grad(Tensor grad, Tensor values, str value_format, int block_size, bool for_a, bool for_u, int layout, "
    "ScalarType of_a, ScalarType of_u) -> (Tensor grad_a, Tensor grad_u)",
    tags=_TAGS,
)


def gate(a: Tensor, u: Tensor, kept: Kept, stored: Stored, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ``z [R, L]`` in ``dtype`` and the bytes of q and p.

    Args:
        a: ``[R, L]`` in fp32 or 16 bits; rows may have gaps between them.
        u: Of the same shape, and of any of these types.
        kept: The function.
        stored: What is kept, and how.
        dtype: Of ``z``.
    """
    a, u = _side_by_side(a), _side_by_side(u)
    z = a.new_empty(a.shape, dtype=dtype)
    values = a.new_empty(stored.shape(*a.shape), dtype=torch.uint8)
    if not a.numel():
        return z, values
    if choose_backend(a.shape, a.dtype, a.device, stored.block_size, 1) == "triton":
        from lightning_actprune.kernels import gate as kernels

        with on_device_of(a):
            kernels.gate(a, u, z, values, kept, stored.block_size, (stored.for_a, stored.for_u))
        return z, values
    p, q = factors(a, u, kept)
    wanted = torch.cat([factor for factor, needed in ((q, stored.for_a), (p, stored.for_u)) if needed])
    blocks = split_blocks(wanted[None], stored.block_size).reshape(-1, stored.block_size)
    return (p * u.float()).to(dtype), formats.quantize(blocks, stored.value_format)


def gate_grad(
    grad: Tensor, values: Tensor, stored: Stored, layout: int, of_a: torch.dtype, of_u: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``a`` and ``u``, each without rows if nothing was kept for it.

    Args:
        grad: ``g [R, L]``.
        values: The bytes of q and p.
        stored: What was kept, and how.
        layout: ``SEPARATE``, or which half of one gradient ``[R, 2 L]`` is the gate's: that is returned first then, and
            the second has no rows.
        of_a: Type of the gradient of ``a``, and of the joint one.
        of_u: Type of the gradient of ``u``.
    """
    grad = _side_by_side(grad)
    grads = _empty_grads(grad, stored, layout, of_a, of_u)
    if not grad.numel():
        return grads
    into = grads if layout == SEPARATE else _halves(grads[0], layout)
    if choose_backend(grad.shape, grad.dtype, grad.device, stored.block_size, 1) == "triton":
        from lightning_actprune.kernels import gate as kernels

        with on_device_of(grad):
            kernels.gate_grad(grad, values, *into, stored.value_format, stored.block_size)
        return grads
    rows, length = grad.shape
    read = formats.dequantize(values, stored.block_size, stored.value_format, torch.float32)
    read = read.view(-1, rows, ceil_div(length, stored.block_size) * stored.block_size)[..., :length]
    for factor, out in zip(read, [out for out in into if len(out)], strict=True):
        out.copy_(factor * grad.float())
    return grads


def factors(a: Tensor, u: Tensor, kept: Kept) -> tuple[Tensor, Tensor]:
    """Return p and q in fp32."""
    function, wide = ACTIVATIONS[kept.function], a.float()
    derivative = function.derivative(wide, *kept.parameters)
    if function.exact:
        low, high = kept.bounds
        derivative = torch.where(derivative, high, low)
    return function.forward(wide, *kept.parameters), u.float() * derivative


def _side_by_side(rows: Tensor) -> Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _empty_grads(
    grad: Tensor, stored: Stored, layout: int, of_a: torch.dtype, of_u: torch.dtype
) -> tuple[Tensor, Tensor]:
    rows, length = grad.shape
    if layout != SEPARATE:
        return grad.new_empty(rows, 2 * length, dtype=of_a), grad.new_empty(0, length, dtype=of_u)
    return (
        grad.new_empty(rows if stored.for_a else 0, length, dtype=of_a),
        grad.new_empty(rows if stored.for_u else 0, length, dtype=of_u),
    )


def _halves(joint: Tensor, layout: int) -> tuple[Tensor, Tensor]:
    """Return those of the gate and of what it multiplies."""
    first, second = joint.chunk(2, 1)
    return (first, second) if layout == GATE_FIRST else (second, first)


def _gate(
    a: Tensor,
    u: Tensor,
    function: str,
    parameters: Sequence[float],
    value_format: str,
    block_size: int,
    for_a: bool,
    for_u: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    stored = Stored(value_format, block_size, for_a, for_u)
    return gate(a, u, Kept(function, tuple(parameters), value_format), stored, dtype)


def _gate_grad(
    grad: Tensor,
    values: Tensor,
    value_format: str,
    block_size: int,
    for_a: bool,
    for_u: bool,
    layout: int,
    of_a: torch.dtype,
    of_u: torch.dtype,
) -> tuple[Tensor, Tensor]:
    return gate_grad(grad, values, Stored(value_format, block_size, for_a, for_u), layout, of_a, of_u)


_library.impl("gate", _gate, "CompositeExplicitAutograd")
_library.impl("gate_grad", _gate_grad, "CompositeExplicitAutograd")


@torch.library.register_fake("actprune::gate", lib=_library)
def _gate_fake(
    a: Tensor,
    u: Tensor,
    function: str,
    parameters: Sequence[float],
    value_format: str,
    block_size: int,
    for_a: bool,
    for_u: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    stored = Stored(value_format, block_size, for_a, for_u)
    return a.new_empty(a.shape, dtype=dtype), a.new_empty(stored.shape(*a.shape), dtype=torch.uint8)


@torch.library.register_fake("actprune::gate_grad", lib=_library)
def _gate_grad_fake(
    grad: Tensor,
    values: Tensor,
    value_format: str,
    block_size: int,
    for_a: bool,
    for_u: bool,
    layout: int,
    of_a: torch.dtype,
    of_u: torch.dtype,
) -> tuple[Tensor, Tensor]:
    return _empty_grads(grad, Stored(value_format, block_size, for_a, for_u), layout, of_a, of_u)
