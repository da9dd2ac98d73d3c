"""How a tensor is kept: what ``Keep`` takes, what presets say, and which rule counts."""

from __future__ import annotations

import copy
import dataclasses
import doctest
import pickle

import numpy as np
import pytest
from torch import nn

from lightning_actprune import config, schedules
from lightning_actprune.config import PRESETS, Config, Keep
from lightning_actprune.convert import convert
from lightning_actprune.schedules import CubicSchedule
from tests.support.conversion_models import mlp

WRONG_KEEPS = [
    ({"bits": 5}, ValueError, "`bits` must be .*5"),
    ({"bits": "int4"}, (TypeError, ValueError), "`bits` must be .*'int4'"),
    ({"bits": True}, (TypeError, ValueError), "`bits` must be .*True"),
    ({"sparsity": 1}, ValueError, r"`sparsity` must be in \[0, 1\), got 1"),
    ({"sparsity": "0.5"}, TypeError, "`sparsity` must be .*'0.5'"),
    ({"sparsity": np.array([0.5])}, TypeError, "`sparsity` must be "),
    ({"block_size": 0}, ValueError, "`block_size` must be a positive int, got 0"),
    ({"block_size": 2.5}, TypeError, "`block_size` must be a positive int, got 2.5"),
    ({"bits": 4, "block_size": 4}, ValueError, "`block_size` must be at least 8 .*got 4"),
    ({"topk_over": "batch"}, ValueError, '`topk_over` must be "sample" or "token", got \'batch\''),
    ({"selection": "random"}, ValueError, "`selection` must be .*'random'"),
    ({"max_dropped_energy": 2.0}, ValueError, "`max_dropped_energy` must be .*2.0"),
    *(
        ({"min_rows_for_low_bits": rows}, (TypeError, ValueError), f"`min_rows_for_low_bits` .*{rows}")
        for rows in (1.5, -1, True, "many")
    ),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG_KEEPS, ids=[str(case[0]) for case in WRONG_KEEPS])
def test_wrong_settings_are_named_with_their_value(arguments, error, message):
    with pytest.raises(error, match=message) as caught:
        Keep(**arguments)
    assert "HINT" in str(caught.value)


def test_settings_are_plain_values():
    keep = Keep(bits=np.int64(4), sparsity=np.float32(0.5), block_size=np.uint8(16))
    assert keep == Keep(bits=4, sparsity=0.5, block_size=16)
    assert [type(value) for value in (keep.bits, keep.sparsity, keep.block_size)] == [int, float, int]
    keep = Keep(bits=4, sparsity=CubicSchedule(end=0.8))
    assert pickle.loads(pickle.dumps(keep)) == keep == dataclasses.replace(keep)
    assert hash(keep) == hash(dataclasses.replace(keep))
    assert (Keep().stored_bits, keep.stored_bits) == (0, 4)
    changed = dataclasses.replace(Keep(bits=4), block_size=64)
    assert (
        changed == copy.deepcopy(changed) == Keep(4, block_size=64) != Keep(4, block_size=64, min_rows_for_low_bits=0)
    )


def test_the_first_rule_that_matches_counts_and_then_the_preset():
    own = Keep(bits=2)
    settings = Config("balanced", rules={"head": None, "blocks.*.fc1": own, "type:norm": Keep(bits=8), "*.q": own})
    balanced = PRESETS["balanced"]
    assert settings.keep_of(["head"], "linear") is None
    assert settings.keep_of(["blocks.0.fc1"], "linear") == Keep(bits=2, min_rows_for_low_bits=1024)
    assert settings.keep_of(["blocks.0.norm"], "norm") == Keep(bits=8)
    assert settings.keep_of(["blocks.0.fc2"], "linear") == balanced["linear"]
    assert settings.keep_of(["other", "block.q"], "linear").bits == 2  # a layer may have several names


def test_what_a_rule_does_not_name_is_as_the_preset_says():
    rules = {
        "a": {"bits": 4},
        "b": Keep(min_rows_for_low_bits=0),
        "c": Keep(bits=None, block_size=4),
        "d": Keep(block_size=4),
    }
    settings = Config("max", 0.5, rules=rules)
    assert settings.keep_of(["a"], "linear") == Keep(4, 0.5, max_dropped_energy=0.2, min_rows_for_low_bits=1024)
    assert settings.keep_of(["b"], "linear") == Keep(2, 0.5, max_dropped_energy=0.2, min_rows_for_low_bits=0)
    assert settings.keep_of(["c"], "norm").bits is None
    assert Config("paper", rules=rules).keep_of(["a"], "norm") == Keep(bits=4)
    with pytest.raises(ValueError, match=r"`rules\['d'\]` for 'norm': `block_size` .*bits=4, got 4.*HINT"):
        settings.keep_of(["d"], "norm")


