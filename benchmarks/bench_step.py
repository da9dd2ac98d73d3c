"""A training step through a Trainer: memory, time and gradients of each way to keep less for backward.

    python benchmarks/bench_step.py --quick
    python benchmarks/bench_step.py --together 7 --offload-file activation_offloading.py
    python benchmarks/bench_step.py --table compiled --mode default --together 6
    python benchmarks/bench_step.py --table gpus --devices 1 2 --methods dense max recompute

README.md has the commands of all tables, the methods, and the figures and how they are measured. Every case runs in a
fresh process. Its fit warms up and then measures in turns; with ``--together N``, N cases of a model warm up side
by side and then take turns, so that a drift of the machine affects all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import logging
import math
import multiprocessing
import os
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd import DeviceType
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import MIB, Record, RecordFile, Records, finish, start_in_fork, synchronize
from benchmarks.models import TRAINED, WORKLOADS, blocks_of, checkpoint_blocks, describe
from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, Keep, revert
from lightning_actprune.analysis.allocation import check_memory_budget
from lightning_actprune.analysis.step_memory import PHASES, StepMemory
from lightning_actprune.config import Operator
from lightning_actprune.replay.module import ReplayedModule

EXACT, PRESETS = ("dense", "checkpoint", "offload", "rounded"), ("paper", "balanced", "max", "recompute")
METHODS = ("dense", "checkpoint", "offload", "balanced", "max", "recompute", "budget:0.5")
BUDGET, COMPILER, ERROR = "budget:", "compiler:", "error:"
EAGER, GRAPHS = "eager", "graphs"
MODES = (EAGER, GRAPHS, "aot_eager", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
ONE, STRATEGIES = "one GPU", ("ddp", "ddp, whole", "fsdp2")
KEYS = ("table", "model", "batch", "precision", "method", "mode", "strategy", "devices", "allocator")
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
USE_CUDA = ("monai", "diffusers", "torch_geometric")
"""What asks for CUDA when it is imported, after which processes that are forked cannot."""
WAITING = 0.6
"""Share of the time of a group of cases for which one waits for the others at most."""


# === Methods ==========================================================================================


def keep_of(options: Sequence[str]) -> Keep:
    """Parse the options of one operator in a setting."""
    given: dict[str, Any] = {"bits": None, "sparsity": 0.0, "max_dropped_energy": 1.0, "min_rows_for_low_bits": 0}
    for option in options:
        if option in ("swap", "unbiased"):
            given["selection"] = option
        elif option == "token":
            given["topk_over"] = option
        elif option.isdigit():
            given["bits"] = int(option)
        else:
            name, value = {"s": "sparsity", "b": "block_size", "e": "max_dropped_energy"}[option[0]], option[1:]
            given[name] = int(value) if name == "block_size" else float(value)
    return Keep(**given)


def rules_of(setting: str) -> dict[str, Keep | None]:
    """Return a setting, as ``linear:2+norm:4`` or ``linear:s0.6:b32:swap``, as rules; other operators stay dense."""
    rules: dict[str, Keep | None] = {}
    for part in setting.split("+"):
        operator, *options = part.split(":")
        if operator not in get_args(Operator):
            raise ValueError(f"{operator!r} is no operator")
        pattern = "*blocks.*" if "blocks" in options else f"type:{operator}"
        options = [option for option in options if option != "blocks"]
        rules[pattern] = None if options == ["dense"] else keep_of(options)
    return {**rules, "*": None}


def method_of(text: str) -> str:
    """Return a method of the command line, if it is one."""
    kind, _, value = text.partition(":")
    try:
        if text in (*EXACT, *PRESETS) or (kind == "budget" and value):
            return text
        if kind in ("compiler", "error") and float(value) <= 1:
            return text
        if value and rules_of(text):
            return text
    except (KeyError, ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no method ({error}); README.md lists them") from None
    raise argparse.ArgumentTypeError(f"{text!r} is no method; README.md lists them")


def callbacks_of(method: str, offload_file: Path | None = None, graphs: bool = False) -> list[pl.Callback]:
    """Return the callbacks that a method adds to a Trainer."""
    if graphs and method in EXACT:
        return [Graphed()]
    if method == "offload":
        return [Offload(offload_file)]
    if method in EXACT or method.startswith(COMPILER):
        return []
    if method.startswith(BUDGET):
        value = method.removeprefix(BUDGET)
        budget = float(value) if value.replace(".", "").isdigit() else value
        return [ActivationPruning(memory_budget=budget, cuda_graphs=graphs, verbose=0)]
    if method.startswith(ERROR):
        return [ActivationPruning(max_error=float(method.removeprefix(ERROR)), cuda_graphs=graphs, verbose=0)]
    if method in PRESETS:
        return [ActivationPruning(method, cuda_graphs=graphs, verbose=0)]
    return [ActivationPruning(rules=rules_of(method), cuda_graphs=graphs, verbose=0)]


class Offload(pl.Callback):
    """Runs forward and backward of every step in the context of TRL's ``activation_offloading.py``."""

    def __init__(self, path: Path) -> None:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        self.module.logger = logging.getLogger(path.stem)  # its own one asks for the state of a distributed run
        self.entered = contextlib.ExitStack()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.context = self.module.get_act_offloading_ctx_manager(pl_module.model, warn_if_no_head=False)

    def on_train_batch_start(self, *_: Any) -> None:
        self.entered.enter_context(self.context)

    def on_after_backward(self, *_: Any) -> None:
        self.entered.close()

    def on_exception(self, *_: Any) -> None:
        self.entered.close()


