"""The models of the examples: their formulas, published sizes, and arguments that do not fit."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from examples.models import LANGUAGE_MODELS, MODELS, build_model
from examples.models.resmlp import ResMLPBlock
from examples.models.resnet import ResNetBlock
from examples.models.transformer import TransformerBlock
from examples.models.unet import UNet


def make_noticeable(model):
    """Return the model in fp64 with weights so large that every part of it matters."""
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model.double()


def resmlp_block(block, x):
    mixed = torch.einsum("ut,btd->bud", block.token_mix.weight, block.affine1.weight * x + block.affine1.bias)
    y = x + block.scale1.weight * (mixed + block.token_mix.bias[:, None])
    return y + block.scale2.weight * block.fc2(F.gelu(block.fc1(block.affine2.weight * y + block.affine2.bias)))


def resnet_block(block, x):
    def norm_relu(x):
        return F.batch_norm(x, None, None, training=True).relu()

    block.norm1.reset_parameters()
    block.norm2.reset_parameters()
    y, stride = norm_relu(x), block.conv1.stride
    hidden = norm_relu(F.conv2d(y, block.conv1.weight, stride=stride, padding=1))
    left = x if block.shortcut is None else F.conv2d(y, block.shortcut.weight, stride=stride)
    return left + F.conv2d(hidden, block.conv2.weight, padding=1)


def transformer_block(block, x):
    q, k, v = (part.unflatten(-1, (2, 64)).transpose(1, 2) for part in block.attn.qkv(block.norm1(x)).chunk(3, dim=-1))
    scores = q @ k.transpose(-1, -2) / 8
    if block.attn.causal:
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    y = x + block.attn.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    return y + block.fc2(F.gelu(block.fc1(block.norm2(y))))


@pytest.mark.parametrize(
    ("make", "formula", "shape"),
    [
        (partial(ResMLPBlock, 6, 5, 0.3), resmlp_block, (2, 5, 6)),
        (partial(ResNetBlock, 4, 4, 1), resnet_block, (3, 4, 8, 8)),
        (partial(ResNetBlock, 4, 8, 2), resnet_block, (3, 4, 8, 8)),
        (partial(TransformerBlock, 128, False), transformer_block, (2, 5, 128)),
        (partial(TransformerBlock, 128, True), transformer_block, (2, 5, 128)),
    ],
)
def test_a_block_computes_its_formula(make, formula, shape):
    block = make_noticeable(make())
    x = torch.randn(shape, dtype=torch.double)
    expected = formula(block, x)  # before the block, whose ReLUs write into their inputs
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        *[("resmlp_s12", 15_350_872), ("resmlp_s24", 30_020_680), ("resmlp_s36", 44_690_488)],
        *[
            ("resmlp_b24", 129_138_280),
            ("vit_8x384", 14_243_722),
            ("resnet_9x64", 4_326_986),
            ("gpt_6x384", 10_942_464),
        ],
    ],
)
def test_parameter_counts(name, parameters):
    with torch.device("meta"):
        model = (MODELS | LANGUAGE_MODELS)[name]()
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("name", ["resmlp_tiny", "vit_8x384", "resnet_9x64"])
def test_classifiers_take_any_size_and_begin_at_chance(name):
    model = build_model(name, dim=64, depth=3, image_size=12, patch_size=2, in_channels=1, num_classes=7)
    scores = model(torch.randn(2, 1, 12, 12))
    assert scores.shape == (2, 7)
    assert scores.abs().max() == 0


def test_gpt_sees_the_bytes_so_far_and_where_they_are():
    model = make_noticeable(build_model("gpt_6x384", dim=32, depth=2, context=8))
    text = torch.randint(256, (1, 6))
    other = text.clone()
    other[0, 3] += 1 - 2 * (other[0, 3] == 255)
    same = torch.isclose(model(text), model(other)).all(-1)
    assert same.tolist() == [[True, True, True, False, False, False]]
    first, second = model(torch.full((1, 2), 65))[0]
    assert not torch.isclose(first, second).all()


def test_every_parameter_of_a_unet_gets_a_gradient_and_every_sample_its_own():
    model = UNet(32, (1, 2), depth=1, attending=(1,))
    x, times = torch.randn(2, 3, 8, 8, requires_grad=True), torch.tensor([0.1, 0.9])
    y = model(x, times)
    assert y.shape == x.shape
    assert not torch.allclose(y, model(x, times.flip(0)))
    y[0].square().sum().backward()
    assert x.grad[1].abs().max() == 0 < x.grad[0].abs().min()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"`image_size`.* 32 and 5"):
        build_model("resmlp_s12", image_size=32, patch_size=5)
    with pytest.raises(ValueError, match=r"`dim`.*200"):
        build_model("gpt_6x384", dim=200)
    with pytest.raises(ValueError, match=r"`name`.*'vgg'"):
        build_model("vgg")
