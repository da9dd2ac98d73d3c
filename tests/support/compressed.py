"""Converted layers, the layouts of their inputs, and what is left of an input that is compressed."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_actprune.codec import packed
from lightning_actprune.codec.blocks import ALL_BLOCKS
from lightning_actprune.config import KEEP_FIELDS, Keep
from lightning_actprune.convert import convert
from lightning_actprune.operators.base import CompressedLayer
from lightning_actprune.report import ConversionReport


def whole(keep: Keep) -> Keep:
    return replace(keep, explicit=frozenset(KEEP_FIELDS))  # inherits nothing


def compressed(module: nn.Module, operator: str = "linear", **settings: Any) -> nn.Module:
    """Return a copy of ``module`` whose layers of that operator are compressed as ``Keep(**settings)`` says."""
    model = copy.deepcopy(module)
    convert(model, rules={f"type:{operator}": whole(Keep(**settings)), "*": None})
    return model


def converted(model: nn.Module, sparsity: float = 0.6, **options: object) -> ConversionReport:
    """Convert linear layers, which at a sparsity of 0 wait for a schedule."""
    report = convert(model, sparsity=sparsity or 0.5, **options)
    for layer in model.modules():
        if isinstance(layer, CompressedLayer) and "_state" in vars(layer):
            layer.sparsity = sparsity
    return report


def laid_out(x: Tensor, last: bool) -> Tensor:
    """Return ``x`` with its channels last in memory, or with the innermost dimension last."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x.contiguous()


def as_kept(rows: Tensor, block_size: int, sparsity: float, bits: int = 0, selection: str = "largest") -> Tensor:
    """Return ``rows [S, T, L]`` packed and unpacked, where all blocks of a sample compete."""
    samples, count, length = rows.shape
    blocks = count * math.ceil(length / block_size)
    keep = ALL_BLOCKS if bits and not sparsity else blocks - math.floor(blocks * sparsity + 1e-9)
    stored = packed.pack(rows.contiguous(), block_size, keep, bits, selection)
    return packed.unpack(*stored, samples * count, length, block_size, bits, rows.dtype).view(rows.shape)
