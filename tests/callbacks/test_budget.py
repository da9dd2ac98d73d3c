"""``ActivationPruning(memory_budget=...)``: what fits is found after two steps, and nothing else changes in a fit."""

from __future__ import annotations

import gc
import importlib
import json
import random
import warnings
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BatchSizeFinder, LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, Keep
from lightning_actprune.analysis import simulated
from lightning_actprune.analysis.allocation import BALANCED, MARGIN, Allocator, Settings
from lightning_actprune.callbacks import budget as module
from lightning_actprune.callbacks import pruning as pruning_module
from lightning_actprune.callbacks.budget import _check_surroundings
from lightning_actprune.config import Config
from lightning_actprune.operators.base import torch_class
from lightning_actprune.operators.recompute import RecomputedModule
from lightning_actprune.schedules import CubicSchedule
from tests.support.helpers import assert_plain, trainer
from tests.support.marks import quick
from tests.support.stack import DEPTH, STEPS, WIDTH, Stack, batches, layers

MIB = 2**20
AGAIN = [("RecomputedResidual", "Linear")] * DEPTH
DENSE = [("Residual", "Linear")] * DEPTH
PARTS = 4
"""Layers of a block."""
HALF = 0.4463
"""A budget that lets all blocks keep four bits, and none be dense."""
FEW = 0.4171
"""A budget that lets most blocks keep few bits, and the last one four: less than running them again takes."""


@pytest.fixture(autouse=True)
def _small_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cuBLAS take next to nothing beside these small models."""
    monkeypatch.setattr(simulated, "WORKSPACE", 512)


_known: dict[Any, Any] = {}
"""Simulated steps by all that they depend on."""


@pytest.fixture(autouse=True)
def _no_step_is_simulated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fits of equal models with equal batches share what a simulation finds, which takes longer than all else."""
    original = module._Simulated.__call__

    def call(self: Any, config: Config | None) -> Any:
        model, trainer = self._model, self._trainer
        methods = [getattr(type(model), name, None) for name in ("training_step", "loss", "configure_optimizers")]
        simple = {name: value for name, value in vars(model).items() if isinstance(value, int | float | str | None)}
        tensors = [(name, t.shape, t.dtype, t.requires_grad) for name, t in model.state_dict(keep_vars=True).items()]
        batch = [(t.shape, t.dtype) for t in self._batch]
        key = repr((methods, simple, tensors, batch, trainer.precision, trainer.accumulate_grad_batches, config))
        if key not in _known:
            _known[key] = original(self, config)
        return _known[key]

    monkeypatch.setattr(module._Simulated, "__call__", call)


def fit(pruning: pl.Callback, model: Stack | None = None, *others: pl.Callback, **options: Any) -> Stack:
    model = Stack() if model is None else model
    ckpt = options.pop("ckpt_path", None)
    trainer(pruning, *others, **options).fit(model, ckpt_path=ckpt)
    assert_restored(model)
    return model


def assert_restored(model: nn.Module) -> None:
    assert_plain(model)
    assert all(torch_class(type(inner)) is type(inner) for inner in model.modules())
    assert not any(isinstance(inner, RecomputedModule) for inner in model.modules())


def chosen(pruning: ActivationPruning) -> int:
    """Return the number of the setting that a fit goes on with, of which the report has the layers."""
    number = pruning.state_dict()["memory_budget"]["number"]
    path = Settings(layers())
    setting = path[number]
    assert len(pruning.report.recomputed) == max(0, DEPTH - number)
    found = [layer.fqn.split(".")[1] for layer in pruning.converted if layer.fqn.endswith(".norm")]
    norms = {BALANCED: DEPTH - setting.changed, BALANCED + 1: 0}  # the last layers of blocks that become dense
    assert len(found) == norms.get(setting.way, min(number, DEPTH))
    return number


# What is chosen, and when.


@pytest.mark.parametrize(
    ("budget", "kinds", "accumulated"),
    [
        (1.0, {"Residual/Linear"}, 1),
        pytest.param(0.8, {"Residual/ActivationPrunedLinear", "Residual/Linear"}, 1, marks=pytest.mark.slow),
        pytest.param(HALF, {"Residual/ActivationPrunedLinear"}, 1, marks=pytest.mark.slow),
        (HALF, {"Residual/ActivationPrunedLinear"}, 2),
    ],
)
def test_a_fit_begins_with_the_fewest_bytes_and_decides_after_the_second_step(
    budget: float, kinds: set[str], accumulated: int
):
    pruning, model = ActivationPruning(memory_budget=budget, verbose=0), Stack()
    fit(pruning, model, accumulate_grad_batches=accumulated)
    first, later = model.kinds[: 2 * accumulated], model.kinds[2 * accumulated :]
    assert first == [AGAIN] * (2 * accumulated)
    assert later == [later[0]] * (STEPS - 2 * accumulated)
    assert {f"{block}/{layer}" for block, layer in later[0]} == kinds
    number = chosen(pruning)
    allocator, found = pruning._budget._allocator, pruning._budget._allocator.allocation(number)
    assert found.peak_bytes <= budget * found.dense.peak_bytes
    assert allocator.fit(budget).number == number
    if found.is_dense:
        assert pruning.report.layers == []
    else:
        assert allocator.step(number + 1).peak_bytes > (1 - MARGIN) * budget * found.dense.peak_bytes


