"""Train an image classifier densely, with pruned activations and with activation checkpointing, and compare them.

    python examples/train.py                                            # digits, about a minute on two CPU cores
    python examples/train.py --preset balanced max                      # dense, and what these presets make of it
    python examples/train.py --preset max --rules '{"*head": dense}'    # max, but the head stays dense
    python examples/train.py --preset paper --sparsity 0.8 --block-size 16
    python examples/train.py --dataset cifar10 --root data/cifar10      # ResMLP-S12 on a GPU

Without `--methods` and `--preset` there are four trainings: `dense`, `paper` (the method of the paper: linear layers
alone, 60 % of the blocks dropped), `max` (the preset that saves most, every operator) and `checkpoint` (every block is
run again in backward). All start from the same seed: the same weights, and the same batches in the same order. To prune
takes one more callback.

The table in the end has for each of them the accuracy on the test images; the activations, which are all that one
training forward of the whole model keeps for backward, counted in the last epoch; the peak of memory over a step, which
only a GPU can tell; and the seconds of the whole fit, validation included. Of the digits there are 360 test images:
another seed moves the accuracy by a point or two, so it takes larger data to compare methods by it.
"""

from __future__ import annotations

import argparse
import functools
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import lightning as L
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from rich.console import Console
from rich.table import Table
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.classifier import ImageClassifier
from examples.data import DATASETS, ImageData
from examples.models import MODELS
from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, convert, revert
from lightning_actprune.config import PresetName

PRESETS = get_args(PresetName)
METHODS = ("dense", *PRESETS, "checkpoint")
COMPARED = ["dense", "paper", "max", "checkpoint"]
PRECISIONS = ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]
"""Of those of Lightning, the ones whose activations every preset can keep: in float64 only `paper` works."""

RECIPES: dict[str, dict[str, Any]] = {
    "digits": {"model": "resmlp_tiny", "patch_size": 2, "epochs": 5, "batch_size": 64, "lr": 2e-2, "threads": 1},
    "cifar10": {"model": "resmlp_s12", "patch_size": 4, "epochs": 20, "batch_size": 256, "lr": 1e-3},
    "cifar100": {"model": "resmlp_s12", "patch_size": 4, "epochs": 20, "batch_size": 256, "lr": 1e-3},
    "folder": {"model": "resmlp_s12", "patch_size": 16, "epochs": 20, "batch_size": 64, "lr": 1e-3},
}
"""Defaults of the options that depend on the data set.

The model for digits is too small to gain from a second thread, and loses much by waiting for it where cores are shared.
Its epochs are so few that four trainings take about a minute; its learning rate is the best of three for the dense one.
"""


