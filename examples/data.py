"""Image data sets for the examples: scikit-learn's digits, CIFAR, or any folder of images, as one data module.

`transforms` turns an image into a sample of a batch. Every data set has one held-out part for both validation and test,
since nothing is selected on it; a folder may have both `val/` and `test/`.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import lightning as L
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.datasets import CIFAR10, CIFAR100, ImageFolder
from torchvision.transforms import v2

from examples.transforms import AUGMENTATIONS, Augmentation, plain_transform, train_transform

DATASETS = ("digits", "cifar10", "cifar100", "folder")
IMAGE_SIZES = {"digits": 8, "cifar10": 32, "cifar100": 32, "folder": 224}
SPLIT_SEED = 0
POOL_ABOVE = 2000
"""Number of images above which decoding them in several processes pays."""


class TensorImages(Dataset):
    """Images in one tensor.

    Args:
        images: Images `[n, channels, height, width]`.
        labels: Class indices `[n]`.
        transform: Applied to each image.
    """

    def __init__(self, images: Tensor, labels: Tensor, transform: v2.Transform) -> None:
        self.images, self.labels, self.transform = images, labels.tolist(), transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.images[index]), self.labels[index]


class ImageData(L.LightningDataModule):
    """One of the example data sets.

    Args:
        dataset: `digits` (1797 real 8x8 grey images that come with scikit-learn), `cifar10`, `cifar100`, or `folder`.
        root: Folder of the data. With `train/` and `test/` or `val/` subfolders of one folder per class, the images are
            read from there for any data set but digits; otherwise CIFAR is downloaded to it.
        image_size: Height and width of the samples; by default 8 for digits, 32 for CIFAR, 224 for a folder.
        batch_size: Images per batch.
        num_workers: Loader processes.
        augmentation: `crop`, `resized_crop` or `none` (see `transforms`); digits are never augmented.
        images_per_class: Of a folder, only the first images of each class in each part; by default all.
    """

    def __init__(
        self,
        dataset: str = "digits",
        root: str = "data",
        image_size: int | None = None,
        batch_size: int = 64,
        num_workers: int = 0,
        augmentation: Augmentation = "crop",
        images_per_class: int | None = None,
    ) -> None:
        super().__init__()
        if dataset not in DATASETS:
            raise ValueError(f"`dataset` must be one of {DATASETS}, got {dataset!r}. HINT: pass one of these names.")
        if augmentation not in AUGMENTATIONS:
            raise ValueError(
                f"`augmentation` must be one of {AUGMENTATIONS}, got {augmentation!r}. HINT: pass one of these names."
            )
        self.augmentation, self.images_per_class = augmentation, images_per_class
        self.dataset, self.root = dataset, Path(root).expanduser()
        self.image_size = image_size or IMAGE_SIZES[dataset]
        self.batch_size, self.num_workers = batch_size, num_workers
        self.channels = 1 if dataset == "digits" else 3
        self.from_folder = dataset == "folder" or (dataset != "digits" and (self.root / "train").is_dir())
        self.num_classes = self._count_classes()

    def _count_classes(self) -> int:
        if self.from_folder:
            return sum(entry.is_dir() for entry in split_folder(self.root, "train").iterdir())
        return 100 if self.dataset == "cifar100" else 10

    def prepare_data(self) -> None:
        """Download CIFAR unless it is there."""
        if self.dataset.startswith("cifar") and not self.from_folder:
            source = CIFAR10 if self.dataset == "cifar10" else CIFAR100
            source(str(self.root), train=True, download=True)

    def setup(self, stage: str) -> None:
        """Open the parts of the data set."""
        if self.dataset == "digits":
            self._setup_digits()
        elif self.from_folder:
            self.train_set = self._open_folder("train", train=True)
            self.val_set, self.test_set = self._open_folder("val"), self._open_folder("test")
        else:
            source = CIFAR10 if self.dataset == "cifar10" else CIFAR100
            self.train_set = source(str(self.root), train=True, transform=self._transform(train=True))
            self.val_set = self.test_set = source(str(self.root), train=False, transform=self._transform())

    def _setup_digits(self) -> None:
        # Imported here: only this data set needs scikit-learn.
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)
        labels = torch.from_numpy(digits.target)
        train, test = train_test_split(
            np.arange(len(labels)), test_size=0.2, random_state=SPLIT_SEED, stratify=digits.target
        )
        self.train_set = TensorImages(images[train], labels[train], self._transform(train=True))
        self.val_set = self.test_set = TensorImages(images[test], labels[test], self._transform())

    def _open_folder(self, part: str, train: bool = False) -> Dataset:
        images = ImageFolder(str(split_folder(self.root, part)), transform=self._transform(train))
        return images if self.images_per_class is None else first_of_each_class(images, self.images_per_class)

    def _transform(self, train: bool = False) -> v2.Transform:
        if train and self.dataset != "digits":  # a mirrored digit is another sign
            return train_transform(self.dataset, self.image_size, self.augmentation)
        return plain_transform(self.dataset, self.image_size, "none" if self.dataset == "digits" else self.augmentation)

    def _loader(self, images: Dataset, train: bool = False) -> DataLoader:
        return DataLoader(
            images,
            self.batch_size,
            shuffle=train,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def train_dataloader(self) -> DataLoader:
        """Return the shuffled training images."""
        return self._loader(self.train_set, train=True)

    def val_dataloader(self) -> DataLoader:
        """Return the validation images."""
        return self._loader(self.val_set)

    def test_dataloader(self) -> DataLoader:
        """Return the test images."""
        return self._loader(self.test_set)


def split_folder(root: Path, part: str) -> Path:
    """Return the folder of `train`, `val` or `test`; `val` and `test` replace each other if one is missing."""
    names = {"train": ["train"], "val": ["val", "test"], "test": ["test", "val"]}[part]
    for name in names:
        if (root / name).is_dir():
            return root / name
    raise FileNotFoundError(
        f"`root` must be a folder with the subfolders train/ and test/ or val/, got {str(root)!r} without {names[0]}/. "
        "HINT: unpack the images so that each class has its folder in train/ and in test/."
    )


def first_of_each_class(images: ImageFolder, count: int) -> Subset:
    """Return `images` with the first `count` of each class only: the same ones in every run."""
    seen: Counter[int] = Counter()
    chosen = []
    for index, label in enumerate(images.targets):
        seen[label] += 1
        if seen[label] <= count:
            chosen.append(index)
    return Subset(images, chosen)


def load_image_folder_tensors(root: str | Path, workers: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Decode the folder of images at `root` once and return it as tensors.

    The result is cached beside `root` in `<root>.tensors.pt` until a file changes.

    Args:
        root: Folder with `train/` and `test/` or `val/`, each with one folder per class; all images of one size.
        workers: Decoding processes; by default one per core for many images, 0 (this process) for few.

    Returns:
        Training images `[n, 3, height, width]` in uint8, their labels, test images, their labels.
    """
    root = Path(root).expanduser().resolve()
    parts = [ImageFolder(str(split_folder(root, part))) for part in ("train", "test")]
    files = [[path for path, _ in part.samples] for part in parts]
    cache = root.with_name(f"{root.name}.tensors.pt")
    fingerprint = _fingerprint(root, files[0] + files[1])
    if cache.is_file():
        stored = torch.load(cache, weights_only=True)
        if stored["fingerprint"] == fingerprint:
            return tuple(stored["tensors"])
    train, test = (_decode_all(paths, workers) for paths in files)
    labels = [torch.tensor(part.targets) for part in parts]
    tensors = (train, labels[0], test, labels[1])
    unfinished = cache.with_name(f"{cache.name}.{os.getpid()}")  # several programs may want it at once
    torch.save({"fingerprint": fingerprint, "tensors": list(tensors)}, unfinished)
    unfinished.replace(cache)
    return tensors


