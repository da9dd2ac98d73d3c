"""A stack of residual blocks, as plain modules and as a LightningModule, of which a few fill most of a small peak."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

WIDTH, DEPTH, TOKENS, SAMPLES = 64, 4, 32, 32
STEPS = 6


class Residual(nn.Module):
    """A norm, two linear layers and what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.act, self.second = nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.act(self.first(self.norm(x))))


class Transformer(nn.Module):
    """Attention and an MLP, both residual, of which the second has a layer scale and perhaps a checkpoint.

    Branches end with dropout, and the MLP has some ``inside``.
    """

    def __init__(self, dropout: float = 0.0, inside: float = 0.0, again: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2, self.gamma = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.qkv, self.proj, self.drop = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        first, second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mlp, self.again = nn.Sequential(first, nn.GELU(), nn.Dropout(inside), second), again

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.drop(self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        y = self.norm2(x)
        y = checkpoint(self.mlp, y, use_reentrant=False) if self.again else self.mlp(y)
        return x + self.drop(self.gamma * y)


def layers() -> nn.Sequential:
    """Return a stem, the blocks and a head."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Residual() for _ in range(DEPTH)], nn.Linear(WIDTH, 4))


class Stack(pl.LightningModule):
    """Classifies tokens; ``kinds`` has the class of each block, and of a layer in it, in every training step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = layers()
        self.kinds: list[list[tuple[str, str]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        blocks = [module for module in self.body if isinstance(module, Residual)]
        self.kinds.append([(type(block).__name__, type(block.first).__name__) for block in blocks])
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.body(batch[0]).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        return batches()


def batches(steps: int = STEPS, samples: int = SAMPLES) -> DataLoader[Any]:
    """Return batches that are the same each time."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps * samples, TOKENS, WIDTH, generator=generator)
    y = torch.randint(4, (steps * samples, TOKENS), generator=generator)
    return DataLoader(TensorDataset(x, y), samples)
