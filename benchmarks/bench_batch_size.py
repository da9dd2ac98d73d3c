"""The largest batch that trains in a given memory, or the deepest or widest model at a fixed batch.

    python benchmarks/bench_batch_size.py --quick
    python benchmarks/bench_batch_size.py --cap-gib 24 --together 3
    python benchmarks/bench_batch_size.py --cap-gib 24 --axis depth --models vit_base_patch16_224

Cases are those of ``bench_step.py``; README.md says how a size is searched. Offloading is left out unless it is named:
the host's memory is what bounds its batch.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import bench_step as steps
from benchmarks import common
from benchmarks.bench_step import Case, StepFigures, Training
from benchmarks.common import MIB, Record, RecordFile
from benchmarks.models import TRAINED, WORKLOADS

METHODS = "dense", "checkpoint", "balanced", "max", "recompute"
KEYS = "model", "precision", "method", "axis", "cap_gib", "allocator"
STEPS, SAMPLES, RESOLUTION, LARGEST = 3, 4, 32, 2**16
QUICK_LARGEST = 4
"""Largest batch of ``--quick``, where no memory is capped."""


class Search:
    def __init__(self, case: Case, axis: str, args: argparse.Namespace, place: str) -> None:
        self.case, self.axis, self.args, self.place = case, axis, args, place
        self.peaks: dict[int, float | None] = {}
        """MiB of every size that was tried, ``None`` of those that do not fit."""
        if axis == "batch":
            self.start, self.unit = WORKLOADS[case.model].batch, 1
            self.training = Training(case, place, SAMPLES)
        else:
            self.argument, self.start, self.unit = WORKLOADS[case.model].sizes[axis]
            self.training = None

    def fits(self, size: int) -> bool:
        """Fit once and return True if it completes; no size is tried twice."""
        if size not in self.peaks:
            self.peaks[size] = self.fit(size)
        return self.peaks[size] is not None

    def fit(self, size: int, *callbacks: pl.Callback, count: int = STEPS) -> float | None:
        """Return the peak of a fit in MiB, ``None`` if it runs out of memory."""
        start, peak = time.perf_counter(), None
        garbage_collection_cuda()  # or fragments of one trial would be in the way of another
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        try:
            if self.axis == "batch":
                self.training.batch_size = size
            else:
                self.training = Training(self.case, self.place, **{self.argument: size})
            if self.args.quick and size > QUICK_LARGEST:
                raise torch.OutOfMemoryError("CUDA out of memory: --quick")
            own = steps.callbacks_of(self.case.method, self.args.offload_file)
            steps.train(self.training, [*own, *callbacks], count)
            peak = torch.cuda.max_memory_allocated() / MIB if torch.cuda.is_available() else 0.0
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        if self.training is not None:
            self.training.zero_grad()
            self.training.trainer = None  # it keeps the last batch of a fit that failed
        if self.axis != "batch":
            self.training = None
        shown = "out of memory" if peak is None else f"{peak:.0f} MiB"
        print(
            f"{self.case.model}, {self.case.method}: {self.axis} {size}, {shown}, {time.perf_counter() - start:.1f} s"
        )
        return peak

    def largest(self, cap_mib: float) -> int:
        """Return the largest size that fits, 0 if none does."""
        start = self.start
        if self.fits(start) and self.fits(2 * start):
            first, second = self.peaks[start], self.peaks[2 * start]
            start = 2 * start
            if second > first:
                start = max(start, int(self.start * (1 + (cap_mib - first) / (second - first))))
        units = largest(lambda count: self.fits(count * self.unit), max(1, start // self.unit))
        return units * self.unit


def out_of_memory(error: RuntimeError) -> bool:
    """Return True for out-of-memory errors that Lightning recognises, and for those of cuBLAS."""
    return is_oom_error(error) or "STATUS_ALLOC_FAILED" in str(error)


def largest(fits: Callable[[int], bool], start: int) -> int:
    """Return the largest size that fits, to 1 in 32, looked for from ``start`` on; 0 if none does."""
    low, high, size = 0, LARGEST + 1, min(start, LARGEST)
    step = max(1, size // RESOLUTION)
    while high - low > max(1, low // RESOLUTION):
        if fits(size):
            low = size
        else:
            high = size
        if low and high <= LARGEST:
            size = (low + high) // 2
        else:
            size = min(low + step, LARGEST) if low else max(high - step, 1)
            step *= 2
    return low


def measure(case: Case, args: argparse.Namespace, queue: steps.Queue) -> Record:
    """Return the largest size of a case, and the figures of a step there."""
    place = steps.prepare(case, 0, 0)
    if place != "cpu":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(args.cap_gib * 2**30 / total)
    search, figures = Search(case, args.axis, args, place), StepFigures(plan_of(args), queue)
    try:
        size = search.largest(args.cap_gib * 1024)
        trials = len(search.peaks)
        while size > 0 and search.fit(size, figures, count=figures.plan.steps) is None:
            size -= math.ceil(size / RESOLUTION / search.unit) * search.unit
        size = max(size, 0)
        sizes = {"batch": size} if args.axis == "batch" else {"size": size}
        return {**sizes, "trials": trials, **(figures.figures() if size else {})}
    finally:
        figures.leave()


def plan_of(args: argparse.Namespace) -> steps.Plan:
    return steps.QUICK if args.quick else steps.Plan(turns=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases that the file lacks, and print the table."""
    parser = steps.parser_for(__doc__, "batch_size")
    parser.add_argument("--cap-gib", type=float, default=24.0, help="memory that torch may allocate")
    parser.add_argument("--axis", default="batch", choices=("batch", "depth", "width"), help="what grows")
    args = parser.parse_args(argv)
    args.models = args.models or (("small",) if args.quick else TRAINED)
    if args.axis != "batch":
        args.models = [name for name in args.models if args.axis in WORKLOADS[name].sizes]
    gpu = common.has_gpu()
    common.require(gpu, args.quick)
    file, more = RecordFile(args.out, KEYS, args.again), {"axis": args.axis, "cap_gib": args.cap_gib}
    cases = [
        Case(name, method, precision=args.precision, batches=1, accelerator="gpu" if gpu else "cpu")
        for name in args.models
        for method in args.methods or METHODS
    ]
    lacking = [case for case in cases if file.lacks({**case.head(), **more})]
    end = time.monotonic() + args.seconds
    while lacking and time.monotonic() < end:
        group, lacking = lacking[: args.together], lacking[args.together :]
        queue = steps.Queue(len(group), plan_of(args).turns, steps.WAITING * args.case_seconds)
        found = common.finish(args.case_seconds, [common.start_in_fork(measure, case, args, queue) for case in group])
        for case, figures in zip(group, found, strict=True):
            file.add(steps.with_speed({**case.head(), **more, **figures}))
    records = [r for r in (file.records.get(file.key({**case.head(), **more})) for case in cases) if r]
    columns = "model method axis cap_gib batch size trials peak_mib step_ms samples_per_s error"
    common.show("Largest sizes under the cap", records, columns.split())
    return int(any("error" in record for record in records))


if __name__ == "__main__":
    sys.exit(main())
