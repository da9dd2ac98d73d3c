"""Linear layers that keep their inputs in few bits: exact but for the weight gradient, and that from what is stored."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lightning_actprune import ActivationPrunedLinear, functional
from lightning_actprune.ops.formats import FORMATS
from lightning_actprune.ops.weight_grad import force_method
from tests import oracle
from tests.attention import saved_tensors

each_format = pytest.mark.parametrize("value_format", [name for name in FORMATS if name != "same"])


def setup(device, *shape, outputs=48, dtype=torch.float32):
    x = torch.randn(*shape, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(outputs, shape[-1], dtype=dtype, device=device, requires_grad=True)
    return x, weight, torch.randn(outputs, dtype=dtype, device=device, requires_grad=True)


@each_format
@pytest.mark.parametrize("method", ["gather", "unpack"])
@pytest.mark.parametrize(
    ("shape", "block", "sparsity", "dtype"),
    [
        ((3, 37, 70), 16, 0.5, torch.float32),
        ((2, 60, 96), 32, 0.0, torch.bfloat16),
        ((33, 64), 64, 0.0, torch.float16),
    ],
    ids=str,
)
def test_the_weight_gradient_is_that_of_the_stored_input(device, value_format, method, shape, block, sparsity, dtype):
    x, weight, bias = setup(device, *shape, dtype=dtype)
    settings = {"sparsity": sparsity, "block_size": block, "value_format": value_format}
    with force_method(method):
        y = functional.linear(x, weight, bias, **settings)
        grad_y = torch.randn_like(y)
        grads = torch.autograd.grad(y, (x, weight, bias), grad_y)
    dense = F.linear(x, weight, bias)
    assert torch.equal(y, dense)
    exact_x, _, exact_bias = torch.autograd.grad(dense, (x, weight, bias), grad_y)
    assert torch.equal(grads[0], exact_x)
    assert oracle.relative_error(grads[2], exact_bias) <= 8 * torch.finfo(dtype).eps
    stored = functional.pack(x.detach(), **settings)
    g, hat = grad_y.reshape(-1, 48), stored.unpack().reshape(-1, shape[-1])
    exact, torchs = g.double().t() @ hat.double(), g.t() @ hat
    assert (
        oracle.relative_error(grads[1], exact) <= 2 * oracle.relative_error(torchs, exact) + 4 * torch.finfo(dtype).eps
    )
    # What is stored is close to the kept blocks, the closer the more bits it has.
    kept = functional.pack(x.detach(), sparsity=sparsity, block_size=block).unpack()
    # A step of a range of some six standard deviations at b = 64, times up to 1.16 and, of uniform errors, 0.29.
    bound = 0.06 if value_format == "fp8" else 2.5 / (2 ** FORMATS[value_format].bits - 1)
    assert 0 < oracle.relative_error(stored.unpack(), kept) < bound


@each_format
@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_bytes_that_autograd_keeps(value_format: str, sparsity: float):
    x, weight, _ = setup("cpu", 4, 32, 64)
    with saved_tensors() as saved:
        functional.linear(x, weight, sparsity=sparsity, block_size=32, value_format=value_format)
    stored = functional.pack(x.detach(), sparsity=sparsity, block_size=32, value_format=value_format)
    kept = [tensor for tensor in saved if tensor.data_ptr() != weight.data_ptr()]
    assert sum(tensor.nbytes for tensor in kept) == stored.nbytes == stored.geometry.stored_bytes(4, value_format)
    bits = 8 * stored.nbytes / x.numel() / (1 - sparsity)
    least = {"fp8": 8.5, "int8": 8.5, "int4": 4.5, "int3": 3.5, "int2": 2.5}[value_format]
    positions = bits - least  # a bit per block, and an int32 per 128 of a sample; none where no block is dropped
    assert positions == 0 if sparsity == 0 else 0 < positions < 0.1


@each_format
@pytest.mark.filterwarnings("ignore:Sparse BSR")
@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_bsr_shows_what_is_stored(value_format: str, sparsity: float):
    x = torch.randn(2, 10, 64)
    stored = functional.pack(x, sparsity=sparsity, block_size=16, value_format=value_format)
    torch.testing.assert_close(stored.to_bsr().to_dense(), stored.unpack().reshape(20, 64), rtol=0, atol=0)
    assert stored.mask().sum() == 80 - 80 * sparsity


def test_sparsity_0_alone_spares_the_positions():
    """A sparsity that drops no block of this shape would drop one of a larger: compiled for all, it is one graph."""
    x = torch.randn(2, 10, 64)
    none, small = (functional.pack(x, sparsity=s, block_size=16, value_format="int4") for s in (0.0, 0.01))
    assert none.bitmap.shape == none.offsets.shape == (2, 0)
    assert small.bitmap.shape == (2, 2)
    assert torch.equal(none.values, small.values)
    assert none.mask().all()
    assert small.mask().all()
    assert torch.equal(none.unpack(), small.unpack())


@pytest.mark.parametrize("shape", [(0, 5, 64), (3, 0, 64)], ids=str)
def test_nothing_to_store(device, shape):
    x, weight = torch.empty(shape, device=device, requires_grad=True), torch.randn(8, shape[-1], device=device)
    y = functional.linear(x, weight.requires_grad_(), sparsity=0.0, value_format="int4")
    [grad] = torch.autograd.grad(y.sum(), weight)
    assert torch.equal(grad, torch.zeros_like(weight))


@pytest.mark.parametrize("value_format", ["int2", "fp8"])
def test_transposed_samples_and_tokens_at_sparsity_0(device, value_format):
    """Blocks along the tokens, and of either scope: what is stored does not depend on what competes."""
    base, weight = torch.randn(3, 64, 40, device=device), torch.randn(24, 64, device=device, requires_grad=True)
    x = base.transpose(1, 2).requires_grad_()
    grads = []
    for scope in ("sample", "token"):
        y = functional.linear(x, weight, sparsity=0.0, block_size=40, scope=scope, value_format=value_format)
        grads.append(torch.autograd.grad(y, weight, torch.ones_like(y))[0])
    hat = functional.pack(x.detach(), sparsity=0.0, block_size=40, value_format=value_format).unpack()
    assert hat.shape == (3, 64, 40)
    assert torch.equal(*grads)
    assert oracle.relative_error(grads[0], hat.double().sum((0, 2)).expand(24, 64)) < 1e-5


def test_consumers_of_one_tensor_share_only_equal_formats():
    x, weight, _ = setup("cpu", 4, 32, 64)
    packs = []
    for value_format in ("int4", "int4", "int2", "same"):
        with saved_tensors() as saved:
            y = functional.linear(x, weight, sparsity=0.5, value_format=value_format)
        packs.append((y, {t.data_ptr() for t in saved if t.data_ptr() != weight.data_ptr()}))
    assert packs[0][1] == packs[1][1]
    assert not packs[0][1] & packs[2][1]
    assert not packs[2][1] & packs[3][1]


@pytest.mark.parametrize("value_format", ["int4", "fp8"])
@pytest.mark.parametrize("sparsity", [0.0, 0.5])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_graph_breaks(value_format: str, sparsity: float, dynamic: bool):
    layer = ActivationPrunedLinear(64, 48, sparsity=sparsity, block_size=16, value_format=value_format)
    torch._dynamo.reset()  # of all tests, what was compiled of this method counts together
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for samples in (4, 7):
        x = torch.randn(samples, 16, 64, requires_grad=True)
        with saved_tensors() as saved:
            y = compiled(x)
        inputs = x, *layer.parameters()
        grads = [torch.autograd.grad(result.square().sum(), inputs) for result in (y, layer(x))]
        torch.testing.assert_close(*grads)
        packed = functional.pack(x.detach(), sparsity=sparsity, block_size=16, value_format=value_format)
        assert [t.nbytes for t in saved if t.dtype == torch.uint8] == [packed.values.nbytes]
        assert sum(t.nbytes for t in saved if t.dtype == torch.int32) == packed.bitmap.nbytes + packed.offsets.nbytes


def test_autocast_keeps_few_bits_of_the_cast_input():
    x, weight, bias = setup("cpu", 4, 16, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = functional.linear(x, weight, bias, sparsity=0.0, value_format="int4")
    grad_y = torch.randn_like(y)
    [grad] = torch.autograd.grad(y, weight, grad_y)
    hat = functional.pack(x.detach().bfloat16(), sparsity=0.0, value_format="int4").unpack().reshape(-1, 64)
    torch.testing.assert_close(grad, (grad_y.reshape(-1, 48).t() @ hat).float())


def test_an_overflow_reaches_the_weight_gradient():
    x, weight, _ = setup("cpu", 2, 8, 64)
    with torch.no_grad():
        x[1, 3, 40] = float("inf")
    functional.linear(x, weight, sparsity=0.9, value_format="int2").sum().backward()
    assert weight.grad.isnan().any()
    assert weight.grad[:, :32].isfinite().all()


def test_what_cannot_be_stored_in_few_bits():
    x, weight, _ = setup("cpu", 2, 8, 64, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"float64 values cannot be stored as 'int4'.* HINT"):
        functional.linear(x, weight, sparsity=0.5, value_format="int4")
    with pytest.raises(ValueError, match=r"`value_format` must be one of 'same', .*, got 'int5'. HINT"):
        functional.linear(x, weight, sparsity=0.5, value_format="int5")
    with pytest.raises(ValueError, match=r"`block_size` must be at least 8 with value_format='int2', got 4. HINT"):
        functional.linear(x, weight, sparsity=0.5, block_size=4, value_format="int2")


def test_small_rows_cut_blocks():
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    y = functional.linear(x, weight, sparsity=0.0, value_format="int8")
    [grad] = torch.autograd.grad(y.sum(), weight)
    assert oracle.relative_error(grad, torch.ones(5, 3).t() @ x.detach()) < 0.05
