"""What a budget refuses, and what ends a fit with one: the model is restored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy

from lightning_actprune import ActivationPruning
from lightning_actprune.callbacks.budget import _check_surroundings
from tests.support.budgets import AGAIN, HALF, assert_restored, fit
from tests.support.stack import Stack


def test_a_budget_that_cannot_be_met_is_an_error_and_the_model_is_restored():
    model = Stack()
    match = r"`memory_budget` \(\d+ MiB, 5% of the dense peak\) is less than a step takes at the least, \d+ MiB: .*HINT"
    with pytest.raises(MisconfigurationException, match=match):
        fit(ActivationPruning(memory_budget=0.05, verbose=0), model)
    assert_restored(model)
    assert len(model.kinds) == 2


@pytest.mark.parametrize("after", [1, 4])
def test_an_exception_restores_the_model_and_the_next_fit_decides_anew(after: int):
    class Failing(Stack):
        def on_train_batch_end(self, *args: Any) -> None:
            if self.trainer.global_step == after:
                raise ZeroDivisionError

    model, pruning = Failing(), ActivationPruning(memory_budget=HALF, verbose=0)
    with pytest.raises(ZeroDivisionError):
        fit(pruning, model)
    assert_restored(model)
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
