"""A ResNet for small images, of pre-activation blocks (after He et al. 2016, arXiv 1603.05027)::

    Y = ReLU(BN1(X))
    Z = X + conv2(ReLU(BN2(conv1(Y))))                    3x3 each; where a stage begins, conv1 has a stride of 2, Z
                                                          twice the channels, and X is shortcut(Y), 1x1, that stride

Three stages of equal depth. Every convolution of the blocks reads the output of a ReLU. Images and weights are in
channels-last format, the fast one for 16-bit convolutions on a GPU, so a block of values holds channels of one pixel.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

STAGES = 3


class ResNetBlock(nn.Module):
    """Two convolutions, each with a batch norm and a ReLU before it, and a residual around them.

    Args:
        inputs: Number of channels of the input.
        outputs: Number of channels of the output.
        stride: Of the first convolution; above 1 the residual is convolved too.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.act1 = nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2, self.act2 = nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride != 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, inputs, height, width]` to `[batch, outputs, height / stride, width / stride]`."""
        y = self.act1(self.norm1(x))
        if self.shortcut is not None:
            x = self.shortcut(y)
        y = self.conv1(y)  # frees its input unless backward keeps it
        return x + self.conv2(self.act2(self.norm2(y)))


class ResNet(nn.Module):
    """A ResNet of any size.

    Args:
        dim: Number of channels of the first stage; each further one has twice as many.
        depth: Number of blocks.
        image_size: Not used; any size works.
        patch_size: Stride of the first convolution.
        in_channels: Channels of the images.
        num_classes: Number of classes.
    """

    def __init__(
        self,
        dim: int = 64,
        depth: int = 9,
        image_size: int = 32,
        patch_size: int = 1,
        in_channels: int = 3,
        num_classes: int = 10,
    ) -> None:
        super().__init__()
        widths = [dim, *(dim << STAGES * i // depth for i in range(depth))]
        self.stem = nn.Conv2d(in_channels, dim, 3, patch_size, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            ResNetBlock(inputs, outputs, outputs // inputs) for inputs, outputs in pairwise(widths)
        )
        self.norm, self.act = nn.BatchNorm2d(widths[-1]), nn.ReLU(inplace=True)
        self.head = nn.Linear(widths[-1], num_classes)
        self.reset_parameters()
        self.to(memory_format=torch.channels_last)

    def reset_parameters(self) -> None:
        """Draw the filters for ReLUs, and zero the head."""
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Map `[batch, in_channels, height, width]` to class scores `[batch, num_classes]`."""
        x = self.stem(images.to(memory_format=torch.channels_last))
        for block in self.blocks:
            x = block(x)
        return self.head(self.act(self.norm(x)).mean((2, 3)))


def resnet_9x64(dim: int = 64, depth: int = 9, **options: object) -> ResNet:
    """Return a ResNet-20 of 64, 128 and 256 channels (4.3 million parameters)."""
    return ResNet(dim, depth, **options)
