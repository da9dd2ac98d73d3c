"""Linear layers and transformers' ``Conv1D``: which gradient a compressed input gives, for every layout and type."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import ActivationPrunedLinear
from tests.support import oracle
from tests.support.compressed import compressed
from tests.support.marks import in_turn
from tests.support.measured import kept_bytes


def grads_of(layer: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(layer(x), (x, *layer.parameters()), grad)


def leaf(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """Return small integers: sums of squares are exact in every type, so that the kept blocks are the oracle's."""
    return oracle.integers(*shape, dtype=dtype, device=device).requires_grad_()


DTYPES = torch.float32, torch.bfloat16, torch.float16
FORMS = [
    ((3, 37, 70), 16, 24, "sample"),
    ((3, 11, 70), 16, 24, "token"),
    ((300, 64), 64, 16, "sample"),
    ((2, 3, 5, 40), 7, 1, "sample"),
    ((3, 5, 33), 1, 7, "sample"),
    ((3, 5, 33), 1000, 7, "token"),
    ((20,), 8, 5, "sample"),
]
"""Shapes, block sizes, outputs and scopes."""


@pytest.mark.parametrize(
    ("form", "dtype"), [*in_turn(FORMS, DTYPES), *((FORMS[0], dtype) for dtype in DTYPES[1:])], ids=str
)
def test_gradients_within_twice_torchs_own_error(device, form, dtype):
    shape, block_size, outputs, scope = form
    dense = nn.Linear(shape[-1], outputs, dtype=dtype, device=device)
    layer = compressed(dense, sparsity=0.5, block_size=block_size, scope=scope)
    x = leaf(*shape, dtype=dtype, device=device)
    grad = torch.randn_like(dense(x))
    (dx, dw, db), exact = grads_of(layer, x, grad), grads_of(dense, x, grad)
    assert torch.equal(layer(x), dense(x))
    assert torch.equal(dx, exact[0])
    samples, block = oracle.as_samples(x.detach(), scope), min(block_size, shape[-1])
    blocks = samples.shape[1] * math.ceil(shape[-1] / block)  # of a sample, each with a bit and 1/128 offset
    nbytes = (blocks - blocks // 2) * block * dtype.itemsize + 4 * math.ceil(blocks / 32) + 4 * math.ceil(blocks / 128)
    assert kept_bytes(layer, x) == len(samples) * nbytes
    hat = oracle.pruned(samples, block, 0.5).reshape(-1, shape[-1])
    g = grad.reshape(-1, outputs)
    right, torchs = g.double().t() @ hat.double(), g.t() @ hat
    floor = 4 * torch.finfo(dtype).eps
    assert oracle.relative_error(dw, right) <= 2 * oracle.relative_error(torchs, right) + floor
    bias = g.double().sum(0)
    assert oracle.relative_error(db, bias) <= 2 * oracle.relative_error(g.sum(0), bias) + floor
    assert dw.dtype == db.dtype == dtype


@pytest.mark.parametrize("scope", ["sample", "token"])
@pytest.mark.parametrize(
    ("block_size", "along"),
    [(11, "tokens"), (8, "features"), (1, "features")],  # 20 rows of 33 against 33 of 22; 20 of 40, 33 of 24; a tie
)
def test_transposed_view_is_pruned_along_what_blocks_fill_up_better(device, block_size, along, scope):
    """A contiguous [B, D, T] tensor enters a linear layer over D as [B, T, D], as in ResMLP's token mixing."""
    x = oracle.integers(3, 20, 33, device=device).transpose(1, 2).requires_grad_()
    layer = compressed(nn.Linear(20, 9, device=device), sparsity=0.5, block_size=block_size, scope=scope)
    grad = torch.randn(3, 33, 9, device=device)
    dx, dw, _ = grads_of(layer, x, grad)
    rows = x.detach() if along == "features" else x.detach().transpose(1, 2)
    hat = oracle.pruned(oracle.as_samples(rows, scope), block_size, 0.5).reshape(rows.shape)
    hat = hat if along == "features" else hat.transpose(1, 2)
    assert oracle.relative_error(dw, torch.einsum("bto,btd->od", grad.double(), hat.double())) < 1e-6
    assert oracle.relative_error(dx, grad.double() @ layer.weight.detach().double()) < 1e-6


def test_autocast_packs_the_cast_input(device):
    layer = compressed(nn.Linear(64, 24, device=device), sparsity=0.5, block_size=16)
    x = leaf(2, 40, 64, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        y = layer(x)
        nbytes = kept_bytes(layer, x)
    assert nbytes == 2 * 80 * 16 * 2 + 4 * 2 * (5 + 2)
    y.float().square().sum().backward()
    exact = (2 * y.double()).reshape(-1, 24).t() @ oracle.pruned(x.detach(), 16, 0.5).flatten(0, 1).double()
    assert oracle.relative_error(layer.weight.grad, exact) < 2 * torch.finfo(torch.bfloat16).eps


def test_several_gradients_at_once_equal_them_one_by_one(device):
    """Vectorised jacobians: ``vmap`` hands the backward tensors without memory of their own."""
    layer = compressed(nn.Linear(32, 24, device=device), sparsity=0.5, block_size=16)
    plain = torch.randn(3, 40, 32, device=device)
    for x in (plain.requires_grad_(), plain.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()):
        y, inputs = layer(x), (x, *layer.parameters())
        grads = torch.randn(2, *y.shape, device=device)
        together = torch.autograd.grad(y, inputs, grads, is_grads_batched=True, retain_graph=True)
        for i in range(2):
            alone = torch.autograd.grad(y, inputs, grads[i], retain_graph=True)
            for a, b in zip(together, alone, strict=True):
                assert oracle.relative_error(a[i], b) < 1e-6


def test_layers_with_one_weight_add_up():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, bias=False))
    model[1].weight = model[0].weight
    model, x = compressed(model, sparsity=0.5), torch.randn(3, 5, 32)
    assert model[0].weight is model[1].weight
    y = model[0](x)
    z, alone = model[1](y), model[1](y.detach())
    both, of_second, of_first = (
        torch.autograd.grad(out, model[0].weight, grad, retain_graph=True)[0]
        for out, grad in ((z, z), (alone, z), (y, z @ model[1].weight))
    )
    torch.testing.assert_close(both, of_first + of_second)


