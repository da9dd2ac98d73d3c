"""Layers that scale each feature and keep their input in few bits: exact but for the gradient of the factors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import convert, revert
from lightning_actprune.nn.affine import Affine, FewBitAffine
from lightning_actprune.ops import formats
from tests.attention import saved_tensors


class TimmAffine(nn.Module):
    """The forward of timm's ``Affine``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones((1, 1, dim)))
        self.beta = nn.Parameter(torch.zeros((1, 1, dim)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.beta, self.alpha, x)


class TimmLayerScale(nn.Module):
    """The forward of timm's ``LayerScale``."""

    def __init__(self, dim: int, inplace: bool = False) -> None:
        super().__init__()
        self.inplace = inplace
        self.gamma = nn.Parameter(1e-5 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.gamma) if self.inplace else x * self.gamma


class TimmResBlock(nn.Module):
    """The forward of timm's ``ResBlock``."""

    def __init__(self, dim: int, tokens: int = 5) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.Identity(), nn.Identity()
        self.linear_tokens, self.drop_path = nn.Linear(tokens, tokens), nn.Identity()
        self.mlp_channels = nn.Sequential(nn.Linear(dim, 8), nn.Linear(8, dim))
        self.ls1 = nn.Parameter(1e-4 * torch.ones(dim))
        self.ls2 = nn.Parameter(1e-4 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.ls1 * self.linear_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2))
        return x + self.drop_path(self.ls2 * self.mlp_channels(self.norm2(x)))


for stand_in, module, name in (
    (TimmResBlock, "timm.models.mlp_mixer", "ResBlock"),
    (TimmAffine, "timm.models.mlp_mixer", "Affine"),
    (TimmLayerScale, "timm.layers.layer_scale", "LayerScale"),
):
    stand_in.__module__, stand_in.__qualname__, stand_in.__name__ = module, name, name

MAKERS = {
    "affine": lambda: Affine(70),
    "layer scale": lambda: Affine(70, bias=False, scale=0.1),
    "timm affine": lambda: TimmAffine(70),
    "timm layer scale": lambda: TimmLayerScale(70),
}
each_kind = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def pair(make, device, value_format="int4") -> tuple[nn.Module, nn.Module]:
    """Return a layer with random parameters, dense and converted."""
    dense = nn.Sequential(make()).to(device)
    for parameter in dense.parameters():
        nn.init.normal_(parameter)
    ours = copy.deepcopy(dense)
    report = convert(ours, block_size=32, others={"affine": value_format})
    assert [(layer.fqn, layer.operator) for layer in report.few_bit] == [("0", "affine")]
    return dense, ours


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value_format", ["int4", "int2", "fp8"])
def test_all_but_the_gradient_of_the_factors_is_exact(make, device, dtype, value_format):
    dense, ours = pair(make, device, value_format)
    x = torch.randn(3, 5, 70, device=device).to(dtype)
    given = [x.clone().requires_grad_() for _ in range(2)]
    with saved_tensors() as saved:
        y = ours(given[1])
    right = dense(given[0])
    assert y.dtype == right.dtype
    torch.testing.assert_close(y, right, rtol=3e-7, atol=3e-7)
    grad_y = torch.randn_like(y)
    right.backward(grad_y)
    y.backward(grad_y)
    torch.testing.assert_close(given[1].grad, given[0].grad, rtol=torch.finfo(dtype).eps, atol=1e-6)
    factors, *shifts = tuple(zip(ours.parameters(), dense.parameters(), strict=True))
    for mine, exact in shifts:
        torch.testing.assert_close(mine.grad, exact.grad)
    stored = formats.dequantize(saved[0].cpu(), 32, value_format, torch.float32).view(15, 96)[:, :70].double()
    near = (grad_y.double().cpu().view(15, 70) * stored).sum(0)
    torch.testing.assert_close(factors[0].grad.double().cpu().view(-1), near, rtol=1e-5, atol=1e-5)
    own = {parameter.data_ptr() for parameter in ours.parameters()}
    kept = sum(t.nbytes for t in saved if t.data_ptr() not in own)
    assert kept == 45 * formats.FORMATS[value_format].row_bytes(32, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_block_scales_its_branches(device, dtype):
    """All gradients but those of the factors are as exact as sums in another order."""
    torch.manual_seed(0)
    dense = TimmResBlock(70).to(device)
    for factors in (dense.ls1, dense.ls2):
        nn.init.normal_(factors)
    ours = nn.Sequential(copy.deepcopy(dense))
    report = convert(ours, others={"affine": "int8"}, min_features=1000)
    assert [(layer.fqn, layer.kind, layer.operator) for layer in report.few_bit] == [("0", "ResBlock", "affine")]
    x = torch.randn(3, 5, 70, device=device, requires_grad=True)
    grads = []
    for module in (dense, ours):
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            y = module(x)
        y.backward(torch.ones_like(y), inputs=[x, *module.parameters()])
        grads.append([y, x.grad, *(p.grad for p in module.parameters())])
        x.grad = None
    eps, names = torch.finfo(dtype).eps, ["y", "x", *dict(dense.named_parameters())]
    for name, right, found in zip(names, *grads, strict=True):
        assert found.dtype == right.dtype
        near = 0.01 if name in ("ls1", "ls2") else 8 * eps  # int8: half a step of 8 standard deviations, over 15 rows
        assert (found - right).norm() <= near * right.norm(), name
    with torch.no_grad():
        assert torch.equal(ours(x), dense(x))


class Doubled(nn.Module):
    """In place of a path that is dropped."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize("path", ["plain", "hook", "module", "wide"])
def test_a_block_adds_its_branches_on_the_way_if_nothing_is_between(path, device):
    dense = TimmResBlock(70).to(device)
    if path == "module":
        dense.drop_path = Doubled()
    for factors in (dense.ls1, dense.ls2):
        nn.init.normal_(factors)
    ours = nn.Sequential(copy.deepcopy(dense))
    convert(ours, others={"affine": "int8"}, min_features=1000)
    seen = []
    if path == "hook":
        ours[0].drop_path.register_forward_hook(lambda module, args, y: seen.append(y))
    x = torch.randn(3, 5, 70, device=device)
    if path == "wide":
        for module in (dense, ours):
            module.register_forward_pre_hook(lambda module, args: args[0].double())
            module.to(torch.float32)
        dense.linear_tokens, ours[0].linear_tokens = (Single(m) for m in (dense.linear_tokens, ours[0].linear_tokens))
        dense.mlp_channels, ours[0].mlp_channels = (Single(m) for m in (dense.mlp_channels, ours[0].mlp_channels))
    right, y = dense(x), ours(x)
    names = {node.name() for node in nodes(y.grad_fn)}
    assert ("ScaledSumFunctionBackward" in names) == (path == "plain")
    assert len(seen) == (2 if path == "hook" else 0)
    assert y.dtype == right.dtype
    torch.testing.assert_close(y, right, rtol=1e-5, atol=1e-5)


class Single(nn.Module):
    """A branch that computes in fp32 whatever it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.float())


