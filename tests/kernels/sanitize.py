"""Run every kernel once at small odd shapes under NVIDIA's compute-sanitizer.

With ``--run`` it is the process to watch, for use by hand. Exit codes: 0 nothing found, 1 errors found, 2 a tool or the
kernels themselves could not run, 3 no compute-sanitizer.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

CLEAN, FOUND, BROKEN, MISSING = range(4)
ROOT = Path(__file__).parents[2]
# Without the caching allocator every tensor is an allocation of its own, with nothing mapped behind it.
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def candidates() -> Iterator[Path]:
    """Where compute-sanitizer may be: on PATH, in a CUDA toolkit, in a wheel."""
    on_path = shutil.which("compute-sanitizer")
    if on_path:
        yield Path(on_path)
    toolkits = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for toolkit in (*toolkits, *sorted(Path("/usr/local").glob("cuda*"), reverse=True)):
        yield toolkit / "bin" / "compute-sanitizer"
        yield toolkit / "compute-sanitizer" / "compute-sanitizer"
    for packages in map(Path, [*site.getsitepackages(), site.getusersitepackages()]):
        yield packages / "triton" / "backends" / "nvidia" / "bin" / "compute-sanitizer"
        yield from sorted((packages / "nvidia").glob("**/compute-sanitizer"))


def errors_in(report: str) -> int | None:
    """Return how many errors and warnings the summary counts; ``None`` without one: the tool did not finish."""
    races = re.findall(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)", report)
    if races:
        return sum(map(int, races[-1]))
    count = re.search(r"ERROR SUMMARY: (\d+) errors?", report)  # a second line says how many were not printed
    return int(count[1]) if count else None


def watched(sanitizer: Path, tool: str, child: list[str]) -> int:
    """Run ``child`` under one tool, print what came of it in one line, and return the exit code."""
    command = [str(sanitizer), "--tool", tool]
    usage = subprocess.run([str(sanitizer), "--help"], capture_output=True, text=True, check=False)
    if tool == "memcheck" and "--padding" in usage.stdout + usage.stderr:
        command += ["--padding", "512"]  # else an access behind one tensor may land in the next
    run = subprocess.run([*command, *child], capture_output=True, text=True, env=os.environ | UNCACHED, cwd=ROOT)
    report = run.stdout + run.stderr
    errors = errors_in(report)
    finished = "ran under the watch:" in report
    if errors == 0 and finished and run.returncode == 0:
        print(f"{tool}: 0 errors", flush=True)
        return CLEAN
    print(report[-20000:])
    if errors:
        print(f"{tool}: {errors} errors", flush=True)
        return FOUND
    print(f"{tool}: did not run to its end (exit code {run.returncode})", flush=True)
    return BROKEN


def check(tools: list[str]) -> int:
    """Run the kernels alone, which also compiles them, then under each tool."""
    sanitizer = next((path for path in candidates() if path.is_file() and os.access(path, os.X_OK)), None)
    if sanitizer is None:
        print("compute-sanitizer: not found on PATH, in a CUDA toolkit or in a wheel. HINT: install the CUDA toolkit.")
        return MISSING
    child = [sys.executable, "-m", "tests.kernels.sanitize", "--run"]
    if subprocess.run(child, env=os.environ | UNCACHED, cwd=ROOT, check=False).returncode:
        print("the kernels fail without a tool already")
        return BROKEN
    # The worst first: errors found, then tools that could not run.
    codes = [watched(sanitizer, tool, child) for tool in tools]
    return FOUND if FOUND in codes else max(codes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run the kernels in this process, watched or not")
    parser.add_argument("--device", default="cuda", help="of --run; cpu needs TRITON_INTERPRET=1")
    tools = ["memcheck", "racecheck", "synccheck", "initcheck"]
    parser.add_argument("--tools", nargs="+", choices=tools, default=tools[:2], metavar="TOOL", help="of %(choices)s")
    arguments = parser.parse_args()
    if not arguments.run:
        return check(arguments.tools)
    os.environ.update(UNCACHED)  # read when torch allocates first
    import torch

    from tests.support.workload import run_all

    print("ran under the watch:", ", ".join(run_all(torch.device(arguments.device))), flush=True)
    return CLEAN


if __name__ == "__main__":
    sys.exit(main())
