"""The examples' ViT and GPT: the block's formula, what a token sees, sizes, and arguments that do not fit."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from examples.models import LANGUAGE_MODELS, MODELS, build_model
from examples.models.transformer import TransformerBlock


def in_double(model):
    """Return `model` in fp64 with weights so large that every part of it matters."""
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model.double()


@pytest.mark.parametrize("causal", [False, True])
def test_block_computes_the_formula(causal):
    block = in_double(TransformerBlock(dim=128, causal=causal))
    x = torch.randn(2, 5, 128, dtype=torch.double)
    q, k, v = (part.unflatten(-1, (2, 64)).transpose(1, 2) for part in block.attn.qkv(block.norm1(x)).chunk(3, dim=-1))
    scores = q @ k.transpose(-1, -2) / math.sqrt(64)
    if causal:
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    y = x + block.attn.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(block(x), y + block.fc2(F.gelu(block.fc1(block.norm2(y)))))


def test_gpt_sees_the_bytes_so_far_and_where_they_are():
    model = in_double(build_model("gpt_6x384", dim=32, depth=2, context=8))
    text = torch.randint(256, (1, 6))
    other = text.clone()
    other[0, 3] += 1 - 2 * (other[0, 3] == 255)
    same = torch.isclose(model(text), model(other)).all(-1)
    assert same.tolist() == [[True, True, True, False, False, False]]
    assert model(text).shape == (1, 6, 256)
    first, second = model(torch.full((1, 2), 65))[0]
    assert not torch.isclose(first, second).all()


def test_vit_tells_where_a_patch_is():
    model = in_double(build_model("vit_8x384", dim=32, depth=1, image_size=8, patch_size=4, num_classes=5))
    image = torch.randn(1, 3, 8, 8, dtype=torch.double)
    assert model(image).shape == (1, 5)
    assert not torch.isclose(model(image), model(image.roll(4, dims=-1))).all()


def test_untrained_models_know_nothing():
    images = torch.randn(4, 3, 32, 32)
    assert build_model("vit_8x384", depth=1)(images).abs().max() == 0
    text = torch.randint(256, (4, 64))
    loss = F.cross_entropy(build_model("gpt_6x384", depth=2)(text).flatten(0, 1), text.roll(-1, 1).flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.2)


@pytest.mark.parametrize(("name", "parameters"), [("vit_8x384", 14_243_722), ("gpt_6x384", 10_942_464)])
def test_parameter_counts_are_those_of_the_docstrings(name, parameters):
    constructor = (MODELS | LANGUAGE_MODELS)[name]
    model = constructor()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert f"{parameters / 1e6:.1f} million" in constructor.__doc__
    assert model.blocks[0].attn.heads == 6


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"`dim` must be a multiple of the 3 heads, got 200"):
        build_model("gpt_6x384", dim=200)
    with pytest.raises(ValueError, match=r"`image_size` must be a multiple of `patch_size`, got 32 and 5"):
        build_model("vit_8x384", patch_size=5)
