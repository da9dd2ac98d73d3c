"""Torchvision transforms that turn an image into a sample.

Pixels become floats in [0, 1] and are normalised per channel, `(pixel - mean) / std`. Training images of CIFAR and of
folders are augmented first:

- `crop`: resized to `s x s`, padded by `s / 8` (4 pixels of 32), cropped to `s x s` at random and mirrored at random;
- `resized_crop`, usual on ImageNet: a random part of 8 to 100 % of the image, of an aspect ratio between 3/4
  and 4/3, is resized to `s x s`, mirrored at random and changed by one random operation of `TrivialAugmentWide`; test
  images are resized until their shorter side is `8/7 s` (256 pixels of 224), and cropped in the middle;
- `none`: resized to `s x s`.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torchvision.transforms import v2

Augmentation = Literal["crop", "resized_crop", "none"]
AUGMENTATIONS = get_args(Augmentation)
NORMALISATION = {
    "digits": ((0.305,), (0.376,)),
    "cifar10": ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
    "cifar100": ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276)),
    "folder": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
"""Means and standard deviations of the channels; a folder has ImageNet's."""


def train_transform(dataset: str, size: int, augmentation: Augmentation) -> v2.Transform:
    """Return the transform of the training images of `dataset`, which become `size` by `size` pixels."""
    varied: dict[str, list[v2.Transform]] = {
        "crop": [*_resize(size), v2.RandomCrop(size, padding=size // 8), v2.RandomHorizontalFlip()],
        "resized_crop": [
            v2.RandomResizedCrop(size, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.TrivialAugmentWide(),
        ],
        "none": _resize(size),
    }
    return _to_tensor(varied[augmentation], dataset)


def plain_transform(dataset: str, size: int, augmentation: Augmentation) -> v2.Transform:
    """Return the transform of the test images that goes with an `augmentation` of the training images."""
    if augmentation == "resized_crop":
        return _to_tensor([v2.Resize(size * 8 // 7, antialias=True), v2.CenterCrop(size)], dataset)
    return _to_tensor(_resize(size) if dataset != "digits" or size != 8 else [], dataset)


def _resize(size: int) -> list[v2.Transform]:
    return [v2.Resize((size, size), antialias=True)]


def _to_tensor(steps: list[v2.Transform], dataset: str) -> v2.Transform:
    mean, std = NORMALISATION[dataset]
    as_floats = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(mean), list(std)), v2.ToPureTensor()]
    return v2.Compose([v2.ToImage(), *steps, *as_floats])
