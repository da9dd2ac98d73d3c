"""The models of the examples: published sizes, and what they may see."""

import pytest
import torch
from torch import nn

from examples.models import LANGUAGE_MODELS, MODELS, build_model
from examples.models.unet import UNet


def make_noticeable(model):
    """Return the model in fp64 with weights so large that every part of it matters."""
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model.double()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        *(("resmlp_s12", 15_350_872), ("resmlp_s24", 30_020_680), ("resmlp_s36", 44_690_488)),
        *(("resmlp_b24", 129_138_280), ("vit_8x384", 14_243_722)),
        *(("resnet_9x64", 4_326_986), ("gpt_6x384", 10_942_464)),
    ],
)
def test_parameter_counts(name, parameters):
    with torch.device("meta"):
        model = (MODELS | LANGUAGE_MODELS)[name]()
    assert sum(p.numel() for p in model.parameters()) == parameters


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
