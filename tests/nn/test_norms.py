"""Layers that keep their normalised input in few bits: those of torch, and of packages that may not be there."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import io

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import convert
from lightning_actprune.nn import few_bit_kinds
from lightning_actprune.nn.few_bit import FewBitSettings
from lightning_actprune.nn.few_bit_kinds import LLAMA_NORMS, few_bit_class, operator_of
from lightning_actprune.nn.norms import FewBitLlamaRMSNorm, FewBitTimmLayerNorm, FewBitTimmLayerNorm2d
from tests import oracle
from tests.attention import saved_tensors

LENGTH = 96
LLAMA = "transformers.models.llama.modeling_llama"


class LlamaRMSNorm(nn.Module):
    """A stand-in for transformers' class, by its documented behaviour."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(hidden_size)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


LlamaRMSNorm.__module__ = LLAMA


def llama() -> nn.Module:
    """Return the real layer where there is one."""
    found = importlib.util.find_spec("transformers")
    return (importlib.import_module(LLAMA).LlamaRMSNorm if found else LlamaRMSNorm)(LENGTH)


def timm_layer(name: str, **options) -> nn.Module:
    return getattr(pytest.importorskip("timm.layers.norm"), name)(LENGTH, **options)


MADE = {
    "layer": lambda: nn.LayerNorm(LENGTH),
    "layer-plain": lambda: nn.LayerNorm(LENGTH, elementwise_affine=False),
    "layer-two": lambda: nn.LayerNorm((10, LENGTH)),
    "rms": lambda: nn.RMSNorm(LENGTH),
    "rms-plain": lambda: nn.RMSNorm(LENGTH, elementwise_affine=False, eps=1e-3),
    "llama": llama,
    "timm": lambda: timm_layer("LayerNorm"),
    "timm-2d": lambda: timm_layer("LayerNorm2d"),
}
each_layer = pytest.mark.parametrize("name", list(MADE))


def made(name: str) -> nn.Module:
    torch.manual_seed(1)
    layer = MADE[name]()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 1.0)
    return layer


def converted(layer: nn.Module, value_format: str = "int8", block_size: int = 32) -> nn.Module:
    layer = copy.deepcopy(layer)
    layer.__class__ = few_bit_class(type(layer))
    layer._few_bit = FewBitSettings(value_format, block_size)
    return layer


