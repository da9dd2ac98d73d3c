"""The command line of the examples: its configurations, what overrides them, and the one that a run leaves behind."""

from pathlib import Path

import pytest
import torch

from examples import cli
from examples.classifier import ImageClassifier
from lightning_actprune import ActivationPruning
from lightning_actprune.schedules import CubicSchedule

pytestmark = pytest.mark.integration
CONFIGS = Path(cli.__file__).parent / "configs"
QUICK = "--trainer.accelerator=cpu --trainer.max_epochs=1 --trainer.limit_train_batches=2 --trainer.limit_val_batches=1"
IN_FOLDER = "--data.num_workers=0 --data.batch_size=4 --data.images_per_class=2 --model.dim=64 --model.depth=1"


def pruning_of(model):
    return next(c for c in model.trainer.callbacks if isinstance(c, ActivationPruning))


@pytest.fixture
def fitted(monkeypatch, tmp_path):
    """What the command line has trained, in order."""
    found = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ImageClassifier, "on_fit_end", lambda self: found.append(self), raising=False)
    return found


def test_the_saved_config_reproduces_the_run(fitted, tmp_path):
    changed = "--trainer.callbacks.sparsity.init_args.end=0.7", "--model.lr=0.003"
    cli.main(["fit", "--config", str(CONFIGS / "digits_paper.yaml"), *QUICK.split(), *changed])
    saved = tmp_path / "runs" / "digits_paper" / "version_0" / "config.yaml"
    cli.main(["fit", "--config", str(saved)])
    first, second = fitted
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    pruning = pruning_of(second)
    assert {layer.operator for layer in pruning.report.converted} == {"linear"}
    assert isinstance(pruning.sparsity, CubicSchedule)
    assert (pruning.sparsity.end, pruning.sparsity.warmup, second.hparams.lr) == (0.7, 0.1, 0.003)


def test_the_digits(fitted):
    cli.main(
        ["fit", "--config", str(CONFIGS / "digits.yaml"), "--trainer.accelerator=cpu", "--trainer.fast_dev_run=true"]
    )
    (model,) = fitted
    operators = {layer.operator for layer in pruning_of(model).report.converted}
    assert operators == {"linear", "activation", "affine", "scale"}


def test_an_image_folder_at_224_pixels(fitted, image_folder):
    options = f"--data.root={image_folder} --model.model=vit_8x384 --trainer.precision=32-true"
    config = str(CONFIGS / "imagenet.yaml")
    cli.main(["fit", "--config", config, *QUICK.split(), *IN_FOLDER.split(), *options.split()])
    (model,) = fitted
    assert (model.model.head.out_features, model.model.patch_embed.kernel_size) == (3, (16, 16))
    assert {layer.keep.bits for layer in pruning_of(model).converted if layer.operator == "linear"} == {2}
