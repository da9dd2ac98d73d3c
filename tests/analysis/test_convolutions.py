"""Meters and probes of convolutions: what is accounted, retained, dropped and run again."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_actprune.analysis.first_batch import EnergyProbe, RecomputationProbe, RetentionProbe
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.config import Keep
from lightning_actprune.convert import convert
from tests.support.convolutions import laid_out

FOUR = Keep(bits=4)
HALF = Keep(bits=4, sparsity=0.5)
RULES = {"type:convolution": HALF, "type:linear": Keep(sparsity=0.5), "type:activation": FOUR, "*": None}


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


def images(batch: int = 4, last: bool = True) -> Tensor:
    return laid_out(torch.randn(batch, 3, 16, 16), last)


@pytest.mark.parametrize(("last", "autocast"), [(False, True), (True, False)])
def test_what_is_accounted_is_what_is_kept(last, autocast):
    dense, x = model(), images(last=last)
    ours = copy.deepcopy(dense)
    convert(ours, rules=RULES)
    reports = []
    for module in (dense, ours):
        with SavedTensorMeter(module, x) as meter, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            module(x).sum()
        reports.append(meter.report())
    rows = {row.fqn: row for row in reports[1].rows}
    assert [*rows] == ["stem", "block.conv1", "block.conv2", "block.shortcut", "head"]
    assert rows["block.shortcut"].stored_bytes == 0  # shares what conv1 has packed
    for row in rows.values():
        assert row.stored_bytes == row.accounted_bytes
    assert rows["block.conv1"].sparsity == 0.5
    # What the dense model keeps is what the compressed one says that it would.
    assert [row.fqn for row in reports[0].rows] == ["head"]
    assert reports[0].stored_bytes == reports[1].dense_bytes
    assert reports[1].saved_bytes == reports[0].stored_bytes - reports[1].stored_bytes


def test_convolutions_behind_a_relu_are_retained_unless_that_keeps_one_bit():
    x = images()
    for activation, names in (
        (None, ["stem", "block.conv1", "block.conv2", "block.shortcut"]),
        (FOUR, ["stem"]),
    ):
        module = model()
        report = convert(module, rules={"type:convolution": HALF, "type:activation": activation, "*": None})
        with RetentionProbe(module, x) as probe:
            module(x).sum()
        reasons = {layer.fqn: layer.reason for layer in probe.apply(report)}
        assert [*reasons] == names
        assert reasons["stem"] == "its input is part of the batch"
        if len(names) > 1:
            assert reasons["block.conv1"] == "its input is kept for backward by 'block.act1' (relu)"
        assert [type(module.get_submodule(name)) for name in names] == [nn.Conv2d] * len(names)


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


def test_convolutions_inside_a_checkpoint_are_found():
    module, x = model(), images()
    convert(module, rules=RULES)
    with RecomputationProbe(module) as probe:
        y = checkpoint(module.block, module.stem(x), use_reentrant=False)
        y.sum().backward()
    assert probe.recomputed == ["block.conv1", "block.conv2", "block.shortcut"]
