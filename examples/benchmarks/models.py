"""Activation memory of third-party models as they come, dense and pruned, and whether it is what was announced.

    python examples/benchmarks/models.py --out models.json
    python examples/benchmarks/models.py --workers 1 --out models.json      # times too

bf16 autocast, fused AdamW; s = 0.6, b = 32, all linear layers that ``convert`` takes. Every case runs in a fresh
process: three warm-up steps, in the first of which the probes find the layers that are better left dense, then one
measured step. ``--workers`` processes run side by side, which leaves the memory
of each its own, but not its time, so ``step_ms`` is of one process at a time only.

``activations_mib`` is the growth of the allocator's requested bytes over the forward, ``peak_mib`` its maximum over the
step. ``accounted_mib`` is what ``SavedTensorMeter`` counts in a further forward, ``announced_mib`` what its report says
that it saves. ``packed`` is how many of the ``converted`` layers packed an input at all: frozen ones do not, nor those
whose weight the model uses without calling the layer.

The program fails, and says where, if a case failed; if a pruned model's activations or peak are more than 0.5 % above
the dense one's; or if what was saved, by the allocator, is more than 2 % off what was announced.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks import summaries
from examples.benchmarks.common import MIB, environment, in_process, require_gpu, step_memory, write_records
from examples.benchmarks.summaries import Records
from examples.benchmarks.third_party import WORKLOADS
from examples.benchmarks.vocabulary import Preset, arguments_of
from lightning_actprune import convert
from lightning_actprune.analysis.first_batch import EnergyProbe, RetentionProbe
from lightning_actprune.analysis.memory import SavedTensorMeter

METHODS = ("dense", "pruned")
SETTINGS = {"sparsity": 0.6, "block_size": 32}
ABOVE_DENSE = 0.005
OFF_ANNOUNCED = 0.02
CASE_SECONDS = 180
"""A case takes seconds; one that hangs must not cost the others their records."""


class Training:
    """One model with so many of its batches in one and an optimizer, dense without a ``preset``."""

    def __init__(
        self,
        name: str,
        preset: Preset | None,
        device: torch.device,
        batches: int = 1,
        others: bool = False,
        capturable: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.workload, self.device = WORKLOADS[name], device
        self.model = self.workload.build().to(device)
        self.run: nn.Module = self.model  # or compiled
        self.batch = tuple(tensor.to(device) for tensor in self.workload.data(batches * self.workload.batch))
        self.preset, self.conversion = preset, None
        if preset is not None:
            self.conversion = convert(self.model, **arguments_of(preset, others))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True, capturable=capturable)

    def forward(self) -> Tensor:
        """Return the loss."""
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.workload.loss(self.run, *self.batch)

    def finish(self, loss: Tensor) -> None:
        """Run backward and the optimizer."""
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Run a whole step."""
        self.finish(self.forward())


def warm_up(training: Training) -> None:
    """Run three steps, the first of them probed as the callback does it: through its backward."""
    if training.preset is None:
        training.finish(training.forward())
    else:
        with RetentionProbe(training.model, training.batch) as retention, EnergyProbe(training.model) as energy:
            loss = training.forward()
            retention.check_alive()
            training.finish(loss)
        retention.apply(training.conversion)
        energy.apply(training.conversion)
    for _ in range(2):
        training.finish(training.forward())


def allocated(training: Training) -> dict[str, int]:
    """Return activations and peak of one step in bytes, by the allocator."""
    return step_memory(training.forward, training.finish)


def accounted(training: Training) -> tuple[dict[str, int], int]:
    """Return what the package says of a step in bytes, kept and saved, and how many pruned layers packed anything."""
    with SavedTensorMeter(training.model, training.batch) as meter:
        training.forward()
    report = meter.report()
    kept = {"accounted_mib": report.stored_bytes}
    saved = {"announced_mib": report.saved_bytes}
    return (kept | saved if training.conversion else kept), sum(row.sparsity > 0 for row in report.rows)


def step_ms(training: Training) -> float:
    """Return the median milliseconds of five steps."""
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        training.finish(training.forward())
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e3)
    return round(statistics.median(found), 2)