def _fingerprint(root: Path, paths: list[str]) -> str:
    """Return a hash of the names, sizes and times of the files."""
    digest = hashlib.sha256()
    for path in paths:
        stat = Path(path).stat()
        digest.update(f"{os.path.relpath(path, root)} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _decode(path: str) -> np.ndarray:
    """Return the image at `path` as an array `[3, height, width]` of bytes."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


def _decode_chunk(paths: list[str]) -> list[np.ndarray]:
    return [_decode(path) for path in paths]


def _decode_all(paths: list[str], workers: int | None = None) -> Tensor:
    """Return all images as one tensor, decoded by `workers` processes."""
    if workers is None:
        workers = (os.cpu_count() or 1) if len(paths) > POOL_ABOVE else 0
    chunks = [paths[start : start + 500] for start in range(0, len(paths), 500)]
    if workers:
        # Forked workers need not import torch again; elsewhere than on Linux forking is unsafe or missing.
        context = get_context("fork" if sys.platform == "linux" else "spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            images = [image for chunk in pool.map(_decode_chunk, chunks) for image in chunk]
    else:
        images = [image for chunk in chunks for image in _decode_chunk(chunk)]
    for path, image in zip(paths, images, strict=True):
        if image.shape != images[0].shape:
            raise ValueError(
                f"`root` must hold images of one size, got {image.shape[1:]} in {path!r} and {images[0].shape[1:]} in "
                f"{paths[0]!r}. HINT: resize the images first, or train with ImageData, which resizes while loading."
            )
    return torch.from_numpy(np.stack(images))
