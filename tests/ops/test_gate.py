"""Gated products in few bits: errors, layouts, dtypes, compile, what is saved, what is refused."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_actprune import functional
from lightning_actprune.ops.activations import ACTIVATIONS, Kept
from lightning_actprune.ops.gate import GATE_FIRST, GATE_LAST, SEPARATE
from lightning_actprune.ops.gated import gated_halves
from tests.activations import FORMATS, ORACLES, inputs, kept_of
from tests.gates import largest_error, oracle
from tests.ops.test_few_bit_activation import saved_bytes

each_format = pytest.mark.parametrize("value_format", FORMATS)
LENGTH = 100


def pair(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return ``a``, of all sizes, and ``u``, leaves."""
    a = inputs(math.prod(shape), dtype).view(shape).to(device)
    return a.requires_grad_(), torch.randn(shape).to(dtype).to(device).requires_grad_()


def gradients(z: Tensor, *leaves: Tensor, grad: Tensor | None = None) -> tuple[Tensor, ...]:
    return torch.autograd.grad(z, leaves, torch.ones_like(z) if grad is None else grad)


def check(a: Tensor, u: Tensor, name: str, value_format: str, block_size: int = 32) -> None:
    """Compare product and factors with fp64."""
    z = functional.gated(a, u, name, *kept_of(name).parameters, value_format=value_format, block_size=block_size)
    right, *factors = oracle(name, a, u)
    eps = torch.finfo(z.dtype).eps
    # A unit in the last place, and in fp32 the few of the function; 1 + erf and log cancel.
    maths = 2**-20 * (a.abs() + 1).detach().double().cpu() * u.abs().detach().double().cpu()
    assert not ((z.double().cpu() - right).abs() > 2 * eps * right.abs() + maths).any()
    for found, factor in zip(gradients(z, a, u), factors, strict=True):
        bound = largest_error(factor, block_size, int(value_format[3:]))
        least = torch.finfo(found.dtype).smallest_normal
        rounding = torch.finfo(found.dtype).eps * (factor.abs() + bound) + least + maths.abs() * 2**-2
        assert not ((found.double().cpu() - factor).abs() > bound + rounding).any()


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_every_function(device, name):
    check(*pair(3, 5, LENGTH, device=device), name, "int8")


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_formats_and_types(device, value_format, dtype):
    check(*pair(4, 70, dtype=dtype, device=device), "silu", value_format)


@pytest.mark.parametrize(("length", "block_size"), [(1, 32), (7, 32), (33, 32), (64, 8), (100, 24), (130, 64)])
def test_odd_rows_and_blocks(device, length, block_size):
    check(*pair(5, length, device=device), "gelu", "int4", block_size)


@each_format
def test_saved_are_two_blocks_for_one_of_values(device, value_format):
    a, u = pair(6, LENGTH, device=device)
    bits = int(value_format[3:])
    codes = sum(math.ceil(32 * plane / 8) for plane in ((2, 1) if bits == 3 else (bits,)))
    found = saved_bytes(lambda: functional.gated(a, u, "silu", value_format=value_format))
    assert found == 2 * 6 * math.ceil(LENGTH / 32) * (codes + codes % 2 + 2)


@pytest.mark.parametrize("name", ["silu", "relu"])
def test_errors_cancel_over_rows(device, name):
    """Equal rows have other dithers: what sums over rows see is unbiased."""
    rows = 512
    row = torch.randn(2, 32)
    a, u = (x.expand(rows, 32).to(device).requires_grad_() for x in row)
    z = functional.gated(a, u, name, value_format="int3")
    _, *factors = oracle(name, row[0], row[1])
    for found, factor in zip(gradients(z, a, u), factors, strict=True):
        error = found.double().cpu().mean(0) - factor
        # Five deviations of the mean of errors that are uniform within their bound.
        assert (error.abs() <= 5 * largest_error(factor, 32, 3) / math.sqrt(3 * rows)).all()


def test_the_factors_have_errors_of_their_own(device):
    """Where q and p are the same, their dithers are not: blocks of both are numbered as one tensor's."""
    a, u = torch.ones(64, 64, device=device).requires_grad_(), torch.ones(64, 64, device=device).requires_grad_()
    with torch.no_grad():
        a += torch.rand(64, 64).to(device)
        u.copy_(a)
    q, p = gradients(functional.gated(a, u, "relu"), a, u)
    first, second = (q - a).detach(), (p - a).detach()
    assert abs((first * second).mean() / first.square().mean()) < 0.1


@pytest.mark.parametrize("gate_first", [True, False])
def test_halves_are_as_two_tensors(device, gate_first):
    x, grad = torch.randn(4, 6, 2 * LENGTH, device=device).requires_grad_(), torch.randn(4, 6, LENGTH, device=device)
    first, second = x.chunk(2, -1)
    a, u = (first, second) if gate_first else (second, first)
    expected = functional.gated(a, u, "silu")
    z = gated_halves(x, Kept("silu", (), "int4"), 32, -1, gate_first)
    assert torch.equal(z, expected)
    assert torch.equal(*(gradients(y, x, grad=grad)[0] for y in (z, expected)))
    if gate_first:
        assert torch.equal(functional.gated(x, None, "silu"), z)


