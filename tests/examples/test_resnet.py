"""The ResNet of the examples: its formula, its sizes, and that its convolutions read ReLUs' outputs."""

import math

import pytest
import torch
from torch.nn import functional as F

from examples.models import MODELS, build_model
from examples.models.resnet import ResNetBlock


@pytest.mark.parametrize("stride", [1, 2])
def test_block_computes_the_formula(stride):
    torch.manual_seed(0)
    block, x = ResNetBlock(4, 4 * stride, stride), torch.randn(3, 4, 8, 8)

    def normed(x):
        return F.batch_norm(x, None, None, training=True).relu()

    y = normed(x)
    hidden = normed(F.conv2d(y, block.conv1.weight, stride=stride, padding=1))
    left = x if stride == 1 else F.conv2d(y, block.shortcut.weight, stride=stride)
    torch.testing.assert_close(block(x), left + F.conv2d(hidden, block.conv2.weight, padding=1))


def test_stages_double_the_channels():
    model = build_model("resnet_9x64", dim=8, depth=6, patch_size=2, in_channels=1, num_classes=7)
    widths = [(block.conv1.in_channels, block.conv2.out_channels) for block in model.blocks]
    assert widths == [(8, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32)]
    sizes = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, output: sizes.append(output.shape[-1]))
    assert model(torch.randn(2, 1, 16, 16)).shape == (2, 7)
    assert sizes == [8, 8, 4, 4, 2, 2]


def test_everything_lies_channels_last_and_the_first_loss_is_that_of_chance():
    model = build_model("resnet_9x64", dim=8, depth=3)
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, output: seen.append(output))
    scores = model(torch.randn(4, 3, 16, 16))
    assert all(output.is_contiguous(memory_format=torch.channels_last) for output in seen)
    assert F.cross_entropy(scores, torch.arange(4)).item() == pytest.approx(math.log(10))


def test_parameter_count_is_that_of_the_docstring():
    constructor = MODELS["resnet_9x64"]
    parameters = sum(p.numel() for p in constructor().parameters())
    assert parameters == 4_326_986
    assert f"{parameters / 1e6:.1f} million" in constructor.__doc__
