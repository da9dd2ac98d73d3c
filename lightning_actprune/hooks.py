"""Forward hooks for the time of a step, and what they have to know of the call that they see."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class ForwardHook:
    """A forward hook that does nothing in a copied or pickled module.

    Args:
        method: What it calls; ``None`` in a copy.
    """

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        self._method = method

    def __call__(self, *args: Any) -> None:
        """Pass the call on."""
        # One that a compiled graph has taken in must do nothing either.
        if self._method is not None and not torch.compiler.is_compiling():
            self._method(*args)

    def __reduce__(self) -> tuple[type[ForwardHook], tuple[()]]:
        return ForwardHook, ()

    @property
    def idle(self) -> bool:
        """Whether it does nothing."""
        return self._method is None


def drop_idle_hooks(module: nn.Module) -> None:
    """Take the hooks off a copied module that do nothing there."""
    for kind in ("_forward_hooks", "_forward_pre_hooks"):
        hooks = getattr(module, kind)
        for key in [key for key, hook in hooks.items() if isinstance(hook, ForwardHook) and hook.idle]:
            for options in (hooks, getattr(module, f"{kind}_with_kwargs"), module._forward_hooks_always_called):
                options.pop(key, None)


def eager_modules(module: nn.Module) -> set[nn.Module]:
    """Return the modules whose calls Python sees: not those inside a compiled one."""
    if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
        return set()
    return {module}.union(*(eager_modules(child) for child in module.children()))


def backward_runs() -> bool:
    """Return whether this thread is in a backward pass: a forward in there is run again for it, and kept no longer."""
    return torch._C._current_graph_task_id() != -1


def in_reentrant_checkpoint() -> bool:
    """Return whether this call comes from the first forward of a reentrant checkpoint, which records no gradients."""
    module = sys.modules.get("torch.utils.checkpoint")
    if module is None:
        return False
    frame, code = inspect.currentframe(), module.CheckpointFunction.forward.__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def dropped_by_checkpoint(hooks: tuple[Callable[..., Any], Callable[..., Any]] | None) -> bool:
    """Return whether ``hooks`` are the saved-tensor hooks with which torch's checkpoint drops what is saved."""
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"
