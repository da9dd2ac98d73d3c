"""Normalisation layers that keep their normalised input in few bits; made by ``convert``.

Same parameters, ``state_dict`` and output (to rounding) as the layers they replace, and the same types under autocast;
input and weight gradient are computed from values of few bits (maths and errors: ``ops.normalize``). Where neither
input nor weight needs a gradient, they are those layers in every respect.

The layers of other packages (timm, transformers) are known by what their forward computes, and import nothing:
``few_bit_kinds`` derives a class from each and puts one of the mixins below first.
"""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from lightning_actprune.arguments import OtherOperator
from lightning_actprune.nn.few_bit import FewBitLayer
from lightning_actprune.ops.norm import NormSetting, few_bit_norm, output_dtype


class FewBitNorm(FewBitLayer):
    """Mixin of normalisation layers.

    Raises:
        TypeError: If the input is a DTensor, or in fp64.
        ValueError: If the input has more than 2^31 - 1 blocks.
    """

    operator: ClassVar[OtherOperator] = "norm"

    def keeps(self, x: Tensor, weight: Tensor | None, shape: tuple[int, ...]) -> bool:
        """Return whether anything is kept of ``x``."""
        if not torch.is_grad_enabled() or not (x.requires_grad or (weight is not None and weight.requires_grad)):
            return False
        return self.takes(x, weight, shape)

    def setting(self, centred: bool, eps: float | None, rounded: bool = False) -> NormSetting:
        """Return what is computed and how it is stored; torch takes the least of fp32 for ``None``."""
        settings = self._few_bit
        least = torch.finfo(torch.float32).eps if eps is None else eps
        return NormSetting(centred, rounded, least, settings.block_size, settings.value_format)


class FewBitLayerNorm(FewBitNorm, nn.LayerNorm):
    """``nn.LayerNorm`` that keeps its normalised input in few bits; see ``FewBitNorm``."""

    dense_class = nn.LayerNorm

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input: ``[..., *normalized_shape]``."""
        shape, weight = self.normalized_shape, self.weight  # asked for once: a module's parameter takes a while to find
        if (weight is not None and weight.shape != shape) or not self.keeps(input, weight, shape):
            return super().forward(input)
        setting, dtype = self.setting(True, self.eps), output_dtype(input, "layer_norm")
        return few_bit_norm(input, weight, self.bias, shape, setting, dtype)


class FewBitRMSNorm(FewBitNorm, nn.RMSNorm):
    """``nn.RMSNorm`` that keeps its normalised input in few bits; see ``FewBitNorm``."""

    dense_class = nn.RMSNorm

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input: ``[..., *normalized_shape]``."""
        shape, weight = self.normalized_shape, self.weight
        if (weight is not None and weight.shape != shape) or not self.keeps(x, weight, shape):
            return super().forward(x)
        return few_bit_norm(x, weight, None, shape, self.setting(False, self.eps), output_dtype(x, "rms_norm"))


class FewBitTimmLayerNorm(FewBitLayerNorm):
    """Mixin of timm's ``LayerNorm``, which is that of torch unless timm's "fast norm" is switched on."""

    _fast_norm: bool

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input: ``[..., *normalized_shape]``."""
        return self.dense_class.forward(self, x) if self._fast_norm else super().forward(x)


class FewBitTimmLayerNorm2d(FewBitTimmLayerNorm):
    """Mixin of timm's ``LayerNorm2d``, which normalises over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input: ``[N, C, H, W]``."""
        channels_last = x.permute(0, 2, 3, 1)
        if self._fast_norm or not self.keeps(channels_last, self.weight, self.normalized_shape):
            return self.dense_class.forward(self, x)
        return super().forward(channels_last).permute(0, 3, 1, 2)


class FewBitLlamaRMSNorm(FewBitNorm):
    """Mixin of transformers' ``LlamaRMSNorm`` and its many copies.

    They normalise in fp32, round to the type of the input, and multiply by the weight in the common type of both,
    under autocast too.
    """

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the normalised input: ``[..., hidden_size]``."""
        x, weight = hidden_states, self.weight
        if not self.keeps(x, weight, weight.shape):
            return cast(Tensor, super().forward(x))  # type: ignore[misc]
        setting = self.setting(False, self.variance_epsilon, rounded=x.dtype != torch.float32)
        return few_bit_norm(x, weight, None, weight.shape, setting, torch.promote_types(weight.dtype, x.dtype))