def nodes(root) -> set:
    """Return all nodes of a graph of gradients."""
    found, left = set(), [root]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left.extend(parent for parent, _ in node.next_functions)
    return found


def test_a_compiled_block_is_one_graph_and_equal(device):
    dense = TimmResBlock(70).to(device)
    ours = nn.Sequential(dense)
    convert(ours, others={"affine": "int4"}, min_features=1000)
    x = torch.randn(3, 5, 70, device=device)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    grads = [torch.autograd.grad(model(x).square().sum(), list(ours.parameters())) for model in (ours, compiled)]
    for eager, other in zip(*grads, strict=True):
        torch.testing.assert_close(other, eager)


@each_kind
def test_nothing_is_kept_where_the_factors_are_frozen(make):
    dense, ours = pair(make, "cpu")
    for module in (dense, ours):
        module.requires_grad_(False)
    x = torch.randn(3, 5, 70, requires_grad=True)
    with saved_tensors() as saved:
        y = ours(x)
    assert all(t.dtype == torch.float32 for t in saved)
    assert torch.equal(y, dense(x))
    with torch.no_grad():
        assert not ours(x).requires_grad


def test_layers_go_back_to_what_they_were():
    _, ours = pair(MAKERS["timm affine"], "cpu")
    assert isinstance(ours[0], TimmAffine)
    assert type(ours[0]).__name__ == "FewBitAffine"
    assert revert(ours) == ["0"]
    assert type(ours[0]) is TimmAffine
    assert "_few_bit" not in ours[0].__dict__


def test_in_place_scaling_is_left_to_timm():
    _, ours = pair(lambda: TimmLayerScale(70, inplace=True), "cpu")
    x = torch.randn(2, 70)
    with torch.no_grad():
        assert ours(x) is x


def test_a_compiled_layer_is_one_graph_and_equal():
    _, ours = pair(MAKERS["affine"], "cpu")
    x = torch.randn(4, 70, requires_grad=True)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    grads = [torch.autograd.grad(model(x).square().sum(), list(ours.parameters())) for model in (ours, compiled)]
    for eager, other in zip(*grads, strict=True):
        torch.testing.assert_close(other, eager)


def test_what_cannot_be_stored_is_refused():
    _, ours = pair(MAKERS["affine"], "cpu")
    with pytest.raises(TypeError, match=r"float64 values cannot be stored as 'int4'.* HINT"):
        ours.double()(torch.randn(2, 70, dtype=torch.float64))


def test_the_module_shows_its_sizes():
    assert repr(Affine(8)) == "Affine(8, bias=True)"
    converted = nn.Sequential(Affine(8))
    convert(converted, others={"affine": "int2"})
    assert isinstance(converted[0], FewBitAffine)
    assert repr(converted[0]) == "FewBitAffine(8, bias=True, value_format='int2', block_size=32)"
