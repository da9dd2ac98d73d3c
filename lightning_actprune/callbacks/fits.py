"""The fit that a callback is in.

Lightning calls the hooks of a callback from whatever Trainer has it. A fit may run inside another, or beside it in
another thread, and a callback may hear of the end of a validation that another Trainer runs meanwhile: what it has
open, and has made of a model, belongs to the Trainer that began its fit.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerStatus


class TrainerCallback(pl.Callback):
    """A callback of a Trainer: it says so to Fabric, which would take it and call none of its hooks."""

    without_trainer: ClassVar[str]
    """What does the same in a loop."""

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Refuse to be a callback of Fabric, which calls this when a module is set up."""
        name = type(self).__name__
        raise MisconfigurationException(
            f"{name} is a callback of a Trainer, and Fabric calls none of its hooks, so it would do nothing. HINT: "
            f"leave {name} out, and use {self.without_trainer}."
        )

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        """Refuse the same where no module was set up together with its optimizer."""
        self.on_after_setup(strategy, optimizer)


class CurrentFit:
    """Knows the Trainer whose fit a callback is in."""

    def __init__(self) -> None:
        self._trainer: weakref.ref[pl.Trainer] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_trainer": None}  # a copy of the callback is in no fit

    def begin(self, callback: pl.Callback, trainer: Any) -> None:
        """Take note that a fit of ``trainer`` begins.

        Raises:
            MisconfigurationException: If the fit of another Trainer still runs, or it is one of another package.
        """
        if not isinstance(trainer, pl.Trainer):
            name, package = type(callback).__name__, type(trainer).__module__.partition(".")[0]
            raise MisconfigurationException(
                f"{name} is a callback of `lightning.pytorch`, and got a Trainer of `{package}`. HINT: import Trainer, "
                f"LightningModule and callbacks from one package, `import lightning.pytorch as pl` in place of "
                f"`import {package} as pl`."
            )
        if self._runs_elsewhere(trainer):
            name = type(callback).__name__
            raise MisconfigurationException(
                f"This {name} is in a fit of another Trainer, which still runs: one fit is inside the other, or they "
                f"are in two threads. HINT: give each Trainer an {name} of its own."
            )
        self._trainer = weakref.ref(trainer)

    def end(self, trainer: pl.Trainer) -> bool:
        """Return whether the fit is over when ``trainer`` ends what it does."""
        if self._runs_elsewhere(trainer):
            return False
        self._trainer = None
        return True

    def _runs_elsewhere(self, trainer: pl.Trainer) -> bool:
        """Return whether the fit is one of another Trainer and not over.

        A callback may not have heard of its end: one that raises in `on_exception` keeps that from others.
        """
        other = None if self._trainer is None else self._trainer()
        return other is not None and other is not trainer and other.state.status == TrainerStatus.RUNNING
