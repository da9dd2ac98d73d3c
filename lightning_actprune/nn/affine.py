"""Layers that scale, and perhaps shift, each feature: ``y = x * weight + bias``.

Their input is needed for the gradient of the weight alone, as that of a linear layer: few bits of it leave the input
gradient exact (maths: ``ops.normalize``, without normalisation). ``Affine`` is a plain layer of that kind for models of
one's own, which ``convert`` knows; layers of timm that do the same are known too.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from lightning_actprune.arguments import OtherOperator
from lightning_actprune.nn.few_bit import FewBitLayer
from lightning_actprune.ops.norm import NormSetting, few_bit_norm


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


class FewBitScaling(FewBitLayer):
    """Mixin of layers that scale each feature.

    Raises:
        TypeError: If the input is a DTensor, or in fp64.
        ValueError: If the input has more than 2^31 - 1 blocks.
    """

    operator: ClassVar[OtherOperator] = "affine"

    def keeps(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether ``x`` is kept for the gradient of ``weight``."""
        return torch.is_grad_enabled() and weight.requires_grad and self.takes(x, weight, (weight.numel(),))

    def scaled(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x * weight + bias``, of parameters that have one value per feature, in the common type of all."""
        settings = self._few_bit
        setting = NormSetting(False, False, 0.0, settings.block_size, settings.value_format, normed=False)
        dtype = torch.promote_types(x.dtype, weight.dtype)
        return few_bit_norm(x, weight, bias, (weight.numel(),), setting, dtype)


class FewBitAffine(FewBitScaling, Affine):
    """``Affine`` that keeps its input in few bits; made by ``convert``."""

    dense_class = Affine

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input * weight + bias``: ``[..., features]``."""
        if not self.keeps(input, self.weight):
            return super().forward(input)
        return self.scaled(input, self.weight, self.bias)


class FewBitTimmAffine(FewBitScaling):
    """Mixin of timm's ``Affine``, whose parameters are ``[1, 1, features]``."""

    alpha: nn.Parameter
    beta: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x * alpha + beta``: ``[B, T, features]``."""
        if x.dim() != 3 or not self.keeps(x, self.alpha):
            return cast(Tensor, super().forward(x))  # type: ignore[misc]
        return self.scaled(x, self.alpha, self.beta)


class FewBitTimmLayerScale(FewBitScaling):
    """Mixin of timm's ``LayerScale``."""

    gamma: nn.Parameter
    inplace: bool

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x * gamma``: ``[..., features]``."""
        if self.inplace or not self.keeps(x, self.gamma):
            return cast(Tensor, super().forward(x))  # type: ignore[misc]
        return self.scaled(x, self.gamma, None)


class FewBitTimmResBlock(FewBitScaling):
    """Mixin of timm's ``ResBlock`` (ResMLP), which scales by parameters of its own what its branches return."""

    norm1: nn.Module
    norm2: nn.Module
    linear_tokens: nn.Module
    mlp_channels: nn.Module
    drop_path: nn.Module
    ls1: nn.Parameter
    ls2: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` and its scaled branches: ``[B, T, features]``."""
        y = self.linear_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.drop_path(self._scaled_or_dense(y, self.ls1))
        y = self.mlp_channels(self.norm2(x))
        return cast(Tensor, x + self.drop_path(self._scaled_or_dense(y, self.ls2)))

    def _scaled_or_dense(self, y: Tensor, factors: Tensor) -> Tensor:
        return self.scaled(y, factors, None) if self.keeps(y, factors) else factors * y
