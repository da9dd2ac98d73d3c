"""Independent oracle in fp64 and plain Python: what the design says, written without the package's own helpers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor


def kept_blocks(x: Tensor, block_size: int, sparsity: float) -> list[list[tuple[int, int]]]:
    """Return, per sample of ``x [S, T, L]``, the (row, column block) pairs that are kept, in order of importance."""
    chosen = []
    for sample in x.double().cpu():
        blocks = []
        for t, row in enumerate(sample):
            for j, start in enumerate(range(0, len(row), block_size)):
                block = row[start : start + block_size]
                finite = bool(torch.isfinite(block).all())
                blocks.append((math.inf if not finite else float(block.square().sum()), t, j))
        keep = len(blocks) - math.floor(len(blocks) * Fraction(f"{sparsity:.9f}"))
        blocks.sort(key=lambda entry: -entry[0])  # stable: ties keep their order, lowest index first
        chosen.append([(t, j) for _, t, j in blocks[:keep]])
    return chosen


def pruned(x: Tensor, block_size: int, sparsity: float) -> Tensor:
    """Return ``x [S, T, L]`` with the dropped blocks set to zero."""
    out = torch.zeros_like(x)
    for i, sample in enumerate(kept_blocks(x, block_size, sparsity)):
        for t, j in sample:
            part = slice(j * block_size, (j + 1) * block_size)
            out[i, t, part] = x[i, t, part]
    return out


def as_samples(x: Tensor, scope: str = "sample") -> Tensor:
    """Return a layer input as ``[S, T, L]`` with samples as the design defines them (contiguous layouts only)."""
    if x.dim() <= 2 or scope == "token":
        return x.reshape(-1, 1, x.shape[-1])
    return x.reshape(x.shape[0], -1, x.shape[-1])


def integers(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """Return small integers: sums of squares are exact in every dtype, and ties are frequent."""
    return torch.randint(-4, 5, shape).to(dtype).to(device)


def half_a_step(blocks: Tensor, bits: int) -> Tensor:
    """Return how far values of ``blocks [..., b]`` may be off: half a scale, which is rounded up by less than 1/8."""
    low, high = (limit(blocks.double(), -1, keepdim=True) for limit in (torch.amin, torch.amax))
    need = torch.maximum((high - low) * 32 / 31, low.abs() * 32 / 63) / (2**bits - 1) * (1 + 2**-19)
    return need * 9 / 8 / 2


def largest_error(factor: Tensor, block_size: int, bits: int) -> Tensor:
    """Return by what each value that is read of ``factor [..., L]`` (fp64) may be off: half a step of its block.

    The maths of fp32 adds a few units in the last place.
    """
    length = factor.shape[-1]
    blocks = F.pad(factor, (0, -length % block_size)).unflatten(-1, (-1, block_size))
    rounding = 2**-20 * blocks.abs().amax(-1, keepdim=True) + 1e-12
    bound = half_a_step(blocks, bits) * (1 + 8e-6) + rounding
    return bound.expand_as(blocks).flatten(-2)[..., :length]


def mean_relative_error(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the root of the mean over all values of squared relative errors, at most one, of pairs with the truth."""
    found = [(expected.numel(), min(1.0, relative_error(actual, expected)) ** 2) for actual, expected in pairs]
    return math.sqrt(sum(count * square for count, square in found) / sum(count for count, _ in found))


def relative_error(actual: Tensor, expected: Tensor, least: float = 1e-300) -> float:
    """Return ``|actual - expected| / |expected|`` in fp64, at least over ``least``; NaN if anything is not finite."""
    pair = (torch.view_as_real(t) if t.is_complex() else t for t in (actual.detach(), expected.detach()))
    actual, expected = (t.double().cpu() for t in pair)
    return float((actual - expected).norm() / expected.norm().clamp(min=least))
