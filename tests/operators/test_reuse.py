"""A linear layer behind a norm or an affine layer keeps nothing of its own: when, and what its gradients are then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_actprune.codec import packed
from lightning_actprune.operators.norm import Affine
from tests.support import oracle
from tests.support.compressed import compressed
from tests.support.marks import in_turn
from tests.support.measured import kept_bytes
from tests.support.saving import nodes_of

pytestmark = pytest.mark.usefixtures("nothing_left")

ROUNDED = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
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


def norm_of(name: str = "layer", bits: int = 4, device="cpu", dtype=torch.float32, **settings) -> nn.Module:
    """Return a compressed norm or affine layer with random parameters."""
    dense = NORMS[name]().to(device, dtype)
    for parameter in dense.parameters():
        nn.init.normal_(parameter, mean=1.0)
    operator = {"affine": "affine", "affine-unshifted": "scale"}.get(name, "norm")
    return compressed(dense, operator, bits=bits, **settings)


def linear(
    features=LENGTH, bits: int | None = 2, device="cpu", dtype=torch.float32, bias=True, **settings
) -> nn.Module:
    """Return a compressed linear layer."""
    return compressed(nn.Linear(features, OUTPUTS, bias, device=device, dtype=dtype), bits=bits, **settings)


def activation(device="cpu", dtype=torch.float32) -> Tensor:
    return torch.randn(SAMPLES, TOKENS, LENGTH, device=device, dtype=dtype).requires_grad_()


def kept_values(y: Tensor) -> Tensor:
    """Return the bytes that the norm whose output ``y`` is keeps."""
    [values] = [t for t in y.grad_fn.saved_tensors if t is not None and t.dtype == torch.uint8]
    return values


def reuses(z: Tensor, y: Tensor) -> bool:
    """Return whether the layer whose output ``z`` is keeps what that of ``y`` does, and no copy of it."""
    return any(t is not None and t.data_ptr() == kept_values(y).data_ptr() for t in z.grad_fn.saved_tensors)


def own_pack(z: Tensor) -> bool:
    """Return whether a layer keeps a pack with positions of its own, even if these are empty."""
    return sum(t is not None and t.dtype == torch.int32 for t in z.grad_fn.saved_tensors) == 2


def as_known(y: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is stored of ``y``, in fp64: values before they are scaled, scale and shift."""
    rows = y.numel() // LENGTH
    x = packed.unpack_all(kept_values(y).cpu(), rows, LENGTH, norm.block_size, norm.bits, torch.float32)
    x = x.reshape(y.shape).double().to(y.device)
    weight, bias = (getattr(norm, name, None) for name in ("weight", "bias"))
    one, zero = x.new_ones(LENGTH), x.new_zeros(LENGTH)
    return x, one if weight is None else weight.detach().double(), zero if bias is None else bias.detach().double()


CASES = [
    *((name, "rows") for name in ("layer", "layer-plain", "layer-unshifted", "rms", "affine")),
    *((name, "turned") for name in ("affine", "affine-unshifted", "layer-plain")),
    ("layer", "flat"),
    ("affine", "flat"),
]


