"""Let the trials of Lightning's tuners have the layers that the fit will have.

``BatchSizeFinder`` and ``LearningRateFinder`` run trials in ``on_fit_start``, without the callbacks of the Trainer.
Hooks of the module run in them, so a callback can join them from the module's ``on_train_start``. The first batch of
the first trial is then probed in place of the first one of the fit, and what it shows holds for the trials that follow
and for the fit. Of these no batch is probed, so each step of the fit keeps what a step of a trial keeps. Until then no
layer drops a block that it may turn out not to drop, so the probed step keeps at least as much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from typing_extensions import override

from lightning_actprune.callbacks.configure import call_before_train_start, restore_hook
from lightning_actprune.callbacks.probing import FirstBatchProbe


class TrialProbe(pl.Callback):
    """Probes the first batch of a tuner's trials in place of a callback, which is not called there.

    Args:
        owner: The callback.
        probe: What it probes a first batch with.
        begin: Called when trials begin.
        end: Called at the end of each of their batches.
    """

    def __init__(
        self,
        owner: pl.Callback,
        probe: FirstBatchProbe,
        begin: Callable[[pl.LightningModule], None],
        end: Callable[[pl.Trainer, pl.LightningModule], None],
    ) -> None:
        self._owner, self._probe, self._begin, self._end = owner, probe, begin, end
        self.ran = False
        """Whether there were trials in this fit, which is still to begin: who loads a checkpoint is their tuner."""

    def wait(self, pl_module: pl.LightningModule) -> None:
        """Join the trials of ``pl_module`` from now on."""
        self.ran = False
        call_before_train_start(pl_module, self._join)

    def leave(self, pl_module: pl.LightningModule) -> None:
        """Join no more of them; close what one that ran out of memory has left open."""
        self.ran = False
        restore_hook(pl_module, "on_train_start")
        self._probe.stop()

    def _join(self, pl_module: pl.LightningModule) -> None:
        callbacks: list[pl.Callback] = pl_module.trainer.callbacks  # type: ignore[attr-defined]
        if self._owner not in callbacks and self not in callbacks:
            callbacks.append(self)  # the tuner's own list, which ends with it
            self.ran = True
            self._begin(pl_module)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._probe.batch_starts(pl_module, batch)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._probe.backward_starts()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._end(trainer, pl_module)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._owner.on_exception(trainer, pl_module, exception)  # `LearningRateFinder` has not put it back
