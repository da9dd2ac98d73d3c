"""The command line of the examples: its configurations, what overrides them, and the one that a run leaves behind."""

from pathlib import Path

import pytest
import torch
import yaml

from examples import cli
from examples.classifier import ImageClassifier
from examples.data import ImageData
from lightning_actprune import ActivationPruning
from lightning_actprune.schedules import CubicSchedule
from tests.examples.image_folders import write_images

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"
QUICK = "--trainer.accelerator=cpu --trainer.max_epochs=1 --trainer.limit_train_batches=2 --trainer.limit_val_batches=1"
IN_FOLDER = "--data.num_workers=0 --data.batch_size=4 --model.dim=64 --model.depth=1"


def printed(capsys, config, *options):
    """Return the whole configuration that the command line makes of a file."""
    with pytest.raises(SystemExit) as done:
        cli.main(["fit", "--config", str(config), *options, "--print_config"])
    assert done.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def holds(whole, part):
    """Return whether everything in ``part`` stands in ``whole`` too."""
    if isinstance(part, dict):
        return all(name in whole and holds(whole[name], value) for name, value in part.items())
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(holds, whole, part))
    return whole == part


def arguments(config, name="ActivationPruning"):
    """Return the arguments of a callback in a configuration."""
    callbacks = config["trainer"]["callbacks"]
    return next(c["init_args"] for c in callbacks if c["class_path"] == f"lightning_actprune.{name}")


@pytest.fixture
def fitted(monkeypatch, tmp_path):
    """What the command line has trained, in order."""
    found = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ImageClassifier, "on_fit_end", lambda self: found.append(self), raising=False)
    return found


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_a_printed_config_holds_the_file_and_is_a_config(name, capsys, tmp_path):
    whole = printed(capsys, CONFIGS / name)
    assert holds(whole, yaml.safe_load((CONFIGS / name).read_text()))
    again = tmp_path / "config.yaml"
    again.write_text(yaml.safe_dump(whole))
    assert printed(capsys, again) == whole


def test_configs_use_the_preset_that_saves_most_and_one_the_paper():
    made = {path.name: arguments(yaml.safe_load(path.read_text())) for path in CONFIGS.glob("*.yaml")}
    paper = made.pop("digits_paper.yaml")
    assert (paper["preset"], "CubicSchedule" in paper["sparsity"]["class_path"]) == ("paper", True)
    assert made.keys() == {"cifar10.yaml", "digits.yaml", "imagenet.yaml"}
    assert all((given["preset"], "sparsity" in given) == ("max", False) for given in made.values())


def test_options_change_the_config(capsys):
    options = "--trainer.callbacks.sparsity=0.8", "--trainer.callbacks.rules={'*head': dense}", "--model.lr=0.003"
    whole = printed(capsys, CONFIGS / "digits.yaml", *options)
    made = arguments(whole)
    assert (made["preset"], made["sparsity"], made["rules"]) == ("max", 0.8, {"*head": "dense"})
    assert whole["model"]["lr"] == 0.003
    schedule = "--trainer.callbacks.sparsity=LinearSchedule", "--trainer.callbacks.sparsity.end=0.5"
    made = arguments(printed(capsys, CONFIGS / "digits.yaml", *schedule))["sparsity"]
    assert made["class_path"] == "lightning_actprune.schedules.LinearSchedule"
    assert made["init_args"]["end"] == 0.5


def test_an_unknown_option_is_an_error(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["fit", "--config", str(CONFIGS / "digits.yaml"), "--trainer.callbacks.sparsty=0.8"])
    assert done.value.code == 2
    assert "sparsty" in capsys.readouterr().err


def test_the_saved_config_reproduces_the_run(fitted, tmp_path):
    changed = "--trainer.callbacks.sparsity.init_args.end=0.7", "--model.lr=0.003"
    cli.main(["fit", "--config", str(CONFIGS / "digits_paper.yaml"), *QUICK.split(), *changed])
    saved = tmp_path / "runs" / "digits_paper" / "version_0" / "config.yaml"
    assert arguments(yaml.safe_load(saved.read_text()))["sparsity"]["init_args"]["end"] == 0.7
    cli.main(["fit", "--config", str(saved)])
    first, second = fitted
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    (pruning,) = (c for c in second.trainer.callbacks if isinstance(c, ActivationPruning))
    assert isinstance(pruning.sparsity, CubicSchedule)
    assert (pruning.sparsity.end, pruning.sparsity.warmup, second.hparams.lr) == (0.7, 0.1, 0.003)


@pytest.mark.parametrize("name", ["digits.yaml", "digits_paper.yaml"])
def test_a_fast_dev_run_of_a_config(fitted, name: str):
    cli.main(["fit", "--config", str(CONFIGS / name), "--trainer.accelerator=cpu", "--trainer.fast_dev_run=true"])
    (made,) = fitted
    (pruning,) = (c for c in made.trainer.callbacks if isinstance(c, ActivationPruning))
    operators = {layer.operator for layer in pruning.report.converted}
    assert made.trainer.global_step == 1
    if name == "digits.yaml":
        assert operators == {"linear", "activation", "affine", "scale"}
    else:
        assert operators == {"linear"}


@pytest.mark.parametrize("model", ["resmlp_s12", "vit_8x384"])
def test_an_image_folder_at_224_pixels(fitted, image_folder, model):
    options = f"--data.root={image_folder} --data.images_per_class=2 --model.model={model} --trainer.precision=32-true"
    config = str(CONFIGS / "imagenet.yaml")
    cli.main(["fit", "--config", config, *QUICK.split(), *IN_FOLDER.split(), *options.split()])
    (made,) = fitted
    assert (made.model.head.out_features, made.model.patch_embed.kernel_size) == (3, (16, 16))
    (pruning,) = (c for c in made.trainer.callbacks if isinstance(c, ActivationPruning))
    assert {layer.keep.bits for layer in pruning.converted if layer.operator == "linear"} == {2}
    assert "activation" in {layer.operator for layer in pruning.converted}


def test_a_part_of_each_class_is_read(image_folder):
    data = ImageData("folder", str(image_folder), image_size=8, batch_size=8, images_per_class=2)
    data.setup("fit")
    assert [len(part) for part in (data.train_set, data.val_set, data.test_set)] == [6, 6, 6]
    assert [label for _, label in data.train_set] == [0, 0, 1, 1, 2, 2]


def test_augmentation_varies_training_images_only(tmp_path):
    root = str(write_images(tmp_path / "large", size=40, train=1, test=1))
    made = {}
    for augmentation in ("crop", "resized_crop", "none"):
        data = ImageData("folder", root, image_size=28, augmentation=augmentation)
        data.setup("fit")
        made[augmentation] = [[part[0][0] for _ in range(8)] for part in (data.train_set, data.val_set)]
    for augmentation, (train, val) in made.items():
        assert {image.shape for image in train + val} == {(3, 28, 28)}
        assert all(torch.equal(image, val[0]) for image in val)
        assert all(torch.equal(image, train[0]) for image in train) == (augmentation == "none")


def test_an_unknown_augmentation_is_refused_for_every_data_set(capsys):
    with pytest.raises(ValueError, match=r"`augmentation` must be one of .*got 'mixup'. HINT: pass one of these"):
        ImageData("digits", augmentation="mixup")
    with pytest.raises(SystemExit):
        cli.main(["fit", "--config", str(CONFIGS / "digits.yaml"), "--data.augmentation=mixup"])
    assert "mixup" in capsys.readouterr().err
