"""Sweep how quantized kept blocks are shared out: the ground for ``places.choose_turns``.

    python examples/benchmarks/tune_formats.py --out tune_formats.json

On the cases of ``kernels.py``, in 16 bits, for each format and all turns worth trying (blocks of a tile, warps,
programs of a run): time of a pack of three launches (``pack_us``) and of unpacking (``unpack_us``), beside that of
values as they are. Every candidate is compiled in parallel first (Triton's cache is on disk), then timed: GPU time by
CUDA graph with inputs rotated through several times the L2 cache. What it stores and reads must be what
``codec.formats`` does. One line and one record per setting; it ends early, with what it has, where time is up.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import environment, require_gpu, write_records
from examples.benchmarks.kernels import CASES, ROTATED_BYTES
from examples.benchmarks.timing import gpu_us
from examples.benchmarks.vocabulary import BITS
from lightning_actprune.codec import formats
from lightning_actprune.codec import packed as codec
from lightning_actprune.codec.blocks import RUN_BLOCKS, BlockGeometry
from lightning_actprune.kernels import pack as packs
from lightning_actprune.kernels import unpack as unpacks
from lightning_actprune.kernels.pack import PackLaunch
from lightning_actprune.kernels.places import Turns

DTYPE = torch.bfloat16
THREAD_VALUES = (8, 16, 32)
"""Values that a thread holds at once."""
Packed = tuple[Tensor, Tensor, Tensor]


class Setting(NamedTuple):
    """What is packed: shape of a case of ``kernels.py``, block size, sparsity and format."""

    case: tuple[int, ...]
    block_size: int
    sparsity: float
    value_format: str

    @property
    def bits(self) -> int:
        """Bits of a value, 0 for values as they are."""
        return BITS[self.value_format] or 0

    def launch(self, device: str = "cuda") -> PackLaunch:
        """Return the three launches for a contiguous input."""
        samples, rows, length = shape = self.case[:3]
        keep = BlockGeometry.of(samples, rows, length, self.block_size, self.sparsity).keep
        where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        return PackLaunch(shape, (rows * length, length), self.block_size, keep, where, bits=self.bits)

    def unpack(self, packed: Packed) -> Tensor:
        """Return the dense rows."""
        rows = self.case[0] * self.case[1], self.case[2]
        return codec.unpack(*packed, *rows, self.block_size, self.bits, DTYPE)


def candidates(block_size: int, sparsity: float) -> list[Turns]:
    """Return the turns worth trying: for an average run four tiles a program at most, and no program with none."""
    kept, found = RUN_BLOCKS * (1 - sparsity), []
    for warps, values, parts in itertools.product((1, 2, 4), THREAD_VALUES, (1, 2, 4)):
        tile = max(1, 32 * warps * values // block_size)
        if kept <= 4 * tile * parts <= 4 * RUN_BLOCKS and tile < 2 * kept and (parts - 1) * tile < kept:
            found.append(Turns(tile, warps, parts))
    return found


@contextlib.contextmanager
def forced(turns: Turns) -> Iterator[None]:
    """Share out all runs inside as told."""
    codec._unpack_launches.clear()
    with (
        mock.patch.object(packs, "choose_turns", return_value=turns),
        mock.patch.object(unpacks, "choose_turns", return_value=turns),
    ):
        yield
    codec._unpack_launches.clear()


def compile_one(job: tuple[Setting, Turns]) -> None:
    """Launch one candidate in another process: the machine code lands in the cache on disk."""
    setting, turns = job
    try:
        with forced(turns):
            setting.unpack(setting.launch()(torch.zeros(setting.case[:3], dtype=DTYPE, device="cuda")))
        torch.cuda.synchronize()
    except Exception as error:
        print("not compiled:", job, str(error)[:200], flush=True)


def times(setting: Setting, inputs: list[Tensor]) -> tuple[dict[str, float], Packed]:
    """Return the times of packing and unpacking ``inputs``, and the first of them packed."""
    launch = setting.launch(inputs[0].device.type)
    packed = [launch(x) for x in inputs]
    timed = functools.partial(gpu_us, repeats=2, replays=5, enough_ms=10.0)
    pack_us = timed([functools.partial(launch, x) for x in inputs])
    unpack_us = timed([functools.partial(setting.unpack, one) for one in packed])
    return {"pack_us": round(pack_us, 2), "unpack_us": round(unpack_us, 2)}, packed[0]


def measure(same: Setting, names: list[str], deadline: float) -> list[dict[str, Any]]:
    """Time the formats beside values as they are, until ``deadline``, and print a line per candidate."""
    count = max(2, math.ceil(ROTATED_BYTES / (math.prod(same.case[:3]) * DTYPE.itemsize)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = [torch.randn(same.case[:3], device=device, dtype=DTYPE) for _ in range(count)]
    reference, (values, *positions) = times(same, inputs)
    print(f"{same.case} b={same.block_size} s={same.sparsity}: {reference}", flush=True)
    records = [same._asdict() | reference]
    for name, turns in itertools.product(names, candidates(same.block_size, same.sparsity)):
        if time.monotonic() > deadline:
            print("  out of time", flush=True)
            break
        setting = same._replace(value_format=name)
        stored = formats.quantize(values, setting.bits)
        dense = same.unpack((formats.dequantize(stored, same.block_size, setting.bits, DTYPE), *positions))
        try:
            with forced(turns):
                found, packed = times(setting, inputs)
                right = torch.equal(packed[0], stored) and torch.equal(setting.unpack(packed), dense)
        except Exception as error:
            print(f"  {name} {tuple(turns)} failed: {str(error)[:100]}", flush=True)
            continue
        records.append(setting._asdict() | turns._asdict() | found | {"right": right})
        ratios = [f"{found[figure]:7.2f} ({found[figure] / reference[figure]:.2f})" for figure in reference]
        print(f"  {name} {tuple(turns)} {' '.join(ratios)}{'' if right else '  WRONG'}", flush=True)
    return records


def report(records: list[dict[str, Any]]) -> None:
    """Print, for each setting and figure, the best turns and the time over that of values as they are."""
    by_setting: dict[Setting, list[dict[str, Any]]] = {}
    for record in records:
        by_setting.setdefault(Setting(*(record[field] for field in Setting._fields)), []).append(record)
    for setting, group in by_setting.items():
        if setting.value_format == "same":
            continue
        (reference,) = by_setting[setting._replace(value_format="same")]
        best = []
        for figure in ("pack_us", "unpack_us"):
            right = min((r for r in group if r["right"]), key=lambda r: r[figure], default=None)
            if right is not None:
                turns = tuple(right[field] for field in Turns._fields)
                best.append(f"{figure} {right[figure]} ({right[figure] / reference[figure]:.2f}) with {turns}")
        print(*setting, "best:", "; ".join(best))


def main(argv: list[str] | None = None) -> None:
    """Sweep, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))))
    parser.add_argument("--blocks", type=int, nargs="+", default=[32])
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.6, 0.9])
    parser.add_argument("--formats", nargs="+", default=["int8", "int4", "int2"])
    parser.add_argument("--workers", type=int, default=15, help="processes that compile, 0 for none")
    parser.add_argument("--seconds", type=float, default=80.0, help="measure so long at most, compiling included")
    parser.add_argument("--out", type=Path, default=Path("tune_formats.json"))
    args = parser.parse_args(argv)
    require_gpu()
    deadline, records = time.monotonic() + args.seconds, []
    for block_size in args.blocks:
        same = [Setting(CASES[i], block_size, s, "same") for i, s in itertools.product(args.cases, args.sparsities)]
        if args.workers:
            compile_all(same, args.formats, args.workers)
        for setting in same:
            records += [record | environment() for record in measure(setting, args.formats, deadline)]
            write_records(args.out, records)
    report(records)


def compile_all(settings: list[Setting], names: list[str], workers: int) -> None:
    """Compile all candidates in parallel."""
    began = time.monotonic()
    jobs = [
        (setting._replace(value_format=name), turns)
        for setting, name in itertools.product(settings, names)
        for turns in candidates(setting.block_size, setting.sparsity)
    ]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs))
    print(f"compiled {len(jobs)} candidates in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
