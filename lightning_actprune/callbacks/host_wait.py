"""Without ``cuda_graphs``: measure how long the GPU waits for Python, and recommend graphs if it waits long."""

from __future__ import annotations

from typing import Any, cast

import lightning.pytorch as pl
import torch

from lightning_actprune.callbacks.compiled import is_compiled
from lightning_actprune.callbacks.cuda_graphs import LEFT_TO_COMPILER, why_eager
from lightning_actprune.codec.private import delay
from lightning_actprune.report import percent

WAIT_STEPS = 4
"""Steps that are measured."""
LONG_WAIT = 0.05
"""Share of a step from which on graphs are recommended."""
_REPLAY = "`ActivationPruning(cuda_graphs=True)` replays the model without Python."
_REPLAY_COMPILED = '`torch.compile(mode="reduce-overhead")` replays compiled code without Python.'


class HostWait:
    """Measure for a few steps how long the GPU waits for Python, and report it once if it is long.

    All steps but the last are plain. The last one begins with a delay on the GPU, which lets Python get ahead.
    """

    def __init__(self) -> None:
        self._start, self._is_over = cast(Any, None), False
        self._times = list[tuple[Any, Any]]()
        self._hint = _REPLAY

    def __getstate__(self) -> dict[str, Any]:
        return vars(HostWait())  # a copy of the callback is in no fit

    def batch_starts(self, trainer: pl.Trainer, model: pl.LightningModule, batch_idx: int) -> str:
        """Record when the GPU starts a step; return ""."""
        if not self._is_over and not self._times:
            self._is_over = why_eager(trainer, model) not in ("", LEFT_TO_COMPILER)
            self._hint = _REPLAY_COMPILED if is_compiled(model) else _REPLAY
        if not self._is_over:
            if len(self._times) == WAIT_STEPS - 1:
                self._times[-1][1].synchronize()
                delay(1.2 * self._shortest())
            self._start = moment()
        return ""

    def batch_ends(self) -> str:
        """Return a message for the user after the last measured step, or ""."""
        if self._start is None:
            return ""
        start, end = self._start, moment()
        self._start = None
        if len(self._times) < WAIT_STEPS - 1:
            self._times.append((start, end))
            return ""
        self._is_over = True
        end.synchronize()
        return describe_wait(self._shortest(), start.elapsed_time(end), self._hint)

    def before_optimizer(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        """Do nothing."""

    def restart(self) -> None:
        """Start again with the next batch, unless the measurement is complete."""
        self._start, self._times = None, []

    def end(self) -> None:
        """Start again with the next fit."""
        vars(self).update(vars(HostWait()))

    def _shortest(self) -> float:
        return min([float(start.elapsed_time(end)) for start, end in self._times])


def moment() -> Any:
    """Return an event at the present end of the GPU's queue."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def describe_wait(step_ms: float, busy_ms: float, hint: str) -> str:
    """Return a recommendation if the GPU is busy for only ``busy_ms`` of a step, or "" if it hardly waits."""
    waits = step_ms - busy_ms
    if waits < LONG_WAIT * step_ms:
        return ""
    return f"The GPU waits for Python for {percent(waits / step_ms)} of a step of {step_ms:.0f} ms. HINT: {hint}"
