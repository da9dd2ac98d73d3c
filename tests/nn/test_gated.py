"""MLPs with gated products in few bits: outputs, gradients, what they keep, what conversion makes of them."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_actprune import convert, revert
from lightning_actprune.nn.few_bit import FewBitLayer, FewBitSettings
from lightning_actprune.nn.few_bit_kinds import FOREIGN_KINDS, LLAMA_MLPS, PHI3_MLPS, few_bit_class, operator_of
from tests import oracle
from tests.attention import saved_tensors

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


def converted(module: nn.Module, value_format: str = "int8", block_size: int = 32) -> nn.Module:
    module = copy.deepcopy(module)
    module.__class__ = few_bit_class(type(module))
    module._few_bit = FewBitSettings(value_format, block_size)
    return module


def input_of(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 10, WIDTH).to(dtype).requires_grad_()


def gradients(module: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
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
    assert oracle.relative_error(ours, right) < max(2 * eps, 1e-6)
    for actual, expected in zip(gradients(module, x, ours), gradients(dense, x, right), strict=True):
        assert actual.dtype == expected.dtype
        assert oracle.relative_error(actual, expected) < 0.015 + 2 * eps
    assert operator_of(module) == operator_of(dense) == "activation"


@each_module
def test_only_few_bits_of_the_product_are_kept(name):
    dense = made(name)
    module, x = converted(dense, "int4"), input_of()

    def kept(layer: nn.Module) -> int:
        own = {p.data_ptr() for p in layer.parameters()} | {x.data_ptr()}
        with saved_tensors() as saved:
            layer(x)
        return sum({t.data_ptr(): t.nbytes for t in saved if t.data_ptr() not in own}.values())

    hidden = 32 if name == "glu" else HIDDEN
    of_codes = 40 * hidden * 2 * 18 // 32
    inside = 40 * (8 + 4 * HIDDEN) if "norm" in name or name == "timm-swiglu" else 0  # its own input and statistics
    of_product = 0 if name == "glu" else 40 * HIDDEN * 4  # what the last linear layer keeps
    assert kept(module) == of_codes + inside + of_product
    if name != "glu":
        assert kept(dense) >= kept(module) + 40 * HIDDEN * 4 * 2 - of_codes


@each_module
def test_the_plain_module_where_nothing_needs_a_gradient(name):
    dense = made(name)
    module, x = converted(dense), input_of()
    with torch.no_grad():
        assert torch.equal(module(x), dense(x))
    module.requires_grad_(False), dense.requires_grad_(False)
    with saved_tensors() as saved:
        assert torch.equal(module(x.detach()), dense(x.detach()))
    assert saved == []


@each_module
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_to_one_graph_with_the_same_results(name):
    torch._dynamo.reset()
    module, x = converted(made(name), "int4"), input_of()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    eager, traced = module(x), compiled(x)
    assert torch.equal(eager, traced)
    for first, second in zip(gradients(module, x, eager), gradients(module, x, traced), strict=True):
        assert torch.equal(first, second)


@each_module
def test_copies_pickles_and_what_is_printed(name):
    if name in ("llama", "gemma", "phi3") and importlib.util.find_spec("transformers") is None:
        pytest.skip("a stand-in cannot be found where the class of transformers would be")
    module, x = converted(made(name), "int4", 16), input_of()
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(module), torch.load(buffer, weights_only=False)):
        assert type(other) is type(module)
        assert torch.equal(other(x), module(x))
    assert "value_format='int4', block_size=16" in repr(module)
    assert list(module.state_dict()) == list(made(name).state_dict())


@pytest.mark.parametrize("frozen", ["gate_proj", "up_proj"])
def test_frozen_projections(frozen):
    dense = made("llama")
    getattr(dense, frozen).requires_grad_(False)
    module, x = converted(dense), input_of().detach()
    used = [p for p in module.parameters() if p.requires_grad]
    right = [p for p in dense.parameters() if p.requires_grad]
    found = torch.autograd.grad(module(x).square().sum(), used)
    for actual, expected in zip(found, torch.autograd.grad(dense(x).square().sum(), right), strict=True):
        assert oracle.relative_error(actual, expected) < 0.015


def test_an_activation_function_put_in_later_is_called():
    dense, x = made("llama"), input_of()
    module = converted(dense)
    for function in (nn.Softsign(), nn.ReLU()):
        module.act_fn = dense.act_fn = function
        torch.testing.assert_close(module(x), dense(x))
    assert "FewBitFewBit" not in repr(module)


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
    for mine, exact in zip(gradients(nn.GLU(), x, ours), gradients(nn.GLU(), x, right), strict=True):
        assert oracle.relative_error(mine, exact) < 0.015


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels-last"])
def test_timm_glu_of_images(memory):
    dense = timm_mlp("GluMlp", use_conv=True)
    x = torch.randn(2, WIDTH, 5, 6).contiguous(memory_format=memory).requires_grad_()
    module = converted(dense)
    ours, right = module(x), dense(x)
    torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)
    for mine, exact in zip(gradients(module, x, ours), gradients(dense, x, right), strict=True):
        assert oracle.relative_error(mine, exact) < 0.015


def test_what_torch_refuses_it_refuses_still():
    glu = converted(nn.GLU())
    with pytest.raises(RuntimeError, match="Halving dimension must be even"):
        glu(torch.randn(3, 7, requires_grad=True))
    with pytest.raises(IndexError, match="Dimension out of range"):
        converted(nn.GLU(5))(torch.randn(3, 8, requires_grad=True))
    with pytest.raises(TypeError, match=r"kept in few bits of float32, .* got torch.float64. HINT"):
        glu(torch.randn(3, 8, dtype=torch.float64, requires_grad=True))


class Model(nn.Module):
    """Two MLPs that share a function with each other, and one that has it with another caller."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (made("llama") for _ in range(3))
        self.second.act_fn = self.first.act_fn
        self.out = self.third.act_fn

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.third(self.second(self.first(x))))


