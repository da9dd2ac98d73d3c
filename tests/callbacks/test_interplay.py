"""The callbacks in a fit beside saved-tensor hooks of others and with accumulated gradients."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, convert
from lightning_actprune.operators.base import CompressedLayer
from lightning_actprune.schedules import LinearSchedule
from tests.callbacks.test_first_batch import Retained, assert_hooks_gone
from tests.support.helpers import BATCHES, FEATURES, Gradients, Net, sparsities, trainer


class Sisters(Net):
    """``head`` and ``other`` read one tensor."""

    def make(self) -> None:
        super().make()
        self.other = nn.Linear(FEATURES, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(nn.functional.layer_norm(x, (FEATURES,)))
        return (self.head(h) - self.other(h)).mean(1)


class Offloading(Sisters):
    """Moves what its forward saves to the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        with save_on_cpu():
            return type(self).__mro__[1].forward(self, x)


class Around(pl.Callback):
    """Opens hooks around every training step and counts the bytes that they are given in each."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._hooks: Any = None

    def on_train_batch_start(self, *args: Any) -> None:
        self.counts.append(0)
        self._hooks = saved_tensors_hooks(self._pack, lambda retained: retained[0])
        self._hooks.__enter__()

    def on_before_zero_grad(self, *args: Any) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    def _pack(self, tensor: Tensor) -> tuple[Tensor]:
        self.counts[-1] += tensor.nbytes
        return (tensor.detach().clone(),)


def fitted(model: Net, *callbacks: pl.Callback, **options: Any) -> list[Tensor]:
    """Return the parameters after a fit that is the same but for ``model`` and ``callbacks``."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    pruning = ActivationPruning(sparsity=0.6, verbose=False)
    trainer(pruning, ActivationMemoryMonitor(1), *callbacks, **options).fit(model)
    assert pruning.skipped == []
    return [p.detach().clone() for p in model.parameters()]


def test_save_on_cpu_inside_and_around_a_fit_changes_nothing():
    expected = fitted(Sisters())
    torch.testing.assert_close(fitted(Offloading()), expected, rtol=0, atol=0)
    with save_on_cpu():
        torch.testing.assert_close(fitted(Sisters()), expected, rtol=0, atol=0)


@pytest.mark.parametrize("first", [True, False])
def test_hooks_of_another_callback_get_as_much_in_the_probed_and_the_measured_batch(first: bool):
    around = Around()
    pruning, monitor = ActivationPruning(sparsity=0.6, verbose=False), ActivationMemoryMonitor(1)
    callbacks = (around, pruning, monitor) if first else (pruning, monitor, around)
    model = Sisters()
    trainer(*callbacks).fit(model)
    assert len(set(around.counts)) == 1
    assert around.counts[0] > 0
    assert len(around.counts) == BATCHES
    assert (len(monitor.report.rows) == 4) is first  # hooks inside the meter keep from it what they get
    assert_hooks_gone(model)


def test_offloaded_inputs_are_not_judged():
    callback = ActivationPruning(sparsity=0.6)
    trainer(callback).fit(type("Offloading", (Retained,), {"forward": Offloading.forward})())
    assert callback.skipped == []


@pytest.mark.parametrize(("make", "parts", "scheduled"), [(Net, 2, True), (Sisters, 3, False), (Sisters, 3, True)])
def test_accumulated_gradients_are_the_sum_by_hand(make, parts: int, scheduled: bool):
    """Also where an epoch ends with fewer batches than are accumulated; the sparsity moves with the optimizer alone."""
    model, noted = make(), Gradients()
    hand = copy.deepcopy(model)
    convert(hand, sparsity=0.6)
    optimizer = torch.optim.SGD(hand.parameters(), lr=hand.lr)
    model.watch = sparsities
    schedule = LinearSchedule(end=0.8) if scheduled else None
    pruning = ActivationPruning(sparsity=schedule or 0.6, verbose=False)
    trainer(pruning, noted, accumulate_grad_batches=parts, max_epochs=2).fit(model)

    batches, seen = list(hand.train_dataloader()), iter(model.seen)
    steps = [batches[start : start + parts] for _ in range(2) for start in range(0, BATCHES, parts)]
    for number, (step, found) in enumerate(zip(steps, noted.seen, strict=True)):
        sparsity = schedule(number / len(steps)) if schedule else 0.6
        for layer in hand.modules():
            if isinstance(layer, CompressedLayer):
                layer.sparsity = sparsity
        optimizer.zero_grad()
        for x, y in step:
            assert set(next(seen)) == {sparsity}
            (nn.functional.cross_entropy(hand(x), y) / parts).backward()
        torch.testing.assert_close(found, [p.grad for p in hand.parameters()], rtol=0, atol=0)
        optimizer.step()
