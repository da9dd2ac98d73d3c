"""Ablation: which ways of storing a layer's input keep its weight gradient, and the accuracy, before kernels exist.

    python examples/benchmarks/ablation.py --task gpt --variants v2 v2,sub s0.5,v4 --fidelity --out fidelity.json
    python examples/benchmarks/ablation.py --root data/cifar10 --variants s0.5,v2 s0.5,v2,mean --compile

The variants are those of `study/emulation.py`: emulated, so that neither memory nor speed is that of the real thing.
With `--fidelity`, a model is trained densely for `--after` epochs and its weight gradients are compared with the exact
ones, by kind of layer (see `fidelity.py`), averaged over `--draws` draws of what is random; `error` is the squared
error of the input, relative. Without, each variant is trained as `accuracy.py` does.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import environment, write_records
from examples.benchmarks.fidelity import compare, weight_gradients
from examples.benchmarks.study.emulation import Variant, approximate, emulate, parse_variants, restore
from examples.benchmarks.study.settings import Batch, block_layers, kind, training_loss
from examples.benchmarks.study.tasks import Study, is_recorded, load_records, open_study
from examples.benchmarks.study.tasks import parse as parse_study
from examples.benchmarks.study.training import first_choices, train, train_and_score

FIGURES = "cosine", "norm_ratio", "error"
HELD = {"attn.proj"}
"""Kinds of layers whose input something else keeps: they stay dense and do not count."""


def inputs_of(model: nn.Module, batch: Batch, precision: str) -> dict[str, torch.Tensor]:
    """Return the input of each linear layer of the blocks that can be pruned."""
    found, hooks = {}, []
    for name, layer in block_layers(model).items():
        if kind(name) not in HELD:
            hooks.append(layer.register_forward_pre_hook(lambda _, x, name=name: found.update({name: x[0].detach()})))
    with torch.no_grad():
        training_loss(model, batch, precision)
    for hook in hooks:
        hook.remove()
    return {name: x.bfloat16() if precision == "bf16" else x for name, x in found.items()}


def bits(inputs: dict[str, torch.Tensor], variants: dict[str, Variant]) -> float:
    """Return the stored bits per value of all layers together."""
    total = sum(x.numel() * variants.get(kind(name), variants["*"]).bits_per_value for name, x in inputs.items())
    return round(total / sum(x.numel() for x in inputs.values()), 4)


def fidelity(study: Study, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one record per variant and kind of layer."""
    data, recipe, records = study.data, study.recipe, []
    model = study.build(args.seeds[0])
    if args.after:
        train(model, data, recipe, args.seeds[0], args.after)
    batch = data.batch(first_choices(data, recipe))
    with torch.compiler.set_stance("force_eager"):
        exact, inputs = weight_gradients(model, batch, recipe.precision), inputs_of(model, batch, recipe.precision)
        for text in args.variants:
            variants = parse_variants(text) if text != "dense" else {"*": Variant()}
            emulate(model, variants, HELD)
            draws = [weight_gradients(model, batch, recipe.precision) for _ in range(args.draws)]
            restore(model)
            for each in dict.fromkeys(map(kind, inputs)):
                alike = [name for name in inputs if kind(name) == each]
                variant = variants.get(each, variants["*"])
                pairs = [compare(exact[name], draw[name]) for name in alike for draw in draws]
                errors = [_error(inputs[name], variant) for name in alike]
                means = [statistics.mean(figures) for figures in (*zip(*pairs, strict=True), errors)]
                found = {"bits_per_value": variant.bits_per_value} | dict(zip(FIGURES, means, strict=True))
                # Before the first step a head of zeros leaves gradients without a direction.
                figures = {name: round(value, 5) for name, value in found.items() if math.isfinite(value)}
                records.append({**study.describe(), "after": args.after, "variant": text, "kind": each, **figures})
    return records


def _error(x: torch.Tensor, variant: Variant) -> float:
    wrong = approximate(x, variant).float() - x.float()
    return (wrong.square().sum() / x.float().square().sum()).item()


def accuracy(study: Study, text: str, seed: int, limit: int | None) -> dict[str, Any]:
    """Train and test one model and return what came out."""
    data, recipe = study.data, study.recipe
    model = study.build(seed)
    stored = 16.0
    if text != "dense":
        inputs = inputs_of(model, data.batch(first_choices(data, recipe)), recipe.precision)
        stored = bits(inputs, parse_variants(text))
        emulate(model, parse_variants(text), HELD)
    return {"bits_per_value": stored, **train_and_score(model, data, recipe, seed, limit)}


def checked(text: str) -> str:
    """Return `text` if it stands for `dense` or for variants; for argparse."""
    try:
        if text != "dense":
            parse_variants(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", required=True, type=checked, metavar="dense|VARIANT")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--fidelity", action="store_true")
    parser.add_argument("--after", type=int, default=4, help="epochs of dense training before that, or 0")
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("ablation.json"))
    parser.add_argument("--time-budget-s", type=float, help="start no run later than this")
    args = parse_study(parser, argv, settings=False)
    if args.task == "resnet":
        parser.error("--task must be one with linear layers, got resnet: variants are those of their inputs")
    return args


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run and return the records, old ones included."""
    begin, args = time.perf_counter(), parse(argv)
    study, records = open_study(args), load_records(args.out)
    if args.fidelity:
        records += [{**record, **environment()} for record in fidelity(study, args)]
        write_records(args.out, records)
        show(records, "cosine")
        return records
    limit = args.limit_batches * study.recipe.batch if args.limit_batches else None
    for seed, text in itertools.product(args.seeds, args.variants):
        key = {**study.describe(), "variant": text, "seed": seed}
        late = args.time_budget_s is not None and time.perf_counter() - begin > args.time_budget_s
        if is_recorded(key, records) or late:
            print(f"{text}, seed {seed}: {'too late' if late else 'already in ' + str(args.out)}")
            continue
        print(f"{args.task} {text}, seed {seed}", flush=True)
        records.append({**key, **accuracy(study, text, seed, limit), **environment()})
        write_records(args.out, records)
    show(records, "accuracy")
    return records


def show(records: list[dict[str, Any]], figure: str) -> None:
    """Print the records, a column per kind of layer or seed."""
    across = "kind" if figure == "cosine" else "seed"
    columns = sorted({str(record[across]) for record in records})
    table = Table("variant", "bits", *columns)
    for text in dict.fromkeys(record["variant"] for record in records):
        rows = {str(record[across]): record for record in records if record["variant"] == text}
        cells = [_cell(rows.get(column), figure) for column in columns]
        table.add_row(text, f"{next(iter(rows.values()))['bits_per_value']:.2f}", *cells)
    Console(width=160).print(table)


def _cell(record: dict[str, Any] | None, figure: str) -> str:
    if record is None:
        return ""
    if figure == "cosine":
        return " / ".join(f"{record[name]:.4f}" for name in FIGURES if name in record)
    return f"{record['accuracy']:.4f} ({record['final_loss']:.4f})"


if __name__ == "__main__":
    main()