def test_a_size_is_a_budget_too():
    pruning = ActivationPruning(memory_budget="1GiB", verbose=0)
    assert fit(pruning).kinds[-1] == DENSE
    assert pruning.memory_budget == "1GiB"


def test_what_is_chosen_is_said_once_and_not_when_silent(capsys, caplog):
    caplog.set_level("INFO")
    fit(ActivationPruning(memory_budget=HALF))
    said = " ".join((capsys.readouterr().out + caplog.text).split())
    assert said.count("Memory budget: of 4 blocks") == 1
    assert "in four bits; predicted step peak" in said
    caplog.clear()
    fit(ActivationPruning(memory_budget=HALF, verbose=0))
    said = capsys.readouterr().out + caplog.text
    assert "budget" not in said
    assert "pruning" not in said


class Watched(Stack):
    """Notes who its parameters and the optimizer's states are."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        states = {id(p): {name: id(value) for name, value in s.items()} for p, s in optimizer.state.items()}
        self.ids = [*getattr(self, "ids", []), ([id(p) for p in self.parameters()], states)]


def test_parameters_and_optimizer_state_stay_the_same_objects():
    model = fit(ActivationPruning(memory_budget=HALF, verbose=0), Watched())
    assert model.kinds[1] != model.kinds[2]
    (first, none), *later = model.ids
    assert none == {}
    assert [ids for ids, _ in later] == [first] * (STEPS - 1)
    assert later[0][1].keys() == set(first)
    assert all(states == later[0][1] for _, states in later)


class Batches(Stack):
    """Knows which batches are alive."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches = [*getattr(self, "batches", []), weakref.ref(batch[0])]


def test_no_batch_is_held():
    pruning = ActivationPruning(memory_budget=HALF, verbose=0)
    model = fit(pruning, Batches())
    assert chosen(pruning) > 0
    gc.collect()
    assert [batch() for batch in model.batches] == [None] * STEPS


def test_gradients_stay_where_they_accumulate():
    """Lightning lets go of those of the step before after the forward, but not of those of the batch before."""
    model, (batch, *_) = Stack(), batches()
    weights = sum(p.nbytes for p in model.parameters())
    for accumulates in (False, True):
        step = simulated.simulate(model, batch, precision="32-true", accumulates=accumulates)
        assert step.moments[step.forward_end - 1].gradient_bytes == weights
        first = next(moment for moment in step.moments if moment.phase == "backward")
        assert first.gradient_bytes == weights * accumulates


@pytest.mark.slow
def test_layers_of_blocks_that_no_longer_run_again_are_judged_like_any_other():
    """Their first batch shows which drop nothing, and what is retained."""
    plain, ours = ActivationPruning("max", verbose=0), ActivationPruning(memory_budget=FEW, verbose=0)
    fit(plain)
    model = fit(ours)
    assert chosen(ours) == DEPTH + PARTS
    assert model.kinds[-1] == [("Residual", "ActivationPrunedLinear")] * DEPTH
    two = {layer.fqn for layer in ours.converted if layer.operator == "linear" and layer.keep.bits == 2}
    assert two == {*(f"body.{n}.{name}" for n in (1, 2, 3) for name in ("first", "second")), "body.5"}
    assert len(two & plain.spread.keys()) > 2
    assert ours.spread.keys() == two & plain.spread.keys()
    assert {layer.fqn: layer.reason for layer in ours.skipped} == {"body.0": "its input is part of the batch"}


@pytest.mark.slow
def test_rules_of_the_user_come_first():
    rules = {"body.2.first": Keep(bits=8), "body.1.*": None}
    pruning = ActivationPruning(memory_budget=0.5, rules=rules, verbose=0)
    model = fit(pruning)
    kept = {layer.fqn: layer.keep for layer in pruning.converted}
    assert kept["body.2.first"] == Keep(bits=8)
    assert not [name for name in kept if name.startswith("body.1.")]
    assert all(kinds[0][1] == "Linear" and kinds[1][1] == "ActivationPrunedLinear" for kinds in model.kinds)