def test_sparsity_is_read_at_each_forward_and_zero_is_dense():
    dense = nn.Linear(33, 7)
    layer = compressed(dense, sparsity=0.5, block_size=8)
    x = torch.randn(3, 5, 33)
    (right,) = torch.autograd.grad(dense(x).sum(), dense.weight)
    for sparsity in (0.5, 0.0, 0.75):
        layer.sparsity = sparsity
        hat = oracle.pruned(x, 8, sparsity).flatten(0, 1)
        (found,) = torch.autograd.grad(layer(x).sum(), layer.weight)
        torch.testing.assert_close(found, torch.ones(7, 15) @ hat)
        assert torch.equal(found, right) == (sparsity == 0)
    layer.sparsity = 0.0
    assert kept_bytes(layer, x) == x.nbytes


def test_inputs_that_cannot_be_kept_are_refused():
    layer = compressed(nn.Linear(33, 7), sparsity=0.5)
    for x, error, message in (
        (torch.ones(2, 33, dtype=torch.int64), TypeError, "torch.int64"),
        (torch.ones(2, 33, dtype=torch.complex64), TypeError, "torch.complex64"),
        (torch.tensor(1.0), ValueError, "at least one dimension"),
        (torch.ones(2, 34), RuntimeError, "shapes cannot be multiplied"),
    ):
        with pytest.raises(error, match=message):
            layer(x)


def test_a_layer_may_be_built_as_it_is():
    layer, x = ActivationPrunedLinear(33, 7, sparsity=0.5, block_size=8), torch.randn(3, 5, 33)
    converted = compressed(nn.Linear(33, 7), sparsity=0.5, block_size=8)
    converted.load_state_dict(layer.state_dict())
    grads = [torch.autograd.grad(made(x).sum(), made.weight)[0] for made in (layer, converted)]
    assert torch.equal(*grads)
    assert layer.owner is None
    with pytest.raises(ValueError, match="`sparsity`"):
        ActivationPrunedLinear(33, 7, sparsity=1)
    with pytest.raises(ValueError, match="`block_size`"):
        ActivationPrunedLinear(33, 7, sparsity=0.5, block_size=4, bits=4)
