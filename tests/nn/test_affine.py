"""Layers that scale each feature and prune their input: exact but for the gradient of the factors."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from lightning_actprune.nn import ActivationPrunedAffine
from lightning_actprune.ops import formats
from lightning_actprune.ops.dispatch import force_backend
from tests.affine import (
    BLOCK,
    FEATURES,
    MAKERS,
    SPARSITY,
    factors_gradient,
    gradients,
    pair,
    pruned,
)
from tests.attention import saved_tensors
from tests.kernels.workload import launches
from tests.oracle import relative_error

each_kind = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@each_kind
def test_layers_are_the_dense_ones_but_for_the_gradient_of_the_factors(make, device):
    dense, ours = pair(make, device)
    x = torch.randn(3, 5, FEATURES, device=device, requires_grad=True)
    y = ours(x)
    grad_y = torch.randn_like(y)
    assert torch.equal(y, dense(x))
    (dx, dw, *db), exact = gradients(ours, x, grad_y), gradients(dense, x, grad_y)
    assert torch.equal(dx, exact[0])
    assert [g.shape for g in (dw, *db)] == [g.shape for g in exact[1:]]
    for mine, right in zip(db, exact[2:], strict=True):
        torch.testing.assert_close(mine, right)
    assert relative_error(dw.flatten(), factors_gradient(pruned(x), grad_y)) < 1e-5
    assert relative_error(exact[1].flatten(), factors_gradient(pruned(x), grad_y)) > 0.01


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value_format", ["int4", "int2", "fp8"])
def test_all_of_the_input_in_few_bits(make, device, dtype, value_format):
    dense, ours = pair(make, device, value_format, 0.0, 32)
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


def test_without_dropped_blocks_one_pass_does_it_all(kernel_device):
    x = torch.randn(3, 5, FEATURES, device=kernel_device, requires_grad=True)
    found = {}
    for sparsity in (0.0, SPARSITY):
        _, ours = pair(MAKERS["affine"], kernel_device, "int4", sparsity)
        with force_backend("triton"), launches() as names:
            ours(x).sum().backward()
        found[sparsity] = [name.removesuffix("_kernel") for name in names]
    assert found[0.0] == ["normalize", "normalize_grad", "add_sets"]
    assert found[SPARSITY][-2:] == ["affine_grad", "add_sets"]
    assert "unpack" not in found[SPARSITY]


@pytest.mark.gpu
@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_under_autocast(make, dtype):
    dense, ours = pair(make, "cuda")
    x = torch.randn(3, 5, FEATURES, device="cuda", dtype=dtype, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y, right = ours(x), dense(x)
    assert y.dtype == right.dtype
    assert torch.equal(y, right)
    grad_y = torch.randn_like(right)
    (dx, dw, *db), exact = (
        torch.autograd.grad(out, (x, *layer.parameters()), grad_y) for out, layer in ((y, ours), (right, dense))
    )
    assert torch.equal(dx, exact[0])
    for mine, other in zip(db, exact[2:], strict=True):
        torch.testing.assert_close(mine, other)
    assert relative_error(dw.flatten(), factors_gradient(pruned(x), grad_y)) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("value_format", ["same", "int4"])
def test_a_captured_step_is_the_eager_one(value_format):
    ours = pair(MAKERS["affine"], "cuda", value_format)[1]
    x = torch.randn(3, 5, FEATURES, device="cuda")
    grad_y = torch.randn_like(x)

    def step():
        return torch.autograd.grad(ours(x), list(ours.parameters()), grad_y)

    expected = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert all(torch.equal(mine, right) for mine, right in zip(captured, expected, strict=True))


@pytest.mark.parametrize("sparsity", [0.0, SPARSITY])
def test_the_output_has_the_widest_type(sparsity):
    layer = ActivationPrunedAffine(FEATURES, sparsity=sparsity, block_size=BLOCK, value_format="int8").bfloat16()
    layer.bias = nn.Parameter(torch.zeros(FEATURES))
    assert layer(torch.randn(2, 3, FEATURES, dtype=torch.bfloat16)).dtype == torch.float32
