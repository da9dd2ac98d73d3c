"""Activation functions and gated products that keep their derivatives in few bits: errors, bytes, layouts, types."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_actprune.functional import activation, gated
from lightning_actprune.operators.activation import (
    ACTIVATIONS,
    StoredDerivative,
    check_stored,
    encode,
    multiply,
)
from lightning_actprune.operators.gated import gated_halves
from tests.support.activations import BITS, EXACT, ORACLES, SMOOTH, gated_oracle, inputs, oracle, stored_of
from tests.support.cases import CASES
from tests.support.compressed import compressed
from tests.support.marks import in_turn
from tests.support.oracle import largest_error, relative_error
from tests.support.saving import saved_tensors

LENGTH = 100


def saved_bytes(call: Callable[[], Tensor]) -> int:
    with saved_tensors() as saved:
        call()
    return sum(tensor.nbytes for tensor in saved)


def gradients(y: Tensor, *leaves: Tensor, grad: Tensor | None = None) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, leaves, torch.ones_like(y) if grad is None else grad)


def read(x: torch.Tensor, stored: StoredDerivative) -> torch.Tensor:
    return multiply(torch.ones(len(x)), encode(x, stored), stored, torch.float32)


def test_bounds_are_bounds_and_reached():
    for name in ACTIVATIONS:
        _, derivative = oracle(name, torch.linspace(-40, 40, 400_001, dtype=torch.float64))
        low, high = stored_of(name).bounds()
        assert low - 1e-7 <= derivative.min() <= low + 1e-5, name
        assert high - 1e-5 <= derivative.max() <= high + 1e-7, name


@pytest.mark.parametrize(("name", "bits"), [*in_turn(ACTIVATIONS, BITS), *(("gelu", bits) for bits in BITS[1:])])
def test_the_output_is_exact_and_an_error_at_most_half_a_step_and_uniform(device, name, bits):
    x, stored = inputs(20_003).to(device).requires_grad_(), stored_of(name, bits)
    call = lambda: activation(x, name, *stored.parameters, bits=bits)  # noqa: E731
    assert saved_bytes(call) == stored.stored_bytes(len(x))
    y, (right, derivative) = call(), oracle(name, x)
    torch.testing.assert_close(y.detach().double().cpu(), right, rtol=1e-5, atol=1e-5)
    error = gradients(y, x)[0].double().cpu() - derivative
    with torch.autocast(device.type, torch.bfloat16):
        low = x.detach().bfloat16().requires_grad_()
        assert activation(low, name, *stored.parameters).dtype == ORACLES[name](low).dtype
    if stored.exact():
        assert error.abs().max() <= 1e-7
        return
    error /= stored.start_and_step()[1]
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


def test_in_place(device):
    source = torch.randn(40, 20, device=device, requires_grad=True)
    for name, step in itertools.product(("relu", "silu"), (1, 2)):
        x = (source * 1)[:, ::step]
        y = activation(x, name, inplace=True)
        assert y.data_ptr() == x.data_ptr()
        assert torch.equal(x, y)
        expected = gradients(activation((source * 1)[:, ::step], name), source)
        assert torch.equal(*gradients(y, source), *expected)
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
    a, u = pair(2, 64)
    for given in ((a.double(), u), (a, u.double()), (a, u[:, :3]), (a[:, :63], None)):
        with pytest.raises((TypeError, ValueError), match=r"float64|\(2, 3\)|\(2, 63\)"):
            gated(*given, "relu")


def test_gradients_of_dropout_are_scaled_as_its_output_and_zero_where_that_is(device):
    x = torch.rand(7, 64, device=device).add(0.5).requires_grad_()
    for size in (1.0, torch.inf):
        y, grad = compressed(nn.Dropout(0.3), "activation", bits=4)(x), torch.full_like(x, size)
        torch.testing.assert_close(gradients(y, x, grad=grad)[0], torch.where(y == 0, 0, grad * (y / x).detach()))


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


# Gated products.


def pair(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    a = inputs(math.prod(shape), dtype).view(shape).to(device)
    return a.requires_grad_(), torch.randn(shape).to(dtype).to(device).requires_grad_()


def check(a: Tensor, u: Tensor, name: str, bits: int, block_size: int = 32) -> None:
    z = gated(a, u, name, *stored_of(name).parameters, bits=bits, block_size=block_size)
    right, *factors = gated_oracle(name, a, u)
    eps = torch.finfo(z.dtype).eps
    # A unit in the last place, and in fp32 the few of the function; 1 + erf and log cancel.
    maths = 2**-20 * (a.abs() + 1).detach().double().cpu() * u.abs().detach().double().cpu()
    assert not ((z.double().cpu() - right).abs() > 2 * eps * right.abs() + maths).any()
    for found, factor in zip(gradients(z, a, u), factors, strict=True):
        bound = largest_error(factor, block_size, bits)
        least = torch.finfo(found.dtype).smallest_normal
        rounding = torch.finfo(found.dtype).eps * (factor.abs() + bound) + least + maths.abs() * 2**-2
        assert not ((found.double().cpu() - factor).abs() > bound + rounding).any()


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_every_gate(device, name):
    check(*pair(3, 5, LENGTH, device=device), name, 8)


@pytest.mark.parametrize(
    ("length", "dtype", "bits", "block_size"),
    [
        (70, torch.bfloat16, 4, 32),
        (70, torch.bfloat16, 2, 32),
        (1, torch.float32, 4, 32),
        (33, torch.float16, 4, 32),
        (64, torch.float32, 2, 8),
        (100, torch.float32, 3, 24),
        (130, torch.bfloat16, 8, 64),
    ],
    ids=str,
)
def test_formats_types_and_odd_rows_of_gates(device, length, dtype, bits, block_size):
    rows, (a, u) = 5, pair(5, length, dtype=dtype, device=device)
    check(a, u, "silu" if dtype == torch.bfloat16 else "gelu", bits, block_size)
    block = min(block_size, length)
    codes = sum(math.ceil(block * plane / 8) for plane in ((2, 1) if bits == 3 else (bits,)))
    found = saved_bytes(lambda: gated(a, u, "silu", bits=bits, block_size=block_size))
    assert found == 2 * rows * math.ceil(length / block) * (codes + codes % 2 + 2)


def test_halves_are_as_two_tensors(device):
    x, grad = torch.randn(4, 6, 2 * LENGTH, device=device).requires_grad_(), torch.randn(4, 6, LENGTH, device=device)
    for gate_first in (True, False):
        a, u = x.chunk(2, -1)[:: 1 if gate_first else -1]
        expected = gated(a, u, "silu")
        z = gated_halves(x, StoredDerivative("silu", (), 4), 32, -1, gate_first)
        assert torch.equal(z, expected)
        assert torch.equal(*(gradients(y, x, grad=grad)[0] for y in (z, expected)))
    assert torch.equal(gated(x, None, "silu"), gated_halves(x, StoredDerivative("silu", (), 4), 32, -1, True))


def layouts() -> dict[str, Tensor]:
    base = torch.randn(2, 3, 6, 4, 10)
    return {
        "contiguous": base,
        "half": base.reshape(2, 3, 24, 10)[..., :5],
        "channels-last": base.transpose(2, 4),
        "transposed": base.transpose(1, 3),
        "gaps": base[..., ::2],
        "expanded": base[:, :1].expand(2, 3, 6, 4, 10),
        "scalar": base[:, 0, 0, 0, 0],
        "empty": base[:, :0],
        "empty-rows": base[..., :0],
    }


@pytest.mark.parametrize("layout", list(layouts()))
def test_layouts_of_gates(device, layout):
    a, u = (x.detach().requires_grad_() for x in layouts()[layout].to(device))
    z = gated(a, u, "silu", bits=8, block_size=8)
    expected = F.silu(a) * u
    assert z.stride() == expected.stride()
    torch.testing.assert_close(z, expected, rtol=1e-5, atol=1e-6)
    for grad in (torch.randn_like(z), torch.randn(()).to(device).expand(z.shape)):
        z = gated(a, u, "silu", bits=8, block_size=8)
        for found, right in zip(gradients(z, a, u, grad=grad), gradients(F.silu(a) * u, a, u, grad=grad), strict=True):
            assert found.shape == right.shape
            assert found.isfinite().all()
            # Half a step of 1/255 of the range; q has factors up to 1.1 of values below 5.
            assert not (found - right).abs().gt(0.03 * grad.abs().amax() if grad.numel() else 0.0).any()


def test_what_needs_no_gradient_is_not_kept(device):
    leaves = pair(6, 64, device=device)
    both = gradients(gated(*leaves, "gelu"), *leaves)
    for wanted in (0, 1):
        leaves[wanted].requires_grad_(True), leaves[1 - wanted].requires_grad_(False)
        assert saved_bytes(lambda: gated(*leaves, "gelu")) == 6 * 2 * 18
        (found,) = gradients(gated(*leaves, "gelu"), leaves[wanted])
        # Of p alone blocks have other places, and dithers: both are off by at most half a step.
        bound = largest_error(both[wanted].double().cpu(), 32, 4)
        assert (found - both[wanted]).cpu().abs().le(2.2 * bound + 1e-6).all()
        assert wanted or torch.equal(found, both[0])


def test_two_types_are_promoted(device):
    half, bf16, full = torch.float16, torch.bfloat16, torch.float32
    for types in ((bf16, full), (full, half), (half, bf16)):
        a, u = (x.detach().to(t).requires_grad_() for x, t in zip(pair(3, 64, device=device), types, strict=True))
        z = gated(a, u, "silu")
        assert z.dtype == (F.silu(a) * u).dtype
        assert tuple(grad.dtype for grad in gradients(z, a, u)) == types
        check(a, u, "silu", 4)


def test_what_is_not_finite_makes_its_block_nan(device):
    cases = itertools.product((math.nan, math.inf, -math.inf), ((0, "silu"), (1, "silu"), (0, "sigmoid")))
    for value, (place, name) in cases:
        leaves = pair(2, 70, device=device)
        with torch.no_grad():
            leaves[place][1, 33] = value
        z = gated(*leaves, name)
        right, *factors = gated_oracle(name, *leaves)
        assert torch.equal(z.cpu().isfinite(), right.isfinite())
        for found, factor in zip(gradients(z, *leaves, grad=torch.zeros_like(z)), factors, strict=True):
            expected = torch.zeros(2, 70, dtype=torch.bool)
            expected[1, 32:64] = not factor.isfinite().all()
            assert torch.equal(found.isnan().cpu(), expected)


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_one_compiled_graph_of_two_tensors():
    torch._dynamo.reset()
    net = lambda a, u: gated(a * 2, u, "silu") * 3  # noqa: E731
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=False)
    leaves = [x.detach().t().requires_grad_() for x in pair(12, 40)]
    z, expected = (call(*leaves) for call in (compiled, net))
    assert torch.equal(z, expected)
    grad = torch.randn(z.shape)
    assert all(map(torch.equal, gradients(z, *leaves, grad=grad), gradients(expected, *leaves, grad=grad)))


@pytest.mark.foreign
def test_parts_of_an_mlp_may_be_frozen_hooked_and_replaced():
    dense, x, seen = CASES["llama-mlp"].dense().layer, torch.randn(4, 10, 72), []
    for frozen in ("gate_proj", "up_proj"):
        dense.requires_grad_(True)
        getattr(dense, frozen).requires_grad_(False)
        module = compressed(dense, "activation", bits=8)
        grads = (gradients(m(x), *[p for p in m.parameters() if p.requires_grad]) for m in (module, dense))
        for actual, expected in zip(*grads, strict=True):
            assert relative_error(actual, expected) < 0.015
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(module, name).register_forward_hook(lambda *_, name=name: seen.append(name))
    for function in (nn.Softsign(), nn.ReLU()):
        module.act_fn = dense.act_fn = function
        torch.testing.assert_close(module(x), dense(x))
    assert seen == ["gate_proj", "up_proj", "down_proj"] * 2
    assert "CompressedCompressed" not in repr(module)


def test_the_factors_have_errors_of_their_own(device):
    """Where both are the same, their dithers are not: blocks of both are numbered as one tensor's."""
    a = (1 + torch.rand(64, 64)).to(device).requires_grad_()
    u = a.detach().clone().requires_grad_()
    q, p = gradients(gated(a, u, "relu"), a, u)
    first, second = (q - a).detach(), (p - a).detach()
    assert abs((first * second).mean() / first.square().mean()) < 0.1
