"""Under the compiler: one graph, two compilations over a schedule at most, bytes and gradients as in eager mode."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_actprune.operators.registry import layers
from tests.support.cases import CASES, Case, Holder
from tests.support.measured import gradients, kept_bytes, relative_error

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _forget_compilations() -> None:
    torch._dynamo.reset()


def check(case: Case, model: Holder, backend: str, tolerance: float, device: torch.device | str = "cpu") -> None:
    counter, x = CompileCounterWithBackend(backend), case.input(device)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for sparsity in (0.2, 0.3, 0.5, 0.8) if case.drops else (0.0,):
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


def test_one_graph(case: Case):
    _, model = case.pair()
    check(case, model, "aot_eager", 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "conv2d", "gelu", "relu", "glu", "layer-norm", "batch-norm-2d", "affine"])
def test_generated_code(name: str):
    case = CASES[name]
    _, model = case.pair()
    check(case, model, "inductor", 1e-5)


@pytest.mark.gpu
def test_generated_code_on_the_gpu(case: Case):
    _, model = case.pair(device="cuda")
    check(case, model, "inductor", 2e-2, "cuda")  # near ties of codes, and sums in another order
