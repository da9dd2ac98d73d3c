"""ResMLP, an image classifier of Linear layers only (Touvron et al. 2021, arXiv 2105.03404).

The image is cut into `T` square patches, each embedded into `D` channels: `X` is `[T, D]` per sample. A block mixes the
tokens of every channel, then the channels of every token::

    Aff(X) = w * X + b                                           per channel, in place of LayerNorm
    Y = X + gamma1 * (W_t Aff1(X) + b_t)                         W_t is [T, T] and acts on the columns of Aff1(X)
    Z = Y + gamma2 * fc2(GELU(fc1(Aff2(Y))))                     fc1: D -> 4D, fc2: 4D -> D

The class scores are a Linear layer of the token mean of `Aff(Z)`. The layer scales gamma start small, smaller in deeper
networks, so that a block starts close to the identity.
"""

from __future__ import annotations

from torch import Tensor, nn

from examples.models.patches import PatchClassifier, patch_count
from lightning_actprune.operators.norm import Affine


class ResMLPBlock(nn.Module):
    """Token mixing and channel mixing, each with an affine before it, a layer scale after it and a residual around it.

    Args:
        dim: Number of channels.
        tokens: Number of patches.
        layer_scale: First value of the layer scales.
        mlp_ratio: Width of the hidden layer of the channel mixing, in units of `dim`.
    """

    def __init__(self, dim: int, tokens: int, layer_scale: float, mlp_ratio: int = 4) -> None:
        super().__init__()
        self.affine1 = Affine(dim)
        self.token_mix = nn.Linear(tokens, tokens)
        self.scale1 = Affine(dim, bias=False, scale=layer_scale)
        self.affine2 = Affine(dim)
        self.fc1 = nn.Linear(dim, mlp_ratio * dim)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(mlp_ratio * dim, dim)
        self.scale2 = Affine(dim, bias=False, scale=layer_scale)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, tokens, dim]` to the same shape."""
        # token_mix reads a transposed view on purpose: its input is stored in memory order, along dim.
        mixed = self.token_mix(self.affine1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.scale1(mixed)
        return x + self.scale2(self.fc2(self.act(self.fc1(self.affine2(x)))))


class ResMLP(PatchClassifier):
    """A ResMLP of any size.

    Args:
        dim: Number of channels.
        depth: Number of blocks.
        image_size: Height and width of the images, a multiple of `patch_size`.
        patch_size: Height and width of a patch.
        in_channels: Channels of the images.
        num_classes: Number of classes.
        layer_scale: First value of the layer scales; by default chosen from `depth` as in the paper.
    """

    def __init__(
        self,
        dim: int = 384,
        depth: int = 12,
        image_size: int = 224,
        patch_size: int = 16,
        in_channels: int = 3,
        num_classes: int = 1000,
        layer_scale: float | None = None,
    ) -> None:
        tokens = patch_count(image_size, patch_size)
        scale = default_layer_scale(depth) if layer_scale is None else layer_scale
        super().__init__(
            patch_embed=nn.Conv2d(in_channels, dim, kernel_size=patch_size, stride=patch_size),
            blocks=nn.ModuleList(ResMLPBlock(dim, tokens, scale) for _ in range(depth)),
            norm=Affine(dim),
            head=nn.Linear(dim, num_classes),
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights of the Linear layers Xavier-uniformly and zero their biases and the head."""
        super().reset_parameters()
        for layer in self.blocks.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)


def default_layer_scale(depth: int) -> float:
    """Return the paper's first value of the layer scales."""
    if depth <= 18:
        return 0.1
    return 1e-5 if depth <= 24 else 1e-6


def resmlp_tiny(dim: int = 128, depth: int = 3, **options: object) -> ResMLP:
    """Return a ResMLP for tiny images that trains in seconds on a CPU; it is not from the paper."""
    return ResMLP(dim, depth, **options)


def resmlp_s12(dim: int = 384, depth: int = 12, **options: object) -> ResMLP:
    """Return ResMLP-S12 (15.4 million parameters at 224 pixels and patches of 16)."""
    return ResMLP(dim, depth, **options)


def resmlp_s24(dim: int = 384, depth: int = 24, **options: object) -> ResMLP:
    """Return ResMLP-S24 (30.0 million parameters)."""
    return ResMLP(dim, depth, **options)


def resmlp_s36(dim: int = 384, depth: int = 36, **options: object) -> ResMLP:
    """Return ResMLP-S36 (44.7 million parameters)."""
    return ResMLP(dim, depth, **options)


def resmlp_b24(dim: int = 768, depth: int = 24, patch_size: int = 8, **options: object) -> ResMLP:
    """Return ResMLP-B24 (129 million parameters with patches of 8), whose layer scales start at 1e-6."""
    return ResMLP(dim, depth, **{"patch_size": patch_size, "layer_scale": 1e-6, **options})
