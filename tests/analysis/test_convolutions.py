"""Meters and probes of convolutions: what is accounted, retained, dropped and run again."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune.analysis.first_batch import EnergyProbe, RetentionProbe
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.config import Keep
from lightning_actprune.convert import convert
from tests.support.convolutions import laid_out

FOUR = Keep(bits=4)
HALF = Keep(bits=4, sparsity=0.5)
RULES = {"type:convolution": HALF, "type:linear": Keep(sparsity=0.5), "type:activation": FOUR, "*": None}
READS = {"conv1": 1, "conv2": 2, "shortcut": 1}


class Block(nn.Module):
    """A residual block whose first convolution and shortcut read one tensor."""

    def __init__(self, inputs: int = 16, outputs: int = 32) -> None:
        super().__init__()
        self.norm1, self.act1 = nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.norm2, self.act2 = nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.norm1(x))
        return self.conv2(self.act2(self.norm2(self.conv1(x)))) + self.shortcut(x)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    stem = nn.Conv2d(3, 16, 3, padding=1)
    return nn.Sequential(
        OrderedDict(stem=stem, block=Block(), pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), head=nn.Linear(32, 3))
    )


def images(last: bool = True) -> Tensor:
    return laid_out(torch.randn(4, 3, 16, 16), last)


@pytest.mark.parametrize(("last", "autocast"), [(False, True), (True, False)])
def test_what_is_accounted_is_what_is_kept(last, autocast):
    module, x, reports = model(), images(last=last), []
    for rules in ({"*": None}, RULES):
        convert(module, rules=rules)
        with SavedTensorMeter(module, x) as meter, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            module(x).sum()
        reports.append(meter.report())
    rows = {row.fqn: row for row in reports[1].rows}
    assert [*rows] == ["stem", "block.conv1", "block.conv2", "block.shortcut", "head"]
    assert rows["block.shortcut"].stored_bytes == 0  # shares what conv1 has packed
    assert all(row.stored_bytes == row.accounted_bytes for row in rows.values())
    assert rows["block.conv1"].sparsity == 0.5
    # What the dense model keeps is what the compressed one says that it would.
    assert [row.fqn for row in reports[0].rows] == ["head"]
    assert reports[0].stored_bytes == reports[1].dense_bytes
    assert reports[1].saved_bytes == reports[0].stored_bytes - reports[1].stored_bytes


@pytest.mark.parametrize("activation", [None, FOUR])
def test_convolutions_behind_a_relu_are_retained_unless_that_keeps_one_bit(activation):
    module, x = model(), images()
    report = convert(module, rules={"type:convolution": HALF, "type:activation": activation, "*": None})
    with RetentionProbe(module, x) as probe:
        module(x).sum()
    reasons = {layer.fqn: layer.reason for layer in probe.apply(report)}
    by_relu = "its input is kept for backward by 'block.act{}' (relu)"
    assert reasons == {"stem": "its input is part of the batch"} | (
        {} if activation else {f"block.{name}": by_relu.format(n) for name, n in READS.items()}
    )
    assert {type(module.get_submodule(name)) for name in reasons} == {nn.Conv2d}


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_energy_is_judged_by_the_blocks_that_are_dropped(last):
    module = nn.Sequential(nn.Conv2d(32, 8, 3))
    report = convert(module, rules={"type:convolution": HALF})
    x = torch.ones(2, 32, 8, 8)
    x[:, :, :4] = 0  # half of the rows, whichever way blocks run
    with EnergyProbe(module, 0.2) as probe:
        module(laid_out(x, last)).sum()
    assert probe.shares == {"0": 0.0}
    with EnergyProbe(module, 0.2) as probe:
        module(laid_out(torch.ones_like(x), last)).sum()
    assert probe.shares == {"0": 0.5}
    assert probe.apply(report) == ["0"]
    assert (module[0].sparsity, module[0].bits) == (0.0, 4)
