"""Activation functions that keep their derivative: bounds, errors, bytes and NaN of codes; layouts, types, modules.

What holds for all operators alike is in ``tests/contract``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_actprune.functional import activation
from lightning_actprune.operators.activation import (
    ACTIVATIONS,
    FOREIGN,
    StoredDerivative,
    check_stored,
    dither,
    encode,
    multiply,
)
from lightning_actprune.operators.base import CompressedLayer
from tests.support.activations import BITS, EXACT, ORACLES, SMOOTH, inputs, oracle, stored_of
from tests.support.compressed import compressed
from tests.support.marks import quick
from tests.support.saving import saved_tensors

each_bits = pytest.mark.parametrize("bits", BITS)
each_smooth = pytest.mark.parametrize("name", SMOOTH)


def read(x: torch.Tensor, stored: StoredDerivative) -> torch.Tensor:
    """Return the derivatives that are read back, in fp32."""
    return multiply(torch.ones(len(x)), encode(x, stored), stored, torch.float32)


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_bounds_are_bounds_and_reached(name):
    _, derivative = oracle(name, torch.linspace(-40, 40, 400_001, dtype=torch.float64))
    low, high = stored_of(name).bounds()
    assert low - 1e-7 <= derivative.min() <= low + 1e-5
    assert high - 1e-5 <= derivative.max() <= high + 1e-7


@each_bits
@each_smooth
def test_an_error_is_at_most_half_a_step_and_uniform(name, bits):
    x, stored = inputs(20_003), stored_of(name, bits)
    _, step = stored.start_and_step()
    error = (read(x, stored) - oracle(name, x)[1]) / step
    assert error.abs().max() <= 0.5 + 1e-3  # roundings of fp32 in a step of 1/255 of the range
    # Neighbours have evenly spread dithers, so that the mean varies less than of independent ones.
    assert abs(error.mean()) <= 4 * math.sqrt(1 / 12 / len(x))
    assert error.square().mean() == pytest.approx(1 / 12, rel=0.04)


@pytest.mark.parametrize("value", [-30.0, -0.7, 0.0, 1.3, 30.0])
@each_bits
@pytest.mark.parametrize("name", ["gelu", "silu", "sigmoid"])
def test_equal_values_are_unbiased_over_positions(name, bits, value):
    """Also in the tails, where the derivative is exactly zero or one."""
    x, stored = torch.full((8 * 4096,), value), stored_of(name, bits)
    error = (read(x, stored) - oracle(name, x)[1]) / stored.start_and_step()[1]
    assert abs(error.mean()) <= 4 * math.sqrt(1 / 12 / len(x))
    columns = error.view(-1, 64).mean(0)  # what sums over rows of 64 features see
    assert columns.abs().max() <= 5 * math.sqrt(1 / 12 / (len(x) // 64))


def test_dithers_of_rows_are_independent():
    u = dither(8 * 2**15, 4, torch.device("cpu")).view(-1, 8) - 0.5
    rows = u[:, 3]
    for distance in (1, 2, 48, 96, 384):
        correlation = (rows[distance:] * rows[:-distance]).mean() * 12
        assert abs(correlation) <= 4 / math.sqrt(len(rows))
    assert abs(rows.mean()) <= 4 * math.sqrt(1 / 12 / len(rows))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EXACT)
def test_two_values_are_exact(name, dtype):
    x = inputs(1003, dtype)
    grad = torch.randn(len(x), dtype=dtype)
    stored = stored_of(name)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(ORACLES[name](x), x, grad)
    found = multiply(grad, encode(x.detach(), stored), stored, dtype)
    if name == "hardsigmoid" and dtype == torch.float64:
        torch.testing.assert_close(found, expected, rtol=2**-24, atol=0)  # the sixth is one of fp32
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("count", [0, 1, 8, 9, 256, 257, 2000])
def test_bytes(count):
    for bits in BITS:
        stored, bits = stored_of("gelu", bits), bits
        assert stored.stored_bytes(count) == math.ceil(count / 8) * bits + math.ceil(count / 256)
        assert len(encode(torch.zeros(count), stored)) == stored.stored_bytes(count)
    assert stored_of("relu").stored_bytes(count) == math.ceil(count / 8)


def test_codes_lie_as_documented():
    """Codes of int4 by hand, from the dithers and the definition."""
    stored, x = stored_of("gelu"), inputs(20)
    start, step = stored.start_and_step()
    u = dither(24, 4, x.device)[:20]
    codes = ((oracle("gelu", x)[1] - start) / step + u).floor().int().tolist()
    found = encode(x, stored).tolist()
    for e, code in enumerate(codes):
        assert found[e // 2] >> (4 * (e % 2)) & 15 == code


@each_smooth
def test_what_is_not_finite_is_read_as_nan_with_its_run(name):
    """Whatever makes torch's gradient NaN makes that of its 256 neighbours NaN, even where ``g`` is zero."""
    stored = stored_of(name)
    for value in (math.nan, math.inf, -math.inf):
        x = inputs(600)
        x[300] = value
        codes = encode(x, stored)
        found = multiply(torch.zeros(600), codes, stored, torch.float32)
        expected = oracle(name, x)[1]
        assert found[:256].isfinite().all()
        assert found[512:].isfinite().all()
        if expected.isnan()[300]:
            assert found[256:512].isnan().all()
        else:
            assert found.isfinite().all()


