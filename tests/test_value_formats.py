"""Value formats from the arguments of conversion and callback to reports: bytes, probes, checkpoints, YAML."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_actprune import (
    ActivationMemoryMonitor,
    ActivationPrunedLinear,
    ActivationPruning,
    HolderProbe,
    LinearSchedule,
    convert,
    revert,
)
from lightning_actprune.footprint import SavedTensorMeter
from lightning_actprune.step_recorder import StepMemoryRecorder
from tests.helpers import Net, assert_plain, trainer


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8)
    )


def x() -> torch.Tensor:
    return torch.randn(6, 10, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("value_format", ["fp8", "int8", "int4", "int3", "int2"])
@pytest.mark.parametrize("sparsity", [0.0, 0.5])
@pytest.mark.parametrize("autocast", [False, True])
def test_reports_are_exact(value_format: str, sparsity: float, autocast: bool):
    totals = []
    for convert_it in (False, True):
        model = made()
        if convert_it:
            report = convert(model, sparsity=sparsity, value_format=value_format)
            assert {layer.value_format for layer in report.converted} == {value_format}
        with SavedTensorMeter(model, x()) as meter, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x()).sum()
        totals.append(meter.report())
        loss.backward()
    dense, pruned = totals
    assert dense.total_bytes - pruned.total_bytes == pruned.saved_bytes
    assert pruned.stored_bytes == sum(row.accounted_bytes for row in pruned.rows)
    with StepMemoryRecorder(model, x()) as recorder, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x()).sum()
    assert recorder.result().packed_bytes[-1] == pruned.stored_bytes


def test_a_held_input_is_found_at_sparsity_0():
    model = made()
    report = convert(model, sparsity=0.0, value_format="int4")
    with HolderProbe(model, x()) as probe:
        model(x()).sum().backward()
    assert [(layer.fqn, layer.reason) for layer in probe.apply(report)] == [
        ("5", "its input is kept for backward by '4' (relu)")
    ]
    assert [layer.value_format for layer in model.modules() if isinstance(layer, ActivationPrunedLinear)] == [
        "int4"
    ] * 2


def test_the_layer_is_dense_without_sparsity_and_format():
    layer = ActivationPrunedLinear(64, 8, sparsity=0.0)
    assert not layer.packs
    quantised = ActivationPrunedLinear(64, 8, sparsity=0.0, value_format="int8")
    assert quantised.packs
    assert "value_format='int8'" in repr(quantised)
    assert "value_format" not in repr(layer)
    with pytest.raises(ValueError, match=r"`block_size` must be at least 8"):
        ActivationPrunedLinear(64, 8, sparsity=0.0, block_size=2, value_format="int8")


@pytest.mark.parametrize(("name", "value"), [("value_format", "int2"), ("block_selection", "unbiased")])
def test_copies_pickles_and_reverting(name: str, value: str):
    model = made()
    convert(model, sparsity=0.5, **{name: value})
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert getattr(other[1], name) == value
        assert torch.equal(other(x()), model(x()))
    revert(model)
    assert type(model[1]) is nn.Linear


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_a_fit(sparsity: float):
    model, monitor = Net(), ActivationMemoryMonitor(verbose=False)
    callback = ActivationPruning(sparsity=sparsity, value_format="int4")
    trainer(callback, monitor).fit(model)
    assert callback.state_dict()["value_format"] == "int4"
    assert len(callback.converted) == 3
    report = monitor.report
    assert report.saved_fraction == pytest.approx(1 - (1 - sparsity) * 4.5 / 32, abs=0.01)
    assert report.step.packed_bytes[report.step.forward_end] == report.stored_bytes
    assert_plain(model)


def test_a_fit_with_a_schedule_and_held_layers():
    class Held(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.relu(self.body(x))).mean(1)

    model = Held()
    callback = ActivationPruning(schedule=LinearSchedule(end=0.8), value_format="int4")
    trainer(callback).fit(model)
    # The first layer reads the batch itself.
    assert [layer.fqn for layer in callback.converted] == ["body.2"]
    assert_plain(model)


def test_the_same_training_twice_gives_the_same_weights():
    weights = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Net(lr=0.5)
        trainer(ActivationPruning(sparsity=0.3, value_format="int2", verbose=False)).fit(model)
        weights.append([p.clone() for p in model.parameters()])
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_wrong_arguments():
    with pytest.raises(MisconfigurationException, match=r"`value_format` must be one of .*, got 'int1'. HINT"):
        ActivationPruning(value_format="int1")
    with pytest.raises(MisconfigurationException, match=r"`block_size` must be at least 8 with value_format='int4'"):
        ActivationPruning(block_size=4, value_format="int4")
    with pytest.raises(ValueError, match=r"`value_format` must be one of"):
        convert(made(), value_format=None)
