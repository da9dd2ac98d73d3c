"""Autograd functions whose saved tensors few-bit hooks need not see.

What an operator of this package keeps for backward is small already. Hooks that would leave it alone cost the host time
for each tensor, forward and backward; so those hooks are taken off the stack while the function is applied. Hooks that
somebody else has opened, inside ours or around them, see everything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

_autograd: Any = torch._C._autograd


class FewBitHooks(Protocol):
    """A pair of saved-tensor hooks that leaves alone what this package's operators keep."""

    pair: tuple[Callable[..., Any], Callable[..., Any]]
    alone: bool
    """Whether there are no hooks around these, which have to see everything."""

    def settle(self) -> None:
        """Store now what was put off until more is known about the operation that saved it."""


class _Open(threading.local):
    hooks: FewBitHooks | None = None


_open = _Open()


def open_hooks(hooks: FewBitHooks | None) -> FewBitHooks | None:
    """Let functions of this thread not be seen by ``hooks``, which are on the stack, and return who was there before.

    With ``None``, all hooks see them.
    """
    before, _open.hooks = _open.hooks, hooks
    return before


def settle_open_hooks() -> None:
    """Let the hooks of this thread store now what they have put off: for somebody who watches when it is stored."""
    if _open.hooks is not None:
        _open.hooks.settle()


def eager_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``function.apply`` for plain eager mode.

    Without the care for function transforms too, half of its time before torch 2.15, where it has none.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def applied(*args: Any) -> Any:
        hooks = _open.hooks
        if hooks is None:
            return apply(*args)
        hooks.settle()
        top = _autograd._top_saved_tensors_default_hooks(False)
        if not hooks.alone or top is None or top[0] is not hooks.pair[0]:
            return apply(*args)
        _autograd._pop_saved_tensors_default_hooks()
        try:
            return apply(*args)
        finally:
            _autograd._push_saved_tensors_default_hooks(*hooks.pair)

    return applied
