"""``ActivationPrunedConv1D``: transformers' ``Conv1D`` that keeps only the largest blocks of its input for backward.

``Conv1D``, of which GPT-2 and its like are made, is a linear layer whose weight lies as ``[IN, OUT]``. Its transpose, a
view, is multiplied and saved as the weight of ``nn.Linear`` is, so no copy of it is made or kept. Of inputs with two or
three dimensions, outputs and input gradients are the very matrix products of ``Conv1D``; of others they are equal to
rounding, since torch adds the bias separately. The weight gradient is made as ``[OUT, IN]`` and turned back, and torch
copies it into the layout of the weight where it becomes ``.grad``.

This module imports transformers, so nothing may import it where that is not imported anyway (``nn.kinds``).
"""

from __future__ import annotations

from typing import cast

from torch import Tensor
from transformers.pytorch_utils import Conv1D

from lightning_actprune.functional import linear_unchecked, prunes
from lightning_actprune.nn.settings import PrunedLayer


class ActivationPrunedConv1D(PrunedLayer, Conv1D):  # type: ignore[misc]
    """``Conv1D`` with dense, exact forward and a block-pruned saved input; made by ``convert``.

    Same parameters, ``state_dict`` and output; input and bias gradients are exact, the weight gradient is computed from
    the kept blocks (arXiv:2311.16883). In no-grad mode, with a frozen weight or at ``sparsity=0`` it is ``Conv1D`` in
    every respect.

    Raises:
        TypeError: If the input is not floating point or a DTensor.
        ValueError: If the input is sparse.
    """

    dense_class = Conv1D

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x W + b``: ``[..., IN] -> [..., OUT]``."""
        settings = self._pruning
        parts = settings.parts.size(0)
        if not prunes(self.weight, parts, settings.blocks):
            return cast(Tensor, super().forward(x))
        return linear_unchecked(x, self.weight.t(), self.bias, parts, settings.blocks, self.derives)

    def __repr__(self) -> str:
        inputs, outputs = self.weight.shape
        return f"{type(self).__name__}(nf={outputs}, nx={inputs}, {self.describe_settings()})"
