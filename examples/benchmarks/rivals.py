"""Ways to need less memory side by side through a Trainer: dense, checkpointing, offloading, the presets, a budget.

    python examples/benchmarks/rivals.py --together 7 --offload-file activation_offloading.py --out rivals.json
    python examples/benchmarks/rivals.py --methods dense max budget:4GiB --seconds 500 --out rivals.json
    python examples/benchmarks/rivals.py --mode default --together 6 --out compiled.json
    python examples/benchmarks/rivals.py --largest 16 --out rivals_largest.json

Models as their libraries build them, on one GPU, ``Trainer(precision="bf16-mixed")``, fused AdamW, the same
batch over and over, which lies on the GPU. Every case runs in a fresh process. The first steps of its fit warm up, with
the callback's probes in them, in one the memory is measured, and the others are timed (``step_figures.py``). With
``--together`` so many cases of a model warm up at the same time, and then take turns: one measures while the rest
waits.

With ``--mode``, models are given to ``torch.compile`` as a whole, in that mode. ``warm_up_s`` is then what all before
the measured steps took, the model and its compilation too, several processes at a time. Where steps are replayed from
CUDA graphs (``reduce-overhead``), ``reserved_mib`` alone has the memory of those, which lies in pools of their own.
``packed_mib`` is what the pass says that it keeps of ``packable_mib``, nothing where the code came out of a cache.

``step_ms`` and ``host_ms`` are medians over the turns, in earlier records over fits in processes of their own.
Records without ``in_a_row`` are of an earlier version that waited for the device after each step: there ``step_ms`` has
the host's time in forward in it. Those of GPT-2 in ``budgets.json`` and of ``rivals_453fd4e.json`` have the mean of
steps in a row.
``cosine`` is that of the gradient of all parameters after the last step with the one of the dense model from the same
weights, batch and random numbers; only methods of this package have it, the gradients of the others are exact, and
eager steps, since compiled ones draw other random numbers.

``checkpoint``
    The library's own activation checkpointing of every block, by its own switch where it has one.
``offload``
    Streamed offloading to pinned memory of the host by the file that ``--offload-file`` names, which is TRL's
    ``trl/models/activation_offloading.py``, around forward and backward as its trainers put it.
``balanced``, ``max``, ``recompute``
    ``ActivationPruning`` with that preset.
``budget:4GiB``, ``budget:0.5``
    ``ActivationPruning(memory_budget=...)`` with that size or fraction.
``compiler:0.5``
    The dense model under ``torch._functorch.config.activation_memory_budget``, of that share, with ``--mode``.

``--largest`` searches the largest batch under a cap on what torch may allocate, as ``batch_size.py`` does and with its
few repeated samples, and then takes the same figures at that batch, but for the cosine; where those steps run out of
memory, at a smaller one. With ``--together``, the caps of all must fit into the GPU at the same time. Offloading is
left out unless it is named: what bounds its batch is the host's memory, of which it may take all. Records say if
torch's allocator has settings of its own (``PYTORCH_CUDA_ALLOC_CONF``).

Records are written after every case. A case that the file has already is not run again, unless it failed; after
``--seconds`` no further one starts. So a benchmark that was cut short goes on when it is called again. With ``--again``
it is run again, and its record, the new one, has the times of the turns before as well if torch, triton and the kind of
GPU are the same. Records do not know the version of this package: join turns of the same code alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks import summaries
from examples.benchmarks.batch_size import RESOLUTION, Case, Training, search, train
from examples.benchmarks.common import (
    MIB,
    require_gpu_in_fork,
    software,
    write_records,
)
from examples.benchmarks.models import described
from examples.benchmarks.step_figures import TURNS, Alone, StepFigures, in_turns, joined
from examples.benchmarks.summaries import BUDGET, Record, Records, Summary, beside, groups
from examples.benchmarks.third_party import WORKLOADS, checkpoint_blocks
from lightning_actprune import ActivationPruning, revert
from lightning_actprune.analysis.allocation import check_memory_budget
from lightning_actprune.codec.blocks import ceil_div

MODELS = (
    "vit_base_patch16_224",
    "resmlp_12_224",
    "GPT2LMHeadModel",
    "LlamaForCausalLM, 1.1B",
    "convnext_tiny",
    "resnet50",
)
OTHERS = ("dense", "checkpoint", "offload")
METHODS = (*OTHERS, "balanced", "max", "recompute")
BATCHES = 2
"""Batches of ``models.py`` in one: with one the host is as slow as the GPU."""
CASE_SECONDS, COMPILED_SECONDS, LARGEST_SECONDS = 300, 500, 500
EAGER, MODES = "eager", ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
COMPILER = "compiler:"
"""Before the compiler's own ``activation_memory_budget``, a share of what the dense model keeps compiled."""
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
"""The variable with the settings of torch's allocator."""


