"""The transformer block that the examples' ViT and GPT are made of, with a LayerNorm before each part (pre-norm)::

    Y = X + proj(SDPA(qkv(LN1(X))))                       qkv: D -> 3D, proj: D -> D, heads of 64 channels
    Z = Y + fc2(GELU(fc1(LN2(Y))))                        fc1: D -> 4D, fc2: 4D -> D

Autograd keeps the output of the attention for its backward. That output is the input of `proj`, so pruning `proj` alone
frees nothing.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

HEAD_DIM = 64


class Attention(nn.Module):
    """Self-attention with one layer for queries, keys and values.

    Args:
        dim: Number of channels; as many heads as 64 go into it, at least one.
        causal: Whether a token sees only itself and earlier tokens.
    """

    def __init__(self, dim: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = max(1, dim // HEAD_DIM), causal
        if dim % self.heads:
            raise ValueError(
                f"`dim` must be a multiple of the {self.heads} heads, got {dim}. HINT: multiples of 64 are."
            )
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, tokens, dim]` to the same shape."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention and an MLP, each with a LayerNorm before it and a residual around it.

    Args:
        dim: Number of channels.
        causal: Whether a token sees only itself and earlier tokens.
        mlp_ratio: Width of the hidden layer of the MLP, in units of `dim`.
    """

    def __init__(self, dim: int, causal: bool = False, mlp_ratio: int = 4) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, causal)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, mlp_ratio * dim)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(mlp_ratio * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, tokens, dim]` to the same shape."""
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


def reset_blocks(blocks: nn.ModuleList, std: float = 0.02) -> None:
    """Draw the weights as GPT-2 does: layers that write to the residual stream start smaller in deeper models."""
    for name, layer in blocks.named_modules():
        if isinstance(layer, nn.Linear):
            writes = name.endswith(("attn.proj", "fc2"))
            nn.init.normal_(layer.weight, std=std / (2 * len(blocks)) ** 0.5 if writes else std)
            nn.init.zeros_(layer.bias)
