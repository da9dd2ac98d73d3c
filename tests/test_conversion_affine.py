"""Conversion of affine layers: on request only, in a format of their own, and followed by every probe and meter."""

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
    StepMemoryRecorder,
    convert,
    revert,
)
from lightning_actprune.footprint import SavedTensorMeter
from lightning_actprune.nn import ActivationPrunedAffine, Affine
from lightning_actprune.nn.settings import PrunedLayer
from tests.affine import TimmAffine, TimmLayerScale, TimmResBlock, scaling
from tests.helpers import Net, trainer

ASKED = scaling("int4") | {"activation": "int4"}
FEATURES, TOKENS = 96, 8


class Block(nn.Module):
    """A block of ResMLP: token mixing and channel mixing, with an affine before and a layer scale behind each."""

    def __init__(self, features: int = FEATURES, tokens: int = TOKENS) -> None:
        super().__init__()
        self.affine1, self.scale1 = Affine(features), Affine(features, bias=False, scale=0.5)
        self.token_mix = nn.Linear(tokens, tokens)
        self.affine2, self.scale2 = Affine(features), Affine(features, bias=False, scale=0.5)
        self.fc1, self.act, self.fc2 = nn.Linear(features, 64), nn.GELU(), nn.Linear(64, features)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale1(self.token_mix(self.affine1(x).transpose(1, 2)).transpose(1, 2))
        return x + self.scale2(self.fc2(self.act(self.fc1(self.affine2(x)))))


AFFINE = [f"block.{name}" for name in ("affine1", "scale1", "affine2", "scale2")]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(stem=nn.Linear(16, FEATURES), block=Block(), head=nn.Linear(FEATURES, 3)))


def tokens(batch: int = 4) -> Tensor:
    return torch.randn(batch, TOKENS, 16)


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    return torch.autograd.grad(module(x).square().mean(), list(module.parameters()))


def test_affine_layers_are_left_unless_asked_for():
    report = convert(module := model(), min_features=64)
    assert [layer.fqn for layer in report.converted] == ["block.fc1", "block.fc2", "head"]
    assert report.left == {"affine": 2, "scale": 2, "activation": 1}
    assert not any(isinstance(m, ActivationPrunedAffine) for m in module.modules())


def test_affine_layers_are_pruned_with_the_main_settings_in_a_format_of_their_own():
    report = convert(
        module := model(), 0.5, 16, scope="token", include="*a*", block_selection="swap", others=scaling("int8")
    )
    found = {layer.fqn: (layer.kind, layer.operator, layer.value_format) for layer in report.converted}
    shift = {name: ("Affine", "affine" if "affine" in name else "scale", "int8") for name in AFFINE}
    assert found == shift | {"head": ("Linear", "linear", "same")}
    assert report.few_bit == []
    layer = module.block.affine1
    assert type(layer) is ActivationPrunedAffine
    assert (layer.sparsity, layer.block_size, layer.block_selection, layer.scope) == (0.5, 16, "swap", "token")
    made = next(layer for layer in report.converted if layer.fqn == "block.affine1")
    assert (made.in_features, made.out_features) == (FEATURES, FEATURES)


def test_values_may_be_kept_as_they_are():
    convert(module := model(), 0.5, others=scaling("same"))
    assert module.block.affine1.value_format == "same"
    converted = convert(model(), 0.5, others=True).converted
    assert {layer.value_format for layer in converted if layer.operator in ("affine", "scale")} == {"int4"}
    # Bare factors have no blocks to drop: they are stored as all else is.
    convert(model(), 0.5, others=scaling("same") | {"rest": "int8"})


def test_few_features_are_no_reason_to_leave_an_affine_layer_dense():
    report = convert(nn.Sequential(Affine(5), Affine(33)), min_features=64, others=scaling("int4"))
    assert [(layer.fqn, layer.in_features) for layer in report.converted] == [("0", 5), ("1", 33)]


