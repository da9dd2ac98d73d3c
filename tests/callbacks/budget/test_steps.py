"""Training steps that a budget can simulate, what a simulation leaves alone, and what a budget refuses."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning
from lightning_actprune.callbacks import budget as module
from tests.support.budgets import AGAIN, DENSE, HALF, assert_restored, chosen, fit
from tests.support.helpers import trainer
from tests.support.stack import DEPTH, STEPS, WIDTH, Stack


class Measuring(Stack):
    """Takes no number of the batch, logs, has metrics, asks for what the trainer knows, and returns a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(4)
        self.scores = MetricCollection({"f1": MulticlassF1Score(4), "top2": MulticlassAccuracy(4, top_k=2)})
        self.example_input_array = torch.zeros(1, WIDTH)

    def training_step(self, batch: Any) -> Any:
        logits = self.body(batch[0]).flatten(0, 1)
        self.log_dict(self.scores(logits, batch[1].flatten()))
        self.log("accuracy", self.accuracy(logits, batch[1].flatten()), prog_bar=True)
        self.log("so far", self.accuracy.compute())
        warm = min(1.0, (1 + self.trainer.global_step) / self.trainer.max_steps)
        assert self.trainer.estimated_stepping_batches == STEPS
        if self.logger is not None:
            self.logger.log_metrics({"warm": warm})
        return {"loss": warm * super().training_step(batch, 0) + self.current_epoch}


@pytest.mark.integration
def test_metrics_logs_and_what_the_trainer_knows(tmp_path):
    model, pruning = Measuring(), ActivationPruning(memory_budget=HALF, verbose=0)
    monitor = ActivationMemoryMonitor(verbose=False)
    made = trainer(monitor, pruning, max_steps=STEPS, logger=CSVLogger(tmp_path))
    made.fit(model)
    assert chosen(pruning) > DEPTH
    assert monitor.report.saved_fraction > 0
    assert model.accuracy.update_count == STEPS
    assert_restored(model)


