"""Gradients without a derivative of their own: what that would need is no longer there.

A function that keeps less than it read refuses to run backward where gradients are recorded (``create_graph=True``). An
error in the derivative of what it returns would come too late: ``torch.autograd.grad(..., inputs)`` runs only nodes
that lead to ``inputs``, and what would lead from such a gradient to the function's input was not kept. It would leave
these terms out and say nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, ...]


def without_derivative(compute: Callable[[], Gradients], message: str) -> Gradients:
    """Raise ``RuntimeError(message)``; where a compiler traces, which refuses by itself, return ``compute()``."""
    if not torch.compiler.is_compiling():
        raise RuntimeError(message)
    with torch.no_grad():
        return compute()
