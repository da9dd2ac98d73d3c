"""Activation functions that keep their derivative: bounds, errors, bytes and NaN of codes; layouts, types, modules."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune.functional import activation
from lightning_actprune.operators.activation import (
    ACTIVATIONS,
    StoredDerivative,
    check_stored,
    encode,
    multiply,
)
from tests.support.activations import BITS, EXACT, ORACLES, SMOOTH, inputs, oracle, stored_of
from tests.support.compressed import compressed
from tests.support.marks import in_turn
from tests.support.saving import saved_tensors


def read(x: torch.Tensor, stored: StoredDerivative) -> torch.Tensor:
    return multiply(torch.ones(len(x)), encode(x, stored), stored, torch.float32)


def test_bounds_are_bounds_and_reached():
    for name in ACTIVATIONS:
        _, derivative = oracle(name, torch.linspace(-40, 40, 400_001, dtype=torch.float64))
        low, high = stored_of(name).bounds()
        assert low - 1e-7 <= derivative.min() <= low + 1e-5, name
        assert high - 1e-5 <= derivative.max() <= high + 1e-7, name


@pytest.mark.parametrize(("name", "bits"), [*in_turn(SMOOTH, BITS), *(("gelu", bits) for bits in BITS[1:])])
def test_an_error_is_at_most_half_a_step_and_uniform(name, bits):
    x, stored = inputs(20_003), stored_of(name, bits)
    _, step = stored.start_and_step()
    error = (read(x, stored) - oracle(name, x)[1]) / step
    assert error.abs().max() <= 0.5 + 1e-3  # roundings of fp32 in a step of 1/255 of the range
    # Neighbours have evenly spread dithers, so that the mean varies less than of independent ones.
    assert abs(error.mean()) <= 4 * math.sqrt(1 / 12 / len(x))
    assert error.square().mean() == pytest.approx(1 / 12, rel=0.04)


@pytest.mark.parametrize(("name", "bits"), [("gelu", 8), ("gelu", 3), ("silu", 4), ("sigmoid", 2)])
def test_equal_values_are_unbiased_over_positions(name, bits):
    """Also in the tails, where the derivative is exactly zero or one."""
    stored = stored_of(name, bits)
    for value in (-30.0, -0.7, 0.0, 1.3, 30.0):
        x = torch.full((8 * 4096,), value)
        error = (read(x, stored) - oracle(name, x)[1]) / stored.start_and_step()[1]
        assert abs(error.mean()) <= 4 * math.sqrt(1 / 12 / len(x))
        columns = error.view(-1, 64).mean(0)  # what sums over rows of 64 features see
        assert columns.abs().max() <= 5 * math.sqrt(1 / 12 / (len(x) // 64))


@pytest.mark.parametrize("name", EXACT)
def test_two_values_are_exact(name):
    stored = stored_of(name)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x, grad = inputs(1003, dtype).requires_grad_(), torch.randn(1003, dtype=dtype)
        grad[500:502] = torch.tensor([math.nan, math.inf])
        (expected,) = torch.autograd.grad(ORACLES[name](x), x, grad)
        found = multiply(grad, encode(x.detach(), stored), stored, dtype)
        sixth = name == "hardsigmoid" and dtype == torch.float64  # a number of fp32
        torch.testing.assert_close(found, expected, rtol=2**-24 if sixth else 0, atol=0, equal_nan=True)


def test_what_is_not_finite_is_read_as_nan_with_its_run():
    """Whatever makes torch's gradient NaN makes that of its 256 neighbours NaN, even where ``g`` is zero."""
    for name, value in itertools.product(SMOOTH, (math.nan, math.inf, -math.inf)):
        x, stored = inputs(600), stored_of(name)
        x[300] = value
        found = multiply(torch.zeros(600), encode(x, stored), stored, torch.float32)
        lost = torch.zeros(600, dtype=torch.bool)
        lost[256:512] = oracle(name, x)[1].isnan()[300]
        assert torch.equal(found.isnan(), lost), (name, value)
        assert found[~lost].isfinite().all()


def test_wrong_arguments():
    for arguments in (("gleu", (), 4), ("softplus", (1.0,), 4), ("gelu", (1.0,), 4), ("gelu", (), None)):
        with pytest.raises(ValueError, match=r"'gleu'|'softplus' .*\(1.0,\)|'gelu' .*\(1.0,\)|`bits` .* None"):
            check_stored(*arguments)


def gradient(x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(y, x, grad)
    return found


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_output_gradient_and_saved_bytes(device, name):
    stored = stored_of(name)
    x = inputs(1003).to(device).requires_grad_()
    with saved_tensors() as saved:
        y = activation(x, name, *stored.parameters)
    assert sum(tensor.nbytes for tensor in saved) == stored.stored_bytes(1003)
    right, derivative = oracle(name, x)
    torch.testing.assert_close(y.detach().double().cpu(), right, rtol=1e-5, atol=1e-5)
    found = gradient(x, y, torch.ones_like(y)).double().cpu()
    bound = 1e-7 if stored.exact() else stored.start_and_step()[1] * (0.5 + 1e-3)
    assert (found - derivative).abs().max() <= bound


def test_in_place(device):
    source = torch.randn(40, 20, device=device, requires_grad=True)
    for name, step in itertools.product(("relu", "silu"), (1, 2)):
        x = (source * 1)[:, ::step]
        y = activation(x, name, inplace=True)
        assert y.data_ptr() == x.data_ptr()
        assert torch.equal(x, y)
        expected = gradient(source, activation((source * 1)[:, ::step], name), torch.ones_like(y))
        assert torch.equal(gradient(source, y, torch.ones_like(y)), expected)
    for dense in (nn.SiLU(inplace=True), nn.Dropout(0.5, inplace=True)):
        layer, x = compressed(dense, "activation", bits=4), source * 1
        assert layer(x) is x
        with pytest.raises(RuntimeError, match="leaf Variable"):
            layer(source)


def test_what_is_refused():
    source = torch.randn(8, requires_grad=True)
    x = source.exp()  # which keeps its result
    activation(x, "relu", inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()
    with pytest.raises(TypeError, match="complex64"):
        activation(source.detach().to(torch.complex64).requires_grad_(), "tanh")


def test_gradients_of_dropout_are_scaled_as_its_output_and_zero_where_that_is(device):
    x = torch.rand(7, 64, device=device).add(0.5).requires_grad_()
    for size in (1.0, torch.inf):
        y, grad = compressed(nn.Dropout(0.3), "activation", bits=4)(x), torch.full_like(x, size)
        torch.testing.assert_close(gradient(x, y, grad), torch.where(y == 0, 0, grad * (y / x).detach()))


@pytest.mark.gpu
def test_a_cuda_graph_of_dropout_draws_anew_at_each_replay():
    layer, x = compressed(nn.Dropout(0.5), "activation", bits=4), torch.ones(1000, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(layer(x).sum(), x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
    seen = []
    for _ in range(2):
        graph.replay()
        assert torch.equal(grad, y.detach())
        seen.append(grad.clone())
    assert not torch.equal(*seen)


@pytest.mark.integration
def test_compiled_dropout_is_the_compilers():
    """One graph, and the mask of backward is that of forward."""
    torch._dynamo.reset()
    compiled = torch.compile(compressed(nn.Dropout(0.5), "activation", bits=4), fullgraph=True, backend="aot_eager")
    x = torch.randn(200, requires_grad=True)
    y = compiled(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad * x.detach(), y.detach(), rtol=1e-6, atol=0)
    assert 0 < (y == 0).sum() < 200
