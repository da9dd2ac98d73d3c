"""Settings of layers by name in ``convert``: which pattern counts, what a layer takes from where, what is refused."""

from __future__ import annotations

import copy
import doctest
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_actprune import (
    CosineSchedule,
    LayerSettings,
    LinearSchedule,
    StepSchedule,
    convert,
    layer_settings,
    revert,
)
from lightning_actprune.conversion import convert_layers
from lightning_actprune.conversion_options import ConversionOptions
from lightning_actprune.nn.affine import Affine
from tests.conversion_models import TwoNames, deep, gradients, mlp

ALL = ["blocks.0.fc1", "blocks.0.fc2", "blocks.1.fc1", "blocks.1.fc2", "head"]


def found(report: Any, *names: str) -> dict[str, Any]:
    """Return what the report says of each converted layer, by its name."""
    chosen = names or ("sparsity",)
    values = {layer.fqn: tuple(getattr(layer, name) for name in chosen) for layer in report.converted}
    return {fqn: value if len(chosen) > 1 else value[0] for fqn, value in values.items()}


SPARSITIES = [
    ({"*": 0.5}, dict.fromkeys(ALL, 0.5)),
    ({"head": 0, "*.fc1": 0.3}, {ALL[0]: 0.3, ALL[2]: 0.3, "head": 0.0}),
    ({"blocks.0.*": 0.1, "*.fc1": 0.2, "*": 0.3}, dict(zip(ALL, (0.1, 0.1, 0.2, 0.3, 0.3), strict=True))),
    ({"*.fc1": 0.2, "blocks.0.*": 0.1}, {ALL[0]: 0.2, ALL[1]: 0.1, ALL[2]: 0.2}),
]


@pytest.mark.parametrize(("sparsity", "expected"), SPARSITIES)
def test_the_first_pattern_counts_and_layers_without_one_stay_dense(sparsity, expected):
    model = deep()
    report = convert(model, sparsity)
    assert found(report) == expected
    assert {name: model.get_submodule(name).sparsity for name in expected} == expected
    reason = f"matches no `sparsity` pattern ({', '.join(sparsity)})"
    assert {layer.fqn: layer.reason for layer in report.skipped} == dict.fromkeys(set(ALL) - set(expected), reason)
    assert revert(model) == sorted(expected, key=ALL.index)


def test_layers_take_what_is_not_said_from_all_others():
    own = {
        "blocks.0.fc1": LayerSettings(sparsity=0.1, block_size=16),
        "*.fc1": LayerSettings(value_format="int4", scope="token"),
        "blocks.*": LayerSettings(block_selection="swap"),
    }
    model = deep()
    report = convert(model, 0.5, 32, layers=own)
    names = "sparsity", "block_size", "scope", "value_format", "block_selection"
    assert found(report, *names) == {
        "blocks.0.fc1": (0.1, 16, "sample", "same", "largest"),
        "blocks.0.fc2": (0.5, 32, "sample", "same", "swap"),
        "blocks.1.fc1": (0.5, 32, "token", "int4", "largest"),
        "blocks.1.fc2": (0.5, 32, "sample", "same", "swap"),
        "head": (0.5, 32, "sample", "same", "largest"),
    }
    for layer in report.converted:
        converted = model.get_submodule(layer.fqn)
        assert all(getattr(converted, name) == getattr(layer, name) for name in names)
    for twin in copy.deepcopy(model), pickle.loads(pickle.dumps(model)):
        assert twin.blocks[0].fc1.describe_settings() == model.blocks[0].fc1.describe_settings()


def test_layers_are_pruned_as_if_each_was_converted_by_itself():
    x, together, apart = torch.randn(3, 5, 65), deep(), deep()
    apart.load_state_dict(together.state_dict())
    convert(together, {"*.fc1": 0.25, "*": 0.75}, 8, layers={"head": LayerSettings(0.5, 16, scope="token")})
    convert(apart, 0.25, 8, include="*.fc1")
    convert(apart, 0.75, 8, include="*.fc2")
    convert(apart, 0.5, 16, scope="token", include="head")
    expected = gradients(apart, x)
    assert all(torch.equal(grad, expected[name]) for name, grad in gradients(together, x).items())


