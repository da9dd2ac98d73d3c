"""Operations that may enlarge errors of what they saved without bound are refused where that is kept in few bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import convert


class Through(nn.Module):
    """A function of a linear layer's output, moved away from zero."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(64, 64), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.fc(x).relu().add(0.1))


def converted(function: Callable[[Tensor], Tensor]) -> tuple[Through, Tensor]:
    """Return a module whose function keeps what it saves in eight bits, and a loss."""
    module = Through(function)
    convert(module, others={"rest": "int8"})
    return module, module(torch.randn(32, 64, 64)).sum()


POLES = {
    "PowBackward0": lambda x: x.pow(0.5),
    "PowBackward1": lambda x: x.pow(torch.tensor([1.7])),
    "SpecialEntrBackward0": torch.special.entr,
    "XlogyBackward0": lambda x: torch.xlogy(x, x),
    "XlogyBackward1": lambda x: torch.xlogy(2.0, x),
    "SpecialXlog1PyBackward0": lambda x: torch.special.xlog1py(x, x),
    "LgammaBackward0": torch.lgamma,
    "MvlgammaBackward0": lambda x: torch.mvlgamma(x + 1, 2),
    "DigammaBackward0": torch.digamma,
    "PolygammaBackward0": lambda x: torch.polygamma(1, x),
    "SpecialZetaBackward0": lambda x: torch.special.zeta(torch.full_like(x, 2.0), x),
    "ErfinvBackward0": lambda x: torch.erfinv(x / (x.detach().max() + 1)),
    "ProdBackward1": lambda x: x.prod(-1),
    "CumprodBackward0": lambda x: x.cumprod(-1),
    "LogcumsumexpBackward0": lambda x: x.logcumsumexp(-1),
    "Atan2Backward0": lambda x: torch.atan2(x, x),
    "CdistBackward0": lambda x: torch.cdist(x, x, p=1.0),
    "EuclideanDistBackward0": lambda x: torch.cdist(x, x),
    "LinalgVectorNormBackward0": lambda x: x.norm(p=0.5, dim=-1),
}


@pytest.mark.parametrize("node", POLES)
def test_operations_with_a_pole_are_refused(node):
    _, loss = converted(POLES[node])
    with pytest.raises(RuntimeError, match=rf"{node} .*HINT"):
        loss.backward()


def test_a_power_without_a_pole_is_not():
    module, loss = converted(lambda x: x.pow(2))
    loss.backward()
    assert module.fc.weight.grad.isfinite().all()
