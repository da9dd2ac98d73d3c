"""Gated products in few bits, and MLPs that have them: errors, layouts, types, what is kept and what is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_actprune.functional import gated
from lightning_actprune.operators.activation import ACTIVATIONS, StoredDerivative
from lightning_actprune.operators.gated import gated_halves
from tests.support.activations import inputs, stored_of
from tests.support.cases import CASES
from tests.support.compressed import compressed
from tests.support.gates import largest_error, oracle
from tests.support.oracle import relative_error
from tests.support.saving import saved_tensors

LENGTH = 100


def saved_bytes(call: Callable[[], Tensor]) -> int:
    with saved_tensors() as saved:
        call()
    return sum(tensor.nbytes for tensor in saved)


def pair(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    a = inputs(math.prod(shape), dtype).view(shape).to(device)
    return a.requires_grad_(), torch.randn(shape).to(dtype).to(device).requires_grad_()


def gradients(z: Tensor, *leaves: Tensor, grad: Tensor | None = None) -> tuple[Tensor, ...]:
    return torch.autograd.grad(z, leaves, torch.ones_like(z) if grad is None else grad)


def check(a: Tensor, u: Tensor, name: str, bits: int, block_size: int = 32) -> None:
    z = gated(a, u, name, *stored_of(name).parameters, bits=bits, block_size=block_size)
    right, *factors = oracle(name, a, u)
    eps = torch.finfo(z.dtype).eps
    # A unit in the last place, and in fp32 the few of the function; 1 + erf and log cancel.
    maths = 2**-20 * (a.abs() + 1).detach().double().cpu() * u.abs().detach().double().cpu()
    assert not ((z.double().cpu() - right).abs() > 2 * eps * right.abs() + maths).any()
    for found, factor in zip(gradients(z, a, u), factors, strict=True):
        bound = largest_error(factor, block_size, bits)
        least = torch.finfo(found.dtype).smallest_normal
        rounding = torch.finfo(found.dtype).eps * (factor.abs() + bound) + least + maths.abs() * 2**-2
        assert not ((found.double().cpu() - factor).abs() > bound + rounding).any()


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_every_function(device, name):
    check(*pair(3, 5, LENGTH, device=device), name, 8)


@pytest.mark.parametrize(
    ("length", "dtype", "bits", "block_size"),
    [
        (70, torch.bfloat16, 4, 32),
        (70, torch.bfloat16, 2, 32),
        (1, torch.float32, 4, 32),
        (33, torch.float16, 4, 32),
        (64, torch.float32, 2, 8),
        (100, torch.float32, 3, 24),
        (130, torch.bfloat16, 8, 64),
    ],
    ids=str,
)
def test_formats_types_and_odd_rows(device, length, dtype, bits, block_size):
    rows, (a, u) = 5, pair(5, length, dtype=dtype, device=device)
    check(a, u, "silu" if dtype == torch.bfloat16 else "gelu", bits, block_size)
    block = min(block_size, length)
    codes = sum(math.ceil(block * plane / 8) for plane in ((2, 1) if bits == 3 else (bits,)))
    found = saved_bytes(lambda: gated(a, u, "silu", bits=bits, block_size=block_size))
    assert found == 2 * rows * math.ceil(length / block) * (codes + codes % 2 + 2)


def test_halves_are_as_two_tensors(device):
    x, grad = torch.randn(4, 6, 2 * LENGTH, device=device).requires_grad_(), torch.randn(4, 6, LENGTH, device=device)
    for gate_first in (True, False):
        a, u = x.chunk(2, -1)[:: 1 if gate_first else -1]
        expected = gated(a, u, "silu")
        z = gated_halves(x, StoredDerivative("silu", (), 4), 32, -1, gate_first)
        assert torch.equal(z, expected)
        assert torch.equal(*(gradients(y, x, grad=grad)[0] for y in (z, expected)))
    assert torch.equal(gated(x, None, "silu"), gated_halves(x, StoredDerivative("silu", (), 4), 32, -1, True))


def layouts() -> dict[str, Tensor]:
    base = torch.randn(2, 3, 6, 4, 10)
    return {
        "contiguous": base,
        "half": base.reshape(2, 3, 24, 10)[..., :5],
        "channels-last": base.transpose(2, 4),
        "transposed": base.transpose(1, 3),
        "gaps": base[..., ::2],
        "expanded": base[:, :1].expand(2, 3, 6, 4, 10),
        "scalar": base[:, 0, 0, 0, 0],
        "empty": base[:, :0],
        "empty-rows": base[..., :0],
    }


@pytest.mark.parametrize("layout", list(layouts()))
def test_layouts(device, layout):
    a, u = (x.detach().requires_grad_() for x in layouts()[layout].to(device))
    z = gated(a, u, "silu", bits=8, block_size=8)
    expected = F.silu(a) * u
    assert z.stride() == expected.stride()
    torch.testing.assert_close(z, expected, rtol=1e-5, atol=1e-6)
    for grad in (torch.randn_like(z), torch.randn(()).to(device).expand(z.shape)):
        z = gated(a, u, "silu", bits=8, block_size=8)
        for found, right in zip(gradients(z, a, u, grad=grad), gradients(F.silu(a) * u, a, u, grad=grad), strict=True):
            assert found.shape == right.shape
            assert found.isfinite().all()
            # Half a step of 1/255 of the range; q has factors up to 1.1 of values below 5.
            assert not (found - right).abs().gt(0.03 * grad.abs().amax() if grad.numel() else 0.0).any()


def test_what_needs_no_gradient_is_not_kept(device):
    leaves = pair(6, 64, device=device)
    both = gradients(gated(*leaves, "gelu"), *leaves)
    for wanted in (0, 1):
        leaves[wanted].requires_grad_(True), leaves[1 - wanted].requires_grad_(False)
        assert saved_bytes(lambda: gated(*leaves, "gelu")) == 6 * 2 * 18
        (found,) = gradients(gated(*leaves, "gelu"), leaves[wanted])
        # Of p alone blocks have other places, and dithers: both are off by at most half a step.
        bound = largest_error(both[wanted].double().cpu(), 32, 4)
        assert (found - both[wanted]).cpu().abs().le(2.2 * bound + 1e-6).all()
        assert wanted or torch.equal(found, both[0])


def test_two_types_are_promoted(device):
    half, bf16, full = torch.float16, torch.bfloat16, torch.float32
    for types in ((bf16, full), (full, half), (half, bf16)):
        a, u = (x.detach().to(t).requires_grad_() for x, t in zip(pair(3, 64, device=device), types, strict=True))
        z = gated(a, u, "silu")
        assert z.dtype == (F.silu(a) * u).dtype
        assert tuple(grad.dtype for grad in gradients(z, a, u)) == types
        check(a, u, "silu", 4)


def test_what_is_not_finite_makes_its_block_nan(device):
    cases = itertools.product((math.nan, math.inf, -math.inf), ((0, "silu"), (1, "silu"), (0, "sigmoid")))
    for value, (place, name) in cases:
        leaves = pair(2, 70, device=device)
        with torch.no_grad():
            leaves[place][1, 33] = value
        z = gated(*leaves, name)
        right, *factors = oracle(name, *leaves)
        assert torch.equal(z.cpu().isfinite(), right.isfinite())
        for found, factor in zip(gradients(z, *leaves, grad=torch.zeros_like(z)), factors, strict=True):
            expected = torch.zeros(2, 70, dtype=torch.bool)
            expected[1, 32:64] = not factor.isfinite().all()
            assert torch.equal(found.isnan().cpu(), expected)


def test_what_is_refused():
    a, u = pair(2, 64)
    for given in ((a.double(), u), (a, u.double()), (a, u[:, :3]), (a[:, :63], None)):
        with pytest.raises((TypeError, ValueError), match=r"float64|\(2, 3\)|\(2, 63\)"):
            gated(*given, "relu")


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_one_compiled_graph_of_two_tensors():
    torch._dynamo.reset()
    net = lambda a, u: gated(a * 2, u, "silu") * 3  # noqa: E731
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=False)
    leaves = [x.detach().t().requires_grad_() for x in pair(12, 40)]
    z, expected = (call(*leaves) for call in (compiled, net))
    assert torch.equal(z, expected)
    grad = torch.randn(z.shape)
    assert all(map(torch.equal, gradients(z, *leaves, grad=grad), gradients(expected, *leaves, grad=grad)))


@pytest.mark.foreign
def test_parts_of_an_mlp_may_be_frozen_hooked_and_replaced():
    dense, x, seen = CASES["llama-mlp"].dense().layer, torch.randn(4, 10, 72), []
    for frozen in ("gate_proj", "up_proj"):
        dense.requires_grad_(True)
        getattr(dense, frozen).requires_grad_(False)
        module = compressed(dense, "activation", bits=8)
        grads = (gradients(m(x), *[p for p in m.parameters() if p.requires_grad]) for m in (module, dense))
        for actual, expected in zip(*grads, strict=True):
            assert relative_error(actual, expected) < 0.015
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(module, name).register_forward_hook(lambda *_, name=name: seen.append(name))
    for function in (nn.Softsign(), nn.ReLU()):
        module.act_fn = dense.act_fn = function
        torch.testing.assert_close(module(x), dense(x))
    assert seen == ["gate_proj", "up_proj", "down_proj"] * 2
    assert "CompressedCompressed" not in repr(module)


def test_the_factors_have_errors_of_their_own(device):
    """Where both are the same, their dithers are not: blocks of both are numbered as one tensor's."""
    a = (1 + torch.rand(64, 64)).to(device).requires_grad_()
    u = a.detach().clone().requires_grad_()
    q, p = gradients(gated(a, u, "relu"), a, u)
    first, second = (q - a).detach(), (p - a).detach()
    assert abs((first * second).mean() / first.square().mean()) < 0.1
