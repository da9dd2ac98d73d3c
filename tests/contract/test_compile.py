"""Under the compiler: one graph, two compilations over a schedule at most, bytes and gradients as in eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_actprune.config import Keep
from lightning_actprune.convert import convert
from lightning_actprune.operators.registry import layers
from lightning_actprune.operators.scale import Affine
from tests.support.cases import CASES, FUNCTIONS, OWN, Case, Holder
from tests.support.marks import only
from tests.support.measured import gradients, kept_bytes, relative_error

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _forget_compilations() -> None:
    torch._dynamo.reset()


def check(case: Case, model: Holder, backend: str, tolerance: float, device: torch.device | str = "cpu") -> None:
    counter, x = CompileCounterWithBackend(backend), case.input(device)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for sparsity in (0.2, 0.5, 0.8) if case.drops else (0.0,):
        for _, layer in layers(model):
            if case.drops:
                layer.sparsity = sparsity
        if not case.seeded:  # the compiler draws random numbers of its own
            right = gradients(model, x)
            for name, grad in gradients(model, x, compiled).items():
                assert relative_error(grad, right[name]) < tolerance, name
            # Generated code may keep weights in another order of memory.
            weights = sum(p.nbytes for p in model.parameters()) if backend == "inductor" else 0
            assert kept_bytes(model, x, compiled) <= kept_bytes(model, x) + weights
    assert counter.frame_count <= (2 if case.drops else 1)


ALIKE = {
    "conv1d": "conv2d conv3d",
    "gelu": "gelu-tanh silu mish tanh elu hardswish",
    "relu": "relu6 hardtanh leaky-relu hardsigmoid",
    "layer-norm": "layer-norm-two",
    "rms-norm": "rms-norm-plain",
    "batch-norm-1d": "batch-norm-2d batch-norm-3d",
    "timm-group-norm": "timm-group-norm-1",
    "transformers-GELUActivation": "timm-GELU",
    "transformers-NewGELUActivation": "transformers-AccurateGELUActivation",
    "transformers-GELUTanh": "transformers-PytorchGELUTanh",
    "transformers-FastGELUActivation": "timm-GELUTanh",
    "transformers-QuickGELUActivation": "timm-QuickGELU",
}
"""Cases whose code the compiler sees in another one too."""


def code_of(name: str) -> list[Any]:
    """Return what the compiler traces of the layers of a case, which is all but what their settings choose."""
    _, model = CASES[name].pair()
    return [(type(layer).forward.compressed, type(layer).__mro__[1]) for _, layer in layers(model)]


COMPILED = [name for name in CASES if name not in " ".join(ALIKE.values()).split()]
each_function = pytest.mark.parametrize("name", FUNCTIONS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.integration if name in FUNCTIONS else pytest.mark.nightly)
        for name in dict.fromkeys([*FUNCTIONS, *COMPILED])
    ],
)
def test_one_graph(name: str):
    case = CASES[name]
    _, model = case.pair()
    check(case, model, "aot_eager", 1e-6)


@pytest.mark.parametrize("name", only(ALIKE, *(name for name in ALIKE if name in OWN), rest="foreign"))
def test_what_is_not_compiled_has_the_code_of_what_is(name: str):
    assert all(code_of(other) == code_of(name) for other in ALIKE[name].split())


def written(y: Tensor) -> Tensor:
    y[..., :2] += 1.5
    return y.relu_()


@pytest.mark.parametrize("inside", [False, True], ids=["after", "inside"])
@each_function
@pytest.mark.nightly
def test_the_output_may_be_written_to(name: str, inside: bool):
    """In the graph and after it."""
    case = CASES[name]
    _, model = case.pair()
    x = case.input()
    net = (lambda x: written(model(x))) if inside else model
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    found = gradients(model, x, compiled if inside else lambda x: written(compiled(x)))
    right = gradients(model, x, lambda x: written(model(x)))
    for parameter, grad in found.items():
        assert relative_error(grad, right[parameter]) < 1e-6, parameter


@pytest.mark.nightly
def test_each_class_may_compile_as_often_as_torch_allows():
    """Where the graph breaks before each layer, as a hook may break it, which compiles the layers' forwards alone."""
    shaped = nn.Linear(64, 64), nn.LayerNorm(64), nn.RMSNorm(64), Affine(64), nn.Conv1d(64, 64, 1)
    model = nn.Sequential(*shaped, nn.BatchNorm1d(64), nn.GroupNorm(4, 64), nn.GELU(), nn.Dropout(0.1), nn.GLU())
    for layer in model:
        layer.register_forward_pre_hook(lambda module, args: torch._dynamo.graph_break())
    convert(model, rules={"*": Keep(bits=4), "type:saved": None})
    counter = CompileCounterWithBackend("eager")
    torch.compile(model, backend=counter)(torch.randn(2, 64, 64))
    assert counter.frame_count == len(model) > torch._dynamo.config.recompile_limit


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "attention"])
def test_generated_code(name: str):
    case = CASES[name]
    _, model = case.pair()
    check(case, model, "inductor", 1e-5)


@pytest.mark.gpu
def test_generated_code_on_the_gpu(case: Case):
    _, model = case.pair(device="cuda")
    check(case, model, "inductor", 2e-2, "cuda")  # near ties of codes, and sums in another order
