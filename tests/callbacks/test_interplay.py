"""The callbacks in a fit beside saved-tensor hooks of others and with accumulated gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, convert
from lightning_actprune.operators.base import CompressedLayer
from lightning_actprune.schedules import LinearSchedule
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
            return super().forward(x)


def fitted(model: Net) -> list[Tensor]:
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    pruning = ActivationPruning(sparsity=0.6, verbose=False)
    trainer(pruning, ActivationMemoryMonitor(1)).fit(model)
    assert pruning.skipped == []
    return [p.detach().clone() for p in model.parameters()]


def test_save_on_cpu_inside_and_around_a_fit_changes_nothing():
    expected = fitted(Sisters())
    torch.testing.assert_close(fitted(Offloading()), expected, rtol=0, atol=0)
    with save_on_cpu():
        torch.testing.assert_close(fitted(Sisters()), expected, rtol=0, atol=0)


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
