"""Layers that scale, and perhaps shift, each feature: ``y = x * weight + bias``.

Their input is needed for the gradient of the weight alone, as that of a linear layer: all of it is kept quantized, and
all other gradients stay exact (maths: ``operators.norm``, without normalisation). ``Affine`` is a plain layer of that
kind for models of one's own, which ``convert`` knows; layers of timm that do the same are known too.

timm's ``ResBlock`` (ResMLP) scales by parameters of its own what its branches return, and adds that to its input. Scale
and sum are one pass unless paths are dropped between them.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from lightning_actprune.codec.autograd import may_compress
from lightning_actprune.config import Operator
from lightning_actprune.operators.base import CompressedLayer, Traced, hooked
from lightning_actprune.operators.norm import scaled


class Affine(nn.Module):
    """Scale each feature by a learned factor and add a learned number: the "affine" layer of ResMLP, or a layer scale.

    Args:
        features: Size of each input row.
        bias: Whether to add a learned number.
        scale: First value of all factors.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Example:
        >>> Affine(4, bias=False, scale=0.5)(torch.ones(2, 4)).sum().item()
        4.0
    """

    def __init__(
        self, features: int, bias: bool = True, *, scale: float = 1.0, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        made = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.full((features,), scale, **made))
        self.bias = nn.Parameter(torch.zeros(features, **made)) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input * weight + bias``: ``[..., features]``."""
        if self.bias is None:
            return input * self.weight
        return torch.addcmul(self.bias, self.weight, input)

    def extra_repr(self) -> str:
        """Show the sizes in the printed module."""
        return f"{self.weight.shape[0]}, bias={self.bias is not None}"


class CompressedScale(CompressedLayer):
    """Mixin of layers that scale each feature and keep their input quantized.

    In no-grad mode, with frozen factors, or of an input that is no floating-point tensor of as many features, they are
    the dense layers in every respect.

    Raises:
        TypeError: If the input is a DTensor, or in fp64.
        ValueError: If the input has more than 2^31 - 1 blocks.
    """

    operator: ClassVar[Operator] = "scale"

    def keeps(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether ``x`` is kept for the gradient of ``weight``."""
        return weight.requires_grad and may_compress(x) and self.takes(x, weight, (weight.numel(),))

    def scaled(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
        """Return ``x * weight + bias + residual``, of parameters that have one value per feature."""
        return scaled(x, weight, bias, residual, self.block_size, self.bits)


class CompressedAffine(CompressedScale, Affine):
    """``Affine`` that keeps its input quantized; see ``CompressedScale``."""

    dense_class = Affine

    @classmethod
    def operator_of(cls, layer: Any) -> Operator:
        """Return what ``layer``, dense or compressed, is: it may only scale."""
        return "scale" if layer.bias is None else "affine"

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input * weight + bias``: ``[..., features]``."""
        weight = self.weight
        return self.scaled(input, weight, self.bias) if self.keeps(input, weight) else super().forward(input)


class CompressedTimmAffine(CompressedScale):
    """Mixin of timm's ``Affine``, whose parameters are ``[1, 1, features]``."""

    operator: ClassVar[Operator] = "affine"
    alpha: nn.Parameter
    beta: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x * alpha + beta``: ``[B, T, features]``."""
        if x.dim() < 3 or not self.keeps(x, self.alpha):
            return cast(Tensor, super().forward(x))  # type: ignore[misc]
        return self.scaled(x, self.alpha, self.beta)


class CompressedTimmLayerScale(CompressedScale):
    """Mixin of timm's ``LayerScale``."""

    gamma: nn.Parameter
    inplace: bool

    @classmethod
    def refusal(cls, layer: Any) -> str | None:
        """Return why ``layer`` cannot be compressed all the same."""
        return "scales in place, of which torch keeps a copy" if layer.inplace else None

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x * gamma``: ``[..., features]``."""
        if self.inplace or not self.keeps(x, self.gamma):
            return cast(Tensor, super().forward(x))  # type: ignore[misc]
        return self.scaled(x, self.gamma, None)


class CompressedTimmResBlock(CompressedScale):
    """Mixin of timm's ``ResBlock``."""

    norm1: nn.Module
    norm2: nn.Module
    linear_tokens: nn.Module
    mlp_channels: nn.Module
    drop_path: nn.Module
    ls1: nn.Parameter
    ls2: nn.Parameter

    @property
    def traced(self) -> Traced:
        """What a compiler sees: its branches are marked by the layers in it."""
        return "dense"

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` and its scaled branches: ``[B, T, features]``."""
        x = self._sum(x, self.linear_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2), self.ls1)
        return self._sum(x, self.mlp_channels(self.norm2(x)), self.ls2)

    def _sum(self, x: Tensor, branch: Tensor, factors: Tensor) -> Tensor:
        """Return ``x + drop_path(factors * branch)``, in one pass if no path is dropped."""
        if not self.keeps(branch, factors):
            return cast(Tensor, x + self.drop_path(factors * branch))
        wide = x.dtype == torch.float64 or not x.is_floating_point()
        if wide or x.shape != branch.shape or x.device != branch.device or not _does_nothing(self.drop_path):
            return cast(Tensor, x + self.drop_path(self.scaled(branch, factors, None)))
        return self.scaled(branch, factors, None, x)


def _does_nothing(module: nn.Module) -> bool:
    """Return whether calling ``module`` returns what it is given, and nobody looks on."""
    return type(module) is nn.Identity and not hooked(module)


CLASSES: dict[type[nn.Module], type[CompressedLayer]] = {Affine: CompressedAffine}
"""What layers of this package become."""

FOREIGN: dict[tuple[str, str], type[CompressedLayer]] = {
    ("timm.models.mlp_mixer", "Affine"): CompressedTimmAffine,
    ("timm.layers.layer_scale", "LayerScale"): CompressedTimmLayerScale,
    ("timm.models.mlp_mixer", "ResBlock"): CompressedTimmResBlock,
}
"""Of each class of other packages the mixin that replaces its forward; it comes first among the bases."""
