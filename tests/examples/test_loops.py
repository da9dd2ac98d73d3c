"""The examples without a Trainer: they learn, find the layer that reads the batch, and leave a plain model behind."""

from types import SimpleNamespace

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

from examples import fabric, plain_loop
from tests.support.helpers import assert_plain, pruned_layers


@pytest.fixture
def seen(monkeypatch):
    """The converted linear layers at each forward of the model that one of the examples trains."""
    found = []

    def watch(train):
        def watched(*args):
            (model,) = (argument for argument in args if isinstance(argument, nn.Module))
            model.register_forward_pre_hook(lambda *_: found.append(pruned_layers(model)))
            return train(*args)

        return watched

    for module in (plain_loop, fabric):
        monkeypatch.setattr(module, "train", watch(module.train))
    return found


@pytest.mark.integration
def test_plain_loop(monkeypatch, seen, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model, losses = plain_loop.main(epochs=1)
    assert seen == [["1", "3", "5"]] + [["3", "5"]] * 22  # 1437 images; the first layer reads the batch
    assert_plain(model)
    assert losses[-1] < 0.8 * losses[0]
    assert f"{losses[-1]:.3f}" in capsys.readouterr().out


@pytest.mark.integration
# Of token mixing, which stays dense: features of the rim of a digit are next to nothing beside others of a block.
@pytest.mark.filterwarnings("ignore:What module 'blocks.0' saves for 'mm' has outliers:UserWarning")
def test_fabric(seen):
    model, losses = fabric.main(epochs=1, accelerator="cpu", precision="bf16-mixed")
    names = [f"blocks.{block}.{layer}" for block in range(2) for layer in ("fc1", "fc2")]
    assert seen == [[*names, "head"]] * 23
    assert_plain(model)
    assert losses[-1] < losses[0]


def train_in_a_plain_loop(model, loader):
    plain_loop.train(model, loader, 1, torch.device("cpu"))


def train_with_fabric(model, loader):
    fabric.train(Fabric(accelerator="cpu"), model, SimpleNamespace(train_dataloader=lambda: loader), 1)


@pytest.mark.parametrize("train", [train_in_a_plain_loop, train_with_fabric])
def test_an_exception_leaves_a_plain_model(train, seen):
    """The second batch raises, when the first has trained a pruned model."""
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 10))
    loader = DataLoader([(torch.randn(64), 1), (None, None)], batch_size=1)
    with pytest.raises(TypeError, match="NoneType"):
        train(model, loader)
    assert seen == [["1"]]
    assert_plain(model)
