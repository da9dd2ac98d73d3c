"""Autograd of a gated product ``z = f(a) u`` whose factors are kept in few bits; maths in ``ops.gate``.

Saved for backward: the bytes of q and p, and no other tensor. ``a`` and ``u`` are two tensors, or the halves of one
along a dimension, as a joint projection has them: then the gradient is one tensor too, written in one go.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_actprune.ops import library
from lightning_actprune.ops.activations import Kept
from lightning_actprune.ops.few_bit_activation import activated_dtype, check_activated
from lightning_actprune.ops.gate import GATE_FIRST, GATE_LAST, SEPARATE, Stored, gate, gate_grad
from lightning_actprune.ops.geometry import ceil_div
from lightning_actprune.ops.pack import MAX_KEPT_BLOCKS
from lightning_actprune.ops.second_derivative import without_derivative
from lightning_actprune.ops.unseen import eager_apply

_NO_SECOND = (
    "Second derivatives through a gated product whose factors are kept in few bits are not defined: its inputs are no "
    "longer there. HINT: exclude the module (`exclude=[...]`) where you need create_graph=True."
)


class GateSetting(NamedTuple):
    """What is computed, and how it is stored.

    Args:
        kept: The function; its format is that of q and p.
        block_size: Values per block, not yet cut to a row.
        dtype: Type of the product.
    """

    kept: Kept
    block_size: int
    dtype: torch.dtype


class GateLayout(NamedTuple):
    """Where gate and factor are, and which of them needs a gradient.

    Args:
        place: ``SEPARATE``, or which half of one tensor is the gate.
        dim: The dimension that has the halves.
        for_a: Whether the gate needs a gradient.
        for_u: Whether the factor does.
    """

    place: int
    dim: int
    for_a: bool
    for_u: bool


class FewBitGateFunction(torch.autograd.Function):
    """A gated product that keeps its factors in few bits."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, u: Tensor | None, layout: GateLayout, setting: GateSetting, eager: bool) -> Tensor:
        """Compute the exact product; without ``u``, of the halves of ``a``."""
        kept, block_size, dtype = setting
        rows_a, rows_u, shape = _rows(a, u, layout)
        stored = Stored(kept.value_format, max(1, min(block_size, rows_a.shape[1])), layout.for_a, layout.for_u)
        _check_blocks(a, rows_a.shape, stored)
        if eager:
            z, values = gate(rows_a, rows_u, kept, stored, dtype)
        else:
            flags = stored.for_a, stored.for_u  # torch 2.8 compiles no slice of a named tuple
            z, values = torch.ops.actprune.gate(rows_a, rows_u, *kept, stored.block_size, *flags, dtype)
        ctx.stored, ctx.place, ctx.rows = stored, layout.place, rows_a.shape
        ctx.shapes = a.shape, None if u is None else u.shape
        ctx.dtypes = a.dtype, rows_u.dtype
        if eager:
            ctx.set_materialize_grads(False)
        ctx.save_for_backward(values)
        # No view to autograd, which lets nobody write to one that a function returns (an in-place dropout, say).
        return torch.ops.aten._unsafe_view.default(z, shape)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_z: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``a`` and ``u``."""
        if grad_z is None:  # of an output on which nothing depends
            return (None,) * 5
        if not torch.is_grad_enabled():
            return (*_backward(ctx, grad_z), None, None, None)
        return (*without_derivative(partial(_backward, ctx, grad_z), _NO_SECOND), None, None, None)


_apply_eagerly = eager_apply(FewBitGateFunction)


def gated_product(a: Tensor, u: Tensor, kept: Kept, block_size: int, widens: bool | None = None) -> Tensor:
    """Return ``f(a) u`` of tensors of one shape, at least one of which needs a gradient.

    ``widens``: whether autocast on a GPU makes ``f(a)`` fp32; by default as torch's function of that name.
    """
    if a.dim() == 0:
        return gated_product(a.reshape(1), u.reshape(1), kept, block_size, widens).reshape(())
    for x in (a, u):
        check_activated(x, kept, exact=False)
    setting = GateSetting(kept, block_size, torch.promote_types(activated_dtype(a, kept, widens), u.dtype))
    layout = GateLayout(SEPARATE, a.dim() - 1, a.requires_grad, u.requires_grad)
    order = _memory_order(a) if a.stride() == u.stride() else None
    if order is None:
        return _apply(a, u, layout, setting)
    return _apply(a.permute(order), u.permute(order), layout, setting).permute(_inverse(order))


def gated_halves(
    x: Tensor, kept: Kept, block_size: int, dim: int = -1, gate_first: bool = True, widens: bool | None = None
) -> Tensor:
    """Return ``f(a) u`` of the halves of ``x`` along ``dim``; ``x`` needs a gradient."""
    check_activated(x, kept, exact=False)
    setting = GateSetting(kept, block_size, activated_dtype(x, kept, widens))
    dim, place = dim % x.dim(), GATE_FIRST if gate_first else GATE_LAST
    order = _memory_order(x)
    if order is None:
        return _apply(x, None, GateLayout(place, dim, True, True), setting)
    layout = GateLayout(place, order.index(dim), True, True)
    return _apply(x.permute(order), None, layout, setting).permute(_inverse(order))


def _apply(a: Tensor, u: Tensor | None, layout: GateLayout, setting: GateSetting) -> Tensor:
    eager = library.in_plain_eager_mode(a) and (u is None or library.in_plain_eager_mode(u))
    apply = _apply_eagerly if eager else FewBitGateFunction.apply
    z: Tensor = apply(a, u, layout, setting, eager)
    return z


def _memory_order(x: Tensor) -> list[int] | None:
    """Return the dimensions in the order of memory, ``None`` if they lie so, or one is expanded."""
    strides = x.stride()
    if x.is_contiguous() or 0 in strides:
        return None
    order = sorted(range(x.dim()), key=lambda d: -strides[d])
    return None if order == list(range(x.dim())) else order


def _inverse(order: list[int]) -> list[int]:
    return [order.index(d) for d in range(len(order))]


def _rows(a: Tensor, u: Tensor | None, layout: GateLayout) -> tuple[Tensor, Tensor, list[int]]:
    """Return gate and factor as rows, and the shape of their product; of contiguous tensors without a copy."""
    if u is not None:
        rows, length = math.prod(a.shape[:-1]), a.shape[-1]
        return a.reshape(rows, length), u.reshape(rows, length), list(a.shape)
    dim = layout.dim
    shape = [*a.shape[:dim], a.shape[dim] // 2, *a.shape[dim + 1 :]]
    length = math.prod(shape[dim:])
    joint = a.reshape(math.prod(shape[:dim]), 2 * length)
    first, second = joint[:, :length], joint[:, length:]
    return (first, second, shape) if layout.place == GATE_FIRST else (second, first, shape)


def _check_blocks(a: Tensor, rows: torch.Size, stored: Stored) -> None:
    """Raise if blocks cannot be numbered."""
    blocks = 2 * rows[0] * ceil_div(rows[1], stored.block_size)
    if blocks > MAX_KEPT_BLOCKS:
        raise ValueError(
            f"A gated product of {tuple(a.shape)} has {blocks} blocks, more than 2^31 - 1, the most that can be "
            f"numbered. HINT: take a larger `block_size` than {stored.block_size}."
        )


def _backward(ctx: Any, grad_z: Tensor) -> tuple[Tensor | None, Tensor | None]:
    (values,) = ctx.saved_tensors
    rows, (of_a, of_u), (shape, shape_u) = grad_z.reshape(ctx.rows), ctx.dtypes, ctx.shapes
    if library.in_plain_eager_mode(grad_z):
        grad_a, grad_u = gate_grad(rows, values, ctx.stored, ctx.place, of_a, of_u)
    else:
        grad_a, grad_u = torch.ops.actprune.gate_grad(rows, values, *ctx.stored, ctx.place, of_a, of_u)
    return (
        grad_a.view(shape) if ctx.stored.for_a else None,
        grad_u.view(shape_u) if shape_u is not None and ctx.stored.for_u else None,
    )
