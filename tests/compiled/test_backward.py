"""What is written anew in inductor's graphs of backward: functions of unpacked values, and who reads a gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_actprune.codec.packed import quantize
from lightning_actprune.compiled.backward import write_backward
from lightning_actprune.compiled.graphs import name_of

BITS, LENGTH = 8, 64
ERROR = 5e-7


def unpack(stored: Tensor) -> Tensor:
    return torch.ops.actprune.dequantize(stored, stored.shape[0] * 32 // LENGTH, LENGTH, 32, BITS, torch.float32)


def written(function: Callable[..., object], *inputs: Tensor) -> tuple[GraphModule, set[str]]:
    """Return the graph of a function, written anew, and the names of its operations."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    write_backward(module.graph)
    module.graph.lint()
    module.recompile()
    return module, {name_of(node) for node in module.graph.nodes}


def stored_values() -> Tensor:
    """Pack small and large numbers of both signs, zeros, and a block of NaN."""
    x = torch.cat([torch.linspace(-6, 6, 1024), torch.linspace(-0.01, 0.01, 1024), torch.linspace(-90, 90, 2048)])
    x = torch.cat([x, torch.zeros(32), torch.full((32,), torch.nan)])
    return quantize(x.view(1, -1, LENGTH), 32, BITS)


@pytest.mark.parametrize("function", [torch.erf, torch.tanh])
@pytest.mark.parametrize("factor", [1.0, 0.5**0.5])
def test_functions_of_unpacked_values_are_near(function, factor):
    stored = stored_values()
    module, names = written(lambda stored: function(unpack(stored) * factor), stored)
    assert f"aten.{function.__name__}" not in names
    exact = function(unpack(stored).double() * factor)
    torch.testing.assert_close(module(stored).double(), exact, rtol=0, atol=ERROR, equal_nan=True)


def test_an_exponential_of_unpacked_values_is_near():
    """Relative to its value: the exponent is rounded, which is up to 65 in base 2 here."""
    stored = stored_values()
    module, names = written(lambda stored: torch.exp(unpack(stored) * -0.5), stored)
    assert "aten.exp2" in names
    exact = torch.exp(unpack(stored).double() * -0.5)
    torch.testing.assert_close(module(stored).double(), exact, rtol=8e-6, atol=0, equal_nan=True)


def test_a_gelu_and_its_derivative_share_an_exponential():
    def derivative(stored: Tensor) -> Tensor:
        x = unpack(stored)
        return 0.5 * (torch.erf(x * 0.5**0.5) + 1) + x * (torch.exp(x * x * -0.5) * 0.3989422804014327)

    stored = stored_values()
    module, _ = written(derivative, stored)
    exponents = {node.args[0].args[1] for node in module.graph.nodes if name_of(node) == "aten.exp2"}
    assert len(exponents) == 1
    x = unpack(stored).double().requires_grad_()
    (exact,) = torch.autograd.grad(torch.nn.functional.gelu(x).sum(), x)
    torch.testing.assert_close(module(stored).double(), exact, rtol=0, atol=2 * ERROR, equal_nan=True)


@pytest.mark.parametrize("values", ["another", "double"])
def test_functions_of_other_values_stay_exact(values):
    def function(stored: Tensor, other: Tensor) -> Tensor:
        return torch.erf(unpack(stored).double() if values == "double" else unpack(stored) + other)

    _, names = written(function, stored_values(), torch.randn_like(unpack(stored_values())))
    assert "aten.erf" in names


def test_a_small_tensor_leaves_a_function_one_of_unpacked_values():
    _, names = written(lambda stored, bias: torch.erf(unpack(stored) + bias), stored_values(), torch.randn(LENGTH))
    assert "aten.erf" not in names


def test_a_sum_reads_the_gradient_that_a_product_reads():
    def gradients(stored: Tensor, g: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        grad = (g * torch.erf(unpack(stored).view(g.shape))).bfloat16()
        return grad.sum(0), grad.view(-1, LENGTH) @ weight

    stored, weight = stored_values(), torch.randn(LENGTH, 5, dtype=torch.bfloat16)
    g = torch.randn_like(unpack(stored)).view(5, -1, LENGTH)
    expected = gradients(stored, g, weight)
    module, _ = written(gradients, stored, g, weight)
    nodes = {name_of(node): node for node in module.graph.nodes}
    total, product = nodes["aten.sum"], nodes["aten.mm"]
    assert total.args[0].args[0] is product.args[0]
    for found, wanted in zip(module(stored, g, weight), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.01, atol=0.01, equal_nan=True)


def test_a_sum_computes_a_gradient_whose_sizes_are_symbols():
    def gradients(stored: Tensor, g: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        grad = g * torch.erf(unpack(stored).view(g.shape))
        return grad.sum(0), grad.view(-1, LENGTH) @ weight

    inputs = stored_values(), torch.randn(5, 13, LENGTH), torch.randn(LENGTH, 5)
    module = make_fx(gradients, tracing_mode="symbolic")(*inputs)
    write_backward(module.graph)
    module.graph.lint()
    module.recompile()
    for found, wanted in zip(module(*inputs), gradients(*inputs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_a_graph_that_unpacks_nothing_stays_as_it_is():
    _, names = written(lambda x: torch.erf(x).exp().tanh(), torch.randn(8))
    assert {"aten.erf", "aten.exp", "aten.tanh"} <= names