class Rival(Training):
    """A workload that is made where it is trained."""

    def __init__(self, name: str, method: str, place: str, **more: Any) -> None:
        super().__init__(name, "dense", place, **more)
        if method == "checkpoint":
            checkpoint(self.model)


def checkpoint(model: nn.Module) -> None:
    """Let every block keep only its input and run again, by the switch of the library if there is one."""
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()
    elif hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        checkpoint_blocks(model)


class Offload(pl.Callback):
    """Runs forward and backward of every step in the context of the file with the offloading.

    Args:
        path: Of the file.
    """

    def __init__(self, path: Path) -> None:
        self.module = loaded(path)
        self.entered = ExitStack()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.context = self.module.get_act_offloading_ctx_manager(pl_module.model, warn_if_no_head=False)

    def on_train_batch_start(self, *_: Any) -> None:
        self.entered.enter_context(self.context)

    def on_after_backward(self, *_: Any) -> None:
        self.entered.close()

    def on_exception(self, *_: Any) -> None:
        self.entered.close()


def loaded(path: Path) -> ModuleType:
    """Return a file as a module, whose logger works without the state of a distributed run that its own asks for."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.logger = logging.getLogger(path.stem)
    return module


def callbacks_of(method: str, offload_file: Path | None) -> list[pl.Callback]:
    """Return the callbacks that a method adds to a Trainer."""
    if method == "offload":
        return [Offload(offload_file)]
    if is_exact(method):
        return []
    if method.startswith(BUDGET):
        return [ActivationPruning(memory_budget=budget_of(method), verbose=0)]
    return [ActivationPruning(method, verbose=0)]


def is_exact(method: str) -> bool:
    """Return whether a method is none of this package, so that gradients are exact."""
    return method in OTHERS or method.startswith(COMPILER)


def budget_of(method: str) -> str | float:
    """Return the budget that a method names: a fraction, or a size as it is written."""
    value = method.removeprefix(BUDGET)
    try:
        return float(value)
    except ValueError:
        return value


class GradientError(pl.Callback):
    """Compares the gradient after the last step with that of the dense model, which it leaves."""

    cosine: float

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batch = batch

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        ours = gradients(trainer, pl_module, self.batch)
        revert(pl_module)
        self.cosine = round(cosine(ours, gradients(trainer, pl_module, self.batch)), 9)


def gradients(trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any) -> dict[str, Tensor]:
    """Return the gradients of one step by the names of their parameters."""
    pl_module.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with trainer.precision_plugin.train_step_context():
        loss = pl_module.training_step(batch, 0)
    loss.backward()
    return {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}


def cosine(ours: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the cosine of all gradients as one vector, which is never made: it may not fit beside them."""
    sums = []
    for name, gradient in exact.items():
        x, y = ours[name].double().flatten(), gradient.double().flatten()
        sums.append(torch.stack([x @ y, x @ x, y @ y]))
    dot, *squares = torch.stack(sums).sum(0).tolist()
    return dot / math.sqrt(math.prod(squares))


def measure(
    name: str, method: str, mode: str, offload_file: Path | None, accelerator: str, figures: Alone
) -> dict[str, Any]:
    """Return the figures of one case."""
    place, batch = "cuda" if accelerator == "gpu" else "cpu", BATCHES * WORKLOADS[name].batch
    training = Rival(name, method, place, samples=batch)
    training.batch_size = batch
    callbacks = callbacks_of(method, offload_file)
    ours, error = [] if is_exact(method) else callbacks, GradientError()
    if method.startswith(COMPILER):
        torch._functorch.config.activation_memory_budget = float(method.removeprefix(COMPILER))
    if mode != EAGER:
        training.model = torch.compile(training.model, mode=mode)
    compared = [error] if ours and mode == EAGER else []
    train(training, [*callbacks, *compared, figures], figures.steps, accelerator)
    found = {"batch": batch, **figures.found()} | ({"cosine": error.cosine} if compared else {})
    if mode != EAGER:
        found |= {"warm_up_s": figures.warm_up_s, **packed(ours)}
    return found | (predicted(callbacks[0], figures) if method.startswith(BUDGET) else {})


