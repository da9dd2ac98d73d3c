"""What each preset costs on real models: memory and time of a training step, beside dense and checkpointing.

    python examples/benchmarks/presets.py --out presets.json

Models as their libraries build them, bf16 autocast, fused AdamW: dense, with every block checkpointed, and pruned as
``ActivationPruning(preset)`` does it, and with linear layers alone, the first step probed for layers whose
input something else keeps and for those whose dropped blocks would hold too much. ``compiled`` cases are compiled after
that step; ``budget``: with half of the activations as the compiler's budget (``activation_memory_budget=0.5``);
``reduce-overhead``: with CUDA graphs (``mode="reduce-overhead"``), whose memory the allocator does not tell apart. Of
``graph`` cases the eager step is replayed from a CUDA graph: the GPU's own time, where the host's is longer. The cases
of a model, each in a process of its own, warm up side by side and then take turns (see ``turns.py``); together they
take up to 140 GiB.

``activations_mib`` is the growth of the allocator's requested bytes over the forward, ``peak_mib`` its maximum over the
step, ``ms_median`` the time of a step with the device synchronised every five. ``converted`` layers pack their input;
``dropping`` of them drop blocks, the others only quantize.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch._inductor.async_compile import shutdown_compile_workers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks import models, summaries, turns
from examples.benchmarks.common import MIB, environment, require_gpu, write_records
from examples.benchmarks.models import Training, allocated, described, warm_up
from examples.benchmarks.summaries import Records
from examples.benchmarks.third_party import checkpoint_blocks
from examples.benchmarks.vocabulary import PRESETS, Preset

MODELS = ("vit_base_patch16_224", "resmlp_12_224", "GPT2LMHeadModel")
WITH_OTHERS = ", others"
COMPILED, REDUCED, GRAPH = ", compiled", ", reduce-overhead", ", graph"
BUDGET = 0.5
EAGER = ("dense", "checkpoint", *PRESETS, f"balanced{WITH_OTHERS}", f"max{WITH_OTHERS}")
METHODS = (*EAGER, *(f"{name}{COMPILED}" for name in ("dense", "budget", *EAGER[-2:])))
METHODS += tuple(f"{name}{REDUCED}" for name in ("dense", *EAGER[-2:]))
METHODS += tuple(f"{name}{GRAPH}" for name in ("dense", "checkpoint", *EAGER[-2:]))
"""``, others``: every operator that the preset names, not linear layers alone."""
BATCHES = 2
"""Batches of ``models.py`` in one, unless told: with one the host is as slow as the GPU, and times vary by half."""


def prepare(name: str, method: str, device: torch.device, batches: int = BATCHES) -> Training:
    """Return a training that is warm."""
    preset, others = parsed(method)
    training = Training(name, preset, device, batches, others, capturable=method.endswith(GRAPH))
    if method.startswith("checkpoint"):
        checkpoint_blocks(training.model)
    warm_up(training)
    if method.endswith((COMPILED, REDUCED)):
        if method.startswith("budget"):
            torch._functorch.config.activation_memory_budget = BUDGET
        training.run = torch.compile(training.model, mode="reduce-overhead" if method.endswith(REDUCED) else None)
        for _ in range(3):
            training.finish(training.forward())
        shutdown_compile_workers()  # these would take processor time from the cases that are timed
    return training


def parsed(method: str) -> tuple[Preset | None, bool]:
    """Return the preset of a method, and whether other layers than linear ones are converted too."""
    name = method.removesuffix(COMPILED).removesuffix(REDUCED).removesuffix(GRAPH)
    return PRESETS.get(name.removesuffix(WITH_OTHERS)), name.endswith(WITH_OTHERS)


def facts(training: Training, method: str) -> dict[str, Any]:
    """Return what a record says of a case besides its times."""
    found: dict[str, Any] = allocated(training)
    memory = {key: None if method.endswith(REDUCED) else round(value / MIB, 2) for key, value in found.items()}
    layers = [] if training.conversion is None else training.conversion.converted
    return {"converted": len(layers), "dropping": sum(layer.sparsity > 0 for layer in layers), **memory}


def serve(name: str, method: str, steps: int, device: torch.device, batches: int = BATCHES) -> None:
    """Measure one case, then time it whenever asked to."""
    training = prepare(name, method, device, batches)
    found = facts(training, method)
    turns.answer(turns.captured(training.step) if method.endswith(GRAPH) else training.step, steps, found)


def compare(name: str, methods: Sequence[str], steps: int, rounds: int, batches: int) -> Records:
    """Return the records of one model."""
    command = [sys.executable, __file__, "--steps", str(steps), "--batches", str(batches), "--case", name]
    figures = turns.take_turns([[*command, method] for method in methods], rounds)
    return [{**head(name, method, batches), **found} for method, found in zip(methods, figures, strict=True)]


def head(name: str, method: str, batches: int) -> dict[str, Any]:
    """Return what a record says of its case."""
    preset, others = parsed(method)
    settings = dict.fromkeys(asdict(Preset())) if preset is None else asdict(preset)
    mode = next((suffix[2:] for suffix in (COMPILED, REDUCED, GRAPH) if method.endswith(suffix)), "eager")
    return {**described(name, batches), "mode": mode, "method": method, **settings, "others": others}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all models, write the records and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=models.WORKLOADS, metavar="MODEL")
    parser.add_argument("--methods", nargs="+", default=EAGER, choices=METHODS, metavar="METHOD")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=BATCHES, help="batches of models.py in one")
    parser.add_argument("--out", type=Path, default=Path("presets.json"))
    parser.add_argument("--case", nargs=2, metavar=("MODEL", "METHOD"), help="serve one case")
    args = parser.parse_args(argv)
    require_gpu()
    if args.case:
        serve(*args.case, args.steps, torch.device("cuda"), args.batches)
        return
    records: Records = []
    for model in args.models:
        found = compare(model, args.methods, args.steps, args.rounds, args.batches)
        records += [{**record, **environment()} for record in found]
        write_records(args.out, records)
    Console(width=None if sys.stdout.isatty() else 160).print(summaries.presets(records).rich())


if __name__ == "__main__":
    main()
