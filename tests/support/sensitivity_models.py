"""Models whose sensitivity is measured, and small settings to measure."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.conversion_models import deep

BITS = [None, 4, 2]

SMALL: dict[str, Any] = {"sparsities": [0.5], "bits": [None, 4]}


def square(model: nn.Module) -> Any:
    return lambda x: model(x).square().mean()


class TokenMixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(70), nn.Linear(40, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, batch_first: bool, crossed: bool, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=batch_first, **options)
        self.crossed = crossed

    def forward(self, x: Tensor) -> Tensor:
        other = x.roll(1, 0) if self.crossed else x
        return self.attention(x, other, other, need_weights=False)[0]


class Twice(nn.Module):
    """One layer called twice, and one of which only the first of two calls reaches the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.once = nn.Linear(66, 66), nn.Linear(66, 66)

    def forward(self, x: Tensor) -> Tensor:
        y = self.shared(torch.tanh(self.shared(x)))
        out = self.once(y)
        self.once(out)
        return out


# Models with an input of theirs.
MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "three": (deep, (3, 5, 65)),
    "token mixing": (TokenMixing, (3, 40, 70)),
    "called twice": (Twice, (4, 3, 66)),
    "self-attention": (lambda: Attention(True, False), (3, 6, 64)),
    "own weights": (lambda: Attention(True, True, kdim=64, vdim=64, bias=False), (3, 6, 64)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(6, 8, 3, padding="same"), nn.Conv2d(8, 4, 2, 2)), (2, 6, 9, 8)),
}


def gradients(model: nn.Module, x: Tensor, autocast: bool) -> dict[str, Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        square(model)(x).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}
