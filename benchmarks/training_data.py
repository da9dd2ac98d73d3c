"""The data of `trainings.py` on one device, from which a captured step can gather its batches.

Images come from a folder with `train/<class>/` and `test/<class>/` or from torchvision's CIFAR-10. Text is the source
of Python's standard library, or all text that installed packages ship. Without a folder, some images are made up here,
to see whether everything runs.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import platform
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.datasets import CIFAR10

from examples.data import load_image_folder_tensors

Model = Callable[[Tensor], Tensor]
WAYS = 8
"""Ways in which an image can stand: turned by quarters, and as a negative."""
PADDING = 4
EPOCH_BATCHES = 75
"""Batches of text that count as an epoch; windows are drawn at random."""
WINDOWS = 2048
"""Most windows of validation text."""
CODE = {".py", ".pyi", ".pyx", ".js", ".css", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".inl"}
SUFFIXES = CODE | {".md", ".rst", ".txt", ".html"}
LONGEST = 2_000_000
"""Bytes; longer files of packages are data, not text."""


def fingerprint(*parts: Any) -> str:
    """Return the start of a hash of buffers, by which records name data and weights."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


# === Images =======================================================================================


class Images:
    """Images as bytes on one device: padded training images, out of which windows are cut, and test images.

    Args:
        root: Folder of images, or of torchvision's CIFAR-10; without one, a few hundred made-up images.
        device: Where the tensors live.
        strong: Whether training images get RandAugment and mixup.
        part: `first` or `second` half of the classes, or `None` for all.
        turned: Whether each image stands in one of eight ways, and each way makes classes of its own. That is a harder
            task: eight times the classes with an eighth of the images each.
    """

    def __init__(
        self,
        root: Path | None,
        device: torch.device,
        strong: bool = False,
        part: str | None = None,
        turned: bool = False,
    ) -> None:
        train, labels, test, test_labels = load_images(root)
        if part is not None:
            count = int(labels.max()) + 1
            classes = range(count // 2) if part == "first" else range(count // 2, count)
            train, labels = of_classes(train, labels, classes)
            test, test_labels = of_classes(test, test_labels, classes)
        if turned:
            labels, test_labels = (WAYS * each + torch.arange(len(each)) % WAYS for each in (labels, test_labels))
            test = turn(test, test_labels % WAYS)
        self.device, self.strong, self.turned = device, strong, turned
        self.size, self.classes = train.shape[-1], int(labels.max()) + 1
        self.facts = {
            "dataset": "made up" if root is None else "images",
            "train_images": len(labels),
            "test_images": len(test_labels),
            "image_size": self.size,
            "classes": self.classes,
            "sha256": fingerprint(*(tensor.contiguous().numpy() for tensor in (train, labels, test, test_labels))),
            "augmentation": "RandAugment and mixup" if strong else None,
            "turned": turned or None,
        }
        self.shape = {"image_size": self.size, "num_classes": self.classes}
        sample = train[:: max(1, len(train) // 5000)].float()
        self.mean = sample.mean((0, 2, 3)).view(-1, 1, 1).to(device)
        self.std = sample.std((0, 2, 3)).view(-1, 1, 1).to(device)
        self.padded = F.pad(train.to(device), [PADDING] * 4)
        self.labels, self.test, self.test_labels = labels.to(device), test.to(device), test_labels.to(device)
        self.pixels = torch.arange(self.size, device=device)

    def epoch_batches(self, batch: int) -> int:
        """Return the number of full batches of `batch` images."""
        if batch > len(self.labels):
            raise ValueError(f"`--batch-size` must be at most {len(self.labels)}, the training images, got {batch}.")
        return len(self.labels) // batch

    def draw(self, steps: int, batch: int, generator: torch.Generator) -> Tensor:
        """Return the choices of an epoch `[steps, 4 or 9, batch]`: image, top and left, mirrored, RandAugment."""
        order = torch.randperm(len(self.labels), generator=generator)[: steps * batch].view(steps, 1, batch)
        window = torch.randint(2 * PADDING + 1, (steps, 2, batch), generator=generator)
        mirrored = torch.randint(2, (steps, 1, batch), generator=generator)
        more = [drawn(steps, batch, generator)] if self.strong else []
        return torch.cat([order, window, mirrored, *more], dim=1).to(self.device)

    def batch(self, choices: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalised images and their labels; with mixup, labels are shares of classes `[batch, classes]`."""
        index, top, left, mirrored = choices[:4].unsqueeze(-1)
        rows = top + self.pixels
        columns = left + torch.where(mirrored == 1, self.pixels.flip(0), self.pixels)
        images = self.padded[index.unsqueeze(-1), :, rows.unsqueeze(2), columns.unsqueeze(1)]  # [batch, h, w, channels]
        images, labels = images.permute(0, 3, 1, 2), self.labels[index.squeeze(-1)]
        if self.strong:
            images = augment(images.float(), choices[4:])
        if self.turned:  # last, so that mirroring does not exchange two ways
            images = turn(images, labels % WAYS)
        images = self.normalise(images)
        return mix(images, labels, self.classes, choices[4:]) if self.strong else (images, labels)

    def normalise(self, images: Tensor) -> Tensor:
        """Return bytes as normalised floats."""
        return (images.float() - self.mean) / self.std

    def score(self, model: Model, limit: int | None) -> float:
        """Return the percentage of test images, `limit` of them if given, that `model` classifies correctly."""
        stride = max(1, len(self.test) // (limit or len(self.test)))  # folders are sorted by class
        test, labels = self.test[::stride], self.test_labels[::stride]
        pairs = zip(test.split(500), labels.split(500), strict=True)
        correct = sum((model(self.normalise(pixels)).argmax(1) == truth).sum().item() for pixels, truth in pairs)
        return 100 * correct / len(labels)


def load_images(root: Path | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images `[n, 3, height, width]` in uint8, their labels, test images and their labels."""
    if root is None:
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(320) % 10
        patterns = torch.randint(256, (10, 3, 16, 16), generator=generator)
        noise = torch.randint(256, (320, 3, 16, 16), generator=generator)
        images = ((patterns[labels] + noise) // 2).byte()
        return images[:256], labels[:256], images[256:], labels[256:]
    if (root / "train").is_dir():
        return load_image_folder_tensors(root)
    parts = [CIFAR10(str(root), train=train, download=True) for train in (True, False)]
    (train, labels), (test, test_labels) = (
        (torch.from_numpy(part.data).permute(0, 3, 1, 2), torch.tensor(part.targets)) for part in parts
    )
    return train, labels, test, test_labels


def of_classes(images: Tensor, labels: Tensor, classes: range) -> tuple[Tensor, Tensor]:
    """Return the images of some classes, with labels from 0."""
    chosen = (labels >= classes.start) & (labels < classes.stop)
    return images[chosen], labels[chosen] - classes.start


def turn(images: Tensor, ways: Tensor) -> Tensor:
    """Return images turned by `ways % 4` quarters, from 4 on as negatives; `ways` is `[batch]`."""
    ways = ways.view(-1, 1, 1, 1)
    turned = images
    for quarters in range(1, 4):
        turned = torch.where(ways % 4 == quarters, images.rot90(quarters, (2, 3)), turned)
    return torch.where(ways >= 4, 255 - turned, turned)


# === RandAugment and mixup, without branches, so that a step can be captured ======================

# RandAugment (Cubuk et al. 2020, arXiv 1909.13719) changes each image by two of fourteen operations of strength 9 of
# 30, as in torchvision. Mixup (Zhang et al. 2018, arXiv 1710.09412) trains on what lies between two images:
#     X = lam X_i + (1 - lam) X_j        Y = lam Y_i + (1 - lam) Y_j        lam ~ Beta(0.8, 0.8), one per batch

STRENGTH = 9 / 30
PARTS = 1000
"""Resolution of `lam`, which is stored as an integer."""
SHEAR, MOVE, TURN, BLEND = 0.3 * STRENGTH, 150 / 331 * STRENGTH, math.radians(30 * STRENGTH), 0.9 * STRENGTH
SOLAR, LOWEST_BITS = 255 * (1 - STRENGTH), 1
GEOMETRIC = "identity", "shear_x", "shear_y", "move_x", "move_y", "rotate"


def drawn(steps: int, batch: int, generator: torch.Generator) -> Tensor:
    """Return what is drawn for the images of so many steps, `[steps, 5, batch]`: two operations, two signs, `lam`."""
    operations = torch.randint(len(GEOMETRIC) + len(COLOURS), (steps, 2, batch), generator=generator)
    signs = torch.randint(2, (steps, 2, batch), generator=generator)
    beta = random.Random(int(torch.randint(2**31, (), generator=generator)))  # noqa: S311 - nothing is secret
    lam = torch.tensor([round(PARTS * beta.betavariate(0.8, 0.8)) for _ in range(steps)])
    return torch.cat([operations, signs, lam.view(-1, 1, 1).expand(-1, 1, batch)], dim=1)


def augment(images: Tensor, choices: Tensor) -> Tensor:
    """Return images `[batch, 3, height, width]` of whole numbers to 255, changed by two operations each."""
    first, second, first_sign, second_sign, _ = choices
    for operation, sign in ((first, 2.0 * first_sign - 1), (second, 2.0 * second_sign - 1)):
        changed = moved(images, operation, sign)
        for number, colour in enumerate(COLOURS, len(GEOMETRIC)):
            chosen = (operation == number).view(-1, 1, 1, 1)
            changed = torch.where(chosen, colour(images, sign.view(-1, 1, 1, 1)), changed)
        images = changed
    return images


def mix(images: Tensor, labels: Tensor, classes: int, choices: Tensor) -> tuple[Tensor, Tensor]:
    """Return images mixed with those of the batch in reverse, and their shares of the classes."""
    lam = choices[-1, 0] / PARTS
    targets = (labels.unsqueeze(1) == torch.arange(classes, device=labels.device)).to(images.dtype)
    return torch.lerp(images.flip(0), images, lam), torch.lerp(targets.flip(0), targets, lam)


def moved(images: Tensor, operation: Tensor, sign: Tensor) -> Tensor:
    """Return the images sheared, moved or turned: the nearest pixel, black where there is none."""
    height, width = images.shape[-2:]
    like = {"device": images.device, "dtype": torch.float32}
    y, x = torch.arange(height, **like).view(-1, 1) + 0.5, torch.arange(width, **like) + 0.5
    amount = {name: ((operation == i) * sign).view(-1, 1, 1) for i, name in enumerate(GEOMETRIC)}
    angle = TURN * amount["rotate"]
    across, down = x - width / 2, y - height / 2
    source_x = torch.cos(angle) * across - torch.sin(angle) * down + width / 2
    source_y = torch.sin(angle) * across + torch.cos(angle) * down + height / 2
    source_x = source_x + SHEAR * amount["shear_x"] * y - int(MOVE * width) * amount["move_x"]
    source_y = source_y + SHEAR * amount["shear_y"] * x - int(MOVE * height) * amount["move_y"]
    column, row = source_x.floor().long(), source_y.floor().long()
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    place = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).flatten(1)
    pixels = images.flatten(2).gather(2, place.unsqueeze(1).expand(-1, images.shape[1], -1))
    return pixels.view_as(images) * inside.unsqueeze(1)


def blended(images: Tensor, other: Tensor, sign: Tensor) -> Tensor:
    """Return images moved away from `other`, or towards it."""
    return torch.lerp(other.expand_as(images), images, 1 + BLEND * sign).clamp(0, 255).floor()


def grey(images: Tensor) -> Tensor:
    """Return the brightness of the pixels."""
    red, green, blue = images.split(1, 1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue).floor()


def sharpness(images: Tensor, sign: Tensor) -> Tensor:
    """Blurred or sharpened, except at the border."""
    inner = images[..., 1:-1, 1:-1]
    blurred = (F.avg_pool2d(images, 3, 1) * 9 + 4 * inner) / 13
    return F.pad(blended(inner, blurred.round(), sign) - inner, [1] * 4) + images


def autocontrast(images: Tensor, sign: Tensor) -> Tensor:
    """Stretched from black to white in each channel."""
    least, most = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    scaled = (images - least) * (255 / (most - least).clamp_min(1))
    return torch.where(most > least, scaled.clamp(0, 255).floor(), images)


def equalize(images: Tensor, sign: Tensor) -> Tensor:
    """With all levels equally frequent in each channel, as far as possible."""
    levels = images.flatten(2).long()
    counts = torch.zeros(*levels.shape[:2], 256, device=images.device, dtype=torch.long)
    counts.scatter_add_(2, levels, torch.ones_like(levels))
    below = counts.cumsum(2)
    last = counts.gather(2, levels.amax(2, keepdim=True))
    step = (levels.shape[2] - last) // 255
    table = F.pad((below + step // 2) // step.clamp_min(1), [1, 0])[..., :-1].clamp(0, 255)
    equal = table.gather(2, levels).view_as(images).to(images.dtype)
    return torch.where(step.unsqueeze(-1) > 0, equal, images)


COLOURS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda images, sign: blended(images, torch.zeros_like(images), sign),  # brightness
    lambda images, sign: blended(images, grey(images), sign),  # colour
    lambda images, sign: blended(images, grey(images).mean((2, 3), keepdim=True), sign),  # contrast
    sharpness,
    lambda images, _: (images / 2**LOWEST_BITS).floor() * 2**LOWEST_BITS,  # posterize
    lambda images, _: torch.where(images >= SOLAR, 255 - images, images),  # solarize
    autocontrast,
    equalize,
)

# === Text =========================================================================================


class Text:
    """Bytes of training text and fixed windows of validation text, the last tenth.

    Args:
        root: Folder of Python sources; by default the standard library's.
        device: Where the tensors live.
        context: Bytes that the model sees at a time; a window has one more.
        packages: Whether to take all text that installed packages ship instead.
    """

    shape: dict[str, int] = {}  # noqa: RUF012 - never written to

    def __init__(self, root: Path | None, device: torch.device, context: int, packages: bool = False) -> None:
        text = packages_text() if packages else read_sources(root or Path(sysconfig.get_paths()["stdlib"]))
        name = "packages" if packages else "text" if root else f"stdlib-{platform.python_version()}"
        self.device, self.facts = device, {"dataset": name, "bytes": len(text), "sha256": fingerprint(text)}
        held_out = len(text) // 10
        if held_out < context + 1:
            raise ValueError(f"`--root` must hold more than {10 * (context + 1)} bytes of *.py files, got {len(text)}.")
        train, validation = torch.frombuffer(bytearray(text), dtype=torch.uint8).split([len(text) - held_out, held_out])
        count = min(WINDOWS, held_out // (context + 1))
        starts, offsets = torch.arange(count) * (held_out // count), torch.arange(context + 1)
        self.windows = validation[starts[:, None] + offsets].to(device)
        self.train, self.offsets = train.to(device), offsets.to(device)

    def epoch_batches(self, batch: int) -> int:
        """Return the number of batches that count as an epoch."""
        return EPOCH_BATCHES

    def draw(self, steps: int, batch: int, generator: torch.Generator) -> Tensor:
        """Return where the windows of an epoch start, `[steps, batch]`."""
        last = len(self.train) - len(self.offsets)
        return torch.randint(last + 1, (steps, batch), generator=generator).to(self.device)

    def batch(self, choices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bytes of the windows that start at `choices` `[batch]`, and the bytes that follow each."""
        windows = self.train[choices.unsqueeze(-1) + self.offsets].long()
        return windows[:, :-1], windows[:, 1:]

    def score(self, model: Model, limit: int | None) -> float:
        """Return the negative loss per byte over the validation windows, the first `limit` of them if given."""
        losses = []
        for windows in self.windows[:limit].long().split(64):
            scores = model(windows[:, :-1]).float().flatten(0, 1)
            losses.append(F.cross_entropy(scores, windows[:, 1:].flatten(), reduction="none"))
        return -torch.cat(losses).mean().item()


def read_sources(root: Path) -> bytes:
    """Return the Python sources below `root`, sorted by their path, without those of installed packages."""
    names = [path.relative_to(root) for path in root.rglob("*.py") if path.is_file()]
    names = [name for name in names if not {"site-packages", "dist-packages"} & set(name.parts)]
    return b"".join((root / name).read_bytes() for name in sorted(names, key=Path.as_posix))


def packages_text() -> bytes:
    """Return the text that installed packages ship, each file once, in the order of their hashes, so well mixed."""
    contents = {}
    for package in importlib.metadata.distributions():
        for file in package.files or ():
            path = Path(str(package.locate_file(file)))
            if path.suffix.lower() in SUFFIXES and path.is_file() and path.stat().st_size <= LONGEST:
                content = path.read_bytes()
                contents[hashlib.sha256(content).digest()] = content
    return b"".join(content for _, content in sorted(contents.items()))
