"""Hooks on the modules of a model, and questions about the forward in which they run.

A hook outlives its owner in copies and pickles of a module. It also runs in forwards that keep nothing: in backward,
inside a checkpoint, in a compiled region.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_actprune.codec.private import COMPILED, current_graph_task_id, top_saved_tensors_hooks
from lightning_actprune.operators.base import Converted
from lightning_actprune.operators.regions import dropped_by_checkpoint

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Names of the attributes that each module has."""


class ForwardHook:
    """A forward hook that does nothing in a copied or pickled module.

    Args:
        method: What it calls; ``None`` in a copy.
    """

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        self._method = method

    def __call__(self, *args: Any) -> None:
        """Call the method, but not inside a compiled graph."""
        if self._method is not None and not torch.compiler.is_compiling():
            self._method(*args)

    def __deepcopy__(self, memo: Any) -> ForwardHook:
        return ForwardHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments, does nothing, and is not of this package

    @property
    def idle(self) -> bool:
        """Whether it does nothing."""
        return self._method is None


def add_hooks(module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> list[RemovableHandle]:
    """Call ``enter`` before and ``leave`` after each forward of a module, also one that raises; return the handles.

    The compiler guards on the numbers of hooks. With those that torch counts up, equal modules would be compiled one by
    one, and from a limit on none would be; so the hooks get negative numbers, which are the same on all modules.
    """
    before = module.register_forward_pre_hook(ForwardHook(enter))
    after = module.register_forward_hook(ForwardHook(leave), always_call=True)
    always = module._forward_hooks_always_called
    for handle, hooks in ((before, (module._forward_pre_hooks,)), (after, (module._forward_hooks, always))):
        number = next(number for number in itertools.count(-1, -1) if number not in hooks[0])
        for places in hooks:
            places[number] = places.pop(handle.id)  # type: ignore[assignment]
        handle.id = number
    return [before, after]


def drop_idle_hooks(module: nn.Module) -> None:
    """Remove the hooks of a copied module that do nothing there."""
    for kind in ("_forward_hooks", "_forward_pre_hooks"):
        hooks = getattr(module, kind)
        for key, hook in list(hooks.items()):
            is_unpickled = getattr(hook, "__func__", None) is nullcontext.__exit__
            if is_unpickled or (isinstance(hook, ForwardHook) and hook.idle):
                for options in (hooks, getattr(module, f"{kind}_with_kwargs"), module._forward_hooks_always_called):
                    options.pop(key, None)


def eager_modules(module: nn.Module, *, running_again: bool = True) -> set[nn.Module]:
    """Return ``module`` and the modules in it, without those inside compiled ones, whose calls Python does not see.

    Args:
        module: The outermost module.
        running_again: Whether to return the modules that run again in backward (``operators.recompute``), too.
    """
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        return set()
    if getattr(module, "_compiler_ctx", None) is not None:  # of Lightning, whose steps are compiled
        return set()
    if isinstance(module, Converted) and module.is_recomputed and not running_again:
        return set()
    return {module}.union(*(eager_modules(child, running_again=running_again) for child in module.children()))


def backward_runs() -> bool:
    """Return whether this thread is in a backward pass."""
    return current_graph_task_id() != -1


def is_recomputation() -> bool:
    """Return whether a checkpoint is running a forward again, in backward.

    Any other forward in backward, such as one of a hook that accumulates gradients by chunks, keeps what it saves until
    its own backward.
    """
    return backward_runs() and (dropped_by_checkpoint(top_saved_tensors_hooks(False)) or _is_in_checkpoint())


def _is_in_checkpoint() -> bool:
    """Return whether a reentrant checkpoint's backward runs, which only its frame shows: it opens no hooks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "backward" and "checkpoint" in frame.f_globals.get("__name__", ""):
            return True
        frame = frame.f_back
    return False


def explain(error: BaseException | None) -> None:
    """Add to the error of ``torch.func`` about saved-tensor hooks which settings open none."""
    text = str(error)
    if isinstance(error, RuntimeError) and "saved tensor hooks" in text and "HINT" not in text:
        error.args = (
            f"{text} HINT: lightning_actprune has set such hooks. `skip_retained=False` with "
            "`rules={'type:saved': None}` sets none, without ActivationMemoryMonitor; a module that runs again in "
            "backward and calls torch.func needs a rule of `None`.",
        )


_PACKAGE = __name__.partition(".")[0] + "."


def in_compiled_region() -> bool:
    """Return whether a compiled region is saving something: the first caller that is not of this package runs one."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if name != "torch.autograd.function" and not name.startswith(_PACKAGE):
            break
        frame = frame.f_back
    return bool(frame.f_globals.get("__name__", "").startswith(COMPILED))
