"""The figures of a fit's steps: memory of one, times of others, alone on the GPU where several cases run side by side.

``WARM_UP`` steps come first, and then turns. In each of these the first step is not timed, ``ALONE`` ones are waited
for, and ``IN_A_ROW`` ones are not::

    activations_mib    growth of the allocator's requested bytes over the forward, in the first step of all turns
    peak_mib           the most that was allocated in that step
    reserved_mib       the most that the allocator held in it
    host_ms            how long the host takes to issue a step to a device that has nothing to do, the median of a turn
    step_ms            from where the device ends one step to where it ends the next, without waiting, the same
    gpu_ms             for how long the GPU computes or copies anything in a step, the last one, which is profiled

Where ``step_ms`` is more than ``gpu_ms``, the GPU waits for the host. Of several turns the times are medians, and
``step_ms_rounds`` and ``host_ms_rounds`` are those of each.

``in_turns`` runs cases in processes of their own, which warm up side by side. Then one after the other has a turn while
the rest waits, and then all have the next one, so that a drift of the machine meets them alike. Nobody waits for ever:
``others_warmed_up`` is said of a case that measured while others still did.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.synchronize import Lock
from typing import Any

import lightning.pytorch as pl
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from examples.benchmarks.common import MIB, finish_together, start_in_fork

WARM_UP, ALONE, IN_A_ROW = 6, 4, 16
"""A budget chooses, probes and measures in the first four steps, and in two more where it has to choose again."""
TURN = 1 + ALONE + IN_A_ROW
TURNS = 3
WAITING = 0.6
"""Share of the time that cases have, for which one waits for the others at most."""
TIMES = ("step_ms", "host_ms")
SAME = ("batch", "in_a_row", "gpu", "torch", "triton")
"""What records whose turns are joined have in common."""


class StepFigures(pl.Callback):
    """Measures the memory of one step, and times steps one by one and in a row; a Trainer's last callback.

    Args:
        turns: How often steps are timed.
    """

    def __init__(self, turns: int = 1) -> None:
        self.turns = turns
        self.steps = WARM_UP + turns * TURN + 1
        """How many a fit has to have."""
        self.begin()

    def begin(self) -> None:
        """Forget what was measured."""
        self.memory: dict[str, float] = {}
        self.issued: list[list[float]] = [[] for _ in range(self.turns)]
        self.ended: list[list[torch.cuda.Event]] = [[] for _ in range(self.turns)]
        self.number, self.before, self.began = 0, 0, 0.0
        self.allocation: Any = None
        self.profile: profile | None = None

    def on_train_start(self, *_: Any) -> None:
        self.begin()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.number = batch_idx
        if batch_idx == WARM_UP:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = requested()
        if batch_idx == self.steps - 1 and torch.cuda.is_available():
            torch.cuda.synchronize()
            self.profile = profile(activities=[ProfilerActivity.CUDA])
            self.profile.start()

    def on_before_zero_grad(self, *_: Any) -> None:
        # Lightning zeroes gradients between forward and backward: those of the last step are here before and after.
        if self.number == WARM_UP:
            self.memory["activations_mib"] = round((requested() - self.before) / MIB, 2)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now, (turn, timed) = time.perf_counter(), divmod(batch_idx - WARM_UP, TURN)
        if turn >= 0 and timed >= ALONE:
            self.ended[turn].append(torch.cuda.Event(enable_timing=True))
            self.ended[turn][-1].record()
        if turn >= 0 and timed <= ALONE:
            torch.cuda.synchronize()
        if batch_idx == WARM_UP:
            most = {"peak_mib": torch.cuda.max_memory_allocated(), "reserved_mib": torch.cuda.max_memory_reserved()}
            self.memory |= {name: round(size / MIB, 2) for name, size in most.items()}
            for callback in trainer.callbacks:
                self.allocation = getattr(callback, "allocation", self.allocation)
        if turn >= 0 and 0 < timed <= ALONE:
            self.issued[turn].append((now - self.began) * 1e3)
        if batch_idx == self.steps - 1 and self.profile is not None:
            self.profile.stop()
        self.began = time.perf_counter()

    def found(self) -> dict[str, Any]:
        """Return the figures of a fit."""
        torch.cuda.synchronize()
        steps = [[before.elapsed_time(end) for before, end in itertools.pairwise(ended)] for ended in self.ended]
        found = dict[str, Any](self.memory)
        for name, turns in zip(TIMES, (steps, self.issued), strict=True):
            medians = [round(statistics.median(turn), 2) for turn in turns]
            found[name] = round(statistics.median(medians), 2)
            if self.turns > 1:
                found[f"{name}_rounds"] = medians
        if self.profile is not None:
            found["gpu_ms"] = round(busy_ms(self.profile.events()), 2)
        return {**found, "in_a_row": IN_A_ROW}


class Arrivals:
    """Counts the processes that have come to the start of a turn, or failed, and waits for all.

    Args:
        parties: How many processes there are.
        turns: How many turns each of them has.
        seconds: From now on, after which nobody waits any more.
    """

    def __init__(self, parties: int, turns: int, seconds: float) -> None:
        fork = multiprocessing.get_context("fork")
        self.parties, self.counts = parties, [fork.Value("i", 0) for _ in range(turns)]
        self.end = time.monotonic() + seconds

    def arrive(self, turn: int) -> None:
        """Count this process."""
        with self.counts[turn].get_lock():
            self.counts[turn].value += 1

    def wait(self, turn: int) -> bool:
        """Count this process, wait for all, or until the time is up, and return whether all are there."""
        self.arrive(turn)
        while self.counts[turn].value < self.parties and time.monotonic() < self.end:
            time.sleep(0.02)
        return self.counts[turn].value >= self.parties


class Alone(StepFigures):
    """Measures when all others are ready for the same turn, and nobody else does.

    After a fit that fails while it measures nobody else does either, so that one that follows is alone from its start.

    Args:
        ready: Passed by all of them at the start of every turn.
        turn: Held while measuring.
    """

    def __init__(self, ready: Arrivals, turn: Lock) -> None:
        super().__init__(len(ready.counts))
        self.ready, self.turn, self.held, self.made = ready, turn, False, time.perf_counter()
        self.arrived = 0
        """At the start of how many turns this process was."""
        self.alone = True
        """Whether all others had warmed up by then."""
        self.warm_up_s = 0.0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        turn, timed = divmod(batch_idx - WARM_UP, TURN)
        if 0 <= turn < self.turns and timed == 0:
            if turn > 0:
                self.release()
            else:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # for the others
                self.warm_up_s = round(time.perf_counter() - self.made, 1)
            if turn == self.arrived:  # and in no fit before
                self.arrived += 1
                self.alone &= self.ready.wait(turn)
            self.held = self.held or self.turn.acquire()
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_end(self, *_: Any) -> None:
        self.release()

    def found(self) -> dict[str, Any]:
        return super().found() | ({} if self.alone else {"others_warmed_up": True})

    def release(self) -> None:
        """Let another one measure."""
        try:
            torch.cuda.synchronize()
        finally:  # also after an error of the device
            if self.held:
                self.held = False
                self.turn.release()

    def leave(self) -> None:
        """Let nobody wait for this process any more, whatever has become of its fit."""
        with contextlib.suppress(RuntimeError):  # an error of the device, which its fit has raised
            self.release()
        for turn in range(self.arrived, self.turns):
            self.ready.arrive(turn)
        self.arrived = self.turns


def in_turns(
    seconds: float, measure: Callable[..., dict[str, Any]], cases: Sequence[tuple[Any, ...]], turns: int = TURNS
) -> list[dict[str, Any]]:
    """Run cases at the same time but for the steps that they measure, each in a fresh process.

    Args:
        seconds: That all of them may take.
        measure: Called with what a case consists of, and then with its ``Alone``.
        cases: What to measure.
        turns: How often each of them measures.

    Returns:
        The figures of each, or its error; the others do not wait for one that fails.
    """
    ready = Arrivals(len(cases), turns, WAITING * seconds)
    turn = multiprocessing.get_context("fork").Lock()
    return finish_together(seconds, [start_in_fork(_measured, measure, case, ready, turn) for case in cases])


def _measured(
    measure: Callable[..., dict[str, Any]], case: tuple[Any, ...], ready: Arrivals, turn: Lock
) -> dict[str, Any]:
    alone = Alone(ready, turn)
    try:
        return measure(*case, alone)
    finally:
        alone.leave()


def joined(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the record of what was measured now, with the times of the turns before if these are of the same.

    They are if the same versions have timed the same batch on the same kind of GPU. An error replaces an error alone.
    """
    if "error" in now:
        return now if "error" in before else before
    untimed = any(record.get(name) is None for record in (before, now) for name in TIMES)
    if untimed or any(before.get(name) != now.get(name) for name in SAME):
        return now
    rounds = {name: [*turns_of(before, name), *turns_of(now, name)] for name in TIMES}
    medians = {name: round(statistics.median(turns), 2) for name, turns in rounds.items()}
    return {**now, **medians, **{f"{name}_rounds": turns for name, turns in rounds.items()}}


def turns_of(record: dict[str, Any], name: str) -> list[float]:
    """Return a time of each turn."""
    return record.get(f"{name}_rounds") or [record[name]]


def busy_ms(events: Iterable[FunctionEvent]) -> float:
    """Return for how long there is any event of a GPU, in milliseconds."""
    of_gpu = (event.time_range for event in events if event.device_type == DeviceType.CUDA)
    busy, until = 0.0, 0.0
    for start, end in sorted((span.start, span.end) for span in of_gpu):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / 1e3


def requested() -> int:
    """Return the bytes that tensors have asked the allocator for."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]