def test_layers_that_read_one_tensor_with_settings_of_their_own_share_nothing():
    class Siblings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(64, 8), nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q(x) * self.k(x)

    x, model = torch.randn(3, 5, 64), Siblings()
    exact = gradients(model, x)
    for own, dense in ({"q": 0.5, "k": 0.0}, "k"), ({"k": 0.5, "q": 0.0}, "q"):
        convert(model, own, 8)
        pruned = gradients(model, x)
        revert(model)
        assert [name for name in exact if torch.equal(exact[name], pruned[name])] == [
            name for name in exact if name.startswith(dense) or name.endswith("bias")
        ]


def test_a_layers_sparsity_of_its_own_counts_before_the_mapping():
    report = convert(deep(), {"blocks.*": 0.3}, layers={"head": LayerSettings(sparsity=0.1)})
    assert found(report)["head"] == 0.1
    report = convert(deep(), {"blocks.*": 0.3}, layers={"head": LayerSettings(block_size=16)})
    assert [layer.fqn for layer in report.skipped] == ["head"]


def test_a_layer_with_two_names_has_the_settings_of_the_first_pattern_that_matches_either():
    assert found(convert(TwoNames(), {"decode": 0.2})) == {"encode": 0.2}
    with pytest.raises(ValueError, match="`sparsity` pattern 'encode' never counts"):
        convert(TwoNames(), {"decode": 0.2, "encode": 0.7})


def test_projections_of_attention_are_layers_with_names_of_their_own():
    model = nn.Sequential(OrderedDict(attention=nn.MultiheadAttention(64, 4), head=nn.Linear(64, 64)))
    own = {"attention": LayerSettings(value_format="int8"), "attention.out_proj": LayerSettings(block_size=16)}
    report = convert(model, {"attention": 0.2, "attention.out_proj": 0.4, "head": 0.6}, layers=own)
    assert found(report, "sparsity", "block_size", "value_format") == {
        "attention": (0.2, 32, "int8"),
        "attention.out_proj": (0.4, 16, "same"),
        "head": (0.6, 32, "same"),
    }
    revert(model)
    report = convert(model, exclude_last=2)
    assert [layer.fqn for layer in report.converted] == ["attention"]


def test_convolutions_and_affine_layers_have_settings_of_their_own_too():
    model = nn.Sequential(nn.Conv2d(3, 64, 3), Affine(64), nn.Linear(64, 64), nn.Conv2d(3, 64, 3), nn.LayerNorm(64))
    formats = {"convolution": "int8", "affine": "int4", "norm": "int4"}
    own = {"0": LayerSettings(0.3, value_format="same", block_size=4), "1": LayerSettings(0.0, value_format="int2")}
    report = convert(model, 0.6, others=formats, layers=own)
    assert found(report, "operator", "sparsity", "block_size", "value_format") == {
        "0": ("convolution", 0.3, 4, "same"),
        "1": ("affine", 0.0, 32, "int2"),
        "2": ("linear", 0.6, 32, "same"),
        "3": ("convolution", 0.6, 32, "int8"),
    }
    assert [(layer.fqn, layer.value_format) for layer in report.few_bit] == [("4", "int4")]


