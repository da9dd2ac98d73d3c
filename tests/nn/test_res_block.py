"""Blocks of timm's ResMLP that keep in few bits what their branches return."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

from lightning_actprune import convert
from tests.affine import (
    TimmResBlock,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_block_scales_its_branches(device, dtype):
    """All gradients but those of the factors are as exact as sums in another order."""
    torch.manual_seed(0)
    dense = TimmResBlock(70).to(device)
    for factors in (dense.ls1, dense.ls2):
        nn.init.normal_(factors)
    ours = nn.Sequential(copy.deepcopy(dense))
    report = convert(ours, others={"scale": "int8"}, min_features=1000)
    assert [(layer.fqn, layer.kind, layer.operator) for layer in report.few_bit] == [("0", "ResBlock", "scale")]
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
    convert(ours, others={"scale": "int8"}, min_features=1000)
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
    convert(ours, others={"scale": "int4"}, min_features=1000)
    x = torch.randn(3, 5, 70, device=device)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    grads = [torch.autograd.grad(model(x).square().sum(), list(ours.parameters())) for model in (ours, compiled)]
    for eager, other in zip(*grads, strict=True):
        torch.testing.assert_close(other, eager)
