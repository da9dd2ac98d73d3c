"""Data and classifier of the examples, and the examples of timm and peft."""

import itertools

import numpy as np
import pytest
import torch
from PIL import Image

from examples.classifier import ImageClassifier, cosine_factor, parameter_groups
from examples.data import ImageData, load_image_folder_tensors
from lightning_actprune import ActivationMemoryMonitor, ActivationPruning
from tests.examples.image_folders import write_images
from tests.support.helpers import pruned_layers


def test_digits_are_split_once_and_evenly():
    first, second = ImageData(), ImageData()
    first.setup("fit")
    second.setup("test")
    assert (len(first.train_set), len(first.test_set)) == (1437, 360)
    assert torch.equal(first.test_set.images, second.test_set.images)
    assert set(np.bincount(first.test_set.labels)) <= {35, 36, 37}
    images, labels = next(iter(first.test_dataloader()))
    assert (images.shape, labels.shape) == ((64, 1, 8, 8), (64,))
    assert abs(images.mean()) < 0.05
    assert abs(images.std() - 1) < 0.05


@pytest.mark.parametrize("dataset", ["folder", "cifar10"])
def test_image_folders_are_read(image_folder, dataset):
    data = ImageData(dataset, str(image_folder), image_size=16, batch_size=24)
    data.prepare_data()  # downloads nothing: the folder is there
    data.setup("fit")
    assert (data.num_classes, data.channels, len(data.train_set), len(data.val_set)) == (3, 3, 24, 12)
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (24, 3, 16, 16)
    assert sorted(labels.tolist()) == [0] * 8 + [1] * 8 + [2] * 8
    means = torch.stack([image.mean() for image, _ in (data.test_set[i] for i in range(12))])
    assert means[:4].max() < means[4:8].min() < means[4:8].max() < means[8:].min()


def test_a_part_of_each_class_is_read(image_folder):
    data = ImageData("folder", str(image_folder), image_size=8, batch_size=8, images_per_class=2)
    data.setup("fit")
    assert [len(part) for part in (data.train_set, data.val_set, data.test_set)] == [6, 6, 6]
    assert [label for _, label in data.train_set] == [0, 0, 1, 1, 2, 2]


def test_augmentation_varies_training_images_only(tmp_path):
    root = str(write_images(tmp_path / "large", size=40, train=1, test=1))
    for augmentation in ("crop", "resized_crop", "none"):
        data = ImageData("folder", root, image_size=28, augmentation=augmentation)
        data.setup("fit")
        train, val = ([part[0][0] for _ in range(8)] for part in (data.train_set, data.val_set))
        assert {image.shape for image in train + val} == {(3, 28, 28)}
        assert all(torch.equal(image, val[0]) for image in val)
        assert all(torch.equal(image, train[0]) for image in train) == (augmentation == "none")


def test_unknown_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`dataset`.*'mnist'"):
        ImageData("mnist")
    with pytest.raises(ValueError, match=r"`augmentation`.*'mixup'"):
        ImageData(augmentation="mixup")
    with pytest.raises(FileNotFoundError, match=r"`root`.*train/"):
        ImageData("folder", str(tmp_path))


def test_image_folder_tensors_are_the_pixels_and_are_cached(tmp_path):
    root = write_images(tmp_path / "tiny")
    train_x, train_y, test_x, test_y = load_image_folder_tensors(root, workers=2)
    assert (train_x.shape, train_x.dtype, test_x.shape) == ((24, 3, 8, 8), torch.uint8, (12, 3, 8, 8))
    assert train_y.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    assert test_y.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    path = root / "test" / "dog" / "03.png"
    assert np.array_equal(test_x[7].permute(1, 2, 0).numpy(), np.asarray(Image.open(path)))

    cache = tmp_path / "tiny.tensors.pt"
    written = cache.stat().st_mtime_ns
    assert torch.equal(load_image_folder_tensors(root)[0], train_x)
    assert cache.stat().st_mtime_ns == written
    Image.fromarray(np.full((8, 8, 3), 9, np.uint8)).save(path)
    assert load_image_folder_tensors(root)[2][7].unique().tolist() == [9]

    Image.new("RGB", (9, 8)).save(root / "train" / "dog" / "99.png")
    with pytest.raises(ValueError, match=r"\(8, 9\) in .*99\.png"):
        load_image_folder_tensors(root)


def test_learning_rate_warms_up_and_ends_at_zero():
    rates = [cosine_factor(step, 100, 0.05) for step in range(101)]
    assert rates[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1])
    assert all(a >= b for a, b in itertools.pairwise(rates[5:]))
    assert rates[100] == pytest.approx(0)


def test_only_matrices_decay():
    model = ImageClassifier(model="resmlp_tiny", image_size=8, patch_size=2, channels=1)
    decayed, plain = parameter_groups(model.model, 0.1)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2, 4}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def found_in(trainer, kind):
    return next(callback for callback in trainer.callbacks if isinstance(callback, kind))


@pytest.mark.foreign
def test_timm_vit():
    from examples import timm_vit

    trainer = timm_vit.main(epochs=1, limit_train_batches=2)
    assert trainer.global_step == 2
    assert {layer.operator for layer in found_in(trainer, ActivationPruning).report.converted} >= {"linear", "norm"}
    assert found_in(trainer, ActivationMemoryMonitor).report.saved_fraction > 0.8
    assert pruned_layers(trainer.lightning_module) == []


@pytest.mark.foreign
def test_lora():
    from examples import lora

    model, trainer = lora.main(max_steps=2)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if "lora_" in name}
    assert sum(name.endswith("lora_B.default.weight") for name in trained) == 3 * 4
    assert all(model.get_parameter(name).abs().max() > 0 for name in trained)  # lora_B begins at zero
    converted = {layer.fqn for layer in found_in(trainer, ActivationPruning).report.converted}
    assert any(name.endswith("lora_A.default") for name in converted)
    assert found_in(trainer, ActivationMemoryMonitor).report.saved_fraction > 0.5
    assert pruned_layers(trainer.lightning_module) == []
