"""Gated products in few bits, and MLPs that have them: errors, layouts, types, what is kept and what is refused.

What holds for all operators alike is in ``tests/contract``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_actprune.functional import gated
from lightning_actprune.operators.activation import ACTIVATIONS, StoredDerivative
from lightning_actprune.operators.gated import gated_halves
from tests.support.activations import BITS, ORACLES, inputs, stored_of
from tests.support.compressed import compressed
from tests.support.gates import largest_error, oracle
from tests.support.oracle import relative_error
from tests.support.saving import saved_tensors

each_bits = pytest.mark.parametrize("bits", BITS)
LENGTH = 100


def saved_bytes(call: Callable[[], Tensor]) -> int:
    """Return the bytes of the tensors that autograd saves in ``call``."""
    with saved_tensors() as saved:
        call()
    return sum(tensor.nbytes for tensor in saved)


def pair(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return ``a``, of all sizes, and ``u``, leaves."""
    a = inputs(math.prod(shape), dtype).view(shape).to(device)
    return a.requires_grad_(), torch.randn(shape).to(dtype).to(device).requires_grad_()


def gradients(z: Tensor, *leaves: Tensor, grad: Tensor | None = None) -> tuple[Tensor, ...]:
    return torch.autograd.grad(z, leaves, torch.ones_like(z) if grad is None else grad)


def check(a: Tensor, u: Tensor, name: str, bits: int, block_size: int = 32) -> None:
    """Compare product and factors with fp64."""
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


@each_bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_formats_and_types(device, bits, dtype):
    check(*pair(4, 70, dtype=dtype, device=device), "silu", bits)


@pytest.mark.parametrize(("length", "block_size"), [(1, 32), (7, 32), (33, 32), (64, 8), (100, 24), (130, 64)])
def test_odd_rows_and_blocks(device, length, block_size):
    check(*pair(5, length, device=device), "gelu", 4, block_size)


@each_bits
def test_saved_are_two_blocks_for_one_of_values(device, bits):
    a, u = pair(6, LENGTH, device=device)
    codes = sum(math.ceil(32 * plane / 8) for plane in ((2, 1) if bits == 3 else (bits,)))
    found = saved_bytes(lambda: gated(a, u, "silu", bits=bits))
    assert found == 2 * 6 * math.ceil(LENGTH / 32) * (codes + codes % 2 + 2)


@pytest.mark.parametrize("name", ["silu", "relu"])
def test_errors_cancel_over_rows(device, name):
    """Equal rows have other dithers: what sums over rows see is unbiased."""
    rows = 512
    row = torch.randn(2, 32)
    a, u = (x.expand(rows, 32).to(device).requires_grad_() for x in row)
    z = gated(a, u, name, bits=3)
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
    q, p = gradients(gated(a, u, "relu"), a, u)
    first, second = (q - a).detach(), (p - a).detach()
    assert abs((first * second).mean() / first.square().mean()) < 0.1


@pytest.mark.parametrize("gate_first", [True, False])
def test_halves_are_as_two_tensors(device, gate_first):
    x, grad = torch.randn(4, 6, 2 * LENGTH, device=device).requires_grad_(), torch.randn(4, 6, LENGTH, device=device)
    first, second = x.chunk(2, -1)
    a, u = (first, second) if gate_first else (second, first)
    expected = gated(a, u, "silu")
    z = gated_halves(x, StoredDerivative("silu", (), 4), 32, -1, gate_first)
    assert torch.equal(z, expected)
    assert torch.equal(*(gradients(y, x, grad=grad)[0] for y in (z, expected)))
    if gate_first:
        assert torch.equal(gated(x, None, "silu"), z)


@pytest.mark.parametrize("dim", [0, 1, 2, 3, -3])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels-last"])
def test_halves_along_any_dimension(device, dim, memory):
    x = torch.randn(2, 6, 4, 10, device=device).contiguous(memory_format=memory).requires_grad_()
    z = gated_halves(x, StoredDerivative("sigmoid", (), 8), 32, dim, gate_first=False)
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
    z = gated(a, u, "silu", bits=8, block_size=8)
    expected = F.silu(a) * u
    assert z.stride() == expected.stride()
    torch.testing.assert_close(z, expected, rtol=1e-5, atol=1e-6)
    for grad in (torch.randn_like(z), torch.randn(()).to(device).expand(z.shape)):
        z = gated(a, u, "silu", bits=8, block_size=8)
        for found, right in zip(gradients(z, a, u, grad=grad), gradients(F.silu(a) * u, a, u, grad=grad), strict=True):
            assert found.shape == right.shape
            assert found.isfinite().all()
            # As above; q has factors up to 1.1 of values below 5.
            assert not (found - right).abs().gt(0.03 * grad.abs().amax() if grad.numel() else 0.0).any()


