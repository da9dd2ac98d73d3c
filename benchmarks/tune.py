"""Sweeps that constants of the package were chosen by.

    python benchmarks/tune.py weight_grad           # tile sizes and splits of the gather kernel
    python benchmarks/tune.py formats               # how the kernels of quantized blocks share the work
    python benchmarks/tune.py costs                 # the cost model of the weight gradient, from results/kernels.json
    python benchmarks/tune.py features              # from how many features on a linear layer is worth packing

``weight_grad``
    Times the weight gradient with each tile configuration and number of splits: the ground for ``CONFIGS`` and
    ``SPLIT_RULES`` of ``kernels/linear.py``. Prints for each dtype and block size the configurations by the geometric
    mean of dense time over ours, and the split rule that is best for all of them.
``formats``
    Times pack and unpack of quantized blocks with each way to share blocks among warps and programs: the ground for
    ``choose_turns`` of ``kernels/places.py``. What is stored must be what ``codec.formats`` stores (``right``).
``costs``
    Fits ``COSTS`` of ``operators/weight_grad.py`` to the rows ``weight_grad`` of ``bench_kernels.py``. Both times are
    linear in the constants: least squares of relative errors. Since the choice between the two methods is what counts,
    the constants of gather are then moved by up to 40 % to where the worst ratio of the chosen to the better method is
    least.
``features``
    Times forward and backward of linear layers from few to many features, launches included, and divides the extra time
    by the MiB that are saved: the ground for ``MIN_FEATURES`` of ``config.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_kernels import BITS, CASES, DEVICE, inputs, rotated, timed
from benchmarks.common import MIB, RESULTS, Record, RecordFile, Records, environment, host_us, parser_for, read_records
from benchmarks.common import require, show
from lightning_actprune import functional
from lightning_actprune.codec import blocks, formats
from lightning_actprune.codec import packed as packing
from lightning_actprune.codec.blocks import RUN_BLOCKS, BlockGeometry, ceil_div
from lightning_actprune.kernels import pack as packs
from lightning_actprune.kernels import unpack as unpacks
from lightning_actprune.kernels.linear import SPLIT_RULES, Config, Shape, SplitRule, WeightGradLaunch, choose_split
from lightning_actprune.kernels.linear import machine
from lightning_actprune.kernels.places import Turns
from lightning_actprune.operators.weight_grad import COSTS, Costs

KEYS = ("kind", "case", "dtype", "block_size", "sparsity", "value_format", "tile", "warps", "parts", "config", "split")
KEYS += ("features", "itemsize")
SPLITS = (1, 2, 3, 4, 6, 8)
RULES = [SplitRule(*rule) for rule in itertools.product((4, 6, 8, 12, 16), (8, 12, 16, 24, 32), (4, 6, 8), (2, 4, 8))]
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
Found = Iterator[tuple[Record, Callable[[], Record]]]
"""The heads of records, and what measures each."""


def mean(values: Any) -> float:
    """Return the geometric mean."""
    return statistics.geometric_mean(values)


# === Weight gradient ==================================================================================


def configurations(dtype: str, block_size: int) -> list[Config]:
    """Return the tile configurations worth trying: their buffers fit, and a warp has 512 to 4096 sums."""
    limits, itemsize, found = machine(torch.device(DEVICE)), ITEMSIZE[dtype], []
    rows = (32, 64, 128) if itemsize == 2 else (16, 32)
    for bm, bk, warps, stages in itertools.product((64, 128, 256, 512), rows, (2, 4, 8), (3, 4)):
        buffers = stages * bk * (bm + block_size) * itemsize
        if buffers <= limits.shared_memory and 512 <= bm * block_size // warps <= 4096:
            found.append(Config(bm, bk, warps, stages, values_first=block_size >= 64))
    return found


def weight_grads(args: argparse.Namespace) -> Found:
    """Sweep configurations and splits, case by case: a sweep that is cut short lacks whole cases."""
    torch.set_float32_matmul_precision("highest")
    for dtype, case in itertools.product(args.dtypes, args.cases):
        pairs, dense = inputs(case, dtype), None
        for block, sparsity in itertools.product(args.blocks, args.sparsities):
            keep = BlockGeometry.of_stored(pairs[0][0], block, sparsity).keep
            packed = [blocks.pack(x, block, keep) for x, _ in pairs]
            dense = dense or timed(lambda x, g: g.t() @ x.flatten(0, 1), pairs)
            head = {"case": list(case), "dtype": dtype, "block_size": block, "sparsity": sparsity}
            calls = [(g, *p) for (_, g), p in zip(pairs, packed, strict=True)]
            sizes = case[3], case[3], case[0], case[0] * case[1], case[2]
            shape = Shape(*sizes, *packed[0][0].shape, ITEMSIZE[dtype])
            for config, split in itertools.product(configurations(dtype, block), SPLITS):
                kept, tiles = kept_and_tiles(case, block, sparsity, config)
                fits = tiles * config.warps * split <= 48 * machine(torch.device(DEVICE)).multiprocessors
                if split > 1 and not (fits and kept // split >= 2 * config.bk):
                    continue

                def measure(config: Config = config, split: int = split) -> Record:
                    launch = WeightGradLaunch(shape, getattr(torch, dtype), config, split)
                    return {"us": timed(launch, calls, repeats=2, replays=5), "dense_us": dense}

                yield {**head, "config": list(config), "split": split}, measure


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
            wanted = choose_split(tiles, kept, config, machine(torch.device(DEVICE)).multiprocessors, rule)
            ratios.append(by_split[min(by_split, key=lambda split: abs(math.log(split / wanted)))])
        return mean(ratios)

    def score(rule: SplitRule) -> float:
        best: dict[Any, float] = defaultdict(float)
        for key in speeds:
            best[key[:2]] = max(best[key[:2]], with_rule(key, rule))
        return sum(best.values())

    best = max(RULES, key=score)
    print(f"best rule: {best}; today: {SPLIT_RULES}")
    rows = [
        {"dtype": key[0], "block_size": key[1], "config": tuple(key[2]), "with the rule": round(with_rule(key, best), 3),
         "with the best splits": round(mean(max(s.values()) for s in settings.values()), 3)}
        for key, settings in speeds.items()
    ]  # fmt: skip
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


@contextlib.contextmanager
def forced(turns: Turns | None) -> Iterator[None]:
    """Share out all runs inside as ``turns`` say."""
    packing._unpack_launches.clear()
    with contextlib.ExitStack() as stack:
        for module in (packs, unpacks) if turns else ():
            stack.enter_context(mock.patch.object(module, "choose_turns", return_value=turns))
        yield
    packing._unpack_launches.clear()


def formats_of(args: argparse.Namespace) -> Found:
    """Sweep turns for each format, beside values as they are."""
    for case, block, sparsity in itertools.product(args.cases, args.blocks, args.sparsities):
        (samples, rows, length), dtype = case[:3], torch.bfloat16
        xs = [x for [x] in rotated((samples, rows, length), dtype="bfloat16")]
        keep, where = BlockGeometry.of(samples, rows, length, block, sparsity).keep, xs[0].device
        head = {"case": list(case), "block_size": block, "sparsity": sparsity}
        for name, bits in BITS.items():

            def measure(turns: Turns | None, bits: int = bits or 0) -> Record:
                with forced(turns):
                    launch = packs.PackLaunch(xs[0].shape, (rows * length, length), block, keep, where, bits=bits)

                    def unpack(*packed: Any) -> torch.Tensor:
                        return packing.unpack(*packed, samples * rows, length, block, bits, dtype)

                    packed = [launch(x) for x in xs]
                    pack_us = timed(launch, [(x,) for x in xs], repeats=2, replays=5)
                    figures = {"pack_us": pack_us, "unpack_us": timed(unpack, packed, repeats=2, replays=5)}
                if bits:
                    with forced(None):
                        plain = packs.PackLaunch(xs[0].shape, (rows * length, length), block, keep, where)(xs[0])
                    figures["right"] = torch.equal(packed[0][0], formats.quantize(plain[0], bits))
                return figures

            for turns in turns_of(block, sparsity) if bits else [None]:
                more = turns._asdict() if turns else {}
                yield {**head, "value_format": name, **more}, lambda turns=turns, measure=measure: measure(turns)


def analyse_formats(records: Records) -> None:
    """Print the best turns of each setting."""
    best: dict[Any, Record] = {}
    for r in records:
        key = str(r["case"]), r["block_size"], r["sparsity"], r["value_format"]
        if r.get("right", True) and ("pack_us" in r) and (key not in best or r["pack_us"] < best[key]["pack_us"]):
            best[key] = r
    columns = "case block_size sparsity value_format tile warps parts pack_us unpack_us"
    show("Best turns by the time of pack", list(best.values()), columns.split())


# === Cost model =======================================================================================


def costs_of(args: argparse.Namespace) -> Found:
    """Fit the constants of each size of value."""
    known = [r for r in read_records(args.records) if r.get("kind") == "weight_grad" and r["block_size"] >= 16]
    for itemsize in sorted({ITEMSIZE[r["dtype"]] for r in known}):
        of_size = [r for r in known if ITEMSIZE[r["dtype"]] == itemsize]

        def measure(of_size: Records = of_size, today: Costs = COSTS[itemsize]) -> Record:
            fitted = refine(fit(of_size), of_size)
            worst = {"worst_today": choices(today, of_size)[0], "worst_fitted": choices(fitted, of_size)[0]}
            return {"rows": len(of_size), "fitted": repr(fitted), "today": repr(today), **worst}

        yield {"itemsize": itemsize}, measure


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


def analyse_costs(records: Records) -> None:
    """Print the constants as ``operators/weight_grad.py`` wants them."""
    show("Costs", records, ["itemsize", "rows", "worst_today", "worst_fitted", "fitted"])


# === Features =========================================================================================


def features_of(args: argparse.Namespace) -> Found:
    """Time linear layers, features to four times as many, at s = 0.6, b = 32."""
    rows = 64 if args.quick else 64 * 196
    for features in (16, 64) if args.quick else (16, 32, 48, 64, 96, 128, 192, 256, 384, 768):

        def measure(features: int = features) -> Record:
            options = {"device": DEVICE, "dtype": torch.bfloat16, "requires_grad": True}
            x, weight = torch.randn(rows, features, **options), torch.randn(4 * features, features, **options)
            grad = torch.ones(rows, 4 * features, device=DEVICE, dtype=torch.bfloat16)
            keep = BlockGeometry.of_stored(x.detach()[None], 32, 0.6).keep
            stored = sum(tensor.nbytes for tensor in torch.ops.actprune.pack(x.detach()[None], 32, keep))

            def us(linear: Callable[[], torch.Tensor]) -> float:
                calls = (100, 5) if DEVICE == "cuda" else (2, 1)
                return host_us(lambda: torch.autograd.grad(linear(), (weight, x), grad), *calls)

            dense = us(lambda: F.linear(x, weight))
            pruned = us(lambda: functional.linear(x, weight, sparsity=0.6, block_size=32))
            saved = (x.nbytes - stored) / MIB
            extra = round((pruned - dense) / saved, 1)
            times = {"dense_us": round(dense, 1), "pruned_us": round(pruned, 1)}
            return {**times, "saved_mib": round(saved, 3), "extra_us_per_mib": extra}

        yield {"features": features, "rows": rows, "sparsity": 0.6, "block_size": 32}, measure


def analyse_features(records: Records) -> None:
    """Print the extra time for each MiB."""
    show("Linear layers", records, ["features", "dense_us", "pruned_us", "saved_mib", "extra_us_per_mib"])


KINDS = {
    "weight_grad": (weight_grads, analyse_weight_grads),
    "formats": (formats_of, analyse_formats),
    "costs": (costs_of, analyse_costs),
    "features": (features_of, analyse_features),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the file lacks while there is time, and print what follows."""
    parser = parser_for(__doc__, "tune")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--cases", type=int, nargs="+", choices=range(len(CASES)), help="of bench_kernels.py")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--blocks", type=int, nargs="+", default=[32])
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.6, 0.9])
    parser.add_argument("--records", type=Path, default=RESULTS / "kernels.json", help="for costs")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which nothing more is measured")
    args = parser.parse_args(argv)
    require(DEVICE == "cuda", args.quick or args.kind == "costs")
    args.cases = [CASES[number] for number in args.cases or range(len(CASES))]
    if args.quick and DEVICE == "cpu" and args.kind in ("weight_grad", "formats"):
        parser.error(f"{args.kind} times kernels, which need a GPU")
    file, environs, end = RecordFile(args.out, KEYS, args.again), environment(), time.monotonic() + args.seconds
    cases, analyse = KINDS[args.kind]
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
    analyse(records)


if __name__ == "__main__":
    main()
