"""How much larger a model trains in the memory of a dense one: wider, deeper, with more tokens or more samples.

    python examples/benchmarks/larger.py --task vit --root data/cifar10 --out larger.json
    python examples/benchmarks/larger.py --task gpt --out larger.json
    python examples/benchmarks/long.py --larger larger.json --root data/cifar10 --out long.json

The memory is the peak of a captured training step of ``accuracy.py``, with weights, gradients and the optimizer's state
in it. For each setting and axis the largest size is searched whose peak is not above that of the dense model, among
the multiples that are tried, which lie close to each other. Nothing is trained; ``long.py --larger`` does that, for as
long as the dense model takes: a size is trained for

    epochs = epochs of dense * time of a dense epoch / time of its epoch

with its learning rates over these. That of Adam follows the size: of a model ``r`` times as wide it is ``1 / r``
times the dense one's (Yang et al. 2022, arXiv 2203.03466), of one ``r`` times as deep ``r ** -0.5`` (Yang et al. 2023,
arXiv 2310.02244), and of one with ``r`` times the batch ``r ** 0.5`` (Malladi et al. 2022, arXiv 2205.10287). Steps are
timed alone on the GPU. What the file has already is not searched again.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import statistics
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import MIB, environment, require_gpu, write_records
from examples.benchmarks.study.settings import parse_setting, prune
from examples.benchmarks.study.tasks import Study, is_recorded, load_records, open_study, parse, says
from examples.benchmarks.study.training import Data, TrainStep, allocated_beside, first_choices
from examples.benchmarks.summaries import Record

SETTINGS = "preset:balanced", "preset:max", "preset:recompute"
REPLAYS = 20
EXPONENTS = {"dim": -1.0, "depth": -0.5, "batch-size": 0.5}
"""By axis, how the learning rate follows the size."""


class Family(NamedTuple):
    """A model that comes in sizes.

    Args:
        words: How ``accuracy.py`` is told to train it, but for its size, the learning rate and the epochs.
        lr: Of the dense one.
        epochs: For which the dense one is trained.
        sizes: Of each axis, which is an option of ``accuracy.py``: the dense model's, and those that are tried.
    """

    words: str
    lr: float
    epochs: int
    sizes: dict[str, Sequence[int]]


FAMILIES = {
    "vit": Family(
        "--task vit --strong",
        4e-4,
        40,
        {
            "dim": range(384, 1537, 64),
            "depth": range(8, 65),
            "patch-size": (4, 2, 1),
            "batch-size": range(256, 4097, 64),
        },
    ),
    "gpt": Family(
        "--task gpt --packages --clip 1",
        1e-3,
        60,
        {
            "dim": range(384, 1537, 64),
            "depth": range(6, 49),
            "context": range(256, 4097, 64),
            "batch-size": range(64, 1025, 16),
        },
    ),
}


class Step(NamedTuple):
    """What a step needs."""

    peak_mib: float
    step_ms: float
    batches: int
    """Steps of an epoch."""

    @property
    def epoch_ms(self) -> float:
        """How long an epoch takes."""
        return self.batches * self.step_ms


TOO_LARGE = Step(math.inf, math.inf, 0)
"""Of what does not fit into the GPU."""


def measured(study: Study, text: str) -> Step:
    """Return what a captured step of a model needs with a setting."""
    # Or the first step that is captured has them in its peak, and the others find them there.
    torch._C._cuda_clearCublasWorkspaces()
    data, recipe = study.data, study.recipe
    model = study.build(0)
    choices = first_choices(data, recipe)
    prune(model, parse_setting(text), data.batch(choices), recipe.precision)
    before = allocated_beside(model)
    step = TrainStep(model, data, recipe)
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step(choices, 0.0)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    assert step.peak_bytes is not None
    peak_mib, step_ms = round((step.peak_bytes - before) / MIB, 2), round(statistics.median(times), 3)
    return Step(peak_mib, step_ms, recipe.batches)


def largest(sizes: Sequence[int], limit: float, measure: Callable[[int], Step]) -> tuple[int, Step]:
    """Return the last of ``sizes`` whose peak is at most ``limit``, and what it needs; the first one fits."""
    found: dict[int, Step] = {}

    def peak(size: int) -> float:
        found[size] = measure(size)
        return found[size].peak_mib

    number = bisect_right(sizes, limit, lo=1, key=peak) - 1
    size = sizes[number]
    return size, found[size] if size in found else measure(size)


def rate(size: Record) -> float:
    """Return the learning rate of a size that was found, to two digits."""
    lr = FAMILIES[size["task"]].lr
    if size["axis"] is None:
        return lr
    return float(f"{lr * (size['size'] / size['dense_size']) ** EXPONENTS.get(size['axis'], 0.0):.2g}")


def words(size: Record) -> list[str]:
    """Return how ``accuracy.py`` is told to train a size that was found."""
    given = [] if size["axis"] is None else [f"--{size['axis']}", str(size["size"])]
    recipe = ["--lr", f"{rate(size):g}", "--epochs", str(size["epochs"])]
    return [*FAMILIES[size["task"]].words.split(), *given, *recipe]


class Search:
    """Measures sizes of a task on data that are read once.

    Args:
        task: One of ``FAMILIES``.
        root: Folder of images.
    """

    def __init__(self, task: str, root: Path | None) -> None:
        self.task, self.root, self.family = task, root, FAMILIES[task]
        self.data: Data | None = None

    def step(self, axis: str, size: int, setting: str) -> Step:
        """Return what a step of one size needs."""
        given = [] if self.root is None else ["--root", str(self.root)]
        told = [*self.family.words.split(), f"--{axis}", str(size), *given]
        args = parse(argparse.ArgumentParser(), told, settings=False)
        # The context is the length of the windows that the text is cut into.
        study = open_study(args, None if axis == "context" else self.data)
        if axis != "context":
            self.data = study.data
        try:
            found = measured(study, setting)
        except torch.OutOfMemoryError:
            found = TOO_LARGE
        gc.collect()  # converted layers are in cycles
        torch.cuda.empty_cache()
        print(f"{self.task} {setting}, {axis} {size}: {found}", flush=True)
        return found

    def dense(self) -> dict[str, Any]:
        """Return the record of the dense model."""
        axis, sizes = next(iter(self.family.sizes.items()))
        found = self.step(axis, sizes[0], "dense")
        head = {"task": self.task, "axis": None, "setting": "dense", "size": None}
        return {**head, **found._asdict(), "epochs": self.family.epochs}

    def largest(self, axis: str, setting: str, dense: Record) -> dict[str, Any]:
        """Return the record of the largest size on an axis that needs no more memory than the dense model."""
        sizes = self.family.sizes[axis]
        size, found = largest(sizes, dense["peak_mib"], lambda size: self.step(axis, size, setting))
        epochs = max(1, round(dense["epochs"] * dense["batches"] * dense["step_ms"] / found.epoch_ms))
        head = {"task": self.task, "axis": axis, "setting": setting, "dense_size": sizes[0], "size": size}
        return {**head, **found._asdict(), "epochs": epochs}


def main(argv: Sequence[str] | None = None) -> None:
    """Search the sizes of a task and write their records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=FAMILIES, required=True)
    parser.add_argument("--root", type=Path, help="folder of images with train/ and test/, for vit")
    parser.add_argument("--axes", nargs="+", metavar="AXIS", help="by default all of the task")
    parser.add_argument("--settings", nargs="+", default=SETTINGS, metavar="SETTING")
    parser.add_argument("--out", type=Path, default=Path("larger.json"))
    args = parser.parse_args(argv)
    known = FAMILIES[args.task].sizes
    axes = args.axes or list(known)
    if not set(axes) <= set(known):
        parser.error(f"--axes must be of {', '.join(known)} for --task {args.task}, got {', '.join(axes)}")
    require_gpu()
    records = load_records(args.out)
    search = Search(args.task, args.root)

    def add(axis: str | None, setting: str, find: Callable[[], Record]) -> Record:
        """Find what the file lacks, and write it."""
        key = {"task": args.task, "axis": axis, "setting": setting}
        if not is_recorded(key, records):
            records.append({**find(), **environment()})
            write_records(args.out, records)
        return next(record for record in records if says(record, key))

    dense = add(None, "dense", search.dense)
    for axis, setting in itertools.product(axes, args.settings):
        add(axis, setting, partial(search.largest, axis, setting, dense))


if __name__ == "__main__":
    main()
