"""The frame that the autograd functions of all operators share.

A function of this package keeps less than it reads. What follows from that is the same for every operator:

- **Where torch does it all** is asked first (``may_compress``): without gradients, where somebody else than autograd
  looks on, and of what is sparse or nested.
- **Plain eager mode or not** is asked once a pass, of the first argument, and handed to the function as its last one,
  ``eager``: there kernels may run and memory be shared by its address. Anywhere else (a compiler, a transform, a
  dispatch mode) the plain-torch form runs, which these see through.
- **Undefined gradients stay undefined.** An output on which nothing depends gets no gradient, and gives none.
- **No second derivatives.** Backward refuses to run where gradients are recorded (``create_graph=True``). An error in
  the derivative of what it returns would come too late: ``torch.autograd.grad(..., inputs)`` runs only nodes that lead
  to ``inputs``, and what would lead from such a gradient to the function's input was not kept. It would leave these
  terms out and say nothing.
- **What a function returns is no view to autograd** (``no_view``), which would let nobody write to it in place.
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
from torch.compiler import is_compiling

from lightning_actprune.codec.dispatch import in_plain_eager_mode
from lightning_actprune.codec.private import (
    are_functorch_transforms_active,
    is_exporting,
    is_tracing,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
    unsafe_view,
)


def may_compress(x: Tensor) -> bool:
    """Return whether what backward needs of ``x`` may be kept in another form than by torch; if not, torch does it all.

    That is where autograd records gradients, and nobody else does. Nor are there blocks in what is sparse or nested.
    """
    return torch.is_grad_enabled() and x.layout == torch.strided and not x.is_nested and not is_watched()


def is_watched() -> bool:
    """Return whether somebody else than autograd asks what operators do.

    A ``torch.func`` transform asks an operator for more than its backward, and what is traced or exported is to know
    nothing of this package.
    """
    if is_compiling():
        return is_exporting()
    return are_functorch_transforms_active() or is_tracing()


class SavedTensorHooks(Protocol):
    """A pair of saved-tensor hooks that leaves alone what this package's operators keep."""

    pair: tuple[Callable[..., Any], Callable[..., Any]]
    alone: bool
    """Whether there are no hooks around these, which have to see everything."""


class _Open(threading.local):
    def __init__(self) -> None:
        self.hooks: list[SavedTensorHooks] = []


_open = _Open()


def open_hooks(hooks: SavedTensorHooks) -> None:
    """Let functions of this thread not be seen by ``hooks``, which are on the stack now."""
    _open.hooks.append(hooks)


def close_hooks(hooks: SavedTensorHooks) -> None:
    """Undo ``open_hooks``, in whatever order: hooks of one module are called in the order in which they were added."""
    _open.hooks.remove(hooks)


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
            if is_compiling():  # which refuses second derivatives by itself
                with torch.no_grad():
                    found = compute(ctx, False, *grads)
            elif torch.is_grad_enabled():
                raise RuntimeError(message)
            else:
                found = compute(ctx, in_plain_eager_mode(grad), *grads)
            return (*found, *[None] * (count - len(found)))

        return backward

    return decorated


def no_view(y: Tensor) -> Tensor:
    """Return ``y``, which its function alone holds, as a tensor of the same memory that is no view to autograd.

    Of a view that a function returns, autograd lets nobody write to it or to a part of it (``y += x``, an in-place
    ReLU), and many of torch's own functions return one: ``F.linear`` of three dimensions that are contiguous.
    """
    if is_compiling():
        return unsafe_view(y, y.shape)
    return y.data if y._is_view() else y  # a tenth of the time that the operator takes


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
        if not _open.hooks:
            return eager_apply(x, *arguments, True)
        hooks = _open.hooks[-1]
        top = top_saved_tensors_hooks(False)
        if not hooks.alone or top is None or top[0] is not hooks.pair[0]:
            return eager_apply(x, *arguments, True)
        pop_saved_tensors_hooks()
        try:
            return eager_apply(x, *arguments, True)
        finally:
            push_saved_tensors_hooks(*hooks.pair)

    return apply
