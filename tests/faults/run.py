"""Put faults into copies of a tree, one at a time, and see whether its tests catch them.

    python tests/faults/run.py                         all faults, with the tests listed for each, as by default
    python tests/faults/run.py --ci --only hooks_left  one fault, also with the tests that CI runs
    python tests/faults/run.py --whole                 the faults marked so, with the whole default command
    python tests/faults/run.py --tree ../old           the tests of another checkout
    python tests/faults/run.py --check                 whether each fault still applies, without a test

A fault is caught if a test or a fixture fails with it that passes without it: at the end all tests that have caught
something run once in a clean copy. Other results are ``missed``, ``late`` (out of time), ``unsound`` (the test fails
without the fault too) and ``error`` (collecting failed, or the fault does not apply).
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
CI = "not (gpu or nightly)"
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "shared", "dist", "site")
FAILED = re.compile(r"^(?:FAILED|ERROR) (?!collecting)(\S+::.*?)(?: - .*)?$", re.MULTILINE)
NO_TESTS = 5
"""Exit status of pytest where it has run nothing."""


def faulty(fault: Fault, tree: Path) -> str:
    """Return the source of the fault's file with the fault in it.

    Raises:
        ValueError: If the place is not there exactly once, or the result is no Python.
    """
    source = (tree / fault.file).read_text()
    if source.count(fault.old) != 1:
        raise ValueError(f"{fault.old!r} occurs {source.count(fault.old)} times in {fault.file}, not once.")
    changed = source.replace(fault.old, fault.new)
    ast.parse(changed)
    return changed


def run_tests(tree: Path, arguments: Sequence[str], limit: float) -> tuple[int | None, str, float]:
    """Run pytest in a tree and return its exit status, ``None`` if out of time, its output and the seconds it took."""
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tree / ".inductor"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return status, output.read(), time.monotonic() - began


def copied(tree: Path, folder: str) -> Path:
    """Return a copy of what tests need of a tree."""
    copy = Path(folder) / "tree"
    shutil.copytree(tree, copy, ignore=LEFT_OUT, ignore_dangling_symlinks=True)
    return copy


def stages(fault: Fault, tree: Path) -> list[list[str]]:
    """Return pytest's arguments for the listed files, and for all else in the listed folders."""
    there = [path for path in fault.tests if (tree / path).exists()]
    files, folders = ([path for path in there if path.endswith(".py") is wanted] for wanted in (True, False))
    parts = files, [*folders, *(f"--ignore={path}" for path in files)] if folders else []
    return [["-n", "0", *part] for part in parts if part]


def try_fault(fault: Fault, options: argparse.Namespace) -> dict[str, Any]:
    """Return what the tests make of a fault."""
    status: int | None
    row: dict[str, Any] = {"name": fault.name, "kind": fault.kind, "file": fault.file}
    row |= {"result": "error", "by": "", "seconds": 0.0}
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        tree = copied(options.tree, folder)
        try:
            changed = faulty(fault, tree)
        except (OSError, SyntaxError, ValueError) as error:
            return row | {"by": str(error)}
        (tree / fault.file).write_text(changed)
        status, output = NO_TESTS, ""
        for listed in [[]] if options.whole else stages(fault, tree):
            limit = options.limit - row["seconds"]
            status, output, seconds = run_tests(tree, [*options.marks, "-x", *listed], limit)
            row["seconds"] = round(row["seconds"] + seconds, 1)
            if status not in (0, NO_TESTS):
                break
    failed = FAILED.search(output)
    if status is None:
        result = "late"
    elif status in (1, 2) and failed:  # workers that run side by side are interrupted by the first failure
        result = "caught"
    else:
        result = "missed" if status in (0, NO_TESTS) else "error"
    by = failed[1] if result == "caught" and failed else output[-300:] if result == "error" else ""
    return row | {"result": result, "by": by}


def verify(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Call faults unsound whose tests fail without them."""
    caught = sorted({row["by"] for row in rows if row["result"] == "caught"})
    if not caught:
        return
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        status, output, _ = run_tests(copied(options.tree, folder), ["-n", "0", *options.marks, *caught], 1800)
    failed = set(FAILED.findall(output))
    if status not in (0, 1):
        print(f"The tests that have caught faults could not be run without these:\n{output[-2000:]}")
    for row in rows:
        if row["by"] in failed:
            row["result"] = "unsound"


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults alone")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose code and tests are taken")
    parser.add_argument("--marks", help="pytest's marker expression, in place of that of the default run")
    parser.add_argument("--ci", action="store_true", help="run the tests that CI runs, too")
    parser.add_argument("--whole", action="store_true", help="run the whole suite on the faults marked so")
    parser.add_argument("--jobs", type=int, default=1, help="faults that are tried at once")
    parser.add_argument("--limit", type=float, help="seconds for each fault, by default 180, or 1800 of the whole")
    parser.add_argument("--out", type=Path, help="a JSON file, written after each fault")
    parser.add_argument("--check", action="store_true", help="only see whether the faults apply")
    options = parser.parse_args(arguments)
    marks = CI if options.ci else options.marks
    options.marks = [] if marks is None else ["-m", marks]
    options.limit = options.limit or (1800 if options.whole else 180)
    unknown = set(options.only or ()) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"There are no faults {sorted(unknown)}.")
    return options


def main() -> int:
    options = options_of()
    chosen = [fault for fault in FAULTS if not options.only or fault.name in options.only]
    if options.whole and not options.only:
        chosen = [fault for fault in chosen if fault.whole]
    rows: list[dict[str, Any]] = []
    if options.check:
        for fault in chosen:
            faulty(fault, options.tree)
            missing = [path for path in fault.tests if not (options.tree / path).exists()]
            print(f"{fault.name:20} applies" + (f", without {', '.join(missing)}" if missing else ""))
        return 0

    def attempt(fault: Fault) -> None:
        row = try_fault(fault, options)
        rows.append(row)
        print(f"{row['name']:20} {row['result']:8} {row['seconds']:6.1f} s  {row['by'].strip()}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1))

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(attempt, chosen))
    verify(rows, options)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))
    counts = {result: sum(row["result"] == result for row in rows) for result in sorted({r["result"] for r in rows})}
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    for row in rows:
        if row["result"] != "caught":
            print(f"{row['result']:8} {row['name']}: {row['kind']}")
    return int(any(row["result"] != "caught" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
