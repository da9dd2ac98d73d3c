"""Layers that read one tensor keep one packed input, and nobody else's."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune.codec.dispatch import force_backend
from tests.support import oracle
from tests.support.compressed import compressed

pytestmark = pytest.mark.usefixtures("nothing_left")


def made(x: Tensor, **settings) -> nn.Module:
    """Return a compressed layer for ``x``."""
    dense = nn.Linear(x.shape[-1], 6, bias=False, device=x.device)
    return compressed(dense, **{"sparsity": 0.5, "block_size": 8, **settings})


def layer(x: Tensor, **settings) -> tuple[Tensor, Tensor]:
    """Return the weight of a compressed layer and its output."""
    module = made(x, **settings)
    return module.weight, module(x)


def packs(*outputs: Tensor) -> list[frozenset[int]]:
    """Return the storages, weights aside, that the graph of each output holds."""
    return [
        frozenset(t.untyped_storage()._cdata for t in y.grad_fn.saved_tensors if t is not None and not t.requires_grad)
        for y in outputs
    ]


def distinct(*outputs: Tensor) -> int:
    return len(set(packs(*outputs)))


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "turned"])
def test_three_layers_keep_one_packed_input_and_get_the_gradients_of_their_own(device, autocast, turned):
    x = oracle.integers(3, 20, 24, device=device)
    x = (x.transpose(1, 2) if turned else x).detach().requires_grad_()
    modules = [made(x) for _ in range(3)]
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        shared = [module(x) for module in modules]
        alone = [module(x.clone()) for module in modules]
    assert distinct(*shared) == 1
    assert distinct(*alone) == 3
    for module, y, other in zip(modules, shared, alone, strict=True):
        assert torch.equal(y, other)
        grad_y = torch.randn_like(y)
        found, expected = (torch.autograd.grad(out, (x, module.weight), grad_y) for out in (y, other))
        assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True, True]


def test_other_settings_share_nothing():
    x = torch.randn(2, 6, 16)
    settings = {}, {"sparsity": 0.25}, {"block_size": 4}, {"topk_over": "token"}, {"selection": "swap"}, {"bits": 4}
    settings = *settings, {"bits": 2}, {"bits": 4, "sparsity": 0.0}
    assert distinct(*(layer(x, **one)[1] for one in settings)) == len(settings)
    with torch.autocast("cpu", torch.bfloat16):
        _, y = layer(x)
    assert distinct(y, layer(x)[1]) == 2
    with force_backend("reference"):
        _, y = layer(x)
    assert distinct(y, layer(x)[1]) == 2


def test_views_of_all_of_a_tensor_are_that_tensor_and_copies_and_others_are_not():
    x = torch.randn(4, 4, 16)
    with torch.inference_mode():
        inferred = torch.randn(2, 6, 16)
    others = x[:2], x[2:], x.transpose(0, 1), x.view(2, 8, 16), x.view(-1, 16), x.clone(), x.detach()
    others = *others, inferred, inferred  # which has no version
    assert distinct(*(layer(one)[1] for one in (x, *others))) == len(others) + 1
    x = x.requires_grad_() * 1.0
    assert distinct(*(layer(one)[1] for one in (x, x.view_as(x), x.view(16, 16).view(x.shape)))) == 1


def gradient(x: Tensor) -> Tensor:
    """Return the weight gradient for a loss that is the sum of the outputs."""
    weight, y = layer(x.clone())
    return torch.autograd.grad(y.sum(), weight)[0]


def test_a_tensor_modified_between_two_layers_is_packed_again():
    x = oracle.integers(2, 6, 16)
    first, y = layer(x)
    before = x.clone()
    x.mul_(2)
    second, z = layer(x)
    assert distinct(y, z) == 2
    assert torch.equal(torch.autograd.grad(y.sum(), first)[0], gradient(before))
    third, u = layer(x)
    x.zero_()  # changes no gradient any more
    for weight, output in ((second, z), (third, u)):
        assert torch.equal(torch.autograd.grad(output.sum(), weight)[0], 2 * gradient(before))


def test_hooks_that_move_saved_tensors_away_end_the_sharing():
    x = oracle.integers(2, 6, 16)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        found = [layer(x), layer(x)]
    for weight, out in found:
        assert torch.equal(torch.autograd.grad(out.sum(), weight)[0], gradient(x))


def test_the_packed_input_goes_with_the_last_backward():
    x = torch.randn(2, 6, 16)
    (_, y), (_, z) = layer(x), layer(x)
    values = max((t for t in y.grad_fn.saved_tensors if t is not None and not t.requires_grad), key=Tensor.numel)
    packed = weakref.ref(values.untyped_storage())
    del values
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert packed() is not None
    z.sum().backward()
    assert packed() is None
    _, again = layer(x)
    again.sum().backward()  # the input lives on, and is packed again


@pytest.mark.gpu
def test_streams_and_recordings_share_nothing():
    x = torch.randn(64, 49, 64, device="cuda")
    module = made(x)
    _, y = layer(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        z = module(x)
        assert distinct(y, z) == 2
        assert distinct(z, module(x)) == 1
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        recorded = module(x)
        assert distinct(z, recorded) == 2
        (grad,) = torch.autograd.grad(recorded.sum(), module.weight)
    x.copy_(torch.randn_like(x))
    graph.replay()
    (expected,) = torch.autograd.grad(module(x).sum(), module.weight)
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-4)
