"""Models in which something else retains a layer's input, or does not, and what the probe says of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_actprune.analysis.first_batch import RetentionProbe
from lightning_actprune.convert import convert
from lightning_actprune.operators.base import CompressedLayer
from lightning_actprune.report import ConversionReport


class Step(nn.Module):
    """A layer ``fc`` whose input is made, and used otherwise too, in a way of its own; ``in_`` makes it a result."""

    def __init__(self) -> None:
        super().__init__()
        self.in_, self.fc = nn.Linear(64, 64), nn.Linear(64, 64)
        self.features: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.use(F.gelu(self.in_(x)))

    def use(self, h: Tensor) -> Tensor:
        return self.fc(h)


class Relu(Step):
    def use(self, h):
        return self.fc(F.relu(h))


def step(use: Callable[[Any, Tensor], Tensor], **parts: Callable[[], Any]) -> type[Step]:
    """Return a subclass with further modules or parameters, made by ``parts``."""

    class Made(Step):
        def __init__(self) -> None:
            super().__init__()
            for name, make in parts.items():
                setattr(self, name, make())

    Made.use = use
    return Made


def square() -> nn.Linear:
    return nn.Linear(64, 64)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.unflatten(2, (2, 32)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


ReluModule = step(lambda self, h: self.fc(self.block["act"](h)), block=lambda: nn.ModuleDict({"act": nn.ReLU()}))
View = step(lambda self, h: self.fc(h.relu()[1:].unsqueeze(1)))
Sdpa = step(lambda self, h: self.fc(attend(h, h.sin(), h.cos())))
NormReadsResidual = step(lambda self, h: self.fc(h := h + 1) + self.norm(h), norm=lambda: nn.LayerNorm(64))
DenseSister = step(lambda self, h: self.fc(h) * self.k(h), k=square)
KeptFeatures = step(lambda self, h: (self.features.append(h), self.fc(h))[1])
Parameter = step(lambda self, h: self.fc(self.queries).mean() + h, queries=lambda: nn.Parameter(torch.randn(16, 64)))
LeakyRelu = step(lambda self, h: self.fc(F.leaky_relu(h)))
Residual = step(lambda self, h: (h := h + 1) + self.fc(h))
Sisters = step(lambda self, h: self.fc(h) * self.k(h), k=square)  # all compressed


BY = "its input is kept for backward by "
RETAINED = [
    (Relu, BY + "relu"),
    (ReluModule, BY + "'block.act' (relu)"),
    (View, BY + "relu"),
    (Sdpa, BY + "scaled_dot_product_attention"),
    (NormReadsResidual, BY + "'norm' (layer_norm)"),
    (DenseSister, BY + "'k' (a layer that is dense)"),
    (KeptFeatures, "its input is kept alive by a Python reference outside autograd (such as a list of features)"),
    (Parameter, "its input is a parameter or buffer"),
]
FREE = [Step, LeakyRelu, Residual, Sisters]


def converted(model: nn.Module, sparsity: float = 0.6, **options: object) -> ConversionReport:
    """Convert linear layers, which at a sparsity of 0 wait for a schedule."""
    report = convert(model, sparsity=sparsity or 0.5, **options)
    for layer in model.modules():
        if isinstance(layer, CompressedLayer) and "_state" in vars(layer):
            layer.sparsity = sparsity
    return report


def made(make, sparsity=0.6):
    model = make()
    return model, converted(model, sparsity, rules={"k": None} if make is DenseSister else None), torch.randn(3, 16, 64)


def retained(model, x, **options):
    """Return the layers with retained inputs and the reasons, from one forward; the batch is not said to be one."""
    with RetentionProbe(model, **options) as probe:
        model(x).sum()
    return {layer.fqn: layer.reason for layer in probe.retained}


class Block(nn.Module):
    """One of many ways to get to the next layer."""

    KINDS = ("relu", "gelu", "sdpa", "norm", "residual", "list", "view", "sisters", "dense")

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.fc, self.k, self.v, self.dense = (nn.Linear(64, 64) for _ in range(4))
        self.norm = nn.LayerNorm(64)
        self.kept: list[Tensor] = []

    def forward(self, h: Tensor) -> Tensor:
        match self.kind:
            case "relu":
                return self.fc(F.relu(h))
            case "gelu":
                return self.fc(F.gelu(h))
            case "sdpa":
                return self.fc(attend(self.dense(h), self.k(h), self.v(h)))
            case "norm":
                return self.fc(self.norm(h))
            case "residual":
                return h + self.fc(h)
            case "list":
                self.kept.append(h)
                return self.fc(h)
            case "view":
                return self.fc(h[:, :5]).repeat(1, 4, 1)[:, : h.shape[1]]
            case "sisters":
                return self.fc(h) * self.k(h) + self.v(h)
        return self.dense(h) - self.fc(h)
