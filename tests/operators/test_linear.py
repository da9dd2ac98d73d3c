"""Linear layers and convolutions: which gradient a compressed input gives, for every layout, window and type."""

from __future__ import annotations

import copy
import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import ActivationPrunedLinear
from lightning_actprune.analysis.first_batch import RetentionProbe
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.config import Keep
from lightning_actprune.convert import convert
from tests.support import oracle
from tests.support.compressed import as_kept, compressed, laid_out
from tests.support.marks import in_turn
from tests.support.measured import kept_bytes
from tests.support.saving import saved_tensors

SPARSITY = 0.6
LINEAR = {
    "linear": (partial(nn.Linear, 70, 24), (3, 37, 70), 16, "sample"),
    "linear tokens": (partial(nn.Linear, 70, 24), (3, 11, 70), 16, "token"),
    "linear rows": (partial(nn.Linear, 64, 16), (300, 64), 64, "sample"),
    "linear 4d": (partial(nn.Linear, 40, 1), (2, 3, 5, 40), 7, "sample"),
    "linear values": (partial(nn.Linear, 33, 7), (3, 5, 33), 1, "sample"),
    "linear whole rows": (partial(nn.Linear, 33, 7), (3, 5, 33), 1000, "token"),
    "linear 1d": (partial(nn.Linear, 20, 5), (20,), 8, "sample"),
}
# A contiguous [B, D, T] tensor enters a linear layer over D as [B, T, D], as in ResMLP's token mixing.
LINEAR |= {
    f"turned {block} {scope}": (partial(nn.Linear, 20, 9), (3, 33, 20), block, scope)
    for block, scope in itertools.product((11, 8, 1), ("sample", "token"))
}
CONVOLUTIONS = {
    "3x3": (partial(nn.Conv2d, 16, 8, 3, padding=1), (3, 16, 9, 6), 8, "sample"),
    "strided": (partial(nn.Conv2d, 8, 6, 3, stride=2, padding=(1, 0)), (2, 8, 9, 8), 8, "sample"),
    "patches": (partial(nn.Conv2d, 3, 10, 4, stride=4), (3, 3, 8, 8), 8, "sample"),
    "grouped": (partial(nn.Conv2d, 12, 8, 3, groups=4), (2, 12, 6, 8), 8, "sample"),
    "depthwise": (partial(nn.Conv2d, 16, 16, 5, groups=16, padding=2), (2, 16, 7, 7), 8, "sample"),
    "dilated": (partial(nn.Conv2d, 8, 4, 3, dilation=(2, 1), padding=(2, 0)), (2, 8, 9, 9), 8, "sample"),
    "pointwise": (partial(nn.Conv2d, 24, 6, 1), (3, 24, 5, 4), 8, "sample"),
    "ragged": (partial(nn.Conv2d, 5, 4, 3, padding=1), (3, 5, 7, 3), 8, "sample"),  # no multiple of a block
    "smaller than a block": (partial(nn.Conv2d, 5, 3, 1), (4, 5, 1, 1), 8, "sample"),
    "1d": (partial(nn.Conv1d, 12, 5, 3, padding=1), (3, 12, 20), 8, "sample"),
    "3d": (partial(nn.Conv3d, 8, 6, (2, 3, 3), padding=(0, 1, 1)), (2, 8, 3, 4, 5), 8, "sample"),
    "tokens": (partial(nn.Conv2d, 16, 8, 3, padding=1), (3, 16, 9, 6), 3, "token"),  # are pixels or lines
}
CASES = LINEAR | CONVOLUTIONS
"""Layers, shapes of inputs, block sizes and scopes."""


