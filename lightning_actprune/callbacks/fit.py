"""What all callbacks share: checks of arguments, the fit that a callback is in, and warnings at its start.

``verbose``: ``False`` or 0 prints nothing, 1 the essentials once per fit, ``True`` or 2 everything, in each epoch.

Lightning calls the hooks of a callback from every Trainer that has it. One fit may run inside another or in another
thread, and a callback also sees the end of a validation that another Trainer runs meanwhile. So open contexts and
changes to a model belong to the Trainer that began the fit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_actprune.codec.dispatch import describe_reference
from lightning_actprune.codec.private import dispatch_modes
from lightning_actprune.config import drops_blocks, shorten
from lightning_actprune.report import LayerReport

# === Arguments ========================================================================================================

_Result = TypeVar("_Result")

Verbosity: TypeAlias = bool | Literal[0, 1, 2]


def run_check(check: Callable[..., _Result], *arguments: Any, **keywords: Any) -> _Result:
    """Return ``check(*arguments, **keywords)``; argument errors become the exception of Lightning's callbacks."""
    try:
        return check(*arguments, **keywords)
    except (TypeError, ValueError) as error:
        raise MisconfigurationException(str(error)) from None


def holds_whole_weights(strategy: Strategy) -> bool:
    """Return True if each process holds all parameters, and gradients of whole ones."""
    # Lightning derives DeepSpeed's strategy from DDP's.
    return isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)


def check_verbose(value: Any) -> Verbosity:
    """Return ``value`` if it is a valid ``verbose``.

    Raises:
        MisconfigurationException: If it is not.
    """
    if isinstance(value, bool):
        return value
    if not isinstance(value, Integral) or value not in (0, 1, 2):
        raise MisconfigurationException(
            f"`verbose` must be a bool, 0, 1 or 2, got {value!r}. HINT: 0 (or False) prints nothing, 1 the essentials "
            "once per fit, 2 (or True) everything, in each epoch."
        )
    return int(value)  # type: ignore[return-value]


def is_detailed(verbose: Verbosity) -> bool:
    """Return True if everything is printed."""
    return verbose is True or verbose == 2  # `True == 1`


# === The fit that a callback is in ====================================================================================
class TrainerCallback(pl.Callback):
    """A callback for a Trainer. Fabric accepts it but calls none of its hooks, so it refuses Fabric."""

    without_trainer: ClassVar[str]
    """What does the same in a training loop without a Trainer."""

    @property
    def tells_layers(self) -> bool:
        """Whether it prints what an ``ActivationPruning`` has converted."""
        return False

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Called by Fabric when a module is set up: refuse."""
        name = type(self).__name__
        raise MisconfigurationException(
            f"{name} is a callback of a Trainer, and Fabric calls none of its hooks, so it would do nothing. HINT: "
            f"remove {name} and use {self.without_trainer}."
        )

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        """Called by Fabric if no module was set up together with its optimizer: refuse."""
        self.on_after_setup(strategy, optimizer)


class CurrentFit:
    """The Trainer whose fit a callback is in."""

    def __init__(self) -> None:
        self._trainer: weakref.ref[pl.Trainer] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_trainer": None}  # a copy of the callback is in no fit

    def begin(self, callback: pl.Callback, trainer: Any) -> None:
        """Record that a fit of ``trainer`` begins.

        Raises:
            MisconfigurationException: If a fit of another Trainer still runs, or ``trainer`` is from another package.
        """
        if not isinstance(trainer, pl.Trainer):
            name, package = type(callback).__name__, type(trainer).__module__.partition(".")[0]
            raise MisconfigurationException(
                f"{name} is a callback of `lightning.pytorch`, and got a Trainer of `{package}`. HINT: import Trainer, "
                f"LightningModule and callbacks from one package, `import lightning.pytorch as pl` instead of "
                f"`import {package} as pl`."
            )
        if self._runs_elsewhere(trainer):
            name = type(callback).__name__
            raise MisconfigurationException(
                f"This {name} is in a fit of another Trainer that still runs: one fit is inside the other, or they "
                f"are in two threads. HINT: give each Trainer its own {name}."
            )
        self._trainer = weakref.ref(trainer)

    def end(self, trainer: pl.Trainer) -> bool:
        """Return True if the fit is over when ``trainer`` ends what it does."""
        if self._runs_elsewhere(trainer):
            return False
        self._trainer = None
        return True

    def _runs_elsewhere(self, trainer: pl.Trainer) -> bool:
        """Return True if the fit belongs to another Trainer and is not over.

        The callback may have missed its end: a callback that raises in `on_exception` hides it from the others.
        """
        other = None if self._trainer is None else self._trainer()
        return other is not None and other is not trainer and other.state.status == TrainerStatus.RUNNING


# === Warnings at the start of a fit ===================================================================================
def warn_of_surroundings(trainer: pl.Trainer, device: torch.device) -> None:
    """Warn if no kernel runs, or if a dispatch mode sees every operation of torch."""
    dtype = torch.float64 if str(trainer.precision) == "64-true" else torch.float32
    if (reference := describe_reference(dtype, device)) is not None:
        rank_zero_warn(reference)
    modes = [type(mode).__name__ for mode in dispatch_modes()]
    if modes:
        rank_zero_warn(
            f"A dispatch mode is open around the fit ({', '.join(modes)}). It turns the fast path off, for example "
            "inputs that several layers share, so a step saves less and takes longer. HINT: count operations in a "
            "separate short run."
        )


def warn_of_optimizers(trainer: pl.Trainer, total_steps: int | None, horizon: int | None) -> None:
    """Warn if schedules would end early: every optimizer counts its steps, and ``total_steps`` is missing."""
    count = len(trainer.optimizers)
    if horizon is not None and total_steps is None and count > 1:
        rank_zero_warn(
            f"Schedules of the sparsity end at step {horizon}, the Trainer's estimate in batches, but "
            f"`trainer.global_step` counts the steps of all {count} optimizers, so they may end early. HINT: set "
            "`ActivationPruning(total_steps=...)` to the steps of all optimizers."
        )


def warn_of_idle(converted: Sequence[LayerReport], last: dict[str, float]) -> None:
    """Warn of layers that keep all values uncompressed, at every step of the training.

    Args:
        converted: The converted layers.
        last: Final sparsity of each layer that drops blocks.
    """
    idle = [
        layer.fqn
        for layer in converted
        if layer.keep is not None
        and drops_blocks([layer.operator])
        and layer.keep.bits is None
        and not (layer.sparsity or last.get(layer.fqn))
    ]
    if idle:
        one = len(idle) == 1
        rank_zero_warn(
            f"{len(idle)} converted {'layer keeps' if one else 'layers keep'} all values uncompressed (a sparsity of 0 "
            f"without `bits`), which saves nothing: {shorten(idle)}. HINT: set a sparsity, or quantize the values "
            "(`Keep(bits=4)`, or the preset 'balanced')."
        )
