"""Attention modules and calls of them in every form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

N, L, S, E, HEADS = 3, 5, 7, 72, 4
BLOCK, SPARSITY = 16, 0.6

Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass
class Case:
    """One way to call attention."""

    inputs: str = "self"  # or "cross" (key is value), "three", or "sizes" (three tensors of sizes of their own)
    options: dict[str, Any] = field(default_factory=dict)  # of the module
    call: dict[str, Any] = field(default_factory=dict)
    batched: bool = True

    @property
    def batch_first(self) -> bool:
        return self.options.get("batch_first", False)

    def make(self, dtype: torch.dtype = torch.float32) -> nn.MultiheadAttention:
        """Return a dense module without zeros."""
        sizes = {"kdim": 40, "vdim": 24} if self.inputs == "sizes" else {}
        module = nn.MultiheadAttention(E, HEADS, **sizes, **self.options, dtype=dtype)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.2)
        return module

    def tensors(self, dtype: torch.dtype = torch.float32) -> Inputs:
        """Return query, key and value as leaves."""
        key_width, value_width = (40, 24) if self.inputs == "sizes" else (E, E)
        query = self._leaf(L, E, dtype)
        if self.inputs == "self":
            return query, query, query
        key = self._leaf(S, key_width, dtype)
        return query, key, key if self.inputs == "cross" else self._leaf(S, value_width, dtype)

    def _leaf(self, length: int, width: int, dtype: torch.dtype) -> Tensor:
        batched = (N, length, width) if self.batch_first else (length, N, width)
        return torch.randn(batched if self.batched else (length, width), dtype=dtype, requires_grad=True)


class Attending(nn.Module):
    """Attention ``attn`` of a tensor with itself, or with that of another sample, perhaps behind a norm."""

    def __init__(self, norm: bool = False, need_weights: bool = False, crossed: bool = False, **options: Any) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(64) if norm else nn.Identity(), nn.MultiheadAttention(64, 4, **options)
        self.need_weights, self.crossed = need_weights, crossed

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        other = h.roll(1, 0) if self.crossed else h
        return self.attn(h, other, other, need_weights=self.need_weights)[0]