@pytest.mark.parametrize("dim", [0, 1, 2, 3, -3])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels-last"])
def test_halves_along_any_dimension(device, dim, memory):
    x = torch.randn(2, 6, 4, 10, device=device).contiguous(memory_format=memory).requires_grad_()
    z = gated_halves(x, Kept("sigmoid", (), "int8"), 32, dim, gate_first=False)
    expected = F.glu(x, dim)
    assert z.shape == expected.shape
    if expected.is_contiguous(memory_format=memory):
        assert z.is_contiguous(memory_format=memory)
    torch.testing.assert_close(z, expected, rtol=1e-5, atol=1e-6)
    grad = torch.randn_like(expected)
    (found,), (right,) = gradients(z, x, grad=grad), gradients(expected, x, grad=grad)
    assert found.shape == x.shape
    # Half a step of 1/255 of a range of at most twice the largest value, times the gradient.
    assert (found - right).abs().max() <= 1.2 / 255 * x.detach().abs().max() * grad.abs().max()


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
    a, u = (x.to(device).detach().requires_grad_() for x in layouts()[layout].to(device))
    z = functional.gated(a, u, "silu", value_format="int8", block_size=8)
    expected = F.silu(a) * u
    assert z.stride() == expected.stride()
    torch.testing.assert_close(z, expected, rtol=1e-5, atol=1e-6)
    for grad in (torch.randn_like(z), torch.randn(()).to(device).expand(z.shape)):
        z = functional.gated(a, u, "silu", value_format="int8", block_size=8)
        for found, right in zip(gradients(z, a, u, grad=grad), gradients(F.silu(a) * u, a, u, grad=grad), strict=True):
            assert found.shape == right.shape
            assert found.isfinite().all()
            # As above; q has factors up to 1.1 of values below 5.
            assert not (found - right).abs().gt(0.03 * grad.abs().amax() if grad.numel() else 0.0).any()


@pytest.mark.parametrize("wanted", [0, 1])
def test_what_needs_no_gradient_is_not_kept(device, wanted):
    leaves = pair(6, 64, device=device)
    both = gradients(functional.gated(*leaves, "gelu"), *leaves)
    leaves[1 - wanted].requires_grad_(False)
    assert saved_bytes(lambda: functional.gated(*leaves, "gelu")) == 6 * 2 * 18
    (found,) = gradients(functional.gated(*leaves, "gelu"), leaves[wanted])
    # Of p alone blocks have other places, and dithers: both are off by at most half a step.
    bound = largest_error(both[wanted].double().cpu(), 32, 4)
    assert (found - both[wanted]).cpu().abs().le(2.2 * bound + 1e-6).all()
    if wanted == 0:
        assert torch.equal(found, both[0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_block_nan(device, value):
    for place, name in ((0, "silu"), (1, "silu"), (0, "sigmoid")):
        leaves = pair(2, 70, device=device)
        with torch.no_grad():
            leaves[place][1, 33] = value
        z = functional.gated(*leaves, name)
        right, *factors = oracle(name, *leaves)
        assert torch.equal(z.cpu().isfinite(), right.isfinite())
        for found, factor in zip(gradients(z, *leaves, grad=torch.zeros_like(z)), factors, strict=True):
            expected = torch.zeros(2, 70, dtype=torch.bool)
            expected[1, 32:64] = not factor.isfinite().all()
            assert torch.equal(found.isnan().cpu(), expected)


def test_without_a_gradient_it_is_torchs_product():
    a, u = (x.detach() for x in pair(3, 40))
    for needs, enabled in ((False, True), (True, False)):
        with torch.set_grad_enabled(enabled):
            z = functional.gated(a.clone().requires_grad_(needs), u, "gelu")
            halves = functional.gated(torch.cat([a, u], -1).requires_grad_(needs), None, "gelu")
        assert torch.equal(z, F.gelu(a) * u)
        torch.testing.assert_close(halves, z)
        assert z.grad_fn is None


def test_two_uses_add_up(device):
    a, u = pair(4, 64, device=device)
    single = gradients(functional.gated(a, u, "silu"), a, u)
    double = gradients(functional.gated(a, u, "silu") + functional.gated(a, u, "silu"), a, u)
    for once, twice in zip(single, double, strict=True):
        assert torch.equal(2 * once, twice)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_product_may_be_written_to(transposed):
    a, u = ((x.t() if transposed else x).requires_grad_() for x in torch.randn(2, 6, 40))
    z = functional.gated(a, u, "silu", value_format="int8").relu_()
    for found, right in zip(gradients(z, a, u), gradients((F.silu(a) * u).relu_(), a, u), strict=True):
        assert (found - right).norm() <= 0.02 * right.norm()


@pytest.mark.parametrize(
    ("of_a", "of_u"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.bfloat16)]
)
def test_two_types_are_promoted(device, of_a, of_u):
    a, u = (
        x.detach().to(dtype).requires_grad_() for x, dtype in zip(pair(3, 64, device=device), (of_a, of_u), strict=True)
    )
    z = functional.gated(a, u, "silu")
    assert z.dtype == (F.silu(a) * u).dtype
    assert [grad.dtype for grad in gradients(z, a, u)] == [of_a, of_u]
    check(a, u, "silu", "int4")


def test_autocast_leaves_the_type():
    a, u = pair(3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert functional.gated(a, u, "silu").dtype == (F.silu(a) * u).dtype == torch.float32
        assert functional.gated(a.bfloat16(), u.bfloat16(), "silu").dtype == torch.bfloat16


def test_second_derivatives_are_refused():
    a, u = pair(2, 64)
    for leaves in ((a, u), (a, None)):
        with pytest.raises(RuntimeError, match="Second derivatives through a gated product"):
            torch.autograd.grad(functional.gated(*leaves, "gelu").sum(), a, create_graph=True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a, u: (a.double(), u), TypeError, r"kept in few bits of float32, .* got torch.float64. HINT"),
        (lambda a, u: (a, u.double()), TypeError, r"kept in few bits of float32, .* got torch.float64. HINT"),
        (lambda a, u: (a.relu().to_sparse(), u), ValueError, "must be a dense tensor"),
        (lambda a, u: (a, u[:, :3]), ValueError, r"one shape, got \(2, 64\) and \(2, 3\). HINT"),
        (lambda a, u: (a[:, :63], None), ValueError, r"two halves along its last dimension, got \(2, 63\). HINT"),
    ],
)
def test_what_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        functional.gated(*change(*pair(2, 64)), "relu")


