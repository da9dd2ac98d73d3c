"""The examples without a Trainer: they learn, find the layer that reads the batch, and leave a plain model behind."""

import re
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

from examples import fabric, plain_loop
from lightning_actprune import ActivationPrunedLinear
from tests.support.helpers import assert_plain, pruned_layers


def watch(monkeypatch, module):
    """Note, at every forward, which layers of the model that ``module.train`` gets are pruned, and how."""
    seen, kept, train = [], [], module.train

    def watched(*args):
        (model,) = (argument for argument in args if isinstance(argument, nn.Module))
        model.register_forward_pre_hook(lambda *_: seen.append(pruned_layers(model)))
        model.register_forward_pre_hook(lambda *_: kept.append(sparsities_and_bits(model)))
        return train(*args)

    monkeypatch.setattr(module, "train", watched)
    return seen, kept


def sparsities_and_bits(model):
    return [(m.sparsity, m.keep.bits) for m in model.modules() if isinstance(m, ActivationPrunedLinear)]


def test_plain_loop(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seen, kept = watch(monkeypatch, plain_loop)
    model, losses = plain_loop.main(epochs=2)
    assert seen == [["1", "3", "5"]] + [["3", "5"]] * 45  # 1437 images, twice
    assert_plain(model)
    assert losses[-1] < 0.5 * losses[0]
    # The preset `max`: two bits, and no dropped blocks.
    assert (kept[0], kept[1], kept[-1]) == ([(0.0, 2)] * 3, [(0.0, 2)] * 2, [(0.0, 2)] * 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Layer 1 stays dense: its input is part of the batch."
    for epoch, line in enumerate(lines[1:3], 1):
        mean = sum(losses[23 * (epoch - 1) : 23 * epoch]) / 23
        assert re.fullmatch(rf"Epoch {epoch} of 2: mean loss {mean:.3f}, \d+\.\d s\.", line)
    assert lines[3:] == [f"Loss {losses[0]:.3f} at first, {losses[-1]:.3f} in the end."]


@pytest.mark.slow
# Of token mixing, which stays dense: features of the rim of a digit are next to nothing beside others of a block.
@pytest.mark.filterwarnings("ignore:What module 'blocks.0' saves for 'mm' has outliers:UserWarning")
def test_fabric(monkeypatch, capsys):
    seen, kept = watch(monkeypatch, fabric)
    model, losses = fabric.main(epochs=1, accelerator="cpu", precision="bf16-mixed")
    names = [f"blocks.{block}.{layer}" for block in range(3) for layer in ("fc1", "fc2")]
    assert seen == [[*names, "head"]] * 23
    assert (kept[0], kept[1]) == ([(0.0, 2)] * 7, [(0.0, 2)] * 7)
    assert f"Epoch 1 of 1: mean loss {sum(losses) / 23:.3f}, " in capsys.readouterr().out
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