@pytest.mark.parametrize(
    ("first", "last", "expected"), [(1, 0, ALL[1:]), (0, 1, ALL[:-1]), (2, 2, ALL[2:3]), (0, 4, ALL[:1])]
)
def test_so_many_layers_at_either_end_stay_dense(first, last, expected):
    report = convert(deep(), exclude_first=first, exclude_last=last)
    assert [layer.fqn for layer in report.converted] == expected
    reasons = {layer.fqn: layer.reason for layer in report.skipped}
    assert list(reasons) == [name for name in ALL if name not in expected]
    for end, count, names in ("first", first, ALL[:first]), ("last", last, ALL[len(ALL) - last :]):
        among = f"is the {end} layer" if count == 1 else f"is one of the {end} {count} layers"
        assert {reasons[name] for name in names} <= {f"{among} (exclude_{end}={count})"}


def test_the_ends_are_those_of_the_model_and_of_what_is_asked_for():
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    assert [layer.fqn for layer in convert(model, exclude_first=1, exclude="3").converted] == ["2"]
    revert(model)
    report = convert(model, exclude_first=1, exclude_last=1, exclude="3", others={"convolution": "same"})
    assert [layer.fqn for layer in report.converted] == ["2"]
    assert {layer.fqn: layer.reason.split(" ")[0] for layer in report.skipped} == {
        "0": "is",
        "1": "in_features=8",
        "3": "matches",
    }


def test_a_layer_that_has_become_the_first_one_is_dense_again():
    model, options = nn.ModuleDict({"a": nn.Linear(65, 65), "b": deep()}), ConversionOptions(exclude_first=1)
    names = [f"b.{name}" for name in ALL]
    assert [layer.fqn for layer in convert_layers(model, options, "tester").converted] == names
    del model["a"]
    report = convert_layers(model, options, "tester")
    assert [layer.fqn for layer in report.converted] == names[1:]
    assert [layer.fqn for layer in report.skipped] == names[:1]
    assert type(model["b"].blocks[0].fc1) is nn.Linear
    assert "_pruning" not in vars(model["b"].blocks[0].fc1)