class Compiled(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.body[1] = torch.compile(self.body[1], backend="eager")


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:A compiler of this fit runs no pass")
def test_compiled_modules_run_eagerly_in_a_simulation():
    model = fit(ActivationPruning(memory_budget=1.0, verbose=0), Compiled())
    assert model.kinds[-1] == DENSE[1:]


class OptimizerOf(Stack):
    """Asks the trainer for something, which a copy may not have."""

    def __init__(self, asks: str) -> None:
        super().__init__()
        self.asks = asks

    def configure_optimizers(self) -> Any:
        if self.asks == "the strategy":
            assert self.trainer.strategy.root_device.type == "cpu"
        made = torch.optim.SGD(self.parameters(), 1 / self.trainer.estimated_stepping_batches, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LinearLR(made, total_iters=self.trainer.estimated_stepping_batches)
        return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.integration
@pytest.mark.parametrize("asks", ["numbers", "the strategy"])
def test_the_optimizer_may_ask_the_trainer(asks: str):
    """Where it cannot be made for a copy, one with a state of the same size stands in."""
    pruning, model = ActivationPruning(memory_budget=1.0, verbose=0), OptimizerOf(asks)
    fit(pruning, model)
    for step in pruning._budget._allocator._steps.values():
        assert step.moments[0].optimizer_bytes == sum(p.nbytes for p in model.parameters())


class Random(Stack):
    """Draws, counts in a buffer and has hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(4), 0
        self.register_buffer("count", torch.zeros(()))
        self.body[1].register_forward_hook(lambda *_: None)
        self.body[0].weight.register_hook(lambda grad: grad)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        self.count += 1
        scale = random.uniform(0.9, 1.1) * float(np.random.uniform(0.9, 1.1))
        logits = nn.functional.dropout(self.body(batch[0] * scale).flatten(0, 1), 0.1) + torch.randn(4)
        return nn.functional.cross_entropy(self.norm(logits), batch[1].flatten())


def state_of(model: Random) -> list[Any]:
    tensors = [*model.state_dict().items(), *((name, p.grad) for name, p in model.named_parameters())]
    modules = [
        (type(inner), inner.training, len(inner._forward_hooks), len(inner._forward_pre_hooks))
        for inner in model.modules()
    ]
    drawn = random.getstate(), torch.get_rng_state().tolist(), str(np.random.get_state())
    modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return [[(n, None if t is None else t.tolist()) for n, t in tensors], modules, model.calls, drawn, modes]


@pytest.mark.integration
def test_a_simulation_leaves_everything_as_it_is(monkeypatch):
    compared, fitted, original = list[bool](), Random(), module.simulate

    def simulate(model: Random, *args: Any, **kwargs: Any) -> Any:
        assert fitted._trainer is None  # a copy would take it along
        before = state_of(model)
        step = original(model, *args, **kwargs)
        compared.append(state_of(model) == before)
        return step

    monkeypatch.setattr(module, "simulate", simulate)
    fit(ActivationPruning(memory_budget=1.0, verbose=0), fitted, precision="bf16-mixed")
    assert compared == [True] * len(compared) != []
    assert fitted.count == fitted.calls == STEPS
    assert fitted._trainer is not None


# What ends a fit with a budget.


class Looking(Stack):
    """Looks at a value."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else 2 * loss


@pytest.mark.parametrize("case", ["looks", "manual", "too little"])
def test_what_a_budget_refuses_restores_the_model(case: str):
    model = Looking() if case == "looks" else Stack()
    model.automatic_optimization = case != "manual"
    match, steps = {
        "looks": ("`memory_budget` needs a training step that runs without values, and that of Looking", 2),
        "manual": ("`memory_budget` cannot work with manual optimization, as of Stack", 0),
        "too little": (r"`memory_budget` \(\d+ MiB, 5% of the dense peak\) is less than .* at the least, \d+ MiB", 2),
    }[case]
    with pytest.raises(MisconfigurationException, match=f"{match}.*HINT"):
        fit(ActivationPruning(memory_budget=0.05 if case == "too little" else HALF, verbose=0), model)
    assert_restored(model)
    assert model._trainer is not None
    assert len(model.kinds) == steps


def test_an_exception_restores_the_model_and_the_next_fit_decides_anew():
    pruning = ActivationPruning(memory_budget=HALF, verbose=0)
    for after in (1, 4):
        model = Stack()
        fail = LambdaCallback(on_train_batch_end=lambda made, *_, at=after: made.global_step == at and 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fit(pruning, model, fail)
        assert_restored(model)
    first, second = fit(pruning), fit(pruning)
    assert second.kinds == first.kinds
    assert second.kinds[1] == AGAIN


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


def surroundings(strategy: Any, precision: str = "bf16-mixed", budget: float = 0.5) -> None:
    made: Any = SimpleNamespace(strategy=strategy, precision=precision)
    module._check_surroundings(made, Stack(), budget)


@pytest.mark.parametrize("kind", [FSDPStrategy, DeepSpeedStrategy])
def test_strategies_that_share_out_parameters_are_refused(kind: type[Any]):
    with pytest.raises(MisconfigurationException, match=f"cannot work with {kind.__name__}, .*HINT"):
        surroundings(kind.__new__(kind))
    surroundings(DDPStrategy(parallel_devices=[torch.device("cpu")]))


def test_more_than_the_device_has_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 2**30))
    there = SingleDeviceStrategy(torch.device("cuda", 0))
    match = "`memory_budget` must be at most what the device has, 81,920 MiB, got 102,400 MiB.*HINT"
    with pytest.raises(MisconfigurationException, match=match):
        surroundings(there, budget=100 * 2**30)
    surroundings(there, budget=80 * 2**30)
    surroundings(there, budget=0.9)
    surroundings(SingleDeviceStrategy("cpu"), budget=100 * 2**30)
    with pytest.raises(MisconfigurationException, match=r"`precision` must be one of '32-true'.*got '64-true'.*HINT"):
        surroundings(SingleDeviceStrategy("cpu"), "64-true")