@pytest.mark.parametrize("made_in", ["setup", "configure_model"])
def test_blocks_that_are_made_late_run_again_from_the_first_step_on(made_in: str):
    class Late(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.body = None

        def make(self) -> None:
            if self.body is None:
                self.body = layers()

    vars_of = {"setup": lambda self, stage: self.make(), "configure_model": lambda self: self.make()}
    model = type("Late", (Late,), {made_in: vars_of[made_in]})()
    fit(ActivationPruning(memory_budget=HALF, verbose=0), model)
    assert model.kinds[:2] == [AGAIN] * 2
    assert model.kinds[-1] not in (AGAIN, DENSE)


class Sparsities(pl.Callback):
    """Notes the sparsity of the second layer of each block and for how many steps schedules are."""

    def __init__(self, pruning: ActivationPruning) -> None:
        self.pruning, self.seen, self.steps = pruning, list[set[float | None]](), list[int | None]()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Stack, *args: Any) -> None:
        self.seen.append({getattr(block.second, "sparsity", None) for block in pl_module.body[1:-1]})
        self.steps.append(self.pruning.state_dict()["total_steps"])


@pytest.mark.slow
def test_schedules_begin_with_layers_that_were_in_blocks_run_again():
    """There was no layer with a schedule when the training began."""
    rules = {"body.0": None, "body.5": None}
    pruning = ActivationPruning(memory_budget=FEW, sparsity=CubicSchedule(end=0.8), rules=rules, verbose=0)
    notes = Sparsities(pruning)
    fit(pruning, Peaked(), notes)
    assert notes.seen[0] == {None}
    assert notes.steps == [None] + [STEPS] * (STEPS - 1)
    scheduled = CubicSchedule(end=0.8)((STEPS - 1) / STEPS)
    assert scheduled in notes.seen[-1]


class Peaked(Stack):
    """Has the energy of what its blocks' second layers read in one block of values."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.body[1:-1]:
            nn.init.constant_(block.first.bias, -9.0)
            nn.init.constant_(block.first.bias[:WIDTH], 9.0)


# What a training step may do.


class Measuring(Stack):
    """Logs, has metrics, and asks for what the trainer knows."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(4)
        self.scores = MetricCollection({"f1": MulticlassF1Score(4), "top2": MulticlassAccuracy(4, top_k=2)})
        self.example_input_array = torch.zeros(1, WIDTH)
        self.inner = Inner()
        self.size = size

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.body(batch[0]).flatten(0, 1)
        self.log_dict(self.scores(logits, batch[1].flatten()))
        self.log("accuracy", self.accuracy(logits, batch[1].flatten()), prog_bar=True)
        self.log("so far", self.accuracy.compute())
        warm = min(1.0, (1 + self.trainer.global_step) / self.trainer.max_steps)
        assert self.trainer.estimated_stepping_batches == self.size
        if self.logger is not None:
            self.logger.log_metrics({"warm": warm})
        return self.inner(warm * super().training_step(batch, batch_idx) + self.current_epoch)


class Inner(pl.LightningModule):
    def forward(self, x: Tensor) -> Tensor:
        assert self.trainer.max_steps == STEPS
        return x


@pytest.mark.slow
def test_metrics_logs_and_what_the_trainer_knows(tmp_path):
    model, pruning = Measuring(STEPS), ActivationPruning(memory_budget=HALF, verbose=0)
    monitor = ActivationMemoryMonitor(verbose=False)
    made = trainer(pruning, monitor, max_steps=STEPS, logger=CSVLogger(tmp_path))
    made.fit(model)
    assert chosen(pruning) > DEPTH
    assert monitor.report.saved_fraction > 0
    assert model.accuracy.update_count == STEPS
    assert_restored(model)


def test_a_monitor_may_come_first():
    monitor, pruning = ActivationMemoryMonitor(1, verbose=False), ActivationPruning(memory_budget=HALF, verbose=0)
    model = Stack()
    trainer(monitor, pruning).fit(model)
    assert_restored(model)
    assert chosen(pruning) > DEPTH


class Alone(Stack):
    """Takes no number of the batch."""

    def training_step(self, batch: Any) -> Any:
        return {"loss": super().training_step(batch, 0)}


def test_a_step_may_take_the_batch_alone_and_return_a_mapping():
    assert fit(ActivationPruning(memory_budget=1.0, verbose=0), Alone()).kinds[-1] == DENSE


