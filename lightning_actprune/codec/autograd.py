"""The frame that the autograd functions of all operators share.

A function of this package keeps less than it reads. What follows from that is the same for every operator:

- **Plain eager mode or not** is asked once a pass, of the first argument, and handed to the function as its last one,
  ``eager``: there kernels may run and memory be shared by its address. Anywhere else (a compiler, a transform, a
  dispatch mode) the plain-torch form runs, which these see through.
- **Undefined gradients stay undefined.** An output on which nothing depends gets no gradient, and gives none.
- **No second derivatives.** Backward refuses to run where gradients are recorded (``create_graph=True``). An error in
the
  derivative of what it returns would come too late: ``torch.autograd.grad(..., inputs)`` runs only nodes that lead to
  ``inputs``, and what would lead from such a gradient to the function's input was not kept. It would leave these terms
  out and say nothing.
- **Saved-tensor hooks of this package need not see what is saved** here, since it is small already: they would cost the
  host time for each tensor, forward and backward. So those hooks are taken off the stack while the function is applied.
  Hooks that somebody else has opened, inside ours or around them, see everything.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_actprune.codec.dispatch import in_plain_eager_mode

_autograd: Any = torch._C._autograd


class SavedTensorHooks(Protocol):
    """A pair of saved-tensor hooks that leaves alone what this package's operators keep."""

    pair: tuple[Callable[..., Any], Callable[..., Any]]
    alone: bool
    """Whether there are no hooks around these, which have to see everything."""

    def settle(self) -> None:
        """Store now what was put off until more is known about the operation that saved it."""


class _Open(threading.local):
    hooks: SavedTensorHooks | None = None


_open = _Open()


def open_hooks(hooks: SavedTensorHooks | None) -> SavedTensorHooks | None:
    """Let functions of this thread not be seen by ``hooks``, which are on the stack, and return who was there before.

    With ``None``, all hooks see them.
    """
    before, _open.hooks = _open.hooks, hooks
    return before


def settle_open_hooks() -> None:
    """Let the hooks of this thread store now what they have put off: for somebody who watches when it is stored."""
    if _open.hooks is not None:
        _open.hooks.settle()


def once_differentiable(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of ``backward(ctx, eager, *grads)``, which returns the first of the gradients of the inputs.

    The frame adds ``None`` for all other inputs.

    Args:
        what: What has no second derivatives, for the error.
    """
    message = (
        f"Second derivatives through {what} are not defined: what they need is not kept. HINT: keep the layer dense "
        "with a rule (`rules={name: None}`) where you need create_graph=True."
    )

    def decorated(compute: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compute)
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            count, grad = len(ctx.needs_input_grad), grads[0]
            if grad is None:  # of an output on which nothing depends
                return (None,) * count
            if torch.compiler.is_compiling():  # which refuses second derivatives by itself
                with torch.no_grad():
                    found = compute(ctx, False, *grads)
            elif torch.is_grad_enabled():
                raise RuntimeError(message)
            else:
                found = compute(ctx, in_plain_eager_mode(grad), *grads)
            return (*found, *[None] * (count - len(found)))

        return backward

    return decorated


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return what applies ``function`` to its arguments, to which ``eager`` is added."""
    compute = function.forward

    @functools.wraps(compute)
    def forward(ctx: Any, *arguments: Any) -> Any:
        if arguments[-1]:
            ctx.set_materialize_grads(False)
        return compute(ctx, *arguments)

    function.forward = staticmethod(forward)  # type: ignore[method-assign]
    # Without the care for function transforms too, half of its time before torch 2.15, where it has none.
    eager_apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    traced_apply: Callable[..., Any] = function.apply

    def apply(x: Tensor, *arguments: Any) -> Any:
        if not in_plain_eager_mode(x):
            return traced_apply(x, *arguments, False)
        hooks = _open.hooks
        if hooks is None:
            return eager_apply(x, *arguments, True)
        hooks.settle()
        top = _autograd._top_saved_tensors_default_hooks(False)
        if not hooks.alone or top is None or top[0] is not hooks.pair[0]:
            return eager_apply(x, *arguments, True)
        _autograd._pop_saved_tensors_default_hooks()
        try:
            return eager_apply(x, *arguments, True)
        finally:
            _autograd._push_saved_tensors_default_hooks(*hooks.pair)

    return apply
