"""The registered operators: schema, shape functions, dispatch, and behaviour under torch.compile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightning_actprune import functional
from lightning_actprune.ops import dispatch
from lightning_actprune.ops.cost import fp32_is_exact, gather_is_faster
from lightning_actprune.ops.dispatch import force_backend, kernel_refusals
from lightning_actprune.ops.weight_grad import force_method
from tests import oracle


def arguments(device):
    x = torch.randn(3, 20, 40, device=device)
    values, bitmap, offsets = torch.ops.actprune.pack(x, 16, 30)
    return x, values, bitmap, offsets


def test_opcheck(device):
    x, values, bitmap, offsets = arguments(device)
    grad_y = torch.randn(60, 8, device=device)
    ops = torch.ops.actprune
    torch.library.opcheck(ops.pack.default, (x, 16, 30))
    torch.library.opcheck(ops.unpack.default, (values, bitmap, offsets, 60, 40, 16, "same", values.dtype))
    torch.library.opcheck(
        ops.weight_grad.default, (grad_y, values, bitmap, offsets, 3, 20, 40, False, torch.float32, 16)
    )
    many = torch.randn(120, 8, device=device)
    torch.library.opcheck(ops.weight_grad.default, (many, values, bitmap, offsets, 3, 20, 40, True, torch.float32, 16))
    few, bitmap, offsets = ops.pack(x, 16, 30, "int4")
    torch.library.opcheck(ops.pack.default, (x, 16, 30, "int4"))
    torch.library.opcheck(ops.unpack.default, (few, bitmap, offsets, 60, 40, 16, "int4", x.dtype))
    rest = 3, 20, 40, False, torch.float32, 16, "int4"
    torch.library.opcheck(ops.weight_grad.default, (grad_y, few, bitmap, offsets, *rest))
    torch.library.opcheck(ops.pack.default, (x, 16, 30, "same", "swap"))
    torch.library.opcheck(ops.pack.default, (x, 16, 30, "int4", "unbiased"))
    assert values.shape == (90, 16)


@pytest.mark.parametrize("value_format", ["same", "int3", "fp8"])
def test_fake_tensors_have_the_shapes_of_real_ones(device, value_format):
    x, *_ = arguments(device)
    real = torch.ops.actprune.pack(x, 16, 30, value_format)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = torch.ops.actprune.pack(mode.from_tensor(x), 16, 30, value_format)
    assert [(f.shape, f.dtype) for f in fake] == [(r.shape, r.dtype) for r in real]


@pytest.mark.parametrize(
    ("features", "transposed"), [(96, False), (96, True), (99, True)], ids=["plain", "features", "tokens"]
)
def test_compiled_function_equals_eager_and_saves_the_packed_input(features, transposed):
    base = torch.randn(*((4, features, 64) if transposed else (4, 64, features)))
    x = (base.transpose(1, 2) if transposed else base).requires_grad_()
    weight, bias = torch.randn(32, features, requires_grad=True), torch.randn(32, requires_grad=True)

    def loss(x, weight, bias):
        return functional.linear(x, weight, bias, sparsity=0.75, block_size=16).square().sum()

    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        compiled = torch.compile(loss, fullgraph=True)(x, weight, bias)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    assert base.untyped_storage().data_ptr() not in storages
    packed_bytes = functional.pack(x, sparsity=0.75, block_size=16).nbytes
    other = weight.nbytes + bias.nbytes + 4 * 64 * 32 * 4  # the layer's output is needed for the square
    assert sum(storages.values()) <= packed_bytes + other
    grads = torch.autograd.grad(compiled, (x, weight, bias))
    for a, b in zip(grads, torch.autograd.grad(loss(x, weight, bias), (x, weight, bias)), strict=True):
        assert oracle.relative_error(a, b) < 1e-6  # the compiler sums in another order


def test_cpu_tensors_take_the_reference_unless_forced():
    x = torch.randn(2, 3, 4)
    assert dispatch.choose_backend(x.shape, x.dtype, x.device, 4, 1) == "reference"
    with force_backend("reference"):
        assert dispatch.choose_backend(x.shape, x.dtype, x.device, 4, 1) == "reference"


def test_refusals_are_listed_and_forcing_an_impossible_backend_names_them(monkeypatch):
    monkeypatch.setattr(dispatch, "_interpreting", lambda: False)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    assert len(kernel_refusals(x.dtype, x.device, 2, 2)) == 2
    with force_backend("triton"), pytest.raises(RuntimeError, match=r"float64 is not float32.*cpu is not cuda"):
        functional.pack(x, sparsity=0.5, block_size=2)


def test_force_backend_restores_on_error_and_checks_its_argument():
    with pytest.raises(KeyError), force_backend("reference"):
        raise KeyError
    assert dispatch._forced is None
    with pytest.raises(ValueError, match="`backend` must be"), force_backend("cuda"):
        pass


@pytest.mark.gpu
def test_gpu_step_waits_for_nothing():
    x = torch.randn(8, 196, 384, device="cuda", requires_grad=True)
    weight = torch.randn(256, 384, device="cuda", requires_grad=True)
    functional.linear(x, weight, sparsity=0.6, block_size=32).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        functional.linear(x, weight, sparsity=0.6, block_size=32).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(weight.grad).all()


@pytest.mark.parametrize(
    ("length", "block_size", "reason"), [(4096, 2048, "block_size 2048"), (70000, 1, "70000 blocks")]
)
def test_block_structures_beyond_the_kernels_take_the_reference(monkeypatch, length, block_size, reason):
    x = torch.randn(1, 2, length, requires_grad=True)
    weight = torch.randn(3, length, requires_grad=True)
    functional.linear(x, weight, sparsity=0.5, block_size=block_size).sum().backward()
    assert weight.grad.count_nonzero() > 0
    with force_backend("triton"), pytest.raises(RuntimeError, match=reason):
        functional.pack(x.detach(), sparsity=0.5, block_size=block_size)


def test_large_blocks_are_unpacked_not_gathered():
    x, weight = torch.randn(2, 5, 600), torch.randn(16, 600, requires_grad=True)
    with force_backend("triton"), force_method("gather"):
        functional.linear(x, weight, sparsity=0.5, block_size=300).sum().backward()
        hat = functional.pack(x, sparsity=0.5, block_size=300).unpack().flatten(0, 1)
    assert oracle.relative_error(weight.grad, hat.double().sum(0).expand(16, 600)) < 1e-6


def test_precision_switch_of_either_kind_is_understood(monkeypatch):
    for exact in (True, False):
        assert gather_is_faster((12544, 1536), (5018 * 12, 32), 384, 4, exact) is exact
    for legacy, expected in (("highest", True), ("high", False)):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda legacy=legacy: legacy)
        assert fp32_is_exact() is expected

    def refuse():
        raise RuntimeError("ask the backend")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    for modern, expected in (("ieee", True), ("tf32", False)):
        monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=modern))
        assert fp32_is_exact() is expected
