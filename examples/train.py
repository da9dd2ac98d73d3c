"""Train an image classifier densely, with activation checkpointing and with compressed activations, and compare them.

    python examples/train.py                                            # digits, about a minute on two CPU cores
    python examples/train.py --preset paper --sparsity 0.8 --block-size 16
    python examples/train.py --preset max --rules '{"*head": dense}'    # max, but the head stays dense
    python examples/train.py --dataset cifar10 --root data/cifar10      # ResMLP-S12 on a GPU

By default there are four trainings: `dense`, `checkpoint` (every block runs again in backward), and the presets `max`
and `recompute`. `--preset` names other presets. All start from the same seed, so they see the same weights and the same
batches. Compression takes one more callback.

The table shows for each training:

- the accuracy on the test images. Digits has 360 of them, so another seed moves it by a point or two;
- the activations that one training forward keeps for backward, counted in the last epoch;
- the peak of a step, beyond parameters and optimizer state: it holds the activations, what a checkpointed block keeps
  while it runs again, gradients and temporary tensors. A GPU measures it, elsewhere the step of a GPU is simulated;
- on a GPU also the seconds of the fit, validation included. No kernels run on a CPU, so its times would mislead.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import lightning as L
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.classifier import ImageClassifier
from examples.data import DATASETS, ImageData
from examples.models import MODELS
from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, convert
from lightning_actprune.analysis.simulate_step import simulate
from lightning_actprune.config import PresetName

PRESETS = get_args(PresetName)
MIB = 2**20

LARGE_IMAGES = {"model": "resmlp_s12", "epochs": 20, "lr": 1e-3}
RECIPES: dict[str, dict[str, Any]] = {
    "digits": {
        **{"model": "resmlp_tiny", "dim": 64, "depth": 6, "patch_size": 2},
        **{"epochs": 4, "batch_size": 64, "lr": 2e-2, "threads": 1},
    },
    "cifar10": {**LARGE_IMAGES, "patch_size": 4, "batch_size": 256},
    "cifar100": {**LARGE_IMAGES, "patch_size": 4, "batch_size": 256},
    "folder": {**LARGE_IMAGES, "patch_size": 16, "batch_size": 64},
}
"""Defaults for each data set. The model for digits is too small to gain from a second thread."""


def train(method: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train and test one model by `method`: `"dense"`, `"checkpoint"` or a preset."""
    L.seed_everything(args.seed, verbose=False)
    data, model = make_data(args), make_model(args)
    peak_bytes = simulate_peak(method, model.model, args) if args.on_cpu else None
    monitor = ActivationMemoryMonitor(verbose=False)
    callbacks: list[L.Callback] = [monitor]
    if method in PRESETS:
        callbacks.append(ActivationPruning(method, **preset_changes(args), verbose=0))
    elif method == "checkpoint":
        checkpoint_blocks(model.model)
    trainer = make_trainer(args, callbacks)
    start = time.perf_counter()
    trainer.fit(model, data)
    seconds = time.perf_counter() - start
    (test,) = trainer.test(model, data, verbose=False)
    return {
        "method": method,
        "test_acc": test["test_acc"],
        "activation_bytes": monitor.report.stored_bytes,
        "peak_bytes": step_peak(monitor.report.step) if peak_bytes is None else peak_bytes,
        "seconds": None if args.on_cpu else seconds,
    }


def checkpoint_blocks(model: nn.Module) -> None:
    """Keep only the input of every block, and run the block again in backward."""
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def simulate_peak(method: str, model: nn.Module, args: argparse.Namespace) -> int:
    """Return the peak that a step would have on a GPU; `model` does not change."""
    prepare = None
    if method in PRESETS:
        prepare = functools.partial(convert, preset=method, **preset_changes(args))
    elif method == "checkpoint":
        prepare = checkpoint_blocks
    images = torch.empty(args.batch_size, args.channels, args.image_size, args.image_size)
    labels = torch.empty(args.batch_size, dtype=torch.long)
    return step_peak(simulate(model, (images, labels), prepare, precision=args.precision))


def step_peak(step: Any) -> int:
    """Return the most that a step has in use beyond what was there when it began: parameters and optimizer state."""
    return step.peak_bytes - step.moments[0].used_bytes