def leaf(*shape: int, last: bool = False, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
    """Return small integers: sums of squares are exact in every type, so that the kept blocks are the oracle's."""
    return laid_out(oracle.integers(*shape, dtype=dtype, device=device), last).requires_grad_()


def grads_of(layer: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(layer(x), (x, *layer.parameters()), grad)


def weight_gradient(dense: nn.Module, x: Tensor, grad_y: Tensor) -> Tensor:
    """Return the weight gradient of torch's own layer of ``x``."""
    layer = copy.deepcopy(dense).to(x.dtype)
    return torch.autograd.grad(layer(x.detach()), layer.weight, grad_y.to(x.dtype))[0]


def samples_of(name: str, x: Tensor, last: bool) -> tuple[Tensor, bool]:
    """Return the values ``[S, T, L]`` whose blocks compete in each sample, and whether the second dimension is last."""
    _, _, block_size, scope = CASES[name]
    if name in LINEAR:  # rows are those that blocks fill up better
        count = lambda x: math.prod(x.shape[:-1]) * math.ceil(x.shape[-1] / block_size)  # noqa: E731
        last = last and count(x.mT) < count(x)
        return oracle.as_samples((x.mT if last else x).detach(), scope), last
    x = x.detach().movedim(1, -1) if last else x.detach()
    return x.reshape(-1 if scope == "token" else len(x), 1, x.shape[-1] if scope == "token" else x[0].numel()), last


def in_shape_of(x: Tensor, samples: Tensor, last: bool) -> Tensor:
    """Return such values in the shape and the order of memory of ``x``."""
    return samples.reshape(x.movedim(1, -1).shape).movedim(-1, 1) if last else samples.reshape(x.shape)


DTYPES = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("name", "last", "dtype"),
    [
        *((name, "turned" in name, dtype) for name, dtype in in_turn(LINEAR, DTYPES)),
        *in_turn(CONVOLUTIONS, (False, True), DTYPES[:1]),
        ("tokens", False, DTYPES[0]),
        *(("linear", False, dtype) for dtype in DTYPES[1:]),
        *itertools.product(("3x3", "depthwise", "1d"), (True,), DTYPES[1:]),
    ],
    ids=str,
)
def test_only_the_weight_gradient_is_approximate_and_within_twice_torchs_own_error(device, name, last, dtype):
    make, shape, block_size, scope = CASES[name]
    dense, x = make(device=device, dtype=dtype), leaf(*shape, last=last, dtype=dtype, device=device)
    operator = "linear" if name in LINEAR else "convolution"
    ours = compressed(dense, operator, sparsity=SPARSITY, block_size=block_size, topk_over=scope)
    y, right = ours(x), dense(x)
    grad = torch.randn_like(right)
    (dx, dw, db), exact = grads_of(ours, x, grad), grads_of(dense, x, grad)
    assert y.stride() == right.stride()
    assert dx.stride() == exact[0].stride()
    # On a GPU the vendor's library may take another algorithm for the same convolution.
    eps = torch.finfo(dtype).eps
    near = 84 * eps if device.type == "cuda" and name in CONVOLUTIONS else 0
    torch.testing.assert_close((y, dx), (right, exact[0]), rtol=near, atol=near)
    bias = grads_of(copy.deepcopy(dense).double(), x.detach().double().requires_grad_(), grad.double())[2]
    assert oracle.relative_error(db, bias) <= 2 * oracle.relative_error(exact[2], bias) + 4 * eps
    # Torch's own gradient for the pruned input has the same products, and may have another order of summation.
    samples, turned = samples_of(name, x, last)
    block = min(block_size, samples.shape[2])
    hat = laid_out(in_shape_of(x, oracle.pruned(samples, block, SPARSITY), turned), last)
    expected = weight_gradient(dense, hat.double(), grad)
    torchs = oracle.relative_error(weight_gradient(dense, hat, grad), expected)
    assert oracle.relative_error(dw, expected) <= 2 * torchs + 4 * eps
    assert dw.dtype == db.dtype == dtype
    # Kept blocks, and a bit and 1/128 offset for each block.
    blocks, kept = samples.shape[1] * math.ceil(samples.shape[2] / block), oracle.kept_blocks(samples, block, SPARSITY)
    positions = math.ceil(blocks / 32) + math.ceil(blocks / 128)
    assert kept_bytes(ours, x) == len(samples) * (len(kept[0]) * block * dtype.itemsize + 4 * positions)


@pytest.mark.parametrize(
    ("sparsity", "bits", "selection", "last"),
    [(0.0, 8, "largest", False), (0.0, 3, "largest", True), (0.5, 4, "swap", True), (0.5, 2, "unbiased", False)],
)
def test_the_weight_gradient_of_a_convolution_is_that_of_the_stored_input(device, sparsity, bits, selection, last):
    make, shape, block_size, _ = CASES["3x3"]
    dense, x = make(device=device), laid_out(torch.randn(shape, device=device), last).requires_grad_()
    how = {"sparsity": sparsity, "bits": bits, "selection": selection, "block_size": block_size}
    grad = torch.randn_like(dense(x))
    hat = in_shape_of(x, as_kept(samples_of("3x3", x, last)[0], block_size, sparsity, bits, selection), last)
    found = grads_of(compressed(dense, "convolution", **how), x, grad)[1]
    assert oracle.relative_error(found, weight_gradient(dense, hat.double(), grad)) < 1e-5


def test_what_reads_one_tensor_packs_it_once(device):
    x = leaf(3, 16, 9, 6, last=True, device=device)
    model = nn.ModuleList([nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(16, 4, 1, stride=2), nn.Linear(6, 5)]).to(device)
    layers = copy.deepcopy(model)
    convert(model, rules={"*": Keep(bits=None, sparsity=SPARSITY, block_size=8)})
    with saved_tensors() as saved:
        outputs = [layer(x) for layer in model]
    weights = {p.data_ptr() for p in model.parameters()}
    assert len({t.data_ptr() for t in saved if t.data_ptr() not in weights}) == 6  # two packs: one for the convolutions
    hat = in_shape_of(x, oracle.pruned(samples_of("3x3", x, True)[0], 8, SPARSITY), True).double()
    for y, layer, dense in zip(outputs[:2], model, layers, strict=False):
        (grad,) = torch.autograd.grad(y.sum(), layer.weight)
        assert oracle.relative_error(grad, weight_gradient(dense, hat, torch.ones_like(y))) < 1e-5
    outputs[2].sum().backward()


def test_what_torch_keeps_otherwise_is_skipped():
    circular, same = nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"), nn.Conv1d(3, 3, 4, padding="same")
    model = nn.ModuleList([circular, same, nn.ConvTranspose2d(3, 3, 1), nn.Conv1d(8, 8, 3)])
    report = convert(model, rules={"*": Keep(bits=None, sparsity=0.5)})
    assert [layer.fqn for layer in report.converted] == ["3"]
    assert [layer.fqn for layer in report.skipped] == ["0", "1", "2"]
    assert [type(m) for m in model][:3] == [nn.Conv2d, nn.Conv1d, nn.ConvTranspose2d]


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


# Inputs of few rows: eight bits and all blocks, in what is stored, in what is counted and in gradients.

FINE = {"bits": 2, "sparsity": 0.5, "min_rows_for_low_bits": 32}


def stored(model: nn.Module, *inputs: Tensor) -> list[tuple[int, int, int | None]]:
    with SavedTensorMeter(model, inputs) as meter:
        model(*inputs)
    return [(row.stored_bytes, row.accounted_bytes, row.bits) for row in meter.report().rows]


def eight_bits(rows: int, features: int) -> int:
    return rows * features // 32 * 34


def test_few_rows_are_kept_in_eight_bits_and_all_of_them():
    dense, few, many = nn.Linear(64, 64), torch.randn(31, 64), torch.randn(32, 64)
    model, other = (compressed(nn.Sequential(dense), **how) for how in (FINE, {"bits": 8}))
    assert stored(model, few) == [(eight_bits(31, 64), eight_bits(31, 64), 8)]
    ((bytes_of_many, accounted, bits),) = stored(model, many)
    assert (bytes_of_many, bits) == (accounted, 2)
    assert bytes_of_many < eight_bits(32, 64) / 3
    grads = [torch.autograd.grad(m(few).square().sum(), m[0].weight)[0] for m in (model, other)]
    assert torch.equal(*grads)


def test_attention_counts_the_rows_of_its_projections():
    model, x = compressed(nn.MultiheadAttention(64, 4), **FINE), torch.randn(5, 4, 64)
    rows = stored(model, x, x, x)
    assert {bits for _, _, bits in rows} == {8}
    assert all(kept in (0, eight_bits(20, 64)) for kept, _, _ in rows)


def test_what_is_kept_anyway_is_found_for_few_rows_too():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    report = convert(model, rules={"type:linear": Keep(**FINE), "*": None})
    x = torch.randn(8, 64, requires_grad=True) * 1
    with RetentionProbe(model, None) as probe:
        model(x).sum().backward()
    # The first one's is held here, the other's by the ReLU.
    assert [layer.fqn for layer in probe.apply(report)] == ["0", "2"]
