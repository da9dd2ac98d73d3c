"""Fit the constants of ``lightning_actprune/operators/weight_grad.py`` to the records of ``kernels.py``.

    python examples/benchmarks/kernels.py --out kernels.json
    python examples/benchmarks/fit_cost.py kernels.json

Both times are linear in what is sought: gather in its base and one cost per block size, unpack in its base,
``1 / rate`` and ``1 / bandwidth``. Each is fitted by least squares of relative errors. What counts is the choice
between the two, so the constants of gather are then moved, by up to 40 %, to where the worst ratio of the chosen to the
better method over all records is least. Prints the constants as that file wants them, and the worst choices.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lightning_actprune.operators.weight_grad import COSTS, Costs

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


def facts(record: dict[str, Any]) -> tuple[float, float, float]:
    """Return operations of the dense product, density and bytes of the dense input of a record."""
    batch, tokens, length, outputs = record["case"]
    rows, density = batch * tokens, 1 - record["sparsity"]
    return 2.0 * rows * length * outputs, density, rows * length * ITEMSIZE[record["dtype"]]


def solve(columns: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """Return the coefficients >= 0 with the least squares of relative errors."""
    weights = 1 / torch.tensor(times, dtype=torch.float64)
    matrix = torch.tensor(columns, dtype=torch.float64).t() * weights[:, None]
    scale = matrix.norm(dim=0).clamp(min=1e-300)  # operations are 1e12 times the base: keep the system well conditioned
    found = torch.linalg.lstsq(matrix / scale, torch.ones(len(times), 1, dtype=torch.float64)).solution[:, 0] / scale
    return [max(0.0, value) for value in found.tolist()]


def fit(records: Sequence[dict[str, Any]]) -> Costs:
    """Return the constants of one value size."""
    known = [facts(r) for r in records]
    dense = [[1.0] * len(known), [f for f, _, _ in known], [(1 + d) * x for _, d, x in known]]
    base, per_operation, per_byte = solve(dense, [r["unpack_us"] for r in records])
    rate = 1 / per_operation
    blocks = sorted({r["block_size"] for r in records}, reverse=True)
    gathered = [[1.0] * len(known)]
    for block in blocks:
        pairs = zip(records, known, strict=True)
        gathered.append([f * d / rate if r["block_size"] == block else 0.0 for r, (f, d, _) in pairs])
    gather_base, *costs = solve(gathered, [r["gather_us"] for r in records])
    return Costs(gather_base, tuple(zip(blocks, costs, strict=True)), base, rate, 1 / max(per_byte, 1e-9))


def choices(costs: Costs, records: Sequence[dict[str, Any]]) -> list[tuple[float, dict[str, Any]]]:
    """Return, worst first, how many times longer than the better method the chosen one takes."""
    found = []
    for r in records:
        product, density, size = facts(r)
        gathers = costs.gather_us(product, density, r["block_size"]) < costs.unpack_us(product, density, size)
        chosen = r["gather_us"] if gathers else r["unpack_us"]
        found.append((chosen / min(r["gather_us"], r["unpack_us"]), r))
    return sorted(found, key=lambda entry: -entry[0])


def refine(costs: Costs, records: Sequence[dict[str, Any]]) -> Costs:
    """Return ``costs`` with the base and costs of gather moved to the least worst choice, then the least mean loss."""

    def loss(candidate: Costs) -> tuple[float, float]:
        found = [ratio for ratio, _ in choices(candidate, records)]
        return round(found[0], 3), sum(map(math.log, found))

    factors = [1.0, *(1 + sign * step / 40 for step in range(1, 17) for sign in (1, -1))]  # nearest to 1 first
    for _ in range(2):
        costs = min((costs._replace(gather_base=costs.gather_base * f) for f in factors), key=loss)
        for index in range(len(costs.gather)):
            costs = min((costs._replace(gather=_scaled(costs.gather, index, f)) for f in factors), key=loss)
    return costs


def _scaled(gather: tuple[tuple[int, float], ...], index: int, factor: float) -> tuple[tuple[int, float], ...]:
    size, cost = gather[index]
    return (*gather[:index], (size, cost * factor), *gather[index + 1 :])


def show(label: str, costs: Costs, records: Sequence[dict[str, Any]]) -> None:
    """Print constants and their three worst choices."""
    gather = ", ".join(f"({size}, {cost:.3g})" for size, cost in costs.gather)
    print(f"{label}: Costs({costs.gather_base:.1f}, ({gather}), {costs.unpack_base:.1f}, "
          f"{costs.rate / 1e6:.0f}e6, {costs.bandwidth / 1e6:.2f}e6)")  # fmt: skip
    for ratio, r in choices(costs, records)[:3]:
        print(f"    {ratio:.3f}  {r['case']} b={r['block_size']} s={r['sparsity']} "
              f"gather {r['gather_us']:.1f} unpack {r['unpack_us']:.1f}")  # fmt: skip


def main() -> None:
    """Fit and print, per size of value."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+")
    args = parser.parse_args()
    records = list(itertools.chain.from_iterable(json.loads(path.read_text()) for path in args.records))
    for itemsize in sorted({ITEMSIZE[r["dtype"]] for r in records}):
        of_size = [r for r in records if ITEMSIZE[r["dtype"]] == itemsize and r["block_size"] >= 16]
        fitted = fit(of_size)
        print(f"{itemsize} bytes per value, {len(of_size)} records")
        show("  today", COSTS[itemsize], of_size)
        show("  fitted", fitted, of_size)
        show("  refined", refine(fitted, of_size), of_size)


if __name__ == "__main__":
    main()
