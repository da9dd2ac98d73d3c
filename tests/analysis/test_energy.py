"""Properties of the share of energy that dropped blocks hold, and of the probe that acts on it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_actprune.analysis.first_batch import EnergyProbe, dropped_energy
from lightning_actprune.codec.blocks import Blocks
from lightning_actprune.config import Keep
from lightning_actprune.convert import convert, revert
from lightning_actprune.operators.linear import ActivationPrunedLinear
from tests.support.packing import packed
from tests.support.retention import converted


def spread_and_concentrated() -> nn.Sequential:
    """Return a layer whose input has equal blocks (of ones) and one behind a ReLU of which most blocks are zero."""
    model = nn.Sequential(nn.Linear(64, 128), nn.Softplus(beta=50), nn.Linear(128, 8))
    with torch.no_grad():
        model[0].bias.copy_(torch.where(torch.arange(128) < 32, 3.0, -3.0))
    return model


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("shape", "scope"), [((5, 64), "sample"), ((3, 7, 50), "token"), ((64, 1), "sample"), ((2, 3, 4, 33), "sample")]
)
def test_energy_is_what_the_unpacked_input_lacks(shape, scope, transposed):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if transposed:
        x = x.transpose(-1, -2)
    kept = packed(x, 16, 0.4, scope).unpack()
    dropped, total = dropped_energy(x, 0.4, Blocks(16, scope)).tolist()
    torch.testing.assert_close(torch.tensor(total), x.square().sum())
    torch.testing.assert_close(torch.tensor(total - dropped), kept.square().sum())


def test_energy_is_summed_in_fp32_or_wider():
    x = torch.full((4, 4096), 0.01, dtype=torch.float16)
    exact = x.double().square().sum().item()
    assert dropped_energy(x, 0.5, Blocks(32, "sample"))[1].item() == pytest.approx(exact, rel=1e-5)
    wide = torch.randn(3, 64, dtype=torch.float64)
    torch.testing.assert_close(dropped_energy(wide, 0.5, Blocks(32, "sample"))[1], wide.square().sum())


@pytest.mark.parametrize("bits", [4, None])
def test_layers_with_spread_inputs_keep_all_blocks_or_are_dense_again_where_nothing_is_quantized(bits: int | None):
    model = spread_and_concentrated()
    report = convert(model, rules={"type:linear": Keep(bits=bits, sparsity=0.5), "*": None})
    with EnergyProbe(model, 0.2) as probe:
        model(torch.ones(4, 64)).sum().backward()
    assert probe.shares["0"] == 0.5
    assert probe.shares["2"] < 0.01
    assert probe.apply(report) == ["0"]
    kept = [("0", 0.0), ("2", 0.5)] if bits else [("2", 0.5)]
    assert [(layer.fqn, layer.sparsity) for layer in report.converted] == kept
    assert type(model[0]) is (ActivationPrunedLinear if bits else nn.Linear)
    assert model[2].sparsity == 0.5
    if bits:
        assert (model[0].sparsity, model[0].bits) == (0.0, 4)
    else:
        assert ["50%" in layer.reason for layer in report.skipped if layer.fqn == "0"] == [True]
    assert revert(model) == [name for name, _ in kept]


def test_shares_are_of_all_calls_and_the_sparsity_of_a_schedule_to_come_is_judged():
    model = nn.Sequential(nn.Linear(64, 64))
    report = converted(model, 0.0, block_size=32)
    with EnergyProbe(model, 0.2) as now, EnergyProbe(model, 0.2, sparsity=0.5) as later:
        model(torch.ones(1, 64))
        model(torch.cat([torch.full((1, 32), 1.5), torch.ones(1, 32)], 1))
    assert now.shares == {}
    assert later.shares["0"] == pytest.approx((32 + 32) / (64 + 32 * (1 + 1.5**2)))
    assert later.apply(report) == ["0"]


def test_inputs_without_a_share_and_layers_without_a_backward_are_not_judged():
    for value in (0.0, float("nan"), float("inf")):
        model = nn.Sequential(nn.Linear(64, 8))
        report = convert(model, sparsity=0.5, block_size=32)
        with EnergyProbe(model, 0.0) as probe:
            model(torch.full((2, 64), value))
        assert probe.apply(report) == []
        assert len(report.converted) == 1
    frozen = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), ActivationPrunedLinear(64, 8, sparsity=0.5))
    convert(frozen, sparsity=0.5, block_size=32)
    with EnergyProbe(frozen, 0.2) as probe:
        frozen(torch.ones(1, 64, requires_grad=True))
    assert probe.shares == {}


def test_attention_is_judged_by_the_input_of_its_projections():
    attention = nn.MultiheadAttention(64, 2, batch_first=True)
    report = convert(attention, sparsity=0.5, rules={"type:linear": Keep(bits=4, sparsity=0.5)})
    with EnergyProbe(attention, 0.2) as probe:
        attention(*[torch.ones(2, 5, 64)] * 3, need_weights=True)
    names = [layer.fqn for layer in report.converted]
    assert probe.shares[names[0]] == pytest.approx(0.5)
    assert names[0] in probe.apply(report)


@pytest.mark.parametrize("limit", [-0.1, 1.5, "0.2", True])
def test_limits_out_of_range(limit):
    with pytest.raises((ValueError, TypeError), match="`limit`"):
        EnergyProbe(nn.Linear(4, 4), limit)


def test_each_layer_has_a_limit_of_its_own():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    half, none = Keep(bits=4, sparsity=0.5, max_dropped_energy=0.4), Keep(bits=4, sparsity=0.5)
    report = convert(model, rules={"0": half, "1": none, "2": Keep(bits=4, sparsity=0.5, max_dropped_energy=0.6)})
    with EnergyProbe(model) as probe:
        for layer in model:
            layer(torch.ones(4, 64))
    assert probe.shares == {"0": 0.5, "1": 0.5, "2": 0.5}
    assert probe.apply(report) == ["0"]
    assert [layer.sparsity for layer in model] == [0.0, 0.5, 0.5]