class Own(Affine):
    """An affine layer with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_what_is_not_converted_is_listed_with_its_reason():
    layers = {
        "own": Own(8),
        "out": Affine(8),
        "built": ActivationPrunedAffine(8, sparsity=0.5),
        "replaced": Affine(8),
        "block": TimmResBlock(70),
        "timm": TimmAffine(8),
        "scale": TimmLayerScale(8),
    }
    layers["replaced"].forward = torch.relu
    report = convert(nn.ModuleDict(layers), include="*", exclude="out", others=scaling("same"))
    reasons = {layer.fqn: layer.reason for layer in report.skipped}
    assert reasons["own"].endswith("Own, whose forward is not known to be an affine layer's")
    assert reasons["out"] == "matches the `exclude` pattern 'out'"
    assert reasons["built"] == "was built as ActivationPrunedAffine and keeps its own settings"
    assert reasons["replaced"].startswith("its forward was replaced on the instance")
    assert reasons["block"] == "drops no blocks, so that 'same' would store all of its input as it is"
    made = [(layer.fqn, layer.kind, layer.operator) for layer in report.converted if layer.operator != "linear"]
    assert made == [("timm", "Affine", "affine"), ("scale", "LayerScale", "scale")]


def test_a_model_of_affine_layers_alone_has_to_ask_for_them():
    with pytest.raises(ValueError, match="has no linear layers"):
        convert(nn.Sequential(Affine(8)))
    with pytest.raises(ValueError, match="`include` pattern 'x' matches no convertible layer"):
        convert(nn.Sequential(Affine(8)), include="x", others=scaling("int4"))


def test_reverting_leaves_nothing():
    module = model()
    plain, before = [type(m) for m in module.modules()], [m.__dict__.keys() for m in module.modules()]
    convert(module, others=ASKED)
    assert set(AFFINE) <= set(revert(module))
    assert [type(m) for m in module.modules()] == plain
    assert [m.__dict__.keys() for m in module.modules()] == before


def test_another_owner_is_told():
    module = model()
    convert(module, others=scaling("int4"))
    with pytest.raises(ValueError, match=r"'block.affine1' is already converted by .*HINT"):
        convert(module, include="*affine*", others=scaling("int4"))
    assert [layer.fqn for layer in convert(module, min_features=0, include="stem").converted] == ["stem"]


def test_copies_and_pickles_of_a_converted_model_work():
    module, x = model(), tokens()
    convert(module, 0.5, others=ASKED)
    right = gradients(module, x)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(copied.block.affine1) is ActivationPrunedAffine
        for mine, first in zip(gradients(copied, x), right, strict=True):
            torch.testing.assert_close(mine, first)
        assert revert(copied)
        assert type(copied.block.affine1) is Affine


def test_timms_own_layers_survive_a_pickle():
    mixer = pytest.importorskip("timm.models.mlp_mixer")
    scales = pytest.importorskip("timm.layers.layer_scale")
    module = nn.Sequential(mixer.Affine(16), scales.LayerScale(16))
    convert(module, 0.5, 8, others=scaling("int4"))
    copied = pickle.loads(pickle.dumps(module))
    assert [type(layer).__name__ for layer in copied] == ["PrunedAffine", "PrunedLayerScale"]
    assert [type(layer) for layer in copied] == [type(layer) for layer in module]
    x = torch.randn(2, 3, 16)
    for mine, first in zip(gradients(copied, x), gradients(module, x), strict=True):
        assert torch.equal(mine, first)
    revert(copied)
    assert [type(layer) for layer in copied] == [mixer.Affine, scales.LayerScale]


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize(
    ("sparsity", "value_format"), [(0.5, "same"), (0.5, "int4"), (0.0, "int8")], ids=["dropped", "both", "few bits"]
)
def test_what_is_accounted_is_what_is_kept(sparsity, value_format, autocast):
    dense, x = model(), tokens()
    ours = copy.deepcopy(dense)
    convert(dense, 0.0, min_features=0, others={"activation": "int4"})
    convert(ours, sparsity, 16, min_features=0, value_format="int4", others=ASKED | scaling(value_format))
    reports = []
    for module in (dense, ours):
        with SavedTensorMeter(module, x) as meter, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            module(x).sum()
        reports.append(meter.report())
    rows = {row.fqn: row for row in reports[1].rows}
    layers = ("affine1", "scale1", "token_mix", "affine2", "scale2", "fc1", "fc2")
    assert set(rows) == {"stem", *(f"block.{name}" for name in layers), "head"}
    for row in rows.values():
        assert row.stored_bytes == row.accounted_bytes
    # Behind an affine layer that keeps all of its input in more bits, a linear layer has it from there.
    assert {name for name in rows if not rows[name].stored_bytes} == (
        set() if sparsity else {"block.token_mix", "block.fc1"}
    )
    assert rows["block.scale1"].sparsity == sparsity
    # What the dense model keeps is what the pruned one says that it would.
    assert not set(AFFINE) & {row.fqn for row in reports[0].rows}
    assert reports[0].total_bytes == reports[1].dense_bytes + reports[1].other_bytes
    assert reports[1].saved_bytes == reports[0].total_bytes - reports[1].total_bytes


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
@pytest.mark.parametrize("turned", [False, True], ids=["contiguous", "transposed"])
def test_blocks_that_end_short_are_accounted_too(sparsity, turned):
    module = nn.Sequential(Affine(70), TimmLayerScale(70))
    convert(module, sparsity, others=scaling("int3"))
    x = torch.randn(3, 50, 70)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if turned else x
    with SavedTensorMeter(module) as meter:
        module(x).sum()
    for row in meter.report().rows:
        assert row.stored_bytes == row.accounted_bytes > 0


def test_layers_that_read_one_tensor_are_accounted_once():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.fc, self.other = Affine(64), nn.Linear(64, 64), Affine(64)

        def forward(self, x: Tensor) -> Tensor:
            x = 2 * x
            return self.scale(x) + self.fc(x) + self.other(x)

    module, x = Two(), torch.randn(4, 8, 64, requires_grad=True)
    report = convert(module, 0.5, value_format="int8", others=scaling("int8"))
    with SavedTensorMeter(module, x) as meter:
        module(x).sum()
    rows = {row.fqn: (row.stored_bytes, row.accounted_bytes) for row in meter.report().rows}
    assert rows["fc"] == rows["other"] == (0, 0)
    assert rows["scale"][0] == rows["scale"][1] > 0
    with HolderProbe(module, x) as probe:
        module(x).sum()
    assert probe.apply(report) == []


def test_a_step_is_recorded_with_what_affine_layers_keep():
    module, x = model(), tokens()
    convert(module, 0.5, others=ASKED)
    with SavedTensorMeter(module, x) as meter:
        module(x).sum()
    with StepMemoryRecorder(module, x) as recorder:
        module(x).sum().backward()
    step = recorder.result()
    assert max(step.activation_bytes) == meter.report().total_bytes
    assert {"block.affine1", "block.scale2"} <= {holder.fqn for held in step.holdings for holder in held.holders}


@pytest.mark.parametrize("value_format", ["same", "int4"])
@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_layers_whose_input_is_kept_anyway_stay_dense(sparsity, value_format):
    module = nn.Sequential(Affine(64), nn.ReLU(), Affine(64), nn.GELU(), Affine(64))
    report = convert(module, sparsity, others=scaling(value_format))
    x = torch.randn(4, 8, 64)
    with HolderProbe(module, x, sparsity=0.5) as probe:
        y = module(x).sum()
    reasons = {layer.fqn: layer.reason for layer in probe.apply(report)}
    assert reasons == {"0": "its input is part of the batch", "2": "its input is kept for backward by '1' (relu)"}
    assert [type(module[place]) for place in (0, 2, 4)] == [Affine, Affine, ActivationPrunedAffine]
    y.backward()


def test_energy_is_judged_by_the_blocks_that_are_dropped():
    module = nn.Sequential(Affine(64))
    report = convert(module, 0.5, others=scaling("int4"))
    x = torch.ones(2, 8, 64)
    x[..., :32] = 0
    with EnergyProbe(module, 0.2) as probe:
        module(x).sum()
    assert probe.shares == {"0": 0.0}
    with EnergyProbe(module, 0.2) as probe:
        module(torch.ones_like(x)).sum()
    assert probe.shares == {"0": 0.5}
    assert probe.apply(report) == ["0"]
    assert (module[0].sparsity, module[0].value_format) == (0.0, "int4")
    assert report.converted[0].sparsity == 0.0


def test_layers_of_spread_energy_without_few_bits_are_dense_again():
    module = nn.Sequential(Affine(64))
    report = convert(module, 0.5, others=scaling("same"))
    with EnergyProbe(module, 0.2) as probe:
        module(torch.ones(2, 8, 64)).sum()
    assert probe.apply(report) == ["0"]
    assert type(module[0]) is Affine
    assert report.skipped[0].reason == "the blocks that would be dropped hold 50% of its input's energy"


def test_affine_layers_inside_a_checkpoint_are_found():
    module, x = model(), tokens()
    convert(module, 0.5, include=AFFINE, others=ASKED)
    with RecomputationProbe(module) as probe:
        checkpoint(module.block, module.stem(x), use_reentrant=False).sum().backward()
    assert probe.recomputed == AFFINE


def test_compiled_models_train_as_eager_ones():
    torch.compiler.reset()
    module, x = model(), tokens()
    convert(module, 0.5, min_features=0, others=scaling("int4"))
    eager = gradients(module, x)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for mine, right in zip(gradients(compiled, x), eager, strict=True):
        torch.testing.assert_close(mine, right)


class MixerNet(Net):
    """Affine layers, trained on the sequences of ``Net``."""

    def make(self) -> None:
        if self.body is None:
            self.stem, self.body, self.head = nn.Linear(64, 64), Block(64, 8), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean(1))


def affine_layers(model: nn.Module) -> dict[str, float | None]:
    """Return the sparsity of each affine layer, ``None`` if it is dense."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Affine)}
    return {name: m.sparsity if isinstance(m, PrunedLayer) else None for name, m in layers.items()}


