"""Time and memory of whole training steps: dense, checkpointed per block, and pruned, eager and compiled.

    python examples/benchmarks/step.py --out step.json

Every case runs in its own process. Those of a model warm up side by side (compiling takes most of the time, and all
models together would not fit a GPU); then they take turns (see ``turns.py``). Times are medians over all timed steps
(forward, backward, fused AdamW), by wall clock with the device synchronised.

Modes: ``eager``; ``graph``, the eager step captured in one CUDA graph, which leaves the GPU's own time; ``compile``;
``reduce-overhead``, compiled with CUDA graphs. ``host_ms`` is how long the host takes to issue a step to an idle GPU: a
step cannot take less.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._inductor.async_compile import shutdown_compile_workers
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks import turns
from examples.benchmarks.common import MIB, environment, step_memory, write_records
from examples.benchmarks.third_party import checkpoint_blocks
from lightning_actprune import convert

MODELS = {
    "resmlp_12_224 bf16": ("resmlp_12_224", 128, "bf16-mixed"),
    "vit_base_patch16_224 bf16": ("vit_base_patch16_224", 128, "bf16-mixed"),
    "resmlp_12_224 fp32": ("resmlp_12_224", 32, "32-true"),
}
METHODS = {
    "eager": ("dense", "checkpoint", "pruned"),
    "graph": ("dense", "checkpoint", "pruned"),
    "compile": ("dense", "pruned"),
    "reduce-overhead": ("dense", "pruned"),
}


def build(name: str, method: str, sparsity: float, block_size: int) -> tuple[nn.Module, int]:
    """Return the model and the number of pruned layers."""
    import timm

    model = timm.create_model(name).cuda()
    if method == "checkpoint":
        checkpoint_blocks(model)
    if method != "pruned":
        return model, 0
    # Its input is also kept by the attention itself, so packing it would only add memory.
    rules = {"*.attn.proj": None} if "vit" in name else None
    return model, len(convert(model, sparsity=sparsity, block_size=block_size, rules=rules).converted)


class Case:
    """One model, method and mode, with the step to time."""

    def __init__(self, args: argparse.Namespace) -> None:
        name, self.batch, self.precision = MODELS[args.case[0]]
        torch.manual_seed(0)
        self.model, self.layers = build(name, args.case[1], args.sparsity, args.block_size)
        mode = args.case[2]
        compiled = {"compile": None, "reduce-overhead": "reduce-overhead"}
        self.run = torch.compile(self.model, fullgraph=True, mode=compiled[mode]) if mode in compiled else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, capturable=mode == "graph")
        self.images = torch.randn(self.batch, 3, 224, 224, device="cuda")
        self.labels = torch.randint(1000, (self.batch,), device="cuda")

    def forward(self) -> Tensor:
        """Return the loss."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.precision == "bf16-mixed"):
            return F.cross_entropy(self.run(self.images), self.labels)

    def step(self) -> None:
        """Run one training step."""
        self.finish(self.forward())

    def finish(self, loss: Tensor) -> None:
        """Run backward and the optimizer."""
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def memory(self) -> dict[str, float]:
        """Return activations and peak of one step in MiB."""
        return {name: round(nbytes / MIB, 1) for name, nbytes in step_memory(self.forward, self.finish).items()}


def serve(args: argparse.Namespace) -> None:
    """Warm up, then time on each line read, until the input ends; print JSON lines."""
    case = Case(args)
    for _ in range(4):
        case.step()
    if args.case[2] in ("compile", "reduce-overhead"):
        shutdown_compile_workers()  # these would take processor time from the cases that are timed
    facts = {"layers": case.layers, **case.memory()}
    turns.answer(turns.captured(case.step) if args.case[2] == "graph" else case.step, args.steps, facts)


def main() -> None:
    """Start all cases, time them in turns, write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--modes", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--sparsity", type=float, default=0.6)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("step.json"))
    parser.add_argument("--case", nargs=3, metavar=("MODEL", "METHOD", "MODE"), help="serve one case")
    args = parser.parse_args()
    if args.case:
        serve(args)
        return
    records: list[dict[str, Any]] = []
    for model in args.models:
        records += compare([(model, method, mode) for mode in args.modes for method in METHODS[mode]], args)
        write_records(args.out, [{**row, **environment()} for row in records])
    Console().print(summary(records))


def compare(cases: list[tuple[str, str, str]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the records of one model's cases."""
    options = [f"--{n}={getattr(args, n.replace('-', '_'))}" for n in ("sparsity", "block-size", "steps")]
    commands = [[sys.executable, __file__, *options, "--case", *case] for case in cases]
    figures = turns.take_turns(commands, args.rounds)
    return [{**head(case, args), **found} for case, found in zip(cases, figures, strict=True)]


def head(case: tuple[str, str, str], args: argparse.Namespace) -> dict[str, Any]:
    """Return what a record says of its case."""
    name, batch, precision = MODELS[case[0]]
    pruned = case[1] == "pruned"
    settings = {"sparsity": args.sparsity if pruned else None, "block_size": args.block_size if pruned else None}
    return {"model": name, "batch": batch, "precision": precision, "mode": case[2], "method": case[1], **settings}


def summary(records: list[dict[str, Any]]) -> Table:
    """Return times and memory beside the dense case of the same mode."""
    table = Table(
        "model", "precision", "mode", "method", "ms", "/ dense", "host ms", "activations MiB", "/ dense", "peak MiB"
    )
    for r in records:
        dense = next(
            d for d in records
            if d["method"] == "dense" and all(d[k] == r[k] for k in ("model", "precision", "mode"))
        )  # fmt: skip
        cells = [f"{r['ms_median']:.2f}", f"{r['ms_median'] / dense['ms_median']:.3f}", f"{r['host_ms']:.2f}"]
        cells += [f"{r['activations_mib']:.0f}"]
        cells += [f"{r['activations_mib'] / dense['activations_mib']:.3f}", f"{r['peak_mib']:.0f}"]
        table.add_row(r["model"], r["precision"], r["mode"], r["method"], *cells)
    return table


if __name__ == "__main__":
    main()