@pytest.mark.parametrize("wanted", [0, 1])
def test_what_needs_no_gradient_is_not_kept(device, wanted):
    leaves = pair(6, 64, device=device)
    both = gradients(gated(*leaves, "gelu"), *leaves)
    leaves[1 - wanted].requires_grad_(False)
    assert saved_bytes(lambda: gated(*leaves, "gelu")) == 6 * 2 * 18
    (found,) = gradients(gated(*leaves, "gelu"), leaves[wanted])
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
        z = gated(*leaves, name)
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
            z = gated(a.clone().requires_grad_(needs), u, "gelu")
            halves = gated(torch.cat([a, u], -1).requires_grad_(needs), None, "gelu")
        assert torch.equal(z, F.gelu(a) * u)
        torch.testing.assert_close(halves, z)
        assert z.grad_fn is None


def test_two_uses_add_up(device):
    a, u = pair(4, 64, device=device)
    single = gradients(gated(a, u, "silu"), a, u)
    double = gradients(gated(a, u, "silu") + gated(a, u, "silu"), a, u)
    for once, twice in zip(single, double, strict=True):
        assert torch.equal(2 * once, twice)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_product_may_be_written_to(transposed):
    a, u = ((x.t() if transposed else x).requires_grad_() for x in torch.randn(2, 6, 40))
    z = gated(a, u, "silu", bits=8).relu_()
    for found, right in zip(gradients(z, a, u), gradients((F.silu(a) * u).relu_(), a, u), strict=True):
        assert (found - right).norm() <= 0.02 * right.norm()


@pytest.mark.parametrize(
    ("of_a", "of_u"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.bfloat16)]
)
def test_two_types_are_promoted(device, of_a, of_u):
    a, u = (
        x.detach().to(dtype).requires_grad_() for x, dtype in zip(pair(3, 64, device=device), (of_a, of_u), strict=True)
    )
    z = gated(a, u, "silu")
    assert z.dtype == (F.silu(a) * u).dtype
    assert [grad.dtype for grad in gradients(z, a, u)] == [of_a, of_u]
    check(a, u, "silu", 4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a, u: (a.double(), u), TypeError, r"kept in few bits of float32, .* got torch.float64. HINT"),
        (lambda a, u: (a, u.double()), TypeError, r"kept in few bits of float32, .* got torch.float64. HINT"),
        (lambda a, u: (a, u[:, :3]), ValueError, r"one shape, got \(2, 64\) and \(2, 3\). HINT"),
        (lambda a, u: (a[:, :63], None), ValueError, r"two halves along its last dimension, got \(2, 63\). HINT"),
    ],
)
def test_what_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        gated(*change(*pair(2, 64)), "relu")


def test_wrong_settings():
    a, u = pair(2, 64)
    with pytest.raises(TypeError, match=r"`bits` must be 2, 3, 4, 8 or None"):
        gated(a, u, "silu", bits="fp8")
    with pytest.raises(ValueError, match="`block_size` must be at least 8"):
        gated(a, u, "silu", block_size=4)


def _net(a: Tensor, u: Tensor | None) -> Tensor:
    return gated(a * 2, u, "silu") * 3


@pytest.mark.parametrize(("joint", "transposed"), [(False, True), (True, False)])
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
@pytest.mark.slow
def test_one_compiled_graph_serves_any_number_of_rows():
    torch._dynamo.reset()
    compiled = torch.compile(_net, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5, 8):
        a, u = pair(rows, 40)
        assert torch.equal(compiled(a, u), _net(a, u))
        gradients(compiled(a, u), a, u)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["silu", "softplus"])
