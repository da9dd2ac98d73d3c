"""A linear layer behind a norm or an affine layer in few bits keeps nothing of its own: what its gradients are."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import convert
from lightning_actprune.ops import derived
from lightning_actprune.ops.dispatch import forced_backend
from lightning_actprune.ops.weight_grad import unpack
from tests import oracle
from tests.derived import (
    LENGTH,
    NORMS,
    OUTPUTS,
    READS,
    SAMPLES,
    TOKENS,
    activation,
    derives,
    few_bit,
    kept_values,
    linear,
)

ROUNDED = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


@pytest.fixture(autouse=True)
def nothing_left():
    """After each test nothing is known of its tensors any more."""
    before = set(derived._outputs)
    yield
    if set(derived._outputs) > before:
        gc.collect()
    assert set(derived._outputs) <= before


def as_known(y: Tensor, norm: nn.Module, block_size: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Return what few bits hold of ``y``, in fp64: values before they are scaled, scale and shift."""
    nowhere = torch.empty(1, 0, dtype=torch.int32, device=y.device)
    stored = block_size, norm.value_format, torch.float32
    x = unpack(kept_values(y), nowhere, nowhere, y.numel() // LENGTH, LENGTH, *stored).view(y.shape).double()
    weight, bias = (getattr(norm, name, None) for name in ("weight", "bias"))
    one, zero = x.new_ones(LENGTH), x.new_zeros(LENGTH)
    return x, one if weight is None else weight.detach().double(), zero if bias is None else bias.detach().double()


CASES = [
    ("layer", "rows"),
    ("layer", "flat"),
    ("layer-plain", "rows"),
    ("layer-unshifted", "rows"),
    ("rms", "rows"),
    ("affine", "rows"),
    ("affine", "turned"),
    ("affine-unshifted", "turned"),
    ("layer-plain", "turned"),
]


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize(("made", "read"), CASES)
def test_the_weight_gradient_is_that_of_what_the_layer_before_keeps(device, made, read, autocast):
    norm, x = few_bit(NORMS[made], device=device), activation(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        y = norm(x)
        layer = linear(READS[read](y).shape[-1], device=device)
        z = layer(READS[read](y))
        assert derives(z, y)
    known, weight, bias = as_known(y, norm)
    g = torch.randn_like(z)
    z.backward(g, retain_graph=True)
    grad_y = g.double().flatten(0, -2).t()

    def product(left, right):
        return left @ READS[read](right).flatten(0, -2)

    found, expected = layer.weight.grad.double(), product(grad_y, known * weight + bias)
    # Three values are rounded (what is read, once more when it is scaled or after the product, and the result), and
    # sums of n in fp32 are off by n + 2 roundings at most; each relative to the sum of magnitudes.
    terms = SAMPLES * (LENGTH if read == "turned" else TOKENS) + 2
    unit = 3 * ROUNDED[g.dtype] + terms * ROUNDED[torch.float32]
    bound = unit * product(grad_y.abs(), (known * weight).abs() + bias.abs())
    assert ((found - expected).abs() <= bound).all()
    most = unit * float(grad_y.abs().sum(1).max())
    torch.testing.assert_close(layer.bias.grad.double(), grad_y.sum(1), rtol=0, atol=most)


def test_models_in_16_bits(device):
    dtype = torch.bfloat16
    norm, layer = few_bit(device=device, dtype=dtype), linear(device=device, dtype=dtype)
    y = norm(activation(device, dtype))
    z = layer(y)
    assert derives(z, y)
    known, weight, bias = as_known(y, norm)
    g = torch.randn_like(z)
    z.backward(g)
    grad_y = g.double().flatten(0, 1).t()
    expected = grad_y @ (known * weight + bias).flatten(0, 1)
    magnitude = grad_y.abs() @ ((known * weight).abs() + bias.abs()).flatten(0, 1)
    assert layer.weight.grad.dtype == dtype
    assert ((layer.weight.grad.double() - expected).abs() <= 3.1 * ROUNDED[dtype] * magnitude).all()


def test_errors_have_no_mean():
    norm, layer, errors = few_bit(value_format="int2"), linear(), []
    for _ in range(60):
        x, g = activation(), torch.randn(SAMPLES, TOKENS, OUTPUTS)
        y = norm(x)
        (grad,) = torch.autograd.grad(layer(y), layer.weight, g)
        errors.append(grad - g.flatten(0, 1).t() @ y.detach().flatten(0, 1))
    mean, spread = torch.stack(errors).mean(0), torch.stack(errors).std(0) / 60**0.5
    # 1728 values of standard deviation 1: their mean square is 1 to 6 sqrt(2 / 1728).
    assert float((mean / spread).square().mean()) == pytest.approx(1, abs=6 * (2 / mean.numel()) ** 0.5)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("read", READS)
def test_nothing_but_the_weight_gradient_depends_on_who_keeps_the_input(device, read, autocast):
    norm, x = few_bit(NORMS["affine"], device=device), activation(device)
    layer = linear(TOKENS if read == "turned" else LENGTH, device=device)
    results = []
    for own in (False, True):
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            y = norm(x)
            seen = READS[read](y)
            z = layer(seen.clone() if own else seen)
        assert derives(z, y) is not own
        wanted = x, layer.bias, *norm.parameters()
        results.append([z, *torch.autograd.grad(z, wanted, torch.ones_like(z))])
    if autocast and device.type == "cpu" and forced_backend() == "triton":  # the interpreter cuts bf16 off
        assert all(oracle.relative_error(a, b) < 2.0**-7 for a, b in zip(*results, strict=True))
    else:
        assert [torch.equal(a, b) for a, b in zip(*results, strict=True)] == [True] * 5


def test_several_layers_read_what_one_keeps():
    norm, x = few_bit(), activation()
    y = norm(x)
    outputs = [linear(bias=bias)(y) for bias in (True, False, True)]
    assert [derives(z, y) for z in outputs] == [True] * 3
    packs = [t.untyped_storage()._cdata for z in outputs for t in z.grad_fn.saved_tensors if t is not None]
    assert len(set(packs)) == 6  # three weights, and values, scale and shift once
    sum(z.sum() for z in outputs).backward()


def test_a_layer_used_twice_adds_up_and_a_graph_gives_its_gradient_twice():
    norm, layer, x = few_bit(), linear(), activation()
    z = layer(norm(x))
    z.sum().backward(retain_graph=True)
    first = layer.weight.grad.clone()
    z.sum().backward(retain_graph=True)
    assert torch.equal(layer.weight.grad, 2 * first)
    layer(norm(x)).sum().backward()
    assert torch.equal(layer.weight.grad, 3 * first)


def test_frozen_parameters():
    norm, x = few_bit(), activation()
    norm.requires_grad_(False)
    layer = linear()
    layer.bias.requires_grad_(False)
    y = norm(x)
    z = layer(y)
    assert derives(z, y)
    z.sum().backward()
    assert norm.weight.grad is None
    assert layer.bias.grad is None
    assert layer.weight.grad is not None
    assert x.grad is not None
    layer.weight.requires_grad_(False)
    assert type(layer(norm(x)).grad_fn).__name__ != "PrunedLinearFunctionBackward"


def test_without_gradients_nothing_is_known():
    norm, layer = few_bit(), linear()
    with torch.no_grad():
        y = norm(activation())
    assert id(y) not in derived._outputs
    y = norm(torch.empty(0, TOKENS, LENGTH).requires_grad_())
    layer(y).sum().backward()
    assert not layer.weight.grad.any()


def test_compiled_layers_pack_their_own_and_get_the_same_to_its_errors():
    norm, layer, x = few_bit(value_format="int8"), linear(value_format="int8"), activation()
    compiled = torch.compile(nn.Sequential(norm, layer), backend="aot_eager", fullgraph=True)
    g = torch.randn(SAMPLES, TOKENS, OUTPUTS)
    (found,) = torch.autograd.grad(compiled(x), layer.weight, g)
    (expected,) = torch.autograd.grad(layer(norm(x)), layer.weight, g)
    assert oracle.relative_error(found, expected) < 0.02  # two errors of 0.005


def test_gradients_under_vmap():
    norm, layer, x = few_bit(), linear(), activation()
    for read in (READS["rows"], READS["turned"]):
        layer = linear(read(x).shape[-1])
        z = layer(read(norm(x)))
        g = torch.randn(2, *z.shape)
        (found,) = torch.autograd.grad(z, layer.weight, g, is_grads_batched=True, retain_graph=True)
        expected = [torch.autograd.grad(z, layer.weight, one, retain_graph=True)[0] for one in g]
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("batch_first", [False, True])
def test_projections_of_attention(batch_first):
    norm = few_bit(value_format="int4")
    holder = nn.ModuleList([nn.MultiheadAttention(LENGTH, 4, batch_first=batch_first)])
    convert(holder, sparsity=0.0, value_format="int2")
    attention, x = holder[0], activation()
    found, seen = [], derived.find
    y = norm(x)
    try:
        derived.find = lambda *given: found.append(seen(*given)) or found[-1]
        out, _ = attention(y, y, y, need_weights=False)
    finally:
        derived.find = seen
    assert found[0] is not None
    assert found[0][1].order == ("samples_second" if batch_first else "alike")
    g = torch.randn_like(out)
    grads = torch.autograd.grad(out, attention.in_proj_weight, g)
    dense = nn.MultiheadAttention(LENGTH, 4, batch_first=batch_first)
    dense.load_state_dict(attention.state_dict())
    exact = torch.autograd.grad(dense(y, y, y, need_weights=False)[0], dense.in_proj_weight, g)
    assert oracle.relative_error(grads[0], exact[0]) < 0.18  # int4: 0.09 of normal values