class Graphed(pl.Callback):
    """Replays the whole model with its loss by torch's own ``make_graphed_callables``."""

    def on_train_batch_start(self, trainer: Any, pl_module: Training, batch: Any, batch_idx: int) -> None:
        if batch_idx != 4:
            return
        buffers = [(buffer, buffer.clone()) for buffer in pl_module.buffers()]
        lossy = Lossy(pl_module.model, pl_module.workload.loss)
        with trainer.precision_plugin.train_step_context(), torch.autocast("cuda", cache_enabled=False):
            graphed = torch.cuda.make_graphed_callables(lossy, tuple(batch))
        pl_module.graphed = lambda *batch: graphed(*batch)  # which is no module of this one
        for buffer, values in buffers:
            buffer.copy_(values)
        torch.cuda.empty_cache()


# === Training =========================================================================================


class Case(NamedTuple):
    """What is measured."""

    model: str
    method: str
    mode: str = EAGER  # or how the model is compiled
    strategy: str = ONE
    devices: int = 1
    precision: str = "bf16-mixed"
    batches: float = 2  # of models.py in one: with one, the host is as slow as the GPU
    accelerator: str = "gpu"

    @property
    def compiles(self) -> bool:
        """Whether the model is compiled."""
        return self.mode not in (EAGER, GRAPHS)

    def head(self) -> Record:
        """Return the fields that identify this case in a record."""
        head = describe(self.model, self.batches) | {"precision": self.precision, "method": self.method}
        head |= {"mode": self.mode, "strategy": self.strategy, "devices": self.devices}
        return head | ({"allocator": os.environ[ALLOCATOR]} if ALLOCATOR in os.environ else {})


