"""Compiled layers, also as dense ones with marks: how often they compile, bytes and gradients as in eager mode."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_actprune.compiled.install import CompiledPacking
from lightning_actprune.compiled.marks import Model
from lightning_actprune.config import Keep
from lightning_actprune.convert import convert, is_converted, mark_layers
from lightning_actprune.operators.norm import Affine
from lightning_actprune.operators.registry import layers
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


# Layers that a compiler sees as dense ones with marks, and packs by itself.

INTEGRATION = "layer-norm", "conv2d", "batch-norm-2d", "silu", "group-norm", "affine"
FOREIGN = "llama-norm", "llama-mlp", "transformers-NewGELUActivation"
MARKED = ["linear", "gelu", *(pytest.param(name, marks=pytest.mark.integration) for name in INTEGRATION)]
MARKED += [pytest.param(name, marks=pytest.mark.foreign) for name in FOREIGN]
"""Of each kind of layer one, and those that are written out."""


def mark(model: nn.Module) -> bool:
    """Let compilers see the layers as dense ones, and return whether there are any that they see so."""
    found = [layer for _, layer in layers(model) if is_converted(layer)]
    for owner in {layer.owner for layer in found}:
        mark_layers(model, owner)
    return all(layer.traced == "marked" for layer in found)


@pytest.mark.parametrize("name", MARKED)
def test_a_layer_keeps_as_much_as_in_eager_mode_and_is_about_as_far_off(name: str, monkeypatch):
    monkeypatch.setattr(sys.modules["lightning_actprune.convert"], "Model", partial(Model, min_values=64))
    case = CASES[name]
    dense, model = case.pair()
    x = case.input()
    assert mark(model)
    with CompiledPacking() as packing:
        # Of a product, since what is given to the graph is kept by whoever gives it.
        compiled = torch.compile(lambda x: model(x * 1.0), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), dense(x), rtol=1e-5, atol=1e-5)
        found, kept = gradients(model, x, compiled), kept_bytes(model, x, compiled)
    assert packing.rows
    assert not packing.was_missed
    right, eager = gradients(dense, x), gradients(model, x)
    # In eager mode derivatives and normalised values are stored, here what they are computed from: that of a GELU is
    # off by 1.8 times as much for it with as many bits, and the input gradient of a norm by up to 2.1.
    for of, expected in right.items():
        assert relative_error(found[of], expected) <= 2.5 * relative_error(eager[of], expected) + 1e-6, of
    assert kept <= 1.2 * kept_bytes(model, x)