def preset_changes(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that change presets."""
    changes = {"sparsity": args.sparsity, "block_size": args.block_size, "rules": args.rules}
    return {name: value for name, value in changes.items() if value is not None}


def make_data(args: argparse.Namespace) -> ImageData:
    """Return the data set."""
    return ImageData(args.dataset, args.root, args.image_size, args.batch_size, args.num_workers)


def make_model(args: argparse.Namespace) -> ImageClassifier:
    """Return an untrained model."""
    names = "model", "image_size", "patch_size", "dim", "depth", "num_classes", "channels", "lr"
    return ImageClassifier(**{name: getattr(args, name) for name in names})


def make_trainer(args: argparse.Namespace, callbacks: list[L.Callback]) -> L.Trainer:
    """Return the Trainer; it draws a progress bar in a terminal."""
    limits = dict.fromkeys(("limit_train_batches", "limit_val_batches", "limit_test_batches"), args.limit_batches)
    return L.Trainer(
        accelerator=args.accelerator,
        devices=1,
        precision=args.precision,
        max_epochs=args.epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=Console().is_terminal,
        num_sanity_val_steps=0,
        **limits,
    )


def make_table(results: list[dict[str, Any]], args: argparse.Namespace) -> Table:
    """Return the results as a table, memory also as a share of the dense training's."""
    notes = [f"{name.replace('_', ' ')} of the presets: {value}" for name, value in preset_changes(args).items()]
    if args.on_cpu:
        notes.append("No kernels run on a CPU: peaks are those of a simulated step on a GPU, seconds are left out.")
    table = Table(title="Dense, checkpointed and compressed training", caption="\n".join(notes))
    table.add_column("method", no_wrap=True)
    columns = ["accuracy", "kept for backward, MiB", "peak of a step, MiB", *([] if args.on_cpu else ["seconds"])]
    for column in columns:
        table.add_column(column, justify="right")
    dense = results[0]
    for result in results:
        sizes = (
            f"{result[key] / MIB:.2f} ({result[key] / dense[key]:.0%})" for key in ("activation_bytes", "peak_bytes")
        )
        seconds = [] if args.on_cpu else [f"{result['seconds']:.1f}"]
        table.add_row(result["method"], f"{result['test_acc']:.2%}", *sizes, *seconds)
    return table


def positive_int(text: str) -> int:
    """Return a whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {text}")
    return value


def mapping(text: str) -> dict[str, Any]:
    """Return a mapping written in YAML or JSON."""
    value = yaml.safe_load(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"""must be a mapping such as '{{"*head": dense}}', got {text!r}""")
    return value


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments with the data set's defaults filled in; a wrong one ends the program before any training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dataset", choices=DATASETS, default="digits")
    add("--root", default="data", help="folder of the images, or where CIFAR is downloaded to")
    add("--preset", nargs="+", choices=PRESETS, help="compare dense with these; default: checkpoint, max, recompute")
    add("--sparsity", type=float, help="fraction of blocks to drop, in place of the preset's")
    add("--block-size", type=int, help="consecutive values in a block, in place of the preset's")
    add("--rules", type=mapping, help="rules of ActivationPruning, in YAML or JSON")
    add("--model", choices=list(MODELS))
    add("--dim", type=positive_int, help="channels of the model")
    add("--depth", type=positive_int, help="blocks of the model")
    add("--image-size", type=positive_int)
    add("--patch-size", type=positive_int)
    add("--epochs", type=positive_int)
    add("--batch-size", type=positive_int)
    add("--lr", type=float, help="highest learning rate")
    add("--seed", type=int, default=0)
    add("--num-workers", type=int, default=0, help="processes that load images")
    add("--accelerator", default="auto", help="auto, cpu, gpu, or another of Lightning's")
    add("--precision", default="bf16-mixed" if torch.cuda.is_available() else "32-true", help="one of Lightning's")
    add("--threads", type=positive_int, help="CPU threads")
    add("--limit-batches", type=positive_int, help="batches in an epoch, for a quick look")
    args = parser.parse_args(argv)
    for name, value in RECIPES[args.dataset].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.methods = ["dense", *dict.fromkeys(args.preset or ("checkpoint", "max", "recompute"))]
    try:
        args.on_cpu = make_trainer(args, []).strategy.root_device.type == "cpu"
        data = make_data(args)
        args.image_size, args.channels, args.num_classes = data.image_size, data.channels, data.num_classes
        for preset in (method for method in args.methods if method in PRESETS):
            convert(make_model(args), preset, **preset_changes(args))
    except (MisconfigurationException, ValueError, TypeError, OSError) as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Train by every method, print the table and return its content."""
    args, console = parse(argv), Console()
    if args.threads:
        torch.set_num_threads(args.threads)
    results = []
    for number, method in enumerate(args.methods, 1):
        console.print(f"Training {number} of {len(args.methods)}: {method}, {args.epochs} epochs", highlight=False)
        results.append(train(method, args))
    console.print(make_table(results, args))
    if args.dataset == "digits":
        console.print("Each training ran once: on so few images, accuracy differs by some points from seed to seed.")
    return results


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    noise = "does not have many workers", "LeafSpec.*is deprecated", "The kernels of lightning_actprune do not run here"
    warnings.filterwarnings("ignore", message="|".join(f".*{text}" for text in noise))
    main()