def test_functions_inside_are_converted_only_where_they_are_called():
    module, x = Model(), input_of()
    expected = module(x)
    report = convert(module, others={"activation": "int8"})
    found = {(layer.fqn, layer.kind, layer.operator) for layer in report.few_bit}
    mlp, function = "LlamaMLP", type(module.out).dense_class.__name__
    assert found == {(name, mlp, "activation") for name in ("first", "second", "third")} | {
        ("third.act_fn", function, "activation")
    }
    assert not isinstance(module.first.act_fn, FewBitLayer)
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-5)
    assert {"first", "second", "third", "third.act_fn"} <= set(revert(module))
    assert not any(isinstance(m, FewBitLayer) for m in module.modules())


def test_what_could_be_converted_is_counted_once():
    assert convert(Model()).left == {"activation": 4}


def test_an_excluded_mlp_leaves_its_function_to_be_converted():
    module = Model()
    report = convert(module, exclude=["first", "third"], others={"activation": "int4"})
    # The function of `second` is that of `first`, which calls it.
    assert {layer.fqn for layer in report.few_bit} == {"first.act_fn", "second", "third.act_fn"}
    torch.testing.assert_close(module(x := input_of()), Model()(x), rtol=1e-4, atol=1e-5)
    convert(other := nn.Sequential(Model()), include="*.*.*", exclude="*.act_fn", others={"activation": "int4"})
    assert not any(isinstance(m, FewBitLayer) for m in other.modules())


def test_an_mlp_with_an_unknown_function_stays_as_it_is():
    module = made("llama")
    module.act_fn = nn.Softsign()
    report = convert(nn.Sequential(module, nn.ReLU()), others={"activation": "int4"})
    (reason,) = [layer.reason for layer in report.skipped]
    assert reason == "its activation function, a Softsign, is not one that is known"
    assert type(module).__name__ == "LlamaMLP"


def test_the_root_may_be_an_mlp():
    module = made("llama")
    report = convert(module, others={"activation": "int4"})
    assert [layer.fqn for layer in report.few_bit] == ["(root)"]
    assert len(report.converted) == 3


def test_a_whole_conversion_keeps_a_fraction_of_a_step():
    """Linear layers in few bits too: what is left are codes of two inputs and two factors."""
    dense, x = made("llama"), input_of()
    ours = copy.deepcopy(dense)
    convert(ours, sparsity=0.0, value_format="int4", others=True)
    own = {p.data_ptr() for p in ours.parameters()}
    with saved_tensors() as saved:
        y = ours(x)
    few = sum({t.data_ptr(): t.nbytes for t in saved if t.data_ptr() not in own}.values())
    assert few == 40 * (WIDTH + 3 * HIDDEN) * 18 // 32
    for mine, exact in zip(gradients(ours, x, y), gradients(dense, x, dense(x)), strict=True):
        assert F.cosine_similarity(mine.flatten(), exact.flatten(), 0) > 0.98


def forward_of(module: str, name: str) -> list[str]:
    """Return the lines of a forward but for its head."""
    lines = inspect.getsource(getattr(importlib.import_module(module), name).forward).splitlines()
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("def ")]


@pytest.mark.parametrize(("models", "like"), [(LLAMA_MLPS, "llama"), (PHI3_MLPS, "phi3")], ids=["llama", "phi3"])
def test_classes_of_transformers_compute_what_the_first_does(models, like):
    """Their forward, read from their source, is that of the class that the mixin was written for."""
    pytest.importorskip("transformers")
    right = forward_of(f"transformers.models.{like}.modeling_{like}", models[like])
    for model, name in models.items():
        assert forward_of(f"transformers.models.{model}.modeling_{model}", name) == right, model
    if like == "llama":
        assert right == [
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


def test_every_foreign_class_is_named_once():
    assert {name for name in FOREIGN_KINDS if name[0] == "timm.layers.mlp"} == {
        ("timm.layers.mlp", "GluMlp"),
        ("timm.layers.mlp", "SwiGLU"),
    }
    assert len(LLAMA_MLPS) + len(PHI3_MLPS) == sum("MLP" in name for _, name in FOREIGN_KINDS)


@pytest.mark.gpu
@each_module
def test_types_under_autocast_on_the_gpu_are_those_of_the_dense_module(name):
    dense = made(name).cuda()
    module, x = converted(dense), input_of().detach().cuda().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        ours, right = module(x), dense(x)
    assert ours.dtype == right.dtype
    assert oracle.relative_error(ours, right) < 2 * torch.finfo(torch.bfloat16).eps
    grad_y = torch.randn_like(right)
    grads = (torch.autograd.grad(y, (x, *m.parameters()), grad_y) for m, y in ((module, ours), (dense, right)))
    for actual, expected in zip(*grads, strict=True):
        assert actual.dtype == expected.dtype
        assert oracle.relative_error(actual, expected) < 0.015 + 2 * torch.finfo(torch.bfloat16).eps
