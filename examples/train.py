"""Train an image classifier densely and with pruned activations, and compare accuracy, memory and time.

    python examples/train.py                                            # digits, about a minute on two CPU cores
    python examples/train.py --dataset cifar10 --root data/cifar10      # ResMLP-S12 on a GPU
    python examples/train.py --methods pruned --sparsity 0.8 --block-size 16

Both trainings start from the same seed: the same weights and the same batches in the same order. All that is needed to
prune is one more callback. The memory is what one training forward keeps for backward, measured by hooks on the saved
tensors; `dense` is what the same model would keep unpruned.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.classifier import ImageClassifier
from examples.data import DATASETS, ImageData
from examples.models import MODELS
from lightning_actprune import ActivationMemoryMonitor, ActivationPruning

RECIPES: dict[str, dict[str, Any]] = {
    "digits": {"model": "resmlp_tiny", "patch_size": 2, "epochs": 15, "batch_size": 64, "lr": 1e-2, "threads": 1},
    "cifar10": {"model": "resmlp_s12", "patch_size": 4, "epochs": 20, "batch_size": 256, "lr": 1e-3},
    "cifar100": {"model": "resmlp_s12", "patch_size": 4, "epochs": 20, "batch_size": 256, "lr": 1e-3},
    "folder": {"model": "resmlp_s12", "patch_size": 16, "epochs": 20, "batch_size": 64, "lr": 1e-3},
}
"""Defaults of the options that depend on the data set.

The model for digits is too small to gain from a second thread, and loses much by waiting for it where cores are shared.
"""


def train(method: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train and test one model by `method`, `dense` or `pruned`, and return what came out."""
    L.seed_everything(args.seed, verbose=False)
    data = ImageData(args.dataset, args.root, args.image_size, args.batch_size, args.num_workers, not args.no_download)
    shape = {"image_size": data.image_size, "channels": data.channels, "num_classes": data.num_classes}
    model = ImageClassifier(args.model, patch_size=args.patch_size, lr=args.lr, **shape)
    monitor = ActivationMemoryMonitor(verbose=False)  # the table at the end shows what it measured
    callbacks: list[L.Callback] = [monitor]
    if method == "pruned":
        callbacks.insert(0, ActivationPruning(sparsity=args.sparsity, block_size=args.block_size))
    trainer = L.Trainer(
        accelerator=args.accelerator,
        devices=1,
        precision=args.precision,
        max_epochs=args.epochs,
        limit_train_batches=args.limit_batches,
        limit_val_batches=args.limit_batches,
        limit_test_batches=args.limit_batches,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    start = time.perf_counter()
    trainer.fit(model, data)
    seconds = time.perf_counter() - start
    (test,) = trainer.test(model, data, verbose=False)
    return {"method": method, "test_acc": test["test_acc"], "seconds": seconds, **memory(monitor)}


def memory(monitor: ActivationMemoryMonitor) -> dict[str, Any]:
    """Return the bytes that one training forward keeps, in total and for each pruned layer."""
    report = monitor.report
    assert report is not None, "no training step has run"
    layers = [row for row in report.to_dict()["rows"] if row["sparsity"] > 0]
    dense = report.dense_bytes + report.other_bytes
    return {"dense_bytes": dense, "stored_bytes": report.total_bytes, "layers": layers}


def tabulate(results: list[dict[str, Any]]) -> Table:
    """Return the results as one table: all activations of each method, then those of the pruned layers."""
    table = Table(title="Accuracy and activation memory per step")
    table.add_column("method", no_wrap=True)
    for title in ("test accuracy", "dense MiB", "stored MiB", "stored", "seconds"):
        table.add_column(title, justify="right")
    for result in results:
        accuracy, seconds = f"{result['test_acc']:.2%}", f"{result['seconds']:.1f}"
        table.add_row(result["method"], accuracy, *sizes(result), seconds, style="bold")
        layers = result["layers"]
        if layers:
            table.add_row("  pruned layers", "", *sizes(*layers), "")
        for layer in layers:
            table.add_row(f"    {layer['fqn'].removeprefix('model.')}", "", *sizes(layer), "")
        table.add_section()
    return table


def sizes(*entries: dict[str, Any]) -> tuple[str, str, str]:
    """Return dense and stored MiB of `entries` together, and their ratio, as text."""
    dense, stored = (sum(entry[name] for entry in entries) for name in ("dense_bytes", "stored_bytes"))
    return f"{dense / 2**20:.3f}", f"{stored / 2**20:.3f}", f"{stored / dense:.1%}" if dense else "-"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line, with what depends on the data set filled in."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=DATASETS, default="digits")
    parser.add_argument("--root", default="data", help="folder of the images, or where CIFAR is downloaded to")
    parser.add_argument("--no-download", action="store_true", help="never download CIFAR")
    parser.add_argument("--image-size", type=int, help="by default the data set's own")
    parser.add_argument("--num-workers", type=int, default=0, help="loader processes")
    parser.add_argument("--methods", nargs="+", choices=["dense", "pruned"], default=["dense", "pruned"])
    parser.add_argument("--sparsity", type=float, default=0.6, help="fraction of blocks dropped, in [0, 1)")
    parser.add_argument("--block-size", type=int, default=32, help="consecutive values per block")
    parser.add_argument("--model", choices=list(MODELS), help="by default the data set's, like the next four")
    for name, kind in (("--patch-size", int), ("--epochs", int), ("--batch-size", int), ("--lr", float)):
        parser.add_argument(name, type=kind)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--precision", default="bf16-mixed" if gpu else "32-true")
    parser.add_argument("--threads", type=int, help="CPU threads; by default 1 for digits, else PyTorch's choice")
    parser.add_argument("--limit-batches", type=int, help="batches per epoch, to try something quickly")
    args = parser.parse_args(argv)
    for name, value in RECIPES[args.dataset].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Train by every method, print the table and return its content."""
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    results = [train(method, args) for method in args.methods]
    Console().print(tabulate(results))
    return results


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*|.*LeafSpec.*is deprecated.*")
    main()