class Compiled(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.body[1] = torch.compile(self.body[1], backend="eager")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A compiler of this fit runs no pass")
def test_compiled_modules_run_eagerly_in_a_simulation():
    model = fit(ActivationPruning(memory_budget=1.0, verbose=0), Compiled())
    assert model.kinds[-1] == DENSE[1:]


class Looking(Stack):
    """Looks at a value."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else 2 * loss


def test_a_step_that_looks_at_values_is_an_error():
    model = Looking()
    match = r"`memory_budget` needs a training step that runs without values, and that of Looking does not: .*HINT"
    with pytest.raises(MisconfigurationException, match=match):
        fit(ActivationPruning(memory_budget=HALF, verbose=0), model)
    assert_restored(model)
    assert model._trainer is not None
    assert len(model.kinds) == 2


class OptimizerOf(Stack):
    """Asks the trainer for something."""

    def __init__(self, asks: str) -> None:
        super().__init__()
        self.asks = asks

    def configure_optimizers(self) -> Any:
        if self.asks == "numbers":
            rate = 1 / self.trainer.estimated_stepping_batches
            made = torch.optim.SGD(self.parameters(), rate, momentum=0.9)
            schedule = torch.optim.lr_scheduler.LinearLR(made, total_iters=self.trainer.estimated_stepping_batches)
            return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        assert self.trainer.strategy.root_device.type == "cpu"
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


@pytest.mark.parametrize("asks", ["numbers", "the strategy"])
def test_the_optimizer_may_ask_the_trainer(asks: str):
    """Where it cannot be made for a copy, one with a state of the same size stands in."""
    pruning, model = ActivationPruning(memory_budget=1.0, verbose=0), OptimizerOf(asks)
    fit(pruning, model)
    trained = [p for p in model.parameters() if p.requires_grad]
    for step in pruning._budget._allocator._steps.values():
        assert step.moments[0].optimizer_bytes == sum(p.nbytes for p in trained)


def test_manual_optimization_is_refused():
    model = Stack()
    model.automatic_optimization = False
    match = "`memory_budget` cannot work with manual optimization, as of Stack: .*HINT"
    with pytest.raises(MisconfigurationException, match=match):
        fit(ActivationPruning(memory_budget=HALF), model)
    assert_restored(model)


# What a simulated step leaves alone.


class Random(Stack):
    """Draws, counts in a buffer and has hooks; compares before and after each end of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))
        self.frozen = nn.Linear(4, 4).requires_grad_(False).eval()
        self.calls = 0
        self.body[1].register_forward_hook(lambda *_: None)
        self.body[0].weight.register_hook(lambda grad: grad)

    def on_train_start(self) -> None:
        self.frozen.eval()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        self.count += 1
        scale = random.uniform(0.9, 1.1) * float(np.random.uniform(0.9, 1.1))
        logits = nn.functional.dropout(self.body(batch[0] * scale).flatten(0, 1), 0.1) + torch.randn(4)
        return nn.functional.cross_entropy(self.frozen(self.norm(logits)), batch[1].flatten())


