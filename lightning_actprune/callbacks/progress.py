"""The sparsity of each layer as a function of the Trainer's progress."""

from __future__ import annotations

import math
from collections.abc import Container
from numbers import Integral
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn

from lightning_actprune.callbacks.fit import run_check
from lightning_actprune.operators.base import CompressedLayer
from lightning_actprune.operators.registry import layers
from lightning_actprune.schedules import ConstantSchedule, SparsitySchedule, lowest_sparsity, sparsity_at


class _Layer(NamedTuple):
    """A layer that drops blocks, with its sparsity: a number or a schedule."""

    fqn: str
    layer: CompressedLayer
    sparsity: float | SparsitySchedule


class SparsityProgress:
    """Sets the sparsity of each layer at each step of a fit.

    Args:
        total_steps: Value of ``trainer.global_step`` at which progress is 1; by default the Trainer's estimate.

    Raises:
        MisconfigurationException: If ``total_steps`` is not allowed.
    """

    def __init__(self, total_steps: Any) -> None:
        if total_steps is not None and (
            isinstance(total_steps, bool) or not isinstance(total_steps, Integral) or total_steps < 1
        ):
            raise MisconfigurationException(
                f"`total_steps` must be a positive int or None, got {total_steps!r}. HINT: it is the number of "
                "optimizer steps of the whole training; None takes the Trainer's estimate."
            )
        self.total_steps = None if total_steps is None else int(total_steps)
        self._horizon: int | None = None
        self._layers: list[_Layer] = []

    def find_layers(self, model: nn.Module, owner: str, *, without: Container[str] = ()) -> None:
        """Find the layers that ``owner`` has converted, except those in ``without``."""
        self._layers = [
            _Layer(fqns[0], layer, layer.keep.sparsity)
            for fqns, layer in layers(model)
            if isinstance(layer, CompressedLayer)
            and layer.drops_blocks
            and layer.owner == owner
            and fqns[0] not in without
        ]

    def forget_layers(self) -> None:
        """Let go of the layers."""
        self._layers = []

    def start(self, trainer: pl.Trainer) -> None:
        """Find the number of steps at which progress is 1, if a schedule depends on it."""
        self._horizon = None
        sparsities = [own.sparsity for own in self._layers]
        schedules = [s for s in sparsities if isinstance(s, SparsitySchedule) and not isinstance(s, ConstantSchedule)]
        if not schedules:
            return
        steps = self.total_steps or estimate_steps(trainer)
        if math.isinf(steps) or steps < 0:
            raise MisconfigurationException(
                f"{schedules[0]!r} needs the length of the training, which the Trainer does not know "
                f"(estimated_stepping_batches={steps}). HINT: set `ActivationPruning(total_steps=...)`, or `max_steps` "
                "of the Trainer."
            )
        self._horizon = max(int(steps), 1)

    def follow(self, trainer: pl.Trainer) -> None:
        """Set the sparsity of layers with a schedule to its value at ``trainer.global_step``."""
        progress = min(trainer.global_step / self._horizon, 1.0) if self._horizon else 0.0
        for _, layer, schedule in self._layers:
            if isinstance(schedule, SparsitySchedule):
                sparsity = run_check(sparsity_at, schedule, progress)
                if layer.sparsity != sparsity:
                    layer.sparsity = sparsity

    def wait(self, *, at_zero: bool) -> None:
        """Until training starts, let layers drop the fewest blocks that they will ever drop, or none."""
        for _, layer, sparsity in self._layers:
            layer.wait_at(0.0 if at_zero else run_check(lowest_sparsity, sparsity))

    @property
    def horizon(self) -> int | None:
        """Number of steps at which progress is 1, ``None`` without schedules; before a fit, ``total_steps``."""
        return self._horizon or self.total_steps

    @property
    def highest(self) -> float:
        """Highest sparsity that a layer will have."""
        return max((own.layer.highest_sparsity for own in self._layers), default=0.0)

    @property
    def last(self) -> dict[str, float]:
        """Final sparsity of each layer, by its name."""
        return {fqn: run_check(sparsity_at, sparsity, 1.0) for fqn, _, sparsity in self._layers}


def estimate_steps(trainer: pl.Trainer) -> int | float:
    """Return the optimizer steps of the whole training, also if a callback changes gradient accumulation by epoch.

    The Trainer's own estimate uses one accumulation number: its argument, or that of the current epoch.
    """
    steps, batches = trainer.estimated_stepping_batches, trainer.num_training_batches
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    schedulers = [callback for callback in callbacks if isinstance(callback, GradientAccumulationScheduler)]
    if not schedulers or not trainer.max_epochs or trainer.max_epochs < 0 or math.isinf(batches):
        return steps
    parts = map(schedulers[0].get_accumulate_grad_batches, range(trainer.max_epochs))
    total = sum(math.ceil(batches / part) for part in parts)
    return total if trainer.max_steps == -1 else min(total, trainer.max_steps)
