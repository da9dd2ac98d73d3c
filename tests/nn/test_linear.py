"""``ActivationPrunedLinear`` against ``nn.Linear`` and against a mask computed here in plain loops."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from lightning_actprune import ActivationPrunedLinear
from lightning_actprune.ops.geometry import BlockGeometry

FEATURES, OUT = 33, 7


def pair(dtype=torch.float32, bias=True, **settings) -> tuple[nn.Linear, ActivationPrunedLinear]:
    """A dense and a pruned layer with equal parameters."""
    dense = nn.Linear(FEATURES, OUT, bias=bias, dtype=dtype)
    pruned = ActivationPrunedLinear(FEATURES, OUT, bias=bias, dtype=dtype, **{"sparsity": 0.5, **settings})
    pruned.load_state_dict(dense.state_dict())
    return dense, pruned


def masked(x: Tensor, block: int, sparsity: float, scope: str) -> Tensor:
    """Return ``x`` with the smallest blocks of each sample set to zero, one block at a time."""
    out = x.detach().clone(memory_format=torch.contiguous_format)
    per_sample = scope == "sample" and x.dim() > 2
    for sample in out.flatten(1, -2) if per_sample else out.view(-1, 1, x.shape[-1]):
        places = [(t, f) for t in range(sample.shape[0]) for f in range(0, x.shape[-1], block)]
        norms = [sample[t, f : f + block].norm().item() for t, f in places]
        for i in sorted(range(len(places)), key=norms.__getitem__)[: math.floor(len(places) * sparsity)]:
            t, f = places[i]
            sample[t, f : f + block] = 0
    return out


@contextlib.contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """Collect what autograd saves for backward inside."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        yield saved


def kept_bytes(saved: list[Tensor], layer: nn.Linear) -> int:
    """Bytes of the storages in ``saved`` without the parameters of ``layer``."""
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(size for pointer, size in storages.items() if pointer not in own)


CASES = [
    pytest.param((33,), 8, 0.5, "sample", id="1d"),
    pytest.param((7, 33), 8, 0.6, "sample", id="2d"),
    pytest.param((3, 5, 33), 16, 0.6, "sample", id="3d"),
    pytest.param((3, 5, 33), 8, 0.5, "token", id="3d_token"),
    pytest.param((2, 3, 5, 33), 11, 0.75, "sample", id="4d_block_divides"),
    pytest.param((2, 3, 5, 33), 4, 0.75, "token", id="4d_token"),
    pytest.param((3, 5, 33), 1, 0.9, "sample", id="single_values"),
    pytest.param((3, 5, 33), 1000, 0.5, "sample", id="block_beyond_row"),
    pytest.param((3, 5, 33), 8, 0.999, "sample", id="one_block_left"),
    pytest.param((0, 5, 33), 8, 0.5, "sample", id="no_samples"),
    pytest.param((3, 0, 33), 8, 0.5, "sample", id="no_rows"),
]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize(("shape", "block", "sparsity", "scope"), CASES)
def test_only_the_weight_gradient_is_pruned(shape, block, sparsity, scope, bias):
    dense, pruned = pair(bias=bias, sparsity=sparsity, block_size=block, scope=scope)
    x, grad = torch.randn(shape), torch.randn(*shape[:-1], OUT)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [layer(i) for layer, i in zip((dense, pruned), inputs, strict=True)]
    assert torch.equal(*outputs)
    for y in outputs:
        y.backward(grad)
    assert torch.equal(inputs[1].grad, inputs[0].grad)
    assert not bias or torch.equal(pruned.bias.grad, dense.bias.grad)
    x_hat = masked(x, block, sparsity, scope)
    expected = grad.double().reshape(-1, OUT).t() @ x_hat.double().reshape(-1, FEATURES)
    torch.testing.assert_close(pruned.weight.grad.double(), expected, rtol=1e-5, atol=1e-5)
    assert x.numel() == 0 or not torch.equal(x_hat, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_gradients_have_the_parameter_dtype(dtype):
    dense, pruned = pair(dtype, block_size=8)
    x = torch.randn(3, 5, FEATURES, dtype=dtype, requires_grad=True)
    y = pruned(x)
    assert torch.equal(y, dense(x))
    y.square().sum().backward()
    assert {t.grad.dtype for t in (x, *pruned.parameters())} == {dtype}
    x_hat = masked(x, 8, 0.5, "sample").double().flatten(0, 1)
    expected = (2 * y.detach()).double().flatten(0, 1).t() @ x_hat
    tolerance = {torch.float64: 1e-12, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(pruned.weight.grad.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("block", "along_memory"), [(13, True), (4, False)])
def test_transposed_input_is_pruned_where_blocks_fill_up_better(block, along_memory):
    # [B, T, D] seen from a contiguous [B, D, T], as token mixing has it: 33 rows of 13 values against 13 of 33.
    x, grad = torch.randn(3, FEATURES, 13).transpose(1, 2), torch.randn(3, 13, OUT)
    dense, pruned = pair(sparsity=0.6, block_size=block)
    y = pruned(x)
    assert torch.equal(y, dense(x))
    y.backward(grad)
    x_hat = masked(x.transpose(1, 2) if along_memory else x, block, 0.6, "sample")
    x_hat = x_hat.transpose(1, 2) if along_memory else x_hat
    expected = grad.flatten(0, 1).t() @ x_hat.flatten(0, 1)
    torch.testing.assert_close(pruned.weight.grad, expected)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, ::2],
        lambda x: x.transpose(0, 1),
        lambda x: x[:1].expand(4, -1, -1),
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
    ],
    ids=["skipped_rows", "batch_second", "expanded", "strided_features"],
)
def test_view_of_the_input_gives_what_its_copy_gives(view):
    _, pruned = pair(sparsity=0.6, block_size=8)
    x = view(torch.randn(5, 9, FEATURES))
    grad = torch.randn(*x.shape[:-1], OUT)
    found = torch.autograd.grad(pruned(x), pruned.weight, grad)[0]
    copied = x.clone(memory_format=torch.contiguous_format)
    torch.testing.assert_close(found, torch.autograd.grad(pruned(copied), pruned.weight, grad)[0])


