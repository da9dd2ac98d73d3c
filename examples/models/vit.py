"""A ViT for small images (after Dosovitskiy et al. 2020, arXiv 2010.11929).

The patches are embedded, get a learned position each and pass the transformer blocks; the class scores are a Linear
layer of the mean over the tokens, so there is no class token and the number of tokens stays a round one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.models.patches import PatchClassifier, patch_count
from examples.models.transformer import TransformerBlock, reset_blocks


class ViT(PatchClassifier):
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
        super().__init__(
            patch_embed=nn.Conv2d(in_channels, dim, kernel_size=patch_size, stride=patch_size),
            blocks=nn.ModuleList(TransformerBlock(dim) for _ in range(depth)),
            norm=nn.LayerNorm(dim),
            head=nn.Linear(dim, num_classes),
        )
        self.positions = nn.Parameter(torch.zeros(1, patch_count(image_size, patch_size), dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the positions and the weights of the blocks, and zero the head."""
        super().reset_parameters()
        nn.init.normal_(self.positions, std=0.02)
        reset_blocks(self.blocks)

    def embed(self, images: Tensor) -> Tensor:
        """Map `[batch, in_channels, image_size, image_size]` to tokens `[batch, tokens, dim]` with their positions."""
        return super().embed(images) + self.positions


def vit_8x384(dim: int = 384, depth: int = 8, **options: object) -> ViT:
    """Return a ViT of 8 blocks of 384 channels (14.2 million parameters at 32 pixels and patches of 4)."""
    return ViT(dim, depth, **options)
