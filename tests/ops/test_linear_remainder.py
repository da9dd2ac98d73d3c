"""Linear layers whose dropped blocks are read as the mean of each feature: exact but for the weight gradient, and that
from ``P(x - mu) + mu``."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_actprune import ActivationPrunedLinear, functional
from lightning_actprune.ops.formats import FORMATS
from lightning_actprune.ops.geometry import sparsity_parts
from lightning_actprune.ops.setting import BlockSetting
from lightning_actprune.ops.weight_grad import force_method
from tests import oracle
from tests.attention import saved_tensors

VIEWS = {
    "vector": lambda: torch.randn(70),
    "rows": lambda: torch.randn(33, 70),
    "plain": lambda: torch.randn(3, 37, 70),
    "four": lambda: torch.randn(2, 5, 6, 40),
    "every-other": lambda: torch.randn(3, 9, 80)[..., ::2],
    "features": lambda: torch.randn(3, 48, 20).transpose(1, 2),
    "tokens": lambda: torch.randn(3, 33, 32).transpose(1, 2),
    "channels-first": lambda: torch.randn(2, 33, 4, 8).permute(0, 2, 3, 1),
}
BLOCK, SPARSITY = 16, 0.6
MEAN = {"sparsity": SPARSITY, "block_size": BLOCK, "remainder": "mean"}


def made(view, device, dtype=torch.float32):
    """Return an input with means of its own, which stays the view that it is."""
    x = VIEWS[view]()
    x += 2 * torch.randn(x.shape[-1])
    return x.to(device=device, dtype=dtype)


def parameters(features, device, dtype=torch.float32, outputs=48):
    weight = torch.randn(outputs, features, dtype=dtype, device=device, requires_grad=True)
    return weight, torch.randn(outputs, dtype=dtype, device=device, requires_grad=True)


def stored_hat(stored: functional.Packed, x: torch.Tensor) -> torch.Tensor:
    """Return ``P(x - mu) + mu`` in fp64 as rows of features."""
    blocks = dataclasses.replace(stored, mean=None).unpack().double()
    if not stored.transposed:
        return blocks.reshape(-1, x.shape[-1]) + stored.mean.double()
    return blocks.view(x.shape[0], x.shape[-1], -1).transpose(1, 2).reshape(-1, x.shape[-1]) + stored.mean.double()


@pytest.mark.parametrize("scope", ["sample", "token"])
@pytest.mark.parametrize("view", VIEWS)
def test_what_is_packed_is_what_the_design_says(device, view, scope):
    x = made(view, device)
    stored = functional.pack(x, **MEAN, scope=scope)
    mean = x.double().reshape(-1, x.shape[-1]).mean(0).float()  # few rows: all of them
    torch.testing.assert_close(stored.mean, mean, rtol=1e-5, atol=1e-6)
    blocks = (x - stored.mean).contiguous()
    assert stored.transposed == (view in ("tokens", "channels-first"))
    if stored.transposed:
        blocks = blocks.flatten(1, -2).transpose(1, 2).contiguous()
    hat = oracle.pruned(oracle.as_samples(blocks, scope), BLOCK, SPARSITY).reshape(blocks.shape)
    if stored.transposed:
        hat = hat.transpose(1, 2)
    hat = hat.reshape(-1, x.shape[-1]) + stored.mean
    torch.testing.assert_close(stored_hat(stored, x).float(), hat)
    restored = stored.unpack()
    restored = restored.view(x.shape[0], x.shape[-1], -1).transpose(1, 2) if stored.transposed else restored
    torch.testing.assert_close(restored.reshape(-1, x.shape[-1]), hat)


@pytest.mark.parametrize("method", ["gather", "unpack"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_the_weight_gradient_is_that_of_the_stored_input(device, view, dtype, method):
    x = made(view, device, dtype).requires_grad_()
    weight, bias = parameters(x.shape[-1], device, dtype)
    with force_method(method):
        y = functional.linear(x, weight, bias, **MEAN)
        grad_y = torch.randn_like(y)
        grads = torch.autograd.grad(y, (x, weight, bias), grad_y)
    plain = functional.linear(x, weight, bias, sparsity=SPARSITY, block_size=BLOCK)
    assert torch.equal(y, plain)
    exact_x, _, exact_bias = torch.autograd.grad(plain, (x, weight, bias), grad_y)
    assert torch.equal(grads[0], exact_x)
    assert oracle.relative_error(grads[2], exact_bias) <= 8 * torch.finfo(dtype).eps
    stored = functional.pack(x.detach(), **MEAN)
    g, hat = grad_y.reshape(-1, 48), stored_hat(stored, x)
    blocks, exact = hat - stored.mean.double(), g.double().t() @ hat
    # Of the two terms, the product may be rounded to 16 bits (on a CPU), and so is the sum.
    kept, torchs = g.double().t() @ blocks, g.t() @ blocks.to(dtype)
    bound = 2 * (torchs.double() - kept).norm() + 4 * torch.finfo(dtype).eps * exact.norm()
    assert grads[1].dtype == dtype
    assert (grads[1].double() - exact).norm() <= bound + 1e-6 * (exact - kept).norm()


def test_samples_in_the_second_dimension(device):
    x = made("plain", device)
    weight, bias = parameters(70, device)
    blocks = BlockSetting(BLOCK, "sample_second", remainder="mean")
    y = functional.linear_unchecked(x, weight, bias, sparsity_parts(SPARSITY), blocks)
    grad_y = torch.randn_like(y)
    [grad] = torch.autograd.grad(y, weight, grad_y)
    turned = x.transpose(0, 1).contiguous()
    hat = stored_hat(functional.pack(turned, **MEAN), turned)
    exact = grad_y.double().transpose(0, 1).reshape(-1, 48).t() @ hat
    assert oracle.relative_error(grad, exact) <= 2e-6


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_every_format_and_the_bytes_that_autograd_keeps(value_format, sparsity):
    x, settings = made("plain", "cpu").requires_grad_(), MEAN | {"sparsity": sparsity, "value_format": value_format}
    weight, _ = parameters(70, "cpu")
    with saved_tensors() as saved:
        y = functional.linear(x, weight, **settings)
    kept = [tensor for tensor in saved if tensor.data_ptr() != weight.data_ptr()]
    if sparsity == 0 and value_format == "same":
        assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]  # a dense layer, which has no mean
        return
    stored = functional.pack(x.detach(), **settings)
    expected = stored.geometry.stored_bytes(4, value_format) + 4 * 70
    assert sum(tensor.nbytes for tensor in kept) == stored.nbytes == expected
    grad_y = torch.randn_like(y)
    [grad] = torch.autograd.grad(y, weight, grad_y)
    exact = grad_y.double().reshape(-1, 48).t() @ stored_hat(stored, x)
    assert oracle.relative_error(grad, exact) <= 1e-6


def test_a_layer_that_drops_next_to_nothing_has_the_exact_gradient():
    x, settings = made("plain", "cpu"), MEAN | {"sparsity": 1e-9}
    weight, _ = parameters(70, "cpu")
    grad_y = torch.randn(3, 37, 48)
    [grad] = torch.autograd.grad(functional.linear(x, weight, **settings), weight, grad_y)
    exact = grad_y.double().reshape(-1, 48).t() @ x.double().reshape(-1, 70)
    assert oracle.relative_error(grad, exact) <= 1e-6
    torch.testing.assert_close(functional.pack(x, **settings).unpack(), x, rtol=0, atol=2e-6)


@pytest.mark.parametrize("bias", [None, "frozen", "trained"])
def test_whatever_becomes_of_the_bias(device, bias):
    x, (weight, b) = made("plain", device), parameters(70, device)
    b = None if bias is None else b.detach().requires_grad_(bias == "trained")
    y = functional.linear(x, weight, b, **MEAN)
    grad_y = torch.randn_like(y)
    y.backward(grad_y)
    exact = grad_y.double().reshape(-1, 48).t() @ stored_hat(functional.pack(x, **MEAN), x)
    assert oracle.relative_error(weight.grad, exact) <= 2e-6
    if bias == "trained":
        assert oracle.relative_error(b.grad, grad_y.double().sum((0, 1))) <= 2e-6
    else:
        assert b is None or b.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_the_mean_of_the_cast_input(device, dtype):
    x, (weight, bias) = made("plain", device), parameters(70, device)
    with torch.autocast(device.type, dtype):
        y = functional.linear(x, weight, bias, **MEAN)
    grad_y = torch.randn_like(y)
    grads = torch.autograd.grad(y, (weight, bias), grad_y)
    stored = functional.pack(x.to(dtype), **MEAN)
    exact = grad_y.double().reshape(-1, 48).t() @ stored_hat(stored, x)
    # Of two terms, the product is rounded to 16 bits, but not the mean's.
    kept = grad_y.double().reshape(-1, 48).t() @ (stored_hat(stored, x) - stored.mean.double())
    assert (grads[0].double() - exact).norm() <= torch.finfo(dtype).eps * kept.norm()
    assert [grad.dtype for grad in grads] == [torch.float32] * 2
    assert oracle.relative_error(grads[1], grad_y.double().sum((0, 1))) <= 1e-6


@pytest.mark.parametrize("sparsity", [0.5, 0.8])
def test_it_is_closer_to_the_exact_gradient_where_features_have_means(sparsity):
    cosines, norms = {}, {}
    x = torch.randn(16, 32, 64) + 2 * torch.randn(64)
    grad_y = torch.randn(16, 32, 48) + 0.3 * torch.randn(48)
    exact = grad_y.reshape(-1, 48).t() @ x.reshape(-1, 64)
    for remainder in ("zero", "mean"):
        weight, _ = parameters(64, "cpu")
        y = functional.linear(x, weight, sparsity=sparsity, block_size=16, remainder=remainder)
        [grad] = torch.autograd.grad(y, weight, grad_y)
        cosines[remainder] = float(F.cosine_similarity(grad.flatten(), exact.flatten(), 0))
        norms[remainder] = float(grad.norm() / exact.norm())
    assert 1 - cosines["mean"] < 0.2 * (1 - cosines["zero"])
    assert abs(norms["mean"] - 1) < 0.2 * abs(norms["zero"] - 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_stays_in_its_own_block(value):
    x, (weight, _) = made("plain", "cpu"), parameters(70, "cpu")
    x[0, 0, 40] = value  # in a row that the mean is made from
    functional.linear(x, weight, **MEAN).sum().backward()
    assert not weight.grad[:, 40].isfinite().any()
    assert weight.grad[:, :32].isfinite().all()
    assert weight.grad[:, 48:].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 4, 40), (3, 0, 40), (0, 40), (3, 0)], ids=str)
def test_nothing_in_nothing_out(device, shape):
    x = torch.empty(*shape, device=device, requires_grad=True)
    weight, bias = parameters(shape[-1], device)
    functional.linear(x, weight, bias, **MEAN).sum().backward()
    assert not weight.grad.any()
    assert weight.grad.shape == weight.shape
    assert functional.pack(x.detach(), **MEAN).unpack().numel() == 0


@pytest.mark.filterwarnings("ignore:Sparse BSR")
def test_bsr_shows_what_is_stored_and_unpack_gives_the_mean_back():
    x = made("plain", "cpu")
    stored = functional.pack(x, **MEAN)
    kept = stored.to_bsr().to_dense()[:, :70]
    torch.testing.assert_close(kept + stored.mean, stored.unpack().reshape(-1, 70), rtol=0, atol=0)
    dropped = ~stored.mask().repeat_interleave(BLOCK, 1)[:, :70]
    assert not kept[dropped].any()
    assert torch.equal(stored.unpack().reshape(-1, 70)[dropped], stored.mean.expand(111, 70)[dropped])


def test_consumers_of_one_tensor_share_the_mean_but_not_with_zeros():
    x, (weight, _) = made("plain", "cpu"), parameters(70, "cpu")
    packs = []
    for remainder in ("mean", "mean", "zero"):
        with saved_tensors() as saved:
            y = functional.linear(x, weight, **MEAN | {"remainder": remainder})
        packs.append((y, {t.data_ptr() for t in saved if t.data_ptr() != weight.data_ptr()}))
    assert packs[0][1] == packs[1][1]
    assert [len(own) for _, own in packs] == [4, 4, 3]
    assert not packs[0][1] & packs[2][1]
    shared, alone = packs[1][0], functional.linear(x.clone(), weight, **MEAN)
    grad_y = torch.randn_like(alone)
    grads = [torch.autograd.grad(y, weight, grad_y)[0] for y in (shared, alone)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("view", ["plain", "tokens"])
def test_a_schedule_compiles_twice_without_graph_breaks(view):
    x = made(view, "cpu").requires_grad_()
    layer = ActivationPrunedLinear(x.shape[-1], 24, sparsity=0.1, block_size=BLOCK, remainder="mean")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for sparsity in (0.1, 0.3, 0.5, 0.75):
        layer.sparsity = sparsity
        found, eager = [
            torch.autograd.grad(call(x).square().sum(), (x, *layer.parameters())) for call in (compiled, layer)
        ]
        torch.testing.assert_close(found, eager)
    assert counter.frame_count <= 2


def test_compiled_code_keeps_the_mean_and_not_the_input():
    x, (weight, bias) = made("plain", "cpu"), parameters(70, "cpu")

    def loss(x):
        return functional.linear(x.sin() + 1, weight, bias, **MEAN).sum()

    torch._dynamo.reset()
    with saved_tensors() as saved:
        compiled = torch.compile(loss, fullgraph=True)(x)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    assert sum(storages.values()) <= functional.pack(x, **MEAN).nbytes + weight.nbytes + bias.nbytes
    assert sum(storages.values()) < x.nbytes + weight.nbytes
    found, expected = (torch.autograd.grad(value, (weight, bias)) for value in (compiled, loss(x)))
    torch.testing.assert_close(found, expected)


def test_zero_is_the_default_and_wrong_values_are_errors():
    x, (weight, _) = made("plain", "cpu"), parameters(70, "cpu")
    assert functional.pack(x, sparsity=0.5).mean is None
    for call in (lambda **settings: functional.linear(x, weight, **settings), lambda **s: functional.pack(x, **s)):
        with pytest.raises(ValueError, match=r'`remainder` must be "zero" or "mean", got \'median\'. HINT'):
            call(sparsity=0.5, remainder="median")