def test_autocast_on_the_gpu_has_torchs_types(name):
    a, u = pair(8, 64, dtype=torch.bfloat16, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        z, expected = gated(a, u, name, *stored_of(name).parameters), ORACLES[name](a) * u
    assert z.dtype == expected.dtype
    assert [grad.dtype for grad in gradients(z, a, u)] == [torch.bfloat16] * 2


@pytest.mark.gpu
def test_a_cuda_graph_replays_the_same_gradients():
    a, u = pair(64, 256, device="cuda")

    def run() -> tuple[Tensor, ...]:
        return gradients(gated(a, u, "silu"), a, u)

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


WIDTH, HIDDEN = 64, 96


class LlamaMLP(nn.Module):
    """A stand-in for transformers' class, by its documented behaviour."""

    def __init__(self, act_fn: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(HIDDEN, WIDTH, bias=False), act_fn

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Phi3MLP(nn.Module):
    """The same."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.activation_fn = nn.SiLU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


LlamaMLP.__module__ = "transformers.models.llama.modeling_llama"
Phi3MLP.__module__ = "transformers.models.phi3.modeling_phi3"


def transformers_mlp(model: str, hidden_act: str) -> nn.Module:
    """Return the real module, or the stand-in where transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return Phi3MLP() if model == "Phi3" else LlamaMLP(nn.SiLU() if hidden_act == "silu" else nn.GELU("tanh"))
    found = importlib.import_module("transformers")
    sizes = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "hidden_act": hidden_act}
    config = getattr(found, f"{model}Config")(**sizes, hidden_activation=hidden_act, pad_token_id=0)
    module = importlib.import_module(f"transformers.models.{model.lower()}.modeling_{model.lower()}")
    return getattr(module, f"{model}MLP")(config)


def timm_mlp(name: str, **options) -> nn.Module:
    layers = pytest.importorskip("timm.layers.mlp")
    return getattr(layers, name)(WIDTH, HIDDEN * (1 if name == "SwiGLU" else 2), **options)


MADE = {
    "llama": lambda: transformers_mlp("Llama", "silu"),
    "gemma": lambda: transformers_mlp("Gemma", "gelu_pytorch_tanh"),
    "phi3": lambda: transformers_mlp("Phi3", "silu"),
    "timm-glu": lambda: timm_mlp("GluMlp"),
    "timm-glu-norm": lambda: timm_mlp("GluMlp", norm_layer=nn.LayerNorm, act_layer=nn.GELU),
    "timm-packed": lambda: timm_mlp("SwiGLUPacked", gate_last=False),
    "timm-swiglu": lambda: timm_mlp("SwiGLU", norm_layer=nn.LayerNorm),
    "glu": lambda: nn.GLU(),
}
each_module = pytest.mark.parametrize("name", list(MADE))


def made(name: str) -> nn.Module:
    torch.manual_seed(1)
    module = MADE[name]()
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=WIDTH**-0.5)
    return module


def converted(module: nn.Module) -> nn.Module:
    return compressed(module, "activation", bits=8)


def input_of(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 10, WIDTH).to(dtype).requires_grad_()


