"""The blocks of torchvision's ResNets, with batch normalisation and the ReLU after it in the same passes.

The block keeps nothing itself, and computes what it always has. Where a converted norm is followed by a converted ReLU,
neither is called: the kernels that normalise apply the ReLU too, and keep its bits beside the normalised values. The
results are those of the two layers, bit for bit, without the ReLU's own passes (``ops.line_plan``).

Both are called where anybody might see the difference, as hooks on either do, and where the kernels do not normalise:
in eval mode, in a compiled model, for types that they do not take.
"""

from __future__ import annotations

from typing import ClassVar, cast

from torch import Tensor, nn

from lightning_actprune.arguments import OtherOperator
from lightning_actprune.nn.activations import FewBitReLU
from lightning_actprune.nn.batch_norms import FewBitBatchNorm2d
from lightning_actprune.nn.few_bit import FewBitLayer, hooked


class FewBitResNetBlock(FewBitLayer):
    """Mixin of the blocks."""

    operator: ClassVar[OtherOperator] = "norm"
    stores = False

    conv1: nn.Module
    bn1: nn.Module
    conv2: nn.Module
    bn2: nn.Module
    relu: nn.Module
    downsample: nn.Module | None

    def describe_settings(self) -> str:
        """Return nothing: the norms and the activation function have their own."""
        return ""

    def added(self, branch: Tensor, x: Tensor) -> Tensor:
        """Return the ReLU of ``branch``, which is written to, and ``x``."""
        branch += x if self.downsample is None else self.downsample(x)
        return cast(Tensor, self.relu(branch))

    def rectified(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Return the ReLU of the normalised ``x``."""
        relu = self.relu
        if type(norm) is FewBitBatchNorm2d and type(relu) is FewBitReLU and not hooked(norm) and not hooked(relu):
            y = norm.rectified(x)
            if y is not None:
                return y
        return cast(Tensor, relu(norm(x)))


class FewBitResNetBasicBlock(FewBitResNetBlock):
    """Mixin of ``BasicBlock``."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` after the block: ``[N, C, H, W]``."""
        return self.added(self.bn2(self.conv2(self.rectified(self.bn1, self.conv1(x)))), x)


class FewBitResNetBottleneck(FewBitResNetBlock):
    """Mixin of ``Bottleneck``."""

    conv3: nn.Module
    bn3: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` after the block: ``[N, C, H, W]``."""
        y = self.rectified(self.bn1, self.conv1(x))
        y = self.rectified(self.bn2, self.conv2(y))
        return self.added(self.bn3(self.conv3(y)), x)
