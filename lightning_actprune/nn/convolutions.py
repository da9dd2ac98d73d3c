"""``ActivationPrunedConv1d``, ``2d`` and ``3d``: convolutions that keep only the largest blocks of their input.

Same parameters, ``state_dict`` and output as the convolutions of torch; input and bias gradients are exact, the weight
gradient is computed from the kept blocks (``ops.convolution``). In no-grad mode, with a frozen weight or at
``sparsity=0`` with values stored as they are, they are torch's convolutions in every respect.

Zeros around the input are the same on both sides. Other padding (``padding_mode``, or ``"same"`` with an even number of
weights) makes torch keep a padded copy; such layers are not pruned.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from lightning_actprune.arguments import BlockSelection, Scope, ValueFormatName, check_sparsity
from lightning_actprune.functional import convolution_unchecked, prunes
from lightning_actprune.nn.settings import PrunedLayer, PruningSettings
from lightning_actprune.ops.convolution import Windows
from lightning_actprune.ops.convolution_plan import input_rows
from lightning_actprune.ops.setting import BlockSetting


class PrunedConvolution(PrunedLayer, _ConvNd):
    """Mixin of convolutions with dense, exact forward and a block-pruned saved input.

    Args:
        arguments: Those of the convolution of torch.
        sparsity: Fraction of blocks dropped, in [0, 1). May be assigned between steps.
        block_size: Consecutive values in memory per block, positive; cut to a sample if larger.
        scope: ``"sample"``: all blocks of a sample compete; ``"token"``: those of the channels of a pixel, or of the
            innermost dimension of a contiguous input.
        value_format: How kept values are stored: ``"same"``, or in few bits: ``"int8"``, ``"int4"``, ``"int3"``,
            ``"int2"``, ``"fp8"`` (see ``functional.linear``).
        block_selection: Which blocks are kept: ``"largest"``, ``"swap"`` or ``"unbiased"`` (see ``functional.linear``).
        options: Keyword arguments of the convolution of torch.

    Raises:
        TypeError: If a setting has the wrong type, or the input is not floating point, a DTensor, or fp64 with values
            in few bits.
        ValueError: If a setting is out of range, the padding is not known, or the input is sparse.
    """

    def __init__(
        self,
        *arguments: Any,
        sparsity: float,
        block_size: int = 32,
        scope: Scope = "sample",
        value_format: ValueFormatName = "same",
        block_selection: BlockSelection = "largest",
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        padding = padding_refusal(self)
        if padding is not None:
            raise ValueError(f"`padding` {padding}. HINT: pad the input before, or take torch's own convolution.")
        blocks = BlockSetting.checked(block_size, scope, value_format, block_selection)
        self._pruning = PruningSettings(check_sparsity(sparsity), blocks)

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution of a batch ``[N, in_channels, *spatial]``, or of one sample."""
        settings, weight = self._pruning, self.weight  # which a module takes a while to find
        parts = settings.parts.size(0)
        if not prunes(weight, parts, settings.blocks):
            return cast(Tensor, super().forward(input))
        return convolution_unchecked(input, weight, self.bias, windows_of(self), parts, settings.blocks)

    def rows(self, x: Tensor) -> Tensor:
        """Return an input as the rows ``[samples, rows, length]`` from which its blocks are cut."""
        blocks = self._pruning.blocks
        batch = x.unsqueeze(0) if x.dim() == self.weight.dim() - 1 else x
        return input_rows(batch, blocks.block_size, blocks.scope)

    def extra_repr(self) -> str:
        """Show the pruning settings in the printed module."""
        shown: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{shown}, {self.describe_settings()}"


class ActivationPrunedConv1d(PrunedConvolution, nn.Conv1d):
    """``nn.Conv1d`` that keeps only the largest blocks of its input; see ``PrunedConvolution``.

    Example:
        >>> import torch
        >>> layer = ActivationPrunedConv1d(16, 8, 3, padding=1, sparsity=0.5)
        >>> layer(torch.randn(4, 16, 100)).shape
        torch.Size([4, 8, 100])
    """

    dense_class = nn.Conv1d


class ActivationPrunedConv2d(PrunedConvolution, nn.Conv2d):
    """``nn.Conv2d`` that keeps only the largest blocks of its input; see ``PrunedConvolution``.

    Example:
        >>> import torch
        >>> layer = ActivationPrunedConv2d(16, 8, 3, padding=1, sparsity=0.5, block_size=16)
        >>> layer(torch.randn(4, 16, 20, 20)).shape
        torch.Size([4, 8, 20, 20])
    """

    dense_class = nn.Conv2d


class ActivationPrunedConv3d(PrunedConvolution, nn.Conv3d):
    """``nn.Conv3d`` that keeps only the largest blocks of its input; see ``PrunedConvolution``."""

    dense_class = nn.Conv3d


def windows_of(layer: _ConvNd) -> Windows:
    """Return which values of its input a convolution computes each output from."""
    return Windows(layer.stride, _zeros(layer), layer.dilation, layer.groups)


def _zeros(layer: _ConvNd) -> tuple[int, ...]:
    """Return how many zeros are before and after the input, by dimension."""
    if not isinstance(layer.padding, str):
        return layer.padding
    if layer.padding == "valid":
        return (0,) * len(layer.kernel_size)
    return tuple(d * (k - 1) // 2 for d, k in zip(layer.dilation, layer.kernel_size, strict=True))


def padding_refusal(layer: _ConvNd) -> str | None:
    """Return why a convolution with this padding cannot be pruned."""
    if layer.padding_mode != "zeros":
        return f"is {layer.padding_mode!r}, of which torch keeps a padded copy"
    sizes = zip(layer.dilation, layer.kernel_size, strict=True)
    if layer.padding == "same" and any(d * (k - 1) % 2 for d, k in sizes):
        return "is 'same' with an even number of weights, of which torch keeps a padded copy"
    return None
