"""Which layers ``convert`` takes: exact types, patterns, sizes; what it reports and when it refuses."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, prune

from lightning_actprune import ActivationPrunedLinear, convert, revert
from tests.conversion_models import TwoNames, deep, gradients, mlp


class TimesTwo(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def own_forward() -> nn.Linear:
    """A layer whose instance replaces the forward, as accelerate's hooks do."""
    layer = nn.Linear(65, 33)
    layer.forward = MethodType(nn.Linear.forward, layer)
    return layer


ODD_LAYERS = {
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(65, 33)), "ParametrizedLinear, whose forward is"),
    "output_projection": (lambda: nn.MultiheadAttention(66, 3).out_proj, "uses its weight without calling its forward"),
    "lazy": (lambda: nn.LazyLinear(33), "is not initialised yet"),
    "subclass": (lambda: TimesTwo(65, 33), "TimesTwo, whose forward is not known to be nn.Linear's"),
    "built": (lambda: ActivationPrunedLinear(65, 33, sparsity=0.25), "was built as ActivationPrunedLinear"),
    "narrow": (lambda: nn.Linear(63, 33), "in_features=63 is below min_features=64"),
    "complex": (lambda: nn.Linear(65, 33, dtype=torch.complex64), "complex64"),
    "own_forward": (own_forward, "forward"),
}


@pytest.mark.parametrize("kind", ODD_LAYERS)
def test_layer_that_is_not_exactly_linear_is_skipped_with_a_reason(kind):
    build, reason = ODD_LAYERS[kind]
    model = nn.ModuleDict({"odd": build(), "plain": nn.Linear(65, 33)})
    classes = [type(m) for m in model["odd"].modules()]
    report = convert(model)
    assert [layer.fqn for layer in report.converted] == ["plain"]
    assert [layer.fqn for layer in report.skipped] == ["odd"]
    assert reason in report.skipped[0].reason
    assert report.skipped[0].kind == classes[0].__name__
    assert f"{report.skipped[0].fqn} ({report.skipped[0].kind}): " in report.describe_skipped()
    assert revert(model) == ["plain"]
    assert [type(m) for m in model["odd"].modules()] == classes


def test_mask_of_torch_pruning_is_applied_after_conversion():
    # torch.nn.utils.prune leaves the type alone and recomputes the weight in a forward pre-hook.
    model, x = mlp(), torch.randn(3, 5, 65)
    prune.l1_unstructured(model.fc1, "weight", amount=0.5)
    mask, y = model.fc1.weight_mask, model(x)
    convert(model, sparsity=0.5, block_size=8)
    assert torch.equal(model(x), y)
    grad = gradients(model, x)["fc1.weight_orig"]
    assert torch.equal(grad != 0, mask.bool() & (grad != 0))
    assert grad.abs().sum() > 0


def shown(arguments: dict[str, Any]) -> str:
    """``{"include": "a"}`` -> ``include='a'``, as a test id."""
    return " ".join(f"{name}={value!r}" for name, value in arguments.items()) or "defaults"


ALL = ["blocks.0.fc1", "blocks.0.fc2", "blocks.1.fc1", "blocks.1.fc2", "head"]


CHOICES = [
    ({}, ALL),
    ({"include": "blocks.*.fc1"}, [ALL[0], ALL[2]]),
    ({"include": ["blocks.0.*", "head"]}, [ALL[0], ALL[1], "head"]),
    ({"include": ("blocks.[!0].fc?",)}, ALL[2:4]),
    ({"exclude": "head"}, ALL[:4]),
    ({"exclude": ["*.fc1", "head"]}, [ALL[1], ALL[3]]),
    ({"include": "blocks.*", "exclude": ["blocks.0.*"]}, ALL[2:4]),
    ({"min_features": 66}, [ALL[1], ALL[3]]),
    ({"min_features": 65}, ALL),
    ({"min_features": 0, "include": "head"}, ["head"]),
]


@pytest.mark.parametrize(("arguments", "expected"), CHOICES, ids=[shown(case[0]) for case in CHOICES])
def test_patterns_and_sizes_choose_the_layers(arguments, expected):
    model = deep()
    report = convert(model, **arguments)
    assert [layer.fqn for layer in report.converted] == expected
    assert [layer.fqn for layer in report.skipped] == [name for name in ALL if name not in expected]
    assert [n for n, m in model.named_modules() if isinstance(m, ActivationPrunedLinear)] == expected


def test_every_linear_layer_is_in_exactly_one_list():
    model = nn.ModuleDict({kind: build() for kind, (build, _) in ODD_LAYERS.items()})
    model["tied"], model["deep"] = TwoNames(), deep()
    model["transformer"] = nn.TransformerEncoderLayer(66, 3, 99)
    report = convert(model, exclude="deep.blocks.0.*")
    listed = [layer.fqn for layer in (*report.converted, *report.skipped)]
    linear = nn.Linear, nn.MultiheadAttention
    assert sorted(listed) == sorted(name for name, m in model.named_modules() if isinstance(m, linear))
    names = ("linear1", "linear2", "self_attn", "self_attn.out_proj")
    assert {f"transformer.{name}" for name in names} <= {layer.fqn for layer in report.converted}


