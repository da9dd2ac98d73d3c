"""The long trainings of the accuracy study, on all GPUs of a machine, several at a time on each.

    python examples/benchmarks/long.py --root data/cifar10 --gpus 4 --at-a-time 3 --seconds 560 --out long.json
    python examples/benchmarks/long.py --tasks gpt --gpus 4 --at-a-time 1 --seconds 560 --out long.json
    python examples/benchmarks/long.py --root data/cifar10 --tasks tuned lora --gpus 4 --at-a-time 3 --out long.json
    python examples/benchmarks/long.py --root data/cifar10 --tasks --larger larger.json --gpus 4 --out long.json

Every run is one of ``accuracy.py``, with the dense model and the presets in turn and seed by seed:

``resnet``, ``vit``, ``resmlp``
    Images, 60 or 100 epochs with RandAugment and mixup. The blocks of the ResNet are convolutions, which the preset of
    the paper leaves alone: there they are pruned by its sparsity.
``classes``, ``sparsities``
    A ResMLP with eight times the classes, and with more sparsities on the classes that there are.
``gpt``
    A GPT-2 small over the bytes of all text that the installed packages ship, 200 million of them.
``tuned``, ``lora``
    A ViT fine-tuned on one half of the classes, in full or by updates of low rank. It begins with the weights of a
    dense training on the other half, which is made first if ``--first`` does not have them.

With ``--larger``, the sizes of that file are trained too, which ``larger.py`` has found.

After ``--seconds`` runs leave their state in ``--states``; when the command is called again, they go on from there, and
what the file has already is not run again.
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
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import write_records
from examples.benchmarks.study.settings import parse_setting
from examples.benchmarks.study.tasks import TASKS as STUDIED
from examples.benchmarks.study.tasks import digest, is_recorded, load_records, options_of, parse

IMAGES = "--task {} --strong --epochs {} --lr {}"
RESMLP = f"{IMAGES.format('resmlp', 100, 1e-3)} --compile"
"""Compiled, it takes half the time."""
FIRST = "--task vit --part first --strong --epochs 60 --lr 4e-4 --settings dense --seeds 0"
"""The training that fine-tuning begins with."""
SECOND = "--task vit --part second --epochs 15 --lr {} --start"
TASKS = {
    "resnet": IMAGES.format("resnet", 60, 1e-3),
    "vit": IMAGES.format("vit", 100, 4e-4),
    "resmlp": RESMLP,
    "sparsities": RESMLP,
    "classes": f"{RESMLP} --turned",
    "gpt": "--task gpt --packages --dim 768 --depth 12 --context 1024 --batch-size 16 --epochs 163 --lr 4e-4 --compile",
    "tuned": SECOND.format(1e-4),
    "lora": f"--lora {SECOND.format(1e-3)}",
}
"""By name, what ``accuracy.py`` is told."""
SETTINGS = "dense", "preset:balanced", "preset:max", "preset:recompute", "preset:paper"
CONVOLUTIONS = "0.6:32:same"
SETTINGS_OF = {
    "resnet": (*SETTINGS[:-1], CONVOLUTIONS),
    "sparsities": ("0.6:32:same", "0.7:32:same", "0.8:32:same"),
    "classes": ("dense", "preset:max", "0.6:32:same", "0.8:32:same"),
}
"""Of tasks that have others than ``SETTINGS``."""
LEAVE_SECONDS = 15.0
"""Between the end of a run's time and that of ours: what it takes to write a state."""
SCRIPT = Path(__file__).with_name("accuracy.py")


class Run(NamedTuple):
    """One training.

    Args:
        name: What it is called.
        words: What ``accuracy.py`` is told, but for data, setting and seed.
        setting: One of the study.
        seed: Of the training.
    """

    name: str
    words: tuple[str, ...]
    setting: str
    seed: int

    @property
    def key(self) -> dict[str, Any]:
        """What a record of it says, but for the data."""
        args = parse(argparse.ArgumentParser(), [*self.words, *self.given(Path())], settings=False)
        said = {name: getattr(args, name) for name in ("task", "epochs", "lr", "compile")} | options_of(args)
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
        return [*words, "--states", str(args.states), "--time-budget-s", f"{seconds:.0f}"]


def records_of(run: Run, gpu: int, end: float, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run a training on a GPU until it ends or the time is up; return its record, if there is one."""
    seconds = end - time.monotonic() - LEAVE_SECONDS
    if seconds <= 0:
        return []
    out = folder / f"{run.name}_{run.setting.replace(':', '_')}_{run.seed}.json"
    called(run.command(out, seconds, args), gpu)
    return load_records(out)


def called(command: Sequence[str], gpu: int) -> None:
    """Run a command on a GPU, and say so if it fails."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(f"{shlex.join(command)}\n{done.stderr[-2000:]}", file=sys.stderr, flush=True)


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


def runs_of(args: argparse.Namespace) -> Iterator[Run]:
    """Yield all runs that are asked for, seed by seed."""
    sizes = json.loads(args.larger.read_text()) if args.larger else []
    for seed in args.seeds:
        for task in args.tasks:
            words = TASKS[task].split()
            words += [str(args.first)] if words[-1] == "--start" else []
            for setting in args.settings or SETTINGS_OF.get(task, SETTINGS):
                yield Run(task, tuple(words), setting, seed)
        for size in sizes:
            if size["axis"] in (None, *args.axes):
                yield Run(f"larger_{size['axis']}", tuple(size["words"].split()), size["setting"], seed)


def make_first(args: argparse.Namespace) -> None:
    """Train what fine-tuning begins with, if it is not there yet."""
    if not args.first.is_file() and any(TASKS[task].endswith("--start") for task in args.tasks):
        args.first.parent.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, str(SCRIPT), *FIRST.split(), "--root", str(args.root), "--save", str(args.first)]
        called([*words, "--out", str(args.first.with_suffix(".json"))], 0)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder of images, for all tasks but gpt")
    parser.add_argument("--tasks", nargs="*", default=["resnet", "vit", "resmlp"], choices=TASKS)
    parser.add_argument("--settings", nargs="+", metavar="SETTING", help="in place of the tasks' own")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--larger", type=Path, help="file of larger.py, whose sizes are trained too")
    parser.add_argument("--axes", nargs="+", default=["dim", "depth"], help="of these sizes")
    parser.add_argument("--gpus", type=int, default=1, help="how many there are")
    parser.add_argument("--at-a-time", type=int, default=1, help="runs on each of them")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which runs leave their state and end")
    parser.add_argument("--states", type=Path, default=Path("states"), help="folder for these")
    parser.add_argument("--first", type=Path, default=Path("first.pt"), help="weights that fine-tuning begins with")
    parser.add_argument("--out", type=Path, default=Path("long.json"))
    args = parser.parse_args(argv)
    if args.root is None and not {"gpt"}.issuperset(args.tasks):
        parser.error("--root must be a folder of images with train/ and test/ for all tasks but gpt")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing; return 1 if something still is."""
    args = parsed(argv)
    records: list[dict[str, Any]] = load_records(args.out)
    make_first(args)
    wanted = list(runs_of(args))
    run_all([run for run in wanted if not is_recorded(run.key, records)], args, records)
    return int(not all(is_recorded(run.key, records) for run in wanted))


if __name__ == "__main__":
    sys.exit(main())
