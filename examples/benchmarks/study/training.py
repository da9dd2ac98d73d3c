"""The training that all tasks share: one optimizer step in a CUDA graph, and its learning rate over the epochs.

A step gathers its batch, runs forward and backward under bf16 autocast and AdamW with decoupled weight decay. All of it
is captured once and replayed, since an eager step of these small models is mostly launch overhead. What warms up the
capture is undone before the training starts. The learning rate rises over 5 % of the steps and then falls to zero on a
cosine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from examples.benchmarks.common import MIB
from examples.benchmarks.study.settings import Batch, autocast, training_loss
from examples.classifier import cosine_factor, parameter_groups
from lightning_actprune.compiled.report import Row
from lightning_actprune.compiled.scope import CompiledPacking
from lightning_actprune.convert import is_converted, mark_layers

WARMUP_STEPS = 4
"""Eager steps before the capture: kernels compile and the optimizer makes its state."""
WARMUP = 0.05


class Data(Protocol):
    """A data set on one device."""

    device: torch.device

    @property
    def facts(self) -> dict[str, Any]:
        """What identifies the data set in a record."""

    @property
    def shape(self) -> dict[str, int]:
        """What a model must know of the data."""

    def epoch_batches(self, batch: int) -> int:
        """Return the number of batches of an epoch."""

    def draw(self, steps: int, batch: int, generator: torch.Generator) -> Tensor:
        """Return the choices of one epoch, `[steps, ...]`."""

    def batch(self, choices: Tensor) -> Batch:
        """Return inputs and targets of the choices of one step."""

    def score(self, model: Callable[[Tensor], Tensor], limit: int | None) -> float:
        """Return how good the outputs of `model` are on what it was not trained on: the larger the better."""


@dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    Args:
        epochs: Number of epochs.
        batches: Steps per epoch.
        batch: Samples per step.
        lr: Highest learning rate.
        weight_decay: Weight decay of the matrices.
        precision: `bf16` (autocast) or `fp32`.
        compile: Backend that compiles the blocks, or `None`.
        clip: Norm of all gradients above which they are made smaller, or `None`.
    """

    epochs: int
    batches: int
    batch: int
    lr: float
    weight_decay: float
    precision: str
    compile: str | None
    clip: float | None = None


