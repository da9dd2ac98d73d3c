"""Accuracy study: the same training, dense and with pruned activations, over several seeds, on one GPU.

    python examples/benchmarks/accuracy.py --root data/cifar10 --settings dense 0.5:16:same 0.6:32:same
    python examples/benchmarks/accuracy.py --root data/cifar10 --task vit --settings dense 0.5:16:same --seeds 0 1
    python examples/benchmarks/accuracy.py --root data/cifar10 --task resnet --settings dense 0.6:32:same max+others
    python examples/benchmarks/accuracy.py --task gpt --settings dense 0.5:16:same --compile

A setting is `dense`, a preset of linear layers alone, `preset:` and one of the package's, or
`sparsity:block_size:value_format` (see `study/settings.py`). Four tasks: a ResMLP, a ViT and a ResNet on a folder of
images with `train/<class>/` and `test/<class>/` (padded, cut at random and mirrored), and a GPT over the bytes of
Python's standard library. The data are read once and stay on the GPU as bytes; the whole step is captured in one CUDA
graph. `accuracy` is the percentage of test images that are classified correctly, for text the negative validation loss
per byte.

The seed fixes the weights, the order of the samples and every window and mirroring, for all settings alike. One record
is written as soon as its run is over; with an existing `--out` the runs already in it are skipped. With `--states`, a
run that the time budget cuts short goes on from its last epoch when the command is called again. `--compile` compiles
the blocks before the capture, which fuses what lies between the matrix products. Without a GPU the steps run eagerly,
for a smoke test with `--limit-batches`.

For fine-tuning, `--save` keeps the weights of a run on one half of the classes (`--part`), and `--start` begins with
them on the other, with `--lora` by updates of low rank. Long trainings have more to learn from: `--strong` augments
images by RandAugment and mixup, `--packages` lets a GPT read all text that the installed packages ship, some hundred
million bytes:

    python examples/benchmarks/accuracy.py --root data/cifar10 --task vit --epochs 100 --strong --settings preset:max
    python examples/benchmarks/accuracy.py --task gpt --packages --dim 768 --depth 12 --context 1024 --batch-size 16 \\
        --epochs 163 --lr 3e-4 --clip 1 --compile --settings dense preset:max
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import environment, write_records
from examples.benchmarks.study import results
from examples.benchmarks.study.settings import PRESET, Setting, bits_of_all, bits_per_value, kept_rows, prune
from examples.benchmarks.study.tasks import Study, is_recorded, load_records, open_study
from examples.benchmarks.study.tasks import parse as parse_study
from examples.benchmarks.study.training import Cut, Until, first_choices, train_and_score


def measure(
    study: Study,
    setting: Setting,
    seed: int,
    limit: int | None,
    until: Until | None = None,
    save: Path | None = None,
) -> dict[str, Any]:
    """Train and test one model and return what came out."""
    data, recipe = study.data, study.recipe
    model = study.build(seed)
    batch = data.batch(first_choices(data, recipe))
    left_dense = prune(model, setting, batch, recipe.precision)
    if setting.method.startswith(PRESET):
        bits = bits_of_all(model, batch, recipe.precision)
    else:
        bits = bits_per_value(kept_rows(model, batch, recipe.precision), recipe.precision)
    figures = train_and_score(model, data, recipe, seed, limit, until)
    if save is not None:
        unfinished = save.with_name(f"{save.name}.part")
        torch.save(model.state_dict(), unfinished)
        unfinished.replace(save)
    return {"bits_per_value": bits, "left_dense": left_dense, **figures}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("accuracy.json"))
    parser.add_argument("--time-budget-s", type=float, help="start no run that would end later than this")
    parser.add_argument(
        "--states", type=Path, help="folder for runs that the budget cuts short, and that go on from there"
    )
    parser.add_argument("--save", type=Path, help="file for the weights that a single run ends with")
    args = parse_study(parser, argv)
    if args.save is not None and len(args.seeds) * len(args.settings) > 1:
        parser.error("--save takes the weights of one run: one setting and one seed")
    if args.save is not None and not args.save.parent.is_dir():
        parser.error(f"--save must be a file in a folder that exists, got {args.save}")
    return args


def until_of(args: argparse.Namespace, key: dict[str, Any], begin: float) -> Until:
    """Return where the state of a run lies, and when it has to stop."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:16]
    end = math.inf if args.time_budget_s is None else begin + args.time_budget_s
    return Until(args.states / f"{name}.pt", end)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the study and return its records, old ones included."""
    begin = time.monotonic()
    args = parse(argv)
    study = open_study(args)
    limit = args.limit_batches * study.recipe.batch if args.limit_batches else None
    records = load_records(args.out)
    durations: dict[str, float] = {}
    # Seed by seed, so that those compared lie next to each other in time.
    for seed, setting in ((seed, setting) for seed in args.seeds for setting in args.settings):
        run, key = f"{args.task} {setting}, seed {seed}", {**study.describe(), **asdict(setting), "seed": seed}
        if is_recorded(key, records):
            print(f"{run}: already in {args.out}")
            if args.save is not None and not args.save.is_file():
                raise SystemExit(f"--save {args.save}: the run is not made again. HINT: name another file with --out.")
            continue
        start = time.monotonic()
        expected = durations.get(setting.method, 1.5 * max(durations.values(), default=0.0))
        expected *= args.states is None  # or it begins, and goes on another time
        if args.time_budget_s is not None and start - begin + expected > args.time_budget_s:
            print(f"{run}: not started, it would exceed the time budget of {args.time_budget_s:.0f} s")
            continue
        print(run, flush=True)
        until = None if args.states is None else until_of(args, key, begin)
        try:
            found = measure(study, setting, seed, limit, until, args.save)
        except Cut:
            print(f"{run}: cut short, its state is in {args.states}")
            continue
        records.append({**key, **found, **environment()})
        write_records(args.out, records)
        if until is not None:
            until.path.unlink(missing_ok=True)
        durations[setting.method] = time.monotonic() - start
    for summary, _ in results.tables(records):
        Console().print(summary.rich())
    return records


if __name__ == "__main__":
    main()