def test_gradients_accumulate_over_backward_passes_and_calls():
    _, pruned = pair(block_size=8)
    x = [torch.randn(2, 5, FEATURES) for _ in range(2)]
    single = [torch.autograd.grad(pruned(i).sum(), pruned.weight)[0] for i in x]
    (pruned(x[0]) + pruned(x[1])).sum().backward()
    torch.testing.assert_close(pruned.weight.grad, single[0] + single[1])


# What is saved.


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("shape", "scope", "samples", "rows"),
    [((3, 50, 33), "sample", 3, 50), ((3, 50, 33), "token", 150, 1), ((150, 33), "sample", 150, 1)],
    ids=["sample", "token", "2d"],
)
def test_saved_bytes_are_those_of_the_geometry(shape, scope, samples, rows, dtype, autocast):
    _, pruned = pair(dtype, sparsity=0.6, block_size=8, scope=scope)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    with saved_tensors() as saved, torch.autocast("cpu", torch.bfloat16, enabled=autocast and dtype != torch.float64):
        pruned(x)
    itemsize = 2 if autocast and dtype == torch.float32 else dtype.itemsize
    geometry = BlockGeometry.of(samples, rows, FEATURES, 8, 0.6)
    assert kept_bytes(saved, pruned) == geometry.stored_bytes(itemsize) < x.numel() * itemsize


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_saved_without_gradients(mode):
    dense, pruned = pair()
    x = torch.randn(3, 5, FEATURES)
    with saved_tensors() as saved, mode():
        y = pruned.eval()(x)
        assert torch.equal(y, dense(x))
    assert saved == []
    assert not y.requires_grad


def test_frozen_weight_saves_no_activation():
    dense, pruned = pair()
    for layer in (dense, pruned):
        layer.weight.requires_grad_(False)
    inputs = [torch.randn(3, 5, FEATURES).requires_grad_()]
    inputs.append(inputs[0].detach().clone().requires_grad_())
    with saved_tensors() as saved:
        y = pruned(inputs[0])
    assert kept_bytes(saved, pruned) == 0
    y.sum().backward()
    dense(inputs[1]).sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert torch.equal(pruned.bias.grad, dense.bias.grad)
    assert pruned.weight.grad is None


def test_sparsity_is_read_at_each_forward_and_zero_is_dense():
    dense, pruned = pair(block_size=8)
    x = torch.randn(3, 5, FEATURES)
    expected = torch.autograd.grad(dense(x).sum(), dense.weight)[0]
    assert not torch.equal(torch.autograd.grad(pruned(x).sum(), pruned.weight)[0], expected)
    pruned.sparsity = 0.0
    with saved_tensors() as saved:
        y = pruned(x)
    assert kept_bytes(saved, pruned) == x.nbytes
    assert torch.equal(torch.autograd.grad(y.sum(), pruned.weight)[0], expected)


