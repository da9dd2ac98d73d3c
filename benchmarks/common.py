"""What all benchmarks share: the environment of a record, record files, cases in fresh processes, timing of kernels."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).with_name("results")
ROOT = RESULTS.parents[1]
MIB = 2**20
LEFT_SECONDS = 5.0
"""Time that the processes of a case have left once one of them has failed."""
os.environ.setdefault(
    "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
)  # else `is_available` keeps CUDA from processes forked later
Record = dict[str, Any]
Records = list[Record]


# === Environment and record files =====================================================================


def environment() -> Record:
    """Return hardware, versions, command and commit: part of every record. Asks for the GPU."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, **software()}


def software() -> Record:
    """Return versions, command and commit."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        commit = None
    triton = version_of("triton")
    return {"torch": torch.__version__, "triton": triton, "command": command(), "commit": commit}


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def command() -> str:
    """Return the command line, with files outside the repository reduced to their names."""
    parts = [Path(part).name if Path(part).is_absolute() else part for part in sys.argv[1:]]
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", str(name), *parts])


def read_records(path: Path) -> Records:
    """Return the records of a file, none if there is no file."""
    return json.loads(path.read_text()) if path.is_file() else []


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Write records as a JSON list, one record a line. The old file stays until the new one is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")
    unfinished.replace(path)


class RecordFile:
    """The records of a file by the fields that tell them apart, written after every case."""

    def __init__(self, path: Path, keys: Sequence[str], again: bool = False) -> None:
        self.path, self.keys, self.again = path, keys, again
        self.records = {self.key(record): record for record in read_records(path)}

    def key(self, record: Record) -> tuple[Any, ...]:
        """Return what tells a record apart."""
        return tuple(str(record.get(name)) for name in self.keys)

    def lacks(self, head: Record) -> bool:
        """Return whether a case is to be run: it is not there, has failed, or is asked for again."""
        record = self.records.get(self.key(head))
        return self.again or record is None or isinstance(record.get("error"), str)

    def add(self, record: Record) -> None:
        """Add a record, in place of one with the same key, and write the file."""
        self.records[self.key(record)] = record
        write_records(self.path, list(self.records.values()))


def parser_for(text: str | None, name: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all scripts; records go to ``results/`` if nothing else is said.

    With ``--quick`` they go to a temporary folder, since nobody quotes them.
    """

    class Quick(argparse.Action):
        def __call__(self, parser: Any, namespace: argparse.Namespace, *_: Any) -> None:
            namespace.quick = True
            if namespace.out == parser.get_default("out"):
                namespace.out = Path(tempfile.mkdtemp()) / f"{name}.json"

    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action=Quick, nargs=0, default=False, help="smallest cases, for a CPU too")
    parser.add_argument("--again", action="store_true", help="run cases that the file has, too")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="file of the records")
    return parser


def show(title: str, records: Sequence[Record], columns: Sequence[str]) -> None:
    """Print columns of records as a table."""
    table = Table(*columns, title=title, title_justify="left")
    for record in records:
        cells = (record.get(column, "-") for column in columns)
        table.add_row(*(f"{cell:g}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console(width=None if sys.stdout.isatty() else 180).print(table)


# === Cases in fresh processes =========================================================================


Running = tuple[BaseProcess, Connection]


def start_in_fork(case: Callable[..., Record], *args: Any) -> Running:
    """Start a case in a fresh process, which need not import anything again.

    This process must not have used a GPU: CUDA does not work in what is forked from one that has.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, case, args), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def finish(seconds: float, running: Sequence[Running], *, of_one: bool = False) -> Records:
    """Return the figures of cases that were started, or their errors; all have so many seconds from now on.

    With ``of_one`` they are processes of one case, of which none ends without the others.
    """
    end = time.monotonic() + seconds
    found: dict[Connection, Record] = {}
    waiting = {ours: process for process, ours in running}
    while waiting:
        ready = connection.wait(list(waiting), max(0.0, end - time.monotonic()))
        if not ready:
            break
        for ours in ready:
            found[ours] = _received(ours, waiting.pop(ours))
            if of_one and isinstance(found[ours].get("error"), str):
                end = min(end, time.monotonic() + LEFT_SECONDS)
    for ours, process in waiting.items():
        found[ours] = _failed(f"took over {seconds:g} s")
        process.kill()
        process.join()
    return [found[ours] for _, ours in running]


def has_gpu() -> bool:
    """Return whether there is a GPU that the kernels run on, asked in a fresh process."""

    def capable() -> Record:
        return {"capable": torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)}

    [found] = finish(120, [start_in_fork(capable)])
    return bool(found.get("capable"))


def require(gpu: bool, quick: bool) -> None:
    """End the program with a hint if a benchmark that is not ``quick`` has no GPU."""
    if not gpu and not quick:
        raise SystemExit("This needs an NVIDIA GPU of compute capability 8.0 or newer; without one there is --quick.")


def _received(ours: Connection, process: BaseProcess) -> Record:
    try:
        found: Record = ours.recv()
    except EOFError:
        process.join()
        return _failed(f"exit status {process.exitcode}")
    if process.is_alive():  # for example a process group that does not end
        process.kill()
    process.join()
    return found


def _failed(error: str) -> Record:
    return {"error": error, "gpu": "not known", **software()}


def _send(theirs: Connection, case: Callable[..., Record], args: tuple[Any, ...]) -> None:
    try:
        found = {**case(*args), **environment()}
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        found = _failed(f"{type(error).__name__}: {error}".splitlines()[0][:300])
    theirs.send(found)
    theirs.close()


# === Timing of kernels ================================================================================


def device_us(calls: Sequence[Callable[[], Any]], repeats: int = 3, replays: int = 7, enough_ms: float = 30.0) -> float:
    """Return the median time of one call in microseconds, on a GPU without the host's part.

    The calls do the same work on different data, which together are several times the L2 cache, so that no call finds
    its inputs there. ``repeats`` rounds of them are captured in one CUDA graph, so that launches from the host do not
    count. Long calls vary little: from three replays on, it ends as soon as they took ``enough_ms``.
    """
    if not torch.cuda.is_available():
        return host_us(lambda: [call() for call in calls], 1, 3) / len(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which may still be writing the data
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                for call in calls:
                    call()
        graph.replay()
        times: list[float] = []
        while len(times) < 3 or (len(times) < replays and sum(times) < enough_ms):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return statistics.median(times) * 1e3 / (repeats * len(calls))


def host_us(call: Callable[[], Any], calls: int = 200, rounds: int = 7) -> float:
    """Return the median time that the host takes for one call, in microseconds; the first round warms up."""
    times = []
    for _ in range(rounds + 1):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times[1:])


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
