"""Steps on several GPUs beside steps on one, with the same batch on each: dense, checkpointing and the presets.

    python examples/benchmarks/scaling.py --devices 1 2 --out scaling.json

Models, batches, precision, optimizer and figures of ``rivals.py``, eager, one process for each GPU of one host.

``ddp``
    Lightning's ``DDPStrategy``: gradients are averaged in buckets while backward goes on.
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
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from rich.console import Console
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks import summaries
from examples.benchmarks.common import finish_in_fork, require_gpu_in_fork, start_in_fork, write_records
from examples.benchmarks.models import described
from examples.benchmarks.rivals import BATCHES, CASE_SECONDS, METHODS, STEPS, Rival, StepFigures, callbacks_of, train
from examples.benchmarks.summaries import Record, Records
from examples.benchmarks.third_party import WORKLOADS, blocks_of

MODELS = "vit_base_patch16_224", "GPT2LMHeadModel"
STRATEGIES = "ddp", "fsdp2"
ONE = "one GPU"
KNOWN = [method for method in METHODS if method != "offload"]


class Sharded(Rival):
    """A workload whose blocks are sharded where the strategy has made a mesh."""

    def configure_model(self) -> None:
        mesh = getattr(self, "_device_mesh", None)
        if mesh is None or isinstance(self.model, FSDPModule):
            return
        for part in (*blocks_of(self.model), self.model):
            fully_shard(part, mesh=mesh["data_parallel"])


def strategy_of(name: str, devices: int) -> str | Strategy:
    """Return what a Trainer takes."""
    if name == ONE:
        return "auto"
    return DDPStrategy() if name == "ddp" else ModelParallelStrategy(devices, 1, save_distributed_checkpoint=False)


def measure(
    rank: int, port: int, name: str, method: str, strategy: str, devices: int, accelerator: str = "gpu"
) -> dict[str, Any]:
    """Return the figures of one of the processes of a case."""
    if strategy != ONE:
        told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
        told |= {"WORLD_SIZE": devices, "LOCAL_WORLD_SIZE": devices, "TORCHELASTIC_RUN_ID": "scaling"}
        os.environ.update({key: str(value) for key, value in told.items()})
    if accelerator == "gpu":
        torch.cuda.set_device(rank)
    batch = BATCHES * WORKLOADS[name].batch
    training = Sharded(name, method, f"cuda:{rank}" if accelerator == "gpu" else "cpu", samples=batch)
    training.batch_size = batch
    figures = StepFigures()
    train(training, [*callbacks_of(method, None), figures], STEPS, accelerator, strategy_of(strategy, devices), devices)
    found = figures.found()
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


def run_case(name: str, method: str, strategy: str, devices: int, accelerator: str = "gpu") -> dict[str, Any]:
    """Measure one case, each process fresh; return its figures, or the first error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    case = name, method, strategy, devices, accelerator
    running = [start_in_fork(measure, rank, port, *case) for rank in range(devices)]
    found = [finish_in_fork(CASE_SECONDS, *each) for each in running]
    failed = [of_rank for of_rank in found if "error" in of_rank]
    if failed:  # the others wait for one that has failed until their time is up
        return min(failed, key=lambda of_rank: "took over" in of_rank["error"])
    most = {
        key: max(of_rank[key] for of_rank in found) for key in found[0] if not isinstance(found[0][key], str | None)
    }
    samples = devices * BATCHES * WORKLOADS[name].batch
    return {**found[0], **most, "samples_per_s": round(samples / most["step_ms"] * 1e3, 1)}


def cases(devices: Sequence[int], strategies: Sequence[str]) -> list[tuple[str, int]]:
    """Return strategies with numbers of GPUs."""
    several = [count for count in devices if count > 1]
    return [(ONE, 1)] * (1 in devices) + list(itertools.product(strategies, several))


def key_of(record: Record) -> tuple[Any, ...]:
    """Return what tells a case from the others of a file."""
    return record["model"], record["strategy"], record["devices"], record["method"]


def run_cases(args: argparse.Namespace, records: dict[tuple[Any, ...], Record]) -> None:
    """Run the cases that are not there yet, while there is time for one more, and write their records."""
    end = time.monotonic() + args.seconds
    for name, (strategy, devices) in itertools.product(args.models, cases(args.devices, args.strategies)):
        for method in args.methods:
            head = {**described(name, BATCHES), "strategy": strategy, "devices": devices, "method": method}
            done = "error" not in records.get(key_of(head), {"error": "not run yet"})
            if done or time.monotonic() > end:
                continue
            record = {**head, **run_case(name, method, strategy, devices)}
            records[key_of(head)] = record
            write_records(args.out, list(records.values()))
            print(
                {key: value for key, value in record.items() if key not in ("source", "version", "command")}, flush=True
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases, write the records and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=WORKLOADS, metavar="MODEL")
    parser.add_argument("--methods", nargs="+", default=("dense", "max", "recompute"), choices=KNOWN)
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, choices=STRATEGIES)
    parser.add_argument("--devices", nargs="+", type=int, default=(1, 2), help="how many GPUs")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no further case starts")
    parser.add_argument("--out", type=Path, default=Path("scaling.json"))
    args = parser.parse_args(argv)
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