def test_a_sparsity_without_a_preset_is_the_method_of_the_paper():
    settings = Config(sparsity=0.7)
    assert settings.keep_of(["fc"], "linear").sparsity == 0.7
    assert settings.keep_of(["fc"], "linear").bits is None
    assert settings.keep_of(["norm"], "norm") is None
    assert Config(sparsity=0.7, block_size=16).keep_of(["fc"], "linear").block_size == 16
    assert Config().keep_of(["fc"], "linear") == PRESETS["balanced"]["linear"]


WRONG = [
    ({"preset": "most"}, ValueError, "`preset` must be .*'most'.*HINT"),
    ({"sparsity": 1}, ValueError, r"`sparsity` must be in \[0, 1\), got 1.*HINT"),
    ({"sparsity": np.bool_(True)}, TypeError, "`sparsity` must be .*HINT"),
    ({"block_size": 0, "sparsity": 0.5}, ValueError, "`block_size` must be a positive int, got 0.*HINT"),
    ({"rules": 0.5}, TypeError, "`rules` must be .*0.5.*HINT"),
    ({"rules": {"fc1": 0.5}}, TypeError, r"`rules\['fc1'\]` must be .*0.5.*HINT"),
    ({"rules": {3: None}}, TypeError, "`rules` must .*3.*HINT"),
    ({"rules": {"type:lineer": None}}, ValueError, "lineer.*HINT"),
    ({"rules": {"fc3": None}}, ValueError, "'fc3' matches no .*did you mean 'fc2'.*HINT.*fc1"),
    ({"rules": {"type:norm": Keep(sparsity=0.5)}}, ValueError, "'type:norm'.*`sparsity`, and norm.*HINT"),
    ({"rules": {"act": Keep(4, 0.5)}}, ValueError, "'act'.*`sparsity`, and activation.*HINT"),
    ({"rules": {"*": Keep(bits=4), "fc1": Keep(bits=2)}}, ValueError, "'fc1' never counts.*HINT"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG, ids=[str(case[0]) for case in WRONG])
def test_wrong_arguments_are_named_and_the_model_untouched(arguments, error, message):
    model = mlp()
    with pytest.raises(error, match=f"(?s){message}"):
        convert(model, **arguments)
    assert [type(model.fc1), type(model.fc2)] == [nn.Linear, nn.Linear]
    assert not any("_state" in vars(module) for module in model.modules())


@pytest.mark.parametrize("module", [config, schedules])
def test_examples_of_the_docstrings(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("preset", "rules", "attention", "operations"),
    [
        (
            "max",
            {"type:value": Keep(bits=8), "type:saved": Keep(bits=4), "type:attention_out": None},
            {"query": 4, "key": 4, "value": 8, "attention_out": 4},
            {},
        ),
        (
            "balanced",
            {"operation:sin": Keep(bits=8), "operation:mul": None},
            Config("balanced").attention,
            {"sin": 8, "mul": None},
        ),
    ],
)
def test_rules_on_attention_and_operations_are_about_what_they_save(preset, rules, attention, operations):
    config = Config(preset, rules=rules)
    assert (config.attention, config.operations) == (attention, operations)
    assert config.keep_of(["fc"], "linear") == PRESETS[preset]["linear"]


@pytest.mark.parametrize(
    ("preset", "rules", "message"),
    [
        ("max", {"type:saved": None, "type:key": Keep(bits=8)}, "'type:key' never counts"),
        ("paper", {"type:query": Keep(bits=8)}, "'type:query' counts for nothing"),
        ("max", {"value": Keep(bits=8)}, "'value' matches no layer"),
        ("paper", {"operation:sin": Keep(bits=8)}, "'operation:sin' counts for nothing"),
        (None, {"operation:sin": Keep(sparsity=0.5)}, r"`rules\['operation:sin'\]` must be a Keep with `bits`"),
        (None, {"operation:sin": "max"}, r"`rules\['operation:sin'\]` must be a Keep with `bits`"),
    ],
)
def test_rules_that_count_for_nothing_are_errors(preset, rules, message):
    with pytest.raises(ValueError, match=f"{message}.*HINT"):
        Config(preset, rules=rules).check_that_rules_count([(["fc"], "linear")], ["fc"])
