"""Host time of one pruned layer in eager mode, part by part: what keeps a small model's step waiting for Python.

    python examples/benchmarks/host.py --out host.json

Tensors are small, so the GPU is never waited for. ``us`` is the median over rounds of the time to issue one call.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import environment, write_records
from lightning_actprune import ActivationPrunedLinear
from lightning_actprune import functional as pruned
from lightning_actprune.ops import pack as pack_module
from lightning_actprune.ops import weight_grad as weight_grad_module
from lightning_actprune.ops.geometry import BlockGeometry


def host_us(call: Callable[[], Any], calls: int = 200, rounds: int = 7) -> float:
    """Return the median microseconds the host needs to issue ``call``."""
    found = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(found[1:])


def calls() -> dict[str, Callable[[], Any]]:
    """Return what is timed, by name."""
    x = torch.randn(8, 64, 384, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(384, 384, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    data, grad = x.detach(), torch.randn(8, 64, 384, device="cuda", dtype=torch.bfloat16)
    flat = grad.flatten(0, 1)
    dense = nn.Linear(384, 384, device="cuda", dtype=torch.bfloat16)
    module = ActivationPrunedLinear(384, 384, sparsity=0.6, device="cuda", dtype=torch.bfloat16)
    keep = BlockGeometry.of_stored(data, 32, 0.6).keep
    packed = torch.ops.actprune.pack(data, 32, keep)
    rest = (1, 512, 384, False, torch.bfloat16)
    return {
        "new_empty": lambda: data.new_empty(100),
        "dense forward": lambda: F.linear(x, weight),
        "pruned forward": lambda: pruned.linear(x, weight, sparsity=0.6),
        "dense module forward": lambda: dense(x),
        "pruned module forward": lambda: module(x),  # whose settings were checked when they were set
        "pack operator": lambda: torch.ops.actprune.pack(data, 32, keep),
        "pack function": lambda: pack_module.pack(data, 32, keep),
        "weight gradient operator": lambda: torch.ops.actprune.weight_grad(flat, *packed, *rest),
        "weight gradient function": lambda: weight_grad_module.weight_grad(flat, *packed, *rest),
        "dense forward + backward": lambda: F.linear(x, weight).backward(grad),
        "pruned forward + backward": lambda: pruned.linear(x, weight, sparsity=0.6).backward(grad),
    }


def main() -> None:
    """Time everything, write the records, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("host.json"))
    args = parser.parse_args()
    records = [{"part": name, "us": round(host_us(call), 1), **environment()} for name, call in calls().items()]
    write_records(args.out, records)
    table = Table("part", "us")
    for record in records:
        table.add_row(record["part"], f"{record['us']:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
