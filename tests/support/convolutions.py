"""Convolutions of every kind, their inputs in both memory formats, and an oracle in plain steps, for the tests."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import oracle

BLOCK, SPARSITY = 8, 0.6
CONVOLUTIONS = {1: (nn.Conv1d, F.conv1d), 2: (nn.Conv2d, F.conv2d), 3: (nn.Conv3d, F.conv3d)}


class Case(NamedTuple):
    """A convolution and its input."""

    shape: tuple[int, ...]  # of the input
    outputs: int
    kernel: tuple[int, ...]
    options: Mapping[str, Any] = MappingProxyType({})

    @property
    def dims(self) -> int:
        return len(self.kernel)

    def layer(self, **more: Any) -> nn.Module:
        return CONVOLUTIONS[self.dims][0](self.shape[1], self.outputs, self.kernel, **self.options, **more)

    def input(self, last: bool, **kind: Any) -> Tensor:
        """Return an input that needs a gradient, its channels last in memory or not."""
        return laid_out(torch.randn(self.shape, **kind), last).requires_grad_()

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return CONVOLUTIONS[self.dims][1](x, weight, bias, **self.options)


CASES = {
    "3x3": Case((3, 16, 9, 6), 8, (3, 3), {"padding": 1}),
    "strided": Case((2, 8, 9, 8), 6, (3, 3), {"stride": 2, "padding": (1, 0)}),
    "patches": Case((3, 3, 8, 8), 10, (4, 4), {"stride": 4}),
    "grouped": Case((2, 12, 6, 8), 8, (3, 3), {"groups": 4}),
    "depthwise": Case((2, 16, 7, 7), 16, (5, 5), {"groups": 16, "padding": 2}),
    "dilated": Case((2, 8, 9, 9), 4, (3, 3), {"dilation": (2, 1), "padding": (2, 0)}),
    "pointwise": Case((3, 24, 5, 4), 6, (1, 1)),
    "ragged": Case((3, 5, 7, 3), 4, (3, 3), {"padding": 1}),  # 105 values a sample, no multiple of a block
    "smaller than a block": Case((4, 5, 1, 1), 3, (1, 1)),
    "1d": Case((3, 12, 20), 5, (3,), {"padding": 1}),
    "3d": Case((2, 8, 3, 4, 5), 6, (2, 3, 3), {"padding": (0, 1, 1)}),
}


def laid_out(x: Tensor, last: bool) -> Tensor:
    """Return ``x`` with its channels last in memory, or with the innermost dimension last."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x.contiguous()


def in_memory(x: Tensor, last: bool) -> Tensor:
    """Return the values of each sample in the order of memory: ``[N, P]``."""
    return (x.movedim(1, -1) if last else x).reshape(x.shape[0], -1)


def pruned(x: Tensor, last: bool, block_size: int = BLOCK, sparsity: float = SPARSITY) -> Tensor:
    """Return ``x`` with the dropped blocks, cut from its samples as they lie in memory, set to zero."""
    x = x.detach().movedim(1, -1) if last else x.detach()
    kept = oracle.pruned(in_memory(x, False).unsqueeze(1), block_size, sparsity).reshape(x.shape)
    return kept.movedim(-1, 1) if last else kept


def weight_gradient(case: Case, x: Tensor, weight: Tensor, grad_y: Tensor) -> Tensor:
    """Return the weight gradient of torch's own convolution of ``x``."""
    leaf = weight.detach().to(x.dtype).requires_grad_()
    (found,) = torch.autograd.grad(case.convolve(x.detach(), leaf, None), leaf, grad_y.to(x.dtype))
    return found
