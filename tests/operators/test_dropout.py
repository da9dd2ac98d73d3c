"""Dropout that keeps its mask in one bit a value: the numbers of the dense layer, and nothing more than the bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.compressed import compressed
from tests.support.marks import pairs


def compressed_dropout(layer: nn.Module) -> nn.Module:
    return compressed(layer, "activation", bits=4)


def run(layer: nn.Module, x: Tensor, grad: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return output and gradient of a fixed seed, and the next random number."""
    leaf = x.detach().requires_grad_()
    torch.manual_seed(5)
    y = layer(leaf * scale)
    (found,) = torch.autograd.grad(y, leaf, grad)
    return y.detach(), found, torch.rand(1, device=x.device)


def check(x: Tensor, p: float, inplace: bool) -> None:
    dense, grad = nn.Dropout(p, inplace), torch.randn_like(x)
    for actual, right in zip(run(compressed_dropout(dense), x, grad), run(dense, x, grad), strict=True):
        # The gradient is rounded once; torch rounds the product with the mask's noise, or noise itself, to its type.
        eps = torch.finfo(x.dtype).eps
        torch.testing.assert_close(actual, right, rtol=eps, atol=0)
        assert torch.equal(actual == 0, right == 0)
    ours, right = (run(layer, x, grad)[0] for layer in (compressed_dropout(dense), dense))
    assert torch.equal(ours, right)


@pytest.mark.parametrize(
    ("p", "inplace", "dtype"),
    pairs([0.0, 0.1, 0.5, 1.0], [False, True], [torch.float32, torch.bfloat16, torch.float16]),
    ids=str,
)
def test_output_gradient_and_generator_are_those_of_the_dense_layer(device, p, inplace, dtype):
    check(torch.randn(7, 37, device=device).to(dtype), p, inplace)


def test_what_is_dropped_has_a_gradient_of_zero(device):
    layer, x = compressed_dropout(nn.Dropout(0.5)), torch.ones(64, device=device, requires_grad=True)
    y = layer(x)
    (grad,) = torch.autograd.grad(y, x, torch.full_like(y, torch.inf))
    assert torch.equal(grad, torch.where(y == 0, 0.0, torch.inf))


@pytest.mark.gpu
def test_a_cuda_graph_draws_anew_at_each_replay():
    layer, x = compressed_dropout(nn.Dropout(0.5)), torch.ones(1000, device="cuda", requires_grad=True)
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
def test_compiled_it_is_the_compilers():
    """One graph, and the mask of backward is that of forward."""
    torch._dynamo.reset()
    compiled = torch.compile(compressed_dropout(nn.Dropout(0.5)), fullgraph=True, backend="aot_eager")
    x = torch.randn(200, requires_grad=True)
    y = compiled(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad * x.detach(), y.detach(), rtol=1e-6, atol=0)
    assert 0 < (y == 0).sum() < 200
