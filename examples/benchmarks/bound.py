"""What forbids a faster weight gradient? Its loads without its arithmetic, and its arithmetic without its loads.

    python examples/benchmarks/bound.py --out bound.json

For each case, dtype, block size and sparsity, microseconds of GPU time as in ``kernels.py``:

- ``dense_us``     the dense product;
- ``rebuild_us``   the dense product after zeroing a tensor of the input's size, one write of what unpacking writes:
                   nothing that makes the dense input first can take less;
- ``loads_us``     the gather kernel without products: the same lists, grid, tiles and asynchronous copies; what arrives
                   is combined by exclusive or, and the partial results are written and added up as always;
- ``products_us``  the gather kernel without loads: the same grid and number of turns, each multiplying the tiles that
                   were loaded before the first one;
- ``gather_us``    the gather kernel.

Each of the last three is the best of the configurations and splits tried (``loads_config`` and so on name it), so that
``loads_us`` and ``products_us`` bound what gathering by such tiles can reach with the best choice for each. ``bound``
is dense time over the least of what no method can beat, that is ``max(dense / rebuild, dense / max(loads,
products))``. The geometric means over the cases are printed at the end.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import environment, require_gpu, write_records
from examples.benchmarks.kernels import CASES, inputs
from examples.benchmarks.timing import gpu_us
from lightning_actprune.codec import blocks
from lightning_actprune.codec.blocks import BlockGeometry, ceil_div
from lightning_actprune.kernels.launch import Launch
from lightning_actprune.kernels.linear import Config, Shape, WeightGradLaunch, parts_of

CONFIGS = {
    ("bfloat16", 16): [(128, 64, 8, 3, False), (256, 64, 8, 3, False)],
    ("bfloat16", 32): [(128, 32, 4, 3, False), (256, 64, 8, 3, False)],
    ("bfloat16", 64): [(128, 64, 8, 3, True), (128, 64, 4, 3, True)],
    ("bfloat16", 128): [(128, 64, 8, 3, True), (256, 64, 8, 3, True)],
    ("float32", 64): [(64, 32, 4, 3, True), (128, 32, 4, 3, True)],
}
SPLITS = (1, 2, 3, 4, 6)
TARGETS = [
    ("bfloat16", 128, 0.6), ("bfloat16", 64, 0.6), ("bfloat16", 64, 0.9), ("bfloat16", 32, 0.6), ("bfloat16", 32, 0.9),
    ("float32", 64, 0.1), ("float32", 64, 0.6), ("float32", 64, 0.9),
]  # fmt: skip
"""Settings whose geometric means are printed."""
MODES = ("loads", "products", "gather")


@triton.jit
def loads_kernel(
    grad_ptr, values_ptr, work_ptr, out_ptr, stride_grad, outputs, length, total_rows, lengths, share,
    B: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, WORDS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The weight gradient without products, on 32-bit words (``WORDS`` = values a word); ``OUT % BM == 0``."""
    j, part = tl.program_id(0), tl.program_id(2)
    low = j * 0
    high = tl.load(work_ptr + lengths + j)
    if SPLIT:
        parts = parts_of(high, share, tl.num_programs(2))
        if part >= parts:
            return
        rows_each = tl.cdiv(tl.cdiv(high, parts), BK) * BK
        low += part * rows_each
        high = tl.minimum(low + rows_each, high)
    last = tl.maximum(high - 1, low)
    rows_ptr = work_ptr + j.to(tl.int64) * total_rows
    places_ptr = rows_ptr + tl.num_programs(0).to(tl.int64) * total_rows
    o = tl.program_id(1) * (BM // WORDS) + tl.arange(0, BM // WORDS)
    e = tl.arange(0, B // WORDS)
    k = tl.arange(0, BK)
    grads = tl.zeros([BK, BM // WORDS], tl.int32)
    blocks = tl.zeros([BK, B // WORDS], tl.int32)
    rows = tl.load(rows_ptr + tl.minimum(low + k, last), mask=high > low, other=0)
    places = tl.load(places_ptr + tl.minimum(low + k, last), mask=high > low, other=0)
    for p in tl.range(low, high, BK, num_stages=STAGES):
        grads ^= tl.load(grad_ptr + (rows[:, None] * (stride_grad // WORDS) + o[None, :]))
        here = (p + k < high)[:, None]
        blocks ^= tl.load(values_ptr + places[:, None] * (B // WORDS) + e[None, :], mask=here, other=0)
        rows = tl.load(rows_ptr + tl.minimum(p + BK + k, last))
        places = tl.load(places_ptr + tl.minimum(p + BK + k, last))
    result = tl.xor_sum(tl.xor_sum(grads, axis=1), axis=0) ^ tl.xor_sum(tl.xor_sum(blocks, axis=1), axis=0)
    store_tile(result.to(tl.float32), out_ptr, j, part, outputs, length, B, BM)


@triton.jit
def store_tile(value, out_ptr, j, part, outputs, length, B: tl.constexpr, BM: tl.constexpr):
    """Store a tile full of ``value`` as the weight gradient stores its own."""
    o = (tl.program_id(1) * BM + tl.arange(0, BM))[:, None]
    column = (j * B + tl.arange(0, B))[None, :]
    tile = tl.zeros([BM, B], tl.float32) + value
    tl.store(out_ptr + part.to(tl.int64) * outputs * length + o * length + column, tile.to(out_ptr.dtype.element_ty))


@triton.jit
def products_kernel(
    grad_ptr, values_ptr, work_ptr, out_ptr, stride_grad, outputs, length, total_rows, lengths, share,
    B: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, VALUES_FIRST: tl.constexpr,
):  # fmt: skip
    """The weight gradient whose turns all multiply the first ``BK`` rows; ``OUT % BM == 0``."""
    j, part = tl.program_id(0), tl.program_id(2)
    low = j * 0
    high = tl.load(work_ptr + lengths + j)
    if SPLIT:
        parts = parts_of(high, share, tl.num_programs(2))
        if part >= parts:
            return
        rows_each = tl.cdiv(tl.cdiv(high, parts), BK) * BK
        low += part * rows_each
        high = tl.minimum(low + rows_each, high)
    o = tl.program_id(1) * BM + tl.arange(0, BM)
    e = tl.arange(0, B)
    k = tl.arange(0, BK)
    grad = tl.load(grad_ptr + (k[:, None] * stride_grad + o[None, :]))
    values = tl.load(values_ptr + (k[:, None] * B + e[None, :]))
    acc = tl.zeros([B, BM], tl.float32) if VALUES_FIRST else tl.zeros([BM, B], tl.float32)
    for _ in range(low, high, BK):
        if VALUES_FIRST:
            acc = tl.dot(tl.trans(values), grad, acc, input_precision="ieee")
        else:
            acc = tl.dot(tl.trans(grad), values, acc, input_precision="ieee")
    if VALUES_FIRST:
        column, o = (j * B + e)[:, None], o[None, :]
    else:
        column, o = (j * B + e)[None, :], o[:, None]
    target = out_ptr + part.to(tl.int64) * outputs * length + o * length + column
    tl.store(target, acc.to(out_ptr.dtype.element_ty))


class Half:
    """The weight gradient of ``whole`` with its product kernel replaced by one that does half of its work."""

    def __init__(self, whole: WeightGradLaunch, shape: Shape, config: Config, mode: str) -> None:
        grid = ceil_div(shape.length, shape.block_size), shape.outputs // config.bm, whole.parts
        scalars = shape.stride, shape.outputs, shape.length, shape.rows, whole.list_columns.lengths, whole.share
        tile = shape.block_size, config.bm, config.bk, whole.parts > 1
        self.whole, self.words = whole, mode == "loads"
        options = {"num_warps": config.warps, "num_stages": config.stages}
        if mode == "loads":
            half = Launch(loads_kernel, grid, *scalars, *tile, 4 // shape.itemsize, config.stages, **options)
        else:
            half = Launch(products_kernel, grid, *scalars, *tile, config.values_first, **options)
        whole.product = half

    def __call__(self, grad_y: torch.Tensor, packed: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Run lists, half a product and the addition of parts."""
        values, bitmap, offsets = packed
        if not self.words:
            return self.whole(grad_y, values, bitmap, offsets)
        out: torch.Tensor = self.whole(grad_y.view(torch.int32), values.view(torch.int32), bitmap, offsets)
        return out


def candidates(case: tuple[int, ...], dtype: str, block_size: int, kept: int) -> list[tuple[Config, int]]:
    """Return configurations and splits: at most 48 warps a multiprocessor and no part below two turns."""
    found = []
    for row in CONFIGS[dtype, block_size]:
        config = Config(*row)
        warps = ceil_div(case[2], block_size) * (case[3] // config.bm) * config.warps
        for split in SPLITS:
            fits = split == 1 or (warps * split <= 48 * 132 and kept // split >= 2 * config.bk)
            if fits and case[3] % config.bm == 0:
                found.append((config, split))
    return found


def measure(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], case: tuple[int, ...], block_size: int, sparsity: float
) -> dict[str, Any]:
    """Return the best time of each mode."""
    geometry, outputs = BlockGeometry.of_stored(pairs[0][0], block_size, sparsity), pairs[0][1].shape[1]
    packed = [blocks.pack(x, block_size, geometry.keep) for x, _ in pairs]
    dtype = pairs[0][0].dtype
    shape = Shape(
        outputs, outputs, geometry.samples, geometry.total_rows, geometry.length, *packed[0][0].shape, dtype.itemsize
    )
    both = [(g, p) for (_, g), p in zip(pairs, packed, strict=True)]
    figures: dict[str, Any] = {}
    kept = shape.kept // ceil_div(shape.length, block_size)
    for mode, (config, split) in itertools.product(MODES, candidates(case, str(dtype)[6:], block_size, kept)):
        whole = WeightGradLaunch(shape, dtype, config, split)
        call: Callable[..., Any] = (
            (lambda g, p, f=whole: f(g, *p)) if mode == "gather" else Half(whole, shape, config, mode)
        )
        us = gpu_us([lambda g=g, p=p, f=call: f(g, p) for g, p in both], repeats=1, replays=5, enough_ms=10.0)
        if us < figures.get(f"{mode}_us", math.inf):
            figures |= {f"{mode}_us": round(us, 2), f"{mode}_config": [*config[:5], split]}
    return figures


def compile_all(setting: tuple[str, int]) -> None:
    """Launch a small problem in every mode and configuration, so that the machine code lands in the cache on disk."""
    dtype, block_size = setting
    case = 1, 8192, 16 * block_size, 512
    pairs = [
        (torch.randn(*case[:3], device="cuda", dtype=getattr(torch, dtype)), torch.randn(case[1], 512, device="cuda"))
    ]
    measure([(x, g.to(x.dtype)) for x, g in pairs], case, block_size, 0.5)


def bound(record: dict[str, Any]) -> float:
    """Return the most that any method can reach against the dense product."""
    gather = max(record["loads_us"], record["products_us"])
    return float(record["dense_us"] / min(record["rebuild_us"], gather))


def report(records: list[dict[str, Any]]) -> None:
    """Print the geometric means over the cases, and where 0.9 of dense is out of reach."""
    for dtype, block, sparsity in TARGETS:
        chosen = [r for r in records if (r["dtype"], r["block_size"], r["sparsity"]) == (dtype, block, sparsity)]
        if chosen:
            means = {
                name: math.prod(ratios) ** (1 / len(chosen))
                for name, ratios in {
                    "bound": [bound(r) for r in chosen],
                    "loads": [r["dense_us"] / r["loads_us"] for r in chosen],
                    "products": [r["dense_us"] / r["products_us"] for r in chosen],
                    "gather": [r["dense_us"] / r["gather_us"] for r in chosen],
                }.items()
            }
            print(f"{dtype} b={block} s={sparsity}:", ", ".join(f"{k} {v:.2f}" for k, v in means.items()))
    below = [r for r in records if bound(r) < 0.9]
    print(f"0.9 of dense is out of reach in {len(below)} of {len(records)} settings")


def main(argv: list[str] | None = None) -> None:
    """Measure, print and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9])
    parser.add_argument("--out", type=Path, default=Path("bound.json"))
    args = parser.parse_args(argv)
    require_gpu()
    torch.set_float32_matmul_precision("highest")
    records: list[dict[str, Any]] = []
    start = time.perf_counter()
    with ProcessPoolExecutor(len(CONFIGS), mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_all, CONFIGS))
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    for dtype, case in itertools.product(dict.fromkeys(d for d, _ in CONFIGS), CASES):
        pairs = inputs(case, getattr(torch, dtype))
        dense_us = gpu_us([lambda g=g, x=x: g.t() @ x.flatten(0, 1) for x, g in pairs])
        rebuild_us = gpu_us([lambda g=g, x=x: g.t() @ x.zero_().flatten(0, 1) for x, g in pairs])
        pairs = inputs(case, getattr(torch, dtype))
        for block, sparsity in itertools.product([b for d, b in CONFIGS if d == dtype], args.sparsities):
            head = {"case": list(case), "dtype": dtype, "block_size": block, "sparsity": sparsity}
            times = {"dense_us": round(dense_us, 2), "rebuild_us": round(rebuild_us, 2)}
            record = head | times | measure(pairs, case, block, sparsity)
            records.append({**record, "bound": round(bound(record), 3), **environment()})
            print(record, flush=True)
        write_records(args.out, records)
    report(records)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
