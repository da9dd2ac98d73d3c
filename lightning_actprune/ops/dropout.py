"""Autograd of dropout that keeps its mask in one bit a value.

::

    y  = m x / (1 - p)        m of torch's own generator: the same numbers, the same output
    dx = m g / (1 - p)        exact, but for a gradient that is not finite where m is zero: 0 here, NaN in torch

torch keeps a byte a value or, in place, a number of the type of ``x``. The mask is torch's, of the operator that the
dense layer would call on that device (in place that is another one), so that also the generator is left in the same
state. The byte mask lives until it is packed.

Under ``torch.compile`` dropout is left to the compiler, which fuses it, and may compute a mask again from its seed; so
it is inside transforms and dispatch modes, and for tensor subclasses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_actprune.ops import library
from lightning_actprune.ops.activate import activation_grad, pack_mask
from lightning_actprune.ops.activations import KeptMask
from lightning_actprune.ops.second_derivative import without_derivative
from lightning_actprune.ops.unseen import eager_apply

_NO_SECOND = (
    "Second derivatives through a dropout layer that keeps its mask in one bit are not defined. HINT: leave the module "
    "as it is where you need create_graph=True."
)


class FewBitDropoutFunction(torch.autograd.Function):
    """Dropout that keeps its mask in one bit a value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, in_place: bool) -> Tensor:
        """Drop values of ``x`` with probability ``p``."""
        if in_place:
            noise = torch.empty_like(x).bernoulli_(1 - p)
            y, mask = x, noise.bool()
            x.mul_(noise.div_(1 - p))
            ctx.mark_dirty(x)
        else:
            y, mask = torch.native_dropout(x, p, True)
        ctx.strides, ctx.dtype, ctx.kept = mask.stride(), x.dtype, KeptMask(1 / (1 - p))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(pack_mask(mask))
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradient of the input."""
        if grad_y is None:  # of an output on which nothing depends
            return (None,) * 3
        if not torch.is_grad_enabled():
            return _backward(ctx, grad_y), None, None
        return (*without_derivative(lambda: (_backward(ctx, grad_y),), _NO_SECOND), None, None)


_apply_eagerly = eager_apply(FewBitDropoutFunction)


def keeps_mask(x: Tensor, p: float) -> bool:
    """Return whether a mask is kept of ``x``, and can be in one bit; without, dropout is torch's in every respect."""
    if not (0.0 < p < 1.0 and x.requires_grad and torch.is_grad_enabled() and library.in_plain_eager_mode(x)):
        return False
    return x.is_floating_point() and x.layout == torch.strided and x.numel() > 0


def few_bit_dropout(x: Tensor, p: float, in_place: bool) -> Tensor:
    """Return ``x`` without the values that are dropped, each with probability ``p``, and the others divided by 1 - p.

    Only for what ``keeps_mask``.
    """
    y: Tensor = _apply_eagerly(x, p, in_place)
    return y


def _backward(ctx: Any, grad_y: Tensor) -> Tensor:
    (codes,) = ctx.saved_tensors
    return activation_grad(grad_y, codes, ctx.strides, ctx.kept, ctx.dtype)
