"""Image classifiers whose tokens are the patches of an image.

The image is cut into square patches, each embedded into the channels of a token; the blocks follow one after the other,
and the class scores are a Linear layer of the mean over the normed tokens.
"""

from __future__ import annotations

from torch import Tensor, nn


class PatchClassifier(nn.Module):
    """Embedding, blocks, norm and head; a subclass makes them and draws their first weights.

    Args:
        patch_embed: Convolution from the pixels of a patch to the channels of its token.
        blocks: Each maps `[batch, tokens, dim]` to the same shape.
        norm: Between the last block and the mean.
        head: From the mean to the class scores; it starts at zero.
    """

    def __init__(self, patch_embed: nn.Conv2d, blocks: nn.ModuleList, norm: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.patch_embed, self.blocks, self.norm, self.head = patch_embed, blocks, norm, head

    def reset_parameters(self) -> None:
        """Zero the head; subclasses draw the rest."""
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def embed(self, images: Tensor) -> Tensor:
        """Map `[batch, in_channels, image_size, image_size]` to tokens `[batch, tokens, dim]`."""
        # Contiguous once here, so that the residual stream lies channel-innermost in memory through all blocks.
        return self.patch_embed(images).flatten(2).transpose(1, 2).contiguous()

    def forward(self, images: Tensor) -> Tensor:
        """Map `[batch, in_channels, image_size, image_size]` to class scores `[batch, num_classes]`."""
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


def patch_count(image_size: int, patch_size: int) -> int:
    """Return the number of square patches of a square image.

    Raises:
        ValueError: If `image_size` is no multiple of `patch_size`.
    """
    if image_size % patch_size:
        raise ValueError(
            f"`image_size` must be a multiple of `patch_size`, got {image_size} and {patch_size}. "
            "HINT: 224 goes with patches of 16, 32 with 4, 8 with 1 or 2."
        )
    return (image_size // patch_size) ** 2
