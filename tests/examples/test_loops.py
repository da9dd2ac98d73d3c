"""The examples without a Trainer: they learn, find the layer that reads the batch, and leave a plain model behind."""

from types import SimpleNamespace

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

from examples import fabric, plain_loop
from tests.support.helpers import assert_plain, pruned_layers


def watch(monkeypatch, module):
    """Note, at every forward, which layers of the model that ``module.train`` gets are pruned."""
    seen, train = [], module.train

    def watched(*args):
        (model,) = (argument for argument in args if isinstance(argument, nn.Module))
        model.register_forward_pre_hook(lambda *_: seen.append(pruned_layers(model)))
        return train(*args)

    monkeypatch.setattr(module, "train", watched)
    return seen


def test_plain_loop(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seen = watch(monkeypatch, plain_loop)
    model, losses = plain_loop.main(epochs=1)
    assert seen == [["1", "3", "5"]] + [["3", "5"]] * 22  # 1437 images
    assert_plain(model)
    assert losses[-1] < 0.5 * losses[0]
    assert "Layer 1 stays dense: its input is part of the batch." in capsys.readouterr().out


def test_fabric(monkeypatch):
    seen = watch(monkeypatch, fabric)
    model, losses = fabric.main(epochs=1, accelerator="cpu", precision="bf16-mixed")
    names = [f"blocks.{block}.{layer}" for block in range(3) for layer in ("fc1", "fc2")]
    assert seen == [[*names, "head"]] * 23
    assert_plain(model)
    assert losses[-1] < losses[0]


def in_a_plain_loop(model, loader):
    plain_loop.train(model, loader, 1, torch.device("cpu"))


def with_fabric(model, loader):
    fabric.train(Fabric(accelerator="cpu"), model, SimpleNamespace(train_dataloader=lambda: loader), 1)


@pytest.mark.parametrize("train", [in_a_plain_loop, with_fabric])
def test_an_exception_leaves_a_plain_model(train):
    """One in the data of the second step, when the first has trained a pruned model."""
    model, seen = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 10)), []
    model.register_forward_pre_hook(lambda *_: seen.append(pruned_layers(model)))
    loader = DataLoader([(torch.randn(64), 1), (None, None)], batch_size=1)
    with pytest.raises(TypeError, match="found <class 'NoneType'>"):
        train(model, loader)
    assert seen == [["1"]]
    assert_plain(model)
