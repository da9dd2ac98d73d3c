"""A U-Net with attention, as in diffusion models: it maps a noisy image and a time to the noise in it.

It goes down and up again through levels, each of half the resolution of the one before. On the way up a level also
reads what it computed on the way down (Ronneberger et al. 2015, arXiv 1505.04597). Each level has residual blocks,

    X + conv(SiLU(norm(conv(SiLU(norm(X))) + linear(SiLU(t)))))             norm: GroupNorm, t: the time as features

with attention over all places of the image after them where the image is small (Ho et al. 2020, arXiv 2006.11239).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GROUPS = 32


class ResidualBlock(nn.Module):
    """Two convolutions with the time in between.

    Args:
        inputs: Channels of the input.
        channels: Channels of the output.
        times: Features of the time.
    """

    def __init__(self, inputs: int, channels: int, times: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(GROUPS, inputs), nn.Conv2d(inputs, channels, 3, padding=1)
        self.time = nn.Linear(times, channels)
        self.norm2, self.conv2 = nn.GroupNorm(GROUPS, channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.act1, self.act2 = nn.SiLU(), nn.SiLU()
        self.skip = nn.Identity() if inputs == channels else nn.Conv2d(inputs, channels, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Map `[batch, inputs, height, width]` to `[batch, channels, height, width]`."""
        y = self.conv1(self.act1(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(self.act2(self.norm2(y)))


class Attention(nn.Module):
    """Attention of every place of an image to all.

    Args:
        channels: Channels of the image.
        head: Channels of a head.
    """

    def __init__(self, channels: int, head: int = 64) -> None:
        super().__init__()
        self.heads = max(channels // head, 1)
        self.norm = nn.GroupNorm(GROUPS, channels)
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, channels, height, width]` to the same shape."""
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        query, key, value = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return x + self.proj(attended).transpose(1, 2).unflatten(2, x.shape[2:])


class Level(nn.Module):
    """A block, with attention after it if `attends`."""

    def __init__(self, inputs: int, channels: int, times: int, attends: bool) -> None:
        super().__init__()
        self.block = ResidualBlock(inputs, channels, times)
        self.attention = Attention(channels) if attends else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Map `[batch, inputs, height, width]` to `[batch, channels, height, width]`."""
        return self.attention(self.block(x, time))


class UNet(nn.Module):
    """A U-Net of any size.

    Args:
        channels: Channels of the first level, a multiple of 32.
        factors: Channels of each level, in units of `channels`.
        depth: Blocks of a level on the way down; on the way up there is one more.
        attending: Indices of the levels with attention.
        in_channels: Channels of the images.
    """

    def __init__(
        self,
        channels: int = 128,
        factors: tuple[int, ...] = (1, 2, 2, 4),
        depth: int = 2,
        attending: tuple[int, ...] = (2, 3),
        in_channels: int = 3,
    ) -> None:
        super().__init__()
        times, widths = 4 * channels, [channels * factor for factor in factors]
        self.channels, self.depth = channels, depth
        self.time = nn.Sequential(nn.Linear(channels, times), nn.SiLU(), nn.Linear(times, times), nn.SiLU())
        self.stem = nn.Conv2d(in_channels, channels, 3, padding=1)
        self.down, self.shrink, skips, width = nn.ModuleList(), nn.ModuleList(), [channels], channels
        for number, wider in enumerate(widths):
            for _ in range(depth):
                self.down.append(Level(width, wider, times, number in attending))
                width = wider
                skips.append(width)
            if number < len(widths) - 1:
                self.shrink.append(nn.Conv2d(width, width, 3, 2, 1))
                skips.append(width)
        self.middle = Level(width, width, times, True)
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for number, wider in reversed(list(enumerate(widths))):
            for _ in range(depth + 1):
                self.up.append(Level(width + skips.pop(), wider, times, number in attending))
                width = wider
            if number:
                self.grow.append(nn.Conv2d(width, width, 3, padding=1))
        self.norm, self.act, self.head = nn.GroupNorm(GROUPS, width), nn.SiLU(), nn.Conv2d(width, in_channels, 3, 1, 1)

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        """Map images `[batch, in_channels, height, width]` and times `[batch]` in [0, 1] to images of noise."""
        frequencies = torch.exp(
            torch.arange(self.channels // 2, device=times.device) * (-2 * math.log(1e4) / self.channels)
        )
        angles = 1e3 * times[:, None] * frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        x = self.stem(images)
        skips = [x]
        for number, level in enumerate(self.down, 1):
            x = level(x, time)
            skips.append(x)
            if number % self.depth == 0 and number < len(self.down):
                x = self.shrink[number // self.depth - 1](x)
                skips.append(x)
        x = self.middle(x, time)
        for number, level in enumerate(self.up, 1):
            x = level(torch.cat([x, skips.pop()], 1), time)
            if number % (self.depth + 1) == 0 and number < len(self.up):
                x = self.grow[number // (self.depth + 1) - 1](F.interpolate(x, scale_factor=2.0))
        return self.head(self.act(self.norm(x)))
