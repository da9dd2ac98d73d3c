"""Augmentation of the study: every operation as torchvision has it, and mixed images with mixed labels."""

from __future__ import annotations

import math

import pytest
import torch
from torchvision.transforms.v2 import functional as V

from examples.benchmarks.study import augment
from examples.benchmarks.study.augment import BLEND, MOVE, SHEAR, SOLAR


def sheared(x, y):
    return lambda images, sign: V.affine(
        images, 0, [0, 0], 1.0, [math.degrees(math.atan(sign * SHEAR * each)) for each in (x, y)], center=[0, 0]
    )


def moved(x, y):
    size = int(MOVE * 32)
    return lambda images, sign: V.affine(images, 0, [sign * size * x, sign * size * y], 1.0, [0, 0])


TORCHVISION = {
    "identity": lambda images, sign: images,
    "shear_x": sheared(1, 0),
    "shear_y": sheared(0, 1),
    "move_x": moved(1, 0),
    "move_y": moved(0, 1),
    "rotate": lambda images, sign: V.rotate(images, sign * 9.0),
    "brightness": lambda images, sign: V.adjust_brightness(images, 1 + BLEND * sign),
    "colour": lambda images, sign: V.adjust_saturation(images, 1 + BLEND * sign),
    "contrast": lambda images, sign: V.adjust_contrast(images, 1 + BLEND * sign),
    "sharpness": lambda images, sign: V.adjust_sharpness(images, 1 + BLEND * sign),
    "posterize": lambda images, sign: V.posterize(images, 7),
    "solarize": lambda images, sign: V.solarize(images, SOLAR),
    "autocontrast": lambda images, sign: V.autocontrast(images),
    "equalize": lambda images, sign: V.equalize(images),
}


@pytest.fixture
def images():
    """Pictures with some structure, one of a single colour, and one of two."""
    generator = torch.Generator().manual_seed(0)
    made = torch.randint(256, (6, 3, 8, 8), generator=generator).float()
    made = torch.nn.functional.interpolate(made, 32, mode="bilinear").round()
    made[0], made[1] = 77, 20 + 100 * (torch.arange(32) > 15)
    return made


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("name", TORCHVISION)
def test_operations_are_those_of_torchvision(images, name, sign):
    assert list(TORCHVISION) == list(augment.NAMES)
    right = TORCHVISION[name](images.to(torch.uint8), sign).float()
    operation = torch.full((len(images),), augment.NAMES.index(name))
    found = augment.apply(images, operation, torch.full((len(images),), float(sign)))
    assert found.shape == images.shape
    off = (found - right).abs()
    if name == "rotate":  # a pixel whose place lies between two may come from either
        assert (off > 0).float().mean() < 0.01
    else:
        assert off.max() <= 1
    assert torch.equal(found, found.floor())
    assert 0 <= found.min() <= found.max() <= 255


def test_each_image_has_operations_of_its_own(images):
    choices = augment.drawn(1, len(images), torch.Generator().manual_seed(3))[0]
    found = augment.augment(images, choices)
    for number in range(len(images)):
        one = augment.augment(images[number : number + 1], choices[:, number : number + 1])
        assert torch.equal(found[number], one[0])


def test_what_is_drawn_covers_all_and_follows_from_the_generator():
    choices = augment.drawn(200, 16, torch.Generator().manual_seed(0))
    assert choices.shape == (200, augment.ROWS, 16)
    assert set(choices[:, :2].unique().tolist()) == set(range(len(augment.NAMES)))
    assert set(choices[:, 2:4].unique().tolist()) == {0, 1}
    lam = choices[:, 4] / augment.PARTS
    assert torch.equal(lam, lam[:, :1].expand_as(lam))
    assert lam.mean().item() == pytest.approx(0.5, abs=0.05)
    assert lam.var().item() == pytest.approx(0.25 / (2 * augment.MIXED + 1), rel=0.15)
    assert torch.equal(choices, augment.drawn(200, 16, torch.Generator().manual_seed(0)))


def test_labels_are_mixed_as_images_are(images):
    labels = torch.tensor([0, 1, 2, 3, 4, 5])
    choices = torch.zeros(augment.ROWS, 6, dtype=torch.long)
    choices[-1] = 700
    mixed, targets = augment.mix(images, labels, 7, choices)
    torch.testing.assert_close(mixed, 0.7 * images + 0.3 * images.flip(0))
    assert targets[0].tolist() == pytest.approx([0.7, 0, 0, 0, 0, 0.3, 0])
    assert targets.sum(1).tolist() == pytest.approx([1] * 6)
