"""Let the trials of Lightning's tuners have the layers that the fit will have.

``BatchSizeFinder`` and ``LearningRateFinder`` run trials in ``on_fit_start``, without the callbacks of the Trainer.
Hooks of the strategy are called there all the same, when training starts and when anything raises, so that a callback
can join a trial, and clean up after one that fails before that. The first batch of the first trial is then probed in
place of the first one of the fit, and what it shows holds for the trials that follow and for the fit. Of these no
batch is probed, so each step of the fit keeps what a step of a trial keeps. Until then no layer drops a block that it
may turn out not to drop, so the probed step keeps at least as much.

The module's own hooks are left alone: it may be copied or pickled in a trial, and its hooks are its author's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from typing_extensions import override

from lightning_actprune.callbacks.first_batch import FirstBatchProbe


class TrialProbe(pl.Callback):
    """Probes the first batch of a tuner's trials in place of a callback, which is not called there.

    Args:
        owner: The callback; its ``on_exception`` is called also where a trial has replaced the list that it is in.
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
        self._undo: list[Callable[[], None]] = []
        self.ran = False
        """Whether there were trials in this fit, which is still to begin: who loads a checkpoint is their tuner."""

    def wait(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Join the trials of this fit from now on."""
        self.leave()

        def join() -> None:
            if self._owner not in trainer.callbacks and self not in trainer.callbacks:  # type: ignore[attr-defined]
                trainer.callbacks.append(self)  # type: ignore[attr-defined]  # the tuner's own list, which ends with it
                self.ran = True
                self._begin(pl_module)

        def clean_up(exception: BaseException) -> None:
            self._owner.on_exception(trainer, pl_module, exception)

        strategy = trainer.strategy
        self._undo = [_also(strategy, "on_train_start", join), _also(strategy, "on_exception", clean_up)]

    def leave(self) -> bool:
        """Join no more of them; close what one that ran out of memory has left open. Return whether there were any."""
        ran, self.ran = self.ran, False
        for undo in self._undo:
            undo()
        self._undo = []
        self._probe.stop()
        return ran

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


def _also(strategy: Strategy, name: str, action: Callable[..., None]) -> Callable[[], None]:
    """Let a hook of ``strategy`` do ``action`` too; return what ends that.

    A hook that somebody else has put around it meanwhile stays, and what is inside then does nothing.
    """
    attributes, before, active = vars(strategy), vars(strategy).get(name), [True]
    original = getattr(strategy, name, None)
    if original is None:  # of a later Lightning: nobody would call it
        return lambda: None

    def hook(*arguments: Any) -> None:
        original(*arguments)
        if active[0]:
            action(*arguments)

    def undo() -> None:
        active[0] = False
        if attributes.get(name) is hook:
            del attributes[name]
            if before is not None:
                attributes[name] = before

    attributes[name] = hook
    return undo
