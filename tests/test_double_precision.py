"""float64: values as they are work everywhere and exactly, by hand and in a fit; few bits are refused clearly."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import ActivationPruning, convert
from tests.helpers import FEATURES, Gradients, Net, trainer
from tests.oracle import pruned

EPSILON = torch.finfo(torch.float64).eps


def loss_of(model: Net, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def test_convert_prunes_a_model_in_fp64():
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 8)).double()
    assert len(convert(model, 0.5, 16, min_features=1).converted) == 2
    x = torch.randn(3, 5, 64, dtype=torch.float64)
    hidden = model[0](x)
    y = model[1](hidden)
    grad = torch.randn_like(y)
    y.backward(grad)
    found = (model[1].weight.grad, model[0].weight.grad)
    through = grad @ model[1].weight
    for layer_grad, given, out in zip(found, (hidden, x), (grad, through), strict=True):
        kept = pruned(given.detach(), 16, 0.5).flatten(0, 1)
        expected = out.flatten(0, 1).t() @ kept
        # Sums of 15 products in any order: 15 roundings of at most the sum of their magnitudes, twice with `through`.
        bound = 2 * 15 * EPSILON * (out.flatten(0, 1).abs().t() @ kept.abs()).max()
        assert (layer_grad - expected).abs().max() <= bound
        assert layer_grad.dtype == torch.float64


@pytest.mark.parametrize("value_format", [None, "same"])
def test_a_fit_has_the_gradients_of_fp64_by_hand(value_format: str | None):
    noted, model = Gradients(), Net()
    hand = copy.deepcopy(model).double()
    pruning = ActivationPruning(0.5, value_format=value_format, verbose=False)
    trainer(pruning, noted, precision="64-true", limit_train_batches=1).fit(model)
    assert len(pruning.converted) == 3
    convert(hand, 0.5)
    x, y = next(iter(hand.train_dataloader()))
    loss_of(hand, x.double(), y).backward()
    torch.testing.assert_close(noted.seen[0], [p.grad for p in hand.parameters()], rtol=0, atol=0)
    assert {grad.dtype for grad in noted.seen[0]} == {torch.float64}


@pytest.mark.parametrize("value_format", ["int4", "fp8"])
def test_few_bits_are_refused_by_hand_too(value_format: str):
    model = nn.Sequential(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 8)).double()
    convert(model, 0.5, value_format=value_format)
    with pytest.raises(TypeError, match=r"(?s)float64.*HINT"):
        model(torch.randn(2, FEATURES, dtype=torch.float64))