def packed(ours: Sequence[ActivationPruning]) -> dict[str, float]:
    """Return what is packed of what could be in compiled graphs."""
    parts = ("packed_mib", "stored_bytes"), ("packable_mib", "dense_bytes")
    return {
        key: round(sum(getattr(row, part) for row in callback.compiled) / MIB, 2)
        for callback in ours
        for key, part in parts
    }


def predicted(pruning: ActivationPruning, figures: StepFigures) -> dict[str, Any]:
    """Return what a budget was taken for and what was chosen: the number of the setting on the path, and its peak."""
    found, budget = pruning.allocation, pruning.memory_budget
    if found != figures.allocation:
        raise RuntimeError("another setting was chosen after the step that was measured")
    dense = found.dense.peak_bytes + found.off
    limit = budget * dense if isinstance(budget, float) else check_memory_budget(budget)
    sizes = {"budget_mib": limit, "predicted_mib": found.peak_bytes, "predicted_dense_mib": dense}
    return {"setting": found.number, **{name: round(size / MIB, 2) for name, size in sizes.items()}}


def measure_largest(
    name: str, method: str, offload_file: Path | None, cap_gib: float, accelerator: str, figures: Alone
) -> dict[str, Any]:
    """Return the largest batch of one case under a cap, and the figures there."""
    training = Rival(name, method, "cuda" if accelerator == "gpu" else "cpu")
    case = Case(f"{name}, {method}", training, partial(callbacks_of, method, offload_file), accelerator)
    batch = search(case, WORKLOADS[name].batch, cap_gib)
    trials = len(case.peaks)
    while batch and case.fit(batch, figures, steps=figures.steps) is None:  # a few steps may fit where more do not
        batch -= ceil_div(batch, RESOLUTION)
    if not batch:
        return {"batch": 0, "trials": trials, "peak_mib": None, "samples_per_s": None}
    return {"batch": batch, "trials": trials, **figures.found()}


def with_speed(record: Record) -> Record:
    """Return a record with the samples of a second, if its steps were timed."""
    timed = record.get("step_ms")
    return record if timed is None else {**record, "samples_per_s": round(record["batch"] / timed * 1e3, 1)}


