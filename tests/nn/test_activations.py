"""Activation modules in few bits: as dense ones in output and attributes, and what they keep."""

from __future__ import annotations

import copy
import io
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_actprune.nn.activations import ACTIVATION_CLASSES, TRANSFORMERS_ACTIVATIONS
from lightning_actprune.nn.few_bit import FewBitLayer, FewBitSettings
from lightning_actprune.nn.few_bit_kinds import few_bit_class, operator_of
from tests.activations import inputs

MODULES = {
    "GELU": nn.GELU(),
    "GELU-tanh": nn.GELU(approximate="tanh"),
    "SiLU": nn.SiLU(),
    "Mish": nn.Mish(),
    "Tanh": nn.Tanh(),
    "ELU": nn.ELU(alpha=0.5),
    "Hardswish": nn.Hardswish(),
    "ReLU": nn.ReLU(),
    "ReLU6": nn.ReLU6(),
    "Hardtanh": nn.Hardtanh(-0.5, 2.0),
    "LeakyReLU": nn.LeakyReLU(0.1),
    "Hardsigmoid": nn.Hardsigmoid(),
}
each_module = pytest.mark.parametrize("name", list(MODULES))


def converted(module: nn.Module, value_format: str = "int4") -> nn.Module:
    """Return a copy of ``module`` as conversion changes it."""
    found = copy.deepcopy(module)
    found.__class__ = few_bit_class(type(module))
    found._few_bit = FewBitSettings(value_format)
    return found


def test_every_class_is_tested():
    assert {type(module) for module in MODULES.values()} == {cls.dense_class for cls in ACTIVATION_CLASSES}


@each_module
def test_output_is_that_of_the_dense_module(name):
    dense, layer, x = MODULES[name], converted(MODULES[name], "int8"), inputs(1000)
    assert isinstance(layer, type(dense))
    assert layer.dense_class is type(dense)
    assert layer.operator == operator_of(dense) == "activation"
    assert torch.equal(layer(x), dense(x))
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    torch.testing.assert_close(y, dense(x), rtol=1e-6, atol=1e-6)
    (found,) = torch.autograd.grad(y.sum(), leaf)
    (expected,) = torch.autograd.grad(dense(leaf).sum(), leaf)
    assert (found - expected).abs().max() <= 2 / 255 / 2 + 1e-3


@each_module
def test_copies_and_pickles(name):
    layer, buffer = converted(MODULES[name]), io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    x = inputs(100).requires_grad_()
    for other in (copy.deepcopy(layer), torch.load(buffer, weights_only=False)):
        assert type(other) is type(layer)
        assert other.value_format == "int4"
        assert torch.equal(other(x), layer(x))


def test_what_is_printed():
    assert "value_format='int2'" in repr(converted(nn.GELU(approximate="tanh"), "int2"))
    assert "approximate='tanh'" in repr(converted(nn.GELU(approximate="tanh")))
    assert "value_format" not in repr(converted(nn.ReLU()))
    assert "inplace=True" in repr(converted(nn.ReLU(inplace=True)))


@pytest.mark.parametrize("cls", [nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.Mish, nn.Hardswish, nn.ELU])
def test_in_place_modules_write_to_their_input(cls):
    layer, source = converted(cls(inplace=True)), torch.randn(100, requires_grad=True)
    x = source * 2
    y = layer(x)
    assert y.data_ptr() == x.data_ptr()
    torch.testing.assert_close(y, cls()(source * 2))
    y.sum().backward()
    assert source.grad is not None


def test_subclasses_are_not_converted():
    class Loud(nn.GELU):
        def forward(self, x):
            return 2 * super().forward(x)

    assert few_bit_class(Loud) is None
    assert operator_of(Loud()) == "activation"


def test_a_network_trains_as_the_dense_one():
    """Gradients of the first layer, over many rows, are those of the dense network but for a small random part."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    x, grads = torch.randn(2000, 32), []
    for change in (lambda module: module, converted):
        net = nn.Sequential(*(change(m) if few_bit_class(type(m)) else copy.deepcopy(m) for m in model))
        (net(x) - x[:, :1]).square().mean().backward()
        grads.append(net[0].weight.grad)
    dense, ours = grads
    assert (ours - dense).norm() <= 0.02 * dense.norm()


# What transformers' classes compute, by their documentation.
def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


FOREIGN = {
    "GELUActivation": F.gelu,
    "NewGELUActivation": _tanh_gelu,
    "AccurateGELUActivation": _tanh_gelu,
    "GELUTanh": _tanh_gelu,
    "PytorchGELUTanh": _tanh_gelu,
    "FastGELUActivation": _tanh_gelu,
    "QuickGELUActivation": lambda x: x * torch.sigmoid(1.702 * x),
    "SiLUActivation": F.silu,
    "MishActivation": F.mish,
}


@pytest.fixture
def foreign(monkeypatch):
    """Return the activation functions of transformers by name, or stand-ins where it is not installed."""
    try:
        from transformers import activations as found
    except ModuleNotFoundError:
        found = ModuleType("transformers.activations")
        found.__spec__ = ModuleSpec(found.__name__, None)
        for name, function in FOREIGN.items():
            body = {"forward": lambda self, x, f=function: f(x), "act": F.gelu, "__module__": found.__name__}
            setattr(found, name, type(name, (nn.Module,), body))
        monkeypatch.setitem(sys.modules, "transformers.activations", found)
    return found


@pytest.mark.parametrize("name", list(TRANSFORMERS_ACTIVATIONS))
def test_activations_of_transformers(foreign, name):
    cls = getattr(foreign, name, None)
    if cls is None:  # of another version
        assert name in ("PytorchGELUTanh", "GELUTanh")
        return
    dense, x = cls(), inputs(1000)
    layer = converted(dense, "int8")
    assert isinstance(layer, FewBitLayer)
    assert isinstance(layer, cls)
    assert torch.equal(layer(x), dense(x))
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(layer(leaf), FOREIGN[name](x), rtol=1e-5, atol=2e-5)
    (found,) = torch.autograd.grad(layer(leaf).sum(), leaf)
    (expected,) = torch.autograd.grad(FOREIGN[name](leaf).sum(), leaf)
    assert (found - expected).abs().max() <= 1.3 / 255 / 2 + 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(TRANSFORMERS_ACTIVATIONS))
def test_autocast_of_transformers_activations_on_the_gpu(foreign, name):
    cls = getattr(foreign, name, nn.GELU)
    x = torch.randn(1000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        dense, ours = cls()(x), converted(cls())(x)
    if hasattr(foreign, "__file__"):  # a stand-in has no way of its own to be written
        assert ours.dtype == dense.dtype
    torch.testing.assert_close(ours.float(), dense.float(), rtol=0.03, atol=0.03)
