"""Act right after ``LightningModule.configure_model``, for which Lightning has no hook."""

from __future__ import annotations

import functools
from collections.abc import Callable

import lightning.pytorch as pl

_REPLACED = "_actprune_replaced"
"""Marks our ``configure_model`` on a module instance; holds the instance attribute that it stands in for."""


def call_after_configure_model(pl_module: pl.LightningModule, action: Callable[[pl.LightningModule], None]) -> None:
    """Let the next ``pl_module.configure_model()`` end with ``action``; later ones are the user's own again.

    No hook runs between ``configure_model`` and the tuners, and calling it early would leave the strategy's context.
    """
    original = pl_module.configure_model

    @functools.wraps(original)
    def configure_model() -> None:
        restore_configure_model(pl_module)
        original()
        action(pl_module)

    vars(configure_model)[_REPLACED] = vars(pl_module).get("configure_model")
    vars(pl_module)["configure_model"] = configure_model


def restore_configure_model(pl_module: pl.LightningModule) -> None:
    """Undo every ``call_after_configure_model``."""
    attributes = vars(pl_module)
    while _REPLACED in getattr(attributes.get("configure_model"), "__dict__", {}):
        replaced = vars(attributes.pop("configure_model"))[_REPLACED]
        if replaced is not None:
            attributes["configure_model"] = replaced
