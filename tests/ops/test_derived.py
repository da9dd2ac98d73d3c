"""A linear layer behind a norm or an affine layer in few bits keeps nothing of its own."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_actprune import ActivationPrunedLinear, convert
from lightning_actprune.nn.affine import Affine
from lightning_actprune.ops import derived
from lightning_actprune.ops.weight_grad import unpack
from tests import oracle

SAMPLES, TOKENS, LENGTH, OUTPUTS = 3, 10, 72, 24
"""Blocks of 32 end short in rows of 72."""
NORMS = {
    "layer": lambda: nn.LayerNorm(LENGTH),
    "layer-plain": lambda: nn.LayerNorm(LENGTH, elementwise_affine=False),
    "layer-unshifted": lambda: nn.LayerNorm(LENGTH, bias=False),
    "rms": lambda: nn.RMSNorm(LENGTH),
    "affine": lambda: Affine(LENGTH),
    "affine-unshifted": lambda: Affine(LENGTH, bias=False),
}
READS = {
    "rows": lambda y: y,
    "flat": lambda y: y.view(-1, LENGTH),
    "turned": lambda y: y.transpose(1, 2),
}
ROUNDED = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


@pytest.fixture(autouse=True)
def nothing_left():
    """After each test nothing is known of its tensors any more."""
    gc.collect()
    before = set(derived._outputs)
    yield
    gc.collect()
    assert set(derived._outputs) <= before


def few_bit(make=NORMS["layer"], value_format="int4", device="cpu", dtype=torch.float32, **settings) -> nn.Module:
    """Return a norm or an affine layer with random parameters that keeps what it does in few bits."""
    model = nn.Sequential(make()).to(device, dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=1.0)
    convert(model, sparsity=0.0, others={"norm": value_format, "affine": value_format}, **settings)
    return model[0]


def linear(features=LENGTH, value_format="int2", device="cpu", dtype=torch.float32, **settings) -> nn.Module:
    given = {"sparsity": 0.0, "value_format": value_format, "device": device, "dtype": dtype} | settings
    return ActivationPrunedLinear(features, OUTPUTS, **given)


def activation(device="cpu", dtype=torch.float32) -> Tensor:
    return torch.randn(SAMPLES, TOKENS, LENGTH, device=device, dtype=dtype).requires_grad_()


def kept_values(y: Tensor) -> Tensor:
    """Return the bytes that the few-bit layer whose output ``y`` is keeps."""
    return y.grad_fn.saved_tensors[0]


def derives(z: Tensor, y: Tensor) -> bool:
    """Return whether the layer whose output ``z`` is keeps what that of ``y`` does, and no copy of it."""
    return any(t is not None and t.data_ptr() == kept_values(y).data_ptr() for t in z.grad_fn.saved_tensors)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_16_bits(device, dtype):
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
        with torch.autocast(device.type, torch.float16, enabled=autocast):
            y = norm(x)
            seen = READS[read](y)
            z = layer(seen.clone() if own else seen)
        assert derives(z, y) is not own
        wanted = x, layer.bias, *norm.parameters()
        results.append([z, *torch.autograd.grad(z, wanted, torch.ones_like(z))])
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


def other_tensor(norm, x):
    return norm(x).clone()


def some_rows(norm, x):
    return norm(x)[:, 1:]


def modified(norm, x):
    return norm(x).mul_(2)


def modified_through_a_view(norm, x):
    y = norm(x)
    y[:, 0].zero_()
    return y


def after_a_change_of_the_scale(norm, x):
    y = norm(x)
    with torch.no_grad():
        norm.weight.mul_(2)
    return y


def after_a_change_of_the_shift(norm, x):
    y = norm(x)
    with torch.no_grad():
        norm.bias.add_(1)
    return y


READ_OTHERWISE = [
    other_tensor,
    some_rows,
    modified,
    modified_through_a_view,
    after_a_change_of_the_scale,
    after_a_change_of_the_shift,
]


def own_pack(z: Tensor) -> bool:
    """Return whether a layer keeps a pack with positions of its own, even if these are empty."""
    return sum(t is not None and t.dtype == torch.int32 for t in z.grad_fn.saved_tensors) == 2


@pytest.mark.parametrize("read", READ_OTHERWISE)
def test_other_tensors_are_packed(read):
    norm, layer, x = few_bit(), linear(value_format="int8"), activation()
    norm._few_bit = type(norm._few_bit)("int8")
    y = read(norm, x)
    z = layer(y)
    assert own_pack(z)
    g = torch.randn_like(z)
    (grad,) = torch.autograd.grad(z, layer.weight, g)
    expected = g.flatten(0, 1).t() @ y.detach().flatten(0, 1)
    assert oracle.relative_error(grad, expected) < 0.02  # int8: 0.005 of normal values


SETTINGS = {
    "fewer bits there": ("int2", {"value_format": "int3"}, True),
    "as many bits": ("int3", {"value_format": "int3"}, False),
    "more bits there": ("int8", {"value_format": "fp8"}, False),
    "errors with a mean there": ("fp8", {"value_format": "int4"}, True),
    "larger blocks there": ("int4", {"value_format": "int4", "block_size": 16}, True),
    "smaller blocks there": ("int4", {"value_format": "int4", "block_size": 64}, False),
    "dropped blocks": ("int4", {"value_format": "int4", "sparsity": 0.5}, True),
    "values as they are": ("int4", {"value_format": "same", "sparsity": 0.5}, True),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_layer_that_asks_for_more_or_drops_blocks_packs_its_own(case):
    there, asked, packs = SETTINGS[case]
    y = few_bit(value_format=there)(activation())
    assert own_pack(linear(**asked)(y)) is packs


def test_backward_finds_out_that_parameters_were_modified():
    norm, layer = few_bit(), linear()
    z = layer(norm(activation()))
    with torch.no_grad():
        norm.bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(z.sum(), layer.weight)


def test_hooks_that_say_what_is_kept_end_it():
    norm, layer, x = few_bit(), linear(), activation()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        z = layer(norm(x))
    assert own_pack(z)
    z.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True], ids=["linear layer", "both"])
def test_an_activation_checkpoint_finds_the_same_when_it_runs_again(reentrant, whole):
    norm, layer, x = few_bit(value_format="int8"), linear(), activation()
    z = checkpoint(nn.Sequential(norm, layer), x, use_reentrant=reentrant) if whole else None
    z = checkpoint(layer, norm(x), use_reentrant=reentrant) if z is None else z
    g = torch.randn_like(z)
    z.backward(g)
    expected = g.flatten(0, 1).t() @ norm(x).detach().flatten(0, 1)
    assert oracle.relative_error(layer.weight.grad, expected) < 0.5  # int2: 0.44 of normal values, int8 far less


def test_layers_whose_parameters_fsdp_gathers_pack_their_own():
    norm, layer = few_bit(), linear()
    layer._is_fsdp_managed_module = True  # as `fully_shard` marks them
    assert own_pack(layer(norm(activation())))


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
