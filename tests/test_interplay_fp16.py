"""fp16 with a GradScaler: an overflow is seen where the dense model sees it, and costs a step and no more.

Decisions are compared where an overflow shows in the gradients that are exact. A pruned layer sums the gradients of its
weight and bias in fp32, so what overflows in such a sum alone, in fp16, overflows in the dense layer only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import ActivationPrunedLinear, convert

SPARSITY, BLOCK = 0.9, 16


@dataclass
class Run:
    """What a few steps of training did.

    Args:
        scales: Scale before each step, and after the last.
        skipped: Whether the step left every parameter as it was.
        finite: Whether all parameters were finite after the step.
    """

    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)


def train(
    model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], steps: int, scale: float, lr: float = 1e-3
) -> Run:
    """Train with dynamic scaling, under autocast to fp16."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    optimizer, run = torch.optim.Adam(model.parameters(), lr=lr), Run()
    for step in range(steps):
        before = copy.deepcopy(model.state_dict())
        run.scales.append(scaler.get_scale())
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        after = model.state_dict()
        run.skipped.append(all(torch.equal(before[name], after[name]) for name in before))
        run.finite.append(all(bool(torch.isfinite(value).all()) for value in after.values()))
    run.scales.append(scaler.get_scale())
    return run


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 4))


def dense_and_pruned(model: nn.Module, *args: object, **options: float) -> tuple[Run, Run, nn.Module]:
    pruned = copy.deepcopy(model)
    convert(pruned, sparsity=SPARSITY, block_size=BLOCK)
    return train(model, *args, **options), train(pruned, *args, **options), pruned


def test_decisions_are_the_dense_ones_with_overflows_injected_everywhere():
    x, y = torch.randn(8, 4, 10, 64), torch.randint(4, (8, 4))
    x[1, 2, 3, 5] = math.inf
    x[6, 0, 9, 63] = math.nan

    def loss_of(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            out = model(x[step])
        if step == 3:
            out.register_hook(lambda grad: grad.index_fill(0, torch.tensor([1]), math.inf))
        if step == 4:
            out.register_hook(lambda grad: grad * math.nan)
        return nn.functional.cross_entropy(out.float().mean(1), y[step])

    dense, pruned, model = dense_and_pruned(mlp(), loss_of, 8, 1024.0)
    assert dense.skipped == [step in (1, 3, 4, 6) for step in range(8)]
    assert pruned == dense
    assert all(pruned.finite)
    assert [b / a for a, b in pairwise(pruned.scales)] == [
        0.5 if skipped else 1.0 for skipped in pruned.skipped
    ]  # never three good steps in a row, so that it does not grow
    assert all(isinstance(layer, ActivationPrunedLinear) for layer in model[::2])


def test_a_scale_that_is_too_high_comes_down_step_by_step_and_grows_again():
    """One row: sums have one summand, and every gradient is at most that of the output."""
    x = torch.rand(1, 64)

    def loss_of(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return model(x).float().mean()

    dense, pruned, _ = dense_and_pruned(mlp(), loss_of, 14, 2.0**21, lr=1e-6)
    assert pruned == dense
    # d loss / d output is a quarter of the scale, and 2^16 is no fp16 any more.
    assert pruned.scales[:5] == [2.0**21, 2.0**20, 2.0**19, 2.0**18, 2.0**17]
    assert pruned.skipped == [scale >= 2.0**18 for scale in pruned.scales[:-1]]
    assert pruned.skipped.count(True) > 4  # it grows, overflows and comes down again
    assert all(pruned.finite)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [(0, 0, 0), (1, 7, 31), (2, 9, 63), (3, 4, 16)])
def test_only_a_kept_block_can_show_an_input_that_is_not_finite(value: float, place: tuple[int, int, int]):
    """Its row has no gradient, so that 0 times the value is the only trace, and its block is zero but for it."""
    x = torch.randn(4, 10, 64)
    sample, row, column = place
    x[sample, row, column // BLOCK * BLOCK : (column // BLOCK + 1) * BLOCK] = 0
    x[place] = value
    weight = torch.ones(4, 10, 1)
    weight[sample, row] = 0

    def loss_of(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            out = model(x if step == 1 else torch.ones_like(x))
        return (out.float().nan_to_num(0, 0, 0) * weight).sum()

    dense, pruned, _ = dense_and_pruned(nn.Sequential(nn.Linear(64, 8, bias=False)), loss_of, 3, 16.0)
    assert pruned == dense
    assert pruned.skipped == [False, True, False]
    assert pruned.scales == [16.0, 16.0, 8.0, 8.0]


def test_weights_in_fp16():
    x = torch.randn(4, 10, 64, dtype=torch.float16)
    model = nn.Sequential(nn.Linear(64, 8)).half()
    convert(model, sparsity=SPARSITY, block_size=BLOCK)
    grads = []
    for value in (1.0, math.inf, 1.0):
        model.zero_grad()
        x[1, 2, 3] = value
        model(x).float().nan_to_num(0, 0, 0).sum().backward()
        grads.append(model[0].weight.grad.clone())
    assert [bool(torch.isfinite(grad).all()) for grad in grads] == [True, False, True]
    assert torch.equal(grads[0], grads[2])