WRONG = [
    ({"sparsity": {}}, ValueError, r"`sparsity` must have at least one pattern, got \{\}\. HINT"),
    ({"sparsity": {"*": 60}}, ValueError, r"`sparsity\['\*'\]` must be in \[0, 1\), got 60\. HINT"),
    ({"sparsity": {"*": None}}, TypeError, r"`sparsity\['\*'\]` must be a number in \[0, 1\), got None"),
    ({"sparsity": {0: 0.5}}, TypeError, r"`sparsity` must have glob patterns as its keys, got \[0\]\. HINT"),
    ({"sparsity": {"": 0.5}}, TypeError, "`sparsity` must have glob patterns as its keys"),
    ({"sparsity": {"fc1": 0.5, "fc3": 0.2}}, ValueError, r"`sparsity` pattern 'fc3' matches no .* fc1, fc2\."),
    (
        {"sparsity": {"*": 0.5, "fc1": 0.2}},
        ValueError,
        "`sparsity` pattern 'fc1' never counts, .* earlier.*HINT",
    ),
    ({"layers": 0.5}, TypeError, "`layers` must be a mapping from glob patterns to LayerSettings, got 0.5 .*HINT"),
    ({"layers": {"fc1": 0.5}}, TypeError, r"`layers\['fc1'\]` must be LayerSettings, .* got 0.5\. HINT"),
    ({"layers": {"fc1": {"bits": 2}}}, TypeError, r"`layers\['fc1'\]` must be .* some of sparsity, .*, got .*HINT"),
    ({"layers": {3: LayerSettings()}}, TypeError, r"`layers` must have glob patterns as its keys, got \[3\]"),
    ({"layers": {"fc": LayerSettings()}}, ValueError, "`layers` pattern 'fc' matches no layer.*HINT"),
    (
        {"layers": {"fc1": LayerSettings(schedule=StepSchedule([0.5], []))}},
        ValueError,
        "no `schedule` in convert.*HINT",
    ),
    ({"layers": {"fc1": LayerSettings(block_size=4)}, "value_format": "int4"}, ValueError, "'fc1', .*at least 8.*HINT"),
    ({"layers": {"fc2": LayerSettings(value_format="int4")}, "block_size": 4}, ValueError, "'fc2', .*at least 8.*HINT"),
    ({"exclude_first": -1}, ValueError, "`exclude_first` must be an int >= 0, got -1. HINT"),
    ({"exclude_last": 1.0}, TypeError, "`exclude_last` must be an int >= 0, got 1.0. HINT"),
    ({"exclude_last": True}, TypeError, "`exclude_last` must be an int >= 0, got True. HINT"),
    (
        {"exclude_last": 7},
        ValueError,
        r"(?s)No layer was converted.*fc1 \(Linear\): is one of the last 7 layers",
    ),
    ({"sparsity": {"fc1": 0.5}, "exclude": "fc1"}, ValueError, "(?s)No layer was converted.*no `sparsity` pattern"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG, ids=[str(case[0]) for case in WRONG])
def test_wrong_arguments_are_named_and_the_model_untouched(arguments, error, message):
    model = mlp()
    with pytest.raises(error, match=message):
        convert(model, **arguments)
    assert [type(model.fc1), type(model.fc2)] == [nn.Linear, nn.Linear]
    assert not any("_pruning" in vars(module) for module in model.modules())


WRONG_SETTINGS = [
    ({"sparsity": 1}, ValueError, r"`sparsity` must be in \[0, 1\), got 1"),
    ({"block_size": 0}, ValueError, "`block_size` must be a positive int, got 0"),
    ({"value_format": "int5"}, ValueError, "`value_format` must be one of .*'int5'"),
    ({"value_format": "int4", "block_size": 4}, ValueError, "`block_size` must be at least 8 .*got 4"),
    ({"block_selection": "random"}, ValueError, "`block_selection` must be .*'random'"),
    ({"scope": "batch"}, ValueError, "`scope` must be .*'batch'"),
    ({"schedule": 0.5}, TypeError, "`schedule` must be a SparsitySchedule or None, got 0.5. HINT"),
    ({"schedule": StepSchedule([0.5], []), "sparsity": 0.5}, ValueError, "`sparsity` must be None .*HINT.*one of the"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG_SETTINGS, ids=[str(c[0]) for c in WRONG_SETTINGS])
def test_wrong_settings_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        LayerSettings(**arguments)


def test_settings_show_what_was_given_and_can_be_pickled():
    settings = LayerSettings(0.3, value_format="int4", schedule=None)
    assert repr(settings) == "LayerSettings(sparsity=0.3, value_format='int4')"
    assert repr(LayerSettings()) == "LayerSettings()"
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_docstring_examples_run():
    results = doctest.testmod(layer_settings)
    assert results.attempted > 0
    assert results.failed == 0


SCHEDULES = {  # the sparsities of two layers, and how often that compiles: once more for each first change by itself
    "ramps": (LinearSchedule(end=0.8, start=0.1), CosineSchedule(end=0.1, start=0.7), 2),
    "from_zero": (LinearSchedule(end=0.8, warmup=0.2), StepSchedule([0.0, 0.3, 0.5], [0.5, 0.75]), 3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_their_own_do_not_compile_for_each_sparsity(name):
    torch._dynamo.reset()
    first, second, compilations = SCHEDULES[name]
    model, x = mlp(), torch.randn(3, 5, 65)
    convert(model, {"fc1": first(0), "fc2": second(0)}, 8, layers={"fc1": LayerSettings(block_size=16)})
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for step in range(9):
        model.fc1.sparsity, model.fc2.sparsity = first(step / 8), second(step / 8)
        expected, compiled_gradients = gradients(model, x), gradients(compiled, x)
        for parameter, grad in expected.items():
            # The order of the sums over 15 rows may differ; one block more or less is far beyond that.
            torch.testing.assert_close(compiled_gradients[f"_orig_mod.{parameter}"], grad, rtol=1e-5, atol=1e-5)
    assert 1 <= counter.frame_count <= compilations
