"""Write the README's result tables from the committed figures.

python examples/benchmarks/tables.py            # rewrites README.md between its table markers
python examples/benchmarks/tables.py --check    # fails if README.md is not what the figures say
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import RESULTS

README = RESULTS.parents[2] / "README.md"
Records = list[dict[str, Any]]


def load(name: str) -> Records:
    """Return the records of one result file."""
    records: Records = json.loads((RESULTS / f"{name}.json").read_text())
    return records


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table: names to the left, figures to the right."""
    align = [":--", *["--:"] * (len(header) - 1)]
    lines = [header, align, *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def source(record: dict[str, Any]) -> str:
    """Return the line that says where figures come from."""
    where = f"{record['gpu']}, torch {record['torch']}, triton {record['triton']}"
    return f"\n\n<sub>{where}; `{record['command']}`</sub>"


def memory() -> str:
    """Activation memory and peak: dense, checkpointed, pruned."""
    records = load("memory")
    rows = []
    for r in records:
        setting = f", s = {r['sparsity']}, b = {r['block_size']}" if r["method"] == "pruned" else ""
        figures = [f"{r['activations_mib']:.1f}", f"{r['peak_mib']:.1f}"]
        figures += [
            f"{r[name]:.1f}" if name in r else "-" for name in ("saved_mib", "accounted_saved_mib", "paper_saved_mib")
        ]
        rows.append([r["method"] + setting, *figures])
    header = ["method", "activations MiB", "peak MiB", "saved MiB", "counted MiB", "paper saved MiB"]
    return markdown(header, rows) + source(records[0])


def accuracy() -> str:
    """Test accuracy over the seeds: dense and pruned."""
    records = load("accuracy")
    groups: dict[tuple[Any, ...], Records] = {}
    for r in records:
        groups.setdefault((r["method"], r["sparsity"], r["block_size"]), []).append(r)
    rows = []
    for (method, sparsity, block), group in groups.items():
        setting = f", s = {sparsity}, b = {block}" if method == "pruned" else ""
        cells = [method + setting, str(len(group))]
        for name, digits in (("accuracy", 2), ("final_loss", 4)):
            values = [r[name] for r in group]
            cells.append(f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}")
        rows.append(cells)
    return markdown(["method", "seeds", "test accuracy %", "final training loss"], rows) + source(records[0])


TABLES = {"memory": memory, "accuracy": accuracy}


def rendered(readme: str) -> str:
    """Return ``readme`` with every table between its markers written anew."""
    for name, table in TABLES.items():
        pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(\n<!-- end table -->)", re.DOTALL)
        if not pattern.search(readme):
            raise ValueError(f"README.md has no markers for the table {name!r}.")
        readme = pattern.sub(lambda match, table=table: match[1] + table() + match[2], readme)
    return readme


def main() -> int:
    """Rewrite or check the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    before = README.read_text()
    after = rendered(before)
    if args.check:
        return int(before != after)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
