"""The examples run and do what they say: models, data, the training script and the command line."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from examples import cli, train
from examples.classifier import ImageClassifier, cosine_factor, parameter_groups
from examples.data import ImageData, load_image_folder_tensors
from examples.models import MODELS, build_model
from examples.models.resmlp import ResMLPBlock, default_layer_scale
from tests.examples.image_folders import write_images

ROOT = Path(__file__).resolve().parents[2]


# Models


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("resmlp_s12", 15_350_872), ("resmlp_s24", 30_020_680), ("resmlp_s36", 44_690_488), ("resmlp_b24", 129_138_280)],
)
def test_parameter_counts_are_the_published_ones(name, parameters):
    with torch.device("meta"):
        model = MODELS[name]()
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(("image_size", "patch_size", "channels"), [(32, 4, 3), (8, 2, 1), (48, 16, 3)])
def test_s12_takes_other_image_and_patch_sizes(image_size, patch_size, channels):
    model = MODELS["resmlp_s12"](image_size=image_size, patch_size=patch_size, in_channels=channels, num_classes=7)
    assert len(model.blocks) == 12
    assert model.blocks[0].token_mix.in_features == (image_size // patch_size) ** 2
    assert model(torch.randn(2, channels, image_size, image_size)).shape == (2, 7)


def test_block_computes_the_formula():
    torch.manual_seed(0)
    block = ResMLPBlock(dim=6, tokens=5, layer_scale=0.3)
    for p in block.parameters():
        nn.init.normal_(p, std=0.5)
    x = torch.randn(2, 5, 6)
    mixed = torch.einsum("ut,btd->bud", block.token_mix.weight, block.affine1.weight * x + block.affine1.bias)
    y = x + block.scale1.weight * (mixed + block.token_mix.bias[:, None])
    hidden = (block.affine2.weight * y + block.affine2.bias) @ block.fc1.weight.T + block.fc1.bias
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    expected = y + block.scale2.weight * (hidden @ block.fc2.weight.T + block.fc2.bias)
    torch.testing.assert_close(block(x), expected)


def test_token_mixing_gets_a_view_that_lies_along_the_channels():
    model = build_model("resmlp_tiny", image_size=8, patch_size=2, in_channels=1, num_classes=10)
    strides = []
    for block in model.blocks:
        block.token_mix.register_forward_pre_hook(lambda _, inputs: strides.append(inputs[0].stride()))
    model(torch.randn(3, 1, 8, 8))
    assert strides == [(16 * 128, 1, 128)] * 3


def test_layer_scale_follows_the_depth():
    assert [default_layer_scale(depth) for depth in (12, 18, 24, 36)] == [0.1, 0.1, 1e-5, 1e-6]
    with torch.device("meta"):
        assert MODELS["resmlp_b24"](depth=1).blocks[0].scale1.weight.shape == (768,)
    assert MODELS["resmlp_b24"](dim=32, depth=1).blocks[0].scale1.weight[0].item() == pytest.approx(1e-6)


def test_models_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match=r"`image_size` must be a multiple of `patch_size`, got 32 and 5"):
        MODELS["resmlp_s12"](image_size=32, patch_size=5)
    with pytest.raises(ValueError, match=r"`name` must be one of .*got 'vgg'"):
        build_model("vgg")


# Data


def test_digits_are_split_once_and_evenly():
    first, second = ImageData(), ImageData()
    first.setup("fit")
    second.setup("test")
    assert (len(first.train_set), len(first.test_set)) == (1437, 360)
    assert torch.equal(first.test_set.images, second.test_set.images)
    assert set(np.bincount(first.test_set.labels)) <= {35, 36, 37}
    images, labels = next(iter(first.test_dataloader()))
    assert images.shape == (64, 1, 8, 8)
    assert labels.shape == (64,)
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


def test_unknown_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`dataset` must be one of .*got 'mnist'"):
        ImageData("mnist")
    with pytest.raises(FileNotFoundError, match=r"`root` must be a folder with the subfolders train/"):
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


def test_image_folder_tensors_need_one_size(tmp_path):
    root = write_images(tmp_path / "tiny")
    Image.new("RGB", (9, 8)).save(root / "train" / "dog" / "99.png")
    with pytest.raises(ValueError, match=r"images of one size, got \(8, 9\) in .*99\.png"):
        load_image_folder_tensors(root)


# Classifier


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


# Scripts


@pytest.fixture
def _threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_threads")
def test_train_compares_dense_and_pruned(capsys):
    options = "--epochs 1 --limit-batches 3 --accelerator cpu --precision 32-true --sparsity 0.75"
    dense, pruned = train.main(options.split())
    assert (dense["method"], pruned["method"]) == ("dense", "pruned")
    assert dense["layers"] == []
    assert dense["stored_bytes"] == dense["dense_bytes"]
    assert pruned["dense_bytes"] == pytest.approx(dense["dense_bytes"], rel=0.02)
    assert pruned["stored_bytes"] < 0.8 * dense["stored_bytes"]
    assert {layer["fqn"] for layer in pruned["layers"]} >= {f"model.blocks.{i}.fc{j}" for i in range(3) for j in (1, 2)}
    # fc1's input: 64 images of 16 tokens of 128 floats, of whose blocks a quarter is stored, plus its positions.
    fc1 = next(layer for layer in pruned["layers"] if layer["fqn"] == "model.blocks.0.fc1")
    assert fc1["dense_bytes"] == 64 * 16 * 128 * 4
    assert 0.25 < fc1["stored_bytes"] / fc1["dense_bytes"] < 0.26
    table = capsys.readouterr().out
    assert "Accuracy and activation memory per step" in table
    assert "pruned layers" in table
    assert "    blocks.2.fc2" in table


def test_command_line_trains_from_yaml(tmp_path):
    script, config = ROOT / "examples" / "cli.py", ROOT / "examples" / "configs" / "digits.yaml"
    command = [sys.executable, str(script), "fit", "--config", str(config), "--trainer.fast_dev_run=true"]
    command.append("--trainer.accelerator=cpu")
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=one_thread, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "`max_steps=1` reached" in done.stdout + done.stderr


def test_command_line_trains_cifar_from_a_folder(tmp_path, image_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fitted = []
    monkeypatch.setattr(ImageClassifier, "on_fit_end", lambda self: fitted.append(self), raising=False)
    config = str(ROOT / "examples" / "configs" / "cifar10.yaml")
    size = ["--model.depth=1", "--model.dim=64", "--data.num_workers=0", f"--data.root={image_folder}"]
    trainer = ["--trainer.fast_dev_run=true", "--trainer.accelerator=cpu"]
    cli.main(["fit", "--config", config, *size, *trainer])
    assert fitted[0].model.head.out_features == 3
    assert fitted[0].model.blocks[0].token_mix.in_features == (32 // 4) ** 2