class Lossy(nn.Module):
    """A model with its loss."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *batch: Tensor) -> Tensor:
        return self.loss(self.model, *batch)


class Training(pl.LightningModule):
    """A workload as a LightningModule, made where it is trained; a batch larger than ``samples`` repeats these."""

    def __init__(self, case: Case, place: str, samples: int | None = None, **sizes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case, self.workload = case, WORKLOADS[case.model]
        self.graphed: Callable[..., Tensor] | None = None
        self.batch_size = int(case.batches * self.workload.batch)
        with torch.device(place):
            self.model = self.workload.build(**sizes)
            self.samples = self.workload.data(samples or self.batch_size)
        if case.method == "checkpoint":
            checkpoint_blocks(self.model)
        if case.compiles and case.strategy != "fsdp2":
            self.model = torch.compile(self.model, **compiler_arguments(case.mode))

    def configure_model(self) -> None:
        """Shard each block where FSDP2 has made a mesh, and compile the blocks if the case says so."""
        mesh = getattr(self, "_device_mesh", None)
        if mesh is None or isinstance(self.model, FSDPModule):
            return
        for part in (*blocks_of(self.model), self.model):
            fully_shard(part, mesh=mesh["data_parallel"])
            if self.case.compiles and part is not self.model:
                part.compile(**compiler_arguments(self.case.mode))

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return self.workload.loss(self.model, *batch) if self.graphed is None else self.graphed(*batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-4, fused=True)

    def train_dataloader(self) -> Iterable[Any]:
        return itertools.repeat(tuple(self.samples))

    def on_after_batch_transfer(self, batch: tuple[Tensor, ...], dataloader_idx: int) -> tuple[Tensor, ...]:
        if self.batch_size == len(batch[0]):
            return batch
        times = math.ceil(self.batch_size / len(batch[0]))
        return tuple(torch.cat([samples] * times)[: self.batch_size] for samples in batch)


def compiler_arguments(mode: str) -> dict[str, str]:
    return {"backend": mode} if mode == "aot_eager" else {"mode": mode}


def train(training: Training, callbacks: Sequence[pl.Callback], steps: int) -> None:
    case = training.case
    strategy: str | Strategy = "auto"
    if case.strategy == "fsdp2":
        strategy = ModelParallelStrategy(case.devices, 1, save_distributed_checkpoint=False)
    elif case.strategy != ONE:
        strategy = DDPStrategy()
    with TemporaryDirectory() as folder:
        pl.Trainer(
            max_steps=steps, accelerator=case.accelerator, strategy=strategy, devices=case.devices,
            precision=case.precision, logger=False, callbacks=list(callbacks), enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, default_root_dir=folder,
        ).fit(training)  # fmt: skip


# === Figures of a fit =================================================================================


class Plan(NamedTuple):
    """How many steps a fit has of each kind. A budget chooses, probes and measures in the first six steps at most."""

    warm_up: int = 6
    alone: int = 4
    in_a_row: int = 16
    turns: int = 3

    @property
    def turn(self) -> int:
        return 1 + self.alone + self.in_a_row

    @property
    def steps(self) -> int:
        return self.warm_up + self.turns * self.turn + 1  # with the one that is profiled


QUICK = Plan(alone=1, in_a_row=2, turns=1)


class Queue:
    """Where cases that run side by side wait for each other at the start of each turn, and measure one by one.

    Nobody waits any more after so many seconds.
    """

    def __init__(self, parties: int, turns: int, seconds: float) -> None:
        fork = multiprocessing.get_context("fork")
        self.parties, self.end, self.lock = parties, time.monotonic() + seconds, fork.Lock()
        self.counts = [fork.Value("i", 0) for _ in range(turns)]

    def arrive(self, turn: int) -> None:
        """Count this process."""
        with self.counts[turn].get_lock():
            self.counts[turn].value += 1

    def wait(self, turn: int) -> bool:
        """Count this process, wait for all, or until the time is up; return whether all have arrived."""
        self.arrive(turn)
        while self.counts[turn].value < self.parties and time.monotonic() < self.end:
            time.sleep(0.02)
        return self.counts[turn].value >= self.parties


class StepFigures(pl.Callback):
    """Measures the memory of one step, and times others; a Trainer's last callback. Without a queue it is alone."""

    def __init__(self, plan: Plan, queue: Queue | None = None) -> None:
        self.plan, self.queue = plan, queue
        self.made, self.warm_up_s, self.arrived = time.perf_counter(), 0.0, 0
        self.alone, self.held = True, False
        self.begin()

    def begin(self) -> None:
        """Forget what was measured."""
        self.memory: Record = {}
        self.issued: list[list[float]] = [[] for _ in range(self.plan.turns)]
        self.ended: list[list[Any]] = [[] for _ in range(self.plan.turns)]
        self.number = self.before = 0
        self.profile: profile | None = None
        self.allocation: Any = None

    def on_train_start(self, *_: Any) -> None:
        self.begin()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.number = batch_idx
        turn, step = divmod(batch_idx - self.plan.warm_up, self.plan.turn)
        if step == 0 and 0 <= turn < self.plan.turns:
            self.take_turn(turn)
        if batch_idx == self.plan.warm_up and torch.cuda.is_available():
            synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = requested()
        if batch_idx == self.plan.steps - 1 and torch.cuda.is_available():
            synchronize()
            self.profile = profile(activities=[ProfilerActivity.CUDA])
            self.profile.start()

    def on_before_zero_grad(self, *_: Any) -> None:
        # Lightning zeroes gradients between forward and backward: those of the step before are here before and after.
        if self.number == self.plan.warm_up and torch.cuda.is_available():
            self.memory["activations_mib"] = round((requested() - self.before) / MIB, 2)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now, (turn, step) = time.perf_counter(), divmod(batch_idx - self.plan.warm_up, self.plan.turn)
        if 0 <= turn < self.plan.turns:
            if step >= self.plan.alone:
                self.ended[turn].append(moment())
            else:
                synchronize()
            if step == self.plan.alone:
                synchronize()
            if 0 < step <= self.plan.alone:
                self.issued[turn].append((now - self.began) * 1e3)
        if batch_idx == self.plan.warm_up:
            for callback in trainer.callbacks:
                self.allocation = getattr(callback, "allocation", self.allocation)
            replays = [part._replay for part in pl_module.modules() if isinstance(part, ReplayedModule)]
            if replays:
                reasons = "; ".join(replay.reason for replay in replays)
                self.memory |= {"graphs": sum(replay.graphs for replay in replays), "why_eager": reasons}
            if torch.cuda.is_available():
                most = {"peak_mib": torch.cuda.max_memory_allocated(), "reserved_mib": torch.cuda.max_memory_reserved()}
                self.memory |= {name: round(size / MIB, 2) for name, size in most.items()}
        if batch_idx == self.plan.steps - 1 and self.profile is not None:
            self.profile.stop()
        self.began = time.perf_counter()

    def on_train_end(self, *_: Any) -> None:
        self.release()

    def figures(self) -> Record:
        """Return the figures of a fit."""
        synchronize()
        steps = [[between_ms(*pair) for pair in itertools.pairwise(ended)] for ended in self.ended]
        figures: Record = dict(self.memory)
        for name, turns in (("step_ms", steps), ("host_ms", self.issued)):
            medians = [round(statistics.median(turn), 2) for turn in turns]
            figures[name] = round(statistics.median(medians), 2)
            if len(medians) > 1:
                figures[f"{name}_rounds"] = medians
        if self.profile is not None:
            figures["gpu_ms"] = round(busy_ms(self.profile.events()), 2)
        others = {} if self.alone else {"others_warmed_up": True}
        return {**figures, "in_a_row": self.plan.in_a_row, **others}

    def take_turn(self, turn: int) -> None:
        """Wait until the other cases are ready for the same turn, and until none of them measures."""
        synchronize()
        if turn == 0:
            self.warm_up_s = round(time.perf_counter() - self.made, 1)
        if self.queue is None:
            return
        if turn > 0:
            self.release()
        elif torch.cuda.is_available():
            torch.cuda.empty_cache()  # for the others
        if turn == self.arrived:  # and in no fit before
            self.arrived += 1
            self.alone &= self.queue.wait(turn)
        self.held = self.held or self.queue.lock.acquire()

    def release(self) -> None:
        """Let another case measure."""
        try:
            synchronize()
        finally:  # also after an error of the device
            if self.held:
                self.held = False
                self.queue.lock.release()

    def leave(self) -> None:
        """Let nobody wait for this case any more, whatever has become of its fit."""
        with contextlib.suppress(RuntimeError):  # an error of the device, which its fit has raised
            self.release()
        if self.queue is not None:
            for turn in range(self.arrived, self.plan.turns):
                self.queue.arrive(turn)
            self.arrived = self.plan.turns


