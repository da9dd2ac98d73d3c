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
from lightning_actprune.nn.few_bit import FewBitLayer, FewBitSettings
from lightning_actprune.ops.norm import NormSetting, few_bit_norm
from lightning_actprune.ops.scaled_sum import scaled_sum


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
        dtype = torch.promote_types(x.dtype, weight.dtype)
        return few_bit_norm(x, weight, bias, (weight.numel(),), _scaling(self._few_bit), dtype)


class FewBitAffine(FewBitScaling, Affine):
    """``Affine`` that keeps its input in few bits; made by ``convert``."""

    dense_class = Affine

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input * weight + bias``: ``[..., features]``."""
        weight = self.weight  # asked for once: a module's parameter takes a while to find
        if not self.keeps(input, weight):
            return super().forward(input)
        return self.scaled(input, weight, self.bias)


class FewBitTimmAffine(FewBitScaling):
    """Mixin of timm's ``Affine``, whose parameters are ``[1, 1, features]``."""

    alpha: nn.Parameter
    beta: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x * alpha + beta``: ``[B, T, features]``."""
        alpha = self.alpha
        if x.dim() != 3 or not self.keeps(x, alpha):
            return cast(Tensor, super().forward(x))  # type: ignore[misc]
        return self.scaled(x, alpha, self.beta)


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
    """Mixin of timm's ``ResBlock`` (ResMLP), which scales by parameters of its own what its branches return.

    Scale and sum are one pass (``ops.scaled_sum``) unless paths are dropped between them.
    """

    norm1: nn.Module
    norm2: nn.Module
    linear_tokens: nn.Module
    mlp_channels: nn.Module
    drop_path: nn.Module
    ls1: nn.Parameter
    ls2: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` and its scaled branches: ``[B, T, features]``."""
        x = self._sum(x, self.linear_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2), self.ls1)
        return self._sum(x, self.mlp_channels(self.norm2(x)), self.ls2)

    def _sum(self, x: Tensor, branch: Tensor, factors: Tensor) -> Tensor:
        """Return ``x + drop_path(factors * branch)``, in one pass if no path is dropped."""
        if not self.keeps(branch, factors):
            return cast(Tensor, x + self.drop_path(factors * branch))
        wide = x.dtype == torch.float64 or not x.is_floating_point()
        if wide or x.shape != branch.shape or not _does_nothing(self.drop_path):
            return cast(Tensor, x + self.drop_path(self.scaled(branch, factors, None)))
        dtype = torch.promote_types(torch.promote_types(branch.dtype, factors.dtype), x.dtype)
        return scaled_sum(branch, factors, x, _scaling(self._few_bit), dtype)


def _scaling(settings: FewBitSettings) -> NormSetting:
    return NormSetting(False, False, 0.0, settings.block_size, settings.value_format, normed=False)


def _does_nothing(module: nn.Module) -> bool:
    """Return whether calling ``module`` returns what it is given, and nobody looks on."""
    if type(module) is not nn.Identity or "forward" in module.__dict__:
        return False
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return not any(hooks)
