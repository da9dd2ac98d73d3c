"""Layers that scale each feature and keep their input quantized: exact but for the gradient of the factors."""

from __future__ import annotations

import importlib
import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune.codec import formats
from lightning_actprune.operators import scale
from lightning_actprune.operators.norm import scaled
from lightning_actprune.operators.scale import Affine
from tests.support import oracle
from tests.support.compressed import compressed
from tests.support.marks import in_turn
from tests.support.saving import saved_tensors

FEATURES = 70
"""No multiple of a block: the last one of a row is cut short."""


def read(values: Tensor, rows: int, length: int, block_size: int, bits: int) -> Tensor:
    return formats.dequantize(values.cpu(), block_size, bits, torch.float32).double().view(rows, -1)[:, :length]


@pytest.mark.parametrize(
    ("form", "dtypes", "bits"),
    in_turn(
        [((3, 5, 70), 32), ((2, 300), 24), ((9, 8), 32)] * 2,
        list(itertools.product((torch.float32, torch.bfloat16), (torch.float32,), (torch.float32, torch.bfloat16))),
        (8, 3),
    ),
    ids=str,
)
def test_a_scaled_branch_is_added_in_the_same_pass(device, form, dtypes, bits):
    shape, block = form
    made = torch.randn(shape), 1 + torch.randn(shape[-1]), torch.randn(shape)
    x, weight, residual = (t.to(device, dtype).requires_grad_() for t, dtype in zip(made, dtypes, strict=True))
    with saved_tensors() as saved:
        y = scaled(x, weight, None, residual, block, bits)
    assert y.dtype == torch.float32
    wide, w, r = (t.detach().double().cpu() for t in (x, weight, residual))
    # Rounded once or twice: by half a unit of the product, and of the sum.
    bound = torch.finfo(torch.float32).eps * ((wide * w).abs() + r.abs())
    assert ((y.detach().double().cpu() - (r + wide * w)).abs() <= bound).all()
    grad_y = torch.randn_like(y)
    of_x, of_weight, of_residual = torch.autograd.grad(y, (x, weight, residual), grad_y)
    assert [g.dtype for g in (of_x, of_weight, of_residual)] == list(dtypes)
    assert torch.equal(of_residual, grad_y.to(dtypes[2]))
    g = grad_y.double().cpu()
    assert ((of_x.double().cpu() - g * w).abs() <= torch.finfo(dtypes[0]).eps * (g * w).abs()).all()
    rows, length = x.numel() // shape[-1], shape[-1]
    near = read(saved[0], rows, length, min(block, length), bits)
    assert oracle.relative_error(of_weight, (g.view(rows, length) * near).sum(0)) < 2e-6


def test_any_strides(device):
    """Of branch, residual and gradient, alone and together; tensors may start anywhere."""
    shape = (4, 6, 33)
    makers = (
        lambda: torch.randn(shape, device=device),
        lambda: torch.randn(4, 33, 6, device=device).transpose(1, 2),
        lambda: torch.randn(8, 6, 70, device=device)[::2, :, 5:38],
        lambda: torch.randn(33, device=device).expand(shape),
    )
    weight = torch.randn(1, 1, 33, device=device, requires_grad=True)
    for of_x, of_residual, of_grad in itertools.product(makers, repeat=3):
        x, residual, grad_y = of_x().requires_grad_(), of_residual().requires_grad_(), of_grad()
        y = scaled(x, weight, None, residual, 32, 8)
        torch.testing.assert_close(y, residual + weight * x, rtol=3e-7, atol=3e-7)
        grads = torch.autograd.grad(y, (x, weight, residual), grad_y)
        torch.testing.assert_close(grads[0], grad_y * weight.detach())
        assert grads[1].shape == weight.shape
        assert torch.equal(grads[2], grad_y)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_place(device, value):
    x, residual = (torch.randn(5, 70, device=device) for _ in range(2))
    weight = torch.randn(70, device=device, requires_grad=True)
    x[2, 3], residual[1, 5] = value, value
    x.requires_grad_()
    y = scaled(x, weight, None, residual, 32, 4)
    assert (~y.isfinite()).nonzero().tolist() == [[1, 5], [2, 3]]
    of_x, of_weight = torch.autograd.grad(y, (x, weight), torch.randn_like(y))
    assert of_x.isfinite().all()
    assert of_weight[:32].isnan().all()  # of the block that cannot be stored
    assert of_weight[32:].isfinite().all()


def test_inputs_that_cannot_be_kept_are_left_to_torch():
    """What torch multiplies all the same: other numbers, values that are expanded, and fewer dimensions."""
    dense = Affine(FEATURES)
    for parameter in dense.parameters():
        nn.init.normal_(parameter)
    ours = compressed(dense, "affine", bits=8)
    for x in (torch.ones(2, FEATURES, dtype=torch.int64), torch.randn(2, 1), torch.randn(())):
        found, right = ((y, *torch.autograd.grad(y.sum(), list(m.parameters()))) for m in (ours, dense) for y in [m(x)])
        assert all(map(torch.equal, found, right))


@pytest.mark.foreign
@pytest.mark.parametrize("path", ["plain", "hook"])
def test_a_block_adds_its_branches_on_the_way_if_nothing_is_between(path, device):
    dense = importlib.import_module("timm.models.mlp_mixer").ResBlock(FEATURES, 5).to(device)
    nn.init.normal_(dense.ls1), nn.init.normal_(dense.ls2)
    ours, x = compressed(nn.Sequential(dense), "scale", bits=8), torch.randn(3, 5, 70, device=device)
    if path == "hook":
        for block in (dense, ours[0]):
            block.drop_path.register_forward_hook(lambda module, args, y: 2 * y)
    added = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale, "scaled", lambda *given: added.append(given[3] is not None) or scaled(*given))
        y = ours(x)
    right = dense(x)
    assert added == [path == "plain"] * 2
    assert y.dtype == right.dtype
    torch.testing.assert_close(y, right, rtol=1e-5, atol=1e-5)