def test_autocast_matches_linear():
    dense, pruned = pair(block_size=8)
    inputs = [torch.randn(3, 5, FEATURES).requires_grad_()]
    inputs.append(inputs[0].detach().clone().requires_grad_())
    with torch.autocast("cpu", torch.bfloat16):
        outputs = [layer(x) for layer, x in zip((dense, pruned), inputs, strict=True)]
    assert outputs[1].dtype == torch.bfloat16
    assert torch.equal(*outputs)
    grad = torch.randn(3, 5, OUT).bfloat16()
    for y in outputs:
        y.backward(grad)
    assert {t.grad.dtype for t in (inputs[1], *pruned.parameters())} == {torch.float32}
    assert torch.equal(inputs[1].grad, inputs[0].grad)
    torch.testing.assert_close(pruned.bias.grad, dense.bias.grad, rtol=2e-2, atol=2e-2)
    x_hat = masked(inputs[1].bfloat16(), 8, 0.5, "sample")
    expected = grad.double().flatten(0, 1).t() @ x_hat.double().flatten(0, 1)
    torch.testing.assert_close(pruned.weight.grad.double(), expected, rtol=2e-2, atol=2e-2)


# Errors.


WRONG = [
    *[
        ({"sparsity": s}, ValueError, rf"`sparsity` must be in \[0, 1\), got {s}\. HINT")
        for s in (-0.1, 1.0, 1.5, math.nan)
    ],
    *[
        ({"sparsity": s}, TypeError, rf"`sparsity` must be a number in \[0, 1\), got {s!r} of type .*HINT")
        for s in ("0.5", True, None)
    ],
    *[({"block_size": b}, ValueError, rf"`block_size` must be a positive int, got {b}\. HINT") for b in (0, -1)],
    *[
        ({"block_size": b}, TypeError, rf"`block_size` must be a positive int, got {b!r} of type .*HINT")
        for b in (2.5, "32", True)
    ],
    *[({"scope": s}, ValueError, rf'`scope` must be "sample" or "token", got {s!r}\. HINT') for s in ("row", 1)],
]


@pytest.mark.parametrize(
    ("settings", "error", "message"), WRONG, ids=[f"{k}={v!r}" for settings, *_ in WRONG for k, v in settings.items()]
)
def test_wrong_setting_is_named_with_its_value(settings, error, message):
    with pytest.raises(error, match=message):
        ActivationPrunedLinear(FEATURES, OUT, **{"sparsity": 0.5, **settings})


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.ones(2, FEATURES, dtype=torch.int64), TypeError, "must be a floating-point tensor .* got torch.int64"),
        (torch.ones(2, FEATURES, dtype=torch.bool), TypeError, "must be a floating-point tensor .* got torch.bool"),
        (torch.ones(2, FEATURES, dtype=torch.complex64), TypeError, "floating-point tensor .* got torch.complex64"),
        (torch.eye(FEATURES).to_sparse(), ValueError, r"must be a dense tensor, got layout torch\.sparse_coo\. HINT"),
        (torch.tensor(1.0), ValueError, "must have at least one dimension.*HINT"),
        (torch.ones(2, FEATURES + 1), RuntimeError, "shapes cannot be multiplied"),
    ],
    ids=["int", "bool", "complex", "sparse", "scalar", "features"],
)
def test_input_that_cannot_be_pruned_is_refused(x, error, message):
    with pytest.raises(error, match=message):
        pair()[1](x)


def test_distributed_tensor_is_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = distribute_tensor(torch.ones(2, FEATURES), init_device_mesh("cpu", (1,)), [Replicate()])
        assert isinstance(x, DTensor)
        with pytest.raises(TypeError, match=r"cannot take DTensors.*HINT: exclude"):
            pair()[1](x)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["functional", "nn.linear", "conversion", "recomputed"])
def test_docstring_examples_run(name):
    results = doctest.testmod(importlib.import_module(f"lightning_actprune.{name}"))
    assert results.attempted > 0
    assert results.failed == 0


def test_the_output_of_a_turned_input_may_be_written_to():
    layer = ActivationPrunedLinear(128, 64, sparsity=0.5)
    x = torch.randn(4, 128, 64).transpose(1, 2).requires_grad_()
    y = layer(x)
    expected = y.detach().relu()
    assert torch.equal(y.relu_(), expected)
    y.sum().backward()
    exact = (expected > 0).float() @ layer.weight.detach()
    torch.testing.assert_close(x.grad, exact)
