"""Pack and weight gradient against a copy and the dense matrix product, on one GPU.

    python examples/benchmarks/kernels.py

Prints tables and writes the records and, with matplotlib, a picture per dtype. The first run also compiles the kernels.

For each case (B, T, in) -> out, dtype, block size and sparsity: the dense weight gradient (``dense_us``), ours as the
cost model chooses it (``ours_us``, ``backend``), both methods forced (``gather_us``, ``unpack_us``), pack (``pack_us``)
and a device copy of the same tensor (``copy_us``). GPU time by CUDA graph, inputs rotated through several times the L2
cache, medians.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks import plots, summaries
from examples.benchmarks.common import environment, require_gpu, write_records
from examples.benchmarks.summaries import case_name
from examples.benchmarks.timing import gpu_us
from lightning_actprune.codec.blocks import BlockGeometry
from lightning_actprune.operators.weight_grad import MAX_GATHER_BLOCK, force_method, fp32_is_exact, gather_is_faster

CASES = [(128, 64, 384, 1536), (64, 196, 384, 1536), (64, 196, 1536, 384), (64, 196, 768, 3072), (8, 1024, 4096, 4096)]
DTYPES = ["bfloat16", "float16", "float32"]
ROTATED_BYTES = 3 * 2**26
"""Three times 64 MiB: several times the 50 MB L2 cache of an H200."""


def inputs(case: tuple[int, int, int, int], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return enough pairs of layer input and output gradient to sweep the cache."""
    batch, tokens, features, outputs = case
    size = batch * tokens * (features + outputs) * dtype.itemsize
    return [
        (
            torch.randn(batch, tokens, features, device="cuda", dtype=dtype),
            torch.randn(batch * tokens, outputs, device="cuda", dtype=dtype),
        )
        for _ in range(max(2, math.ceil(ROTATED_BYTES / size)))
    ]


def weight_gradient(grad_y: Tensor, packed: tuple[Tensor, ...], x: Tensor) -> Tensor:
    """Return the weight gradient from packed values."""
    rows, length, block = grad_y.shape[0], x.shape[2], packed[0].shape[1]
    grad: Tensor = torch.ops.actprune.weight_grad(grad_y, *packed, 1, rows, length, False, grad_y.dtype, block)
    return grad


def chosen_method(grad_y: Tensor, packed: tuple[Tensor, ...], length: int, block_size: int) -> str:
    """Return what the cost model takes; without positions all blocks are there, which are unpacked."""
    (rows, outputs), kept = grad_y.shape, packed[0].shape[0]
    exact = grad_y.dtype != torch.float32 or fp32_is_exact()
    may_gather = packed[1].shape[1] > 0 and block_size <= MAX_GATHER_BLOCK
    sizes = (rows, outputs), (kept, block_size), length, grad_y.itemsize
    return "gather" if may_gather and gather_is_faster(*sizes, exact) else "unpack"


def measure(
    pairs: list[tuple[Tensor, Tensor]], block_size: int, sparsity: float, timer: Callable[..., float]
) -> dict[str, Any]:
    """Return the figures of one setting."""
    geometry = BlockGeometry.of_stored(pairs[0][0], block_size, sparsity)

    def pack(x: Tensor) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = torch.ops.actprune.pack(x, block_size, geometry.keep)
        return result

    packed = [pack(x) for x, _ in pairs]
    x, grad_y = pairs[0]
    backend = chosen_method(grad_y, packed[0], x.shape[2], block_size)
    figures: dict[str, Any] = {"backend": backend, "pack_us": timer([lambda x=x: pack(x) for x, _ in pairs])}
    for method in ("gather", "unpack"):
        with force_method(method):
            calls = [lambda g=g, p=p, x=x: weight_gradient(g, p, x) for (x, g), p in zip(pairs, packed, strict=True)]
            figures[f"{method}_us"] = timer(calls)
    figures["ours_us"] = figures[f"{backend}_us"]
    return figures


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=DTYPES)
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9])
    numbered = "; ".join(f"{number}: {case_name(case)}" for number, case in enumerate(CASES))
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))), help=numbered)
    parser.add_argument("--out", type=Path, default=Path("kernels.json"), help="records (kernels.json)")
    parser.add_argument("--plot", type=Path, default=Path("kernels.png"), help="pictures (kernels_<dtype>.png)")
    return parser.parse_args(argv)


def measure_case(
    name: str, case: tuple[int, int, int, int], settings: list[tuple[int, float]], advance: Callable[[], None]
) -> list[dict[str, Any]]:
    """Return the records of one case in one dtype."""
    pairs = inputs(case, getattr(torch, name))
    dense = gpu_us([lambda g=g, x=x: g.t() @ x.flatten(0, 1) for x, g in pairs])
    shared = {"dense_us": dense, "copy_us": gpu_us([lambda x=x: x.clone() for x, _ in pairs])}
    # Beside a millisecond, the start of a graph is nothing: long calls are not repeated in it.
    timer = functools.partial(gpu_us, repeats=1 if dense > 1000 else 3)
    records = []
    for block, sparsity in settings:
        figures = shared | measure(pairs, block, sparsity, timer)
        figures = {k: round(v, 2) if isinstance(v, float) else v for k, v in figures.items()}
        head = {"case": list(case), "dtype": name, "block_size": block, "sparsity": sparsity}
        records.append({**head, **figures, **environment()})
        advance()
    return records


def main(argv: list[str] | None = None) -> None:
    """Measure everything, write records and pictures, print tables."""
    args = parse(argv)
    require_gpu()
    console, start = Console(), time.perf_counter()
    settings = list(itertools.product(args.blocks, args.sparsities))
    records: list[dict[str, Any]] = []
    with Progress(console=console) as progress:
        task = progress.add_task("Measuring", total=len(args.dtypes) * len(args.cases) * len(settings))
        for name, number in itertools.product(args.dtypes, args.cases):
            progress.update(task, description=f"{name}, {case_name(CASES[number])}")
            found = measure_case(name, CASES[number], settings, lambda: progress.advance(task))
            elapsed = round(time.perf_counter() - start, 1)
            records += [{**record, "elapsed_s": elapsed} for record in found]
            write_records(args.out, records)
    report(records, console)
    console.print(f"Measured in {records[-1]['elapsed_s']:.0f} s on {records[-1]['gpu']}; wrote {args.out}")
    if importlib.util.find_spec("matplotlib") is None:
        console.print('No pictures: matplotlib is missing (pip install "matplotlib").', markup=False)
        return
    for path in plots.write_pictures(records, args.plot):
        console.print(f"Wrote {path}")


def report(records: list[dict[str, Any]], console: Console) -> None:
    """Print the tables."""
    for summary in (summaries.weight_gradient(records), summaries.by_case(records), summaries.pack(records)):
        if summary.rows:
            console.print(summary.rich())


if __name__ == "__main__":
    main()
