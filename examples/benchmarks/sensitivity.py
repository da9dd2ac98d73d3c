"""What a sensitivity measurement takes: seconds for its whole grid, beside a dense training step.

    python examples/benchmarks/sensitivity.py --out sensitivity.json

Models as their libraries build them, bf16 autocast, the default grid of ``measure_sensitivity`` on two batches of
``models.py``, which is how one would ask before a training. ``seconds`` is the second of two measurements in a process,
``first_seconds`` the first, in which kernels are compiled; ``step_ms`` is the median of ten dense steps, each with the
device synchronised. ``peak_mib`` is the most that was allocated during a measurement, ``step_peak_mib`` during a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import MIB, environment, require_gpu, write_records
from examples.benchmarks.models import WORKLOADS, Training, described
from examples.benchmarks.summaries import Records, Summary
from lightning_actprune import measure_sensitivity
from lightning_actprune.analysis.sensitivity_report import SensitivityReport

MODELS = ("resmlp_12_224", "vit_base_patch16_224", "GPT2LMHeadModel")
BATCHES, STEPS = 2, 10


def timed(run: Callable[[], Any], device: torch.device) -> tuple[float, float | None, Any]:
    """Return seconds, the most that was allocated in MiB (``None`` on a CPU), and what ``run`` returns."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    result = run()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return seconds, round(torch.cuda.max_memory_allocated() / MIB, 2) if on_gpu else None, result


def measure(name: str, device: torch.device) -> dict[str, Any]:
    """Return the record of one model."""
    training = Training(name, None, device)
    batches = [training.batch] * BATCHES

    def loss(batch: Sequence[Tensor]) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return training.workload.loss(training.model, *batch)

    def grid() -> SensitivityReport:
        return measure_sensitivity(training.model, loss, batches)

    steps = [timed(training.step, device) for _ in range(STEPS + 1)][1:]
    first, _, report = timed(grid, device)
    seconds, peak, report = timed(grid, device)
    return {
        **described(name),
        "batches": BATCHES,
        "layers": len({row.fqn for row in report.rows}),
        "figures": len(report.rows),
        "seconds": round(seconds, 3),
        "first_seconds": round(first, 3),
        "step_ms": round(1e3 * statistics.median(taken for taken, *_ in steps), 3),
        "peak_mib": peak,
        "step_peak_mib": steps[-1][1],
        **environment(),
    }


def summary(records: Records) -> Summary:
    """Return the table: one row per model."""
    header = ("model", "layers", "layers x settings", "seconds", "first time", "dense step ms", "peak MiB", "of a step")
    rows = [
        [f"{r['model']}, batch {r['batch']}", str(r["layers"]), str(r["figures"]), f"{r['seconds']:.1f}",
         f"{r['first_seconds']:.1f}", f"{r['step_ms']:.0f}", f"{r['peak_mib'] or 0:.0f}",
         f"{r['step_peak_mib'] or 0:.0f}"]
        for r in records
    ]  # fmt: skip
    return Summary("Sensitivity of every layer at every setting, two batches", header, rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all models, write the records and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=WORKLOADS, metavar="MODEL")
    parser.add_argument("--out", type=Path, default=Path("sensitivity.json"))
    args = parser.parse_args(argv)
    require_gpu()
    records: Records = []
    for name in args.models:
        records.append(measure(name, torch.device("cuda")))
        write_records(args.out, records)
    Console(width=None if sys.stdout.isatty() else 160).print(summary(records).rich())


if __name__ == "__main__":
    main()