def test_the_callback_prunes_them_for_the_time_of_a_fit_on_a_schedule(caplog):
    caplog.set_level("INFO")
    net = MixerNet()
    net.watch = affine_layers
    callback = ActivationPruning(schedule=LinearSchedule(0.5), total_steps=4, others=ASKED, skip_held=False)
    monitor = ActivationMemoryMonitor(measure_batch=3)
    trainer(callback, monitor).fit(net)
    names = {f"body.{name}" for name in ("affine1", "scale1", "affine2", "scale2")}
    assert net.seen[0] == dict.fromkeys(names, 0.0)
    assert all(0.0 < sparsity < 0.5 for sparsity in net.seen[-1].values())
    assert set(affine_layers(net).values()) == {None}
    text = " ".join(caplog.text.split())
    assert "2 affine layers and 2 layer scales converted" in text
    assert "and affine layers" in text
    assert names <= {row.fqn for row in monitor.report.rows}


@pytest.mark.parametrize(("preset", "sparsity"), [("paper", 0.6), ("balanced", 0.0)])
def test_presets_drop_blocks_in_them_as_in_linear_layers(preset, sparsity):
    net = MixerNet()
    net.watch = affine_layers
    trainer(ActivationPruning(preset=preset, others=True, skip_held=False, verbose=False)).fit(net)
    assert set(net.seen[-1].values()) == {sparsity}


def test_the_callback_says_that_there_are_more(caplog):
    caplog.set_level("INFO")
    trainer(ActivationPruning(0.5, min_features=0, skip_held=False)).fit(MixerNet())
    text = " ".join(caplog.text.split())
    left = re.search(r"Stored as it is: what (.*?) need \(others=True", text)
    assert sorted(re.split(", | and ", left[1])) == ["1 activation function", "2 affine layers", "2 layer scales"]
