"""Sweeps that constants of the package were chosen by; README.md says which.

python benchmarks/tune.py weight_grad           # tile sizes and splits of the gather kernel
python benchmarks/tune.py formats               # how the kernels of quantized blocks share the work
python benchmarks/tune.py costs                 # the cost model of the weight gradient, from results/kernels.json
python benchmarks/tune.py features              # from how many features on a linear layer is worth packing
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.bench_kernels import BITS, CASES, DEVICE, inputs, rotated, timed
from benchmarks.common import MIB, Record, Records, show
from lightning_actprune import functional
from lightning_actprune.codec import blocks, formats
from lightning_actprune.codec import packed as packing
from lightning_actprune.codec.blocks import RUN_BLOCKS, BlockGeometry, ceil_div
from lightning_actprune.kernels import linear
from lightning_actprune.kernels import pack as packs
from lightning_actprune.kernels import unpack as unpacks
from lightning_actprune.kernels.linear import Config, SplitRule
from lightning_actprune.kernels.places import Turns
from lightning_actprune.operators.weight_grad import COSTS, Costs

KEYS = ("kind", "case", "dtype", "block_size", "sparsity", "value_format", "tile", "warps", "parts", "config", "split")
KEYS += ("features", "itemsize")
SPLITS = (1, 2, 3, 4, 6, 8)
RULES = [SplitRule(*rule) for rule in itertools.product((4, 6, 8, 12, 16), (8, 12, 16, 24, 32), (4, 6, 8), (2, 4, 8))]
LIMITS = linear.machine(torch.device(DEVICE))
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
Found = Iterator[tuple[Record, Callable[[], Record]]]
"""The heads of records, and what measures each."""


# === Weight gradient ==================================================================================


def configurations(dtype: str, block_size: int) -> list[Config]:
    """Return the tile configurations worth trying: their buffers fit, and a warp has 256 to 4096 sums."""
    itemsize, found = ITEMSIZE[dtype], []
    rows = (32, 64, 128) if itemsize == 2 else (16, 32)
    first = (block_size >= 64,) if itemsize == 2 else (False, True)
    for bm, bk, warps, stages, values in itertools.product((64, 128, 256, 512), rows, (2, 4, 8), (3, 4), first):
        buffers = stages * bk * (bm + block_size) * itemsize
        if buffers <= LIMITS.shared_memory and 256 <= bm * block_size // warps <= 4096:
            found.append(Config(bm, bk, warps, stages, values))
    return found


def weight_grads(args: argparse.Namespace) -> Found:
    """Sweep configurations and splits, case by case: a sweep that is cut short lacks whole cases."""
    torch.set_float32_matmul_precision("highest")
    for dtype, case in itertools.product(args.dtypes, args.cases):
        pairs = inputs(case, dtype)
        dense = timed(lambda x, g: g.t() @ x.flatten(0, 1), pairs)
        for block, sparsity in itertools.product(args.blocks, args.sparsities):
            keep = BlockGeometry.of_stored(pairs[0][0], block, sparsity).keep
            calls = [(g, *blocks.pack(x, block, keep)) for x, g in pairs]
            sizes = case[3], case[3], case[0], case[0] * case[1], case[2]
            shape = linear.Shape(*sizes, *calls[0][1].shape, ITEMSIZE[dtype])
            head = {"case": list(case), "dtype": dtype, "block_size": block, "sparsity": sparsity}
            for config, split in itertools.product(configurations(dtype, block), SPLITS):
                kept, tiles = kept_and_tiles(case, block, sparsity, config)
                fits = tiles * config.warps * split <= 48 * LIMITS.multiprocessors and kept // split >= 2 * config.bk
                if split == 1 or fits:
                    measure = partial(
                        _weight_grad, linear.WeightGradLaunch, (shape, calls[0][1].dtype, config, split), calls
                    )
                    yield {**head, "config": list(config), "split": split, "dense_us": dense}, measure


def _weight_grad(launch: Any, arguments: tuple[Any, ...], calls: Any) -> Record:
    return {"us": timed(launch(*arguments), calls, repeats=2, replays=5)}


def kept_and_tiles(case: Sequence[int], block: int, sparsity: float, config: Config) -> tuple[int, int]:
    """Return the average number of kept rows of a column, and the number of output tiles."""
    return round(case[0] * case[1] * (1 - sparsity)), ceil_div(case[2], block) * ceil_div(case[3], config.bm)


def analyse_weight_grads(records: Records) -> None:
    """Print the best rule of splitting, and by dtype and block size the best configurations with it."""
    speeds: dict[Any, dict[Any, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for r in records:
        if "us" in r:
            key = r["dtype"], r["block_size"], Config(*r["config"])
            speeds[key][tuple(r["case"]), r["sparsity"]][r["split"]] = r["dense_us"] / r["us"]

    def with_rule(key: Any, rule: SplitRule) -> float:
        (_, block, config), ratios = key, []
        for (case, sparsity), by_split in speeds[key].items():
            kept, tiles = kept_and_tiles(case, block, sparsity, config)
            wanted = linear.choose_split(tiles, kept, config, LIMITS.multiprocessors, rule)
            ratios.append(by_split[min(by_split, key=lambda split: abs(math.log(split / wanted)))])
        return geometric_mean(ratios)

    def score(rule: SplitRule) -> float:
        best: dict[Any, float] = defaultdict(float)
        for key in speeds:
            best[key[:2]] = max(best[key[:2]], with_rule(key, rule))
        return sum(best.values())

    best = max(RULES, key=score)
    print(f"best rule: {best}; today: {linear.SPLIT_RULES}")
    rows = []
    for key, settings in speeds.items():
        ideal = geometric_mean(max(by_split.values()) for by_split in settings.values())
        row = {"dtype": key[0], "block_size": key[1], "config": tuple(key[2])}
        rows.append({**row, "with the rule": round(with_rule(key, best), 3), "with the best splits": round(ideal, 3)})
    rows.sort(key=lambda row: (row["dtype"], row["block_size"], -row["with the rule"]))
    show("Weight gradient: dense time over ours, geometric means", rows, list(rows[0]) if rows else [])


# === Quantized blocks =================================================================================


def turns_of(block_size: int, sparsity: float) -> list[Turns]:
    """Return the turns worth trying: at most four tiles a program on average, and no program without any."""
    kept, found = RUN_BLOCKS * (1 - sparsity), []
    for warps, values, parts in itertools.product((1, 2, 4), (8, 16, 32), (1, 2, 4)):
        tile = max(1, 32 * warps * values // block_size)
        if kept <= 4 * tile * parts <= 4 * RUN_BLOCKS and tile < 2 * kept and (parts - 1) * tile < kept:
            found.append(Turns(tile, warps, parts))
    return found


def formats_of(args: argparse.Namespace) -> Found:
    """Sweep turns for each format, beside values as they are."""
    for case, block, sparsity in itertools.product(args.cases, args.blocks, args.sparsities):
        xs = [x for [x] in rotated(case[:3], dtype="bfloat16")]
        for name, bits in BITS.items():
            for turns in turns_of(block, sparsity) if bits else [None]:
                head = {"case": list(case), "block_size": block, "sparsity": sparsity, "value_format": name}
                yield {**head, **(turns._asdict() if turns else {})}, partial(_format, xs, block, sparsity, bits, turns)


def _format(xs: list[torch.Tensor], block: int, sparsity: float, bits: int | None, turns: Turns | None) -> Record:
    samples, rows, length = xs[0].shape
    keep = BlockGeometry.of(samples, rows, length, block, sparsity).keep
    launch_of = partial(packs.PackLaunch, xs[0].shape, (rows * length, length), block, keep, xs[0].device)
    unpack = partial(packing.unpack, rows=samples * rows, length=length, block_size=block, bits=bits or 0)
    options, choose = {"repeats": 2, "replays": 5}, (lambda *_: turns) if turns else packs.choose_turns
    packing._unpack_launches.clear()
    with mock.patch.object(packs, "choose_turns", choose), mock.patch.object(unpacks, "choose_turns", choose):
        launch = launch_of(bits=bits or 0)
        packed = [launch(x) for x in xs]
        found: Record = {"pack_us": timed(launch, [(x,) for x in xs], **options)}
        found["unpack_us"] = timed(partial(unpack, dtype=xs[0].dtype), packed, **options)
    packing._unpack_launches.clear()
    if bits:
        found["right"] = torch.equal(packed[0][0], formats.quantize(launch_of()(xs[0])[0], bits))
    return found


# === Cost model =======================================================================================


def costs_of(args: argparse.Namespace) -> Found:
    """Fit the constants of each size of value."""
    known = [r for r in common.read_records(args.records) if r.get("kind") == "weight_grad" and r["block_size"] >= 16]
    for itemsize in sorted({ITEMSIZE[r["dtype"]] for r in known}):
        of_size = [r for r in known if ITEMSIZE[r["dtype"]] == itemsize]
        yield {"itemsize": itemsize, "rows": len(of_size)}, partial(_costs, of_size, COSTS[itemsize])


def _costs(records: Records, today: Costs) -> Record:
    fitted = refine(fit(records), records)
    worst = {"worst_today": choices(today, records)[0], "worst_fitted": choices(fitted, records)[0]}
    return {"fitted": repr(fitted), "today": repr(today), **worst}


def facts(record: Record) -> tuple[float, float, float]:
    """Return operations of the dense product, density, and bytes of the dense input."""
    samples, rows, length, outputs = record["case"]
    size = samples * rows * length
    return 2.0 * size * outputs, 1 - record["sparsity"], size * ITEMSIZE[record["dtype"]]


def solve(columns: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """Return the coefficients >= 0 with the least squares of relative errors."""
    weights = 1 / torch.tensor(times, dtype=torch.float64)
    matrix = torch.tensor(columns, dtype=torch.float64).t() * weights[:, None]
    scale = matrix.norm(dim=0).clamp(min=1e-300)  # operations are 1e12 times the base
    solution = torch.linalg.lstsq(matrix / scale, torch.ones(len(times), 1, dtype=torch.float64)).solution[:, 0] / scale
    return [max(0.0, value) for value in solution.tolist()]


def fit(records: Records) -> Costs:
    """Return the constants of one size of value."""
    known = [facts(r) for r in records]
    unpacking = [[1.0] * len(known), [f for f, _, _ in known], [(1 + d) * x for _, d, x in known]]
    base, per_operation, per_byte = solve(unpacking, [r["unpack_us"] for r in records])
    sizes = sorted({r["block_size"] for r in records}, reverse=True)
    gathering = [[1.0] * len(known)]
    for block in sizes:
        pairs = zip(records, known, strict=True)
        gathering.append([f * d * per_operation if r["block_size"] == block else 0.0 for r, (f, d, _) in pairs])
    gather_base, *costs = solve(gathering, [r["gather_us"] for r in records])
    return Costs(gather_base, tuple(zip(sizes, costs, strict=True)), base, 1 / per_operation, 1 / max(per_byte, 1e-9))


def choices(costs: Costs, records: Records) -> list[float]:
    """Return, worst first, how many times as long as the better method the chosen one takes."""
    ratios = []
    for r in records:
        product, density, size = facts(r)
        gathers = costs.gather_us(product, density, r["block_size"]) < costs.unpack_us(product, density, size)
        chosen = r["gather_us"] if gathers else r["unpack_us"]
        ratios.append(round(chosen / min(r["gather_us"], r["unpack_us"]), 3))
    return sorted(ratios, reverse=True)


def refine(costs: Costs, records: Records) -> Costs:
    """Return ``costs`` with those of gather moved to the least worst choice, then the least mean loss."""

    def loss(candidate: Costs) -> tuple[float, float]:
        ratios = choices(candidate, records)
        return ratios[0], sum(map(math.log, ratios))

    def scaled(index: int, factor: float) -> Costs:
        gather = [(size, cost * factor if at == index else cost) for at, (size, cost) in enumerate(costs.gather)]
        return costs._replace(gather=tuple(gather))

    factors = [1.0, *(1 + sign * step / 40 for step in range(1, 17) for sign in (1, -1))]  # nearest to 1 first
    for _ in range(2):
        costs = min((costs._replace(gather_base=costs.gather_base * factor) for factor in factors), key=loss)
        for index in range(len(costs.gather)):
            costs = min((scaled(index, factor) for factor in factors), key=loss)
    return costs


# === Features =========================================================================================


def features_of(args: argparse.Namespace) -> Found:
    """Time linear layers, features to four times as many, at s = 0.6, b = 32."""
    rows = 64 if args.quick else 64 * 196
    for features in (16, 64) if args.quick else (16, 32, 48, 64, 96, 128, 192, 256, 384, 768):
        head = {"features": features, "rows": rows, "sparsity": 0.6, "block_size": 32}
        yield head, partial(_features, rows, features)


def _features(rows: int, features: int) -> Record:
    options = {"device": DEVICE, "dtype": torch.bfloat16, "requires_grad": True}
    x, weight = torch.randn(rows, features, **options), torch.randn(4 * features, features, **options)
    grad, data = torch.ones(rows, 4 * features, device=DEVICE, dtype=torch.bfloat16), x.detach()[None]
    packed = torch.ops.actprune.pack(data, 32, BlockGeometry.of_stored(data, 32, 0.6).keep)
    saved = (x.nbytes - sum(tensor.nbytes for tensor in packed)) / MIB
    calls = (100, 5) if DEVICE == "cuda" else (2, 1)
    linears = {"dense": F.linear, "pruned": partial(functional.linear, sparsity=0.6, block_size=32)}
    us = {
        f"{name}_us": round(
            common.host_us(lambda of=of: torch.autograd.grad(of(x, weight), (weight, x), grad), *calls), 1
        )
        for name, of in linears.items()
    }
    extra = round((us["pruned_us"] - us["dense_us"]) / saved, 1)
    return {**us, "saved_mib": round(saved, 3), "extra_us_per_mib": extra}


KINDS = {
    "weight_grad": (weight_grads, None),
    "formats": (formats_of, "case block_size sparsity value_format tile warps parts pack_us unpack_us right"),
    "costs": (costs_of, "itemsize rows worst_today worst_fitted fitted"),
    "features": (features_of, "features dense_us pruned_us saved_mib extra_us_per_mib"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the file lacks while there is time, and print it."""
    parser = common.parser_for(__doc__, "tune")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--cases", type=int, nargs="+", choices=range(len(CASES)), help="of bench_kernels.py")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--blocks", type=int, nargs="+", default=[32])
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.6, 0.9])
    parser.add_argument("--records", type=Path, default=common.RESULTS / "kernels.json", help="for costs")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which nothing more is measured")
    args = parser.parse_args(argv)
    common.require(DEVICE == "cuda", args.quick or args.kind == "costs")
    args.cases = [CASES[number] for number in args.cases or range(len(CASES))]
    if args.quick and DEVICE == "cpu" and args.kind in ("weight_grad", "formats"):
        parser.error(f"{args.kind} times kernels, which need a GPU")
    file, environs, end = (
        common.RecordFile(args.out, KEYS, args.again),
        common.environment(),
        time.monotonic() + args.seconds,
    )
    cases, columns = KINDS[args.kind]
    records = []
    for head, measure in cases(args):
        head = {"kind": args.kind, **head}
        if file.lacks(head) and time.monotonic() < end:
            try:
                file.add({**head, **measure(), **environs})
            except Exception as error:  # a configuration that does not compile
                print("failed:", head, str(error)[:200], flush=True)
        if file.key(head) in file.records:
            records.append(file.records[file.key(head)])
    if columns is None:
        analyse_weight_grads(records)
    else:
        show(args.kind, sorted(records, key=lambda r: r.get("pack_us", 0)), columns.split())


if __name__ == "__main__":
    main()
