"""Compiled models through a Trainer: memory and time of a step, dense, with checkpointing and with each preset.

    python examples/benchmarks/compiled.py --out compiled.json
    python examples/benchmarks/compiled.py --mode reduce-overhead --models resmlp_12_224 --out compiled.json
    python examples/benchmarks/compiled.py --methods dense checkpoint recompute compiler:0.5 --out compiled.json

Models as their libraries build them, given to ``torch.compile`` as a whole, on one GPU,
``Trainer(precision="bf16-mixed")``, fused AdamW, the same batch over and over. All cases of a model run in processes of
their own at the same time as far as the steps are concerned in which they compile; then one after the other measures,
while the rest waits: first memory in one step, then the times of the others, as ``rivals.py`` does.

``compiler:0.5`` is the dense model under ``torch._functorch.config.activation_memory_budget``, of that share.

``warm_up_s`` is what the steps before took, with compilation and the callback's probes in them, several processes at
a time. ``reserved_mib`` is what the allocator holds at most: where steps are replayed from CUDA graphs, it alone has
the memory of those, which lies in pools of their own. ``packed_mib`` is what the pass says that it keeps of
``packable_mib``, nothing where the code came out of a cache.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks import summaries
from examples.benchmarks.batch_size import train
from examples.benchmarks.common import MIB, require_gpu_in_fork, write_records
from examples.benchmarks.models import described
from examples.benchmarks.rivals import BATCHES, STEPS, Alone, Rival, in_turns, with_speed
from examples.benchmarks.third_party import WORKLOADS
from lightning_actprune import ActivationPruning

MODELS = "vit_base_patch16_224", "resmlp_12_224", "GPT2LMHeadModel"
METHODS = "dense", "balanced", "max"
OTHERS = "checkpoint", "recompute"
BUDGET = "compiler:"
"""Before the compiler's own ``activation_memory_budget``, a share of what the dense model keeps compiled."""
CASE_SECONDS = 400


def measure(name: str, method: str, mode: str, accelerator: str, figures: Alone) -> dict[str, Any]:
    """Compile and train a model, and return the figures of its steps."""
    batch = BATCHES * WORKLOADS[name].batch
    training = Rival(name, method, "cuda" if accelerator == "gpu" else "cpu", samples=batch)
    training.batch_size = batch
    if method.startswith(BUDGET):
        torch._functorch.config.activation_memory_budget = float(method.removeprefix(BUDGET))
    training.model = torch.compile(training.model, mode=mode)
    exact = method in ("dense", "checkpoint") or method.startswith(BUDGET)
    pruning = [] if exact else [ActivationPruning(method, verbose=0)]
    train(training, [*pruning, figures], STEPS, accelerator)
    found = {**figures.found(), "warm_up_s": figures.warm_up_s}
    for callback in pruning:
        for key, part in (("packed_mib", "stored_bytes"), ("packable_mib", "dense_bytes")):
            found[key] = round(sum(getattr(row, part) for row in callback.compiled) / MIB, 2)
    return with_speed({**described(name, BATCHES), "method": method, "mode": mode, **found})


def run_models(names: Sequence[str], methods: Sequence[str], mode: str) -> Iterator[dict[str, Any]]:
    """Run all cases, and yield their records."""
    cases = [(name, method, mode, "gpu") for name in names for method in methods]
    for (name, method, *_), found in zip(cases, in_turns(CASE_SECONDS, measure, cases), strict=True):
        yield {**described(name, BATCHES), "method": method, "mode": mode, **found}


def method_of(text: str) -> str:
    """Return a method as it stands on the command line, if it is one."""
    if text in (*METHODS, *OTHERS):
        return text
    try:
        if 0 <= float(text.removeprefix(BUDGET)) <= 1 and text.startswith(BUDGET):
            return text
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join((*METHODS, *OTHERS))} and {BUDGET}SHARE")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases, write the records and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=WORKLOADS, metavar="MODEL")
    parser.add_argument("--methods", nargs="+", default=METHODS, type=method_of, metavar="METHOD")
    parser.add_argument("--mode", default="default", help="of torch.compile")
    parser.add_argument("--out", type=Path, default=Path("compiled.json"))
    args = parser.parse_args(argv)
    require_gpu_in_fork()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    before = json.loads(args.out.read_text()) if args.out.is_file() else []
    kept = [record for record in before if (record["model"], record["mode"]) not in product(args.models, [args.mode])]
    found: list[dict[str, Any]] = []
    for record in run_models(args.models, args.methods, args.mode):
        found.append(record)
        write_records(args.out, kept + found)
        print({key: value for key, value in record.items() if key not in ("source", "version", "command")}, flush=True)
    Console(width=None if sys.stdout.isatty() else 160).print(summaries.frontier(found).rich())
    return int(any("error" in record for record in found))


if __name__ == "__main__":
    sys.exit(main())
