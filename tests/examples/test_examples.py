"""The examples run and do what they say: models, data, the training script and the command line."""

import itertools
import os
import re
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


QUICK = ["--epochs=1", "--limit-batches=3", "--accelerator=cpu", "--precision=32-true"]
MIB = 2**20


@pytest.fixture
def begun(monkeypatch, _threads):
    """The labels of the batches of each training, and the sum of its first weights, in order."""
    found, step, start = [], ImageClassifier.training_step, ImageClassifier.on_train_start

    def began(self):
        found.append([sum(p.double().abs().sum().item() for p in self.parameters())])
        return start(self)

    def stepped(self, batch, batch_idx):
        found[-1].append(batch[1].tolist())
        return step(self, batch, batch_idx)

    monkeypatch.setattr(ImageClassifier, "on_train_start", began)
    monkeypatch.setattr(ImageClassifier, "training_step", stepped)
    return found


def test_train_compares_four_methods_in_one_table(capsys, begun):
    results = {result["method"]: result for result in train.main(QUICK)}
    assert list(results) == ["dense", "paper", "max", "checkpoint"]
    assert len(begun) == 4
    assert all(one == begun[0] for one in begun)  # the same weights, and the same batches in the same order
    assert len(begun[0]) == 1 + 3
    kept = {method: result["activation_bytes"] for method, result in results.items()}
    assert 0.75 * kept["dense"] < kept["paper"] < 0.85 * kept["dense"]
    assert kept["max"] < 0.1 * kept["dense"]
    # Blocks let go of all but their inputs, 64 images of 16 tokens of 128 floats.
    assert 3 * 64 * 16 * 128 * 4 < kept["checkpoint"] < 0.1 * kept["dense"]
    assert results["checkpoint"]["test_acc"] == results["dense"]["test_acc"]
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    for row, (method, result) in zip(rows, results.items(), strict=True):
        cells = [cell.strip() for cell in row.strip("│").split("│")]
        share = f"{result['activation_bytes'] / kept['dense']:.0%}"
        assert cells[:3] == [method, f"{result['test_acc']:.2%}", f"{kept[method] / MIB:.2f} ({share})"]
        assert cells[3:] == ["-", f"{result['seconds']:.1f}"]  # no peak without a GPU


