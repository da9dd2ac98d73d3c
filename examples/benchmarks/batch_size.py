"""The largest batch that trains under a cap on the GPU's memory, dense and with each preset, through a Trainer.

    python examples/benchmarks/batch_size.py --cap-gib 16 --out batch_size.json

Models as their libraries build them, ``Trainer(precision="bf16-mixed")``, fused AdamW. Every case runs in a process of
its own, which torch lets allocate no more than the cap (``set_per_process_memory_fraction``; what CUDA itself takes
comes on top). A batch fits if a fit of three steps with it ends: the first is probed by the callback, and from the
second on there is the state of the optimizer. Sizes are doubled until one does not fit, then halved in between until
the largest that fits is known to 1 in 32.

``batch`` is that size and ``peak_mib`` the most that was allocated at it. ``finder_batch`` is what Lightning's
``BatchSizeFinder`` finds by itself in its mode ``"binsearch"``, without a margin, and ``finder_fits`` whether a fit
with it ends: in the finder's trials no callback runs, so the layers that the first batch of a fit is to judge are not
judged.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import MIB, environment, require_gpu, write_records
from examples.benchmarks.models import described
from examples.benchmarks.summaries import Records, Summary
from examples.benchmarks.third_party import WORKLOADS, checkpoint_blocks
from lightning_actprune import ActivationPruning
from lightning_actprune.presets import PRESETS

MODELS = ("vit_base_patch16_224", "resmlp_12_224", "GPT2LMHeadModel")
METHODS = ("dense", "checkpoint", *PRESETS, "balanced, others", "max, others")
STEPS = 3
RESOLUTION = 32
LARGEST = 2**16
FINDER = {"margin": 0.0, "max_val": LARGEST}
"""Arguments of Lightning's finder, as far as it knows them: the largest size that fits, not one below."""
CASE_SECONDS = 560


class Repeated(Dataset[Any]):
    """A few samples over and over, as many as are asked for."""

    def __init__(self, samples: Sequence[Tensor]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return STEPS * LARGEST

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index % len(tensor)] for tensor in self.samples)


class Training(pl.LightningModule):
    """A workload as a LightningModule."""

    def __init__(self, name: str, method: str, batch_size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.workload = WORKLOADS[name]
        self.model = self.workload.build()
        self.batch_size = batch_size
        if method == "checkpoint":
            checkpoint_blocks(self.model)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return self.workload.loss(self.model, *batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-4, fused=True)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Repeated(self.workload.data(4)), self.batch_size)


def train(name: str, method: str, batch_size: int, accelerator: str, *callbacks: pl.Callback) -> int:
    """Return the batch size of a fit of three steps, which a callback may have changed."""
    model = Training(name, method, batch_size)
    if method not in ("dense", "checkpoint"):
        preset, _, others = method.partition(", ")
        callbacks = (ActivationPruning(preset=preset, others=bool(others), verbose=False), *callbacks)
    with TemporaryDirectory() as folder:
        pl.Trainer(
            max_steps=STEPS, accelerator=accelerator, devices=1, precision="bf16-mixed", callbacks=list(callbacks),
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            limit_val_batches=0, default_root_dir=folder,
        ).fit(model)  # fmt: skip
    return model.batch_size


def fits(run: Callable[[], Any]) -> bool:
    """Return whether ``run`` ends without running out of memory; what it leaves is freed."""
    try:
        run()
    except torch.OutOfMemoryError:
        return False
    finally:
        free()
    return True


def free() -> None:
    """Return all that is no longer used to the GPU, so that no trial pays for the fragments of another."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def largest(fits: Callable[[int], bool], start: int) -> int:
    """Return the largest size that fits, to 1 in 32; 0 if ``start`` and all its halves do not."""
    low, high = 0, min(start, LARGEST)
    while fits(high):
        if high == LARGEST:
            return high
        low, high = high, min(2 * high, LARGEST)
    while high - low > max(1, low // RESOLUTION):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def measure(name: str, method: str, cap_gib: float, accelerator: str = "gpu") -> dict[str, Any]:
    """Return the figures of one case."""
    if accelerator == "gpu":
        torch.cuda.set_per_process_memory_fraction(cap_gib * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    start = WORKLOADS[name].batch
    batch = largest(lambda size: fits(lambda: train(name, method, size, accelerator)), start)
    if not batch:
        return {"batch": 0, "peak_mib": None, "finder_batch": None, "finder_fits": None}
    train(name, method, batch, accelerator)
    peak = round(torch.cuda.max_memory_allocated() / MIB, 2) if accelerator == "gpu" else None
    free()
    known = {name: value for name, value in FINDER.items() if name in signature(BatchSizeFinder).parameters}
    finder = BatchSizeFinder("binsearch", steps_per_trial=STEPS, init_val=max(1, batch // 2), **known)
    found: list[int] = []
    finder_fits = fits(lambda: found.append(train(name, method, start, accelerator, Noting(found), finder)))
    return {"batch": batch, "peak_mib": peak, "finder_batch": found[0] if found else None, "finder_fits": finder_fits}


class Noting(pl.Callback):
    """Notes the batch size with which training starts, whether or not it ends."""

    def __init__(self, found: list[int]) -> None:
        self.found = found

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found.append(pl_module.batch_size)


def run_case(name: str, method: str, cap_gib: float) -> dict[str, Any]:
    """Measure one case in a fresh process; return its figures, or its error."""
    command = [sys.executable, __file__, "--cap-gib", str(cap_gib), "--case", name, method]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=CASE_SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"took over {CASE_SECONDS} s"}
    if output.returncode:
        return {"error": (output.stderr.strip().splitlines() or [f"exit status {output.returncode}"])[-1][:300]}
    return json.loads(output.stdout.splitlines()[-1])


def summary(records: Records) -> Summary:
    """Return the table: one row per model and method, with the ratio of the batch to the dense one."""
    dense = {r["model"]: r["batch"] for r in records if r["method"] == "dense" and "error" not in r}
    rows = []
    for r in records:
        if "error" in r:
            rows.append([r["model"], r["method"], r["error"], "-", "-"])
            continue
        ratio = f" ({r['batch'] / dense[r['model']]:.2f})" if dense.get(r["model"]) else ""
        found = (
            "-" if r["finder_batch"] is None else f"{r['finder_batch']}{'' if r['finder_fits'] else ', out of memory'}"
        )
        peak = "-" if r["peak_mib"] is None else f"{r['peak_mib']:.0f}"
        rows.append([r["model"], r["method"], f"{r['batch']}{ratio}", peak, found])
    header = ("model", "method", "largest batch", "peak MiB", "BatchSizeFinder")
    return Summary("Largest batch under the cap; in brackets the ratio to dense", header, rows)


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
        print(json.dumps(measure(*args.case, args.cap_gib)))
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