def test_wrong_settings():
    a, u = pair(2, 64)
    with pytest.raises(ValueError, match=r"`value_format` of an activation function must be one of"):
        functional.gated(a, u, "silu", value_format="fp8")
    with pytest.raises(ValueError, match="`block_size` must be at least 8"):
        functional.gated(a, u, "silu", block_size=4)


def _net(a: Tensor, u: Tensor | None) -> Tensor:
    return functional.gated(a * 2, u, "silu") * 3


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_in_one_graph_it_is_the_same(joint, transposed):
    torch._dynamo.reset()
    leaves = [x.detach().t() if transposed else x.detach() for x in pair(12, 40)]
    leaves = [x.requires_grad_() for x in leaves][: 1 if joint else 2]
    compiled = torch.compile(_net, fullgraph=True, backend="aot_eager")
    arguments = (*leaves, None)[:2]
    z, expected = compiled(*arguments), _net(*arguments)
    assert torch.equal(z, expected)
    grad = torch.randn(z.shape)
    for found, right in zip(gradients(z, *leaves, grad=grad), gradients(expected, *leaves, grad=grad), strict=True):
        assert torch.equal(found, right)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_one_compiled_graph_serves_any_number_of_rows():
    torch._dynamo.reset()
    compiled = torch.compile(_net, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5, 8):
        a, u = pair(rows, 40)
        assert torch.equal(compiled(a, u), _net(a, u))
        gradients(compiled(a, u), a, u)


@pytest.mark.parametrize("layout", [SEPARATE, GATE_FIRST, GATE_LAST])
def test_operators_are_sound(layout):
    a, u = (x.detach() for x in pair(3, 40))
    settings = "int4", 32, True, layout != SEPARATE
    z, values = torch.ops.actprune.gate(a, u, "silu", (), *settings, torch.float32)
    torch.library.opcheck(torch.ops.actprune.gate.default, (a, u, "silu", (), *settings, torch.float32))
    arguments = z, values, *settings, layout, torch.float32, torch.float32
    torch.library.opcheck(torch.ops.actprune.gate_grad.default, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["silu", "softplus"])
def test_autocast_on_the_gpu_has_torchs_types(name):
    a, u = pair(8, 64, dtype=torch.bfloat16, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        z, expected = functional.gated(a, u, name, *kept_of(name).parameters), ORACLES[name](a) * u
    assert z.dtype == expected.dtype
    assert [grad.dtype for grad in gradients(z, a, u)] == [torch.bfloat16] * 2


@pytest.mark.gpu
def test_a_cuda_graph_replays_the_same_gradients():
    a, u = pair(64, 256, device="cuda")

    def run() -> tuple[Tensor, ...]:
        return gradients(functional.gated(a, u, "silu"), a, u)

    expected, stream = run(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    graph.replay()
    assert all(map(torch.equal, found, expected))
