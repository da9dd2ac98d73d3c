"""Blocks that run again in backward, from inputs in few bits: memory, step time and gradients beside the other ways.

    python examples/benchmarks/recompute.py --out recompute.json
    python examples/benchmarks/recompute.py --models vit_base_patch16_224 --methods dense recompute

The models of ``models.py``, bf16 autocast, fused AdamW, eager. Every case runs in a fresh process: three warm-up steps,
one measured for memory, and the median of fifteen for time. ``activations_mib`` and ``peak_mib`` are the allocator's,
as there. ``cosine`` is that of the gradient of all parameters with the one of the dense model from the same weights,
batch and random numbers, after these steps. Methods:

``checkpoint``
    The library's own activation checkpointing, of every block.
``recompute``
    The preset: every block runs again from inputs in eight bits, with dense layers in them.
``recompute, balanced inside``
    The same with ``balanced`` for all that is in the blocks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import MIB, environment, in_process, require_gpu, write_records
from examples.benchmarks.models import Training, allocated, described
from examples.benchmarks.third_party import WORKLOADS, checkpoint_blocks
from lightning_actprune import Recompute, convert, revert
from lightning_actprune.operators.recompute import find_blocks

METHODS = ("dense", "checkpoint", "balanced", "max", "recompute", "recompute, balanced inside")
MODELS = ("vit_base_patch16_224", "GPT2LMHeadModel", "resnet50")
STEPS = 15
CASE_SECONDS = 90


def prepare(training: Training, method: str) -> None:
    """Let the model keep what ``method`` says."""
    name, _, inside = method.partition(", ")
    if name == "checkpoint":
        checkpoint_blocks(training.model)
    elif inside:
        convert(training.model, "balanced", rules=dict.fromkeys(find_blocks(training.model), Recompute()))
    elif name != "dense":
        convert(training.model, name)  # type: ignore[arg-type]


def gradient(training: Training) -> Tensor:
    """Return the gradient of all parameters."""
    torch.manual_seed(1)
    training.forward().backward()
    found = torch.cat([p.grad.flatten() for p in training.model.parameters() if p.grad is not None]).cpu()
    training.optimizer.zero_grad(set_to_none=True)
    return found


def step_ms(training: Training) -> float:
    """Return the median milliseconds of a step."""
    found = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        training.step()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e3)
    return round(statistics.median(found), 2)


def measure(name: str, method: str) -> dict[str, Any]:
    """Return the figures of one case."""
    training = Training(name, None, torch.device("cuda"))
    prepare(training, method)
    for _ in range(3):
        training.step()
    figures: dict[str, Any] = {key: round(value / MIB, 2) for key, value in allocated(training).items()}
    figures["step_ms"] = step_ms(training)
    if method not in ("dense", "checkpoint"):
        ours = gradient(training)
        revert(training.model)
        exact = gradient(training)
        figures["cosine"] = round(torch.cosine_similarity(ours.double(), exact.double(), dim=0).item(), 5)
    return figures


def run_case(name: str, method: str) -> dict[str, Any]:
    """Measure one case in a fresh process; return its figures, or its error."""
    command = [sys.executable, __file__, "--case", name, method]
    return in_process(command, CASE_SECONDS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases, and write the records as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(WORKLOADS), metavar="MODEL")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, metavar="METHOD")
    parser.add_argument("--out", type=Path, default=Path("recompute.json"))
    parser.add_argument("--case", nargs=2, metavar=("MODEL", "METHOD"), help="measure one, print JSON")
    args = parser.parse_args(arguments)
    require_gpu()
    if args.case:
        print(json.dumps(measure(*args.case)))
        return 0
    records: list[dict[str, Any]] = []
    for name in args.models:
        for method in args.methods:
            records.append({**described(name), "method": method, **run_case(name, method), **environment()})
            write_records(args.out, records)
            print({key: records[-1].get(key) for key in ("model", "method", "activations_mib", "step_ms", "error")})
    return int(any("error" in record for record in records))


if __name__ == "__main__":
    sys.exit(main())
