"""What every benchmark shares: the facts a record states, and how records are written."""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RESULTS = Path(__file__).with_name("results")
MIB = 2**20
LEFT_SECONDS = 5.0
"""That the parts of a case have when one of them has failed."""


def environment() -> dict[str, Any]:
    """Return hardware, versions and command: part of every record."""
    return {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none", **software()}


def software() -> dict[str, Any]:
    """Return versions and command."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {"torch": torch.__version__, "triton": triton, "command": command()}


def command() -> str:
    """Return the command line, with files outside the repository reduced to their names."""
    parts = [part if not Path(part).is_absolute() else Path(part).name for part in sys.argv[1:]]
    script, root = Path(sys.argv[0]).resolve(), RESULTS.parents[2]
    name = script.relative_to(root) if script.is_relative_to(root) else script.name
    return shlex.join(["python", str(name), *parts])


def write_records(path: Path, records: list[dict[str, Any]]) -> None:
    """Write ``records`` as a JSON list with one record per line, so that changes are readable in a diff.

    What was there before stays until all is written, since a benchmark may be cut short at any time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(record) for record in records)
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(f"[\n{lines}\n]\n")
    unfinished.replace(path)


def step_memory(forward: Callable[[], Tensor], finish: Callable[[Tensor], None]) -> dict[str, int]:
    """Return activations and peak of one training step in bytes, by the CUDA allocator.

    Args:
        forward: Returns the loss; what is then allocated more than before are the activations.
        finish: Backward and the optimizer step.
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    loss = forward()
    activations = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
    finish(loss)
    torch.cuda.synchronize()
    return {"activations_mib": activations, "peak_mib": torch.cuda.max_memory_allocated()}


def in_process(command: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run a case in a fresh process; return the figures on its last line, or its error."""
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"took over {seconds} s"}
    if output.returncode:
        lines = output.stderr.strip().splitlines() or [f"exit status {output.returncode}"]
        return {"error": lines[-1][:300]}
    found: dict[str, Any] = json.loads(output.stdout.splitlines()[-1])
    return found


def in_fork(seconds: float, case: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Run a case in a fresh process that need not import anything again; return its figures, or its error.

    This process must not have asked for a GPU: CUDA does not work in what is forked from one that has.
    """
    return finish_in_fork(seconds, *start_in_fork(case, *args))


def start_in_fork(case: Callable[..., dict[str, Any]], *args: Any) -> tuple[BaseProcess, Connection]:
    """Begin a case as ``in_fork`` does, not in a thread; return what ``finish_in_fork`` needs."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, case, args), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def finish_in_fork(seconds: float, process: BaseProcess, ours: Connection) -> dict[str, Any]:
    """Return the figures of a case that has begun, or its error."""
    [found] = finish_together(seconds, [(process, ours)])
    return found


def finish_together(
    seconds: float, running: Sequence[tuple[BaseProcess, Connection]], *, of_one: bool = False
) -> list[dict[str, Any]]:
    """Return the figures of cases that have begun, or their errors; all have the same time.

    Args:
        seconds: From now on, for all of them.
        running: What ``start_in_fork`` has returned for each.
        of_one: Whether they are parts of one case, of which none ends without the others: when one has failed, they
            have a few seconds left.
    """
    end, found = time.monotonic() + seconds, dict[Connection, dict[str, Any]]()
    waiting = {ours: process for process, ours in running}
    while waiting:
        ready = connection.wait(list(waiting), max(0.0, end - time.monotonic()))
        for ours in ready:
            found[ours] = _received(ours, waiting.pop(ours))
            if of_one and "error" in found[ours]:
                end = min(end, time.monotonic() + LEFT_SECONDS)
        if not ready:
            break
    for ours, process in waiting.items():
        found[ours] = _without_gpu(f"took over {seconds} s")
        process.kill()
        process.join()
    return [found[ours] for _, ours in running]


def _received(ours: Connection, process: BaseProcess) -> dict[str, Any]:
    """Return what a process has sent, or how it ended."""
    try:
        found: dict[str, Any] = ours.recv()
    except EOFError:
        process.join()
        return _without_gpu(f"exit status {process.exitcode}")
    if process.is_alive():
        process.kill()
    process.join()
    return found


def _without_gpu(error: str) -> dict[str, Any]:
    """Return the record of a case that failed; which GPU it had is not asked for, since that may fail, too."""
    return {"error": error, "gpu": "not known", **software()}


def _send(theirs: Connection, case: Callable[..., dict[str, Any]], args: tuple[Any, ...]) -> None:
    """Send what a case returns in a process of its own, or its error, and where it ran."""
    try:
        found = {**case(*args), **environment()}
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        found = _without_gpu(f"{type(error).__name__}: {error}".splitlines()[0][:300])
    theirs.send(found)
    theirs.close()


def require_gpu_in_fork() -> None:
    """As ``require_gpu``, without that this process asks for a GPU itself."""

    def missing() -> dict[str, Any]:
        try:
            require_gpu()
        except SystemExit as error:
            return {"error": str(error)}
        return {}

    error = in_fork(60, missing).get("error")
    if error is not None:
        raise SystemExit(error)


def require_gpu() -> None:
    """End the program with a hint, unless there is a GPU that the kernels run on."""
    if not torch.cuda.is_available():
        hint = f"torch was built for CUDA {torch.version.cuda}; check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
        if torch.version.cuda is None:
            hint = f"torch {torch.__version__} was built without CUDA; https://pytorch.org/get-started has other builds"
        raise SystemExit(f"This benchmark needs an NVIDIA GPU, and torch finds none: {hint}.")
    if torch.cuda.get_device_capability() < (8, 0):
        found = ".".join(map(str, torch.cuda.get_device_capability()))
        name = torch.cuda.get_device_name()
        raise SystemExit(f"The kernels need a GPU of compute capability 8.0 (Ampere) or newer; {name} has {found}.")
