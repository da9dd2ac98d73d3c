"""A folder of images on one device: padded training images as bytes, out of which windows are cut, and test images."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from examples.benchmarks.study import augment
from examples.data import load_image_folder_tensors

WAYS = 8
"""In which an image can stand: turned by quarters, and as a negative."""


class Images:
    """The data set on one device: padded training images as bytes, test images, labels and the normalisation.

    Args:
        root: Folder of images with `train/<class>/` and `test/<class>/`.
        device: Where the tensors live.
        padding: Black pixels put around each training image, out of which windows of its size are cut.
        strong: Whether training images get RandAugment and mixup besides.
        part: `first` or `second` half of the classes, or all.
        turned: Whether each image stands in one of eight ways, by its number, and each of them makes classes of its
            own: eight times as many, with an eighth of the images each. That is as hard as more classes are.
    """

    def __init__(
        self,
        root: Path,
        device: torch.device,
        padding: int = 4,
        strong: bool = False,
        part: str | None = None,
        turned: bool = False,
    ) -> None:
        train, labels, test, test_labels = load_image_folder_tensors(root)
        if part is not None:
            classes = range(int(labels.max()) + 1)
            half = classes[: len(classes) // 2] if part == "first" else classes[len(classes) // 2 :]
            train, labels = of_classes(train, labels, half)
            test, test_labels = of_classes(test, test_labels, half)
        self.device, self.padding, self.strong, self.turned = device, padding, strong, turned
        if turned:
            labels, test_labels = (WAYS * each + torch.arange(len(each)) % WAYS for each in (labels, test_labels))
            test = turn(test, test_labels % WAYS)
        self.size, self.classes = train.shape[-1], int(labels.max()) + 1
        self.sha256 = fingerprint(train, labels, test, test_labels)
        sample = train[:: max(1, len(train) // 5000)].float()
        self.mean = sample.mean((0, 2, 3)).view(-1, 1, 1).to(device)
        self.std = sample.std((0, 2, 3)).view(-1, 1, 1).to(device)
        self.padded = F.pad(train.to(device), [padding] * 4)
        self.labels, self.test, self.test_labels = labels.to(device), test.to(device), test_labels.to(device)
        self.pixels = torch.arange(self.size, device=device)

    @property
    def facts(self) -> dict[str, Any]:
        """What identifies the data set in a record, wherever its folder lies and whatever it is called."""
        counts = {"train_images": len(self.labels), "test_images": len(self.test_labels)}
        facts = {"dataset": "images", **counts, "image_size": self.size, "classes": self.classes, "sha256": self.sha256}
        return {
            **facts,
            "augmentation": "RandAugment and mixup" if self.strong else None,
            "turned": self.turned or None,
        }

    @property
    def shape(self) -> dict[str, int]:
        """What a model must know of the data."""
        return {"image_size": self.size, "num_classes": self.classes}

    def epoch_batches(self, batch: int) -> int:
        """Return the number of full batches of `batch` images."""
        if batch > len(self.labels):
            raise ValueError(
                f"`--batch-size` must be at most the number of training images, got {batch} for {len(self.labels)} "
                "images. HINT: lower it; every batch is full, as a captured step needs."
            )
        return len(self.labels) // batch

    def draw(self, steps: int, batch: int, generator: torch.Generator) -> Tensor:
        """Return the choices of one epoch, `[steps, 4, batch]`: image, top and left of its window, mirrored or not.

        With strong augmentation, what that draws comes behind.
        """
        order = torch.randperm(len(self.labels), generator=generator)[: steps * batch].view(steps, 1, batch)
        window = torch.randint(2 * self.padding + 1, (steps, 2, batch), generator=generator)
        mirrored = torch.randint(2, (steps, 1, batch), generator=generator)
        more = [augment.drawn(steps, batch, generator)] if self.strong else []
        return torch.cat([order, window, mirrored, *more], dim=1).to(self.device)

    def batch(self, choices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised images that `choices` (`[4, batch]`) name, in one gather, and their labels.

        With strong augmentation, labels are how much of each class an image has, `[batch, classes]`.
        """
        index, top, left, mirrored = choices[:4].unsqueeze(-1)
        rows = top + self.pixels
        columns = left + torch.where(mirrored == 1, self.pixels.flip(0), self.pixels)
        images = self.padded[index.unsqueeze(-1), :, rows.unsqueeze(2), columns.unsqueeze(1)]  # [batch, h, w, channels]
        images, labels = images.permute(0, 3, 1, 2), self.labels[index.squeeze(-1)]
        if self.strong:
            images = augment.augment(images.float(), choices[4:])
        if self.turned:  # at last: a mirrored image that lies on its side would be one that lies on the other
            images = turn(images, labels % WAYS)
        images = self.normalise(images)
        return augment.mix(images, labels, self.classes, choices[4:]) if self.strong else (images, labels)

    def normalise(self, images: Tensor) -> Tensor:
        """Return bytes as normalised floats."""
        return (images.float() - self.mean) / self.std

    def score(self, model: Callable[[Tensor], Tensor], limit: int | None) -> float:
        """Return the percentage of test images, `limit` of them if given, that `model` classifies correctly."""
        # The images are sorted by class, so that a smoke test takes them from everywhere.
        stride = max(1, len(self.test) // (limit or len(self.test)))
        test, labels = self.test[::stride], self.test_labels[::stride]
        correct = 0
        for pixels, truth in zip(test.split(500), labels.split(500), strict=True):
            correct += (model(self.normalise(pixels)).argmax(1) == truth).sum().item()
        return 100 * correct / len(labels)


def turn(images: Tensor, ways: Tensor) -> Tensor:
    """Return images turned by as many quarters as their way (`[batch]`, of `WAYS`) says, from 4 on as negatives."""
    ways = ways.view(-1, 1, 1, 1)
    turned = images
    for quarters in range(1, 4):
        turned = torch.where(ways % 4 == quarters, images.rot90(quarters, (2, 3)), turned)
    return torch.where(ways >= 4, 255 - turned, turned)


def of_classes(images: Tensor, labels: Tensor, classes: range) -> tuple[Tensor, Tensor]:
    """Return the images of some classes, which are counted from 0 then."""
    chosen = (labels >= classes.start) & (labels < classes.stop)
    return images[chosen], labels[chosen] - classes.start


def fingerprint(*tensors: Tensor) -> str:
    """Return the start of a hash of pixels and labels."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy())
    return digest.hexdigest()[:16]