def train(method: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train and test one model by `method`, one of `METHODS`, and return what came out."""
    L.seed_everything(args.seed, verbose=False)
    data = make_data(args)
    model = make_model(args, data)
    monitor = ActivationMemoryMonitor(verbose=False)  # the table in the end shows what it measured
    callbacks: list[L.Callback] = [monitor]
    if method in PRESETS:
        callbacks.append(ActivationPruning(method, **changes(args), verbose=0))
    elif method == "checkpoint":
        checkpoint_blocks(model.model)
    trainer = make_trainer(args, callbacks)
    start = time.perf_counter()
    trainer.fit(model, data)
    seconds = time.perf_counter() - start
    (test,) = trainer.test(model, data, verbose=False)
    report = monitor.report
    assert report is not None, "no training step has run"
    return {
        "method": method,
        "test_acc": test["test_acc"],
        "activation_bytes": report.stored_bytes,
        "peak_bytes": report.measured_peak_bytes,
        "seconds": seconds,
    }


def checkpoint_blocks(model: torch.nn.Module) -> None:
    """Let every block of `model` keep its input alone, and run again in backward.

    A batch norm sees each batch twice then, so the statistics that a `resnet_9x64` tests with follow faster.
    """
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def changes(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the command line changes in the presets."""
    given = {name: getattr(args, name) for name in ("sparsity", "block_size", "rules")}
    return {name: value for name, value in given.items() if value is not None}


def make_data(args: argparse.Namespace) -> ImageData:
    """Return the data set of the command line."""
    return ImageData(args.dataset, args.root, args.image_size, args.batch_size, args.num_workers, not args.no_download)


def make_model(args: argparse.Namespace, data: ImageData) -> ImageClassifier:
    """Return an untrained model for `data`."""
    shape = {"image_size": data.image_size, "channels": data.channels, "num_classes": data.num_classes}
    return ImageClassifier(args.model, patch_size=args.patch_size, lr=args.lr, **shape)


def make_trainer(args: argparse.Namespace, callbacks: list[L.Callback]) -> L.Trainer:
    """Return the Trainer of the command line; it draws a progress bar where somebody can watch it."""
    return L.Trainer(
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
        enable_progress_bar=Console().is_terminal,
        num_sanity_val_steps=0,
    )


def tabulate(results: list[dict[str, Any]], args: argparse.Namespace) -> Table:
    """Return the results as one table; activations also as a share of those of the dense training, if there is one."""
    notes = [f"{name.replace('_', ' ')} of the presets: {value}" for name, value in changes(args).items()]
    if args.on_cpu and any(result["method"] in PRESETS for result in results):
        notes.append("No kernels run on the CPU: seconds of presets are those of slow stand-ins, not of a GPU.")
    table = Table(title="Dense and compressed training", caption="\n".join(notes) or None)
    table.add_column("method", no_wrap=True)
    for title in ("accuracy", "activations MiB", "peak MiB", "seconds"):
        table.add_column(title, justify="right")
    dense = next((result["activation_bytes"] for result in results if result["method"] == "dense"), None)
    for result in results:
        share = f" ({result['activation_bytes'] / dense:.0%})" if dense else ""
        peak = result["peak_bytes"]
        table.add_row(
            result["method"],
            f"{result['test_acc']:.2%}",
            f"{result['activation_bytes'] / 2**20:.2f}{share}",
            "-" if peak is None else f"{peak / 2**20:.2f}",
            f"{result['seconds']:.1f}",
        )
    return table


def whole(least: int, hint: str) -> Callable[[str], int]:
    """Return what makes a whole number of at least `least` of an option; `hint` says what to do about an error."""

    def convert_text(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"must be a whole number >= {least}, got {text!r}. HINT: {hint}")
        return value

    return convert_text


def number(text: str) -> float:
    """Return an option as a float; what is allowed is checked by what takes it."""
    try:
        return float(text)
    except ValueError:
        hint = "HINT: write it with a point, such as 0.6."
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}. {hint}") from None


def positive(text: str) -> float:
    """Return an option as a float above zero."""
    value = number(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text!r}. HINT: 0.001 is a good start.")
    return value


