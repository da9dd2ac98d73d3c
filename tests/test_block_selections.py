"""Which blocks are kept, from the arguments of functions, layers, conversion and callback down to the operator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_actprune import (
    ActivationMemoryMonitor,
    ActivationPrunedLinear,
    ActivationPruning,
    HolderProbe,
    LinearSchedule,
    convert,
    functional,
)
from lightning_actprune.footprint import SavedTensorMeter
from lightning_actprune.ops import library
from tests.attention import BLOCK, SPARSITY, Case, saved_tensors
from tests.helpers import Net, assert_plain, trainer

each_selection = pytest.mark.parametrize("selection", ["largest", "swap", "unbiased"])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The selection of every call that packs in plain eager mode, in their order."""
    made, pack = [], library._pack.pack

    def recorded(*args):
        made.append(args[4])
        return pack(*args)

    monkeypatch.setattr(library._pack, "pack", recorded)
    return made


class AskedOfTheOperator(TorchDispatchMode):
    """Records the selection of every call of the operator; that it watches ends plain eager mode."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.actprune.pack.default:
            self.made.append(args[4] if len(args) > 4 else "largest")  # torch leaves defaults out
        return func(*args, **(kwargs or {}))


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8)
    )


def x() -> Tensor:
    return torch.randn(6, 10, 64, generator=torch.Generator().manual_seed(1))


@each_selection
def test_functions_and_layers_ask_for_it(selection: str, asked: list[str]):
    weight = torch.randn(8, 64, requires_grad=True)
    layer = ActivationPrunedLinear(64, 8, sparsity=0.5, block_selection=selection)
    assert layer.block_selection == selection
    functional.linear(x(), weight, sparsity=0.5, block_selection=selection)
    layer(x())
    assert asked == [selection] * 2
    with AskedOfTheOperator() as operator:
        functional.linear(x(), weight, sparsity=0.5, block_selection=selection)
        layer(x())
        functional.pack(x(), sparsity=0.5, block_selection=selection)
    assert operator.made == [selection] * 3


def test_the_largest_are_the_default(asked: list[str]):
    functional.linear(x(), torch.randn(8, 64, requires_grad=True), sparsity=0.5)
    ActivationPrunedLinear(64, 8, sparsity=0.5)(x())
    model = made()
    report = convert(model)
    model(x())
    assert asked == ["largest"] * 5
    assert {layer.block_selection for layer in report.converted} == {"largest"}
    assert ActivationPruning(0.6).block_selection == "largest"


def test_without_sparsity_nothing_is_selected(asked: list[str]):
    layer = ActivationPrunedLinear(64, 8, sparsity=0.0, block_selection="unbiased")
    assert not layer.packs
    layer(x())
    assert asked == []


@pytest.mark.parametrize("scope", ["sample", "token"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(("kind", "packs"), [("self", 2), ("cross", 3), ("three", 4), ("sizes", 4)])
def test_projections_of_attention_ask_for_it(kind: str, packs: int, batch_first: bool, scope: str, asked: list[str]):
    case = Case(kind, {"batch_first": batch_first})
    module = case.make()
    convert(module, SPARSITY, BLOCK, scope=scope, min_features=0, block_selection="swap")
    module(*case.tensors())[0].sum().backward()
    assert set(asked) == {"swap"}
    assert len(asked) == packs


def test_conv1d_asks_for_it(conv1d: type[nn.Module], asked: list[str]):
    layer = conv1d(48, 70)
    model = nn.Sequential(layer)
    convert(model, sparsity=0.5, block_selection="unbiased")
    model(torch.randn(3, 20, 70)).sum().backward()
    assert asked == ["unbiased"]
    assert "block_selection='unbiased'" in repr(layer)


@each_selection
def test_the_bytes_are_those_of_any_selection(selection: str):
    model = made()
    report = convert(model, sparsity=0.5, block_selection=selection)
    assert {layer.block_selection for layer in report.converted} == {selection}
    with SavedTensorMeter(model, x()) as meter:
        model(x()).sum().backward()
    measured = meter.report()
    assert measured.stored_bytes == sum(row.accounted_bytes for row in measured.rows)
    expected = [functional.pack(torch.empty(6, 10, n), sparsity=0.5).nbytes for n in (64, 128, 64)]
    assert [row.stored_bytes for row in measured.rows] == expected


def test_a_layer_that_is_dense_for_one_batch_has_its_selection_back(asked: list[str]):
    model = made()
    report = convert(model, sparsity=0.5, block_selection="swap")
    with HolderProbe(model, x()) as probe:
        model(x()).sum().backward()
    probe.apply(report)
    assert {m.block_selection for m in model.modules() if isinstance(m, ActivationPrunedLinear)} == {"swap"}
    assert set(asked) == {"swap"}


def test_consumers_of_one_tensor_share_only_equal_selections():
    given, weight = x(), torch.randn(8, 64, requires_grad=True)
    packs = []
    for selection in ("largest", "largest", "swap", "unbiased", "unbiased"):
        with saved_tensors() as saved:
            y = functional.linear(given, weight, sparsity=0.5, block_selection=selection)
        packs.append((y, {t.data_ptr() for t in saved if t.data_ptr() != weight.data_ptr()}))
    largest, again, swap, unbiased, unbiased_again = [own for _, own in packs]
    assert largest == again
    assert unbiased == unbiased_again
    assert not largest & swap
    assert not swap & unbiased
    assert not unbiased & largest


def graph_modules(counter: CompileCounterWithBackend) -> Iterator[torch.fx.GraphModule]:
    for graph in counter.graphs:
        yield from (module for module in graph.modules() if isinstance(module, torch.fx.GraphModule))


@each_selection
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "turned"])
def test_a_schedule_compiles_twice_without_graph_breaks(turned: bool, selection: str):
    given = torch.randn(3, 64, 40).transpose(1, 2) if turned else x()
    layer = ActivationPrunedLinear(64, 24, sparsity=0.1, block_size=16, block_selection=selection)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    given.requires_grad_()
    for sparsity in (0.1, 0.3, 0.5, 0.75):
        layer.sparsity = sparsity
        found, eager = [
            torch.autograd.grad(call(given).square().sum(), (given, *layer.parameters())) for call in (compiled, layer)
        ]
        torch.testing.assert_close(found, eager)
    assert counter.frame_count <= 2
    packs = [
        node.args[4]
        for module in graph_modules(counter)
        for node in module.graph.nodes
        if node.op == "call_function" and node.target in (torch.ops.actprune.pack, torch.ops.actprune.pack.default)
    ]
    assert packs == [selection] * counter.frame_count


def test_the_layer_shows_its_selection():
    assert "block_selection='swap'" in repr(ActivationPrunedLinear(64, 8, sparsity=0.5, block_selection="swap"))
    assert "block_selection" not in repr(ActivationPrunedLinear(64, 8, sparsity=0.5))


def test_a_fit_with_a_schedule(asked: list[str]):
    model, monitor = Net(), ActivationMemoryMonitor(verbose=False)
    callback = ActivationPruning(schedule=LinearSchedule(end=0.8), block_selection="unbiased")
    trainer(callback, monitor, max_epochs=2).fit(model)
    assert callback.state_dict()["block_selection"] == "unbiased"
    assert {layer.block_selection for layer in callback.converted} == set(asked) == {"unbiased"}
    report = monitor.report
    assert report.step.packed_bytes[report.step.forward_end] == report.stored_bytes
    assert_plain(model)


def test_wrong_arguments():
    message = r'`block_selection` must be "largest", "swap" or "unbiased", got \'random\'. HINT'
    with pytest.raises(MisconfigurationException, match=message):
        ActivationPruning(block_selection="random")
    for call in (
        lambda **settings: convert(made(), **settings),
        lambda **settings: ActivationPrunedLinear(64, 8, sparsity=0.5, **settings),
        lambda **settings: functional.linear(x(), torch.randn(8, 64), sparsity=0.5, **settings),
        lambda **settings: functional.pack(x(), sparsity=0.5, **settings),
    ):
        with pytest.raises(ValueError, match=message):
            call(block_selection="random")
