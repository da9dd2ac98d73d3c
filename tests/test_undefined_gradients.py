"""Where nothing depends on a layer's output, converted layers leave gradients alone as dense ones do: ``None``, not 0.

That is so if the output is read by a function that returns no gradient for it. An optimizer with weight decay or
momentum moves a weight whose gradient is 0, and leaves one alone whose gradient is ``None``.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import convert
from lightning_actprune.nn import Affine

KINDS: dict[str, tuple[list[nn.Module], tuple[int, ...]]] = {
    "linear": ([nn.Linear(64, 64)], (4, 8, 64)),
    "convolution": ([nn.Conv2d(8, 8, 3)], (2, 8, 8, 8)),
    "affine": ([Affine(64)], (4, 8, 64)),
    "norm": ([nn.LayerNorm(64)], (4, 8, 64)),
    "batch norm": ([nn.BatchNorm2d(8)], (4, 8, 8, 8)),
    "group norm": ([nn.GroupNorm(2, 8)], (4, 8, 8, 8)),
    "activation": ([nn.Linear(64, 64), nn.GELU()], (4, 8, 64)),
    "dropout": ([nn.Linear(64, 64), nn.Dropout(0.5)], (4, 8, 64)),
    "gate": ([nn.Linear(64, 64), nn.GLU()], (4, 8, 64)),
}


class ReadsOnly(torch.autograd.Function):
    """A number made of a tensor, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_none(kind: str, sparsity: float, device: torch.device):
    layers, shape = KINDS[kind]
    model = copy.deepcopy(nn.Sequential(*layers)).to(device)
    convert(model, sparsity, value_format="int4", others=True, min_features=0)
    x = torch.randn(shape, device=device, requires_grad=True)
    (ReadsOnly.apply(model(x)) + x.mean()).backward()
    assert [p.grad for p in model.parameters()] == [None] * len(list(model.parameters()))
    torch.testing.assert_close(x.grad, torch.full_like(x, 1 / x.numel()), rtol=0, atol=0)  # a power of two
    model(x).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


def test_a_frozen_batch_norm_gives_none_either():
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    model[1].weight.requires_grad_(False)
    convert(model.eval(), 0.5, others={"convolution": "int4", "norm": "int4"})
    ReadsOnly.apply(model(torch.randn(2, 8, 8, 8))).backward()
    assert [p.grad for p in model.parameters()] == [None] * 4
