"""``python -m lightning_actprune``: versions, GPUs and where the kernels run, for bug reports and for finding out."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_actprune import __version__
from lightning_actprune.environment import OPTIONAL, environment

_PIPED_WIDTH = 120
_LABELS = {"torch_cuda": "CUDA of torch", "torch_hip": "HIP of torch", "c_compiler": "C compiler"}
_BACKENDS = {"triton": "kernels", "reference": "plain PyTorch"}
_GIB = 2**30


def main(argv: Sequence[str] | None = None) -> int:
    """Print what is here; whatever is missing, the exit code is 0."""
    parser = argparse.ArgumentParser(prog="python -m lightning_actprune", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")
    args = parser.parse_args(argv)
    found = environment(__version__)
    if args.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return 0
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    for table in _tables(found):
        console.print(table)
        console.print()
    return 0


def _tables(found: dict[str, Any]) -> Iterator[Table]:
    versions = {**found["versions"], "c_compiler": found["c_compiler"]}
    shown = {name: version for name, version in versions.items() if version or name != "torch_hip"}
    yield _table("Versions", [], ([_LABELS.get(name, name), version or "none"] for name, version in shown.items()))
    gpus = [
        [f"cuda:{gpu['index']}", gpu["name"], gpu["capability"], _gib(gpu["memory_bytes"]), _gib(gpu["free_bytes"])]
        for gpu in found["gpus"]
    ]
    if found["gpu_trouble"]:
        gpus.append(["" if gpus else "none", found["gpu_trouble"]])
    yield _table("GPUs", ["", "Name", "Capability", "Memory GiB", "Free GiB"], gpus)
    title = "Which implementation runs, by device, type and block size"
    yield _table(title, ["Device", "Types", "Block sizes", "Runs", "Why"], _merged(found["kernels"]))
    optional = ([name, version or "none", OPTIONAL[name]] for name, version in found["optional"].items())
    yield _table("Optional packages", ["Package", "Version", "For"], optional)


def _merged(rows: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield a line for the types, and one for the block sizes of these, that have the same answer on a device."""
    sizes: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        runs = _BACKENDS.get(row["backend"], row["backend"])
        key = row["device"], row["dtype"], runs, "; ".join(row["reasons"])
        sizes.setdefault(key, []).append(str(row["block_size"]))
    dtypes: dict[tuple[str, ...], list[str]] = {}
    for (device, dtype, *answer), some in sizes.items():
        dtypes.setdefault((device, ", ".join(some), *answer), []).append(dtype)
    for (device, *rest), some in dtypes.items():
        yield [device, ", ".join(some), *rest]


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    made = Table(title=title, title_justify="left", show_header=bool(columns))
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))  # not as markup, which would swallow what stands in brackets
    return made


def _gib(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / _GIB:.1f}"


if __name__ == "__main__":
    sys.exit(main())
