"""Second derivatives through converted layers are refused, whatever autograd is asked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import convert, revert


def penalised(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of a penalty on a gradient, asked for by name as autograd takes it."""
    (grad,) = torch.autograd.grad(module(x * x).sum(), x, create_graph=True)
    return torch.autograd.grad((grad.norm() - 1).square(), (x, *module.parameters()), allow_unused=True)


@pytest.mark.parametrize("others", [False, True])
def test_a_gradient_penalty_is_refused_and_right_once_reverted(others):
    """Nodes that lead to no input are not run there, so an error in their derivative would not be raised."""
    module = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 1))
    x = torch.randn(8, 64, requires_grad=True)
    right = penalised(module, x)
    convert(module, 0.5, value_format="int8", others=others)
    with pytest.raises(RuntimeError, match=r"Second derivatives through .* create_graph=True"):
        penalised(module, x)
    revert(module)
    torch.testing.assert_close(penalised(module, x), right, rtol=0, atol=0)
