"""Steps on several GPUs beside steps on one, with the same batch on each: dense, checkpointing and the presets.

    python examples/benchmarks/scaling.py --devices 1 2 4 --out scaling.json
    python examples/benchmarks/scaling.py --devices 1 2 4 --compile --out scaling.json

Models, batches, precision, optimizer and figures of ``rivals.py``, one process for each GPU of one host, eager or, with
``--compile``, compiled: the model as a whole, with FSDP2 each block, which is sharded by itself.

``ddp``
    Lightning's ``DDPStrategy``: gradients are averaged in buckets while backward goes on. A compiled model is cut at
    these buckets.
``ddp, whole``
    The same with ``torch._dynamo.config.optimize_ddp = False``: a compiled model is one piece.
``fsdp2``
    Lightning's ``ModelParallelStrategy``, every block and what is left of the model sharded by ``fully_shard``:
    parameters are gathered in forward and backward, and gradients are averaged and dealt out, beside the computation.

``step_ms`` and ``host_ms`` are those of the slowest process, memory that of the one that needs most. ``samples_per_s``
counts the samples of all. Records are written after every case, and a case that the file has is not run again, unless
it failed; after ``--seconds`` no further one starts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
import socket
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from rich.console import Console
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks import summaries
from examples.benchmarks.common import finish_together, require_gpu_in_fork, start_in_fork, write_records
from examples.benchmarks.models import described
from examples.benchmarks.rivals import (
    BATCHES,
    CASE_SECONDS,
    COMPILED_SECONDS,
    METHODS,
    Rival,
    callbacks_of,
    train,
)
from examples.benchmarks.step_figures import StepFigures
from examples.benchmarks.summaries import Record, Records
from examples.benchmarks.third_party import WORKLOADS, blocks_of

MODELS = "vit_base_patch16_224", "GPT2LMHeadModel"
STRATEGIES = "ddp", "fsdp2"
WHOLE = "ddp, whole"
ONE = "one GPU"
KNOWN = [method for method in METHODS if method != "offload"]


class Case(NamedTuple):
    """What is measured.

    Args:
        model: Name of a workload.
        method: One of ``KNOWN``.
        strategy: One of ``STRATEGIES``, ``WHOLE`` or ``ONE``.
        devices: How many GPUs.
        compiled: Whether the model is compiled.
        accelerator: Of the Trainer.
    """

    model: str
    method: str
    strategy: str
    devices: int
    compiled: bool
    accelerator: str = "gpu"

    @property
    def head(self) -> dict[str, Any]:
        """What its record says of it."""
        told = self._asdict() | described(self.model, BATCHES)
        del told["accelerator"]
        return told


class Sharded(Rival):
    """A workload whose blocks are sharded where the strategy has made a mesh, and then compiled if they shall be."""

    compiled = False

    def configure_model(self) -> None:
        mesh = getattr(self, "_device_mesh", None)
        if mesh is None or isinstance(self.model, FSDPModule):
            return
        for part in (*blocks_of(self.model), self.model):
            fully_shard(part, mesh=mesh["data_parallel"])
            if self.compiled and part is not self.model:
                part.compile()


def strategy_of(name: str, devices: int) -> str | Strategy:
    """Return what a Trainer takes."""
    if name == ONE:
        return "auto"
    if name == "fsdp2":
        return ModelParallelStrategy(devices, 1, save_distributed_checkpoint=False)
    return DDPStrategy()


def measure(rank: int, port: int, case: Case) -> dict[str, Any]:
    """Return the figures of one of the processes of a case."""
    if case.strategy != ONE:
        told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
        told |= {"WORLD_SIZE": case.devices, "LOCAL_WORLD_SIZE": case.devices, "TORCHELASTIC_RUN_ID": "scaling"}
        os.environ.update({key: str(value) for key, value in told.items()})
    if case.accelerator == "gpu":
        torch.cuda.set_device(rank)
    batch = BATCHES * WORKLOADS[case.model].batch
    place = f"cuda:{rank}" if case.accelerator == "gpu" else "cpu"
    training = Sharded(case.model, case.method, place, samples=batch)
    training.batch_size, training.compiled = batch, case.compiled
    if case.compiled and case.strategy != "fsdp2":
        torch._dynamo.config.optimize_ddp = case.strategy != WHOLE
        training.model = torch.compile(training.model)
    figures = StepFigures()
    callbacks, strategy = callbacks_of(case.method, None), strategy_of(case.strategy, case.devices)
    train(training, [*callbacks, figures], figures.steps, case.accelerator, strategy, case.devices)
    found = figures.found()
    found.pop("gpu_ms", None)  # collectives that wait for the other processes count as busy
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


def run_case(case: Case) -> dict[str, Any]:
    """Measure one case, each process fresh; return its figures, or the first error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = [start_in_fork(measure, rank, port, case) for rank in range(case.devices)]
    found = finish_together(COMPILED_SECONDS if case.compiled else CASE_SECONDS, running, of_one=True)
    failed = [of_rank for of_rank in found if "error" in of_rank]
    if failed:  # the others waited for one that has failed until their time was up
        return min(failed, key=lambda of_rank: "took over" in of_rank["error"])
    most = {
        key: max(of_rank[key] for of_rank in found) for key in found[0] if not isinstance(found[0][key], str | None)
    }
    samples = case.devices * BATCHES * WORKLOADS[case.model].batch
    return {**found[0], **most, "samples_per_s": round(samples / most["step_ms"] * 1e3, 1)}


