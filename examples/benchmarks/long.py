"""The long trainings of the accuracy study, on all GPUs of a machine, several at a time on each.

    python examples/benchmarks/long.py --root data/cifar10 --gpus 4 --at-a-time 3 --seconds 560 --out long.json
    python examples/benchmarks/long.py --tasks gpt --gpus 4 --at-a-time 1 --seconds 560 --out long.json
    python examples/benchmarks/long.py --root data/cifar10 --tasks first tuned lora --gpus 4 --out long.json
    python examples/benchmarks/long.py --root data/cifar10 --tasks --larger larger.json --gpus 4 --out long.json

Every run is one of ``accuracy.py``, with the dense model and the presets in turn and seed by seed:

``resnet``, ``vit``, ``resmlp``
    Images, 60 or 100 epochs with RandAugment and mixup. The blocks of the ResNet are convolutions, which the preset of
    the paper leaves alone: there they are pruned by its sparsity.
``classes``, ``sparsities``
    A ResMLP with eight times the classes, and with more sparsities on the classes that there are.
``gpt``
    A GPT-2 small over the bytes of all text that the installed packages ship, 200 million of them.
``first``, ``tuned``, ``lora``
    A ViT on one half of the classes, whose weights go to ``--first``, and fine-tuned on the other half, in full or by
    updates of low rank. Fine-tuning waits for another call if these weights are not there yet.

With ``--larger``, the sizes of that file are trained too, which ``larger.py`` has found: each with the setting that has
room for it, and dense.

After ``--seconds`` runs leave their state in ``--states``; when the command is called again, they go on from there, and
what the file has already is not run again. In ``--states`` is also what each run prints.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import write_records
from examples.benchmarks.larger import words
from examples.benchmarks.study.settings import parse_setting
from examples.benchmarks.study.tasks import TASKS as STUDIED
from examples.benchmarks.study.tasks import digest, is_recorded, load_records, options_of, parse

IMAGES = "--task {} --strong --epochs {} --lr {}"
RESMLP = f"{IMAGES.format('resmlp', 100, 1e-3)} --compile"
"""Compiled, it takes half the time."""
GPT = "--task gpt --packages --clip 1"
"""Without a bound for its gradients, the loss of a GPT-2 small jumps, dense to 2.9, and takes a quarter of the training
to come back (`long_unclipped.json`)."""
SECOND = "--task vit --part second --epochs 15 --lr {} --start"
TASKS = {
    "resnet": IMAGES.format("resnet", 60, 1e-3),
    "vit": IMAGES.format("vit", 100, 4e-4),
    "resmlp": RESMLP,
    "sparsities": RESMLP,
    "classes": f"{RESMLP} --turned",
    "gpt": f"{GPT} --dim 768 --depth 12 --context 1024 --batch-size 16 --epochs 163 --lr 3e-4 --compile",
    "first": "--task vit --part first --strong --epochs 60 --lr 4e-4",
    "tuned": SECOND.format(1e-4),
    "lora": f"--lora {SECOND.format(1e-3)}",
}
"""By name, what ``accuracy.py`` is told."""
SETTINGS = "dense", "preset:balanced", "preset:max", "preset:recompute", "preset:paper"
AXES = "dim", "depth", "batch-size", "patch-size", "context"
CONVOLUTIONS = "0.6:32:same"
SETTINGS_OF = {
    "resnet": (*SETTINGS[:-1], CONVOLUTIONS),
    "sparsities": ("0.6:32:same", "0.7:32:same", "0.8:32:same"),
    "classes": ("dense", "preset:max", "0.6:32:same", "0.8:32:same"),
}
"""Of tasks that have others than ``SETTINGS``."""
LEAVE_SECONDS = 30.0
"""Between the end of a run's time and that of ours: what it takes to import everything and to write a state."""
START_SECONDS = 90.0
"""Without so many left, no run starts: it would compile, and not be cut before its first epoch is over."""
SCRIPT = Path(__file__).with_name("accuracy.py")
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable that names the GPUs that a process sees."""


class Run(NamedTuple):
    """One training.

    Args:
        name: What it is called.
        words: What ``accuracy.py`` is told, but for data, setting and seed.
        setting: One of the study.
        seed: Of the training.
        save: File that its weights go to.
    """

    name: str
    words: tuple[str, ...]
    setting: str
    seed: int
    save: Path | None = None

    @property
    def key(self) -> dict[str, Any]:
        """What a record of it says, but for the data."""
        args = parse(argparse.ArgumentParser(), [*self.words, *self.given(Path())], settings=False)
        said = {name: getattr(args, name) for name in ("task", "epochs", "lr", "compile", "clip")} | options_of(args)
        said |= {name: getattr(args, name) or None for name in ("lora", "turned")}
        said["batch"] = args.batch_size or STUDIED[args.task].batch
        data = {"dataset": "packages" if args.packages else "images", "start": args.start and digest(args.start)}
        strong = {"augmentation": "RandAugment and mixup" if args.strong else None}
        return {**asdict(parse_setting(self.setting)), **said, **data, **strong, "seed": self.seed}

    def given(self, root: Path | None) -> list[str]:
        """Return what names the folder of images, if it takes one."""
        return [] if root is None or "gpt" in self.words else ["--root", str(root)]

    def command(self, out: Path, seconds: float, args: argparse.Namespace) -> list[str]:
        """Return the command line."""
        words = [sys.executable, str(SCRIPT), *self.words, *self.given(args.root)]
        words += ["--settings", self.setting, "--seeds", str(self.seed), "--out", str(out)]
        words += ["--save", str(self.save)] if self.save else []
        return [*words, "--states", str(args.states), "--time-budget-s", f"{seconds:.0f}"]

    def is_done(self, records: Sequence[dict[str, Any]]) -> bool:
        """Return whether it need not be made."""
        return is_recorded(self.key, records) and (self.save is None or self.save.is_file())


def records_of(run: Run, gpu: int, end: float, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run a training on a GPU until it ends or the time is up; return its record, if there is one."""
    seconds = end - time.monotonic() - LEAVE_SECONDS
    if seconds < START_SECONDS:
        return []
    out = Path(mkdtemp(dir=folder)) / "record.json"
    command = run.command(out, seconds, args)
    environment = {**os.environ, VISIBLE: visible(gpu)}
    args.states.mkdir(parents=True, exist_ok=True)
    with (args.states / f"{run.name}_{run.setting}_{run.seed}.log".replace(":", "_")).open("w") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"{shlex.join(command)}\n{done.stderr[-2000:]}", file=sys.stderr, flush=True)
    return load_records(out)


