"""Sweep the one-launch pack and compare it with three launches: the ground for ``choose_config`` and its rule.

    python examples/benchmarks/tune_pack.py --out tune_pack.json

Every configuration is compiled in parallel first (Triton's cache is on disk), then timed: GPU time by CUDA graph with
inputs rotated through several times the L2 cache, next to a device copy of the input. What a configuration stores must
equal what three launches store, on integers, whose sums are exact in any order. One line and one record per setting.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import environment, require_gpu, write_records
from examples.benchmarks.kernels import ROTATED_BYTES
from examples.benchmarks.timing import gpu_us
from lightning_actprune.kernels.pack import PackPlan
from lightning_actprune.kernels.pack_sample import SampleConfig, SamplePlan
from lightning_actprune.ops.geometry import BlockGeometry

Case = tuple[tuple[int, int, int], str, int]
CASES: list[Case] = [
    ((64, 196, 384), "bfloat16", 32), ((64, 196, 1536), "bfloat16", 32), ((128, 196, 384), "bfloat16", 32),
    ((128, 196, 1536), "bfloat16", 32), ((128, 197, 768), "bfloat16", 32), ((128, 197, 3072), "bfloat16", 32),
    ((128, 384, 196), "bfloat16", 32), ((64, 196, 768), "bfloat16", 32), ((128, 64, 384), "bfloat16", 32),
    ((64, 196, 1536), "bfloat16", 16), ((64, 196, 1536), "bfloat16", 64), ((32, 196, 1536), "float32", 32),
]  # fmt: skip
"""Shape, dtype, block size."""

# warps, piece, KiB and stages of the keys, KiB and stages of the copies. A tile of fewer blocks than threads is copied
# without an exchange between the warps: 8 KiB of 32 bf16 at 8 warps, 16 at 16.
CONFIGS = [SampleConfig(*row) for row in (
    (8, 8192, 32, 1, 32, 1), (8, 8192, 16, 1, 16, 1), (8, 8192, 64, 1, 64, 1), (8, 8192, 64, 1, 32, 1),
    (8, 8192, 32, 1, 8, 1), (8, 8192, 8, 5, 8, 5), (8, 8192, 16, 3, 16, 3), (8, 8192, 32, 3, 32, 3),
    (8, 2048, 32, 1, 32, 1), (16, 8192, 32, 1, 32, 1), (16, 8192, 64, 1, 64, 1), (16, 8192, 64, 1, 16, 1),
    (16, 8192, 16, 4, 16, 4), (16, 8192, 32, 3, 32, 3), (16, 4096, 64, 1, 32, 1), (32, 8192, 64, 1, 64, 1),
    (32, 8192, 64, 1, 32, 1), (32, 8192, 32, 3, 32, 3),
)]  # fmt: skip


def configurations(blocks: int) -> list[SampleConfig]:
    """Return the configurations worth trying: at most 64 keys a thread."""
    return [config for config in CONFIGS if blocks <= 64 * 32 * config.warps]


def plans(case: Case, sparsity: float) -> tuple[PackPlan, dict[SampleConfig, SamplePlan]]:
    """Return three launches and the one-launch candidates for a contiguous input."""
    shape, name, block_size = case
    geometry = BlockGeometry.of(*shape, block_size, sparsity)
    strides = (shape[1] * shape[2], shape[2])
    head = (shape, strides, geometry.block_size, geometry.keep)
    candidates = {
        config: SamplePlan(*head, getattr(torch, name).itemsize, config)
        for config in configurations(geometry.blocks_per_sample)
    }
    return PackPlan(*head, torch.device("cuda", torch.cuda.current_device())), candidates


def compile_one(job: tuple[Case, float, SampleConfig]) -> None:
    """Launch one candidate in another process: the machine code lands in the cache on disk."""
    case, sparsity, config = job
    try:
        plans(case, sparsity)[1][config](torch.zeros(case[0], dtype=getattr(torch, case[1]), device="cuda"))
        torch.cuda.synchronize()
    except Exception as error:
        print("not compiled:", job, str(error)[:200], flush=True)


def right(plan: SamplePlan, x: torch.Tensor, expected: tuple[torch.Tensor, ...]) -> bool:
    """Return whether ``plan`` stores what is expected, twice: a race need not show the first time."""
    return all(torch.equal(a, b) for _ in range(2) for a, b in zip(plan(x), expected, strict=True))


def measure(case: Case, sparsity: float, deadline: float) -> list[dict[str, Any]]:
    """Time one case, until ``deadline``, and print a line per candidate."""
    shape, dtype = case[0], getattr(torch, case[1])
    count = max(2, math.ceil(ROTATED_BYTES / (math.prod(shape) * dtype.itemsize)))
    inputs = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(count)]
    integers = torch.randint(-4, 5, shape, device="cuda").to(dtype)
    three, candidates = plans(case, sparsity)
    expected = three(integers)

    def timed(call: Any) -> float:
        return round(gpu_us([lambda x=x: call(x) for x in inputs], repeats=2, replays=5), 2)

    head = {"shape": list(shape), "dtype": case[1], "block_size": case[2], "sparsity": sparsity}
    head |= {"copy_us": timed(torch.clone), "three_us": timed(three)}
    print(f"{shape} {case[1]} b={case[2]}: copy {head['copy_us']}, three launches {head['three_us']}", flush=True)
    records = []
    for config, plan in candidates.items():
        if time.monotonic() > deadline:
            print("  out of time", flush=True)
            break
        try:
            found = {"us": timed(plan), "right": right(plan, integers, expected)}
        except Exception as error:
            print(f"  {tuple(config)} failed: {str(error)[:100]}", flush=True)
            continue
        records.append({**head, **config._asdict(), **found, "allocates": bool(plan.scratch)})
        print(f"  {tuple(config)} {found['us']:7.2f}{'' if found['right'] else '  WRONG'}", flush=True)
    return records


def main() -> None:
    """Sweep, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))))
    parser.add_argument("--sparsity", type=float, default=0.6)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=120.0, help="measure so long at most, compiling included")
    parser.add_argument("--out", type=Path, default=Path("tune_pack.json"))
    args = parser.parse_args()
    require_gpu()
    began = time.monotonic()
    cases = [CASES[i] for i in args.cases]
    sizes = [BlockGeometry.of(*shape, block_size, args.sparsity).blocks_per_sample for shape, _, block_size in cases]
    jobs = [(case, args.sparsity, c) for case, blocks in zip(cases, sizes, strict=True) for c in configurations(blocks)]
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs))
    print(f"compiled {len(jobs)} kernels in {time.monotonic() - began:.0f} s", flush=True)
    found = (measure(case, args.sparsity, began + args.seconds) for case in cases)
    records = [record | environment() for record in itertools.chain.from_iterable(found)]
    write_records(args.out, records)
    for case in cases:
        of_case = [r for r in records if (tuple(r["shape"]), r["dtype"], r["block_size"]) == case and r["right"]]
        for r in sorted(of_case, key=lambda r: r["us"])[:1]:
            best = SampleConfig(**{field: r[field] for field in SampleConfig._fields})
            print(f"{case}: copy {r['copy_us']}, three {r['three_us']}, best {r['us']} with {tuple(best)}")


if __name__ == "__main__":
    main()
