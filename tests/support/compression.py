"""What the tests of saved-tensor compression share: what backward reads in place of a tensor, bounds of its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_actprune.config import Keep
from lightning_actprune.operators.saved import SavedTensorCompression

SHAPE = (4, 20, 64)
DENSE = 4 * 80 * 64
STORED = 80 * 2 * (32 + 2)
"""Bytes of an activation of that shape in fp32, and in eight bits in blocks of 32."""


class Product(nn.Module):
    """The product of its arguments; with a probe of ones for the second, that gets as gradient what was kept."""

    def forward(self, x: Tensor, probe: Tensor) -> Tensor:
        return x * probe


class Runs(nn.Module):
    """Runs a function on itself and its argument."""

    def __init__(self, run: Callable[..., Tensor], *parameters: tuple[int, ...]) -> None:
        super().__init__()
        self.run = run
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape) / shape[0] ** 0.5) for shape in parameters])

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, *self.weights)


def activation(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1, device: Any = "cpu") -> Tensor:
    """Return a tensor with a history."""
    made = torch.randn(shape or SHAPE, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    return made.requires_grad_() * 1


def read_back(x: Tensor, bits: int = 8, **options: Any) -> Tensor:
    """Return what backward reads in place of ``x``, which was packed."""
    module, probe = Product(), torch.ones(x.shape, dtype=x.dtype, device=x.device, requires_grad=True)
    with SavedTensorCompression(module, Keep(bits=bits), min_values=1, **options) as saving:
        y = module(x, probe)
    assert sum(row.count for row in saving.rows) == 1
    y.sum().backward(inputs=[probe])
    return probe.grad


def attention(x: Tensor, qkv: Tensor) -> Tensor:
    """Return fused attention of four heads, of a joint projection."""
    q, k, v = (x @ qkv).reshape(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v)


def gradients(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor] = torch.sum) -> list[Tensor]:
    """Return the gradients of one step: of a fresh leaf in place of ``x`` first, then of the parameters."""
    model.zero_grad(set_to_none=True)
    leaf = x.detach().clone().requires_grad_()
    loss(model(leaf * 1)).backward()
    return [leaf.grad, *(p.grad for p in model.parameters())]


def typical(bits: int) -> float:
    """Return the relative RMS error of normal values: uniform within a step, a block spans 8 standard deviations."""
    return 8 * 32 / 31 * 9 / 8 / (2**bits - 1) / 12**0.5


def made() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 64))


def packed(saving: SavedTensorCompression) -> int:
    return sum(row.count for row in saving.rows)


def top_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)
