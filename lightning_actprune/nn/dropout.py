"""Dropout that keeps its mask in one bit a value, and exactly; made by ``convert``.

The same random numbers as the dense layer draws, so the same output and gradient (see ``ops.dropout``). Layers that
drop whole channels keep nothing of the size of their input, and stay as they are.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from lightning_actprune.arguments import OtherOperator
from lightning_actprune.nn.few_bit import FewBitLayer
from lightning_actprune.ops.dropout import few_bit_dropout, keeps_mask


class FewBitDropout(FewBitLayer, nn.Dropout):
    """``nn.Dropout`` that keeps its mask in one bit a value, whatever the format."""

    operator: ClassVar[OtherOperator] = "activation"
    dense_class = nn.Dropout

    def forward(self, input: Tensor) -> Tensor:
        """Return the input without the values that are dropped, the others scaled up."""
        if not self.training or not keeps_mask(input, self.p):
            return super().forward(input)
        return few_bit_dropout(input, self.p, self.inplace)

    def describe_settings(self) -> str:
        """Return nothing: there is only one way."""
        return ""
