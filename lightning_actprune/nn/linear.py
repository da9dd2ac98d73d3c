"""``ActivationPrunedLinear``: ``nn.Linear`` that keeps only the largest blocks of its input for backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_actprune.arguments import BlockSelection, Scope, ValueFormatName, check_sparsity
from lightning_actprune.functional import linear_unchecked
from lightning_actprune.nn.settings import PrunedLayer, PruningSettings
from lightning_actprune.ops.setting import BlockSetting


class ActivationPrunedLinear(PrunedLayer, nn.Linear):
    """A linear layer with dense, exact forward and a block-pruned saved input.

    Same parameters, ``state_dict`` and output as ``nn.Linear``; input and bias gradients are exact, the weight gradient
    is computed from the kept blocks (arXiv:2311.16883), or from what a norm before it keeps (``ops.derived``). In
    no-grad mode, with a frozen weight or at ``sparsity=0`` with values stored as they are, it is ``nn.Linear`` in every
    respect.

    Args:
        in_features: Size of each input row.
        out_features: Size of each output row.
        bias: Whether to add a learned bias.
        sparsity: Fraction of blocks dropped, in [0, 1). May be assigned between steps.
        block_size: Consecutive values per block, positive; a block larger than a row is cut to the row.
        scope: ``"sample"``: all blocks of a sample compete; ``"token"``: those of a row.
        value_format: How kept values are stored: ``"same"``, or in few bits: ``"int8"``, ``"int4"``, ``"int3"``,
            ``"int2"``, ``"fp8"`` (see ``functional.linear``).
        block_selection: Which blocks are kept: ``"largest"``, ``"swap"`` or ``"unbiased"`` (see ``functional.linear``).
        device: Device of the parameters.
        dtype: Type of the parameters.

    Raises:
        TypeError: If a setting has the wrong type, or the input is not floating point or a DTensor.
        ValueError: If a setting is out of range, or the input is sparse.

    Example:
        >>> import torch
        >>> layer = ActivationPrunedLinear(64, 32, sparsity=0.5, block_size=16)
        >>> layer(torch.randn(8, 10, 64)).shape
        torch.Size([8, 10, 32])
    """

    dense_class = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sparsity: float,
        block_size: int = 32,
        scope: Scope = "sample",
        value_format: ValueFormatName = "same",
        block_selection: BlockSelection = "largest",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        blocks = BlockSetting.checked(block_size, scope, value_format, block_selection)
        self._pruning = PruningSettings(check_sparsity(sparsity), blocks)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input W^T + b``: ``[..., in_features] -> [..., out_features]``."""
        settings = self._pruning
        parts = settings.parts.size(0)
        return linear_unchecked(input, self.weight, self.bias, parts, settings.blocks, self.derives)

    def extra_repr(self) -> str:
        """Show the pruning settings in the printed module."""
        return f"{super().extra_repr()}, {self.describe_settings()}"