def input_of(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    x = (2 * torch.randn(4, 10, LENGTH) + 1).to(dtype)
    return (x.transpose(1, 2).reshape(4, LENGTH, 2, 5) if name == "timm-2d" else x).requires_grad_()


def gradients(layer: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    grad_y = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    return torch.autograd.grad(y, (x, *layer.parameters()), grad_y)


@each_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_output_and_gradients_are_those_of_the_dense_layer(name, dtype, autocast):
    dense = made(name)
    layer, x = converted(dense), input_of(name, dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours, right = layer(x), dense(x)
    assert ours.dtype == right.dtype
    assert ours.shape == right.shape
    eps = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours, right, rtol=2 * eps, atol=2e-5 if eps < 1e-6 else eps)
    for actual, expected in zip(gradients(layer, x, ours), gradients(dense, x, right), strict=True):
        assert actual.dtype == expected.dtype
        assert oracle.relative_error(actual, expected) < 0.01 + 2 * torch.finfo(dtype).eps
    assert operator_of(layer) == operator_of(dense) == "norm"


@pytest.mark.gpu
@each_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_types_under_autocast_on_the_gpu_are_those_of_the_dense_layer(name, dtype):
    dense = made(name).cuda()
    layer, x = converted(dense), input_of(name, dtype).detach().cuda().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        ours, right = layer(x), dense(x)
    assert ours.dtype == right.dtype
    eps = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours, right, rtol=2 * eps, atol=2e-5 if eps < 1e-6 else eps)
    grad_y = torch.randn_like(right)
    grads = (torch.autograd.grad(y, (x, *m.parameters()), grad_y) for m, y in ((layer, ours), (dense, right)))
    for actual, expected in zip(*grads, strict=True):
        assert actual.dtype == expected.dtype
        assert oracle.relative_error(actual, expected) < 0.01 + 2 * torch.finfo(dtype).eps


@each_layer
def test_only_few_bits_are_kept(name):
    layer, x = converted(made(name), "int4"), input_of(name)
    with saved_tensors() as saved:
        layer(x)
    own = {p.data_ptr() for p in layer.parameters()}
    rows = 4 if name == "layer-two" else 40
    assert sum(t.nbytes for t in saved if t.data_ptr() not in own) == x.numel() * 9 // 16 + 4 * rows


@each_layer
def test_the_plain_layer_where_nothing_needs_a_gradient(name):
    dense = made(name)
    layer, x = converted(dense), input_of(name)
    with torch.no_grad():
        assert torch.equal(layer(x), dense(x))
    layer.requires_grad_(False), dense.requires_grad_(False)
    with saved_tensors() as saved:
        assert torch.equal(layer(x.detach()), dense(x.detach()))
    assert saved == []


@each_layer
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_to_one_graph_with_the_same_results(name):
    layer, x = converted(made(name), "int4"), input_of(name)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    eager, traced = layer(x), compiled(x)
    assert torch.equal(eager, traced)
    for first, second in zip(gradients(layer, x, eager), gradients(layer, x, traced), strict=True):
        assert torch.equal(first, second)


@each_layer
def test_copies_pickles_and_what_is_printed(name):
    if name == "llama" and importlib.util.find_spec("transformers") is None:
        pytest.skip("a stand-in cannot be found where the class of transformers would be")
    layer, x = converted(made(name), "int4", 16), input_of(name)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(layer), torch.load(buffer, weights_only=False)):
        assert type(other) is type(layer)
        assert torch.equal(other(x), layer(x))
    assert "value_format='int4', block_size=16" in repr(layer)
    assert isinstance(layer, layer.dense_class)
    assert list(layer.state_dict()) == list(made(name).state_dict())


def test_only_exact_classes_are_known():
    class Other(nn.LayerNorm):
        pass

    assert few_bit_class(Other) is None
    assert operator_of(Other(8)) == "norm"
    assert few_bit_class(nn.InstanceNorm2d) is None


def test_what_torch_refuses_it_refuses_still():
    layer = converted(nn.LayerNorm(LENGTH))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        layer(torch.randn(3, 7))
    with pytest.raises(TypeError, match="float64 values cannot be stored as 'int8'"):
        layer.double()(torch.randn(3, LENGTH, dtype=torch.float64))


def test_fast_norm_of_timm_is_left_alone():
    layer, x = converted(timm_layer("LayerNorm")), input_of("timm")
    layer._fast_norm = True
    with saved_tensors() as saved:
        layer(x)
    assert any(tensor.shape == x.shape for tensor in saved)


def test_classes_of_transformers_compute_what_llama_does():
    """Their forward, read from their source, is that of ``LlamaRMSNorm`` but for annotations."""
    pytest.importorskip("transformers")

    def forward_of(module: str, name: str) -> list[str]:
        lines = inspect.getsource(getattr(importlib.import_module(module), name).forward).splitlines()
        return [line.strip() for line in lines if line.strip() and not line.strip().startswith("def ")]

    right = forward_of(LLAMA, "LlamaRMSNorm")
    for model, name in LLAMA_NORMS.items():
        assert forward_of(f"transformers.models.{model}.modeling_{model}", f"{name}RMSNorm") == right, model


def test_every_foreign_class_is_named_once():
    mixins = set(few_bit_kinds.FOREIGN_KINDS.values())
    assert {FewBitLlamaRMSNorm, FewBitTimmLayerNorm, FewBitTimmLayerNorm2d} <= mixins
    assert ("transformers.models.llama.modeling_llama", "LlamaRMSNorm") in few_bit_kinds.FOREIGN_KINDS


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm])
def test_a_weight_of_another_shape_is_left_to_torch(make):
    layer = make(64)
    convert(nn.Sequential(layer), 0.0, value_format="int8", others={"norm": "int8"})
    layer.weight = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match="weight"):
        layer(torch.randn(4, 64))