def test_reasons_name_the_pattern():
    report = convert(deep(), include=["blocks.*", "head*"], exclude="*.fc1", min_features=66)
    reasons = {layer.fqn: layer.reason for layer in report.skipped}
    assert reasons["blocks.0.fc1"] == "matches the `exclude` pattern '*.fc1'"
    assert reasons["head"].startswith("in_features=65 is below min_features=66: below 64, each MiB saved cost")
    reasons = {layer.fqn: layer.reason for layer in convert(deep(), include=["blocks.*", "*.fc1"]).skipped}
    assert reasons == {"head": "matches no `include` pattern (blocks.*, *.fc1)"}


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_pattern_that_matches_nothing_is_an_error_that_lists_the_layers(argument):
    model = deep()
    message = rf"`{argument}` pattern 'block\.\*' matches no linear layer\. HINT.*{', '.join(ALL)}\."
    with pytest.raises(ValueError, match=message):
        convert(model, **{argument: ["head", "block.*"]})
    assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} == {nn.Linear}
    assert "owner" not in model.head.__dict__


def test_long_listing_is_cut_with_the_total():
    model = nn.Sequential(*(nn.Linear(65, 65) for _ in range(11)))
    with pytest.raises(ValueError, match=r"layers are: 0, 1, 2, 3, 4, 5, 6, 7, \.\.\. \(11 in all\)\."):
        convert(model, include="fc")


def test_error_after_an_earlier_conversion_leaves_that_one():
    model = mlp()
    convert(model, include="fc1", sparsity=0.25)
    with pytest.raises(ValueError, match="'nothing' matches no linear layer"):
        convert(model, include=["fc2", "nothing"])
    assert model.fc1.sparsity == 0.25
    assert type(model.fc2) is nn.Linear


def test_nothing_converted_is_an_error_with_every_reason():
    model = nn.ModuleDict({"narrow": nn.Linear(63, 33), "twice": TimesTwo(65, 33), "out": nn.Linear(65, 3)})
    with pytest.raises(ValueError, match="No layer was converted") as caught:
        convert(model, exclude="out")
    for fqn, reason in (("narrow", "in_features=63"), ("twice", "TimesTwo"), ("out", "`exclude` pattern 'out'")):
        assert any(fqn in line and reason in line for line in str(caught.value).splitlines())
    assert "HINT" in str(caught.value)
    assert [type(m) for m in model.values()] == [nn.Linear, TimesTwo, nn.Linear]


def test_model_without_linear_layers_is_an_error():
    for of_no_model in (convert, revert):
        with pytest.raises(TypeError, match=r"`model` must be a torch\.nn\.Module, got 3 of type int. HINT"):
            of_no_model(3)
    with pytest.raises(ValueError, match=r"Sequential has no linear layers \(nn\.Linear, .*HINT"):
        convert(nn.Sequential(nn.Conv1d(3, 5, 1), nn.ReLU()))


def test_layer_that_is_the_model_itself():
    layer = nn.Linear(65, 3)
    assert [c.fqn for c in convert(layer).converted] == ["(root)"]
    assert type(layer) is ActivationPrunedLinear
    assert revert(layer) == ["(root)"]


WRONG = [
    ({"sparsity": 1.0}, ValueError, r"`sparsity` must be in \[0, 1\), got 1\.0"),
    ({"sparsity": "0.5"}, TypeError, "`sparsity` must be a number"),
    ({"block_size": 0}, ValueError, "`block_size` must be a positive int, got 0"),
    ({"block_size": 8.0}, TypeError, "`block_size` must be a positive int, got 8.0 of type float"),
    ({"scope": "batch"}, ValueError, '`scope` must be "sample" or "token", got \'batch\''),
    ({"include": 3}, TypeError, "`include` must be a glob pattern or a list"),
    ({"include": ""}, TypeError, "`include` must be a glob pattern or a list"),
    ({"exclude": ["fc1", None]}, TypeError, "`exclude` must be a glob pattern or a list"),
    ({"min_features": -1}, ValueError, "`min_features` must be an int >= 0, got -1"),
    ({"min_features": True}, TypeError, "`min_features` must be an int >= 0, got True"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG, ids=[shown(case[0]) for case in WRONG])
def test_wrong_argument_is_named_and_the_model_untouched(arguments, error, message):
    model = mlp()
    with pytest.raises(error, match=message):
        convert(model, **arguments)
    assert type(model.fc1) is nn.Linear


def wrapped_blocks() -> nn.Module:
    model = deep()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.head = checkpoint_wrapper(model.head)
    return model


@pytest.mark.parametrize(
    "wrap",
    [
        wrapped_blocks,
        lambda: torch.compile(deep(), backend="eager"),
        lambda: torch.compile(wrapped_blocks(), backend="eager"),
        lambda: checkpoint_wrapper(torch.compile(deep(), backend="eager")),
    ],
    ids=["checkpoint", "compile", "compile_of_checkpoint", "checkpoint_of_compile"],
)
def test_wrapper_prefixes_are_no_part_of_the_names(wrap):
    model = wrap()
    assert [layer.fqn for layer in convert(model, include=["blocks.*.fc?", "head"]).converted] == ALL
    assert revert(model) == ALL


def test_compiled_layer_as_the_root():
    assert [c.fqn for c in convert(torch.compile(nn.Linear(65, 3), backend="eager")).converted] == ["(root)"]
