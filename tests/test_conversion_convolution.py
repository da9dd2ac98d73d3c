"""Conversion of convolutions: on request only, in a format of their own, and followed by every probe and meter."""

from __future__ import annotations

import copy
import pickle
import re
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_actprune import (
    ActivationMemoryMonitor,
    ActivationPruning,
    EnergyProbe,
    HolderProbe,
    LinearSchedule,
    RecomputationProbe,
    convert,
    revert,
)
from lightning_actprune.footprint import SavedTensorMeter
from lightning_actprune.nn import ActivationPrunedConv2d
from lightning_actprune.nn.settings import PrunedLayer
from tests.convolutions import laid_out
from tests.helpers import Net, trainer

ASKED = {"convolution": "int4", "activation": "int4"}


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


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    return torch.autograd.grad(module(x).square().mean(), list(module.parameters()))


def test_convolutions_are_left_unless_asked_for():
    report = convert(module := model(), min_features=0)
    assert [layer.fqn for layer in report.converted] == ["head"]
    assert report.left == {"convolution": 4, "activation": 2, "norm": 2}
    assert report.skipped == []
    assert not any(isinstance(m, ActivationPrunedConv2d) for m in module.modules())


def test_convolutions_are_pruned_with_the_main_settings_in_a_format_of_their_own():
    report = convert(module := model(), 0.5, 16, min_features=0, block_selection="swap", others={"convolution": "int8"})
    found = {layer.fqn: (layer.kind, layer.operator, layer.value_format) for layer in report.converted}
    names = ["stem", "block.conv1", "block.conv2", "block.shortcut"]
    assert found == dict.fromkeys(names, ("Conv2d", "convolution", "int8")) | {"head": ("Linear", "linear", "same")}
    assert report.left == {"activation": 2, "norm": 2}
    conv = module.block.conv1
    assert type(conv) is ActivationPrunedConv2d
    assert (conv.sparsity, conv.block_size, conv.block_selection, conv.scope) == (0.5, 16, "swap", "sample")
    made = next(layer for layer in report.converted if layer.fqn == "block.conv1")
    assert (made.in_features, made.out_features) == (16, 32)


def test_values_may_be_kept_as_they_are():
    convert(module := model(), 0.5, others={"convolution": "same"})
    assert module.block.conv1.value_format == "same"
    assert {m.value_format for m in convert(model(), 0.5, others=True).converted} == {"int4"}


def test_few_channels_are_no_reason_to_leave_a_convolution_dense():
    report = convert(model(), others={"convolution": "int4"})
    assert len(report.converted) == 4
    assert [layer.reason.split(" is ")[0] for layer in report.skipped] == ["in_features=32"]


