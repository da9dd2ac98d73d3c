"""The sparsity as a function of a Trainer's progress."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_actprune.arguments import check_sparsity
from lightning_actprune.schedules import ConstantSchedule, SparsitySchedule

_Result = TypeVar("_Result")


def checked(check: Callable[..., _Result], *arguments: Any) -> _Result:
    """Return ``check(*arguments)``, with errors of arguments as the exception of Lightning's callbacks."""
    try:
        return check(*arguments)
    except (TypeError, ValueError) as error:
        raise MisconfigurationException(str(error)) from error


class SparsityProgress:
    """What the sparsity is at each step of a fit.

    Args:
        sparsity: The sparsity, if there is no schedule.
        schedule: Sparsity as a function of training progress.
        total_steps: Value of ``trainer.global_step`` at which progress is 1; by default the Trainer's estimate.

    Raises:
        MisconfigurationException: If an argument is not allowed, or the schedule returns what is no sparsity.
    """

    def __init__(self, sparsity: Any, schedule: Any, total_steps: Any) -> None:
        if schedule is not None and not isinstance(schedule, SparsitySchedule):
            raise MisconfigurationException(
                f"`schedule` must be a SparsitySchedule or None, got {schedule!r}. HINT: use LinearSchedule or "
                "CubicSchedule, or subclass SparsitySchedule."
            )
        if total_steps is not None and (
            isinstance(total_steps, bool) or not isinstance(total_steps, int) or total_steps < 1
        ):
            raise MisconfigurationException(
                f"`total_steps` must be a positive int or None, got {total_steps!r}. HINT: it is the number of "
                "optimizer steps of the whole training; None asks the Trainer."
            )
        self._schedule: SparsitySchedule | None = schedule
        self._total_steps: int | None = total_steps
        self._horizon: float | None = None
        self._sparsity = checked(check_sparsity, sparsity) if schedule is None else 0.0
        self.first = self.at(0.0)
        """Sparsity before the first step."""

    def start(self, trainer: pl.Trainer) -> None:
        """Find out at how many steps progress is 1, if the sparsity depends on it."""
        self._horizon = None
        if self._schedule is None or isinstance(self._schedule, ConstantSchedule):
            return
        steps = self._total_steps or trainer.estimated_stepping_batches
        if math.isinf(steps) or steps < 0:
            raise MisconfigurationException(
                f"{self._schedule!r} needs the length of the training, which the Trainer does not know "
                f"(estimated_stepping_batches={steps}). HINT: set `ActivationPruning(total_steps=...)`, or `max_steps` "
                "of the Trainer."
            )
        self._horizon = max(steps, 1)

    def now(self, trainer: pl.Trainer) -> float:
        """Return the sparsity that belongs to ``trainer.global_step``."""
        return self.at(min(trainer.global_step / self._horizon, 1.0) if self._horizon else 0.0)

    def at(self, progress: float) -> float:
        """Return the sparsity at ``progress``, in [0, 1]."""
        if self._schedule is None:
            return self._sparsity
        return checked(
            lambda schedule: check_sparsity(schedule(progress), f"{schedule!r}({progress:g})"), self._schedule
        )

    @property
    def highest(self) -> float:
        """The highest sparsity of the training, looked at in tenths."""
        return max(self.at(tenths / 10) for tenths in range(11))