@pytest.mark.parametrize("name", EXACT)
def test_a_nan_gradient_goes_where_torch_lets_it_in_one_bit(name):
    x, stored = inputs(64).requires_grad_(), stored_of(name)
    grad = torch.tensor([math.nan, math.inf]).repeat(32)
    (expected,) = torch.autograd.grad(ORACLES[name](x), x, grad)
    found = multiply(grad, encode(x.detach(), stored), stored, torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gleu", (), 4), r"`function` must be one of 'gelu', .*, got 'gleu'"),
        (("softplus", (1.0,), 4), r"'softplus' has 2 parameters \(beta, threshold\), got \(1.0,\)"),
        (("gelu", (1.0,), 4), r"'gelu' has 0 parameters \(none\)"),
        (("gelu", (), None), "`bits` of an activation function must be 2, 3, 4 or 8, got None. HINT"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_stored(*arguments)


def saved_bytes(call: Callable[[], Tensor]) -> int:
    """Return the bytes of the tensors that autograd saves in ``call``."""
    with saved_tensors() as saved:
        call()
    return sum(tensor.nbytes for tensor in saved)


def gradient(x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(y, x, grad)
    return found


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_output_gradient_and_saved_bytes(device, name):
    stored = stored_of(name)
    x = inputs(1003).to(device).requires_grad_()
    y = activation(x, name, *stored.parameters)
    right, derivative = oracle(name, x)
    torch.testing.assert_close(y.detach().double().cpu(), right, rtol=1e-5, atol=1e-5)
    found = gradient(x, y, torch.ones_like(y)).double().cpu()
    bound = 1e-7 if stored.exact() else stored.start_and_step()[1] * (0.5 + 1e-3)
    assert (found - derivative).abs().max() <= bound
    assert saved_bytes(lambda: activation(x, name, *stored.parameters)) == stored.stored_bytes(1003)


def layouts() -> dict[str, Tensor]:
    base = torch.randn(3, 6, 4, 10)
    return {
        "contiguous": base,
        "channels-last": base.contiguous(memory_format=torch.channels_last),
        "transposed": base.transpose(1, 3),
        "gaps": base[..., ::2],
        "expanded": base[:, :1].expand(3, 6, 4, 10),
        "scalar": base[0, 0, 0, 0].clone(),
        "empty": base[:0],
    }


@pytest.mark.parametrize("layout", list(layouts()))
@pytest.mark.parametrize("name", ["gelu", "relu"])
def test_layouts(device, name, layout):
    x = layouts()[layout].to(device).detach().requires_grad_()
    y = activation(x, name, bits=8)
    expected = ORACLES[name](x)
    assert y.stride() == expected.stride()
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    for grad in (torch.randn_like(y), torch.randn(()).to(device).expand(y.shape), torch.randn(y.shape).to(device)):
        found, right = gradient(x, activation(x, name, bits=8), grad), None
        right = gradient(x, ORACLES[name](x), grad)
        torch.testing.assert_close(
            found, right, rtol=0, atol=1.26 / 255 / 2 * float(grad.abs().max() if grad.numel() else 0) * 1.01
        )


def test_the_memory_order_decides_about_the_dither(device):
    """The same values in the same places of memory have the same codes, whatever their shape."""
    x = torch.randn(8, 6, 4, 10, device=device).contiguous(memory_format=torch.channels_last).requires_grad_()
    flat = x.detach().permute(0, 2, 3, 1).reshape(-1).requires_grad_()
    first, second = (gradient(t, y := activation(t, "silu"), torch.ones_like(y)) for t in (x, flat))
    assert torch.equal(first.permute(0, 2, 3, 1).reshape(-1), second)


@pytest.mark.parametrize("name", ["gelu", "relu"])
def test_without_a_gradient_it_is_torchs_function(name):
    x = inputs(100)
    for needs, enabled in ((False, True), (True, False)):
        with torch.set_grad_enabled(enabled):
            y = activation(x.clone().requires_grad_(needs), name)
        assert torch.equal(y, ORACLES[name](x))
        assert y.grad_fn is None


@pytest.mark.parametrize("name", ["relu", "silu"])
@pytest.mark.parametrize("dense", [True, False])
def test_in_place(device, name, dense):
    source = torch.randn(40, 20, device=device, requires_grad=True)
    x = (source * 1)[:, :: 1 if dense else 2]
    y = activation(x, name, inplace=True)
    assert y.data_ptr() == x.data_ptr()
    assert torch.equal(x, y)
    expected = gradient(source, activation((source * 1)[:, :: 1 if dense else 2], name), torch.ones_like(y))
    assert torch.equal(gradient(source, y, torch.ones_like(y)), expected)


def test_in_place_of_what_others_need_is_an_error_as_in_torch():
    source = torch.randn(8, requires_grad=True)
    x = source.exp()  # which keeps its result
    activation(x, "relu", inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        activation(source, "relu", inplace=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_types_that_cannot_be_kept(dtype):
    with pytest.raises(TypeError, match=r"The derivative of 'tanh' is kept in few bits of float32, .*HINT"):
        activation(torch.randn(4, dtype=dtype, requires_grad=True), "tanh")


def test_fp64_in_one_bit():
    x = torch.randn(100, dtype=torch.float64, requires_grad=True)
    found = gradient(x, activation(x, "relu"), x.detach())
    assert torch.equal(found, gradient(x, F.relu(x), x.detach()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "transposed"),
    quick(
        [*((name, False) for name in ACTIVATIONS), ("gelu", True), ("relu", True)],
        *[("gelu", False), ("relu", False), ("gelu", True)],
    ),
)
def test_compiled_in_one_graph_it_is_the_same_in_as_many_bytes(name, transposed):
    torch._dynamo.reset()
    parameters = stored_of(name).parameters
    x = torch.randn(12, 20)
    x = (x.t() if transposed else x).detach().requires_grad_()
    grad = torch.randn(x.shape)

    def net(x: Tensor) -> Tensor:
        return activation(x * 2, name, *parameters) * 3

    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    y, expected = compiled(x), net(x)
    assert torch.equal(y, expected)
    assert y.stride() == expected.stride()
    assert torch.equal(gradient(x, y, grad), gradient(x, expected, grad))
    assert saved_bytes(lambda: compiled(x)) <= saved_bytes(lambda: net(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.slow
def test_one_compiled_graph_serves_any_number_of_rows(transposed):
    torch._dynamo.reset()
    compiled = torch.compile(activation, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5, 8):
        x = torch.randn(rows, 20)
        x = (x.t() if transposed else x).requires_grad_()
        grad = torch.randn(x.shape)
        assert torch.equal(gradient(x, compiled(x, "gelu"), grad), gradient(x, activation(x, "gelu"), grad))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gelu", "softplus"])
def test_autocast_on_the_gpu_has_torchs_types(name):
    stored = stored_of(name)
    x = torch.randn(1000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y, expected = activation(x, name, *stored.parameters), ORACLES[name](x)
    assert y.dtype == expected.dtype
    assert gradient(x, y, torch.ones_like(y)).dtype == torch.bfloat16


@pytest.mark.gpu
def test_a_cuda_graph_replays_the_same_gradient():
    x = torch.randn(1000, device="cuda", requires_grad=True)
    grad = torch.randn(1000, device="cuda")
    expected = gradient(x, activation(x, "gelu"), grad)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradient(x, activation(x, "gelu"), grad)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradient(x, activation(x, "gelu"), grad)
    graph.replay()
    assert torch.equal(found, expected)


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


@each_module
def test_output_is_that_of_the_dense_module(name):
    dense, layer, x = MODULES[name], compressed(MODULES[name], "activation", bits=8), inputs(1000)
    assert isinstance(layer, type(dense))
    assert layer.dense_class is type(dense)
    assert torch.equal(layer(x), dense(x))
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    torch.testing.assert_close(y, dense(x), rtol=1e-6, atol=1e-6)
    (found,) = torch.autograd.grad(y.sum(), leaf)
    (expected,) = torch.autograd.grad(dense(leaf).sum(), leaf)
    assert (found - expected).abs().max() <= 2 / 255 / 2 + 1e-3


@pytest.mark.parametrize("cls", [nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.Mish, nn.Hardswish, nn.ELU])
def test_in_place_modules_write_to_their_input(cls):
    layer, source = compressed(cls(inplace=True), "activation", bits=4), torch.randn(100, requires_grad=True)
    x = source * 2
    y = layer(x)
    assert y.data_ptr() == x.data_ptr()
    torch.testing.assert_close(y, cls()(source * 2))
    y.sum().backward()
    assert source.grad is not None


# What transformers' classes compute, by their documentation.
def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


FUNCTIONS = {
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
        for name, function in FUNCTIONS.items():
            body = {"forward": lambda self, x, f=function: f(x), "act": F.gelu, "__module__": found.__name__}
            setattr(found, name, type(name, (nn.Module,), body))
        monkeypatch.setitem(sys.modules, "transformers.activations", found)
    return found


@pytest.mark.parametrize("name", [name for module, name in FOREIGN if module.startswith("transformers")])
def test_activations_of_transformers(foreign, name):
    cls = getattr(foreign, name, None)
    if cls is None:  # of another version
        assert name in ("PytorchGELUTanh", "GELUTanh")
        return
    dense, x = cls(), inputs(1000)
    layer = compressed(dense, "activation", bits=8)
    assert isinstance(layer, CompressedLayer)
    assert isinstance(layer, cls)
    assert torch.equal(layer(x), dense(x))
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(layer(leaf), FUNCTIONS[name](x), rtol=1e-5, atol=2e-5)
    (found,) = torch.autograd.grad(layer(leaf).sum(), leaf)
    (expected,) = torch.autograd.grad(FUNCTIONS[name](leaf).sum(), leaf)
    assert (found - expected).abs().max() <= 1.3 / 255 / 2 + 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for module, name in FOREIGN if module.startswith("transformers")])
def test_autocast_of_transformers_activations_on_the_gpu(foreign, name):
    cls = getattr(foreign, name, nn.GELU)
    x = torch.randn(1000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        dense, ours = cls()(x), compressed(cls(), "activation", bits=4)(x)
    if hasattr(foreign, "__file__"):  # a stand-in has no way of its own to be written
        assert ours.dtype == dense.dtype
    torch.testing.assert_close(ours.float(), dense.float(), rtol=0.03, atol=0.03)