class Own(nn.Conv2d):
    """A convolution with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_what_is_not_converted_is_listed_with_its_reason():
    layers = {
        "own": Own(3, 3, 1),
        "up": nn.ConvTranspose2d(3, 3, 1),
        "lazy": nn.LazyConv2d(3, 1),
        "circular": nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"),
        "even": nn.Conv1d(3, 3, 4, padding="same"),
        "out": nn.Conv3d(3, 3, 1),
        "built": ActivationPrunedConv2d(3, 3, 1, sparsity=0.5),
        "fine": nn.Conv1d(3, 3, 1),
    }
    report = convert(nn.ModuleDict(layers), exclude="out", others={"convolution": "int4"})
    reasons = {layer.fqn: layer.reason for layer in report.skipped}
    assert reasons["own"].endswith("Own, whose forward is not known to be torch's convolution's")
    assert reasons["up"] == "is a transposed convolution, whose input is kept as it is"
    assert reasons["lazy"].startswith("is not initialised yet")
    assert reasons["circular"] == "its padding is 'circular', of which torch keeps a padded copy"
    assert reasons["even"].startswith("its padding is 'same' with an even number of weights")
    assert reasons["out"] == "matches the `exclude` pattern 'out'"
    assert reasons["built"] == "was built as ActivationPrunedConv2d and keeps its own settings"
    assert [layer.fqn for layer in report.converted] == ["fine"]
    assert convert(nn.Sequential(nn.Linear(64, 64), *layers.values())).left == {"convolution": 1}  # the excluded one


def test_a_model_of_convolutions_alone_has_to_ask_for_them():
    with pytest.raises(ValueError, match="has no linear layers"):
        convert(nn.Sequential(nn.Conv2d(3, 3, 1)))
    with pytest.raises(ValueError, match="`include` pattern 'x' matches no convertible layer"):
        convert(nn.Sequential(nn.Conv2d(3, 3, 1)), include="x", others={"convolution": "int4"})
    with pytest.raises(ValueError, match="matches no linear layer"):
        convert(model(), include="block.*")


def test_reverting_leaves_nothing():
    module = model()
    plain, before = [type(m) for m in module.modules()], [m.__dict__.keys() for m in module.modules()]
    convert(module, others=ASKED)
    assert {"stem", "block.conv1", "block.shortcut"} <= set(revert(module))
    assert [type(m) for m in module.modules()] == plain
    assert [m.__dict__.keys() for m in module.modules()] == before


def test_another_owner_is_told():
    module = model()
    convert(module, others={"convolution": "int4"})
    with pytest.raises(ValueError, match=r"'stem' is already converted by .*HINT"):
        convert(module, others={"convolution": "int4"}, min_features=0)
    assert [layer.fqn for layer in convert(module, min_features=0).converted] == ["head"]


def test_copies_and_pickles_of_a_converted_model_work():
    module, x = model(), images()
    convert(module, 0.5, min_features=0, others=ASKED)
    right = gradients(module, x)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(copied.block.conv1) is ActivationPrunedConv2d
        for mine, first in zip(gradients(copied, x), right, strict=True):
            torch.testing.assert_close(mine, first)
        assert revert(copied)
        assert type(copied.block.conv1) is nn.Conv2d


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_what_is_accounted_is_what_is_kept(last, autocast):
    dense, x = model(), images(last=last)
    ours = copy.deepcopy(dense)
    convert(dense, 0.0, min_features=0, others={"activation": "int4"})
    convert(ours, 0.5, min_features=0, others=ASKED)
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
    # What the dense model keeps is what the pruned one says that it would.
    assert [row.fqn for row in reports[0].rows] == ["head"]
    assert reports[0].total_bytes == reports[1].dense_bytes + reports[1].other_bytes
    assert reports[1].saved_bytes == reports[0].total_bytes - reports[1].total_bytes


def test_convolutions_behind_a_relu_are_held_unless_that_keeps_one_bit():
    x = images()
    for others, held in (
        ({"convolution": "int4"}, ["stem", "block.conv1", "block.conv2", "block.shortcut"]),
        (ASKED, ["stem"]),
    ):
        module = model()
        report = convert(module, 0.5, exclude="head", others=others)
        with HolderProbe(module, x) as probe:
            module(x).sum()
        reasons = {layer.fqn: layer.reason for layer in probe.apply(report)}
        assert [*reasons] == held
        assert reasons["stem"] == "its input is part of the batch"
        if len(held) > 1:
            assert reasons["block.conv1"] == "its input is kept for backward by 'block.act1' (relu)"
        assert [type(module.get_submodule(name)) for name in held] == [nn.Conv2d] * len(held)


def test_a_convolution_that_is_not_pruned_holds_what_it_reads():
    module, x = model(), images()
    report = convert(module, 0.5, min_features=0, exclude="block.shortcut", others=ASKED)
    with HolderProbe(module, x) as probe:
        module(x).sum()
    assert {layer.fqn: layer.reason for layer in probe.apply(report)}["block.conv1"] == (
        "its input is kept for backward by 'block.shortcut' (conv2d)"
    )


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_energy_is_judged_by_the_blocks_that_are_dropped(last):
    module = nn.Sequential(nn.Conv2d(32, 8, 3))
    report = convert(module, 0.5, others={"convolution": "int4"})
    x = torch.ones(2, 32, 8, 8)
    x[:, :, :4] = 0  # half of the lines, whichever way blocks run
    with EnergyProbe(module, 0.2) as probe:
        module(laid_out(x, last)).sum()
    assert probe.shares == {"0": 0.0}
    with EnergyProbe(module, 0.2) as probe:
        module(laid_out(torch.ones_like(x), last)).sum()
    assert probe.shares == {"0": 0.5}
    assert probe.apply(report) == ["0"]
    assert (module[0].sparsity, module[0].value_format) == (0.0, "int4")


def test_convolutions_inside_a_checkpoint_are_found():
    module, x = model(), images()
    convert(module, 0.5, others=ASKED)
    with RecomputationProbe(module) as probe:
        y = checkpoint(module.block, module.stem(x), use_reentrant=False)
        y.sum().backward()
    assert probe.recomputed == ["block.conv1", "block.conv2", "block.shortcut"]


@pytest.mark.parametrize("wrong", ["int5", None])
def test_unknown_formats_are_refused(wrong):
    with pytest.raises(ValueError, match=r"`others\['convolution'\]` must be one of .*HINT"):
        convert(model(), others={"convolution": wrong})


def test_compiled_models_train_as_eager_ones():
    torch.compiler.reset()
    module, x = model(), images()
    convert(module, 0.5, min_features=0, others={"convolution": "int4"})
    eager = gradients(module, x)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for mine, right in zip(gradients(compiled, x), eager, strict=True):
        torch.testing.assert_close(mine, right)


class ConvNet(Net):
    """Convolutions, trained on images made of the vectors of ``Net``."""

    def make(self) -> None:
        if self.body is None:
            self.body, self.head = Block(16, 32), nn.Linear(32, 4)
            self.stem = nn.Conv2d(1, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x.unsqueeze(1))).mean((2, 3)))


def convolutions(model: nn.Module) -> dict[str, float | None]:
    """Return the sparsity of each convolution, ``None`` if it is dense."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    return {name: m.sparsity if isinstance(m, PrunedLayer) else None for name, m in layers.items()}


def test_the_callback_prunes_them_for_the_time_of_a_fit_on_a_schedule(caplog):
    caplog.set_level("INFO")
    net = ConvNet()
    net.watch = convolutions
    callback = ActivationPruning(schedule=LinearSchedule(0.5), total_steps=4, others=ASKED)
    monitor = ActivationMemoryMonitor(measure_batch=3)
    trainer(callback, monitor).fit(net)
    assert net.seen[0] == {"body.conv1": 0.0, "body.conv2": 0.0, "body.shortcut": 0.0, "stem": 0.0}
    assert 0.0 < net.seen[-1]["body.conv1"] < 0.5
    assert net.seen[-1]["stem"] is None  # reads the batch
    assert set(convolutions(net).values()) == {None}
    text = " ".join(caplog.text.split())
    assert "Activation pruning: 4 convolutions converted, 1 skipped." in text
    assert "1 layer stays dense" in text
    assert "Linear layers and convolutions" in text
    assert {row.fqn for row in monitor.report.rows} == {"body.conv1", "body.conv2", "body.shortcut", "head"}


def test_the_callback_says_that_there_are_more(caplog):
    caplog.set_level("INFO")
    trainer(ActivationPruning(0.5, min_features=0, skip_held=False)).fit(ConvNet())
    text = " ".join(caplog.text.split())
    left = re.search(r"Stored as it is: what (.*?) need \(others=True", text)
    assert sorted(re.split(", | and ", left[1])) == ["2 activation functions", "2 norms", "4 convolutions"]