def gradients_of(module: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    grad_y = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    return torch.autograd.grad(y, (x, *module.parameters()), grad_y)


@each_module
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
def test_output_and_gradients_are_those_of_the_dense_module(name, dtype, autocast):
    dense = made(name).to(dtype)
    module, x = converted(dense), input_of(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours, right = module(x), dense(x)
    assert ours.dtype == right.dtype
    # The product is rounded once, not after the function too, and goes through a linear layer.
    eps = torch.finfo(ours.dtype).eps
    assert relative_error(ours, right) < max(2 * eps, 1e-6)
    for actual, expected in zip(gradients_of(module, x, ours), gradients_of(dense, x, right), strict=True):
        assert actual.dtype == expected.dtype
        assert relative_error(actual, expected) < 0.015 + 2 * eps


@pytest.mark.parametrize("frozen", ["gate_proj", "up_proj"])
def test_frozen_projections(frozen):
    dense = made("llama")
    getattr(dense, frozen).requires_grad_(False)
    module, x = converted(dense), input_of().detach()
    used = [p for p in module.parameters() if p.requires_grad]
    right = [p for p in dense.parameters() if p.requires_grad]
    found = torch.autograd.grad(module(x).square().sum(), used)
    for actual, expected in zip(found, torch.autograd.grad(dense(x).square().sum(), right), strict=True):
        assert relative_error(actual, expected) < 0.015


def test_an_activation_function_put_in_later_is_called():
    dense, x = made("llama"), input_of()
    module = converted(dense)
    for function in (nn.Softsign(), nn.ReLU()):
        module.act_fn = dense.act_fn = function
        torch.testing.assert_close(module(x), dense(x))
    assert "CompressedCompressed" not in repr(module)


def test_hooks_of_linear_layers_run():
    module, seen = converted(made("llama")), []
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(module, name).register_forward_hook(lambda *_, name=name: seen.append(name))
    module(input_of())
    assert seen == ["gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("dim", [-1, 1, 0])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels-last"])
def test_glu_of_images(dim, memory):
    x = torch.randn(2, 8, 4, 6).contiguous(memory_format=memory).requires_grad_()
    ours, right = converted(nn.GLU(dim))(x), F.glu(x, dim)
    torch.testing.assert_close(ours, right)
    for mine, exact in zip(gradients_of(nn.GLU(), x, ours), gradients_of(nn.GLU(), x, right), strict=True):
        assert relative_error(mine, exact) < 0.015


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels-last"])
def test_timm_glu_of_images(memory):
    dense = timm_mlp("GluMlp", use_conv=True)
    x = torch.randn(2, WIDTH, 5, 6).contiguous(memory_format=memory).requires_grad_()
    module = converted(dense)
    ours, right = module(x), dense(x)
    torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)
    for mine, exact in zip(gradients_of(module, x, ours), gradients_of(dense, x, right), strict=True):
        assert relative_error(mine, exact) < 0.015


def test_what_torch_refuses_it_refuses_still():
    glu = converted(nn.GLU())
    with pytest.raises(RuntimeError, match="Halving dimension must be even"):
        glu(torch.randn(3, 7, requires_grad=True))
    with pytest.raises(IndexError, match="Dimension out of range"):
        converted(nn.GLU(5))(torch.randn(3, 8, requires_grad=True))
    with pytest.raises(TypeError, match=r"kept in few bits of float32, .* got torch.float64. HINT"):
        glu(torch.randn(3, 8, dtype=torch.float64, requires_grad=True))


def forward_of(module: str, name: str) -> list[str]:
    """Return the lines of a forward but for its head."""
    lines = inspect.getsource(getattr(importlib.import_module(module), name).forward).splitlines()
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("def ")]


def test_llamas_mlp_computes_what_its_mixin_does():
    pytest.importorskip("transformers")
    assert forward_of("transformers.models.llama.modeling_llama", "LlamaMLP") == [
        "down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))",
        "return down_proj",
    ]


def test_classes_of_timm_compute_what_their_mixins_do():
    pytest.importorskip("timm")
    output = ["x = self.drop1(x)", "x = self.norm(x)", "x = self.fc2(x)", "x = self.drop2(x)", "return x"]
    joint = ["x = self.fc1(x)", "x1, x2 = x.chunk(2, dim=self.chunk_dim)"]
    joint += ["x = x1 * self.act(x2) if self.gate_last else self.act(x1) * x2"]
    two = ["x_gate = self.fc1_g(x)", "x = self.fc1_x(x)", "x = self.act(x_gate) * x"]
    assert forward_of("timm.layers.mlp", "GluMlp") == joint + output
    assert forward_of("timm.layers.mlp", "SwiGLU") == two + output


@pytest.mark.gpu
@each_module
def test_types_under_autocast_on_the_gpu_are_those_of_the_dense_module(name):
    dense = made(name).cuda()
    module, x = converted(dense), input_of().detach().cuda().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        ours, right = module(x), dense(x)
    assert ours.dtype == right.dtype
    assert relative_error(ours, right) < 2 * torch.finfo(torch.bfloat16).eps
    grad_y = torch.randn_like(right)
    grads = (torch.autograd.grad(y, (x, *m.parameters()), grad_y) for m, y in ((module, ours), (dense, right)))
    for actual, expected in zip(*grads, strict=True):
        assert actual.dtype == expected.dtype
        assert relative_error(actual, expected) < 0.015 + 2 * torch.finfo(torch.bfloat16).eps
