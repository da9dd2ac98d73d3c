"""In transforms, when traced or exported, and on sparse or nested inputs, compressed modules do what dense ones do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from lightning_actprune import functional
from tests.support.cases import Case, Holder

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::torch.jit.TracerWarning",
    "ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning",
    "ignore:There is a performance drop because we have not yet implemented the batching rule:UserWarning",
)


def check(case: Case, compute: Callable[[Holder], Any]) -> None:
    """Assert that ``compute`` returns the same for a compressed module as for the dense one, or raises the same."""
    found = []
    for model in case.pair():
        torch.manual_seed(3)
        try:
            found.append(compute(model))
        except Exception as error:
            found.append(type(error))
    assert_equal(*found)


def assert_equal(dense: Any, ours: Any) -> None:
    if isinstance(dense, Tensor):
        assert torch.equal(dense, ours)
    elif isinstance(dense, tuple | dict):
        assert len(dense) == len(ours)
        for key in dense if isinstance(dense, dict) else range(len(dense)):
            assert_equal(dense[key], ours[key])
    else:
        assert dense == ours


W = torch.randn(40, 72, generator=torch.Generator().manual_seed(1)).requires_grad_()


def per_sample(model: Holder, x: Tensor) -> dict[str, Tensor]:
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    loss = lambda given, x: functional_call(model, given, (x,)).square().sum()  # noqa: E731
    return torch.vmap(torch.func.grad(loss), (None, 0), randomness="same")(parameters, torch.stack([x, 2 * x]))


TRANSFORMS = {
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).square().sum())(x),
    "second": lambda model, x: torch.func.grad(lambda x: torch.func.vjp(model, x)[1](model(x))[0].sum())(x),
    "vmap": lambda model, x: torch.vmap(model, randomness="same")(torch.stack([x, 2 * x])),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (2 * x,)),
    "per sample": per_sample,
}


def test_in_transforms(case: Case):
    for transform in TRANSFORMS.values():
        check(case, lambda model: transform(model, case.input().detach()))  # noqa: B023


CALLS = {
    "linear": (lambda x: functional.linear(x, W, sparsity=0.5), lambda x: F.linear(x, W)),
    "activation": (lambda x: functional.activation(x, "relu"), F.relu),
    "gated": (lambda x: functional.gated(x, x, "silu"), lambda x: F.silu(x) * x),
}


@pytest.mark.parametrize("name", CALLS)
def test_functions(name: str):
    def gradient(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        x = torch.randn(3, 5, 72, generator=torch.Generator().manual_seed(2))
        transformed = torch.func.grad(lambda x: function(x).square().sum())(x)
        x = LAYOUTS["jagged"](x)
        function(x).values().square().sum().backward()
        return (transformed, *values(x.grad))

    assert_equal(*map(gradient, CALLS[name]))


def test_traced(case: Case):
    """The same operators, with the output of the dense module."""

    def kinds(model: Holder) -> tuple[tuple[str, ...], Tensor]:
        traced = torch.jit.trace(model, case.input(), check_trace=False)
        torch.manual_seed(4)
        return tuple(node.kind() for node in traced.inlined_graph.nodes()), traced(case.input()).detach()

    check(case, kinds)


def test_exported(case: Case):
    def targets(model: Holder) -> tuple[str, ...]:
        graph = torch.export.export(model, (case.input(),), strict=False).graph
        graph.eliminate_dead_code()  # a view at which was only looked
        return tuple(str(node.target) for node in graph.nodes if node.op == "call_function")

    check(case, targets)


def nested(x: Tensor, layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([x[0], x[1][: len(x[1]) - 1]], layout=layout, requires_grad=True)


LAYOUTS = {
    "sparse": lambda x: x.to_sparse().requires_grad_(),
    "nested": lambda x: nested(x, torch.strided),
    "jagged": lambda x: nested(x, torch.jagged),
}


def values(x: Tensor) -> tuple[Tensor, ...]:
    return x.unbind() if x.is_nested else (x.to_dense(),)


def test_of_what_is_sparse_or_nested(case: Case):
    for lay_out in LAYOUTS.values():

        def gradients(model: Holder, lay_out: Any = lay_out) -> tuple[Any, ...]:
            x = lay_out(case.input().detach())
            y = values(model(x))
            sum(part.square().sum() for part in y).backward()
            return y, values(x.grad), {name: p.grad for name, p in model.named_parameters()}

        check(case, gradients)
