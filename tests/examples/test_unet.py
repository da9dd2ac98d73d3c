"""The U-Net of the benchmarks: shapes, what reaches what, and its blocks as the presets find them."""

from __future__ import annotations

import torch

from examples.benchmarks.third_party import checkpoint_blocks
from examples.models.unet import UNet
from lightning_actprune import convert


def made() -> UNet:
    torch.manual_seed(0)
    return UNet(32, (1, 2, 2), depth=2, attending=(2,))


def test_every_parameter_gets_a_gradient_and_every_sample_its_own():
    model, x, times = made(), torch.randn(2, 3, 16, 8, requires_grad=True), torch.tensor([0.1, 0.9])
    y = model(x, times)
    assert y.shape == x.shape
    y[0].square().sum().backward()
    assert x.grad[1].abs().max() == 0 < x.grad[0].abs().min()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_time_matters_and_checkpoints_change_nothing():
    model, x = made(), torch.randn(2, 3, 16, 16)
    early, late = model(x, torch.zeros(2)), model(x, torch.ones(2))
    assert not torch.allclose(early, late)
    checkpoint_blocks(model)
    assert torch.equal(model(x, torch.zeros(2)), early)


def test_presets_cover_it():
    assert not convert(made(), "max").uncovered["linear"]
    assert {block.fqn.split(".")[0] for block in convert(made(), "recompute").recomputed} >= {"down", "up"}