def run_together(cases: Sequence[tuple[str, str]], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure cases, each in a fresh process; yield the figures of each, or its error."""
    missing = {"error": "without --offload-file nothing can be offloaded", "gpu": "none", **software()}
    possible = [case for case in cases if case[1] != "offload" or args.offload_file is not None]
    if args.largest is not None:
        seconds, run, more, turns = LARGEST_SECONDS, measure_largest, (args.offload_file, args.largest, "gpu"), 1
    else:
        seconds = CASE_SECONDS if args.mode == EAGER else COMPILED_SECONDS
        run, more, turns = measure, (args.mode, args.offload_file, "gpu"), TURNS
    found = iter(in_turns(seconds, run, [(*case, *more) for case in possible], turns))
    for case in cases:
        yield next(found) if case in possible else missing


Key = tuple[str, str, str, float | None, str | None]


def key_of(record: Record) -> Key:
    """Return what tells a case from the others of a file."""
    told = record.get("mode", EAGER), record.get("cap_gib"), record.get("allocator")
    return record["model"], record["method"], *told


def run_cases(args: argparse.Namespace, records: dict[Key, Record]) -> None:
    """Run what ``records`` lack, model by model, until the time is up."""
    end = time.monotonic() + args.seconds

    def key(name: str, method: str) -> Key:
        return name, method, args.mode, args.largest, os.environ.get(ALLOCATOR)

    none = {"error": "not run yet"}
    asked = itertools.product(args.models, args.methods)
    lacking = [case for case in asked if args.again or "error" in records.get(key(*case), none)]
    while lacking and time.monotonic() < end:
        # Caps fit beside each other whatever the model; without them, those that take turns are of one.
        alike = args.largest is not None
        cases = [case for case in lacking if alike or case[0] == lacking[0][0]][: args.together]
        lacking = [case for case in lacking if case not in cases]
        begin = time.monotonic()
        for (name, method), found in zip(cases, run_together(cases, args), strict=True):
            print(f"{name}, {method}: {found}, {time.monotonic() - begin:.0f} s", flush=True)
            before = records.get(key(name, method), none)
            records[key(name, method)] = with_speed(joined(before, {**head_of(name, method, args), **found}))
            write_records(args.out, list(records.values()))


def head_of(name: str, method: str, args: argparse.Namespace) -> Record:
    """Return what the record of a case begins with."""
    head = {**described(name, BATCHES), "method": method, "mode": args.mode}
    if args.largest is not None:
        head["cap_gib"] = args.largest
    if ALLOCATOR in os.environ:
        head["allocator"] = os.environ[ALLOCATOR]
    return head


def largest_batches(records: Records) -> Summary:
    """The largest batch of each method under the cap, and how fast it trains, beside dense."""
    rows = []
    told = [{"allocator": None, **record} for record in records]
    for (model, cap, allocator), group in groups(told, "model", "cap_gib", "allocator").items():
        dense = summaries.dense_of([r for r in group if r["batch"]])
        for r in group:
            cells = [r.get("error", "-"), "-", "-"]
            if "error" not in r:
                figures = ("batch", 0), ("samples_per_s", 1), ("peak_mib", 0)
                cells = [beside(r, dense or r, name, digits) for name, digits in figures]
            rows.append([", ".join(filter(None, (model, f"{cap:g} GiB", allocator))), r["method"], *cells])
    header = ("model and cap", "method", "largest batch", "samples a second", "peak MiB")
    return Summary("Largest batch under the cap; in brackets, how much more or less than dense", header, rows)


def method_of(text: str) -> str:
    """Return a method as it stands on the command line, if it is one."""
    if text in METHODS or text.removeprefix(BUDGET) not in ("", text):
        return text
    try:
        if text.startswith(COMPILER) and 0 <= float(text.removeprefix(COMPILER)) <= 1:
            return text
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(METHODS)}, {BUDGET}VALUE and {COMPILER}SHARE")


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=WORKLOADS, metavar="MODEL")
    parser.add_argument("--methods", nargs="+", type=method_of, metavar="METHOD")
    parser.add_argument("--mode", default=EAGER, choices=(EAGER, *MODES), help="of torch.compile")
    parser.add_argument("--together", type=int, default=1, help="cases that warm up at the same time")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no further case starts")
    parser.add_argument("--again", action="store_true", help="cases that the file has, for more turns of them")
    parser.add_argument("--offload-file", type=Path, help="TRL's activation_offloading.py")
    parser.add_argument("--largest", type=float, metavar="CAP_GIB", help="search the largest batch under this cap")
    parser.add_argument("--out", type=Path, default=Path("rivals.json"))
    args = parser.parse_args(argv)
    if args.mode != EAGER and args.largest is not None:
        parser.error("--largest is for eager models: a compiled one would be compiled for each batch that is tried")
    if args.mode == EAGER and any(method.startswith(COMPILER) for method in args.methods or ()):
        parser.error(f"{COMPILER}SHARE is the budget of a compiler, and needs a --mode")
    if args.methods is None:
        left_out = {"offload"} if args.largest is not None or args.mode != EAGER else set()
        args.methods = [method for method in METHODS if method not in left_out]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases that are not there yet, write the records and print the table."""
    args = parsed(argv)
    require_gpu_in_fork()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    before = json.loads(args.out.read_text()) if args.out.is_file() else []
    records = {key_of(record): record for record in before}
    run_cases(args, records)
    shown = [
        record
        for record in records.values()
        if (record.get("mode", EAGER), record.get("cap_gib")) == (args.mode, args.largest)
    ]
    summary = summaries.frontier(shown) if args.largest is None else largest_batches(shown)
    Console(width=None if sys.stdout.isatty() else 160).print(summary.rich())
    return int(any("error" in record for record in shown))


if __name__ == "__main__":
    sys.exit(main())
