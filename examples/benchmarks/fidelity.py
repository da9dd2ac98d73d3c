"""How close the weight gradients of pruned layers are to the exact ones, in the middle of a dense training.

    python examples/benchmarks/fidelity.py --root data/cifar10 --settings 0.5:16:same 0.6:32:same
    python examples/benchmarks/fidelity.py --task gpt --settings 0.5:16:same 0.6:32:same

The model of a task (see `accuracy.py`) is trained densely for `--after` of its `--epochs`. Then one batch runs forward
and backward with the same weights, dense and with each setting. As forward and input gradients are exact in both, a
layer's weight gradients `G` (exact) and `P` (pruned) differ by what the layer itself kept alone::

    cosine = <G, P> / (|G| |P|)          norm_ratio = |P| / |G|          of all values of the weight

Both are averaged over the layers that do the same in their blocks (`kind`: token mixing, fc1, fc2, attn.qkv). Layers
whose input something else keeps stay dense and are left out. One record is written per kind and setting; those already
in `--out` are skipped.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import environment, write_records
from examples.benchmarks.study import results
from examples.benchmarks.study.settings import (
    Batch,
    Setting,
    bits_per_value,
    block_layers,
    kept_rows,
    kind,
    prune,
    training_loss,
)
from examples.benchmarks.study.tasks import is_recorded, load_records, open_study
from examples.benchmarks.study.tasks import parse as parse_study
from examples.benchmarks.study.training import first_choices, train
from lightning_actprune import revert
from lightning_actprune.operators.base import CompressedLayer


def weight_gradients(model: nn.Module, batch: Batch, precision: str) -> dict[str, Tensor]:
    """Return the weight gradients of the layers of the blocks; nothing is trained."""
    weights = {name: layer.weight for name, layer in block_layers(model).items()}
    found = torch.autograd.grad(training_loss(model, batch, precision), list(weights.values()))
    return dict(zip(weights, found, strict=True))


def compare(exact: Tensor, pruned: Tensor) -> tuple[float, float]:
    """Return the cosine between two gradients and the norm of the second over that of the first."""
    exact, pruned = exact.flatten().double(), pruned.flatten().double()
    return F.cosine_similarity(exact, pruned, dim=0).item(), (pruned.norm() / exact.norm()).item()


def measure(model: nn.Module, setting: Setting, batch: Batch, precision: str) -> list[dict[str, Any]]:
    """Return one record per kind of layer that is pruned; `model` is then as it was."""
    exact = weight_gradients(model, batch, precision)
    prune(model, setting, batch, precision)
    try:
        # At sparsity 0 the probe judges no layer; of an input that something else keeps, no byte is the layer's own.
        rows = {row.fqn: row for row in kept_rows(model, batch, precision) if row.dense_bytes}
        layers = [name for name in rows if isinstance(model.get_submodule(name), CompressedLayer)]
        pruned = weight_gradients(model, batch, precision)
    finally:
        revert(model)
    records = []
    for each in dict.fromkeys(map(kind, layers)):
        alike = [name for name in layers if kind(name) == each]
        cosines, ratios = zip(*(compare(exact[name], pruned[name]) for name in alike), strict=True)
        bits = bits_per_value((rows[name] for name in alike), precision)
        figures = {"cosine": round(statistics.mean(cosines), 5), "norm_ratio": round(statistics.mean(ratios), 5)}
        records.append({"kind": each, "layers": len(alike), "bits_per_value": bits, **figures})
    return records


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--after", type=int, default=4, help="epochs of dense training before the measurement")
    parser.add_argument("--out", type=Path, default=Path("fidelity.json"))
    return parse_study(parser, argv)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Train, measure and return the records, old ones included."""
    args = parse(argv)
    study, records = open_study(args), load_records(args.out)
    common = {**study.describe(), "after": args.after, "seed": args.seed}
    settings = [s for s in args.settings if s.method == "pruned"]
    settings = [s for s in settings if not is_recorded({**common, **asdict(s)}, records)]
    if settings:
        data, recipe = study.data, study.recipe
        model = study.build(args.seed)
        train(model, data, recipe, args.seed, args.after)
        batch = data.batch(first_choices(data, recipe))
        with torch.compiler.set_stance("force_eager"):
            for setting in settings:
                found = measure(model, setting, batch, recipe.precision)
                records += [{**common, **asdict(setting), **record, **environment()} for record in found]
                write_records(args.out, records)
    Console().print(results.fidelity(records).rich())
    return records


if __name__ == "__main__":
    main()
