"""HolderProbe and torch.compile: the decision of the eager model, and nothing compiled anew afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from lightning_actprune import HolderProbe, convert
from lightning_actprune.conversion_report import ConversionReport
from tests.helpers import pruned_layers


@pytest.fixture(autouse=True)
def _forget_compilations() -> None:
    torch._dynamo.reset()
    counters.clear()


class Net(nn.Module):
    """``blocks.1`` is behind a ReLU, ``blocks.3`` behind a GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x * 2)


def converted() -> tuple[Net, ConversionReport, Tensor]:
    model = Net()
    return model, convert(model, sparsity=0.5), torch.randn(4, 8, 64)


def steps(call: nn.Module, model: nn.Module, report: ConversionReport, x: Tensor, probe: bool) -> list[str]:
    """Run four training steps, the first of them probed or not; return what was decided."""
    reasons: list[str] = []
    for step in range(4):
        if probe and step == 0:
            with HolderProbe(model, x) as found:
                loss = call(x).square().sum()
            reasons = [f"{layer.fqn}: {layer.reason}" for layer in found.apply(report)]
        else:
            loss = call(x).square().sum()
        loss.backward()
    return reasons


@pytest.mark.parametrize("how", ["wrapped", "in place", "block", "step"])
def test_the_decision_is_the_eager_one_and_later_steps_compile_once(how: str):
    model, report, x = converted()
    expected = steps(model, model, report, x, probe=True)
    assert expected == ["blocks.2: its input is kept for backward by 'blocks.1' (relu)"]

    frames = {}
    for probe in (False, True):
        torch._dynamo.reset()
        model, report, x = converted()
        counter = CompileCounterWithBackend("aot_eager")
        call = model
        if how == "wrapped":
            call = torch.compile(model, backend=counter, fullgraph=True)
        elif how == "in place":
            model.compile(backend=counter, fullgraph=True)
        elif how == "block":
            model.blocks.compile(backend=counter, fullgraph=True)
        else:
            call = torch.compile(lambda x, model=model: model(x), backend=counter, fullgraph=True)
        assert steps(call, model, report, x, probe) == (expected if probe else [])
        assert pruned_layers(model) == [f"blocks.{i}" for i in (0, 2, 4) if not probe or i != 2]
        frames[probe] = counter.frame_count
    assert frames[True] == frames[False]
    assert not counters["graph_break"]


def test_a_probe_after_compilation_compiles_once_more_for_the_layers_it_turns():
    model, report, x = converted()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(2):
        compiled(x).sum().backward()
    assert counter.frame_count == 1
    with HolderProbe(model, x) as probe:
        compiled(x).sum().backward()
    assert counter.frame_count == 1
    compiled(x).sum().backward()
    assert counter.frame_count == 1  # nothing of the probe is left
    assert [layer.fqn for layer in probe.apply(report)] == ["blocks.2"]
    for _ in range(2):
        compiled(x).sum().backward()
    assert counter.frame_count == 2


def test_the_names_of_a_compiled_model_are_the_plain_ones():
    model = nn.Sequential(nn.Linear(64, 64), torch.compile(nn.ReLU(), backend="aot_eager"), nn.Linear(64, 64))
    report = convert(model, sparsity=0.5)
    x = torch.randn(4, 64)
    with HolderProbe(model, x) as probe:
        model(x).sum()
    assert [(s.fqn, s.reason) for s in probe.apply(report)][1] == (
        "2",
        "its input is kept for backward by '1' (relu)",
    )


def test_the_compilers_own_stance_comes_back():
    model, _, x = converted()
    compiled = torch.compile(model, backend="eager")
    with torch.compiler.set_stance("fail_on_recompile"):
        first, second = HolderProbe(model), HolderProbe(model)
        first.__enter__()
        second.__enter__()
        compiled(x)
        first.close()
        compiled(x)
        second.close()
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            compiled(x)
    compiled(x)
