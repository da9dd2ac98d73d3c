"""The largest batch that trains under a cap on the GPU's memory, dense and with each preset, through a Trainer.

    python examples/benchmarks/batch_size.py --cap-gib 16 --out batch_size.json

Models as their libraries build them, ``Trainer(precision="bf16-mixed")``, fused AdamW. Every case runs in a process of
its own, which torch lets allocate no more than the cap (``set_per_process_memory_fraction``; what CUDA itself takes
comes on top). A batch fits if a fit of three steps with it ends: the first is probed by the callback, and from the
second on there is the state of the optimizer. The memory of two sizes is measured, a straight line through it says
where the cap is reached, and sizes around that are tried until the largest that fits is known to 1 in 32.

``batch`` is that size, ``peak_mib`` the most that was allocated at it and ``trials`` how many fits it took.
``finder_batch`` is what Lightning's ``BatchSizeFinder`` finds by itself in its mode ``"binsearch"``, without a margin,
and ``finder_fits`` whether the fit that goes on with it ends. What runs out of memory is what it takes for that.

A model is built once in a case. The data are a few samples, repeated on the GPU to the size of a batch: to collate and
to copy a thousand images takes longer than to train on them.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import signature
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import MIB, environment, require_gpu, write_records
from examples.benchmarks.models import described
from examples.benchmarks.summaries import Records, Summary
from examples.benchmarks.third_party import WORKLOADS, checkpoint_blocks
from examples.benchmarks.vocabulary import PRESETS, arguments_of
from lightning_actprune import ActivationPruning

MODELS = ("vit_base_patch16_224", "resmlp_12_224", "GPT2LMHeadModel")
METHODS = ("dense", "checkpoint", *PRESETS, "balanced, others", "max, others", "recompute")
STEPS = 3
SAMPLES = 4
RESOLUTION = 32
LARGEST = 2**16
FINDER = {"margin": 0.0, "max_val": LARGEST}
"""Arguments of Lightning's finder, as far as it knows them: the largest size that fits, not one below."""
CASE_SECONDS = 240


class Few(IterableDataset[Any]):
    """The same few samples over and over, as ready batches of an unknown number."""

    def __init__(self, samples: Sequence[Tensor]) -> None:
        self.samples = tuple(samples)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return repeat(self.samples)


