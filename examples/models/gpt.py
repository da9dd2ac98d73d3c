"""A GPT over bytes: for every byte of a text it scores the next one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.models.transformer import TransformerBlock, reset_blocks

BYTES = 256
"""Size of the vocabulary."""


class GPT(nn.Module):
    """A GPT of any size.

    Args:
        dim: Number of channels.
        depth: Number of blocks.
        context: Largest number of bytes in a sample.
    """

    def __init__(self, dim: int = 384, depth: int = 6, context: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, dim)
        self.positions = nn.Parameter(torch.zeros(context, dim))
        self.blocks = nn.ModuleList(TransformerBlock(dim, causal=True) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, BYTES, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as GPT-2 does."""
        for weight in (self.embed.weight, self.positions, self.head.weight):
            nn.init.normal_(weight, std=0.02)
        reset_blocks(self.blocks)

    def forward(self, text: Tensor) -> Tensor:
        """Map bytes `[batch, length]`, `length` at most `context`, to scores `[batch, length, 256]`."""
        x = self.embed(text) + self.positions[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt_6x384(dim: int = 384, depth: int = 6, **options: int) -> GPT:
    """Return a GPT of 6 blocks of 384 channels (10.9 million parameters)."""
    return GPT(dim, depth, **options)
