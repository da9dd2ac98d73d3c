"""Autograd of a residual branch that is scaled and added in one pass, and kept in few bits; maths in ``ops.normalize``.

::

    y = r + w x        exact
    dr = g, dx = w g   exact
    dw = sum_rows g x  from what few bits hold of x

torch writes the product to memory and reads it again for the sum; here nothing is written but ``y`` and what is stored.
Saved for backward: the branch ``x`` in few bits, and the weight as it is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_actprune.ops import library
from lightning_actprune.ops.autocast import as_dtype
from lightning_actprune.ops.norm import NO_SECOND, NormSetting, gradients, normalized
from lightning_actprune.ops.norm_plan import norm_plan
from lightning_actprune.ops.second_derivative import without_derivative
from lightning_actprune.ops.unseen import eager_apply


class ScaledSumFunction(torch.autograd.Function):
    """``residual + weight * x``, of which ``x`` is kept in few bits."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, residual: Tensor, setting: NormSetting, dtype: torch.dtype, eager: bool
    ) -> Tensor:
        """Compute the exact output in ``dtype``."""
        given, shape = (x, weight, None, residual), (weight.numel(),)
        ctx.plan = plan = norm_plan(given, shape, setting, dtype) if eager else None
        if plan is None:
            y, values, rstd, ctx.layout = normalized(given, shape, setting, dtype, eager)
        else:
            y, values, rstd = plan.forward(*given)
        ctx.residual = residual.dtype
        if eager:
            ctx.set_materialize_grads(False)
        ctx.save_for_backward(values, rstd, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of branch, weight and residual."""
        if grad_y is None:  # of an output on which nothing depends
            return (None,) * 6
        if not torch.is_grad_enabled():
            return (*_backward(ctx, grad_y), None, None, None)
        return (*without_derivative(partial(_backward, ctx, grad_y), NO_SECOND), None, None, None)


_apply_eagerly = eager_apply(ScaledSumFunction)


def scaled_sum(x: Tensor, weight: Tensor, residual: Tensor, setting: NormSetting, dtype: torch.dtype) -> Tensor:
    """Return ``residual + weight * x`` in ``dtype``; ``residual`` has the shape of ``x``, ``weight`` a value a feature.

    ``setting``: without normalisation.
    """
    eager = library.in_plain_eager_mode(x) and library.in_plain_eager_mode(residual)
    apply = _apply_eagerly if eager else ScaledSumFunction.apply
    y: Tensor = apply(x, weight, residual, setting, dtype, eager)
    return y


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    needs_x, needs_weight, needs_residual, *_ = ctx.needs_input_grad
    of_x = of_weight = None
    if needs_x or needs_weight:
        of_x, of_weight, _ = gradients(ctx, grad_y, needs_weight, False)
    return of_x, of_weight, as_dtype(grad_y, ctx.residual) if needs_residual else None
