"""The figures of a fit's steps: memory of one, times of others, alone on the GPU where several cases run side by side.

After ``WARM_UP`` steps memory is measured in one, then ``ALONE`` steps are waited for, and ``IN_A_ROW`` ones are not::

    activations_mib    growth of the allocator's requested bytes over the forward
    peak_mib           the most that was allocated in that step
    reserved_mib       the most that the allocator held in it
    host_ms            how long the host takes to issue a step to a device that has nothing to do, the median
    step_ms            from where the device ends one step to where it ends the next, without waiting, the median

``in_turns`` runs cases in processes of their own, which warm up side by side and then measure one after the other.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Lock
from typing import Any

import lightning.pytorch as pl
import torch

from examples.benchmarks.common import MIB, finish_together, start_in_fork

WARM_UP, ALONE, IN_A_ROW = 6, 4, 16
"""A budget chooses, probes and measures in the first four steps, and in two more where it has to choose again."""
STEPS = WARM_UP + 1 + ALONE + IN_A_ROW
WAITING = 0.6
"""Share of the time that cases have, for which one waits at most until all have warmed up."""
TIMES = ("step_ms", "host_ms")


class StepFigures(pl.Callback):
    """Measures the memory of one step, then times steps one by one, then some in a row; a Trainer's last callback."""

    def __init__(self) -> None:
        self.memory: dict[str, float] = {}
        self.issued: list[float] = []
        self.ended: list[torch.cuda.Event] = []
        self.number, self.before, self.began = 0, 0, 0.0
        self.allocation: Any = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.number = batch_idx
        if batch_idx == WARM_UP:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = requested()

    def on_before_zero_grad(self, *_: Any) -> None:
        # Lightning zeroes gradients between forward and backward: those of the last step are here before and after.
        if self.number == WARM_UP:
            self.memory["activations_mib"] = round((requested() - self.before) / MIB, 2)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now, timed = time.perf_counter(), batch_idx - WARM_UP
        if timed >= ALONE:
            self.ended.append(torch.cuda.Event(enable_timing=True))
            self.ended[-1].record()
        if 0 <= timed <= ALONE:
            torch.cuda.synchronize()
        if timed == 0:
            most = {"peak_mib": torch.cuda.max_memory_allocated(), "reserved_mib": torch.cuda.max_memory_reserved()}
            self.memory |= {name: round(size / MIB, 2) for name, size in most.items()}
            for callback in trainer.callbacks:
                self.allocation = getattr(callback, "allocation", self.allocation)
        elif 0 < timed <= ALONE:
            self.issued.append((now - self.began) * 1e3)
        self.began = time.perf_counter()

    def found(self) -> dict[str, float]:
        """Return the figures of a fit."""
        torch.cuda.synchronize()
        steps = [before.elapsed_time(end) for before, end in itertools.pairwise(self.ended)]
        times = statistics.median(steps), statistics.median(self.issued)
        rounded = {name: round(ms, 2) for name, ms in zip(TIMES, times, strict=True)}
        return {**self.memory, **rounded, "in_a_row": IN_A_ROW}


class Arrivals:
    """Counts the processes that have warmed up, or failed, and waits for all.

    Args:
        parties: How many there are.
        seconds: From now on, after which nobody waits any more.
    """

    def __init__(self, parties: int, seconds: float) -> None:
        self.parties, self.count = parties, multiprocessing.get_context("fork").Value("i", 0)
        self.end = time.monotonic() + seconds

    def arrive(self) -> None:
        """Count this process."""
        with self.count.get_lock():
            self.count.value += 1

    def wait(self) -> None:
        """Count this process, and return when all are there, or the time is up."""
        self.arrive()
        while self.count.value < self.parties and time.monotonic() < self.end:
            time.sleep(0.02)


class Alone(StepFigures):
    """Measures when all others have warmed up, and nobody else does.

    Args:
        ready: Passed by all of them when all have warmed up or failed.
        turn: Held while measuring.
    """

    def __init__(self, ready: Arrivals, turn: Lock) -> None:
        super().__init__()
        self.ready, self.turn, self.held, self.made = ready, turn, False, time.perf_counter()
        self.arrived = False
        self.warm_up_s = 0.0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == WARM_UP:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # for the others
            self.warm_up_s = round(time.perf_counter() - self.made, 1)
            self.arrived = True
            self.ready.wait()
            self.held = self.turn.acquire()
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_end(self, *_: Any) -> None:
        self.release()

    def on_exception(self, *_: Any) -> None:
        self.release()

    def release(self) -> None:
        """Let another one measure."""
        try:
            torch.cuda.synchronize()
        finally:  # also after an error of the device
            if self.held:
                self.held = False
                self.turn.release()


def in_turns(
    seconds: float, measure: Callable[..., dict[str, Any]], cases: Sequence[tuple[Any, ...]]
) -> list[dict[str, Any]]:
    """Run cases at the same time but for the steps that they measure, each in a fresh process.

    Args:
        seconds: That all of them may take.
        measure: Called with what a case consists of, and then with its ``Alone``.
        cases: What to measure.

    Returns:
        The figures of each, or its error; the others do not wait for one that fails.
    """
    ready, turn = Arrivals(len(cases), WAITING * seconds), multiprocessing.get_context("fork").Lock()
    return finish_together(seconds, [start_in_fork(_measured, measure, case, ready, turn) for case in cases])


def _measured(
    measure: Callable[..., dict[str, Any]], case: tuple[Any, ...], ready: Arrivals, turn: Lock
) -> dict[str, Any]:
    alone = Alone(ready, turn)
    try:
        return measure(*case, alone)
    finally:
        if not alone.arrived:
            ready.arrive()


def requested() -> int:
    """Return the bytes that tensors have asked the allocator for."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]
