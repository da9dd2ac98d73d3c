"""The long trainings of the accuracy study, on all GPUs of a machine, several at a time on each.

    python examples/benchmarks/long.py --root data/cifar10 --gpus 4 --at-a-time 3 --seconds 560 --out long.json
    python examples/benchmarks/long.py --tasks gpt --gpus 4 --at-a-time 1 --seconds 560 --out long.json

Every run is one of ``accuracy.py``, with the dense model and the presets in turn and seed by seed: images 60 or 100
epochs with RandAugment and mixup, a GPT-2 small over the bytes of all text that the installed packages ship, 200
million of them. After ``--seconds`` runs leave their state in ``--states``; when the command is called again, they go
on from there, and what the file has already is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import write_records
from examples.benchmarks.study.settings import parse_setting
from examples.benchmarks.study.tasks import is_recorded, load_records, parse

IMAGES = "--task {} --strong --epochs {} --lr {}"
TASKS = {
    "resnet": IMAGES.format("resnet", 60, 1e-3),
    "vit": IMAGES.format("vit", 100, 4e-4),
    "resmlp": IMAGES.format("resmlp", 100, 1e-3),
    "gpt": "--task gpt --packages --dim 768 --depth 12 --context 1024 --batch-size 16 --epochs 163 --lr 4e-4 --compile",
}
"""By name, what ``accuracy.py`` is told."""
SETTINGS = "dense", "preset:balanced", "preset:max", "preset:recompute", "preset:paper"
LEAVE_SECONDS = 15.0
"""Between the end of a run's time and that of ours: what it takes to write a state."""
SCRIPT = Path(__file__).with_name("accuracy.py")


class Run(NamedTuple):
    """One training."""

    task: str
    setting: str
    seed: int

    @property
    def key(self) -> dict[str, Any]:
        """What a record of it says, but for the data."""
        args = parse(argparse.ArgumentParser(), [*self.words, *self.given(Path())], settings=False)
        said = {name: getattr(args, name) for name in ("task", "epochs", "lr", "compile", "dim", "depth")}
        data = {"dataset": "packages" if args.packages else "images", "start": None}
        strong = {"augmentation": "RandAugment and mixup" if args.strong else None}
        return {**asdict(parse_setting(self.setting)), **said, **data, **strong, "seed": self.seed}

    def given(self, root: Path | None) -> list[str]:
        """Return what names the folder of images, if it takes one."""
        return [] if root is None or self.task == "gpt" else ["--root", str(root)]

    @property
    def words(self) -> list[str]:
        """What tells its task from others on the command line."""
        return TASKS[self.task].split()

    def command(self, root: Path | None, out: Path, states: Path, seconds: float) -> list[str]:
        """Return the command line."""
        words = [sys.executable, str(SCRIPT), *self.words, *self.given(root)]
        words += ["--settings", self.setting, "--seeds", str(self.seed), "--out", str(out)]
        return [*words, "--states", str(states), "--time-budget-s", f"{seconds:.0f}"]


def records_of(run: Run, gpu: int, end: float, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run a training on a GPU until it ends or the time is up; return its record, if there is one."""
    seconds = end - time.monotonic() - LEAVE_SECONDS
    if seconds <= 0:
        return []
    out = folder / f"{run.task}_{run.setting.replace(':', '_')}_{run.seed}.json"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
    command = run.command(args.root, out, args.states, seconds)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(f"{shlex.join(command)}\n{done.stderr[-2000:]}", file=sys.stderr, flush=True)
    return load_records(out)


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
            print(f"{run.task} {run.setting}, seed {run.seed}: {'done' if found else 'not done'}", flush=True)
            records += found
            write_records(args.out, records)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing; return 1 if something still is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder of images, for all tasks but gpt")
    parser.add_argument("--tasks", nargs="+", default=["resnet", "vit", "resmlp"], choices=TASKS)
    parser.add_argument("--settings", nargs="+", default=SETTINGS, metavar="SETTING")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--gpus", type=int, default=1, help="how many there are")
    parser.add_argument("--at-a-time", type=int, default=1, help="runs on each of them")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which runs leave their state and end")
    parser.add_argument("--states", type=Path, default=Path("states"), help="folder for these")
    parser.add_argument("--out", type=Path, default=Path("long.json"))
    args = parser.parse_args(argv)
    if args.root is None and set(args.tasks) != {"gpt"}:
        parser.error("--root must be a folder of images with train/ and test/ for all tasks but gpt")
    records: list[dict[str, Any]] = json.loads(args.out.read_text()) if args.out.is_file() else []
    wanted = [
        Run(task, setting, seed) for seed, task, setting in itertools.product(args.seeds, args.tasks, args.settings)
    ]
    run_all([run for run in wanted if not is_recorded(run.key, records)], args, records)
    return int(not all(is_recorded(run.key, records) for run in wanted))


if __name__ == "__main__":
    sys.exit(main())