def state_of(model: Random) -> dict[str, Any]:
    found: dict[str, Any] = {name: value.clone() for name, value in model.state_dict().items()}
    found |= {f"{name}.grad": None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    found["training"] = [inner.training for inner in model.modules()]
    found["kinds"] = [type(inner) for inner in model.modules()]
    found["hooks"] = [len(inner._forward_hooks) + len(inner._forward_pre_hooks) for inner in model.modules()]
    found["trainer"], found["calls"] = model._trainer, model.calls
    found["random"] = random.getstate(), torch.get_rng_state().tolist(), str(np.random.get_state())
    found["modes"] = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return found


@pytest.mark.parametrize(("precision", "budget"), quick([("32-true", 1.0), ("bf16-mixed", 0.8)], ("bf16-mixed", 0.8)))
def test_a_simulation_leaves_everything_as_it_is(precision: str, budget: float, monkeypatch):
    compared = []
    original = module.simulate

    def simulate(model: Random, *args: Any, **kwargs: Any) -> Any:
        trainer = model_of_fit._trainer
        assert trainer is None  # a copy would take it along
        before = state_of(model)
        step = original(model, *args, **kwargs)
        assert_equal(state_of(model), before)
        compared.append(step)
        return step

    def assert_equal(found: dict[str, Any], before: dict[str, Any]) -> None:
        assert found.keys() == before.keys()
        for name, value in found.items():
            same = torch.equal(value, before[name]) if isinstance(value, Tensor) else value == before[name]
            assert same, name

    monkeypatch.setattr(module, "simulate", simulate)
    model_of_fit = Random()
    fit(ActivationPruning(memory_budget=budget, verbose=0), model_of_fit, precision=precision)
    assert compared
    assert model_of_fit.count == model_of_fit.calls == STEPS
    assert model_of_fit._trainer is not None


# What ends a fit.


def test_a_budget_that_cannot_be_met_is_an_error_and_the_model_is_restored():
    model = Stack()
    match = r"`memory_budget` \(\d+ MiB, 5% of the dense peak\) is less than a step takes at the least, \d+ MiB: .*HINT"
    with pytest.raises(MisconfigurationException, match=match):
        fit(ActivationPruning(memory_budget=0.05, verbose=0), model)
    assert_restored(model)
    assert len(model.kinds) == 2


@pytest.mark.parametrize("after", [1, 4])
def test_an_exception_restores_the_model(after: int):
    class Failing(Stack):
        def on_train_batch_end(self, *args: Any) -> None:
            if self.trainer.global_step == after:
                raise ZeroDivisionError

    model = Failing()
    with pytest.raises(ZeroDivisionError):
        fit(ActivationPruning(memory_budget=HALF, verbose=0), model)
    assert_restored(model)
    fit(ActivationPruning(memory_budget=HALF, verbose=0), model.__class__.__base__())


@pytest.mark.slow
def test_the_next_fit_decides_anew():
    pruning = ActivationPruning(memory_budget=HALF, verbose=0)
    first, second = fit(pruning), fit(pruning)
    assert second.kinds == first.kinds
    assert second.kinds[1] == AGAIN


# Arguments and surroundings.


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"memory_budget": "lots"}, "`memory_budget` must be a size, got 'lots'.*HINT"),
        ({"memory_budget": True}, "`memory_budget` must be a size, got True of type bool.*HINT"),
        ({"memory_budget": 0.5, "preset": "balanced"}, "`preset` must be 'max' or None.*got 'balanced'. HINT"),
        ({"memory_budget": 0.5, "preset": "recompute"}, "`preset` must be 'max' or None.*got 'recompute'. HINT"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], match: str):
    with pytest.raises(MisconfigurationException, match=match):
        ActivationPruning(**options)
    ActivationPruning("max", memory_budget=0.5)


def test_it_cannot_be_changed_later():
    with pytest.raises(MisconfigurationException, match="`memory_budget` of ActivationPruning cannot be changed"):
        ActivationPruning(memory_budget=0.5).memory_budget = 0.6


def surroundings(strategy: Any, precision: str = "bf16-mixed", budget: float = 0.5) -> None:
    made: Any = SimpleNamespace(strategy=strategy, precision=precision)
    _check_surroundings(made, Stack(), budget)


@pytest.mark.parametrize("kind", [FSDPStrategy, DeepSpeedStrategy])
def test_strategies_that_share_out_parameters_are_refused(kind: type[Any]):
    with pytest.raises(MisconfigurationException, match=f"cannot work with {kind.__name__}, .*HINT"):
        surroundings(kind.__new__(kind))
    surroundings(DDPStrategy(parallel_devices=[torch.device("cpu")]))


def test_precisions_that_are_not_simulated_are_refused():
    with pytest.raises(MisconfigurationException, match=r"`precision` must be one of '32-true'.*got '64-true'.*HINT"):
        surroundings(SingleDeviceStrategy("cpu"), "64-true")


def test_more_than_the_device_has_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 2**30))
    there = SingleDeviceStrategy(torch.device("cuda", 0))
    match = "`memory_budget` must be at most what the device has, 81,920 MiB, got 102,400 MiB.*HINT"
    with pytest.raises(MisconfigurationException, match=match):
        surroundings(there, budget=100 * 2**30)
    surroundings(there, budget=80 * 2**30)
    surroundings(there, budget=0.9)
    surroundings(SingleDeviceStrategy("cpu"), budget=100 * 2**30)


# What was measured, by a stand-in for a GPU.


def measured_fit(
    monkeypatch: pytest.MonkeyPatch, measure: Any, budget: float | str = HALF, share: float = 1.0
) -> tuple[Any, list[int]]:
    """Fit on a device of 100 MiB whose most bytes in use are ``measure(allocator, setting)``; return settings by step.

    ``share`` is what torch may take of it.
    """
    pruning, model, numbers = ActivationPruning(memory_budget=budget, verbose=0), OnDevice(), list[int]()
    monkeypatch.setattr(pruning_module, "warn_of_surroundings", lambda *_: None)  # which asks the GPU
    own = pruning._budget
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: measure(own._allocator, own.number))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100 * MIB))
    note = LambdaCallback(on_train_batch_end=lambda *_: numbers.append(own.number))
    trainer(pruning, note, max_epochs=2).fit(model)
    return pruning, numbers