def requested() -> int:
    """Return the bytes that tensors have asked the allocator for."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def moment() -> Any:
    """Return the present moment of the GPU's work, or of the clock without one."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between_ms(start: Any, end: Any) -> float:
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)


def busy_ms(events: Iterable[Any]) -> float:
    """Return for how long there is any event of a GPU, in milliseconds."""
    spans = sorted((e.time_range.start, e.time_range.end) for e in events if e.device_type == DeviceType.CUDA)
    busy, until = 0.0, 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / 1e3


class GradientError(pl.Callback):
    """Compares the gradient after the last step with that of the dense model, to which it reverts the model."""

    def __init__(self) -> None:
        self.figures: Record = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batch = batch

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        x, *targets = self.batch
        if pl_module.case.method == "rounded":
            x = x * (1 + torch.finfo(torch.bfloat16).eps / 2)
        our_loss, ours = backward(trainer, pl_module, (x, *targets))
        revert(pl_module)
        loss, exact = backward(trainer, pl_module, self.batch)
        self.figures = compare(ours, exact) | {"loss_off": float(f"{abs(our_loss / loss - 1):.1e}")}


def backward(trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of one step, and its gradients by the names of their parameters."""
    pl_module.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with trainer.precision_plugin.train_step_context():
        loss = pl_module.training_step(batch, 0)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}


def compare(ours: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> Record:
    """Return cosine and squared error of all gradients as one vector, which is never made: it may not fit."""
    sums = []
    for name, gradient in exact.items():
        h, g = ours[name].double().flatten(), gradient.double().flatten()
        sums.append(torch.stack([g @ h, h @ h, g @ g]))
    dot, ours_squared, squared = torch.stack(sums).sum(0).tolist()
    error = (ours_squared - 2 * dot + squared) / squared
    return {"cosine": round(dot / math.sqrt(ours_squared * squared), 9), "error": float(f"{error:.4g}")}


# === Cases ============================================================================================


def measure(case: Case, args: argparse.Namespace, queue: Queue | None, rank: int = 0, port: int = 0) -> Record:
    """Return the figures of one process of a case."""
    plan = QUICK if args.quick else Plan(turns=args.turns, in_a_row=args.in_a_row)
    plan = plan._replace(warm_up=40) if case.mode == GRAPHS else plan
    figures, error = StepFigures(plan, queue), GradientError()
    try:
        training = Training(case, prepare(case, rank, port))
        callbacks = callbacks_of(case.method, args.offload_file, case.mode == GRAPHS)
        ours = [callback for callback in callbacks if isinstance(callback, ActivationPruning)]
        monitor = ActivationMemoryMonitor(figures.plan.warm_up - 1, verbose=0)
        plain = case.mode == EAGER and case.devices == 1
        counted = plain and not case.method.startswith(("offload", BUDGET))
        more: list[pl.Callback] = [monitor] if counted else []
        more += [error] if plain and (ours or case.method == "rounded") else []
        train(training, [*callbacks, *more, figures], figures.plan.steps)
        record = {**figures.figures(), **error.figures}
    finally:
        figures.leave()
    if counted:
        record["accounted_mib"] = round(monitor.report.stored_bytes / MIB, 2)
    if case.compiles:
        record |= {"warm_up_s": figures.warm_up_s, **packed(ours)}
    if case.method.startswith(BUDGET):
        record |= predicted(ours[0], figures)
    if case.devices > 1:
        record.pop("gpu_ms", None)  # collectives that wait for the other processes count as busy
        dist.destroy_process_group()
    return record


def prepare(case: Case, rank: int, port: int) -> str:
    """Make this process one of those of a case; return its device."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.backends.cudnn.allow_tf32 = case.precision == "bf16-mixed"
    if case.strategy != ONE:
        known = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
        known |= {"WORLD_SIZE": case.devices, "LOCAL_WORLD_SIZE": case.devices, "TORCHELASTIC_RUN_ID": "bench_step"}
        os.environ.update({key: str(value) for key, value in known.items()})
    if case.compiles:
        torch._dynamo.config.optimize_ddp = case.strategy != "ddp, whole"
    if case.method.startswith(COMPILER):
        torch._functorch.config.activation_memory_budget = float(case.method.removeprefix(COMPILER))
    if case.accelerator != "gpu":
        torch.set_num_threads(1)
        return "cpu"
    torch.cuda.set_device(rank)
    return f"cuda:{rank}"


def packed(ours: Sequence[ActivationPruning]) -> Record:
    """Return what is packed of what could be in compiled graphs."""
    rows = [row for callback in ours for row in callback.compiled]
    sizes = {"packed_mib": sum(r.stored_bytes for r in rows), "packable_mib": sum(r.dense_bytes for r in rows)}
    return {name: round(size / MIB, 2) for name, size in sizes.items()} if ours else {}


def predicted(pruning: ActivationPruning, figures: StepFigures) -> Record:
    """Return what a budget was taken for, and the number and predicted peak of the setting that was chosen."""
    allocation, budget = pruning.allocation, pruning.memory_budget
    if allocation != figures.allocation:
        raise RuntimeError("another setting was chosen after the step that was measured")
    dense = allocation.dense.peak_bytes + allocation.off
    limit = budget * dense if isinstance(budget, float) else check_memory_budget(budget)
    sizes = {"budget_mib": limit, "predicted_mib": allocation.peak_bytes, "predicted_dense_mib": dense}
    return {"setting": allocation.number, **{name: round(size / MIB, 2) for name, size in sizes.items()}}


def measure_timeline(case: Case, args: argparse.Namespace) -> Record:
    """Return the memory of one step of a case over its moments."""
    monitor, figures = ActivationMemoryMonitor(4, verbose=0), StepFigures(QUICK._replace(warm_up=5))
    training = Training(case, prepare(case, 0, 0))
    train(training, [*callbacks_of(case.method, args.offload_file), monitor, figures], figures.plan.steps)
    return {"plain_peak_mib": figures.memory.get("peak_mib"), **timeline(monitor.report.step)}


def timeline(memory: StepMemory, points: int = 200, holders: int = 12) -> Record:
    """Return the peaks of a step, what they consist of, and the highest of each run of moments for a picture."""

    def mib(nbytes: float, digits: int | None = 1) -> float:
        return round(nbytes / MIB, digits)

    highest, peaks = memory.moments[memory.peak_in()], {phase: memory.peak_in(phase) for phase in PHASES}
    lowered = {name: memory.bytes_without(fraction) for name, fraction in (("half", 0.5), ("all", 1.0))}
    count, in_use = len(memory.moments), memory.interval_bytes
    runs = [range(count * i // points, count * (i + 1) // points) for i in range(points)]
    chosen = sorted({max(run, key=in_use.__getitem__) for run in runs if run} | set(peaks.values()))
    groups = memory.groups(memory.forward_end)[:holders]
    series = {name: [mib(line[i], None) for i in chosen] for name, line in memory.series().items()}
    return {
        "peak_mib": mib(memory.peak_bytes),
        "peak_phase": highest.phase,
        "peak_at": highest.fqn,
        "peak_operator": highest.operator,
        "parts_mib": {phase: {name: mib(size) for name, size in memory.parts(i).items()} for phase, i in peaks.items()},
        "without_mib": {
            name: [mib(max(line)), memory.moments[max(range(len(line)), key=line.__getitem__)].phase]
            for name, line in lowered.items()
        },
        "holders_mib": [[group.label, group.packed, group.count, mib(group.nbytes)] for group in groups],
        "phases": [memory.moments[i].phase for i in chosen],
        "series_mib": series | {"in use": [mib(in_use[i], None) for i in chosen]},
    }


def run_together(cases: Sequence[Case], args: argparse.Namespace) -> Records:
    """Measure cases side by side, each in fresh processes; return the figures of each, or its error."""
    seconds = args.case_seconds
    if args.timeline:
        return finish(seconds, [start_in_fork(measure_timeline, case, args) for case in cases])
    if cases[0].devices == 1:
        queue = Queue(len(cases), QUICK.turns if args.quick else args.turns, WAITING * seconds)
        return finish(seconds, [start_in_fork(measure, case, args, queue) for case in cases])
    [case] = cases
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = range(case.devices)
    found = finish(seconds, [start_in_fork(measure, case, args, None, rank, port) for rank in ranks], of_one=True)
    failed = [of_rank for of_rank in found if isinstance(of_rank.get("error"), str)]
    if failed:  # the others waited for one that has failed until their time was up
        return [min(failed, key=lambda of_rank: "took over" in of_rank["error"])]
    numbers = (key for key, value in found[0].items() if isinstance(value, int | float))
    return [found[0] | {key: max(of_rank[key] for of_rank in found) for key in numbers}]


def with_speed(record: Record) -> Record:
    """Add the samples of a second to a record whose steps were timed."""
    if "step_ms" in record:
        record["samples_per_s"] = round(record["devices"] * record["batch"] / record["step_ms"] * 1e3, 1)
    return record


def cases_of(args: argparse.Namespace, accelerator: str) -> list[Case]:
    places = [(ONE, 1)] if 1 in args.devices else []
    places += itertools.product(args.strategies, [count for count in args.devices if count > 1])
    return [
        Case(model, method, mode, strategy, devices, args.precision, args.batches, accelerator)
        for model, (strategy, devices), method, mode in itertools.product(args.models, places, args.methods, args.mode)
        if method != "rounded" or WORKLOADS[model].data(1)[0].is_floating_point()
        if mode != GRAPHS or method not in EXACT[1:]
    ]


def parser_for(text: str | None, name: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all scripts that measure steps."""
    parser = common.parser_for(text, name)
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, metavar="MODEL")
    parser.add_argument("--methods", nargs="+", type=method_of, metavar="METHOD")
    parser.add_argument("--precision", default="bf16-mixed", choices=("bf16-mixed", "bf16-true", "32-true"))
    parser.add_argument("--together", type=int, default=1, help="cases that run side by side")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no further case starts")
    parser.add_argument("--case-seconds", type=float, default=500, help="that cases which run together have")
    parser.add_argument("--offload-file", type=Path, help="TRL's activation_offloading.py")
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_for(__doc__, "steps")
    parser.add_argument("--table", default="trainer", help="where the records belong to (README.md)")
    parser.add_argument("--mode", nargs="+", default=[EAGER], choices=MODES, help="how models run")
    parser.add_argument("--turns", type=int, default=Plan().turns, help="of each case")
    parser.add_argument("--in-a-row", type=int, default=Plan().in_a_row, help="steps of a turn without waiting")
    parser.add_argument("--batches", type=float, default=2, help="batches of models.py in one")
    parser.add_argument("--devices", nargs="+", type=int, default=(1,), help="numbers of GPUs")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, help="on several GPUs")
    parser.add_argument("--timeline", action="store_true", help="record the memory of one step over time instead")
    args = parser.parse_args(argv)
    if args.timeline and args.out == common.RESULTS / "steps.json":
        args.out = common.RESULTS / "timeline.json"
    args.models = args.models or (("small",) if args.quick else TRAINED)
    eager = EAGER in args.mode
    args.methods = args.methods or [m for m in METHODS if eager or m not in ("offload", "budget:0.5")]
    args.strategies = args.strategies or (("ddp", "fsdp2") if eager else STRATEGIES)
    if eager and any(method.startswith(COMPILER) for method in args.methods):
        parser.error(f"{COMPILER}SHARE is the budget of a compiler, and needs a --mode")
    if eager and "ddp, whole" in args.strategies:
        parser.error("--strategies 'ddp, whole' is for compiled models, and needs a --mode")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases that the file lacks, and print the table."""
    args = parse(argv)
    gpu = common.has_gpu()
    common.require(gpu, args.quick)
    file = RecordFile(args.out, KEYS, args.again)
    head = {} if args.timeline else {"table": args.table}
    cases = cases_of(args, "gpu" if gpu else "cpu")
    lacking = [case for case in cases if file.lacks({**head, **case.head()})]
    with torch.device("meta"):  # so that processes need not import what models are built with
        for model in dict.fromkeys(case.model for case in lacking):
            if WORKLOADS[model].source not in USE_CUDA:
                WORKLOADS[model].build()
    end = time.monotonic() + args.seconds
    while lacking and time.monotonic() < end:
        first, count = lacking[0], 1 if lacking[0].devices > 1 else args.together
        group = [case for case in lacking if case[:1] + case[3:] == first[:1] + first[3:]][:count]
        lacking = [case for case in lacking if case not in group]
        possible = [case for case in group if case.method != "offload" or args.offload_file is not None]
        missing = {"error": "offload needs --offload-file", "gpu": "none", **common.software()}
        found = dict(zip(possible, run_together(possible, args) if possible else (), strict=True))
        for case in group:
            record = {**head, **case.head(), **found.get(case, missing)}
            file.add(with_speed(record))
            print({key: record[key] for key in record if key not in ("series_mib", "phases")}, flush=True)
    records = [r for r in (file.records.get(file.key({**head, **case.head()})) for case in cases) if r]
    columns = "model method mode devices activations_mib peak_mib accounted_mib step_ms host_ms gpu_ms cosine error"
    common.show(f"Steps: {args.table}", records, columns.split())
    return int(any(isinstance(record.get("error"), str) for record in records))


if __name__ == "__main__":
    sys.exit(main())
