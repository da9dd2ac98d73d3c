"""Compare a checkout with commit 0a4317c, in turns: steps with the preset ``max``, and a small layer's host time.

    git worktree add ../old 0a4317c
    python examples/benchmarks/side_by_side.py --old ../old --new . --out side_by_side.json

Every case runs in a process of its own that stays alive: the cases take turns, so that a host that becomes faster or
slower does so for both. ``added`` is what a layer takes over its dense twin in the same process, in microseconds: of
the medians of all turns, and of the shortest, which other work on the host has disturbed least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

BATCHES = {"GPT2LMHeadModel": 1}
"""Batches of a workload, where not two of them: five processes share one GPU."""
MODELS = ("vit_base_patch16_224", "resmlp_12_224", "GPT2LMHeadModel", "resnet50")
METHODS = (("old", "dense"), ("old", "pruned"), ("new", "pruned"), ("old", "pruned, graph"), ("new", "pruned, graph"))
PAIRS = {"pruned": "dense", "pruned module": "dense module", "int4 module": "dense module"}


def converted(side: str, model: nn.Module, batch: Any) -> tuple[Any, tuple[Any, Any]]:
    """Convert a model with ``max`` of either interface; return its report and the probes of a first batch."""
    import lightning_actprune as package

    if side == "old":
        from lightning_actprune.presets import PRESETS

        preset = PRESETS["max"]
        settings = asdict(preset) | {"others": preset.others}
        limit = settings.pop("max_dropped_energy")
        report = package.convert(model, **settings)
        return report, (package.HolderProbe(model, batch), package.EnergyProbe(model, limit))
    from lightning_actprune.analysis.first_batch import EnergyProbe, RetentionProbe

    return package.convert(model, "max"), (RetentionProbe(model, batch), EnergyProbe(model))


def serve_step(side: str, name: str, method: str) -> None:
    """Measure the memory of one model's step, then its time whenever asked."""
    from examples.benchmarks import turns
    from examples.benchmarks.common import MIB, step_memory
    from examples.benchmarks.third_party import WORKLOADS

    torch.manual_seed(0)
    workload = WORKLOADS[name]
    model = workload.build().to("cuda")
    batch = tuple(tensor.to("cuda") for tensor in workload.data(BATCHES.get(name, 2) * workload.batch))
    graph = method.endswith(", graph")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def forward() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return workload.loss(model, *batch)

    def finish(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    if method == "dense":
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True, capturable=graph)
    else:
        report, (retention, energy) = converted(side, model, batch)
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True, capturable=graph)
        with retention, energy:
            loss = forward()
            retention.check_alive()
            finish(loss)
        del loss  # whose graph would tie the gradients to this stream, and a CUDA graph could not be captured
        retention.apply(report)
        energy.apply(report)
    for _ in range(2):
        finish(forward())
    facts = {key: round(value / MIB, 2) for key, value in step_memory(forward, finish).items()}

    def step() -> None:
        finish(forward())

    turns.answer(turns.captured(step) if graph else step, 20, facts)


def serve_host(side: str) -> None:
    """Time forward and backward of a small layer on the host whenever a line is read."""
    from lightning_actprune import functional

    if side == "old":
        from lightning_actprune import ActivationPrunedLinear

        four_bits: dict[str, Any] = {"value_format": "int4"}
    else:
        from lightning_actprune.operators.linear import ActivationPrunedLinear

        four_bits = {"bits": 4}
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(8, 64, 384, requires_grad=True, **kind)
    grad = torch.randn(8, 64, 384, **kind)
    dense = nn.Linear(384, 384, **kind)
    pruned = ActivationPrunedLinear(384, 384, sparsity=0.6, **kind)
    quantized = ActivationPrunedLinear(384, 384, sparsity=0.0, **four_bits, **kind)
    weight, bias = dense.weight, dense.bias
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "dense": lambda: nn.functional.linear(x, weight, bias),
        "pruned": lambda: functional.linear(x, weight, bias, sparsity=0.6),
        "dense module": lambda: dense(x),
        "pruned module": lambda: pruned(x),
        "int4 module": lambda: quantized(x),
    }

    def microseconds(call: Callable[[], torch.Tensor], repeats: int = 100) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call().backward(grad)
        taken = time.perf_counter() - start
        torch.cuda.synchronize()
        return taken / repeats * 1e6

    for call in calls.values():
        microseconds(call)
    print(json.dumps({}), flush=True)
    for _ in sys.stdin:
        microseconds(calls["dense"])  # until the host's clock has settled
        print(json.dumps({name: [microseconds(call) for _ in range(3)] for name, call in calls.items()}), flush=True)


def compare_hosts(trees: dict[str, str], rounds: int = 40) -> list[dict[str, Any]]:
    """Return the medians and the least of both sides, and what each layer adds to its dense twin."""
    from examples.benchmarks import turns

    processes = {
        side: subprocess.Popen(
            [sys.executable, __file__, "--host", side, tree],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        for side, tree in trees.items()
    }
    for process in processes.values():
        turns.read(process)
    times: dict[str, dict[str, list[float]]] = {side: {} for side in trees}
    for _ in range(rounds):
        for side, process in processes.items():
            assert process.stdin is not None
            process.stdin.write("go\n")
            for name, found in turns.read(process).items():
                times[side].setdefault(name, []).extend(found)
    for process in processes.values():
        process.communicate()
    records: list[dict[str, Any]] = []
    for side, found in times.items():
        record: dict[str, Any] = {"host": side}
        for kind, of in (("median", statistics.median), ("least", min)):
            us = {name: round(of(values), 1) for name, values in found.items()}
            added = {name: round(us[name] - us[dense], 1) for name, dense in PAIRS.items()}
            record[kind] = {"us": us, "added": added}
        records.append(record)
    return records


def compare(trees: dict[str, str], models: list[str], rounds: int, out: Path) -> None:
    """Measure all cases and write them as they come."""
    from examples.benchmarks import turns
    from examples.benchmarks.common import environment, write_records

    facts = environment()
    records = [{**record, **facts} for record in compare_hosts(trees)]
    write_records(out, records)
    for name in models:
        commands = [[sys.executable, __file__, "--case", side, trees[side], name, method] for side, method in METHODS]
        for (side, method), found in zip(METHODS, turns.take_turns(commands, rounds), strict=True):
            records.append({"model": name, "side": side, "method": method, **found, **facts})
        write_records(out, records)
    for record in records:
        print(json.dumps(record))


def main() -> None:
    """Parse the arguments; a case of its own process puts the checkout it measures first on the path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", default="../old")
    parser.add_argument("--new", default=".")
    parser.add_argument("--out", type=Path, default=Path("side_by_side.json"))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--host", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        side, tree, name, method = arguments.case
        sys.path[0] = tree  # in place of this folder, whose modules bear names of packages that others look for
        serve_step(side, name, method)
    elif arguments.host:
        side, tree = arguments.host
        sys.path[0] = tree
        serve_host(side)
    else:
        sys.path.insert(0, arguments.new)
        compare({"old": arguments.old, "new": arguments.new}, arguments.models, arguments.rounds, arguments.out)


if __name__ == "__main__":
    main()