def visible(gpu: int) -> str:
    """Return what tells a run to see this one of the GPUs that we see."""
    names = os.environ.get(VISIBLE)
    return names.split(",")[gpu] if names else str(gpu)


def run_all(runs: Sequence[Run], args: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    """Run trainings on all GPUs, and write each record as soon as it is there."""
    end, free = time.monotonic() + args.seconds, SimpleQueue[int]()
    for gpu in list(range(args.gpus)) * args.at_a_time:
        free.put(gpu)

    def on_one(run: Run) -> list[dict[str, Any]]:
        gpu = free.get()
        try:
            return records_of(run, gpu, end, args, folder)
        finally:
            free.put(gpu)

    with TemporaryDirectory() as name, ThreadPoolExecutor(args.gpus * args.at_a_time) as pool:
        folder = Path(name)
        waiting = {pool.submit(on_one, run): run for run in runs}
        for future in as_completed(waiting):
            run, found = waiting[future], future.result()
            print(f"{run.name} {run.setting}, seed {run.seed}: {'done' if found else 'not done'}", flush=True)
            records += found
            write_records(args.out, records)


def needs_first(task: str) -> bool:
    """Return whether a task begins with the weights of another."""
    return TASKS[task].endswith("--start")


def runs_of(args: argparse.Namespace) -> Iterator[Run]:
    """Yield all runs that are asked for, seed by seed, but for those that need weights that are not there."""
    sizes = json.loads(args.larger.read_text()) if args.larger else []
    if "first" in args.tasks:
        yield Run("first", tuple(TASKS["first"].split()), "dense", args.seeds[0], args.first)
    for seed in args.seeds:
        for task in args.tasks:
            if task == "first" or (needs_first(task) and not args.first.is_file()):
                continue
            told = (*TASKS[task].split(), *([str(args.first)] if needs_first(task) else []))
            for setting in args.settings or SETTINGS_OF.get(task, SETTINGS):
                yield Run(task, told, setting, seed)
        for size in sizes:
            if size["axis"] is None or (size["axis"] in args.axes and size["size"] != size["dense_size"]):
                name = "_".join(str(size[key]) for key in ("task", "axis", "size") if size[key] is not None)
                for setting in dict.fromkeys((size["setting"], "dense")):
                    yield Run(name, tuple(words(size)), setting, seed)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder of images, for all tasks but gpt")
    parser.add_argument("--tasks", nargs="*", default=["resnet", "vit", "resmlp"], choices=TASKS)
    parser.add_argument("--settings", nargs="+", metavar="SETTING", help="in place of the tasks' own")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--larger", type=Path, help="file of larger.py, whose sizes are trained too")
    parser.add_argument("--axes", nargs="+", default=["dim", "depth"], choices=AXES, help="of these sizes")
    parser.add_argument("--gpus", type=int, default=1, help="how many of those that are visible")
    parser.add_argument("--at-a-time", type=int, default=1, help="runs on each of them")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which runs leave their state and end")
    parser.add_argument("--states", type=Path, default=Path("states"), help="folder for these")
    parser.add_argument("--first", type=Path, default=Path("first.pt"), help="weights that fine-tuning begins with")
    parser.add_argument("--out", type=Path, default=Path("long.json"))
    args = parser.parse_args(argv)
    if args.root is None and any("gpt" not in run.words for run in runs_of(args)):
        parser.error("--root must be a folder of images with train/ and test/ for all tasks but gpt")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing; return 1 if something still is."""
    args = parsed(argv)
    records: list[dict[str, Any]] = load_records(args.out)
    wanted = list({json.dumps(run.key, sort_keys=True): run for run in runs_of(args)}.values())
    waiting = [task for task in args.tasks if needs_first(task) and not args.first.is_file()]
    run_all([run for run in wanted if not run.is_done(records)], args, records)
    for task in waiting:
        print(f"{task}: not begun, since {args.first} was not there")
    return int(bool(waiting) or not all(run.is_done(records) for run in wanted))


if __name__ == "__main__":
    sys.exit(main())
