"""Attention modules, calls of them in every form, and an oracle in plain formulas, for the tests of attention."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import oracle
from tests.support.compressed import compressed
from tests.support.saving import saved_tensors as saved_tensors

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

    def samples_first(self, x: Tensor) -> Tensor:
        """Return an input or output of the module as ``[N, T, E]``."""
        if not self.batched:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _leaf(self, length: int, width: int, dtype: torch.dtype) -> Tensor:
        batched = (N, length, width) if self.batch_first else (length, N, width)
        return torch.randn(batched if self.batched else (length, width), dtype=dtype, requires_grad=True)


def copies(inputs: Inputs) -> Inputs:
    """Return leaves of their own with the same values, one tensor where it was one."""
    made = {id(x): x.detach().clone().requires_grad_() for x in inputs}
    return tuple(made[id(x)] for x in inputs)  # type: ignore[return-value]


def pruned_copy(module: nn.Module, **settings: Any) -> nn.Module:
    """Return a converted copy."""
    return compressed(module, **{"sparsity": SPARSITY, "block_size": BLOCK, **settings})


def distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(x): x for x in tensors}.values())


def projections(module: nn.MultiheadAttention) -> dict[str, Tensor]:
    """Return the weights whose gradients are pruned."""
    names = "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"
    return {name: parameter for name, parameter in module.named_parameters() if name in names}


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, sparsity: float, scope: str) -> Tensor:
    """Return ``F.linear`` of ``x [N, T, E]`` whose weight gradient comes from the pruned input."""
    x_hat = oracle.pruned(oracle.as_samples(x.detach(), scope), BLOCK, sparsity).view_as(x)
    straight = F.linear(x_hat, weight)
    return F.linear(x, weight.detach(), bias) + straight - straight.detach()


def expected(
    module: nn.MultiheadAttention, inputs: Inputs, sparsity: float, scope: str = "sample"
) -> tuple[Tensor, Tensor]:
    """Return the output and the average weights of attention ``[N, T, E]`` by formula, gradients as the design says."""
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    biases = module.in_proj_bias.chunk(3)
    q, k, v = (
        _linear(x, w, b, sparsity, scope).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for x, w, b in zip(inputs, weights, biases, strict=True)
    )
    attention = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]), -1)
    heads = (attention @ v).transpose(1, 2).flatten(2)
    output = _linear(heads, module.out_proj.weight, module.out_proj.bias, sparsity, scope)
    return output, attention.mean(1)