def cases(devices: Sequence[int], strategies: Sequence[str]) -> list[tuple[str, int]]:
    """Return strategies with numbers of GPUs."""
    several = [count for count in devices if count > 1]
    return [(ONE, 1)] * (1 in devices) + list(itertools.product(strategies, several))


def key_of(record: Record) -> tuple[Any, ...]:
    """Return what tells a case from the others of a file."""
    return record["model"], record["strategy"], record["devices"], record["method"], record["compiled"]


def run_cases(args: argparse.Namespace, records: dict[tuple[Any, ...], Record]) -> None:
    """Run the cases that are not there yet, while there is time for one more, and write their records."""
    end = time.monotonic() + args.seconds
    for name, (strategy, devices) in itertools.product(args.models, cases(args.devices, args.strategies)):
        for method in args.methods:
            case = Case(name, method, strategy, devices, args.compile)
            done = "error" not in records.get(key_of(case.head), {"error": "not run yet"})
            if done or time.monotonic() > end:
                continue
            record = {**case.head, **run_case(case)}
            records[key_of(record)] = record
            write_records(args.out, list(records.values()))
            print(
                {key: value for key, value in record.items() if key not in ("source", "version", "command")}, flush=True
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases, write the records and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=WORKLOADS, metavar="MODEL")
    parser.add_argument("--methods", nargs="+", default=("dense", "max", "recompute"), choices=KNOWN)
    parser.add_argument("--strategies", nargs="+", choices=(*STRATEGIES, WHOLE), help="all that make a difference")
    parser.add_argument("--devices", nargs="+", type=int, default=(1, 2), help="how many GPUs")
    parser.add_argument("--compile", action="store_true", help="the models")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no further case starts")
    parser.add_argument("--out", type=Path, default=Path("scaling.json"))
    args = parser.parse_args(argv)
    if args.strategies is None:
        args.strategies = (*STRATEGIES, WHOLE) if args.compile else STRATEGIES
    if WHOLE in args.strategies and not args.compile:
        parser.error(f"--strategies {WHOLE!r} is for compiled models: name --compile, too")
    require_gpu_in_fork()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    before: Records = json.loads(args.out.read_text()) if args.out.is_file() else []
    records = {key_of(record): record for record in before}
    run_cases(args, records)
    Console(width=None if sys.stdout.isatty() else 160).print(summaries.scaling(list(records.values())).rich())
    return int(any("error" in record for record in records.values()))


if __name__ == "__main__":
    sys.exit(main())
