"""RandAugment and mixup for images on a GPU; all that is drawn is given as numbers, so that a step can be captured.

RandAugment (Cubuk et al. 2020, arXiv 1909.13719) changes each image by two operations, drawn from fourteen, all of one
strength: here 9 of 30, as torchvision has it, whose `RandAugment` takes one image at a time. Mixup (Zhang et al. 2018,
arXiv 1710.09412) trains on what lies between two images and between their labels::

    X = lam X_i + (1 - lam) X_j        Y = lam Y_i + (1 - lam) Y_j        lam ~ Beta(0.8, 0.8), one per batch
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

STRENGTH = 9 / 30
MIXED = 0.8
PARTS = 1000
"""In which `lam` is counted: what is drawn are integers."""
SHEAR, MOVE, TURN, BLEND = 0.3 * STRENGTH, 150 / 331 * STRENGTH, math.radians(30 * STRENGTH), 0.9 * STRENGTH
SOLAR, LOWEST_BITS = 255 * (1 - STRENGTH), 1
GEOMETRIC = "identity", "shear_x", "shear_y", "move_x", "move_y", "rotate"
ROWS = 5
"""Of what is drawn for an image: two operations with their signs, and `lam`."""


def drawn(steps: int, batch: int, generator: torch.Generator) -> Tensor:
    """Return what is drawn for the images of so many steps, `[steps, 5, batch]`."""
    operations = torch.randint(len(NAMES), (steps, 2, batch), generator=generator)
    signs = torch.randint(2, (steps, 2, batch), generator=generator)
    beta = random.Random(int(torch.randint(2**31, (), generator=generator)))  # noqa: S311 - nothing is secret
    lam = torch.tensor([round(PARTS * beta.betavariate(MIXED, MIXED)) for _ in range(steps)])
    return torch.cat([operations, signs, lam.view(-1, 1, 1).expand(-1, 1, batch)], dim=1)


def augment(images: Tensor, choices: Tensor) -> Tensor:
    """Return images `[batch, 3, height, width]`, of whole numbers to 255 changed as `choices` (`[5, batch]`) say."""
    first, second, first_sign, second_sign, _ = choices
    for operation, sign in ((first, first_sign), (second, second_sign)):
        images = apply(images, operation, 2.0 * sign - 1)
    return images


def mix(images: Tensor, labels: Tensor, classes: int, choices: Tensor) -> tuple[Tensor, Tensor]:
    """Return images mixed with those of the batch in reverse, and how much of each label they have."""
    lam = choices[-1, 0] / PARTS
    targets = (labels.unsqueeze(1) == torch.arange(classes, device=labels.device)).to(images.dtype)
    return torch.lerp(images.flip(0), images, lam), torch.lerp(targets.flip(0), targets, lam)


def apply(images: Tensor, operation: Tensor, sign: Tensor) -> Tensor:
    """Return each image changed by one operation, of `NAMES` by its number, in the direction of its sign."""
    changed = moved(images, operation, sign)
    for number, made in enumerate(COLOURS.values(), len(GEOMETRIC)):
        chosen = (operation == number).view(-1, 1, 1, 1)
        changed = torch.where(chosen, made(images, sign.view(-1, 1, 1, 1)), changed)
    return changed


def moved(images: Tensor, operation: Tensor, sign: Tensor) -> Tensor:
    """Return the images sheared, moved or turned: the nearest pixel, black where there is none."""
    height, width = images.shape[-2:]
    like = {"device": images.device, "dtype": torch.float32}
    y, x = torch.arange(height, **like).view(-1, 1) + 0.5, torch.arange(width, **like) + 0.5
    amount = {name: (operation == GEOMETRIC.index(name)) * sign for name in GEOMETRIC[1:]}
    amount = {name: value.view(-1, 1, 1) for name, value in amount.items()}
    angle = TURN * amount["rotate"]
    across, down = x - width / 2, y - height / 2
    source_x = torch.cos(angle) * across - torch.sin(angle) * down + width / 2
    source_y = torch.sin(angle) * across + torch.cos(angle) * down + height / 2
    source_x = source_x + SHEAR * amount["shear_x"] * y - int(MOVE * width) * amount["move_x"]
    source_y = source_y + SHEAR * amount["shear_y"] * x - int(MOVE * height) * amount["move_y"]
    column, row = source_x.floor().long(), source_y.floor().long()
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    place = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).flatten(1)
    found = images.flatten(2).gather(2, place.unsqueeze(1).expand(-1, images.shape[1], -1))
    return found.view_as(images) * inside.unsqueeze(1)


def blended(images: Tensor, other: Tensor, sign: Tensor) -> Tensor:
    """Return images moved away from others, or towards them."""
    return torch.lerp(other.expand_as(images), images, 1 + BLEND * sign).clamp(0, 255).floor()


def grey(images: Tensor) -> Tensor:
    """Return the brightness of the pixels."""
    red, green, blue = images.split(1, 1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue).floor()


def brightness(images: Tensor, sign: Tensor) -> Tensor:
    """Darker or lighter."""
    return blended(images, torch.zeros_like(images), sign)


def colour(images: Tensor, sign: Tensor) -> Tensor:
    """Closer to grey, or farther from it."""
    return blended(images, grey(images), sign)


def contrast(images: Tensor, sign: Tensor) -> Tensor:
    """Closer to its mean brightness, or farther from it."""
    return blended(images, grey(images).mean((2, 3), keepdim=True), sign)


def sharpness(images: Tensor, sign: Tensor) -> Tensor:
    """Blurred or sharpened, but for the border."""
    inner = images[..., 1:-1, 1:-1]
    blurred = (F.avg_pool2d(images, 3, 1) * 9 + 4 * inner) / 13
    return F.pad(blended(inner, blurred.round(), sign) - inner, [1] * 4) + images


def posterize(images: Tensor, sign: Tensor) -> Tensor:
    """Without the lowest bits."""
    return (images / 2**LOWEST_BITS).floor() * 2**LOWEST_BITS


def solarize(images: Tensor, sign: Tensor) -> Tensor:
    """With what is bright inverted."""
    return torch.where(images >= SOLAR, 255 - images, images)


def autocontrast(images: Tensor, sign: Tensor) -> Tensor:
    """Stretched from black to white in each channel."""
    least, most = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    scaled = (images - least) * (255 / (most - least).clamp_min(1))
    return torch.where(most > least, scaled.clamp(0, 255).floor(), images)


def equalize(images: Tensor, sign: Tensor) -> Tensor:
    """With all levels equally frequent in each channel, as far as that goes."""
    levels = images.flatten(2).long()
    counts = torch.zeros(*levels.shape[:2], 256, device=images.device, dtype=torch.long)
    counts.scatter_add_(2, levels, torch.ones_like(levels))
    below = counts.cumsum(2)
    last = counts.gather(2, levels.amax(2, keepdim=True))
    step = (levels.shape[2] - last) // 255
    table = (below + (step // 2)) // step.clamp_min(1)
    table = F.pad(table, [1, 0])[..., :-1].clamp(0, 255)
    equal = table.gather(2, levels).view_as(images).to(images.dtype)
    return torch.where(step.unsqueeze(-1) > 0, equal, images)


COLOURS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    made.__name__: made
    for made in (brightness, colour, contrast, sharpness, posterize, solarize, autocontrast, equalize)
}
NAMES = (*GEOMETRIC, *COLOURS)
