"""Autograd of activation functions in few bits: layouts, dtypes, compile, what is saved, what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_actprune import functional
from lightning_actprune.ops.activate import pack_mask
from lightning_actprune.ops.activations import ACTIVATIONS
from tests.activations import ORACLES, inputs, kept_of, oracle


def saved_bytes(call) -> int:
    """Return the bytes of the tensors that autograd saves in ``call``."""
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        call()
    return sum(saved)


def gradient(x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(y, x, grad)
    return found


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_output_gradient_and_saved_bytes(device, name):
    kept = kept_of(name)
    x = inputs(1003).to(device).requires_grad_()
    y = functional.activation(x, name, *kept.parameters)
    right, derivative = oracle(name, x)
    torch.testing.assert_close(y.detach().double().cpu(), right, rtol=1e-5, atol=1e-5)
    found = gradient(x, y, torch.ones_like(y)).double().cpu()
    bound = 1e-7 if kept.exact else kept.start_and_step[1] * (0.5 + 1e-3)
    assert (found - derivative).abs().max() <= bound
    assert saved_bytes(lambda: functional.activation(x, name, *kept.parameters)) == kept.stored_bytes(1003)


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
    y = functional.activation(x, name, value_format="int8")
    expected = ORACLES[name](x)
    assert y.stride() == expected.stride()
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    for grad in (torch.randn_like(y), torch.randn(()).to(device).expand(y.shape), torch.randn(y.shape).to(device)):
        found, right = gradient(x, functional.activation(x, name, value_format="int8"), grad), None
        right = gradient(x, ORACLES[name](x), grad)
        torch.testing.assert_close(
            found, right, rtol=0, atol=1.26 / 255 / 2 * float(grad.abs().max() if grad.numel() else 0) * 1.01
        )


def test_the_memory_order_decides_about_the_dither(device):
    """The same values in the same places of memory have the same codes, whatever their shape."""
    x = torch.randn(8, 6, 4, 10, device=device).contiguous(memory_format=torch.channels_last).requires_grad_()
    flat = x.detach().permute(0, 2, 3, 1).reshape(-1).requires_grad_()
    first, second = (gradient(t, y := functional.activation(t, "silu"), torch.ones_like(y)) for t in (x, flat))
    assert torch.equal(first.permute(0, 2, 3, 1).reshape(-1), second)


@pytest.mark.parametrize("name", ["gelu", "relu"])
def test_without_a_gradient_it_is_torchs_function(name):
    x = inputs(100)
    for needs, enabled in ((False, True), (True, False)):
        with torch.set_grad_enabled(enabled):
            y = functional.activation(x.clone().requires_grad_(needs), name)
        assert torch.equal(y, ORACLES[name](x))
        assert y.grad_fn is None


@pytest.mark.parametrize("name", ["relu", "silu"])
@pytest.mark.parametrize("dense", [True, False])
def test_in_place(device, name, dense):
    source = torch.randn(40, 20, device=device, requires_grad=True)
    x = (source * 1)[:, :: 1 if dense else 2]
    y = functional.activation(x, name, inplace=True)
    assert y.data_ptr() == x.data_ptr()
    assert torch.equal(x, y)
    expected = gradient(source, functional.activation((source * 1)[:, :: 1 if dense else 2], name), torch.ones_like(y))
    assert torch.equal(gradient(source, y, torch.ones_like(y)), expected)


def test_in_place_of_what_others_need_is_an_error_as_in_torch():
    source = torch.randn(8, requires_grad=True)
    x = source.exp()  # which keeps its result
    functional.activation(x, "relu", inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        functional.activation(source, "relu", inplace=True)


def test_second_derivatives_are_refused():
    x = torch.randn(8, requires_grad=True)
    with pytest.raises(RuntimeError, match="Second derivatives through an activation function"):
        torch.autograd.grad(functional.activation(x, "gelu").sum(), x, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_types_that_cannot_be_kept(dtype):
    with pytest.raises(TypeError, match=r"The derivative of 'tanh' is kept in few bits of float32, .*HINT"):
        functional.activation(torch.randn(4, dtype=dtype, requires_grad=True), "tanh")


def test_fp64_in_one_bit():
    x = torch.randn(100, dtype=torch.float64, requires_grad=True)
    found = gradient(x, functional.activation(x, "relu"), x.detach())
    assert torch.equal(found, gradient(x, F.relu(x), x.detach()))


def test_sparse_input_is_refused():
    with pytest.raises(ValueError, match="`x` must be a dense tensor"):
        functional.activation(torch.eye(4).to_sparse().requires_grad_(), "relu")


def test_autocast_leaves_the_type():
    x = torch.randn(16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert functional.activation(x, "gelu").dtype == F.gelu(x).dtype == torch.float32
        assert functional.activation(x.bfloat16(), "gelu").dtype == F.gelu(x.bfloat16()).dtype == torch.bfloat16


def _net(x: Tensor, name: str) -> Tensor:
    return functional.activation(x * 2, name) * 3


@pytest.mark.parametrize("name", ["gelu", "relu"])
@pytest.mark.parametrize("transposed", [False, True])
def test_compiled_in_one_graph_it_is_the_same(name, transposed):
    torch._dynamo.reset()
    x = torch.randn(12, 20)
    x = (x.t() if transposed else x).detach().requires_grad_()
    grad = torch.randn(x.shape)
    compiled = torch.compile(_net, fullgraph=True)
    y, expected = compiled(x, name), _net(x, name)
    torch.testing.assert_close(y, expected)
    assert torch.equal(gradient(x, y, grad), gradient(x, expected, grad))


@pytest.mark.parametrize("operator", ["activate", "activation_grad"])
def test_operators_are_sound(operator):
    x, kept = torch.randn(5, 9).t(), kept_of("gelu")
    y, codes = torch.ops.actprune.activate(x, *kept, x.dtype)
    calls = {
        "activate": (x, *kept, torch.float32),
        "activation_grad": (torch.randn(9, 5), codes, y.stride(), *kept, torch.float32),
    }
    torch.library.opcheck(getattr(torch.ops.actprune, operator).default, calls[operator])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gelu", "softplus"])
def test_autocast_on_the_gpu_has_torchs_types(name):
    kept = kept_of(name)
    x = torch.randn(1000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y, expected = functional.activation(x, name, *kept.parameters), ORACLES[name](x)
    assert y.dtype == expected.dtype
    assert gradient(x, y, torch.ones_like(y)).dtype == torch.bfloat16


@pytest.mark.gpu
def test_a_cuda_graph_replays_the_same_gradient():
    x = torch.randn(1000, device="cuda", requires_grad=True)
    grad = torch.randn(1000, device="cuda")
    expected = gradient(x, functional.activation(x, "gelu"), grad)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradient(x, functional.activation(x, "gelu"), grad)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradient(x, functional.activation(x, "gelu"), grad)
    graph.replay()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("count", [1, 8, 2051])
def test_masks_are_packed_in_the_order_of_memory(device, count):
    mask = torch.rand(count, 3, device=device).t() < 0.4
    codes = pack_mask(mask)
    bits = (codes.cpu()[:, None].int() >> torch.arange(8) & 1).flatten().bool()
    assert torch.equal(bits[: 3 * count], mask.t().flatten().cpu())
    assert not bits[3 * count :].any()
