"""The kinds of layers that can be pruned: how each stores its weight, and what it becomes when it is converted.

========================================  ==================  ========================================
dense class                               weight              pruned class
========================================  ==================  ========================================
``nn.Linear``                             ``[OUT, IN]``       ``ActivationPrunedLinear``
``nn.MultiheadAttention``                 ``[OUT, IN]`` (*)   ``ActivationPrunedMultiheadAttention``
its output projection                     ``[OUT, IN]``       ``ActivationPrunedOutProjection``
``transformers.pytorch_utils.Conv1D``     ``[IN, OUT]``       ``ActivationPrunedConv1D``
``nn.Conv1d``, ``2d``, ``3d``             that of torch       ``ActivationPrunedConv1d``, ``2d``, ``3d``
========================================  ==================  ========================================

(*) one for query, key and value together, or three. An attention module stands for its in-projection, which has no
module of its own. Convolutions are no linear layers: they are converted on request, and followed while they are pruned.

Only exact types are converted: a subclass may do anything in its forward. ``transformers`` is no dependency and is
never imported here: a model can only hold a ``Conv1D`` if somebody else has imported it.
"""

from __future__ import annotations

import sys
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_actprune.nn.attention import (
    ActivationPrunedMultiheadAttention,
    ActivationPrunedOutProjection,
    RoutedMultiheadAttention,
    projection_weights,
)
from lightning_actprune.nn.convolutions import (
    ActivationPrunedConv1d,
    ActivationPrunedConv2d,
    ActivationPrunedConv3d,
    PrunedConvolution,
)
from lightning_actprune.nn.linear import ActivationPrunedLinear
from lightning_actprune.nn.settings import PrunedLayer

Layer: TypeAlias = nn.Module
"""A module that ``kind_of`` knows."""

_PRUNED_CLASSES: dict[type[nn.Module], type[PrunedLayer]] = {
    nn.Linear: ActivationPrunedLinear,
    NonDynamicallyQuantizableLinear: ActivationPrunedOutProjection,
    nn.MultiheadAttention: ActivationPrunedMultiheadAttention,
    RoutedMultiheadAttention: ActivationPrunedMultiheadAttention,
    nn.Conv1d: ActivationPrunedConv1d,
    nn.Conv2d: ActivationPrunedConv2d,
    nn.Conv3d: ActivationPrunedConv3d,
}


def kind_of(module: nn.Module) -> str | None:
    """Return the name of the class that makes ``module`` a linear layer or a convolution, ``None`` if it is none."""
    if isinstance(module, nn.Linear):
        return "nn.Linear"
    if isinstance(module, nn.MultiheadAttention):
        return "nn.MultiheadAttention"
    if is_convolution(module):
        return "torch's convolution"
    return "Conv1D" if isinstance(module, _conv1d()) else None


def is_convolution(module: nn.Module) -> bool:
    """Return whether ``module`` is a convolution of any kind, transposed ones included."""
    return isinstance(module, _ConvNd)


def pruned_class(cls: type[nn.Module]) -> type[PrunedLayer] | None:
    """Return what a layer of exactly this class becomes, ``None`` if its forward is not known."""
    if cls in _conv1d():
        from lightning_actprune.nn.conv1d import ActivationPrunedConv1D  # imports transformers

        return ActivationPrunedConv1D
    return _PRUNED_CLASSES.get(cls)


def weights_of(layer: Layer) -> tuple[Tensor, ...]:
    """Return the weights of a linear layer as ``[OUT, IN]``: one, or those of query, key and value by themselves.

    Of a convolution, its weight as it is.
    """
    if isinstance(layer, nn.MultiheadAttention):
        return projection_weights(layer)
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return (weight.t() if isinstance(layer, _conv1d()) else weight,)


def weight_of_call(module: nn.Module) -> Tensor | None:
    """Return the parameter by which a call of ``module`` multiplies its input, ``None`` if it is no linear layer.

    ``None`` for attention too, whose projections are no module calls. A convolution counts as long as it is pruned.
    """
    if not isinstance(module, (nn.Linear, PrunedConvolution, *_conv1d())):
        return None
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight


def as_cut(layer: Layer, x: Tensor) -> Tensor:
    """Return an input of ``layer`` with the dimensions from which it cuts blocks: a convolution has rows of its own."""
    if isinstance(layer, PrunedConvolution) and x.layout == torch.strided:
        return layer.rows(x)
    return x


def _conv1d() -> tuple[type[nn.Module], ...]:
    """Return transformers' ``Conv1D``, or nothing while nobody has imported it."""
    found = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return () if found is None else (found,)
