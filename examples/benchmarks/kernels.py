"""Pack and weight gradient against a copy and the dense matrix product, on one GPU.

    python examples/benchmarks/kernels.py --out kernels.json

For each case (B, T, in) -> out, dtype, block size and sparsity: the dense weight gradient (``dense_us``), ours as the
cost model chooses it (``ours_us``, ``backend``), both methods forced (``gather_us``, ``unpack_us``), pack (``pack_us``)
and a device copy of the same tensor (``copy_us``). GPU time by CUDA graph, inputs rotated through several times the L2
cache, medians.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import environment, write_records
from examples.benchmarks.timing import gpu_us
from lightning_actprune.ops.geometry import BlockGeometry
from lightning_actprune.ops.weight_grad import choose_method, force_method

CASES = [(128, 64, 384, 1536), (64, 196, 384, 1536), (64, 196, 1536, 384), (64, 196, 768, 3072), (8, 1024, 4096, 4096)]
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
    rows, length = grad_y.shape[0], x.shape[2]
    grad: Tensor = torch.ops.actprune.weight_grad(grad_y, *packed, 1, rows, length, False, grad_y.dtype)
    return grad


def measure(
    pairs: list[tuple[Tensor, Tensor]], block_size: int, sparsity: float, methods: tuple[str, ...]
) -> dict[str, Any]:
    """Return the figures of one setting."""
    geometry = BlockGeometry.of_stored(pairs[0][0], block_size, sparsity)

    def pack(x: Tensor) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = torch.ops.actprune.pack(x, block_size, geometry.keep)
        return result

    packed = [pack(x) for x, _ in pairs]
    x, grad_y = pairs[0]
    backend = choose_method(grad_y, packed[0][0], x.shape[2], transposed=False)
    figures: dict[str, Any] = {"backend": backend, "pack_us": gpu_us([lambda x=x: pack(x) for x, _ in pairs])}
    for method in methods:
        with force_method(method):
            calls = [lambda g=g, p=p, x=x: weight_gradient(g, p, x) for (x, g), p in zip(pairs, packed, strict=True)]
            figures[f"{method}_us"] = gpu_us(calls)
    figures["ours_us"] = figures[f"{backend}_us"]
    return figures


def main() -> None:
    """Measure everything, write the records and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9])
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))))
    parser.add_argument("--out", type=Path, default=Path("kernels.json"))
    args = parser.parse_args()
    records = []
    for name, index in itertools.product(args.dtypes, args.cases):
        case, dtype = CASES[index], getattr(torch, name)
        pairs = inputs(case, dtype)
        dense = gpu_us([lambda g=g, x=x: g.t() @ x.flatten(0, 1) for x, g in pairs])
        copy = gpu_us([lambda x=x: x.clone() for x, _ in pairs])
        for block, sparsity in itertools.product(args.blocks, args.sparsities):
            figures = {"dense_us": dense, "copy_us": copy}
            figures |= measure(pairs, block, sparsity, ("gather", "unpack"))
            figures = {k: round(v, 2) if isinstance(v, float) else v for k, v in figures.items()}
            head = {"case": list(case), "dtype": name, "block_size": block, "sparsity": sparsity}
            records.append({**head, **figures, **environment()})
            print({**head, **figures}, flush=True)
        write_records(args.out, records)
    Console().print(summary(records))


def summary(records: list[dict[str, Any]]) -> Table:
    """Return geometric means over the cases: dense time over ours, and pack over a copy."""
    table = Table("dtype", "block", "sparsity", "dense / ours", "worst case", "dense / gather", "pack / copy")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in records:
        groups.setdefault((r["dtype"], r["block_size"], r["sparsity"]), []).append(r)
    for key, group in groups.items():
        ours = [r["dense_us"] / r["ours_us"] for r in group]
        gather = [r["dense_us"] / r["gather_us"] for r in group]
        pack = [r["pack_us"] / r["copy_us"] for r in group]
        cells = [_mean(ours), min(ours), _mean(gather), _mean(pack)]
        table.add_row(*map(str, key), *(f"{value:.2f}" for value in cells))
    return table


def _mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


if __name__ == "__main__":
    main()
