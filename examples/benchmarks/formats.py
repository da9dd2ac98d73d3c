"""Pack and weight gradient by bits and block selection, beside unquantized ones, on one GPU.

    python examples/benchmarks/formats.py

On the cases of `kernels.py`, in 16 bits, all formats of one setting in one run: time of pack (`pack_us`) and of the
weight gradient as the cost model chooses its method (`grad_us`, `method`). GPU time by CUDA graph, inputs rotated
through several times the L2 cache, medians.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import environment, require_gpu, write_records
from examples.benchmarks.kernels import CASES, chosen_method, inputs
from examples.benchmarks.summaries import Records, Summary, case_name, geometric_mean, groups, percent
from examples.benchmarks.timing import gpu_us
from examples.benchmarks.vocabulary import BITS, BlockSelection
from lightning_actprune.codec.blocks import block_and_keep, sparsity_parts

STORED = [(name, "largest") for name in BITS]
STORED += [("same", name) for name in get_args(BlockSelection) if name != "largest"]
"""Formats with the largest blocks, and selections with values as they are."""


def measure(
    pairs: list[tuple[Tensor, Tensor]], block_size: int, sparsity: float, stored: tuple[str, str]
) -> dict[str, Any]:
    """Return the figures of one way to store the inputs of `pairs`."""
    bits = BITS[stored[0]] or 0
    x, grad_y = pairs[0]
    _, keep = block_and_keep(x, block_size, sparsity_parts(sparsity), bits)
    pack = functools.partial(torch.ops.actprune.pack, block_size=block_size, keep=keep)
    pack = functools.partial(pack, bits=bits, selection=stored[1])
    packed = [pack(x) for x, _ in pairs]
    layout = 1, grad_y.shape[0], x.shape[2], False, grad_y.dtype, block_size, bits
    gradients = [
        functools.partial(torch.ops.actprune.weight_grad, g, *p, *layout)
        for (_, g), p in zip(pairs, packed, strict=True)
    ]
    return {
        "method": chosen_method(grad_y, packed[0], x.shape[2], block_size),
        "pack_us": round(gpu_us([functools.partial(pack, x) for x, _ in pairs]), 2),
        "grad_us": round(gpu_us(gradients), 2),
        "stored_bytes": sum(tensor.nbytes for tensor in packed[0]),
    }


def summary(records: Records, figure: str, title: str) -> Summary:
    """Return the times of a figure over those of unquantised largest blocks in the same case."""
    names = list(dict.fromkeys(map(name_of, records)))
    rows = []
    for (case, block, sparsity), group in groups(records, "case", "block_size", "sparsity").items():
        by_name = {name_of(record): record[figure] for record in group}
        reference = by_name.get("same")
        cells = [_cell(by_name.get(name), reference) for name in names]
        rows.append([f"{case_name(case)}, b = {block}, s = {sparsity}", *cells])
    return Summary(title, ("case", *names), rows)


def ratios(records: Records) -> Summary:
    """Return times beside those of unquantised largest blocks: geometric mean over the cases, the worst in brackets."""
    names = [name for name in dict.fromkeys(map(name_of, records)) if name != "same"]
    rows = []
    for title, figure in (("pack", "pack_us"), ("weight gradient", "grad_us")):
        for (block, sparsity), group in groups(records, "block_size", "sparsity").items():
            times = {(tuple(r["case"]), name_of(r)): r[figure] for r in group}
            cases = dict.fromkeys(case for case, _ in times)
            cells = []
            for name in names:
                found = [times[case, name] / times[case, "same"] for case in cases]
                cells.append(f"{percent(geometric_mean(found))} ({percent(max(found))})")
            rows.append([f"{title}, b = {block}, s = {sparsity:g}", *cells])
    return Summary("Time beside that of values as they are", ("", *names), rows)


def name_of(record: dict[str, Any]) -> str:
    """Return what a record measured, in a word."""
    return record["value_format"] if record["block_selection"] == "largest" else record["block_selection"]


def _cell(value: float | None, reference: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" + (f" ({value / reference:.2f})" if reference is not None and value is not reference else "")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[32])
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.0, 0.6, 0.9])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))))
    parser.add_argument("--out", type=Path, default=Path("formats.json"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measure everything, write records and print tables."""
    args = parse(argv)
    require_gpu()
    start, records = time.perf_counter(), []
    for number in args.cases:
        pairs = inputs(CASES[number], getattr(torch, args.dtype))
        for block, sparsity in itertools.product(args.blocks, args.sparsities):
            head = {"case": list(CASES[number]), "dtype": args.dtype, "block_size": block, "sparsity": sparsity}
            for stored in STORED:
                named = {"value_format": stored[0], "block_selection": stored[1]}
                records.append({**head, **named, **measure(pairs, block, sparsity, stored), **environment()})
            write_records(args.out, records)
    report(records, Console(width=160))
    print(f"Measured in {time.perf_counter() - start:.0f} s; wrote {args.out}")


def report(records: Records, console: Console) -> None:
    """Print the tables."""
    console.print(summary(records, "pack_us", "Pack, us (over unquantised)").rich())
    console.print(summary(records, "grad_us", "Weight gradient, us (over unquantised)").rich())


if __name__ == "__main__":
    main()
