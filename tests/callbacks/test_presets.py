"""ActivationPruning(preset=...): what a name stands for, and what explicit arguments do to it."""

from dataclasses import replace

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_actprune import ActivationPruning, ConstantSchedule
from lightning_actprune.ops.geometry import BlockGeometry
from lightning_actprune.presets import PRESETS, Preset
from tests.helpers import Net, sparsities, trainer


def settings(callback):
    return Preset(
        callback.sparsity,
        callback.block_size,
        callback.value_format,
        callback.block_selection,
        callback.max_dropped_energy,
    )


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_settings(name):
    assert settings(ActivationPruning(preset=name)) == replace(PRESETS[name], others=Preset().others)
    callback = ActivationPruning(preset=name, others=True)
    assert callback.others is True
    assert callback.state_dict()["others"] == PRESETS[name].others
    assert ActivationPruning(preset=name, others={"norm": "int8"}).state_dict()["others"] == {"norm": "int8"}


def test_without_a_name_it_is_balanced_or_with_a_sparsity_the_paper():
    assert settings(ActivationPruning()) == PRESETS["balanced"]
    assert settings(ActivationPruning(include="head")) == PRESETS["balanced"]
    assert settings(ActivationPruning(0.6, 32)) == settings(ActivationPruning(sparsity=0.6)) == PRESETS["paper"]
    scheduled = ActivationPruning(schedule=ConstantSchedule(0.3))
    assert (scheduled.value_format, scheduled.max_dropped_energy) == ("same", 1.0)


def test_explicit_arguments_override():
    callback = ActivationPruning(preset="max", block_size=64, value_format="int4", max_dropped_energy=1.0)
    assert settings(callback) == Preset(0.5, 64, "int4", "largest", 1.0)
    assert settings(ActivationPruning(preset="paper", sparsity=0.0)).sparsity == 0
    assert settings(ActivationPruning(value_format="int2")) == Preset(0.0, 32, "int2")


@pytest.mark.parametrize(
    ("name", "sparsity", "bits"), [("paper", 0.6, 6.5), ("balanced", 0.0, 4.5), ("max", 0.5, 1.3), ("max", 0.0, 2.5)]
)
def test_bits_per_value_are_those_of_the_documentation(name, sparsity, bits):
    geometry = BlockGeometry.of(8, 64, 384, PRESETS[name].block_size, sparsity)
    stored = geometry.stored_bytes(2, PRESETS[name].value_format)
    assert 16 * stored / geometry.dense_bytes(2) == pytest.approx(bits, abs=0.05)


def test_unknown_names_are_refused():
    with pytest.raises(MisconfigurationException, match=r"`preset` must be one of 'paper', 'balanced', 'max'.*'best'"):
        ActivationPruning(preset="best")


@pytest.mark.parametrize(("name", "expected"), [("paper", 0.6), ("balanced", 0.0)])
def test_layers_get_what_the_preset_says(name, expected):
    model = Net()
    model.watch = sparsities
    trainer(ActivationPruning(preset=name)).fit(model)
    assert all(set(seen) == {expected} for seen in model.seen)


def test_few_bits_and_double_precision_do_not_go_together():
    with pytest.raises(MisconfigurationException, match=r"(?s)64-true.*value_format='int4'.*HINT"):
        trainer(ActivationPruning(preset="balanced"), precision="64-true").fit(Net())
    trainer(ActivationPruning(preset="paper"), precision="64-true").fit(Net())
