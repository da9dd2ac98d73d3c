"""Compiled layers: one graph, at most two compilations over a schedule, bytes and gradients as in eager mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_actprune.config import Keep
from lightning_actprune.convert import convert
from lightning_actprune.operators.registry import layers
from lightning_actprune.operators.scale import Affine
from tests.support.cases import CASES, FUNCTIONS, Case, Holder
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


@pytest.mark.parametrize(
    ("name", "backend", "tolerance"),
    [
        *(pytest.param(name, "aot_eager", 1e-6, marks=pytest.mark.integration) for name in FUNCTIONS),
        *(pytest.param(name, "aot_eager", 1e-6, marks=pytest.mark.nightly) for name in CASES if name not in FUNCTIONS),
        *(pytest.param(name, "inductor", 1e-5, marks=pytest.mark.nightly) for name in FUNCTIONS if name != "attention"),
    ],
)
def test_one_graph(name: str, backend: str, tolerance: float):
    check(CASES[name], CASES[name].pair()[1], backend, tolerance)


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


@pytest.mark.gpu
def test_generated_code_on_the_gpu(case: Case):
    check(case, case.pair(device="cuda")[1], "inductor", 2e-2, "cuda")  # near ties of codes, and sums in another order
