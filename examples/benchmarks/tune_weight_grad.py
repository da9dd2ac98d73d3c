"""Sweep the gather kernel's tile sizes and splits: the ground for ``choose_config`` and ``SplitRule``.

    python examples/benchmarks/tune_weight_grad.py --out tune.jsonl

Every configuration is compiled in parallel first (Triton's cache is on disk), then timed: GPU time of the whole weight
gradient, list of kept rows included, by CUDA graph with inputs rotated through several times the L2 cache. One JSON
line per measurement goes to ``--out``, and once more with ``--analyse`` the file is only read. For each dtype and block
size the end prints the geometric means of dense time over ours, over cases and sparsities, of the best configurations:
with each case's best split, and with the split of the rule that is best for all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.kernels import CASES, inputs
from examples.benchmarks.timing import gpu_us
from lightning_actprune.codec import blocks
from lightning_actprune.codec.blocks import BlockGeometry, ceil_div
from lightning_actprune.kernels.linear import SPLIT_RULES, Config, Shape, SplitRule, WeightGradLaunch, choose_split

MULTIPROCESSORS = 132
SPLITS = (1, 2, 3, 4, 6, 8)
RULES = [SplitRule(*r) for r in itertools.product((4, 6, 8, 12, 16), (8, 12, 16, 24, 32), (4, 6, 8), (2, 4, 8))]

# Chosen from code compiled for Hopper: no spills, 16-byte asynchronous copies, for fp32 most FMAs of all instructions.
# bm, bk, warps, stages, values_first
CANDIDATES = {
    ("bfloat16", 16): [
        (128, 64, 8, 3, 0), (128, 64, 4, 3, 0), (128, 128, 4, 3, 0), (256, 32, 4, 3, 0), (256, 32, 4, 4, 0),
        (256, 64, 4, 3, 0), (256, 64, 8, 3, 0), (256, 64, 8, 4, 0), (256, 128, 8, 3, 0), (512, 32, 8, 3, 0),
    ],
    ("bfloat16", 32): [
        (128, 32, 4, 3, 0), (128, 64, 4, 3, 0), (128, 64, 4, 4, 0), (128, 128, 4, 3, 0), (256, 32, 4, 3, 0),
        (256, 32, 4, 4, 0), (256, 64, 4, 3, 0), (256, 64, 8, 3, 0), (256, 64, 8, 4, 0), (256, 32, 8, 4, 0),
        (512, 32, 8, 3, 0),
    ],
    ("bfloat16", 64): [
        (128, 64, 8, 3, 1), (128, 64, 8, 4, 1), (128, 32, 4, 4, 1), (128, 64, 4, 3, 1), (128, 64, 4, 4, 1),
        (128, 128, 4, 3, 1), (128, 128, 8, 3, 1), (256, 32, 4, 3, 1), (256, 32, 8, 4, 1), (256, 64, 8, 3, 1),
        (256, 64, 8, 4, 1), (256, 64, 4, 3, 1),
    ],
    ("bfloat16", 128): [
        (64, 64, 4, 4, 1), (128, 64, 4, 3, 1), (128, 32, 8, 4, 1), (128, 64, 8, 3, 1), (128, 64, 8, 4, 1),
        (128, 128, 8, 3, 1), (256, 32, 8, 4, 1), (256, 64, 8, 3, 1), (256, 64, 8, 4, 1),
    ],
    ("float32", 16): [
        (128, 16, 2, 3, 0), (128, 32, 4, 3, 0), (256, 16, 4, 3, 0), (256, 32, 4, 3, 0), (256, 32, 8, 3, 0),
    ],
    ("float32", 32): [
        (64, 32, 2, 3, 0), (128, 16, 4, 3, 1), (128, 32, 2, 3, 0), (128, 32, 4, 3, 0), (256, 16, 8, 3, 0),
        (256, 32, 4, 3, 0), (256, 32, 8, 3, 1),
    ],
    ("float32", 64): [
        (64, 16, 2, 3, 1), (64, 32, 2, 3, 0), (64, 32, 4, 3, 1), (128, 16, 4, 3, 0), (128, 16, 4, 3, 1),
        (128, 32, 4, 3, 1), (128, 32, 4, 4, 1), (128, 32, 8, 3, 0), (256, 16, 4, 3, 0), (256, 16, 8, 3, 1),
        (256, 32, 8, 3, 0),
    ],
    ("float32", 128): [
        (64, 16, 4, 3, 1), (64, 32, 2, 3, 0), (64, 32, 4, 3, 0), (128, 16, 4, 3, 0), (128, 32, 4, 3, 0),
        (128, 32, 8, 3, 1), (256, 16, 8, 3, 1), (256, 32, 8, 3, 1),
    ],
}  # fmt: skip


def configurations(dtype: str, block_size: int) -> list[Config]:
    """Return the configurations worth trying."""
    return [Config(*row[:4], values_first=bool(row[4])) for row in CANDIDATES[dtype, block_size]]


def tiles_of(case: tuple[int, ...], block_size: int, config: Config) -> int:
    """Return the number of output tiles."""
    return ceil_div(case[2], block_size) * ceil_div(case[3], config.bm)


def kept_per_column(case: tuple[int, ...], sparsity: float) -> int:
    """Return the average number of kept rows of a column."""
    return round(case[0] * case[1] * (1 - sparsity))


def splits(case: tuple[int, ...], block_size: int, sparsity: float, config: Config) -> list[int]:
    """Return the numbers of parts worth trying: not more than 48 warps a multiprocessor, nor parts below two turns."""
    warps = tiles_of(case, block_size, config) * config.warps
    kept = kept_per_column(case, sparsity)
    return [
        split for split in SPLITS
        if split == 1 or (warps * split <= 48 * MULTIPROCESSORS and kept // split >= 2 * config.bk)
    ]  # fmt: skip


def launch_of(
    outputs: int, packed: tuple[torch.Tensor, ...], geometry: BlockGeometry, config: Config, split: int
) -> Any:
    """Return the weight gradient of one shape."""
    shape = Shape(
        outputs,
        outputs,
        geometry.samples,
        geometry.total_rows,
        geometry.length,
        *packed[0].shape,
        packed[0].element_size(),
    )
    return WeightGradLaunch(shape, packed[0].dtype, config, split)


def compile_one(job: tuple[str, int, Config, int]) -> None:
    """Launch a small problem in another process: the machine code lands in the cache on disk.

    Only what the code depends on must be as in the sweep: dtype, constants, and which numbers are multiples of 16.
    """
    name, block_size, config, split = job
    dtype, rows, length, outputs = getattr(torch, name), 512, 16 * block_size, 2 * config.bm
    try:
        geometry = BlockGeometry.of(1, rows, length, block_size, 0.5)
        x = torch.randn(1, rows, length, device="cuda").to(dtype)
        packed = blocks.pack(x, block_size, geometry.keep)
        grad_y = torch.randn(rows, outputs, device="cuda").to(dtype)
        launch_of(outputs, packed, geometry, config, split)(grad_y, *packed)
        torch.cuda.synchronize()
    except Exception as error:
        print("not compiled:", job, str(error)[:200], flush=True)


def sweep(args: argparse.Namespace) -> None:
    """Measure everything that ``--seconds`` allows."""
    began = time.monotonic()
    chosen = list(itertools.product(args.dtypes, args.blocks))
    jobs = [(name, block, config, split) for name, block in chosen for config in configurations(name, block)
            for split in (1, 2)]  # fmt: skip
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs))
    print(f"compiled {len(jobs)} kernels in {time.monotonic() - began:.0f} s", flush=True)
    with args.out.open("w") as file:
        # Case by case, since making inputs costs most: a cut sweep then lacks whole cases for every configuration.
        for name, index in itertools.product(args.dtypes, args.cases):
            case = CASES[index]
            pairs = inputs(case, getattr(torch, name))
            dense = gpu_us([lambda g=g, x=x: g.t() @ x.flatten(0, 1) for x, g in pairs])
            for block, sparsity in itertools.product(args.blocks, args.sparsities):
                geometry = BlockGeometry.of_stored(pairs[0][0], block, sparsity)
                packed = [blocks.pack(x, geometry.block_size, geometry.keep) for x, _ in pairs]
                head = {"case": list(case), "dtype": name, "block_size": block, "sparsity": sparsity}
                for config in configurations(name, block):
                    for split in splits(case, block, sparsity, config):
                        if time.monotonic() - began > args.seconds:
                            print("out of time at", head, flush=True)
                            return
                        launch = launch_of(case[3], packed[0], geometry, config, split)
                        try:
                            calls = [
                                lambda g=g, p=p, f=launch: f(g, *p) for (_, g), p in zip(pairs, packed, strict=True)
                            ]
                            us = gpu_us(calls, repeats=2, replays=5)
                        except Exception as error:
                            print("failed:", head, config, split, str(error)[:100], flush=True)
                            break
                        figures = {
                            "config": list(config),
                            "split": split,
                            "parts": launch.parts,
                            "us": round(us, 2),
                            "dense_us": round(dense, 2),
                        }
                        file.write(json.dumps(head | figures) + "\n")
                file.flush()
            print(f"{time.monotonic() - began:6.0f} s", name, case, f"dense {dense:.1f}", flush=True)


Settings = dict[tuple[Any, ...], dict[int, float]]


def analyse(path: Path) -> None:
    """Print the best configurations of each dtype and block size, and the best rule of splitting."""
    # measured[dtype, b][config][case, sparsity][split] = dense time over ours
    measured: dict[tuple[str, int], dict[Config, Settings]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(dict))
    )
    for line in path.read_text().splitlines():
        r = json.loads(line)
        by_config = measured[r["dtype"], r["block_size"]][Config(*r["config"])]
        by_config[tuple(r["case"]), r["sparsity"]][r["split"]] = r["dense_us"] / r["us"]

    def by_rule(config: Config, block: int, settings: Settings, rule: SplitRule) -> dict[Any, float]:
        found = {}
        for (case, sparsity), by_split in settings.items():
            kept, tiles = kept_per_column(case, sparsity), tiles_of(case, block, config)
            wanted = choose_split(tiles, kept, config, MULTIPROCESSORS, rule)
            nearest = min(by_split, key=lambda split: abs(math.log(split / wanted)))
            found[case, sparsity] = by_split[nearest]
        return found

    def score(rule: SplitRule) -> float:
        return sum(
            max(_mean(by_rule(config, block, settings, rule).values()) for config, settings in configs.items())
            for (_, block), configs in measured.items()
        )

    best = max(RULES, key=score)
    print("best rule", best, f"score {score(best):.4f}; today's", SPLIT_RULES)
    for (name, block), configs in measured.items():
        print(f"\n{name} b={block}: mean with the best splits, with the rule; with the rule by sparsity and case")
        rows = []
        for config, settings in configs.items():
            ratios = by_rule(config, block, settings, best)
            rows.append((_mean(ratios.values()), _mean(max(s.values()) for s in settings.values()), config, ratios))
        for mean, ideal, config, ratios in sorted(rows, key=lambda row: -row[0])[:4]:
            parts = []
            for sparsity in sorted({s for _, s in ratios}):
                of = [ratio for (_, s), ratio in ratios.items() if s == sparsity]
                parts.append(f"s={sparsity} {_mean(of):.2f} [{' '.join(f'{ratio:.2f}' for ratio in of)}]")
            print(f"  {tuple(config)}  {ideal:.3f} {mean:.3f}  " + "  ".join(parts))
        for sparsity in sorted({s for settings in configs.values() for _, s in settings}):
            config = max(rows, key=lambda row: _mean(r for (_, s), r in row[3].items() if s == sparsity))[2]
            chosen = {k[0]: max(v, key=v.__getitem__) for k, v in configs[config].items() if k[1] == sparsity}
            print(f"  best at s={sparsity}: {tuple(config)}, best splits {chosen}")


def _mean(values: Any) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else 0.0


def main() -> None:
    """Sweep and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--blocks", type=int, nargs="+", default=[64, 32, 128, 16])
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.6, 0.9])
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))))
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument(
        "--seconds", type=float, default=140.0, help="stop measuring after this time, compiling included"
    )
    parser.add_argument("--analyse", action="store_true", help="only read --out")
    parser.add_argument("--out", type=Path, default=Path("tune.jsonl"))
    args = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    if not args.analyse:
        sweep(args)
    analyse(args.out)


if __name__ == "__main__":
    main()
