"""``ActivationPrunedConv1D`` against ``Conv1D`` and an independent oracle of the pruned input."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import convert, revert
from lightning_actprune.nn.settings import PrunedLayer
from lightning_actprune.ops.geometry import BlockGeometry
from tests import oracle

IN, OUT = 65, 7


def pair(conv1d: type[nn.Module], sparsity: float = 0.5, block_size: int = 8, **options) -> tuple[nn.Module, nn.Module]:
    """A dense and a pruned layer with equal parameters."""
    dense = conv1d(OUT, IN)
    nn.init.normal_(dense.bias)
    pruned = copy.deepcopy(dense)
    convert(pruned, sparsity, block_size, **options)
    return dense, pruned


def both(layers: tuple[nn.Module, nn.Module], x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return outputs with the gradients of the input in ``x``'s place, dense and pruned, for one output gradient."""
    found, grad = [], None
    for layer in layers:
        given = x.detach().clone().requires_grad_()
        y = layer(given)
        grad = torch.randn_like(y) if grad is None else grad
        y.backward(grad)
        found.append((y.detach(), given.grad))
    return found


@pytest.mark.parametrize("scope", ["sample", "token"])
@pytest.mark.parametrize("shape", [(7, IN), (3, 5, IN), (0, 5, IN), (3, 0, IN)], ids=str)
def test_only_the_weight_gradient_is_pruned_the_rest_is_equal_to_the_bit(conv1d, shape, scope):
    layers, x = pair(conv1d, scope=scope), oracle.integers(*shape)
    (y, grad_x), (pruned_y, pruned_grad_x) = both(layers, x)
    dense, pruned = layers
    assert torch.equal(pruned_y, y)
    assert torch.equal(pruned_grad_x, grad_x)
    assert torch.equal(pruned.bias.grad, dense.bias.grad)
    assert pruned.weight.grad.shape == (IN, OUT)
    assert pruned.weight.grad.stride() == dense.weight.grad.stride()


@pytest.mark.parametrize("shape", [(IN,), (2, 3, 5, IN)], ids=str)
def test_inputs_of_other_dimensions_are_equal_to_rounding(conv1d, shape):
    """torch multiplies them without adding the bias in the same operation, where ``Conv1D`` flattens them first."""
    layers, x = pair(conv1d), torch.randn(shape)
    (y, grad_x), (pruned_y, pruned_grad_x) = both(layers, x)
    torch.testing.assert_close(pruned_y, y, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pruned_grad_x, grad_x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scope", ["sample", "token"])
@pytest.mark.parametrize("sparsity", [0.4, 0.6])
@pytest.mark.parametrize("block_size", [8, 32])
def test_weight_gradient_is_that_of_the_kept_blocks(conv1d, block_size, sparsity, scope):
    _, layer = pair(conv1d, sparsity, block_size, scope=scope)
    x = torch.randn(3, 11, IN)
    y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    x_hat = oracle.pruned(oracle.as_samples(x, scope), block_size, sparsity)
    expected = x_hat.double().reshape(-1, IN).t() @ grad.double().reshape(-1, OUT)
    assert oracle.relative_error(layer.weight.grad, expected) < 1e-6
    assert not torch.equal(x_hat.reshape(x.shape), x)


@pytest.mark.parametrize("off", ["sparsity", "frozen", "no_grad"])
def test_where_nothing_is_pruned_it_is_the_dense_layer(conv1d, off):
    dense, pruned = layers = pair(conv1d)
    if off == "sparsity":
        pruned.sparsity = 0.0
    x = torch.randn(3, 5, IN)
    if off == "no_grad":
        with torch.no_grad():
            assert torch.equal(pruned(x), dense(x))
        return
    for layer in layers:
        layer.weight.requires_grad_(off != "frozen")
    (y, grad_x), (pruned_y, pruned_grad_x) = both(layers, x)
    assert torch.equal(pruned_y, y)
    assert torch.equal(pruned_grad_x, grad_x)
    assert torch.equal(pruned.bias.grad, dense.bias.grad)
    assert off == "frozen" or torch.equal(pruned.weight.grad, dense.weight.grad)


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_kept_are_the_packed_input_and_the_parameter_itself(conv1d, autocast, needs_grad):
    _, layer = pair(conv1d, sparsity=0.6)
    saved: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        layer(torch.randn(3, 50, IN, requires_grad=needs_grad))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    own = storages.pop(layer.weight.untyped_storage().data_ptr(), None)
    assert own == (layer.weight.nbytes if needs_grad else None)
    assert sum(storages.values()) == BlockGeometry.of(3, 50, IN, 8, 0.6).stored_bytes(2 if autocast else 4)


def test_autocast_matches(conv1d):
    layers = pair(conv1d)
    x = torch.randn(3, 5, IN)
    with torch.autocast("cpu", torch.bfloat16):
        (y, grad_x), (pruned_y, pruned_grad_x) = both(layers, x)
    assert pruned_y.dtype == torch.bfloat16
    assert torch.equal(pruned_y, y)
    assert torch.equal(pruned_grad_x, grad_x)
    assert {p.grad.dtype for p in layers[1].parameters()} == {torch.float32}


def test_gradients_accumulate(conv1d):
    _, layer = pair(conv1d)
    x = torch.randn(2, 3, 5, IN)
    single = [torch.autograd.grad(layer(part).sum(), layer.weight)[0] for part in x]
    for part in x:
        layer(part).sum().backward()
    torch.testing.assert_close(layer.weight.grad, single[0] + single[1])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_to_one_graph_with_the_same_gradients(conv1d, dynamic):
    _, layer = pair(conv1d)
    x, compiled = torch.randn(3, 5, IN), torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    expected = torch.autograd.grad(layer(x).square().sum(), layer.weight)[0]
    y = compiled(x)
    assert torch.equal(y, layer(x))
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), layer.weight)[0], expected)


def test_copies_and_pickles_stay_pruned(conv1d):
    _, layer = pair(conv1d)
    x, buffer = torch.randn(3, 5, IN), io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    expected = torch.autograd.grad(layer(x).sum(), layer.weight)[0]
    for clone in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False)):
        assert isinstance(clone, PrunedLayer)
        assert clone.weight is not layer.weight
        assert repr(clone) == repr(layer)
        assert torch.equal(torch.autograd.grad(clone(x).sum(), clone.weight)[0], expected)
        assert revert(clone) == ["(root)"]
        assert type(clone) is conv1d


def test_printed_layer_shows_sizes_and_settings(conv1d):
    dense, pruned = pair(conv1d, scope="token")
    before = repr(dense)
    assert repr(pruned) == f"ActivationPrunedConv1D(nf={OUT}, nx={IN}, sparsity=0.5, block_size=8, scope='token')"
    revert(pruned)
    assert repr(pruned) == before


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.ones(2, IN, dtype=torch.int64), TypeError, "must be a floating-point tensor"),
        (torch.eye(IN).to_sparse(), ValueError, "must be a dense tensor"),
        (torch.ones(2, IN + 1), RuntimeError, "shapes cannot be multiplied"),
    ],
    ids=["int", "sparse", "features"],
)
def test_input_that_cannot_be_pruned_is_refused(conv1d, x, error, message):
    with pytest.raises(error, match=message):
        pair(conv1d)[1](x)
