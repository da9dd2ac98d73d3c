"""The weight gradient is as accurate as torch's own dense product of the same numbers, by either method."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightning_actprune import functional
from lightning_actprune.codec.dispatch import force_backend
from lightning_actprune.operators.weight_grad import force_method, fp32_is_exact, gather_is_faster
from tests.support.compressed import as_kept
from tests.support.marks import in_turn
from tests.support.workload import launches

TYPES = torch.float32, torch.bfloat16, torch.float16
SMALL = [((3, 37, 70), 16, 65), ((2, 131, 96), 32, 48), ((2, 61, 100), 24, 41), ((300, 64), 64, 64)]
LARGE = [
    ((128, 196, 384), 32, 1536),  # 25088 rows
    ((128, 196, 1536), 64, 384),
    ((25088, 384), 16, 392),  # samples of one row
    ((64, 197, 777), 24, 333),
    ((17, 1025, 1030), 128, 259),
    ((3, 4099, 130), 16, 37),
]


@pytest.fixture(autouse=True)
def _torch_at_its_best():
    """Sums in fp32 and products in full: the error of a product that is allowed to be worse proves nothing."""
    matmul, precision = torch.backends.cuda.matmul, torch.get_float32_matmul_precision()
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    torch.set_float32_matmul_precision("highest")
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
    yield
    torch.set_float32_matmul_precision(precision)
    matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before


def errors(actual, exact):
    """Return the largest error over the largest element, where one wrong element shows, and that of the norms."""
    difference = actual.double() - exact
    return float(difference.abs().max() / exact.abs().max()), float(difference.norm() / exact.norm())


def check(device, dtype, method, shape, block_size, outputs, sparsity=0.5, bits=None, selection="largest"):
    x = torch.randn(shape, device=device).to(dtype)
    weight = torch.randn(outputs, shape[-1], device=device).to(dtype).requires_grad_()
    grad_y = torch.randn(*shape[:-1], outputs, device=device).to(dtype)
    how = {"sparsity": sparsity, "block_size": block_size, "bits": bits, "selection": selection}
    with force_method(method), launches() as names:
        (actual,) = torch.autograd.grad(functional.linear(x, weight, **how), weight, grad_y)
    rows = x if x.dim() == 3 else x[:, None]
    hat = as_kept(rows, block_size, sparsity, bits or 0, selection).reshape(-1, x.shape[-1])
    g = grad_y.flatten(0, -2)
    exact = g.double().t() @ hat.double()
    assert actual.dtype == dtype
    for ours, torchs in zip(errors(actual, exact), errors(g.t() @ hat, exact), strict=True):
        assert ours <= 2 * torchs, (ours, torchs)
    return "weight_grad_kernel" in names


@pytest.mark.parametrize(
    ("shape", "block_size", "outputs", "method", "dtype"),
    [(*small, method, dtype) for small, method, dtype in in_turn(SMALL * 2, ("gather", "unpack", "unpack"), TYPES)],
    ids=str,
)
def test_small_and_odd_shapes(device, dtype, method, shape, block_size, outputs):
    gathers = check(device, dtype, method, shape, block_size, outputs)
    if device.type == "cuda":
        assert gathers == (method == "gather")


@pytest.mark.parametrize(
    ("shape", "block_size", "sparsity", "dtype", "bits", "selection"),
    [
        ((3, 37, 70), 16, 0.5, torch.float32, 2, "largest"),
        ((2, 60, 96), 32, 0.0, torch.bfloat16, 3, "largest"),
        ((2, 60, 96), 32, 0.0, torch.bfloat16, 8, "largest"),
        ((33, 64), 64, 0.0, torch.float16, 4, "largest"),
        ((3, 9, 64), 16, 0.5, torch.float32, None, "swap"),
        ((3, 9, 64), 16, 0.5, torch.float32, None, "unbiased"),
    ],
    ids=str,
)
def test_few_bits_and_other_selections(device, shape, block_size, sparsity, dtype, bits, selection):
    check(device, dtype, "unpack", shape, block_size, 48, sparsity, bits, selection)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("large", "method", "dtype"),
    [(large, *rest) for large, *rest in in_turn(LARGE * 2, ("gather", "unpack", "gather"), TYPES)],
)
def test_large_reductions(dtype, method, large):
    assert check(torch.device("cuda"), dtype, method, *large) == (method == "gather")


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


def test_the_method_follows_the_precision_of_products():
    """Launches are kept by it: a switch in between is seen."""
    x, weight = torch.randn(2, 5, 96), torch.randn(16, 96, requires_grad=True)
    before, used = torch.get_float32_matmul_precision(), []
    try:
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            with force_backend("triton"), launches() as names:
                functional.linear(x, weight, sparsity=0.9, block_size=32).sum().backward()
            used.append("weight_grad_kernel" in names)
    finally:
        torch.set_float32_matmul_precision(before)
    rows, values = (10, 16), (4, 32)
    assert used == [gather_is_faster(rows, values, 96, 4, exact) for exact in (True, False, True)]


@pytest.mark.parametrize(("length", "block_size"), [(4096, 2048), (70000, 1)])
def test_block_structures_beyond_the_kernels_take_the_reference(length, block_size):
    x = torch.randn(1, 2, length, requires_grad=True)
    weight = torch.randn(3, length, requires_grad=True)
    functional.linear(x, weight, sparsity=0.5, block_size=block_size).sum().backward()
    assert weight.grad.count_nonzero() > 0
    with force_backend("triton"), pytest.raises(RuntimeError, match="block"):
        functional.linear(x, weight, sparsity=0.5, block_size=block_size)
