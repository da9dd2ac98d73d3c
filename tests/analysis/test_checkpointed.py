"""Probes and meters of models whose layers run inside activation checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_actprune.analysis.first_batch import RetentionProbe
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.config import Keep
from lightning_actprune.convert import convert
from tests.support.checkpointing import WAYS
from tests.support.marks import in_turn

pytestmark = pytest.mark.filterwarnings("ignore:Please specify CheckpointImpl:FutureWarning")


class Shared(nn.Module):
    """Query, key and value of one tensor, and an output projection behind a ReLU, which retains its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.out(F.relu(self.q(y) * self.k(y) + self.v(y)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


def made(make: Callable[[], nn.Module], way: Callable[[nn.Module], nn.Module] = lambda module: module) -> nn.Sequential:
    """Return a pruned model of two regions between plain layers, the same for every ``way`` to checkpoint them."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), make(), nn.GELU(), make(), nn.GELU(), nn.Linear(64, 8))
    convert(model, rules={"type:linear": Keep(sparsity=0.6, block_size=16), "*": None})
    model[2], model[4] = way(model[2]), way(model[4])
    return model


def step(model: nn.Module, probed: bool = False) -> list[Tensor]:
    """Return loss and gradients of one training step, the first of a fit or a later one."""
    torch.manual_seed(2)
    model.zero_grad(set_to_none=True)
    x = torch.randn(3, 10, 64)
    with RetentionProbe(model, x) if probed else nullcontext():
        loss = model(x).square().mean()
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize(("way", "make"), in_turn(WAYS, [Shared, Attention]))
def test_gradients_in_the_probed_step(make, way: str):
    """The probe lets layers whose input is retained run dense, but not in one of the two runs of a region."""
    plain, checkpointed = made(make), made(make, WAYS[way])
    expected, found = step(plain), step(checkpointed, probed=True)
    names = ["", *(name for name, _ in plain.named_parameters())]
    differ = [name for name, ours, theirs in zip(names, found, expected, strict=True) if not torch.equal(ours, theirs)]
    assert differ == ["0.weight"]  # reads the batch, so that it ran dense
    torch.testing.assert_close(step(checkpointed), expected, rtol=0, atol=0)  # and later steps are pruned as before


@pytest.mark.parametrize("way", ["reentrant", "non_reentrant"])
def test_the_meter_does_not_count_what_runs_again_in_backward(way: str):
    model, x = made(Shared, WAYS[way]), torch.randn(3, 10, 64)
    with SavedTensorMeter(model, x) as forward:
        loss = model(x).sum()
    with SavedTensorMeter(model, x) as both:
        model(x).sum().backward()
    loss.backward()
    assert forward.report() == both.report()
    assert [row.fqn for row in both.report().rows] == ["0", "6"]
