"""A fit inside another, fits in two threads, and processes that load data: each is as it would be by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning
from lightning_actprune.operators.base import CompressedLayer
from tests.support.everything import Everything, assert_nothing_open, sample
from tests.support.helpers import all_traces, trainer

pytestmark = pytest.mark.integration


def ours() -> list[pl.Callback]:
    return [ActivationPruning("max", sparsity=0.5, verbose=False), ActivationMemoryMonitor(1, verbose=False)]


def found(model: Everything, callbacks: list[pl.Callback]) -> tuple[Any, ...]:
    """Return all that a fit has come to, but for its parameters."""
    pruning, monitor = callbacks
    return pruning.report.to_rows(), monitor.report.totals(), monitor.report.to_rows(), all_traces(model)


def compressed(model: Everything) -> int:
    return sum(isinstance(module, CompressedLayer) for module in model.modules())


def fit(model: Everything, *callbacks: pl.Callback, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    trainer(*callbacks, **options).fit(model)
    return model.state_dict()


@pytest.fixture(scope="module")
def alone() -> list[tuple[Any, dict[str, Tensor]]]:
    """What a fit comes to, by the seed of its model."""
    results = []
    for seed in range(2):
        model, callbacks = Everything(seed), ours()
        state = fit(model, *callbacks)
        results.append((found(model, callbacks), state))
    return results


def assert_as_alone(alone: Any, seed: int, model: Everything, callbacks: list[pl.Callback]) -> None:
    expected, state = alone[seed]
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert found(model, callbacks) == expected


def once(hook: str, action: Callable[[pl.Trainer], Any], step: int = 0) -> pl.Callback:
    """Return a callback that does something in one call of a hook, without drawing random numbers."""
    called = list[bool]()

    def act(trainer: pl.Trainer, *args: Any) -> None:
        if not called and trainer.global_step == step:
            called.append(True)
            with torch.random.fork_rng():
                action(trainer)

    return LambdaCallback(**{hook: act}, teardown=lambda *_, **__: called.remove(True))


@pytest.mark.parametrize(("hook", "step", "first"), [("on_before_backward", 0, True), ("on_train_batch_end", 1, False)])
def test_a_fit_inside_a_fit(alone, hook: str, step: int, first: bool):
    """Also while the outer one probes its first batch."""
    outer, inner, models = ours(), ours(), (Everything(0), Everything(1))
    other = once(hook, lambda _: fit(models[1], *inner), step)
    fit(models[0], *([other, *outer] if first else [*outer, other]))
    assert_as_alone(alone, 0, models[0], outer)
    assert_as_alone(alone, 1, models[1], inner)
    assert_nothing_open()


def test_a_callback_or_a_model_of_a_running_fit_is_refused_to_another_fit(alone):
    """The fit that they are in goes on as if nothing had happened, also when the callback hears of another stage."""
    callbacks, model, other = ours(), Everything(0), Everything(1)

    def start_others(outer: pl.Trainer) -> None:
        for shared in callbacks:
            with pytest.raises(MisconfigurationException, match=f"{type(shared).__name__} is in a fit of another .*"):
                fit(other, shared)
        trainer(*callbacks).validate(other, DataLoader([sample(0)]))
        with pytest.raises(MisconfigurationException, match=r"is already converted by ActivationPruning.* HINT: "):
            fit(model, ActivationPruning("max"))
        model.trainer = outer

    fit(model, *callbacks, once("on_before_backward", start_others))
    assert_as_alone(alone, 0, model, callbacks)
    assert compressed(other) == 0
    fit(Everything(1), *callbacks)
    assert_nothing_open()


def test_a_model_that_was_given_to_another_trainer_cannot_log():
    """Without a callback of ours, the other fit trains it with its layers as they are."""
    model, counts = Everything(0), list[int]()

    def train(_: pl.Trainer) -> None:
        counts.append(compressed(model))
        fit(model, ActivationMemoryMonitor(0, verbose=False), max_steps=1)
        counts.append(compressed(model))

    with pytest.raises(MisconfigurationException, match=r"cannot log: the model was given to another.* HINT"):
        fit(model, *ours(), once("on_train_batch_end", train, 2))
    assert counts[0] == counts[1] > 0
    assert compressed(model) == 0
    assert_nothing_open()


def test_two_threads_train_two_models(alone):
    """The compiler's stance, which is the process's, is as it was, though the first to ask for another leaves first."""
    first_in, second_in, first_out = (threading.Event() for _ in range(3))

    def first(trainer: pl.Trainer, model: Any, batch: Tensor, number: int) -> None:
        if number == 0:
            first_in.set()
            assert second_in.wait(60)
        elif number == 1:
            first_out.set()

    def second(trainer: pl.Trainer, model: Any, batch: Tensor, number: int) -> None:
        if number == 0:
            second_in.set()
            assert first_out.wait(60)

    waits = LambdaCallback(on_fit_start=lambda *_: first_in.wait(60), on_train_batch_start=second)
    orders = LambdaCallback(on_train_batch_start=first), waits
    models, callbacks = [Everything(seed) for seed in range(2)], [ours(), ours()]
    threads = [
        threading.Thread(target=trainer(*own, order).fit, args=(model,))
        for model, own, order in zip(models, callbacks, orders, strict=True)
    ]
    for act in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            act(thread)
    assert_nothing_open()
    for seed in range(2):
        assert_as_alone(alone, seed, models[seed], callbacks[seed])
