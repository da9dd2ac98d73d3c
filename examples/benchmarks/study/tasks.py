"""The tasks: `resmlp`, `vit` and `resnet` classify the images of a folder, `gpt` continues Python's standard library.

Models, data and recipe are put together here from a command line that the study and the fidelity of gradients share.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from examples.benchmarks.study.images import Images
from examples.benchmarks.study.settings import parse_setting
from examples.benchmarks.study.text import Text, packages_text
from examples.benchmarks.study.training import Data, Recipe
from examples.benchmarks.third_party import add_lora
from examples.models import LANGUAGE_MODELS, MODELS, build_model

HEAD = "head"
"""What all models call their last layer."""


class Task(NamedTuple):
    """Defaults of a task."""

    model: str
    batch: int


TASKS = {
    "resmlp": Task("resmlp_s12", 256),
    "vit": Task("vit_8x384", 256),
    "resnet": Task("resnet_9x64", 256),
    "gpt": Task("gpt_6x384", 64),
}


@dataclass(frozen=True)
class Study:
    """What the runs of one command have in common.

    Args:
        task: Name of the task.
        model: Name of the model.
        options: Its options that the data do not determine.
        data: The data set.
        recipe: How to train.
        start: File of the weights to begin with, but for those of the head, which is new.
        lora: Whether linear layers are frozen and get an update of low rank, and all but the head is frozen too.
    """

    task: str
    model: str
    options: dict[str, int | None]
    data: Data
    recipe: Recipe
    start: Path | None = None
    lora: bool = False

    def build(self, seed: int) -> nn.Module:
        """Return the model with the weights of `seed`, or those to begin with."""
        torch.manual_seed(seed)
        options = {name: value for name, value in self.options.items() if value is not None}
        model = build_model(self.model, **self.data.shape, **options)
        if self.start is not None:
            weights = torch.load(self.start, map_location="cpu", weights_only=True)
            weights |= {name: value for name, value in model.state_dict().items() if name.startswith(f"{HEAD}.")}
            model.load_state_dict(weights)
        if self.lora:
            add_lora(model, HEAD)
        return model.to(self.data.device)

    def describe(self) -> dict[str, Any]:
        """Return what identifies the study in the records."""
        start = None if self.start is None else digest(self.start)
        begins = {"start": start, "lora": self.lora or None}
        known = {"task": self.task, "model": self.model, **self.options, **self.data.facts, **asdict(self.recipe)}
        return {**known, **begins}


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None, settings: bool = True) -> argparse.Namespace:
    """Return the command line of `parser` with the options that say what is trained how, and with what settings."""
    parser.add_argument("--task", choices=sorted(TASKS), default="resmlp")
    parser.add_argument("--root", type=Path, help="folder of images; for gpt of *.py files, by default Python's own")
    parser.add_argument("--model", choices=sorted(MODELS | LANGUAGE_MODELS), help="by default the task's")
    parser.add_argument("--strong", action="store_true", help="RandAugment and mixup for images")
    parser.add_argument("--turned", action="store_true", help="eight times the classes: images turned, and negatives")
    parser.add_argument("--part", choices=["first", "second"], help="half of the classes of images")
    parser.add_argument("--start", type=Path, help="weights to begin with, but for those of the head; see --save")
    parser.add_argument("--lora", action="store_true", help="with --start: updates of low rank for linear layers alone")
    parser.add_argument("--packages", action="store_true", help="for gpt: the text that installed packages ship")
    parser.add_argument("--patch-size", type=int, default=4, help="of images; not for resnet")
    parser.add_argument("--context", type=int, default=256, help="bytes of text that the model sees at a time")
    parser.add_argument("--dim", type=int, help="channels, in place of the model's")
    parser.add_argument("--depth", type=int, help="blocks, in place of the model's")
    parser.add_argument("--epochs", type=int, default=20, help="for gpt, an epoch is 75 batches")
    parser.add_argument("--batch-size", type=int, help="by default 256 images or 64 windows of text")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument(
        "--clip", type=float, metavar="NORM", help="of all gradients, above which they are made smaller"
    )
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="compile the blocks")
    if settings:
        parser.add_argument("--settings", nargs="+", type=parse_setting, metavar="dense|S:B:FORMAT", required=True)
    parser.add_argument("--limit-batches", type=int, help="train and test on this many batches only")
    args = parser.parse_args(argv)
    if args.task != "gpt" and args.root is None:
        parser.error(f"--root must be a folder of images with train/ and test/ for --task {args.task}")
    if args.task == "gpt" and (args.strong or args.part or args.turned):
        parser.error("--strong, --part and --turned are for images, and gpt reads text")
    if args.lora and (args.start is None or args.task == "resnet"):
        parser.error("--lora needs --start, and a model of linear layers, which resnet is not")
    if args.packages and (args.task != "gpt" or args.root is not None):
        parser.error("--packages is the text of --task gpt, in place of --root")
    if args.model is not None and not args.model.startswith(f"{args.task}_"):
        parser.error(f"--model must be one of --task {args.task}, got {args.model}")
    return args


def open_study(args: argparse.Namespace, data: Data | None = None) -> Study:
    """Return the study that the command line asks for, its data loaded, if they are not given."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # With cuDNN's attention, which torch 2.11 prefers on an H200, the captured training of the ViT, a dense one too,
    # has a loss of NaN from its first epoch on; a single eager step has not.
    torch.backends.cuda.enable_cudnn_sdp(False)
    task, data = TASKS[args.task], data or open_data(args, device)
    batch = args.batch_size or task.batch
    batches = data.epoch_batches(batch)
    batches = min(batches, args.limit_batches or batches)
    how = args.lr, args.weight_decay, args.precision, args.compile, args.clip
    recipe = Recipe(args.epochs, batches, batch, *how)
    return Study(args.task, args.model or task.model, options_of(args), data, recipe, args.start, args.lora)


def options_of(args: argparse.Namespace) -> dict[str, int | None]:
    """Return the options of the model that the data do not determine."""
    size = {"dim": args.dim, "depth": args.depth}
    if args.task == "gpt":
        return {"context": args.context, **size}
    return size if args.task == "resnet" else {"patch_size": args.patch_size, **size}


def open_data(args: argparse.Namespace, device: torch.device) -> Data:
    """Return the data of the task, loaded."""
    if args.task == "gpt":
        return Text(args.root, device, args.context, packages_text() if args.packages else None)
    return Images(args.root, device, strong=args.strong, part=args.part, turned=args.turned)


def digest(path: Path) -> str:
    """Return the start of a hash of a file, by which records name it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def load_records(path: Path) -> list[dict[str, Any]]:
    """Return the records that are in `path` already."""
    return json.loads(path.read_text()) if path.is_file() else []


def is_recorded(key: dict[str, Any], records: Sequence[dict[str, Any]]) -> bool:
    """Return whether a record says all that `key` says."""
    return any(says(record, key) for record in records)


def says(record: dict[str, Any], key: dict[str, Any]) -> bool:
    """Return whether a record says all that `key` says; a field that is not there is `None`."""
    return all(record.get(name) == value for name, value in key.items())