class Training(pl.LightningModule):
    """A workload as a LightningModule.

    Args:
        name: Of the workload.
        method: How it is trained.
        place: Where model and samples are made.
        samples: How many there are; a larger batch repeats them.
    """

    def __init__(self, name: str, method: str, place: str = "cpu", samples: int = SAMPLES) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.workload = WORKLOADS[name]
        with torch.device(place):
            self.model = self.workload.build()
            self.samples = self.workload.data(samples)
        self.batch_size = self.workload.batch
        if method == "checkpoint":
            checkpoint_blocks(self.model)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return self.workload.loss(self.model, *batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-4, fused=True)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Few(self.samples), batch_size=None)

    def on_after_batch_transfer(self, batch: tuple[Tensor, ...], dataloader_idx: int) -> tuple[Tensor, ...]:
        if self.batch_size == len(batch[0]):
            return batch
        times = -(-self.batch_size // len(batch[0]))
        return tuple(torch.cat([samples] * times)[: self.batch_size] for samples in batch)


class Case:
    """A model and a method, trained at one batch size after the other.

    Args:
        label: What it is called when it is told how far it is.
        training: The model.
        callbacks: Makes those of the method, anew for every fit.
        accelerator: Where.
    """

    def __init__(
        self, label: str, training: Training, callbacks: Callable[[], list[pl.Callback]], accelerator: str
    ) -> None:
        self.label, self.training, self.callbacks, self.accelerator = label, training, callbacks, accelerator
        self.peaks: dict[int, float | None] = {}
        """MiB of every size that was tried; ``None`` if it does not fit."""

    def fits(self, batch_size: int) -> bool:
        """Return whether a fit of three steps ends; no size is tried twice."""
        if batch_size not in self.peaks:
            self.peaks[batch_size] = self.fit(batch_size)
        return self.peaks[batch_size] is not None

    def fit(self, batch_size: int, *callbacks: pl.Callback, steps: int = STEPS) -> float | None:
        """Return the peak of a fit with more ``callbacks`` in MiB, ``None`` if it runs out of memory."""
        start, self.training.batch_size = time.perf_counter(), batch_size
        free()
        try:
            train(self.training, [*self.callbacks(), *callbacks], steps, self.accelerator)
            peak = torch.cuda.max_memory_allocated() / MIB if self.accelerator == "gpu" else 0.0
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            peak = None
        self.training.zero_grad()
        self.training.trainer = None  # it keeps the last batch of what has failed
        found = "out of memory" if peak is None else f"{peak:.0f} MiB"
        seconds = time.perf_counter() - start
        report(f"{self.label}: {self.training.batch_size} samples, {found}, {seconds:.1f} s")
        return peak


def callbacks_of(method: str) -> list[pl.Callback]:
    """Return the callbacks that a method adds to a Trainer."""
    if method in ("dense", "checkpoint"):
        return []
    preset, _, others = method.partition(", ")
    arguments = arguments_of(PRESETS[preset], bool(others)) if preset in PRESETS else {"preset": preset}
    return [ActivationPruning(**arguments, verbose=0)]


def train(
    training: Training,
    callbacks: list[pl.Callback],
    steps: int,
    accelerator: str,
    strategy: str | Strategy = "auto",
    devices: int = 1,
) -> None:
    """Fit so many steps."""
    with TemporaryDirectory() as folder:
        pl.Trainer(
            max_steps=steps, accelerator=accelerator, strategy=strategy, devices=devices, precision="bf16-mixed",
            logger=False, callbacks=callbacks, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, limit_val_batches=0, default_root_dir=folder,
        ).fit(training)  # fmt: skip


def out_of_memory(error: RuntimeError) -> bool:
    """Return whether Lightning's finder takes ``error`` for that, or cuBLAS names it so."""
    return is_oom_error(error) or "STATUS_ALLOC_FAILED" in str(error)


def report(line: str) -> None:
    """Tell how far a case is."""
    print(line, file=sys.stderr, flush=True)


def free() -> None:
    """Return all that is no longer used to the GPU, so that no trial pays for the fragments of another."""
    garbage_collection_cuda()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def guess(case: Case, start: int, cap_mib: float) -> int:
    """Return the size at which a straight line through the peaks of ``start`` and twice as many reaches the cap."""
    if not (case.fits(start) and case.fits(2 * start)):
        return start
    first, second = case.peaks[start] or 0.0, case.peaks[2 * start] or 0.0
    if second <= first:
        return 2 * start
    return min(LARGEST, max(2 * start, int(start + start * (cap_mib - first) / (second - first))))


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


def search(case: Case, start: int, cap_gib: float) -> int:
    """Return the largest size of a case that trains under the cap, looked for around ``start``; 0 if none does."""
    if case.accelerator == "gpu":
        torch.cuda.set_per_process_memory_fraction(cap_gib * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    return largest(case.fits, guess(case, start, cap_gib * 1024))


def measure(name: str, method: str, cap_gib: float, accelerator: str = "gpu") -> dict[str, Any]:
    """Return the figures of one case."""
    begin = time.perf_counter()
    case = Case(f"{name}, {method}", Training(name, method), partial(callbacks_of, method), accelerator)
    batch = search(case, WORKLOADS[name].batch, cap_gib)
    found = {"batch": batch, "peak_mib": None, "trials": len(case.peaks), "finder_batch": None, "finder_fits": None}
    if batch:
        peak = case.peaks[batch]
        noting = Noting()
        known = {name: value for name, value in FINDER.items() if name in signature(BatchSizeFinder).parameters}
        first = max(1, batch - batch // 8)
        finder = BatchSizeFinder("binsearch", steps_per_trial=STEPS, init_val=first, **known)
        ends = case.fit(first, noting, finder) is not None
        found |= {"peak_mib": round(peak, 2) if peak else None, "finder_batch": noting.batch_size, "finder_fits": ends}
    return {**found, "seconds": round(time.perf_counter() - begin, 1)}


class Noting(pl.Callback):
    """Notes the batch size with which training starts, whether or not it ends."""

    batch_size: int | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.batch_size = pl_module.batch_size


def run_case(name: str, method: str, cap_gib: float) -> dict[str, Any]:
    """Measure one case in a fresh process, which tells on stderr how far it is; return its figures, or its error."""
    command = [sys.executable, __file__, "--cap-gib", str(cap_gib), "--case", name, method]
    try:
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=CASE_SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"took over {CASE_SECONDS} s"}
    lines = output.stdout.splitlines()
    return json.loads(lines[-1]) if lines else {"error": f"exit status {output.returncode}"}


def summary(records: Records) -> Summary:
    """Return the table: one row per model and method, with how many times the dense batch it is."""
    dense = {r["model"]: r["batch"] for r in records if r["method"] == "dense" and "error" not in r}
    rows = []
    for r in records:
        if "error" in r:
            rows.append([r["model"], r["method"], r["error"], "-", "-"])
            continue
        ratio = (
            f" ({r['batch'] / dense[r['model']]:.2f} times)" if dense.get(r["model"]) and r["method"] != "dense" else ""
        )
        found = (
            "-" if r["finder_batch"] is None else f"{r['finder_batch']}{'' if r['finder_fits'] else ', out of memory'}"
        )
        peak = "-" if r["peak_mib"] is None else f"{r['peak_mib']:.0f}"
        rows.append([r["model"], r["method"], f"{r['batch']}{ratio}", peak, found])
    header = ("model", "method", "largest batch", "peak MiB", "BatchSizeFinder")
    return Summary("Largest batch under the cap; in brackets, how many times that of dense", header, rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all cases, write the records and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=WORKLOADS, metavar="MODEL")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS, metavar="METHOD")
    parser.add_argument("--cap-gib", type=float, default=16.0, help="memory that torch may allocate")
    parser.add_argument("--out", type=Path, default=Path("batch_size.json"))
    parser.add_argument("--case", nargs=2, metavar=("MODEL", "METHOD"), help="measure one, print JSON")
    args = parser.parse_args(argv)
    require_gpu()
    if args.case:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        try:
            found = measure(*args.case, args.cap_gib)
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(found))
        return
    records: Records = []
    for name in args.models:
        for method in args.methods:
            head = {key: value for key, value in described(name).items() if key != "batch"}
            found = run_case(name, method, args.cap_gib)
            records.append({**head, "cap_gib": args.cap_gib, "method": method, **found, **environment()})
            write_records(args.out, records)
    Console(width=None if sys.stdout.isatty() else 160).print(summary(records).rich())


if __name__ == "__main__":
    main()
