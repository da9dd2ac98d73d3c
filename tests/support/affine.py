"""Layers that scale each feature: those of timm as stand-ins under their names, which are known by these."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_actprune.operators.scale import Affine
from tests.support.compressed import compressed

FEATURES = 70
"""No multiple of a block: the last one of a row is cut short."""


class TimmAffine(nn.Module):
    """The forward of timm's ``Affine``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones((1, 1, dim)))
        self.beta = nn.Parameter(torch.zeros((1, 1, dim)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.beta, self.alpha, x)


class TimmLayerScale(nn.Module):
    """The forward of timm's ``LayerScale``."""

    def __init__(self, dim: int, inplace: bool = False) -> None:
        super().__init__()
        self.inplace = inplace
        self.gamma = nn.Parameter(1e-5 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.gamma) if self.inplace else x * self.gamma


class TimmResBlock(nn.Module):
    """The forward of timm's ``ResBlock``."""

    def __init__(self, dim: int, tokens: int = 5) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.Identity(), nn.Identity()
        self.linear_tokens, self.drop_path = nn.Linear(tokens, tokens), nn.Identity()
        self.mlp_channels = nn.Sequential(nn.Linear(dim, 8), nn.Linear(8, dim))
        self.ls1 = nn.Parameter(1e-4 * torch.ones(dim))
        self.ls2 = nn.Parameter(1e-4 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.ls1 * self.linear_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2))
        return x + self.drop_path(self.ls2 * self.mlp_channels(self.norm2(x)))


for stand_in, module, name in (
    (TimmResBlock, "timm.models.mlp_mixer", "ResBlock"),
    (TimmAffine, "timm.models.mlp_mixer", "Affine"),
    (TimmLayerScale, "timm.layers.layer_scale", "LayerScale"),
):
    stand_in.__module__, stand_in.__qualname__, stand_in.__name__ = module, name, name

MAKERS: dict[str, Callable[[], nn.Module]] = {
    "affine": lambda: Affine(FEATURES),
    "layer scale": lambda: Affine(FEATURES, bias=False, scale=0.1),
    "timm affine": lambda: TimmAffine(FEATURES),
    "timm layer scale": lambda: TimmLayerScale(FEATURES),
}


def pair(
    make: Callable[[], nn.Module], device: torch.device | str = "cpu", bits: int = 4
) -> tuple[nn.Module, nn.Module]:
    """Return a layer with random parameters, dense and compressed."""
    dense = nn.Sequential(make()).to(device)
    for parameter in dense.parameters():
        nn.init.normal_(parameter)
    ours = copy.deepcopy(dense)
    return dense, compressed(ours, "affine" if len(list(dense.parameters())) == 2 else "scale", bits=bits)
