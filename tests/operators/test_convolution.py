"""Convolutions whose input is compressed: the gradient of the weight, for every layout, window and type."""

from __future__ import annotations

import copy
import itertools
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune.config import Keep
from lightning_actprune.convert import convert
from tests.support.compressed import as_kept, compressed
from tests.support.convolutions import BLOCK, SPARSITY, in_memory, laid_out, pruned
from tests.support.marks import in_turn
from tests.support.oracle import relative_error
from tests.support.saving import saved_tensors

CASES = {
    "3x3": (partial(nn.Conv2d, 16, 8, 3, padding=1), (3, 16, 9, 6)),
    "strided": (partial(nn.Conv2d, 8, 6, 3, stride=2, padding=(1, 0)), (2, 8, 9, 8)),
    "patches": (partial(nn.Conv2d, 3, 10, 4, stride=4), (3, 3, 8, 8)),
    "grouped": (partial(nn.Conv2d, 12, 8, 3, groups=4), (2, 12, 6, 8)),
    "depthwise": (partial(nn.Conv2d, 16, 16, 5, groups=16, padding=2), (2, 16, 7, 7)),
    "dilated": (partial(nn.Conv2d, 8, 4, 3, dilation=(2, 1), padding=(2, 0)), (2, 8, 9, 9)),
    "pointwise": (partial(nn.Conv2d, 24, 6, 1), (3, 24, 5, 4)),
    "ragged": (partial(nn.Conv2d, 5, 4, 3, padding=1), (3, 5, 7, 3)),  # 105 values a sample, no multiple of a block
    "smaller than a block": (partial(nn.Conv2d, 5, 3, 1), (4, 5, 1, 1)),
    "1d": (partial(nn.Conv1d, 12, 5, 3, padding=1), (3, 12, 20)),
    "3d": (partial(nn.Conv3d, 8, 6, (2, 3, 3), padding=(0, 1, 1)), (2, 8, 3, 4, 5)),
}
"""Layers and shapes of their inputs."""


def made(name: str, last: bool, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, **settings):
    """Return an input that needs a gradient, channels last in memory or not, a dense layer and its compressed copy."""
    make, shape = CASES[name]
    dense = make(device=device, dtype=dtype)
    ours = compressed(dense, "convolution", **{"sparsity": SPARSITY, "block_size": BLOCK, **settings})
    return laid_out(torch.randn(shape, device=device, dtype=dtype), last).requires_grad_(), dense, ours


def weight_gradient(dense: nn.Module, x: Tensor, grad_y: Tensor) -> Tensor:
    """Return the weight gradient of torch's own convolution of ``x``."""
    layer = copy.deepcopy(dense).to(x.dtype)
    return torch.autograd.grad(layer(x.detach()), layer.weight, grad_y.to(x.dtype))[0]


def grads_of(layer: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(layer(x), (x, *layer.parameters()), grad)


DTYPES = torch.bfloat16, torch.float16
LOW = [*itertools.product(("3x3", "depthwise", "1d"), (True,), DTYPES)]


@pytest.mark.parametrize(("name", "last", "dtype"), [*in_turn(CASES, (False, True), (torch.float32,)), *LOW], ids=str)
def test_only_the_weight_gradient_is_approximate(device, name, last, dtype):
    x, dense, ours = made(name, last, device, dtype)
    y, right = ours(x), dense(x)
    grad = torch.randn_like(right)
    (dx, dw, db), exact = grads_of(ours, x, grad), grads_of(dense, x, grad)
    assert y.stride() == right.stride()
    assert dx.stride() == exact[0].stride()
    # On a GPU the vendor's library may take another algorithm for the same convolution.
    eps = torch.finfo(dtype).eps
    near = {"rtol": 0, "atol": 0} if device.type == "cpu" else {"rtol": 84 * eps, "atol": 84 * eps}
    torch.testing.assert_close((y, dx, db), (right, exact[0], exact[2]), **near)
    # Torch's own gradient for the pruned input has the same products, and may have another order of summation.
    hat = laid_out(pruned(x, last), last)
    expected = weight_gradient(dense, hat.double(), grad)
    torchs = relative_error(weight_gradient(dense, hat, grad), expected)
    assert relative_error(dw, expected) <= 2 * torchs + 4 * eps


@pytest.mark.parametrize(
    ("sparsity", "bits", "selection", "last"),
    [(0.0, 8, "largest", False), (0.0, 3, "largest", True), (0.5, 4, "swap", True), (0.5, 2, "unbiased", False)],
)
def test_the_weight_gradient_is_that_of_the_stored_input(device, sparsity, bits, selection, last):
    x, dense, ours = made("3x3", last, device, sparsity=sparsity, bits=bits, selection=selection)
    grad = torch.randn_like(dense(x))
    rows = in_memory(x.detach(), last).view(x.shape[0], -1, BLOCK)
    hat = as_kept(rows, BLOCK, sparsity, bits, selection)
    channels, *spatial = x.shape[1:]
    hat = hat.view(-1, *spatial, channels).movedim(-1, 1) if last else hat.view(x.shape)
    assert relative_error(grads_of(ours, x, grad)[1], weight_gradient(dense, hat.double(), grad)) < 1e-5


def test_what_reads_one_tensor_packs_it_once(device):
    x, dense, _ = made("3x3", True, device)
    model = nn.ModuleList([dense, nn.Conv2d(16, 4, 1, stride=2, device=device), nn.Linear(6, 5, device=device)])
    layers = copy.deepcopy(model)
    convert(model, rules={"*": Keep(sparsity=SPARSITY, block_size=BLOCK)})
    with saved_tensors() as saved:
        outputs = [layer(x) for layer in model]
    weights = {p.data_ptr() for p in model.parameters()}
    assert len({t.data_ptr() for t in saved if t.data_ptr() not in weights}) == 6  # two packs: one for the convolutions
    hat = pruned(x, True).double()
    for y, layer, dense in zip(outputs[:2], model, layers, strict=False):
        (grad,) = torch.autograd.grad(y.sum(), layer.weight)
        assert relative_error(grad, weight_gradient(dense, hat, torch.ones_like(y))) < 1e-5
    outputs[2].sum().backward()


def test_tokens_are_pixels_or_lines(device):
    for last in (False, True):
        x, dense, ours = made("3x3", last, device, sparsity=0.5, block_size=3, scope="token")
        grad = torch.randn_like(dense(x))
        rows = (x.detach().movedim(1, -1) if last else x.detach()).flatten(0, -2)
        hat = pruned(rows, False, 3, 0.5)  # every row a sample
        hat = hat.view(3, 9, 6, 16).movedim(-1, 1) if last else hat.view(x.shape)
        expected = weight_gradient(dense, hat.double(), grad)
        assert relative_error(grads_of(ours, x, grad)[1], expected) < 1e-5


def test_what_torch_keeps_otherwise_is_skipped():
    circular, same = nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"), nn.Conv1d(3, 3, 4, padding="same")
    model = nn.ModuleList([circular, same, nn.ConvTranspose2d(3, 3, 1), nn.Conv1d(8, 8, 3)])
    report = convert(model, rules={"*": Keep(sparsity=0.5)})
    assert [layer.fqn for layer in report.converted] == ["3"]
    assert [layer.fqn for layer in report.skipped] == ["0", "1", "2"]
    assert [type(m) for m in model][:3] == [nn.Conv2d, nn.Conv1d, nn.ConvTranspose2d]
