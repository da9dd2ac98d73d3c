"""What dropped blocks leave behind, from the arguments of conversion and callback to reports: bytes and probes."""

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
    functional,
    revert,
)
from lightning_actprune.callbacks import display
from lightning_actprune.footprint import SavedTensorMeter
from lightning_actprune.step_recorder import StepMemoryRecorder
from tests import oracle
from tests.attention import BLOCK, SPARSITY, Case, pruned_copy
from tests.helpers import Net, assert_plain, trainer


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8)
    )


def x() -> torch.Tensor:
    return torch.randn(6, 10, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("value_format", ["same", "int4"])
@pytest.mark.parametrize("sparsity", [0.0, 0.5])
@pytest.mark.parametrize("autocast", [False, True])
def test_reports_are_exact(value_format: str, sparsity: float, autocast: bool):
    totals = []
    for convert_it in (False, True):
        model = made()
        if convert_it:
            report = convert(model, sparsity=sparsity, value_format=value_format, remainder="mean")
            assert {layer.remainder for layer in report.converted} == {"mean"}
        with SavedTensorMeter(model, x()) as meter, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x()).sum()
        totals.append(meter.report())
        loss.backward()
    dense, pruned = totals
    assert dense.total_bytes - pruned.total_bytes == pruned.saved_bytes
    assert pruned.stored_bytes == sum(row.accounted_bytes for row in pruned.rows)
    with StepMemoryRecorder(model, x()) as recorder, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x()).sum()
    packs = sparsity > 0 or value_format != "same"
    assert recorder.result().packed_bytes[-1] == (pruned.stored_bytes if packs else 0)


@pytest.mark.parametrize("scope", ["sample", "token"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", ["self", "cross", "sizes"])
def test_projections_of_attention_keep_means_too(kind: str, batch_first: bool, scope: str):
    case = Case(kind, {"batch_first": batch_first})
    dense, inputs = case.make(), case.tensors()
    pruned = copy.deepcopy(dense)
    convert(pruned, SPARSITY, BLOCK, scope=scope, min_features=0, remainder="mean")
    zero = pruned_copy(dense, scope=scope)
    reports = []
    for module in (dense, zero, pruned):
        with SavedTensorMeter(module) as meter:
            output, _ = module(*inputs)
        output.square().sum().backward()
        reports.append(meter.report())
    plain, zeros, means = reports
    for row in means.rows:
        assert row.accounted_bytes == row.stored_bytes
    widths = {"self": 72, "cross": 2 * 72, "sizes": 72 + 40 + 24}[kind]
    assert means.stored_bytes - zeros.stored_bytes == 4 * (widths + 72)
    assert means.dense_bytes + means.other_bytes == plain.total_bytes
    for name, parameter in pruned.named_parameters():
        exact, expected = dense.get_parameter(name).grad, zero.get_parameter(name).grad
        if name.endswith("weight"):
            assert not torch.equal(parameter.grad, expected)
            assert oracle.relative_error(parameter.grad, exact) < 1
        else:
            torch.testing.assert_close(parameter.grad, exact)


@pytest.mark.parametrize("bias", [True, False])
def test_conv1d(conv1d: type[nn.Module], bias: bool):
    layer, given = conv1d(48, 70), 2 + torch.randn(3, 20, 70)
    layer.bias.requires_grad_(bias)
    model = nn.Sequential(layer)
    convert(model, sparsity=0.5, block_size=16, remainder="mean")
    assert "remainder='mean'" in repr(layer)
    grad_y = torch.randn(3, 20, 48)
    layer(given).backward(grad_y)
    hat = functional.pack(given, sparsity=0.5, block_size=16, remainder="mean").unpack()
    exact = hat.double().reshape(-1, 70).t() @ grad_y.double().reshape(-1, 48)
    assert oracle.relative_error(layer.weight.grad, exact) < 1e-6


def test_a_held_input_counts_the_mean():
    # Of one row, half of the values and their positions take less than the row, with its mean more.
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 8))
    for remainder, pruned in (("zero", 1), ("mean", 0)):
        report = convert(model, sparsity=0.5, block_size=16, remainder=remainder)
        with HolderProbe(model) as probe:
            model(torch.randn(1, 64, requires_grad=True)).sum().backward()
        probe.apply(report)
        assert len(report.converted) == pruned
        revert(model)


def test_the_layer_shows_its_remainder():
    layer = ActivationPrunedLinear(64, 8, sparsity=0.5, remainder="mean")
    assert layer.remainder == "mean"
    assert "remainder='mean'" in repr(layer)
    assert "remainder" not in repr(ActivationPrunedLinear(64, 8, sparsity=0.5))
    assert not ActivationPrunedLinear(64, 8, sparsity=0.0, remainder="mean").packs


def test_copies_pickles_and_reverting():
    model = made()
    convert(model, sparsity=0.5, remainder="mean")
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert other[1].remainder == "mean"
        assert torch.equal(other(x()), model(x()))
    revert(model)
    assert type(model[1]) is nn.Linear


def test_a_fit_with_a_schedule():
    model, monitor = Net(), ActivationMemoryMonitor(verbose=False)
    callback = ActivationPruning(schedule=LinearSchedule(end=0.8), remainder="mean")
    trainer(callback, monitor, max_epochs=2).fit(model)
    assert callback.state_dict()["remainder"] == "mean"
    assert {layer.remainder for layer in callback.converted} == {"mean"}
    report = monitor.report
    assert report.step.packed_bytes[report.step.forward_end] == report.stored_bytes
    assert report.stored_bytes == sum(row.accounted_bytes for row in report.rows)
    assert_plain(model)


def test_the_expected_saving_counts_the_mean():
    savings = []
    for remainder in ("zero", "mean"):
        report = convert(made(), sparsity=0.5, remainder=remainder)
        savings.append([display._expected_saving(layer, 0.5, 2) for layer in report.converted])
    assert [zero - mean for zero, mean in zip(*savings, strict=True)] == pytest.approx([4 / (4096 * 2)] * 3)


def test_wrong_arguments():
    message = r'`remainder` must be "zero" or "mean", got \'median\'. HINT'
    with pytest.raises(MisconfigurationException, match=message):
        ActivationPruning(remainder="median")
    with pytest.raises(ValueError, match=message):
        convert(made(), remainder="median")
    with pytest.raises(ValueError, match=message):
        ActivationPrunedLinear(64, 8, sparsity=0.5, remainder="median")
