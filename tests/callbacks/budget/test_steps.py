"""What a training step may do that is simulated for a budget, and that the simulation leaves everything as it is."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning
from lightning_actprune.callbacks import budget as module
from tests.support.budgets import DENSE, HALF, assert_restored, chosen, fit
from tests.support.helpers import trainer
from tests.support.stack import DEPTH, STEPS, WIDTH, Stack

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


def test_metrics_logs_and_what_the_trainer_knows(tmp_path):
    model, pruning = Measuring(STEPS), ActivationPruning(memory_budget=HALF, verbose=0)
    monitor = ActivationMemoryMonitor(verbose=False)
    made = trainer(monitor, pruning, max_steps=STEPS, logger=CSVLogger(tmp_path))
    made.fit(model)
    assert chosen(pruning) > DEPTH
    assert monitor.report.saved_fraction > 0
    assert model.accuracy.update_count == STEPS
    assert_restored(model)


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


@pytest.mark.integration
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


def test_a_simulation_leaves_everything_as_it_is(monkeypatch):
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
    fit(ActivationPruning(memory_budget=0.8, verbose=0), model_of_fit, precision="bf16-mixed")
    assert compared
    assert model_of_fit.count == model_of_fit.calls == STEPS
    assert model_of_fit._trainer is not None
