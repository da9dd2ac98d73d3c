"""Models of which autocast makes copies of weights in every way."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

E = 64
ELEMENTS = E * 96


def bf16(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, **options)


class Base(nn.Module):
    """Two layers ``a`` and ``b`` on an input that needs a gradient; a subclass says how they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(E)
        self.a, self.b = nn.Linear(E, 96), nn.Linear(E, 96)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.norm(x))

    def use(self, h: Tensor) -> Tensor:
        return self.a(h).exp() * self.b(h.sin())


def uses(use: Callable[[Any, Tensor], Tensor], **parts: Callable[[], Any]) -> type[Base]:
    """Return a subclass with further modules or parameters, made by ``parts``."""

    class Uses(Base):
        def __init__(self) -> None:
            super().__init__()
            for name, make in parts.items():
                setattr(self, name, make())

    Uses.use = use
    return Uses


class Tied(Base):
    def __init__(self):
        super().__init__()
        self.b.weight = self.a.weight


class TwoRegions(Base):
    def use(self, h):
        first = super().use(h)
        with bf16():
            second = super().use(h.cos())
        return first.float() * second.float()


class RegionPerLayer(Base):
    def use(self, h):
        with bf16():
            first = self.a(h)
        with bf16():
            return self.a(first.exp()[..., :E])


CalledTwice = uses(lambda self, h: self.a(h).exp() * self.a(h.sin()))


class Masked(CalledTwice):
    """``torch.nn.utils.prune`` makes the weight anew before each call."""

    def __init__(self):
        super().__init__()
        prune.l1_unstructured(self.a, "weight", amount=0.5)


Checkpointed = uses(lambda self, h: checkpoint(self.a, h, use_reentrant=False) * self.a(h.sin()))
SizedAttention = uses(
    lambda self, h: self.attention(h, h.sin()[..., :40], h.cos()[..., :24])[0],
    attention=lambda: nn.MultiheadAttention(E, 2, kdim=40, vdim=24, batch_first=True),
)
Encoder = uses(
    lambda self, h: self.layer(h),
    layer=lambda: nn.TransformerEncoderLayer(E, 2, 96, dropout=0.0, batch_first=True),
)
MODELS = [Base, CalledTwice, Tied, Masked, Checkpointed, Encoder, SizedAttention]
"""``Random`` has functions of a weight, cross-attention, and regions without autocast or without its cache."""
# A parameter that three layers and a function read: autocast makes one copy of it for all.
LearnedQueries = uses(
    lambda self, h: (self.a(q := self.queries) * self.b(q)).sum() + F.linear(q, self.b.weight) + self.a(h),
    queries=lambda: nn.Parameter(torch.randn(8, E)),
)


class Leaf(Base):
    """Layers that read the input itself."""

    def forward(self, x):
        return self.a(x) * self.b(x) + self.a(x.transpose(0, 1)).transpose(0, 1)


class Random(nn.Module):
    """Layers from a small stock, of which some share a weight, on inputs from earlier ones, in regions of their own."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(E)
        self.layers = nn.ModuleList(nn.Linear(E, E) for _ in range(4))
        self.attention = nn.MultiheadAttention(E, 2, batch_first=True)
        self.layers[1].weight = self.layers[0].weight
        uses = "layer", "layer", "layer", "function", "self", "cross"
        contexts = {"none": nullcontext, "on": bf16, "off": lambda: bf16(enabled=False)}
        contexts["uncached"] = lambda: bf16(cache_enabled=False)
        self.plan = [(draw.choice(uses), draw.randrange(4), draw.choice(["none", "none", *contexts])) for _ in range(8)]
        self.contexts = contexts

    def forward(self, x: Tensor) -> Tensor:
        for use, number, context in self.plan:
            with self.contexts[context]():
                h = self.norm(x.float())
                if use == "layer":
                    y = self.layers[number](h)
                elif use == "function":
                    y = F.linear(h, self.layers[number].weight)
                else:
                    y = self.attention(h, *((h, h) if use == "self" else (h.sin(), h.cos())))[0]
            x = x.float() + y.float()
        return x