def measure(name: str, method: str, device: torch.device, timed: bool) -> dict[str, Any]:
    """Return the figures of one case."""
    training = Training(name, Preset(**SETTINGS) if method == "pruned" else None, device)
    warm_up(training)
    figures: dict[str, Any] = {key: round(value / MIB, 2) for key, value in allocated(training).items()}
    if timed:
        figures["step_ms"] = step_ms(training)
    said, packed = accounted(training)
    figures |= {key: round(value / MIB, 2) for key, value in said.items()}
    if training.conversion is not None:
        skipped = [layer.reason for layer in training.conversion.skipped]
        figures |= {"converted": len(training.conversion.converted), "packed": packed, "skipped": len(skipped)}
        figures["reasons"] = sorted({shortened(reason) for reason in skipped})
    return figures


def shortened(reason: str) -> str:
    """Return the first clause of a reason."""
    return re.split(r"[:;,] ", reason, maxsplit=1)[0]


def run_case(name: str, method: str, timed: bool) -> dict[str, Any]:
    """Measure one case in a fresh process; return its figures, or its error."""
    command = [sys.executable, __file__, "--case", name, method, *(["--workers", "1"] if timed else [])]
    return in_process(command, CASE_SECONDS)


def head(name: str, method: str) -> dict[str, Any]:
    """Return what a record says whether or not its case could be measured."""
    settings = SETTINGS if method == "pruned" else dict.fromkeys(SETTINGS)
    return {**described(name), "method": method, **settings}


def described(name: str, batches: int = 1) -> dict[str, Any]:
    """Return what a record says of its model, and of so many of its batches in one."""
    workload = WORKLOADS[name]
    try:
        version = importlib.metadata.version(workload.source)
    except importlib.metadata.PackageNotFoundError:
        version = None
    source = {"model": name, "source": workload.source, "version": version, "batch": batches * workload.batch}
    return {**source, "precision": "bf16-mixed"}


def compare(records: Records) -> None:
    """Add what was saved, measured and accounted, to the pruned records."""
    for dense, pruned in summaries.measured_pairs(records):
        for name, source in (("saved_mib", "activations_mib"), ("accounted_saved_mib", "accounted_mib")):
            pruned[name] = round(dense[source] - pruned[source], 2)


def problems(records: Records) -> Iterator[str]:
    """Yield a sentence for each case that failed, took more memory than dense, or saved what was not announced."""
    for record in records:
        if "error" in record:
            yield f"{record['model']}, {record['method']}: {record['error']}"
    for dense, pruned in summaries.measured_pairs(records):
        for name in ("activations_mib", "peak_mib"):
            if pruned[name] > dense[name] * (1 + ABOVE_DENSE):
                yield f"{pruned['model']}: {name} is {pruned[name]} pruned and {dense[name]} dense"
        announced = pruned["announced_mib"]
        if abs(pruned["saved_mib"] - announced) > OFF_ANNOUNCED * abs(announced):
            yield f"{pruned['model']}: {pruned['saved_mib']} MiB were saved and {announced} announced"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases, write the records, print the table and what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS), metavar="MODEL")
    parser.add_argument("--workers", type=int, default=4, help="processes at a time; steps are timed with 1 only")
    parser.add_argument("--out", type=Path, default=Path("models.json"))
    parser.add_argument("--case", nargs=2, metavar=("MODEL", "METHOD"), help="measure one, print JSON")
    args = parser.parse_args(arguments)
    require_gpu()
    timed = args.workers == 1
    if args.case:
        print(json.dumps(measure(*args.case, torch.device("cuda"), timed)))
        return 0
    cases = [(name, method) for name in args.models for method in METHODS]
    with ThreadPoolExecutor(args.workers) as pool:
        figures = pool.map(lambda case: run_case(*case, timed), cases)
        records = [{**head(*case), **found} for case, found in zip(cases, figures, strict=True)]
    compare(records)
    write_records(args.out, [{**record, **environment()} for record in records])
    # Nine columns: where there is no terminal, 80 characters would cut the names.
    Console(width=None if sys.stdout.isatty() else 200).print(summaries.models(records).rich())
    found = list(problems(records))
    for problem in found:
        print(problem)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