@pytest.mark.parametrize(("case", "autocast"), [*in_turn(CASES, (False, True)), (CASES[0], True)], ids=str)
def test_the_weight_gradient_is_that_of_what_the_layer_before_keeps_and_all_else_as_ever(device, case, autocast):
    made, read = case
    norm, x = norm_of(made, device=device), activation(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        y = norm(x)
        seen = READS[read](y)
        layer = linear(seen.shape[-1], device=device)
        z, alone = layer(seen), layer(seen.clone())
    assert reuses(z, y)
    assert not reuses(alone, y)
    wanted, g = (x, layer.bias, *norm.parameters()), torch.randn_like(z)
    results = [[out, *torch.autograd.grad(out, wanted, g, retain_graph=True)] for out in (z, alone)]
    assert all(map(torch.equal, *results))
    known, weight, bias = as_known(y, norm)
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


def test_several_layers_read_what_one_keeps():
    norm, x = norm_of(), activation()
    y = norm(x)
    outputs = [linear(bias=bias)(y) for bias in (True, False, True)]
    assert [reuses(z, y) for z in outputs] == [True] * 3
    packs = [t.untyped_storage()._cdata for z in outputs for t in z.grad_fn.saved_tensors if t is not None]
    assert len(set(packs)) == 6  # three weights, and values, scale and shift once
    sum(z.sum() for z in outputs).backward()


def test_frozen_parameters():
    norm, x = norm_of(), activation()
    norm.requires_grad_(False)
    layer = linear()
    layer.bias.requires_grad_(False)
    y = norm(x)
    z = layer(y)
    assert reuses(z, y)
    z.sum().backward()
    grads = [p.grad is not None for p in (x, norm.weight, layer.weight, layer.bias)]
    assert grads == [True, False, True, False]
    layer.weight.requires_grad_(False)
    assert kept_bytes(layer, x) == 0


@pytest.mark.parametrize("batch_first", [False, True])
def test_projections_of_attention(batch_first):
    norm, dense = norm_of(bits=4), nn.MultiheadAttention(LENGTH, 4, batch_first=batch_first)
    attention, x = compressed(dense, bits=2), activation()
    y = norm(x)
    out, _ = attention(y, y, y, need_weights=False)
    saved = [t for node in nodes_of(out) for t in getattr(node, "saved_tensors", ()) if t is not None]
    found = [t.data_ptr() for t in saved if t.dtype == torch.uint8]
    assert found.count(kept_values(y).data_ptr()) == 2  # of the norm and of the in-projection
    assert len(set(found)) == 2  # and what the output projection keeps
    g = torch.randn_like(out)
    grads = torch.autograd.grad(out, attention.in_proj_weight, g)
    exact = torch.autograd.grad(dense(y, y, y, need_weights=False)[0], dense.in_proj_weight, g)
    assert oracle.relative_error(grads[0], exact[0]) < 0.18  # 4 bits: 0.09 of normal values


def after(change: Callable[[Tensor, nn.Module], object]) -> Callable[[nn.Module, Tensor], Tensor]:
    """Return what calls a norm, then changes its output or its parameters."""

    def read(norm: nn.Module, x: Tensor) -> Tensor:
        y = norm(x)
        with torch.no_grad():
            change(y, norm)
        return y

    return read


READ_OTHERWISE = {
    "other tensor": lambda norm, x: norm(x).clone(),
    "some rows": lambda norm, x: norm(x)[:, 1:],
    "modified": lambda norm, x: norm(x).mul_(2),
    "modified through a view": lambda norm, x: (y := norm(x), y[:, 0].zero_())[0],
    "scale": after(lambda y, norm: norm.weight.mul_(2)),
    "shift": after(lambda y, norm: norm.bias.add_(1)),
    "data of the output": after(lambda y, norm: setattr(y, "data", torch.ones_like(y))),
    "data of the scale": after(lambda y, norm: setattr(norm.weight, "data", torch.ones_like(norm.weight))),
    "data of the shift": after(lambda y, norm: setattr(norm.bias, "data", torch.ones_like(norm.bias))),
}


@pytest.mark.parametrize("read", READ_OTHERWISE.values(), ids=READ_OTHERWISE)
def test_other_tensors_are_packed(read):
    norm, layer, x = norm_of(bits=8), linear(bits=4), activation()
    y = read(norm, x)
    z = layer(y)
    assert own_pack(z)
    g = torch.randn_like(z)
    (grad,) = torch.autograd.grad(z, layer.weight, g)
    expected = g.flatten(0, 1).t() @ y.detach().flatten(0, 1)
    assert oracle.relative_error(grad, expected) < 0.15  # 4 bits: 0.09 of normal values


def test_a_layer_that_asks_for_as_many_bits_drops_blocks_or_computes_in_fp16_packs_its_own():
    for there, asked, packs in (
        (2, {"bits": 3}, True),
        (3, {"bits": 3}, True),
        (8, {"bits": 4}, False),
        (4, {"bits": 3, "block_size": 16}, True),
        (4, {"bits": 3, "block_size": 64}, False),
        (4, {"bits": 3, "sparsity": 0.5}, True),
        (4, {"bits": None, "sparsity": 0.5}, True),
    ):
        assert own_pack(linear(**asked)(norm_of(bits=there)(activation()))) is packs, (there, asked)
    # Values of the input that y makes small, or products before these are scaled, may be too large for fp16.
    assert own_pack(linear(dtype=torch.float16)(norm_of(dtype=torch.float16)(activation().half())))
    y = norm_of()(activation())
    with torch.autocast("cpu", torch.float16):
        assert own_pack(linear()(y))


def test_backward_finds_out_that_parameters_were_modified():
    norm, layer = norm_of(), linear()
    z = layer(norm(activation()))
    with torch.no_grad():
        norm.bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(z.sum(), layer.weight)


def test_hooks_and_fsdp_end_it():
    norm, layer, x = norm_of(), linear(), activation()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        z = layer(norm(x))
    assert own_pack(z)
    z.sum().backward()
    layer._is_fsdp_managed_module = True  # as `fully_shard` marks layers whose parameters it gathers
    assert own_pack(layer(norm(x)))


@pytest.mark.parametrize(("reentrant", "whole"), [(False, True), (True, False)])
def test_an_activation_checkpoint_finds_the_same_when_it_runs_again(reentrant, whole):
    norm, layer, x = norm_of(bits=8), linear(), activation()
    z = checkpoint(nn.Sequential(norm, layer), x, use_reentrant=reentrant) if whole else None
    z = checkpoint(layer, norm(x), use_reentrant=reentrant) if z is None else z
    g = torch.randn_like(z)
    z.backward(g)
    expected = g.flatten(0, 1).t() @ norm(x).detach().flatten(0, 1)
    assert oracle.relative_error(layer.weight.grad, expected) < 0.5  # 2 bits: 0.44 of normal values, 8 far less
