"""Autograd of an activation function whose derivative is kept in few bits (``ops.activations``).

::

    y  = f(x)                 exact
    dx = f'(x) g              f' as it is read back: unbiased, or exact where it takes two values

Saved for backward: the codes, and no other tensor. With ``in_place`` the output lies where the input did, as torch's
in-place functions have it; nothing else needs that input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_actprune.ops import library
from lightning_actprune.ops.activate import activate, activation_grad
from lightning_actprune.ops.activations import ACTIVATIONS, Kept
from lightning_actprune.ops.autocast import autocast_dtype
from lightning_actprune.ops.dispatch import KERNEL_DTYPES
from lightning_actprune.ops.second_derivative import without_derivative
from lightning_actprune.ops.unseen import eager_apply

_NO_SECOND = (
    "Second derivatives through an activation function whose derivative is kept in few bits are not defined: the "
    "second derivative is not kept. HINT: leave the module as it is where you need create_graph=True."
)


class FewBitActivationFunction(torch.autograd.Function):
    """An activation function that keeps its derivative in few bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Kept, dtype: torch.dtype, in_place: bool, eager: bool) -> Tensor:
        """Compute ``f(x)`` in ``dtype`` and the codes of its derivative."""
        if eager:
            y, codes = activate(x, kept, dtype, in_place)
        else:
            y, codes = torch.ops.actprune.activate(x, *kept, dtype)
        if in_place:
            ctx.mark_dirty(x)
        ctx.kept, ctx.dtype, ctx.strides = kept, x.dtype, y.stride()
        if eager:
            ctx.set_materialize_grads(False)
        ctx.save_for_backward(codes)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradient of the input."""
        if grad_y is None:  # of an output on which nothing depends
            return (None,) * 5
        if not torch.is_grad_enabled():
            return _backward(ctx, grad_y), None, None, None, None
        return (*without_derivative(lambda: (_backward(ctx, grad_y),), _NO_SECOND), None, None, None, None)


_apply_eagerly = eager_apply(FewBitActivationFunction)


def few_bit_activation(x: Tensor, kept: Kept, dtype: torch.dtype, in_place: bool) -> Tensor:
    """Return ``f(x)`` in ``dtype``, keeping the codes of its derivative for backward.

    With ``in_place`` that is ``x`` itself, which has ``dtype`` then.
    """
    eager = library.in_plain_eager_mode(x)
    if not in_place:
        apply = _apply_eagerly if eager else FewBitActivationFunction.apply
        y: Tensor = apply(x, kept, dtype, False, eager)
        return y
    if eager and (x.is_contiguous() or torch.empty_like(x, device="meta").stride() == x.stride()):
        written: Tensor = _apply_eagerly(x, kept, dtype, True, True)
        return written
    return x.copy_(few_bit_activation(x, kept, dtype, False))


def activated_dtype(x: Tensor, kept: Kept, widens: bool | None = None) -> torch.dtype:
    """Return the type of ``f(x)``: ``widens`` says whether autocast on a GPU makes it fp32, by default as torch's."""
    if widens is None:
        widens = ACTIVATIONS[kept.function].widens
    return torch.float32 if widens and x.is_cuda and autocast_dtype(x) is not None else x.dtype


def check_activated(x: Tensor, kept: Kept, exact: bool) -> None:
    """Raise if what a function needs of ``x`` cannot be kept; ``exact``: one bit is enough, whatever the type."""
    if isinstance(x, DTensor):
        raise TypeError(
            "An activation function in few bits cannot take DTensors. HINT: leave the module as it is, or apply it to "
            "`x.to_local()`."
        )
    if x.layout != torch.strided:
        raise ValueError(f"`x` must be a dense tensor, got layout {x.layout}. HINT: pass `x.to_dense()`.")
    if x.dtype not in KERNEL_DTYPES and not (exact and x.dtype == torch.float64):
        raise TypeError(
            f"The derivative of {kept.function!r} is kept in few bits of float32, bfloat16 or float16 inputs, got "
            f"{x.dtype}. HINT: convert the input, or leave the module as it is."
        )


def _backward(ctx: Any, grad_y: Tensor) -> Tensor:
    (codes,) = ctx.saved_tensors
    if library.in_plain_eager_mode(grad_y):
        return activation_grad(grad_y, codes, ctx.strides, ctx.kept, ctx.dtype)
    grad: Tensor = torch.ops.actprune.activation_grad(grad_y, codes, ctx.strides, *ctx.kept, ctx.dtype)
    return grad