def test_the_table_shows_the_peak_that_a_gpu_tells():
    row = {"method": "max", "test_acc": 0.5, "activation_bytes": 3 * MIB, "peak_bytes": 7 * MIB // 2, "seconds": 1.0}
    args = train.parse(["--preset", "max", "--accelerator", "cpu"])
    args.on_cpu = False
    table = train.tabulate([row], args)
    assert [list(column.cells) for column in table.columns] == [["max"], ["50.00%"], ["3.00"], ["3.50"], ["1.0"]]
    assert table.caption is None
    args.on_cpu = True
    assert "No kernels run on the CPU" in train.tabulate([row], args).caption


def test_activations_are_counted_to_the_byte(begun):
    dense, paper = train.main([*QUICK, "--preset", "paper", "--sparsity", "0.75"])
    # Inputs of fc1, fc2 and the head, in fp32; the others have fewer than 64 features, or are the batch itself. Of the
    # blocks a quarter is stored, plus its positions.
    inputs = 64 * 4 * (3 * 16 * (128 + 512) + 128)
    assert 0.74 < (dense["activation_bytes"] - paper["activation_bytes"]) / inputs < 0.75


@pytest.mark.slow
def test_rules_reach_the_presets(capsys, begun):
    kept = [
        train.main([*QUICK, "--preset", "max", "--rules", rules])[1]["activation_bytes"]
        for rules in ('{"*.fc2": {"bits": 4}}', "'*.fc2': dense")
    ]
    inputs = 64 * 4 * 3 * 16 * 512
    # Four bits and the headers of the blocks, half a bit a value, of 32.
    assert (kept[1] - kept[0]) / inputs == pytest.approx(1 - 4.5 / 32, abs=0.02)
    assert "rules of the presets: {'*.fc2': 'dense'}" in capsys.readouterr().out


@pytest.mark.parametrize("given", [["--preset", "balanced", "max"], ["--methods", "dense", "balanced", "max"]])
def test_presets_are_run_besides_dense(given):
    assert train.parse(given).methods == ["dense", "balanced", "max"]
    assert train.parse(["--methods", "max", "dense", "max"]).methods == ["max", "dense"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--sparsity 1", r"--sparsity: `sparsity` must be in \[0, 1\), got 1\.0\. HINT: "),
        ("--sparsity nan", r"--sparsity: `sparsity` must be in \[0, 1\), got nan\. HINT: "),
        ("--sparsity half", r"--sparsity: must be a number, got 'half'\. HINT: "),
        ("--sparsity 0.5 --methods dense checkpoint", r"--sparsity: .* only dense, checkpoint .*0\.5\. HINT: "),
        ("--block-size 0", r"--block-size: must be a whole number >= 1, got '0'\. HINT: "),
        ("--block-size 4", r"--block-size: `block_size` must be at least 8 with bits=2, got 4\. HINT: "),
        ("--epochs 0", r"--epochs: must be a whole number >= 1, got '0'\. HINT: "),
        ("--epochs 1.5", r"--epochs: must be a whole number >= 1, got '1\.5'\. HINT: "),
        ("--batch-size 0", r"--batch-size: must be a whole number >= 1, got '0'\. HINT: "),
        ("--limit-batches 0", r"--limit-batches: must be a whole number >= 1, got '0'\. HINT: "),
        ("--num-workers -1", r"--num-workers: must be a whole number >= 0, got '-1'\. HINT: "),
        ("--threads 0", r"--threads: must be a whole number >= 1, got '0'\. HINT: "),
        ("--seed -1", r"--seed: must be a whole number >= 0, got '-1'\. HINT: "),
        ("--seed 4294967296", r"--seed: must be below 2\*\*32, got 4294967296\. HINT: "),
        ("--lr 0", r"--lr: must be a number > 0, got '0'\. HINT: "),
        ("--lr inf", r"--lr: must be a number > 0, got 'inf'\. HINT: "),
        ("--patch-size 3", r"--image-size, --patch-size: `image_size` must be a multiple .* got 8 and 3\. HINT: "),
        ("--rules [1]", r"--rules: must be a mapping in YAML or JSON, got '\[1\]'\. HINT: "),
        ("--rules {*head:dense}", r"--rules: must be a mapping in YAML or JSON, got '{\*head:dense}'\. HINT: "),
        ('--rules {"*.fc1":{"bits":5}}', r"--rules: .*`bits` must be 2, 3, 4, 8 or None, got 5\. HINT: "),
        ('--rules {"*.fc3":"dense"}', r"--rules, --preset: `rules` pattern '\*\.fc3' matches no layer"),
        ('--rules {"*.fc1":"dense"} --methods dense', r"--rules: .* only dense would be trained, got .*HINT: "),
        ("--preset maxi", r"--preset: invalid choice: 'maxi' \(choose from .*paper.*balanced.*max"),
        ("--preset max --methods dense", r"--methods: not allowed with argument --preset"),
        ("--precision 64-true", r"--precision: invalid choice: '64-true' \(choose from .*32-true"),
        ("--accelerator abacus", r"--accelerator, --precision: .*Got 'abacus' and .*HINT: --accelerator cpu"),
        ("--dataset folder --root nowhere", r"--root: `root` must be a folder with .*, got 'nowhere' .*HINT: "),
        ("--dataset cifar10 --no-download --root nowhere", r"--root: .*Looked in 'nowhere'\. HINT: .*--no-download"),
    ],
)
def test_a_bad_argument_ends_train_before_any_training(given, says, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "train", lambda *_: pytest.fail("a training began"))
    with pytest.raises(SystemExit) as done:
        train.main(given.split())
    assert done.value.code == 2
    shown = capsys.readouterr()
    assert re.search(r"error: argument " + says, shown.err)
    assert "Training" not in shown.out


@pytest.mark.slow  # a process that imports everything: the same in this one is in test_cli
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
