"""Convolutions whose input is compressed: the gradient of the weight, for every layout, window and type."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune.config import Keep
from lightning_actprune.convert import convert
from tests.support.compressed import as_kept, compressed
from tests.support.convolutions import BLOCK, CASES, SPARSITY, Case, in_memory, laid_out, pruned, weight_gradient
from tests.support.marks import in_turn
from tests.support.oracle import relative_error
from tests.support.saving import saved_tensors


def made(name: str, last: bool, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, **settings):
    case = CASES[name]
    dense = case.layer(device=device, dtype=dtype)
    ours = compressed(dense, "convolution", **{"sparsity": SPARSITY, "block_size": BLOCK, **settings})
    return case, case.input(last, device=device, dtype=dtype), dense, ours


def grads_of(layer: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(layer(x), (x, *layer.parameters()), grad)


DTYPES = torch.bfloat16, torch.float16
LOW = [*itertools.product(("3x3", "depthwise", "1d"), (True,), DTYPES)]


@pytest.mark.parametrize(("name", "last", "dtype"), [*in_turn(CASES, (False, True), (torch.float32,)), *LOW], ids=str)
def test_only_the_weight_gradient_is_approximate(device, name, last, dtype):
    case, x, dense, ours = made(name, last, device, dtype)
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
    expected = weight_gradient(case, hat.double(), dense.weight, grad)
    torchs = relative_error(weight_gradient(case, hat, dense.weight, grad), expected)
    assert relative_error(dw, expected) <= 2 * torchs + 4 * eps


@pytest.mark.parametrize(
    ("sparsity", "bits", "selection", "last"),
    [(0.0, 8, "largest", False), (0.0, 3, "largest", True), (0.5, 4, "swap", True), (0.5, 2, "unbiased", False)],
)
def test_the_weight_gradient_is_that_of_the_stored_input(device, sparsity, bits, selection, last):
    case, x, dense, ours = made("3x3", last, device, sparsity=sparsity, bits=bits, selection=selection)
    grad = torch.randn_like(dense(x))
    rows = in_memory(x.detach(), last).view(x.shape[0], -1, BLOCK)
    hat = as_kept(rows, BLOCK, sparsity, bits, selection)
    channels, *spatial = x.shape[1:]
    hat = hat.view(-1, *spatial, channels).movedim(-1, 1) if last else hat.view(x.shape)
    assert relative_error(grads_of(ours, x, grad)[1], weight_gradient(case, hat.double(), dense.weight, grad)) < 1e-5


def test_what_reads_one_tensor_packs_it_once(device):
    case, x, dense, _ = made("3x3", True, device)
    model = nn.ModuleList([dense, nn.Conv2d(16, 4, 1, stride=2, device=device), nn.Linear(6, 5, device=device)])
    convert(model, rules={"*": Keep(sparsity=SPARSITY, block_size=BLOCK)})
    with saved_tensors() as saved:
        outputs = [layer(x) for layer in model]
    weights = {p.data_ptr() for p in model.parameters()}
    assert len({t.data_ptr() for t in saved if t.data_ptr() not in weights}) == 6  # two packs: one for the convolutions
    hat = pruned(x, True).double()
    strided = Case(case.shape, 4, (1, 1), {"stride": 2})
    for y, layer, how in ((outputs[0], model[0], case), (outputs[1], model[1], strided)):
        (grad,) = torch.autograd.grad(y.sum(), layer.weight)
        assert relative_error(grad, weight_gradient(how, hat, layer.weight, torch.ones_like(y))) < 1e-5
    outputs[2].sum().backward()


def test_tokens_are_pixels_or_lines(device):
    for last in (False, True):
        case, x, dense, ours = made("3x3", last, device, sparsity=0.5, block_size=3, scope="token")
        grad = torch.randn_like(dense(x))
        rows = (x.detach().movedim(1, -1) if last else x.detach()).flatten(0, -2)
        hat = pruned(rows, False, 3, 0.5)  # every row a sample
        hat = hat.view(3, 9, 6, 16).movedim(-1, 1) if last else hat.view(x.shape)
        expected = weight_gradient(case, hat.double(), dense.weight, grad)
        assert relative_error(grads_of(ours, x, grad)[1], expected) < 1e-5


def test_what_torch_keeps_otherwise_is_skipped():
    circular, same = nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"), nn.Conv1d(3, 3, 4, padding="same")
    model = nn.ModuleList([circular, same, nn.ConvTranspose2d(3, 3, 1), nn.Conv1d(8, 8, 3)])
    report = convert(model, rules={"*": Keep(sparsity=0.5)})
    assert [layer.fqn for layer in report.converted] == ["3"]
    assert [layer.fqn for layer in report.skipped] == ["0", "1", "2"]
    assert [type(m) for m in model][:3] == [nn.Conv2d, nn.Conv1d, nn.ConvTranspose2d]
