"""Is the gather kernel bound by the traffic of its operands? The same loads with next to no arithmetic.

    python examples/benchmarks/bound.py --out bound.json

``loads_kernel`` copies the tiles of ``grad_y`` and of the values into shared memory as the weight gradient does (same
order, same number of turns under way), reads them back and combines them by exclusive or, one integer operation for
four bytes. ``loads_tbytes_per_s`` is what it moves from L2 to the multiprocessors; ``gather_us`` beside it is the real
kernel with the same configuration. Both times include the lists of kept blocks; the real kernel also writes and adds up
partial results, and cuts long columns into more parts. Where ``loads_us`` is close to ``gather_us``, only less traffic
can help: a larger BM, or a larger block. ``dense_us / loads_us`` is what gathering with these tiles could reach against
the dense product if arithmetic and results were free; the geometric mean over the layers, each with its best
configuration, is printed at the end.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import environment, write_records
from examples.benchmarks.kernels import CASES, inputs
from examples.benchmarks.timing import gpu_us
from lightning_actprune.kernels.launch import Launch
from lightning_actprune.kernels.tiles import Config
from lightning_actprune.kernels.weight_grad import Shape, WeightGradPlan
from lightning_actprune.ops import reference
from lightning_actprune.ops.geometry import BlockGeometry, ceil_div

CONFIGS = {
    32: [Config(128, 32, 4, 3, False), Config(256, 64, 8, 3, False)],
    64: [Config(128, 64, 8, 3, True), Config(128, 64, 4, 3, True)],
    128: [Config(128, 64, 8, 3, True), Config(256, 64, 8, 3, True)],
}


@triton.jit
def loads_kernel(
    grad_ptr, values_ptr, work_ptr, out_ptr, stride_grad, total_rows, lengths,
    B: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Load what one tile of the weight gradient loads, as 32-bit words (two values each); ``OUT % BM == 0``."""
    j = tl.program_id(0)
    high = tl.load(work_ptr + lengths + j)
    rows_each = tl.cdiv(tl.cdiv(high, tl.num_programs(2)), BK) * BK
    low = tl.program_id(2) * rows_each
    high = tl.minimum(low + rows_each, high)
    last = tl.maximum(high - 1, low)
    rows_ptr = work_ptr + j.to(tl.int64) * total_rows
    places_ptr = rows_ptr + tl.num_programs(0).to(tl.int64) * total_rows
    o = tl.program_id(1) * (BM // 2) + tl.arange(0, BM // 2)
    e = tl.arange(0, B // 2)
    k = tl.arange(0, BK)
    grads = tl.zeros([BK, BM // 2], tl.int32)
    blocks = tl.zeros([BK, B // 2], tl.int32)
    rows = tl.load(rows_ptr + tl.minimum(low + k, last), mask=high > low, other=0)
    places = tl.load(places_ptr + tl.minimum(low + k, last), mask=high > low, other=0)
    for p in tl.range(low, high, BK, num_stages=STAGES):
        grads ^= tl.load(grad_ptr + (rows[:, None] * stride_grad + o[None, :]))
        blocks ^= tl.load(values_ptr + places[:, None] * (B // 2) + e[None, :], mask=(p + k < high)[:, None], other=0)
        rows = tl.load(rows_ptr + tl.minimum(p + BK + k, last))
        places = tl.load(places_ptr + tl.minimum(p + BK + k, last))
    result = tl.xor_sum(tl.xor_sum(grads, axis=1), axis=0) ^ tl.xor_sum(tl.xor_sum(blocks, axis=1), axis=0)
    program = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + j
    tl.store(out_ptr + program, result)


class Loads:
    """The lists of the columns and ``loads_kernel``, beside the weight gradient of ``plan``."""

    def __init__(self, plan: WeightGradPlan, shape: Shape, config: Config, split: int) -> None:
        columns = ceil_div(shape.length, shape.block_size)
        grid = columns, shape.outputs // config.bm, split
        self.plan, self.programs = plan, columns * grid[1] * split
        self._loads = Launch(
            loads_kernel, grid, shape.outputs // 2, shape.rows, plan.list_columns.lengths, shape.block_size,
            config.bm, config.bk, config.stages, num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip

    def __call__(self, grad_y: torch.Tensor, packed: tuple[torch.Tensor, ...]) -> torch.Tensor:
        values, bitmap, offsets = packed
        work, out = bitmap.new_empty(self.plan.list_columns.work), bitmap.new_empty(self.programs)
        self.plan.list_columns(bitmap, offsets, work)
        self._loads(grad_y.view(torch.int32), values.view(torch.int32), work, out)
        return out


def measure(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], block_size: int, sparsity: float, config: Config, split: int
) -> dict[str, Any]:
    """Return times and rates of one setting."""
    geometry, outputs = BlockGeometry.of_stored(pairs[0][0], block_size, sparsity), pairs[0][1].shape[1]
    packed = [reference.pack(x, block_size, geometry.keep) for x, _ in pairs]
    stored = tuple(packed[0][0].shape)
    shape = Shape(outputs, outputs, geometry.samples, geometry.total_rows, geometry.length, *stored, 2)
    plan = WeightGradPlan(shape, torch.bfloat16, config, split)
    loads = Loads(plan, shape, config, split)
    both = [(g, p) for (_, g), p in zip(pairs, packed, strict=True)]
    loads_us = gpu_us([lambda g=g, p=p: loads(g, p) for g, p in both])
    gather_us = gpu_us([lambda g=g, p=p: plan(g, *p) for g, p in both])
    moved = stored[0] * (outputs // config.bm) * (config.bm + block_size) * 2
    operations = 2 * stored[0] * block_size * outputs
    return {
        "loads_us": round(loads_us, 2),
        "gather_us": round(gather_us, 2),
        "loads_tbytes_per_s": round(moved / loads_us / 1e6, 2),
        "gather_tbytes_per_s": round(moved / gather_us / 1e6, 2),
        "gather_tflops": round(operations / gather_us / 1e6, 1),
    }


def at_best(records: list[dict[str, Any]], block_size: int, sparsity: float) -> float:
    """Return dense time over that of the loads, each layer's best configuration, as geometric mean over the layers."""
    best: dict[str, float] = {}
    for r in records:
        if (r["block_size"], r["sparsity"]) == (block_size, sparsity):
            best[str(r["case"])] = max(best.get(str(r["case"]), 0.0), r["dense_us"] / r["loads_us"])
    return math.prod(best.values()) ** (1 / len(best))


def main() -> None:
    """Measure, print and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=list(CONFIGS))
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.6, 0.9])
    parser.add_argument("--out", type=Path, default=Path("bound.json"))
    args = parser.parse_args()
    records = []
    for case in CASES:
        pairs = inputs(case, torch.bfloat16)
        dense_us = round(gpu_us([lambda g=g, x=x: g.t() @ x.flatten(0, 1) for x, g in pairs]), 2)
        for block, sparsity in itertools.product(args.blocks, args.sparsities):
            for config in CONFIGS[block]:
                if case[3] % config.bm:
                    continue
                # Enough parts for 16 warps a multiprocessor.
                warps = ceil_div(case[2], block) * (case[3] // config.bm) * config.warps
                split = max(1, min(4, 16 * 132 // warps))
                figures = measure(pairs, block, sparsity, config, split)
                head = {"case": list(case), "block_size": block, "sparsity": sparsity, "config": list(config)}
                head |= {"split": split, "dense_us": dense_us}
                records.append({**head, **figures, **environment()})
                print({**head, **figures}, flush=True)
        write_records(args.out, records)
    for block, sparsity in itertools.product(args.blocks, args.sparsities):
        print(f"b={block} s={sparsity}: loads alone reach {at_best(records, block, sparsity):.2f} of dense")


if __name__ == "__main__":
    main()
