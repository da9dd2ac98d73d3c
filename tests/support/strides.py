"""Tensors whose strides leave open how they lie."""

from __future__ import annotations

import random

from torch import Tensor


def odd_strides(draw: random.Random) -> tuple[list[int], list[int]]:
    """Return a small shape and its strides, which have gaps, and any length where the size is 1."""
    dims = draw.choice([3, 4, 5])
    shape = [draw.choice([1, 2, 3]) for _ in range(dims)]
    strides, step = [0] * dims, 1
    for dim in draw.choice([[1, *range(dims - 1, 1, -1), 0], draw.sample(range(dims), dims)]):
        strides[dim] = draw.choice([0, 1, 2, 7]) if shape[dim] == 1 and draw.random() < 0.5 else step
        step = step * shape[dim] + draw.choice([0, 0, 0, 1])
    return shape, strides


def steps(x: Tensor) -> list[int]:
    """Return the strides of the dimensions that have more than one index."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
