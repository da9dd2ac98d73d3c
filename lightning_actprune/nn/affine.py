"""Layers that scale, and perhaps shift, each feature: ``y = x * weight + bias``.

Their input is needed for the gradient of the weight alone, as that of a linear layer: it is pruned as that is, and all
other gradients stay exact (maths: ``ops.affine``; in few bits without dropped blocks ``ops.normalize``, without
normalisation). ``Affine`` is a plain layer of that kind for models of one's own, which ``convert`` knows; layers of
timm that do the same are known too.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_actprune.arguments import BlockSelection, OtherOperator, Scope, ValueFormatName, check_sparsity
from lightning_actprune.functional import check_input, prunes
from lightning_actprune.nn.few_bit import FewBitLayer, FewBitSettings, hooked
from lightning_actprune.nn.settings import PrunedLayer, PruningSettings
from lightning_actprune.ops.affine import pruned_affine
from lightning_actprune.ops.autocast import autocast_dtype
from lightning_actprune.ops.norm import NormSetting, few_bit_norm
from lightning_actprune.ops.scaled_sum import scaled_sum
from lightning_actprune.ops.setting import BlockSetting

_WIDENS = [
    device
    for device in ("cpu", "cuda")
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::addcmul", f"Autocast{device.upper()}")
]
"""Where autocast casts all that ``addcmul`` gets to the widest type of it, and keeps the copies; not of a product."""


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


class PrunedAffine(PrunedLayer):
    """Mixin of layers that scale each feature, with a dense, exact forward and a block-pruned saved input.

    At ``sparsity=0`` all of the input is kept in few bits, by the pass that computes the output. There with values
    stored as they are, in no-grad mode, with frozen factors, or of an input that is no floating-point tensor of as many
    features, they are the dense layers in every respect.

    Raises:
        TypeError: If the input is a DTensor, or in fp64 with values in few bits.
        ValueError: If the input has more than 2^31 - 1 blocks to keep.
    """

    factors_name: ClassVar[str] = "weight"
    """Attribute that holds the factors."""

    @property
    def factors(self) -> Tensor:
        """The parameter by which features are multiplied."""
        return cast(Tensor, getattr(self, self.factors_name))

    @staticmethod
    def shifts(layer: Any) -> bool:
        """Return whether ``layer``, dense or pruned, also adds a learned number."""
        return True

    def dense_dtype(self, x: Tensor) -> torch.dtype:
        """Return the type in which the dense layer keeps ``x``: not its own where autocast widens what is added to."""
        if not self.shifts(self) or autocast_dtype(x) is None or x.device.type not in _WIDENS:
            return x.dtype
        return torch.promote_types(x.dtype, self.factors.dtype)

    def packs_input(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether ``x`` is kept for the gradient of ``weight``, and packed."""
        settings = self._pruning
        if not prunes(weight, settings.parts.size(0), settings.blocks):
            return False
        if isinstance(x, DTensor) or isinstance(weight, DTensor):
            check_input(x, weight)  # raises
        if x.device != weight.device:
            return False  # torch says so
        return x.is_floating_point() and x.layout == torch.strided and x.shape[-1:] == (weight.numel(),)

    def scaled(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x * weight + bias`` of an ``x`` that is packed; parameters have one value per feature."""
        settings = self._pruning
        parts, blocks = settings.parts.size(0), settings.blocks
        if parts != 0:
            return pruned_affine(x, weight, bias, parts, blocks)
        setting = NormSetting(False, False, 0.0, blocks.block_size, blocks.value_format, normed=False)
        dtype = torch.promote_types(x.dtype, weight.dtype)
        dtype = dtype if bias is None else torch.promote_types(dtype, bias.dtype)
        return few_bit_norm(x, weight, bias, (weight.numel(),), setting, dtype)

    def extra_repr(self) -> str:
        """Show what the dense module prints, and the settings."""
        shown: str = super().extra_repr()  # type: ignore[misc]
        return ", ".join(filter(None, (shown, self.describe_settings())))


class ActivationPrunedAffine(PrunedAffine, Affine):
    """``Affine`` that keeps only the largest blocks of its input; see ``PrunedAffine``.

    Args:
        features: Size of each input row.
        bias: Whether to add a learned number.
        sparsity: Fraction of blocks dropped, in [0, 1). May be assigned between steps.
        block_size: Consecutive values per block, positive; a block larger than a row is cut to the row.
        scope: ``"sample"``: all blocks of a sample compete; ``"token"``: those of a row.
        value_format: How kept values are stored: ``"same"``, or in few bits: ``"int8"``, ``"int4"``, ``"int3"``,
            ``"int2"``, ``"fp8"`` (see ``functional.linear``).
        block_selection: Which blocks are kept: ``"largest"``, ``"swap"`` or ``"unbiased"`` (see ``functional.linear``).
        options: ``scale``, ``device`` and ``dtype`` of ``Affine``.

    Raises:
        TypeError: If a setting has the wrong type.
        ValueError: If a setting is out of range.

    Example:
        >>> layer = ActivationPrunedAffine(64, sparsity=0.5, block_size=16)
        >>> layer(torch.ones(8, 10, 64)).shape
        torch.Size([8, 10, 64])
    """

    dense_class = Affine

    def __init__(
        self,
        features: int,
        bias: bool = True,
        *,
        sparsity: float,
        block_size: int = 32,
        scope: Scope = "sample",
        value_format: ValueFormatName = "same",
        block_selection: BlockSelection = "largest",
        **options: Any,
    ) -> None:
        super().__init__(features, bias, **options)
        blocks = BlockSetting.checked(block_size, scope, value_format, block_selection)
        self._pruning = PruningSettings(check_sparsity(sparsity), blocks)

    @staticmethod
    def shifts(layer: Any) -> bool:
        """Return whether ``layer``, dense or pruned, also adds a learned number."""
        return layer.bias is not None

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input * weight + bias``: ``[..., features]``."""
        if not self.packs_input(input, self.weight):
            return super().forward(input)
        return self.scaled(input, self.weight, self.bias)


class PrunedTimmAffine(PrunedAffine):
    """Mixin of timm's ``Affine``, whose parameters are ``[1, 1, features]``."""

    factors_name = "alpha"
    alpha: nn.Parameter
    beta: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x * alpha + beta``: ``[B, T, features]``."""
        if x.dim() < 3 or not self.packs_input(x, self.alpha):
            return cast(Tensor, super().forward(x))  # type: ignore[misc]
        return self.scaled(x, self.alpha, self.beta)


class PrunedTimmLayerScale(PrunedAffine):
    """Mixin of timm's ``LayerScale``."""

    factors_name = "gamma"
    gamma: nn.Parameter
    inplace: bool

    @staticmethod
    def shifts(layer: Any) -> bool:
        """Return whether ``layer``, dense or pruned, also adds a learned number."""
        return False

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x * gamma``: ``[..., features]``."""
        if self.inplace or not self.packs_input(x, self.gamma):
            return cast(Tensor, super().forward(x))  # type: ignore[misc]
        return self.scaled(x, self.gamma, None)


def affine_refusal(layer: nn.Module) -> str | None:
    """Return why an affine layer, of a class that is known, cannot be pruned all the same."""
    return "scales in place, of which torch keeps a copy" if getattr(layer, "inplace", False) else None


class FewBitScaling(FewBitLayer):
    """Mixin of layers that scale each feature.

    Raises:
        TypeError: If the input is a DTensor, or in fp64.
        ValueError: If the input has more than 2^31 - 1 blocks.
    """

    operator: ClassVar[OtherOperator] = "scale"

    def keeps(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether ``x`` is kept for the gradient of ``weight``."""
        return torch.is_grad_enabled() and weight.requires_grad and self.takes(x, weight, (weight.numel(),))

    def scaled(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x * weight + bias``, of parameters that have one value per feature, in the common type of all."""
        dtype = torch.promote_types(x.dtype, weight.dtype)
        return few_bit_norm(x, weight, bias, (weight.numel(),), _scaling(self._few_bit), dtype)


class FewBitTimmResBlock(FewBitScaling):
    """Mixin of timm's ``ResBlock`` (ResMLP), which scales by parameters of its own what its branches return.

    Scale and sum are one pass (``ops.scaled_sum``) unless paths are dropped between them.

    It drops no blocks of that, whatever the sparsity: of two inputs in one module neither has settings of its own.
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
    return type(module) is nn.Identity and not hooked(module)
