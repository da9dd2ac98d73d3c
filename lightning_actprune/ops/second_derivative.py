"""Gradients without a derivative of their own: what that would need is no longer there.

A function that keeps less than it read computes its gradients where none are recorded, and hands them out through an
identity whose derivative is an error. Otherwise ``create_graph=True`` would give second derivatives that are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, ...]


def without_derivative(compute: Callable[[], Gradients], message: str) -> Gradients:
    """Return the gradients that ``compute`` returns; a derivative of them raises ``RuntimeError(message)``."""
    with torch.no_grad():
        grads = compute()
    if torch.compiler.is_compiling():
        return grads
    # Its own leaf, since neither the gradient nor that of the output need require one: d(sum y) has a constant one.
    leaf = torch.zeros((), requires_grad=True)
    return tuple([None if grad is None else _Refuse.apply(grad, leaf, message) for grad in grads])


class _Refuse(torch.autograd.Function):
    """Identity whose derivative is an error."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, leaf: Tensor, message: str) -> Tensor:
        ctx.message = message
        return grad.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        raise RuntimeError(ctx.message)
