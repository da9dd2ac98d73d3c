"""Sweep the tile sizes of the gather kernel, to choose the constants of ``kernels.weight_grad.choose_config``.

    python examples/benchmarks/tune_weight_grad.py --out tune.json

Every configuration is compiled in parallel first (the compiler's cache is on disk), then timed one by one. Prints the
best few per case; writes all of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lightning_actprune.kernels.weight_grad import Config, WeightGradPlan
from lightning_actprune.ops.geometry import BlockGeometry, ceil_div

CASES = [(64, 196, 384, 1536), (64, 196, 1536, 384), (64, 196, 768, 3072)]
SHARED_MEMORY = 232448


def configurations(block_size: int, dtype: torch.dtype) -> list[Config]:
    """Return the configurations worth trying."""
    if dtype == torch.float32:
        grid = itertools.product([64, 128], [8, 16, 32], [4, 8], [2, 3, 4], [False, True])
    else:
        grid = itertools.product([128, 256], [32, 64, 128], [4, 8], [3, 4, 5], [False, True])
    block = max(16, block_size)
    size = 4 if dtype == torch.float32 else 2
    return [
        config
        for config in itertools.starmap(Config, grid)
        if config.stages * config.bk * (config.bm + block) * size <= SHARED_MEMORY
        and (not config.values_first or block >= 64 or size == 4)
        and config.bk >= 16
        and config.bm * block <= 256 * 128
        and config.bm * block / config.warps <= 4096
    ]


def problem(case: tuple[int, int, int, int], block_size: int, sparsity: float, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return tensors of one case, and the geometry."""
    batch, tokens, features, outputs = case
    x = torch.randn(batch, tokens, features, device="cuda", dtype=dtype)
    grad_y = torch.randn(batch * tokens, outputs, device="cuda", dtype=dtype)
    geometry = BlockGeometry.of(batch, tokens, features, block_size, sparsity)
    packed = torch.ops.actprune.pack(x, geometry.block_size, geometry.keep)
    return x, grad_y, packed, geometry


def compile_one(arguments: tuple[Any, ...]) -> None:
    """Launch once in another process: the machine code lands in the cache on disk."""
    case, block_size, sparsity, dtype, config, split = arguments
    try:
        run(problem(case, block_size, sparsity, dtype), config, split)()
        torch.cuda.synchronize()
    except Exception as error:  # a configuration that does not compile is simply not a candidate
        print("not compiled:", config, str(error)[:80], flush=True)


def run(tensors: tuple[Any, ...], config: Config, split: int) -> Any:
    """Return a function that launches the kernel."""
    _, grad_y, packed, geometry = tensors
    outputs, stored, dtype = grad_y.shape[1], tuple(packed[0].shape), torch.float32
    plan = WeightGradPlan(outputs, outputs, stored, geometry.total_rows, geometry.length, dtype, config, split)
    return lambda: plan(grad_y, *packed)


def main() -> None:
    """Sweep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.6, 0.9])
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--out", type=Path, default=Path("tune.json"))
    args = parser.parse_args()
    dtypes = [getattr(torch, name) for name in args.dtypes]
    jobs = [
        (CASES[0], block, 0.6, dtype, config, split)
        for dtype in dtypes for block in args.blocks for config in configurations(block, dtype) for split in (1, 2)
    ]  # fmt: skip
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs, chunksize=8))
    records = []
    for dtype, block, sparsity, case in itertools.product(dtypes, args.blocks, args.sparsities, CASES):
        tensors = problem(case, block, sparsity, dtype)
        x, grad_y = tensors[0].flatten(0, 1), tensors[1]
        dense = triton.testing.do_bench(lambda g=grad_y, x=x: g.t() @ x, warmup=5, rep=20, return_mode="median") * 1e3
        found = []
        for config in configurations(block, dtype):
            tiles = ceil_div(case[2], block) * ceil_div(case[3], config.bm)
            for split in sorted({max(1, min(16, round(k * 132 / tiles))) for k in (0.5, 1, 2, 4)}):
                try:
                    us = triton.testing.do_bench(run(tensors, config, split), warmup=2, rep=6, return_mode="median")
                except Exception:  # noqa: S112
                    continue
                found.append({"us": us * 1e3, "split": split, **config._asdict()})
        found.sort(key=lambda entry: entry["us"])
        head = {"case": case, "dtype": str(dtype), "block_size": block, "sparsity": sparsity, "dense_us": dense}
        records.append({**head, "found": found})
        print(case, dtype, block, sparsity, f"dense {dense:.1f}", flush=True)
        for entry in found[:4]:
            print("    ", {k: round(v, 1) for k, v in entry.items()}, flush=True)
        args.out.write_text(json.dumps(records))


if __name__ == "__main__":
    main()
