"""The kinds of layers that can be pruned: how each stores its weight, and what it becomes when it is converted.

========================================  ==================  ========================================
dense class                               weight              pruned class
========================================  ==================  ========================================
``nn.Linear``                             ``[OUT, IN]``       ``ActivationPrunedLinear``
``nn.MultiheadAttention``                 ``[OUT, IN]`` (*)   ``ActivationPrunedMultiheadAttention``
its output projection                     ``[OUT, IN]``       ``ActivationPrunedOutProjection``
``transformers.pytorch_utils.Conv1D``     ``[IN, OUT]``       ``ActivationPrunedConv1D``
``nn.Conv1d``, ``2d``, ``3d``             that of torch       ``ActivationPrunedConv1d``, ``2d``, ``3d``
``Affine`` of this package                ``[L]``             ``ActivationPrunedAffine``
timm's ``Affine`` and ``LayerScale``      its factors         derived from it (``nn.foreign``)
========================================  ==================  ========================================

(*) one for query, key and value together, or three. An attention module stands for its in-projection, which has no
module of its own. Convolutions and affine layers are no linear layers: they are converted on request, and followed
while they are pruned.

Only exact types are converted: a subclass may do anything in its forward. ``transformers`` is no dependency and is
never imported here: a model can only hold a ``Conv1D`` if somebody else has imported it.
"""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_actprune.arguments import PrunedOperator
from lightning_actprune.nn.affine import (
    ActivationPrunedAffine,
    Affine,
    PrunedAffine,
    PrunedTimmAffine,
    PrunedTimmLayerScale,
)
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
from lightning_actprune.nn.foreign import ForeignClasses
from lightning_actprune.nn.linear import ActivationPrunedLinear
from lightning_actprune.nn.settings import PrunedLayer
from lightning_actprune.ops.affine import input_rows

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
_AFFINE_CLASSES: dict[type[nn.Module], type[PrunedAffine]] = {Affine: ActivationPrunedAffine}
_FOREIGN_AFFINE: ForeignClasses[PrunedAffine] = ForeignClasses(
    __name__,
    "Pruned",
    "keeps only the largest blocks of its input",
    {
        ("timm.layers.layer_scale", "LayerScale"): PrunedTimmLayerScale,
        ("timm.models.mlp_mixer", "Affine"): PrunedTimmAffine,
    },
)


def kind_of(module: nn.Module) -> str | None:
    """Return what makes ``module`` a layer that can be pruned, a class or a kind of layer, ``None`` if nothing does."""
    if isinstance(module, nn.Linear):
        return "nn.Linear"
    if isinstance(module, nn.MultiheadAttention):
        return "nn.MultiheadAttention"
    if is_convolution(module):
        return "torch's convolution"
    if is_affine(module):
        return "an affine layer"
    return "Conv1D" if isinstance(module, _conv1d()) else None


def operator_kind(layer: Layer) -> PrunedOperator:
    """Return what ``layer`` is."""
    if is_convolution(layer):
        return "convolution"
    affine = _affine_class(layer)
    if affine is None:
        return "linear"
    return "affine" if affine.shifts(layer) else "scale"


def is_convolution(module: nn.Module) -> bool:
    """Return whether ``module`` is a convolution of any kind, transposed ones included."""
    return isinstance(module, _ConvNd)


def is_affine(module: nn.Module) -> bool:
    """Return whether ``module`` scales each feature, or is of a class derived from one that does."""
    return _affine_class(module) is not None


def pruned_class(cls: type[nn.Module]) -> type[PrunedLayer] | None:
    """Return what a layer of exactly this class becomes, ``None`` if its forward is not known."""
    if cls in _conv1d():
        from lightning_actprune.nn.conv1d import ActivationPrunedConv1D  # imports transformers

        return ActivationPrunedConv1D
    return _PRUNED_CLASSES.get(cls) or _pruned_affine(cls)


def weights_of(layer: Layer) -> tuple[Tensor, ...]:
    """Return the weights of a linear layer as ``[OUT, IN]``: one, or those of query, key and value by themselves.

    Of a convolution or an affine layer, its weight as it is.
    """
    if isinstance(layer, nn.MultiheadAttention):
        return projection_weights(layer)
    affine = _affine_class(layer)
    if affine is not None:
        return (getattr(layer, affine.factors_name),)
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return (weight.t() if isinstance(layer, _conv1d()) else weight,)


def weight_of_call(module: nn.Module) -> Tensor | None:
    """Return the parameter by which a call of ``module`` multiplies its input, ``None`` if it is no linear layer.

    ``None`` for attention too, whose projections are no module calls. A convolution or an affine layer counts as long
    as it is pruned.
    """
    if isinstance(module, PrunedAffine):
        return module.factors
    if not isinstance(module, (nn.Linear, PrunedConvolution, *_conv1d())):
        return None
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight


def as_cut(layer: Layer, x: Tensor) -> Tensor:
    """Return an input of ``layer`` with the dimensions from which it cuts blocks, as it lies in memory for that.

    A convolution has rows of its own; of an affine layer, they always run along the features.
    """
    if x.layout != torch.strided:
        return x
    if isinstance(layer, PrunedConvolution):
        return layer.rows(x)
    return input_rows(x) if isinstance(layer, PrunedAffine) and x.dim() else x


def _conv1d() -> tuple[type[nn.Module], ...]:
    """Return transformers' ``Conv1D``, or nothing while nobody has imported it."""
    found = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return () if found is None else (found,)


def _affine_class(layer: nn.Module) -> type[PrunedAffine] | None:
    """Return what ``layer`` is, or would become if it were of the class that makes it an affine layer."""
    if isinstance(layer, PrunedAffine):
        return type(layer)
    return next(filter(None, map(_pruned_affine, type(layer).__mro__)), None)


def _pruned_affine(cls: type[nn.Module]) -> type[PrunedAffine] | None:
    return _AFFINE_CLASSES.get(cls) or _FOREIGN_AFFINE.derived(cls)


def __getattr__(name: str) -> Any:
    """Return the pruned class of that name: of another package's class in a model that is unpickled."""
    found = _FOREIGN_AFFINE.named(name)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
