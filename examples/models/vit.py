"""A ViT for small images (after Dosovitskiy et al. 2020, arXiv 2010.11929).

The patches are embedded, get a learned position each and pass the transformer blocks; the class scores are a Linear
layer of the mean over the tokens, so there is no class token and the number of tokens stays a round one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.models.patches import patch_count
from examples.models.transformer import TransformerBlock, reset_blocks


class ViT(nn.Module):
    """A ViT of any size.

    Args:
        dim: Number of channels.
        depth: Number of blocks.
        image_size: Height and width of the images, a multiple of `patch_size`.
        patch_size: Height and width of a patch.
        in_channels: Channels of the images.
        num_classes: Number of classes.
    """

    def __init__(
        self,
        dim: int = 384,
        depth: int = 8,
        image_size: int = 32,
        patch_size: int = 4,
        in_channels: int = 3,
        num_classes: int = 10,
    ) -> None:
        super().__init__()
        tokens = patch_count(image_size, patch_size)
        self.patch_embed = nn.Conv2d(in_channels, dim, kernel_size=patch_size, stride=patch_size)
        self.positions = nn.Parameter(torch.zeros(1, tokens, dim))
        self.blocks = nn.ModuleList(TransformerBlock(dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the positions and the weights of the blocks, and zero the head."""
        nn.init.normal_(self.positions, std=0.02)
        reset_blocks(self.blocks)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Map `[batch, in_channels, image_size, image_size]` to class scores `[batch, num_classes]`."""
        # Contiguous, so that the residual stream lies channel-innermost in memory through all blocks.
        x = self.patch_embed(images).flatten(2).transpose(1, 2).contiguous() + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


def vit_8x384(dim: int = 384, depth: int = 8, **options: object) -> ViT:
    """Return a ViT of 8 blocks of 384 channels (14.2 million parameters at 32 pixels and patches of 4)."""
    return ViT(dim, depth, **options)