def mapping(text: str) -> dict[str, Any]:
    """Return an option as a mapping, written in YAML, of which JSON is a part."""
    hint = """HINT: such as '{"*head": dense, "*.fc1": {bits: 4}}', patterns in quotes."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a mapping in YAML or JSON, got {text!r}. {hint}")
    return value


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]",  # short, since it stands above every error
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    of_data = "; by default the data set's"
    parser.add_argument("--dataset", choices=DATASETS, default="digits")
    parser.add_argument("--root", default="data", help="folder of the images, or where CIFAR is downloaded to")
    parser.add_argument("--no-download", action="store_true", help="never download CIFAR")
    size = whole(1, "it is the height and width of the images, such as 32.")
    parser.add_argument("--image-size", type=size, help=f"height and width{of_data}")
    workers = whole(0, "0 loads the images in the training's own process.")
    parser.add_argument("--num-workers", type=workers, default=0, help="loader processes")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--methods", nargs="+", choices=METHODS, help=f"what to train; by default {' '.join(COMPARED)}")
    chosen.add_argument("--preset", nargs="+", choices=PRESETS, help="train densely, and by these presets")
    parser.add_argument("--sparsity", type=number, help="fraction of blocks dropped, in place of the preset's")
    block = whole(1, "32 is a good start.")
    parser.add_argument("--block-size", type=block, help="consecutive values per block, in place of the preset's")
    parser.add_argument("--rules", type=mapping, help="how single layers are kept: the mapping ActivationPruning takes")
    parser.add_argument("--model", choices=list(MODELS), help=f"what is trained{of_data}")
    patch = whole(1, "it must divide the image size, such as 4.")
    parser.add_argument("--patch-size", type=patch, help=f"height and width of a patch{of_data}")
    epochs = whole(1, "one epoch is the least that trains anything; --limit-batches makes it shorter.")
    parser.add_argument("--epochs", type=epochs, help=f"passes over the training images{of_data}")
    batch = whole(1, "64 is a good start.")
    parser.add_argument("--batch-size", type=batch, help=f"images per step{of_data}")
    parser.add_argument("--lr", type=positive, help=f"highest learning rate{of_data}")
    seed = whole(0, "the same number gives the same training.")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--accelerator", default="auto", help="auto, cpu, gpu, or another one of Lightning's")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16-mixed" if gpu else "32-true")
    threads = whole(1, "leave it out for PyTorch's own choice.")
    parser.add_argument("--threads", type=threads, help="CPU threads; by default 1 for digits, else PyTorch's choice")
    limit = whole(1, "leave it out for all batches.")
    parser.add_argument("--limit-batches", type=limit, help="batches per epoch, to try something quickly")
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line, with what depends on the data set filled in, when all of it was found to be in order.

    Whatever is wrong ends the program here, before the first training, with a line that names the argument.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    for name, value in RECIPES[args.dataset].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.methods = list(dict.fromkeys(["dense", *args.preset] if args.preset else args.methods or COMPARED))
    if args.seed >= 2**32:
        parser.error(f"argument --seed: must be below 2**32, got {args.seed}. HINT: 0 will do.")
    check_presets(parser, args)
    got = f"Got {args.accelerator!r} and {args.precision!r}. HINT: --accelerator cpu --precision 32-true runs anywhere."
    trainer = refused(parser, "--accelerator, --precision", lambda: make_trainer(args, []), got)
    args.on_cpu = trainer.strategy.root_device.type == "cpu"
    found = f"Looked in {args.root!r}. HINT: CIFAR is downloaded there, unless --no-download forbids it."
    data = refused(parser, "--root", lambda: open_data(args), found)
    model = refused(parser, "--image-size, --patch-size", lambda: make_model(args, data))
    for preset in (method for method in args.methods if method in PRESETS):  # on the layers that there are
        refused(parser, "--rules, --preset", lambda preset=preset: convert(model, preset, **changes(args)))
        revert(model)
    return args


def check_presets(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program if what is changed in the presets is not allowed, or there is no preset to change."""
    presets = [method for method in args.methods if method in PRESETS]
    for name, value in changes(args).items():
        option = f"--{name.replace('_', '-')}"
        if not presets:
            parser.error(
                f"argument {option}: changes presets, but only {', '.join(args.methods)} would be trained, got "
                f"{value!r}. HINT: add --preset max, or leave {option} out."
            )
        for preset in presets:
            refused(parser, option, lambda change={name: value}, preset=preset: ActivationPruning(preset, **change))


def open_data(args: argparse.Namespace) -> ImageData:
    """Return the data set of the command line when its training images could be opened."""
    data = make_data(args)
    data.prepare_data()
    data.setup("fit")
    return data


def refused(parser: argparse.ArgumentParser, option: str, action: Callable[[], Any], advice: str = "") -> Any:
    """Return what `action` returns; if it refuses what `option` was given, end the program with its reason.

    The package says what to do about its errors; `advice` is for those of others, who do not.
    """
    try:
        return action()
    except (MisconfigurationException, ValueError, TypeError, RuntimeError, OSError) as error:
        reason = str(error) if "HINT" in str(error) else f"{str(error).rstrip('.')}. {advice}"
        return parser.error(f"argument {option}: {reason}")


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Train by every method, print the table and return its content."""
    args, console = parse(argv), Console()
    if args.threads:
        torch.set_num_threads(args.threads)
    results = []
    for i, method in enumerate(args.methods, 1):
        epochs = "1 epoch" if args.epochs == 1 else f"{args.epochs} epochs"
        console.print(f"Training {i} of {len(args.methods)}: {method}, {epochs}.", highlight=False)
        results.append(train(method, args))
    console.print(tabulate(results, args))
    return results


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*|.*LeafSpec.*is deprecated.*")
    main()