class TrainStep:
    """One optimizer step over static buffers, replayed from a CUDA graph where there is a GPU.

    Args:
        model: The model, already converted where it shall be.
        data: The data set.
        recipe: How to train.
    """

    def __init__(self, model: nn.Module, data: Data, recipe: Recipe) -> None:
        cuda = data.device.type == "cuda"
        self.model, self.data, self.precision, self.clip = model, data, recipe.precision, recipe.clip
        self.choices = first_choices(data, recipe)
        self.lr = torch.tensor(recipe.lr, device=data.device)
        self.loss_sum = torch.zeros((), device=data.device)
        groups = parameter_groups(model, recipe.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=self.lr, capturable=cuda, fused=cuda)
        self.peak_bytes: int | None = None
        """The most that is allocated in a step, on a GPU."""
        self.graph = self._capture() if cuda else None

    def __call__(self, choices: Tensor, lr: float) -> None:
        """Train on the samples that `choices` name at the learning rate `lr`."""
        self.choices.copy_(choices)
        self.lr.fill_(lr)
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()

    def state(self) -> dict[str, Any]:
        """Return what the next step depends on, but for its number."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state, in the memory that a captured step knows."""
        self.model.load_state_dict(state["model"])
        if self.graph is None:
            self.optimizer.load_state_dict(state["optimizer"])
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr
            return
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for number, values in state["optimizer"]["state"].items():
            for name, value in values.items():
                self.optimizer.state[parameters[number]][name].copy_(value)

    def _step(self) -> None:
        loss = training_loss(self.model, self.data.batch(self.choices), self.precision)
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss_sum += loss.detach()

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Return a graph of one step; weights, buffers and optimizer state are then as they were before."""
        tensors = *self.model.parameters(), *self.model.buffers()
        initial = [tensor.detach().clone() for tensor in tensors]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_STEPS):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.reset_peak_memory_stats()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self.peak_bytes = torch.cuda.max_memory_allocated() - sum(value.nbytes for value in initial)
        with torch.no_grad():
            for tensor, value in zip(tensors, initial, strict=True):
                tensor.copy_(value)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.loss_sum.zero_()
        return graph


def first_choices(data: Data, recipe: Recipe) -> Tensor:
    """Return choices of one step that depend on no seed: for what comes before the training."""
    return data.draw(1, recipe.batch, torch.Generator().manual_seed(0))[0]


class Trained(NamedTuple):
    """What came out of a training.

    Args:
        losses: Mean loss of each epoch.
        seconds: Without those of compilation and capture.
        peak_bytes: The most that was allocated in a step, on a GPU.
    """

    losses: list[float]
    seconds: float
    peak_bytes: int | None


class Cut(Exception):  # noqa: N818 - it is no error of anybody's
    """A training had to stop, and goes on from its state when it is run again."""


@dataclass(frozen=True)
class Until:
    """Where a training that takes long leaves its state, and until when it may go on.

    Args:
        path: Of the state, which is read if it is there.
        end: On the clock of `time.monotonic`.
    """

    path: Path
    end: float = math.inf

    def check(self, state: Callable[[], dict[str, Any]], next_s: float) -> None:
        """Write the state and raise `Cut` if the time does not last for `next_s` seconds more."""
        if time.monotonic() + next_s < self.end:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(f"{self.path.name}.part")
        torch.save(state(), unfinished)
        unfinished.replace(self.path)
        raise Cut

    def state(self) -> dict[str, Any] | None:
        """Return what an earlier run has left."""
        return torch.load(self.path, weights_only=True) if self.path.is_file() else None


def train(
    model: nn.Module, data: Data, recipe: Recipe, seed: int, epochs: int | None = None, until: Until | None = None
) -> Trained:
    """Train `model` and return what came out.

    Args:
        model: The model, already converted where it shall be.
        data: The data set.
        recipe: How to train.
        seed: Fixes order and augmentation.
        epochs: Stop after so many epochs of the recipe, in the middle of its learning rates.
        until: Where to go on and when to stop; without one, all is done at once.

    Raises:
        Cut: If the time was up after an epoch that was not the last one.
    """
    if recipe.compile is not None:
        compile_blocks(model, recipe.compile)
    step, batches = TrainStep(model, data, recipe), recipe.batches
    generator = torch.Generator().manual_seed(seed)
    losses, before = list[float](), 0.0
    state = None if until is None else until.state()
    if state is not None:
        step.restore(state["step"])
        generator.set_state(state["generator"])
        losses, before = state["losses"], state["seconds"]
    del state  # or weights and moments stay twice
    start, last = time.perf_counter() - before, epochs or recipe.epochs
    for epoch in range(len(losses), last):
        began = time.perf_counter()
        for i, choices in enumerate(data.draw(batches, recipe.batch, generator)):
            step(choices, recipe.lr * cosine_factor(epoch * batches + i, recipe.epochs * batches, WARMUP))
        losses.append(step.loss_sum.item() / batches)  # also waits for the GPU
        step.loss_sum.zero_()
        seconds = time.perf_counter() - start
        print(f"  epoch {epoch + 1}/{recipe.epochs}: loss {losses[-1]:.4f}, {seconds:.1f} s", flush=True)
        if until is not None and epoch + 1 < last:
            now = {"generator": generator.get_state(), "losses": losses, "seconds": seconds}
            until.check(lambda now=now: {"step": step.state(), **now}, time.perf_counter() - began)
    return Trained(losses, time.perf_counter() - start, step.peak_bytes)


def allocated_beside(model: nn.Module) -> int:
    """Return the bytes that are allocated on the GPU besides weights and buffers of `model`: the data, above all."""
    return torch.cuda.memory_allocated() - sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def compile_blocks(model: nn.Module, backend: str) -> None:
    """Compile the blocks of `model`, one of them for all, since they are alike: that takes seconds, not a minute."""
    torch.compiler.reset()  # what was compiled for other models is of no use, and the compiler keeps only so many
    for block in model.blocks:
        block.compile(backend=backend)


@contextmanager
def packing(model: nn.Module) -> Iterator[Sequence[Row]]:
    """Pack what converted layers keep in the graphs of what is compiled inside, and list it."""
    owners = {layer.owner for layer in model.modules() if is_converted(layer)}
    with CompiledPacking() as packed:
        for owner in owners:
            mark_layers(model, owner)
        yield packed.rows


def train_and_score(
    model: nn.Module, data: Data, recipe: Recipe, seed: int, limit: int | None, until: Until | None = None
) -> dict[str, Any]:
    """Train `model`, test it on `limit` samples, or all, and return what came out, for a record.

    What it keeps for backward may be pruned: without gradients nothing is kept. `peak_mib` leaves out what was there
    besides the model.
    """
    before = allocated_beside(model) if data.device.type == "cuda" else 0
    with nullcontext(()) if recipe.compile is None else packing(model) as rows:
        trained = train(model, data, recipe, seed, until=until)
    return {
        **({} if recipe.compile is None else {"packs": sum(row.how == "packed" for row in rows)}),
        "accuracy": round(evaluate(model, data, recipe.precision, limit), 4),
        "final_loss": trained.losses[-1],
        "losses": [round(loss, 5) for loss in trained.losses],
        "seconds": round(trained.seconds, 2),
        **({} if trained.peak_bytes is None else {"peak_mib": round((trained.peak_bytes - before) / MIB, 2)}),
    }


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, precision: str, limit: int | None) -> float:
    """Return the score of `model`, eagerly: compiling for other batches would take longer than running them."""
    model.eval()

    def scores(inputs: Tensor) -> Tensor:
        with autocast(inputs.device, precision):
            return model(inputs)

    with torch.compiler.set_stance("force_eager"):
        return data.score(scores, limit)
