"""The head of a language model and its loss in one: activations, peak and step time beside logits that are all there.

    python examples/benchmarks/logits.py --out logits.json
    python examples/benchmarks/logits.py --models GPT2LMHeadModel --methods dense "dense, together"

GPT-2 and Llama of transformers with twice the batches of ``models.py`` (16 and 10 texts of 1024 tokens), bf16 autocast,
fused AdamW, eager. Every case runs in a fresh process: three warm-up steps, one measured for memory, and the median of
eight for time. ``activations_mib`` and ``peak_mib`` are the allocator's. A method is a preset, or ``dense``, and how
the loss is computed, by the model itself unless it says:

``together``
    The model's body, and ``lightning_actprune.functional.linear_cross_entropy`` with the weight of its head.
``Liger``
    The same with Liger's fused loss, where ``liger_kernel`` is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import MIB, in_fork, require_gpu_in_fork, write_records
from examples.benchmarks.models import Training, allocated, described
from examples.benchmarks.summaries import Records, Summary, beside, dense_of, groups
from lightning_actprune import convert
from lightning_actprune.functional import linear_cross_entropy

MODELS = ("GPT2LMHeadModel", "LlamaForCausalLM, 1.1B")
METHODS = ("dense", "dense, together", "recompute", "recompute, together", "max, together")
LIGER = ("dense, Liger", "recompute, Liger")
BATCHES = 2
STEPS = 8
CASE_SECONDS = 90
Head = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps hidden states, weight and labels to the loss."""


def of_body(head: Head, model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of the next tokens from what the model's body returns, without its logits."""
    hidden = model.base_model(tokens).last_hidden_state
    return head(hidden, model.get_output_embeddings().weight, F.pad(labels[:, 1:], (0, 1), value=-100))


def with_liger(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Return Liger's fused loss."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss: Tensor = LigerFusedLinearCrossEntropyLoss()(weight, hidden.flatten(0, 1), target.flatten())
    return loss


HEADS: dict[str, Head] = {"together": linear_cross_entropy, "Liger": with_liger}


def methods() -> tuple[str, ...]:
    """Return what can be measured here."""
    return METHODS + (LIGER if importlib.util.find_spec("liger_kernel") else ())


def prepare(name: str, method: str, device: torch.device) -> Training:
    """Return the training of a model by a method."""
    preset, _, head = method.partition(", ")
    with device:  # where large models get their first values in less time
        training = Training(name, None, device, BATCHES)
    if preset != "dense":
        convert(training.model, preset)  # type: ignore[arg-type]
    if head:
        training.workload = training.workload._replace(loss=partial(of_body, HEADS[head]))
    return training


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


def measure(name: str, method: str, device: torch.device) -> dict[str, Any]:
    """Return the figures of one case."""
    training = prepare(name, method, device)
    for _ in range(3):
        training.step()
    figures: dict[str, Any] = {key: round(value / MIB, 2) for key, value in allocated(training).items()}
    return figures | {"step_ms": step_ms(training)}


def summary(records: Records) -> Summary:
    """Memory and time of a step by method; in brackets beside dense."""
    rows = []
    for (name,), group in groups(records, "model").items():
        dense = dense_of(group)
        for record in group:
            cells = ["-"] * 3
            if dense is not None and "error" not in record:
                names = ("activations_mib", "peak_mib", "step_ms")
                cells = [beside(record, dense, figure, 1 if figure == "step_ms" else 0) for figure in names]
            rows.append([f"{name}, batch {record['batch']}", record["method"], *cells])
    header = ("model", "method", "activations MiB", "peak MiB", "step ms")
    return Summary("Head and loss together; in brackets, how much more or less than dense", header, rows)


def run_case(name: str, method: str) -> dict[str, Any]:
    """Measure one case in a fresh process; return its figures, or its error."""
    return in_fork(CASE_SECONDS, measure, name, method, torch.device("cuda"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases, write the records as they come, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="MODEL")
    parser.add_argument("--methods", nargs="+", default=list(methods()), choices=(*METHODS, *LIGER), metavar="METHOD")
    parser.add_argument("--out", type=Path, default=Path("logits.json"))
    args = parser.parse_args(arguments)
    require_gpu_in_fork()
    records: Records = []
    for name in args.models:
        for method in args.methods:
            records.append({**described(name, BATCHES), "method": method, **run_case(name, method)})
            write_records(args.out, records)
    Console(width=None if sys.stdout.isatty() else 200).print(summary(records).rich())
    return int(any("error" in record for record in records))


if __name__ == "__main__":
    sys.exit(main())