class OnDevice(Stack):
    """Says that it is on a GPU in hooks of callbacks."""

    device = property(lambda self: SimpleNamespace(type="cuda"))


FIRST = 8 * MIB


def test_predictions_are_corrected_by_what_was_measured(monkeypatch):
    uncorrected = []

    def measure(allocator: Allocator | None, number: int | None) -> int:
        if number is None:
            return FIRST
        uncorrected.append(allocator.fit(12 * MIB).number)
        return allocator.step(number).peak_bytes + FIRST - allocator.step(0).peak_bytes

    pruning, numbers = measured_fit(monkeypatch, measure, 12 * MIB)
    allocator, off = pruning._budget._allocator, FIRST - pruning._budget._allocator.step(0).peak_bytes
    assert off > MIB
    assert numbers == [None] + [allocator.fit(12 * MIB, off).number] * (2 * STEPS - 1)
    assert numbers[-1] < uncorrected[0]


def test_a_step_that_takes_more_than_predicted_warns_and_what_fits_by_it_is_taken(monkeypatch):
    def measure(allocator: Allocator | None, number: int | None) -> int:
        if number is None:
            return FIRST
        if number not in seen:
            seen.append(number)
        predicted = allocator.step(number).peak_bytes + FIRST - allocator.step(0).peak_bytes
        return predicted + (2, 3, 3)[seen.index(number)] * MIB

    seen: list[int] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pruning, numbers = measured_fit(monkeypatch, measure, 12 * MIB)
    said = [str(w.message) for w in caught if "predicted a step peak" in str(w.message)]
    assert said
    assert "and 14 MiB were measured. HINT" in said[0]
    # Of the two steps after each change the first is probed, and the second measured.
    first, second, third = dict.fromkeys(numbers[1:])
    assert numbers == [None, first, first, second, second] + [third] * (2 * STEPS - 5)
    assert first > second > third > 0
    assert measure(pruning._budget._allocator, third) == pruning.allocation.peak_bytes <= 12 * MIB


def test_a_step_that_is_above_whatever_setting_ends_with_the_fewest_bytes(monkeypatch):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, numbers = measured_fit(monkeypatch, lambda _, number: FIRST if number is None else 40 * MIB, 12 * MIB)
    said = [str(w.message) for w in caught]
    assert any("and 40 MiB were measured" in text for text in said)
    assert any("no setting takes less, and a step takes 40 MiB, where 12 MiB are allowed" in text for text in said)
    assert numbers[1] > DEPTH
    assert numbers[3:] == [DEPTH] * (2 * STEPS - 3)  # all in few bits


@pytest.mark.parametrize(("peak", "number"), [(9, 1), (7, 1), (6, 0)])
def test_a_correction_takes_what_takes_less_or_nothing_else(peak: int, number: int):
    own, found = ActivationPruning(memory_budget=0.5)._budget, SimpleNamespace(number=1, step=step_of(7))
    own._allocator = SimpleNamespace(last_within=lambda limit: 0, step=lambda number: step_of(peak))
    assert own._below(found, 5.0) == number


def step_of(peak: int) -> Any:
    return SimpleNamespace(peak_bytes=peak)


def test_an_error_of_rank_zero_is_one_of_all_ranks():
    """The others do not wait for a number that never comes."""
    sent: list[Any] = []

    def decide() -> int:
        raise MisconfigurationException("made up")

    def rank(zero: bool) -> Any:
        strategy = SimpleNamespace(broadcast=lambda found: sent.append(found) or sent[0])
        return SimpleNamespace(is_global_zero=zero, strategy=strategy)

    for zero in (True, False):
        with pytest.raises(MisconfigurationException, match="made up"):
            module._by_rank_zero(rank(zero), decide)
    sent.clear()
    assert [module._by_rank_zero(rank(zero), lambda: 3) for zero in (True, False)] == [3, 3]


@pytest.mark.parametrize("budget", quick([1.0, "12MiB"], 1.0))
def test_what_torch_may_take_of_the_device_is_a_budget(monkeypatch, budget: float | str):
    """Less what lies idle between tensors; the setting of the fewest bytes is taken even if that is above it."""

    def measure(allocator: Allocator | None, number: int | None) -> int:
        if number is None:
            return FIRST
        return allocator.step(number).peak_bytes + FIRST - allocator.step(0).peak_bytes

    taken = []
    for share in (1.0, 0.12, 0.02):
        told = (
            nullcontext() if share > 0.1 else pytest.warns(UserWarning, match="finds no setting that takes at most 85%")
        )
        with monkeypatch.context() as context, told:
            pruning, numbers = measured_fit(context, measure, budget, share)
        assert len(set(numbers[1:])) == 1
        taken.append((numbers[-1], pruning.allocation.peak_bytes))
    (all_of_it, _), (some, peak), (least, _) = taken
    assert 9 * MIB < peak <= 0.85 * 12 * MIB
    assert all_of_it > some > least == DEPTH


