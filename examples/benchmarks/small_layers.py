"""From which size on does pruning a linear layer pay? Extra time and saved bytes against the number of features.

    python examples/benchmarks/small_layers.py --out small_layers.json

One linear layer (features -> 4 features) forward and backward on 64 x 196 rows, bf16, s = 0.6, b = 32: wall time per
iteration with the queue kept full (median of 5 repeats of 100), so that launches count as much as kernels do. Chooses
``lightning_actprune.config.MIN_FEATURES``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import MIB, environment, write_records
from lightning_actprune import functional

SPARSITY, BLOCK = 0.6, 32


def seconds(step: Callable[[], Tensor], weight: Tensor, x: Tensor, repeats: int = 100) -> float:
    """Return the median wall time of forward and backward in seconds."""
    grad = torch.ones_like(step())
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            torch.autograd.grad(step(), (weight, x), grad)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / repeats)
    return statistics.median(times[1:])


def main() -> None:
    """Measure and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("small_layers.json"))
    args = parser.parse_args()
    records = []
    for features in (16, 32, 48, 64, 96, 128, 192, 256, 384, 768):
        x = torch.randn(64, 196, features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(4 * features, features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dense = seconds(lambda x=x, w=weight: F.linear(x, w), weight, x)
        pruned = seconds(lambda x=x, w=weight: functional.linear(x, w, sparsity=SPARSITY, block_size=BLOCK), weight, x)
        stored = functional.pack(x.detach(), sparsity=SPARSITY, block_size=BLOCK).nbytes
        saved = (x.nbytes - stored) / MIB
        record = {
            "features": features, "rows": 64 * 196, "precision": "bf16", "sparsity": SPARSITY, "block_size": BLOCK,
            "dense_us": round(dense * 1e6, 1), "pruned_us": round(pruned * 1e6, 1), "saved_mib": round(saved, 3),
            "extra_us_per_mib": round((pruned - dense) * 1e6 / saved, 1),
        }  # fmt: skip
        records.append({**record, **environment()})
        print(record, flush=True)
    write_records(args.out, records)


if __name__ == "__main__":
    main()
