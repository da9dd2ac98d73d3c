"""Act in hooks of the module that Lightning calls where it calls none of a callback.

Right after ``configure_model`` no hook of a callback runs, and in the trials of a tuner there are no callbacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import lightning.pytorch as pl

_REPLACED = "_actprune_replaced"
"""Marks our hook on a module instance; holds the instance attribute that it stands in for."""


def call_after_configure_model(pl_module: pl.LightningModule, action: Callable[[pl.LightningModule], None]) -> None:
    """Let the next ``pl_module.configure_model()`` end with ``action``; later ones are the user's own again.

    No hook runs between ``configure_model`` and the tuners, and calling it early would leave the strategy's context.
    """
    original = pl_module.configure_model

    @functools.wraps(original)
    def configure_model() -> None:
        restore_hook(pl_module, "configure_model")
        original()
        action(pl_module)

    _replace_hook(pl_module, "configure_model", configure_model)


def call_before_train_start(pl_module: pl.LightningModule, action: Callable[[pl.LightningModule], None]) -> None:
    """Let every ``pl_module.on_train_start()`` begin with ``action``, until ``restore_hook``."""
    original = pl_module.on_train_start

    @functools.wraps(original)
    def on_train_start() -> None:
        action(pl_module)
        original()

    _replace_hook(pl_module, "on_train_start", on_train_start)


def restore_hooks(pl_module: pl.LightningModule) -> None:
    """Undo every ``call_after_configure_model`` and ``call_before_train_start``."""
    for name in ("configure_model", "on_train_start"):
        restore_hook(pl_module, name)


def restore_hook(pl_module: pl.LightningModule, name: str) -> None:
    """Undo what was done to this hook."""
    attributes = vars(pl_module)
    while _REPLACED in getattr(attributes.get(name), "__dict__", {}):
        replaced = vars(attributes.pop(name))[_REPLACED]
        if replaced is not None:
            attributes[name] = replaced


def _replace_hook(pl_module: pl.LightningModule, name: str, hook: Callable[[], None]) -> None:
    attributes = vars(pl_module)
    vars(hook)[_REPLACED] = attributes.get(name)
    attributes[name] = hook