# Resuming.


class Killed(Exception):
    pass


class Kill(pl.Callback):
    """Raises before a batch."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.at:
            raise Killed


def killed(folder: Path, budget: float | str, at: int, **options: Any) -> Path:
    """Return the last checkpoint of a run that an exception has stopped."""
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    with pytest.raises(Killed):
        fit(
            ActivationPruning(memory_budget=budget, verbose=0), Stack(), save, Kill(at), enable_checkpointing=True,
            max_epochs=2, **options,
        )  # fmt: skip
    return folder / f"step={at}.ckpt"


@pytest.mark.slow
@pytest.mark.parametrize("budget", [HALF, 0.8, 1.0])
@pytest.mark.parametrize("at", [6, 8])
def test_a_killed_and_resumed_run_equals_the_uninterrupted_one(budget: float, at: int, tmp_path: Path, recwarn):
    """It goes on with the setting that was chosen, from its first step on."""
    ckpt = killed(tmp_path, budget, at)
    whole, parts = (ActivationPruning(memory_budget=budget, verbose=0) for _ in range(2))
    expected = fit(whole, Stack(), max_epochs=2)
    # In the middle of an epoch, Lightning begins that epoch's data anew: only at its end are both the same.
    found = fit(parts, Stack(), max_epochs=2, ckpt_path=ckpt)
    assert found.kinds == [expected.kinds[-1]] * (2 * STEPS - at)
    assert parts.state_dict()["memory_budget"] == whole.state_dict()["memory_budget"]
    assert parts.report.to_rows() == whole.report.to_rows()
    assert parts.spread == whole.spread
    if at == STEPS:
        torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert not [w for w in recwarn if "other settings" in str(w.message)]


def test_a_checkpoint_from_before_the_decision_decides_after_two_steps(tmp_path: Path):
    ckpt = killed(tmp_path, HALF, 1)
    found = fit(ActivationPruning(memory_budget=HALF, verbose=0), Stack(), max_epochs=2, ckpt_path=ckpt)
    assert found.kinds[:2] == [AGAIN] * 2
    assert found.kinds[2] != AGAIN[0]
    assert found.kinds[2] not in (AGAIN, DENSE)


@pytest.mark.slow
def test_a_checkpoint_of_another_budget_decides_anew(tmp_path: Path):
    ckpt = killed(tmp_path, HALF, 6)
    found = fit(ActivationPruning(memory_budget=1.0, verbose=0), Stack(), max_epochs=2, ckpt_path=ckpt)
    assert found.kinds == [AGAIN] * 2 + [DENSE] * (STEPS - 2)


@pytest.mark.parametrize("now", [0.5, 1.0, 2.0])
def test_where_torch_may_take_less_than_before_a_resumed_fit_decides_anew(now: float, tmp_path: Path, monkeypatch):
    module, cap = importlib.import_module("lightning_actprune.callbacks.budget"), 2.0**40
    monkeypatch.setattr(module, "_cap", lambda budget, device: cap)
    ckpt = killed(tmp_path, HALF, 6)
    monkeypatch.setattr(module, "_cap", lambda budget, device: now * cap)
    pruning = ActivationPruning(memory_budget=HALF, verbose=0)
    found = fit(pruning, Stack(), max_epochs=2, ckpt_path=ckpt)
    assert (found.kinds[:2] == [AGAIN] * 2) == (now < 1)
    assert found.kinds[-1] not in (AGAIN, DENSE)
    assert pruning.state_dict()["memory_budget"]["cap"] == min(now, 1) * cap


@pytest.mark.slow
def test_a_checkpoint_of_other_blocks_decides_anew(tmp_path: Path):
    ckpt = killed(tmp_path, HALF, 6)
    saved = torch.load(ckpt, weights_only=True)
    [state] = [state for key, state in saved["callbacks"].items() if "ActivationPruning" in key]
    for changes in ({"number": 1000}, {"setting": "another one"}):
        edited = tmp_path / "edited.ckpt"
        whole = state["memory_budget"]
        state["memory_budget"] = {**whole, **changes}
        torch.save(saved, edited)
        state["memory_budget"] = whole
        found = fit(ActivationPruning(memory_budget=HALF, verbose=0), Stack(), max_epochs=2, ckpt_path=edited)
        assert found.kinds[:2] == [AGAIN] * 2
        assert found.kinds[2] != AGAIN


# Tuners and strategies.


class Sized(Stack):
    """Does not fit with more than 16 samples, and notes its sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size, self.sizes = 8, list[int]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch[0]) > 16:
            raise RuntimeError("CUDA out of memory.")
        self.sizes.append(len(batch[0]))
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> DataLoader[Any]:
        return batches(64 // self.batch_size * 2, self.batch_size)


def test_trials_have_the_fewest_bytes_and_the_fit_decides_for_the_batch_that_was_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pruning, model = ActivationPruning(memory_budget=1.0, verbose=0), Sized()
    finder = BatchSizeFinder(steps_per_trial=3, init_val=8)
    fit(pruning, model, finder, limit_val_batches=0, num_sanity_val_steps=0)
    trials = 6
    assert model.batch_size == 16
    assert model.sizes[: trials + 2] == [8] * 3 + [16] * 5
    assert model.kinds[: trials + 2] == [AGAIN] * (trials + 2)
    assert model.kinds[trials + 2 :]
    assert AGAIN not in model.kinds[trials + 2 :]
    batch = pruning._budget._allocator.step(0).batch_bytes
    assert batch == sum(tensor[:16].nbytes for tensor in batches().dataset.tensors)


class Notes(pl.Callback):
    """Writes down what this process has decided."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: Stack) -> None:
        [pruning] = [callback for callback in trainer.callbacks if isinstance(callback, ActivationPruning)]
        noted = {"number": chosen(pruning), "kinds": pl_module.kinds}
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(noted))

    def on_exception(self, trainer: pl.Trainer, pl_module: Stack, exception: BaseException) -> None:
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(str(exception)))


RANKS = {"strategy": "ddp_spawn", "devices": 2, "num_sanity_val_steps": 0}


@pytest.mark.slow
def test_both_processes_take_what_the_first_one_decides(tmp_path):
    pruning, model = ActivationPruning(memory_budget=0.96, verbose=0), Stack()  # of which most are workspaces
    trainer(pruning, Notes(tmp_path), default_root_dir=tmp_path, **RANKS).fit(model)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["kinds"][-1] not in ([list(kind) for kind in AGAIN], [list(kind) for kind in DENSE])


@pytest.mark.slow
def test_no_process_waits_for_one_that_cannot_meet_the_budget(tmp_path):
    """Whichever ends first, it says why."""
    pruning = ActivationPruning(memory_budget=0.05, verbose=0)
    with pytest.raises(Exception, match="is less than a step takes at the least"):
        trainer(pruning, default_root_dir=tmp_path, **RANKS).fit(Stack())


# On a GPU.


class Transformer(pl.LightningModule):
    """Classifies tokens; notes the most bytes in use in each step."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        made = (nn.TransformerEncoderLayer(256, 8, 1024, **options) for _ in range(depth))
        self.stem, self.blocks, self.head = nn.Linear(WIDTH, 256), nn.Sequential(*made), nn.Linear(256, 4)
        self.peaks: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        torch.cuda.reset_peak_memory_stats()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.blocks(self.stem(batch[0])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4, fused=True)


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.4, 0.6, 0.8, 1.0])
def test_steps_on_a_gpu_take_what_is_predicted(share: float, monkeypatch):
    monkeypatch.undo()  # workspaces are what they are
    pruning, model = ActivationPruning(memory_budget=share, verbose=0), Transformer()
    note = LambdaCallback(on_train_batch_end=lambda *_: model.peaks.append(torch.cuda.max_memory_allocated()))
    options = {"accelerator": "gpu", "precision": "bf16-mixed", "num_sanity_val_steps": 0}
    trainer(note, pruning, **options).fit(model, batches(10, 512))
    own = pruning._budget
    found = own._allocator.allocation(own.number, own._off)
    measured, dense = max(model.peaks[5:]), found.dense.peak_bytes + own._off
    assert measured <= share * dense or found.is_dense
    assert measured == pytest.approx(found.peak_bytes, rel=0.05)
    assert_restored(model)


@pytest.mark.gpu
def test_a_fit_ends_where_torch_may_take_less_than_the_budget(monkeypatch):
    monkeypatch.undo()
    options = {"accelerator": "gpu", "precision": "bf16-mixed", "num_sanity_val_steps": 0}
    whole = torch.cuda.get_device_properties(0).total_memory
    settings = []
    for mib in (1000, 520):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(mib * MIB / whole)
        pruning = ActivationPruning(memory_budget=1.0, verbose=0)
        try:
            trainer(pruning, **options).fit(Transformer(16), batches(10, 128))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert pruning.allocation.peak_bytes <= mib * MIB
        settings.append(pruning.allocation.number)
    assert settings[0] > settings[1] > 0
