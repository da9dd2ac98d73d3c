"""Layers that are pruned, or wait for a schedule to prune them."""

from __future__ import annotations

from torch import nn

from lightning_actprune.convert import convert
from lightning_actprune.operators.base import CompressedLayer
from lightning_actprune.report import ConversionReport


def converted(model: nn.Module, sparsity: float = 0.6, **options: object) -> ConversionReport:
    """Convert linear layers, which at a sparsity of 0 wait for a schedule."""
    report = convert(model, sparsity=sparsity or 0.5, **options)
    for layer in model.modules():
        if isinstance(layer, CompressedLayer) and "_state" in vars(layer):
            layer.sparsity = sparsity
    return report
