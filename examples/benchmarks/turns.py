"""Cases that are timed in turns: each in a process of its own, all of them warm, several rounds of each.

So the memory of a case is its own, and a drift of the machine meets all cases alike. A case prints its facts as a JSON
line when it is warm, and its times on each line that it reads, until its input ends.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

GROUP = 5
"""Steps between two synchronisations of the device."""
WARM_SECONDS = 3.0
"""How long a case steps before it is timed: Python issues the first steps after a pause more slowly (``ms_cold``)."""
ISSUED = 15


def answer(step: Callable[[], object], steps: int, facts: dict[str, Any]) -> None:
    """Print `facts`, then time `steps` steps whenever asked to: what a case does in its process, once it is warm."""
    print(json.dumps(facts), flush=True)
    for _ in sys.stdin:
        cold = warmed(step)
        print(json.dumps([times(step, steps), host_ms(step), cold]), flush=True)


def warmed(step: Callable[[], object]) -> float:
    """Step for `WARM_SECONDS`, and return the milliseconds of the first steps."""
    begin = time.perf_counter()
    (cold,) = times(step, GROUP)
    while time.perf_counter() - begin < WARM_SECONDS:
        times(step, GROUP)
    return cold


def captured(step: Callable[[], object]) -> Callable[[], None]:
    """Return the replay of a CUDA graph of `step`."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def times(step: Callable[[], object], steps: int) -> list[float]:
    """Return the milliseconds of a step, one mean for every `GROUP` of `steps` steps."""
    found = []
    for _ in range(steps // GROUP):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(GROUP):
            step()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e3 / GROUP)
    return found


def host_ms(step: Callable[[], object]) -> float:
    """Return the median milliseconds to issue one step to an idle GPU."""
    found = []
    for _ in range(ISSUED):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found)


def take_turns(commands: Sequence[Sequence[str]], rounds: int) -> list[dict[str, Any]]:
    """Return the facts and times of the cases that `commands` start, all of which are in memory at once.

    Raises:
        RuntimeError: If a process ended before it had answered; what it had to say stands on the terminal.
    """
    processes = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True, bufsize=1) for command in commands]
    records: list[dict[str, Any]] = [read(process) for process in processes]
    answers: list[list[Any]] = [[] for _ in processes]
    for _ in range(rounds):
        for process, own in zip(processes, answers, strict=True):
            process.stdin.write("go\n")
            own.append(read(process))
    for process in processes:
        process.stdin.close()
        process.wait()
    for record, own in zip(records, answers, strict=True):
        found = [time for times, _, _ in own for time in times]
        record["ms_median"] = round(statistics.median(found), 3)
        record["ms_min"], record["ms_max"] = round(min(found), 3), round(max(found), 3)
        record["host_ms"] = round(statistics.median(issued for _, issued, _ in own), 3)
        record["ms_cold"] = round(statistics.median(cold for *_, cold in own), 3)
    return records


def read(process: subprocess.Popen[str]) -> Any:
    """Return what the process says next."""
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a case ended before it had answered: {' '.join(map(str, process.args))}")
    return json.loads(line)
