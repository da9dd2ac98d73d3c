"""``convert`` and ``revert``: what is chosen, what is skipped and why, whose it is, and what stays as it was.

What a converted layer does, and that reverting leaves nothing, is in ``tests/contract``.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, prune

from lightning_actprune import ActivationPrunedLinear
from lightning_actprune.config import Config, Keep
from lightning_actprune.convert import DenseView, convert, convert_layers, revert
from lightning_actprune.operators.base import CompressedLayer
from lightning_actprune.operators.norm import Affine
from tests.support.conversion_models import Calls, deep, gpt2, gradients, mlp
from tests.support.measured import kept_bytes
from tests.support.stack import Transformer

ROOT = Path(__file__).parents[1]
PRUNED = Keep(bits=None, sparsity=0.5, block_size=8)
ALL = ["blocks.0.fc1", "blocks.0.fc2", "blocks.1.fc1", "blocks.1.fc2", "head"]
"""Linear layers of ``deep()``."""


def linear_only(keep: Keep = PRUNED) -> dict[str, Keep | None]:
    return {"type:linear": keep, "*": None}


def names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, CompressedLayer)]


def state(model: nn.Module) -> dict[str, tuple[type, list[str]]]:
    return {name: (type(module), list(vars(module))) for name, module in model.named_modules()}


# What is chosen.

CHOICES = [
    ({"type:linear": PRUNED, "*": None}, ALL),
    ({"blocks.[!0].fc?": PRUNED, "*": None}, ALL[2:4]),
    ({"*.fc1": None, "head": None, "type:linear": PRUNED, "*": None}, [ALL[1], ALL[3]]),
    ({"blocks.0.*": None, "blocks.*.fc?": PRUNED, "*": None}, ALL[2:4]),
]


@pytest.mark.parametrize(("rules", "expected"), CHOICES, ids=[" ".join(case[0]) for case in CHOICES])
def test_rules_choose_the_layers_and_the_first_that_matches_counts(rules, expected):
    model = deep()
    report = convert(model, rules=rules)
    assert [layer.fqn for layer in report.converted] == names(model) == expected
    assert revert(model) == expected


def test_an_attention_module_stands_for_its_in_projection():
    attention = nn.MultiheadAttention(66, 3)
    model = nn.ModuleDict({"attention": attention, "head": nn.Linear(66, 3)})
    before, both = state(model), ["attention", "attention.out_proj"]
    for chosen in (both[:1], both[1:], both):
        rules = {name: PRUNED if name in chosen else None for name in both}
        report = convert(model, rules={**rules, "*": None})
        assert [layer.fqn for layer in report.converted] == chosen
        assert revert(model) == chosen
        assert state(model) == before


# What is not.


class TimesTwo(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnAttention(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def own_forward() -> nn.Linear:
    """A layer whose instance replaces the forward, as accelerate's hooks do."""
    layer = nn.Linear(65, 33)
    layer.forward = MethodType(nn.Linear.forward, layer)
    return layer


ODD_LAYERS = {
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(65, 33)), "forward is not known"),
    "output_projection": (lambda: nn.MultiheadAttention(66, 3).out_proj, "without calling its forward"),
    "lazy": (lambda: nn.LazyLinear(33), "is not initialised yet"),
    "subclass": (lambda: TimesTwo(65, 33), "forward is not known"),
    "built": (lambda: ActivationPrunedLinear(65, 33, sparsity=0.25), "was built as ActivationPrunedLinear"),
    "complex": (lambda: nn.Linear(65, 33, dtype=torch.complex64), "complex64"),
    "own_forward": (own_forward, "forward was replaced on the instance"),
    "attention": (lambda: OwnAttention(66, 3), "forward is not known"),
}


@pytest.mark.parametrize("kind", ODD_LAYERS)
def test_layer_whose_code_is_not_known_is_skipped_with_a_reason(kind):
    build, reason = ODD_LAYERS[kind]
    model = nn.ModuleDict({"odd": build(), "plain": nn.Linear(65, 33)})
    before = state(model["odd"])
    report = convert(model, rules=linear_only())
    assert [layer.fqn for layer in report.converted] == ["plain"]
    assert report.skipped[0].fqn == "odd"
    assert reason in report.skipped[0].reason
    assert revert(model) == ["plain"]
    assert state(model["odd"]) == before


@pytest.mark.foreign
def test_scaling_in_place_is_left_to_timm():
    from timm.layers.layer_scale import LayerScale

    report = convert(nn.Sequential(LayerScale(70, inplace=True), Affine(70)), rules={"*": Keep(bits=4)})
    assert [layer.fqn for layer in report.converted] == ["1"]
    assert "in place" in report.skipped[0].reason


def test_mask_of_torch_pruning_is_applied_after_conversion():
    # torch.nn.utils.prune leaves the type alone and recomputes the weight in a forward pre-hook.
    model, x = mlp(), torch.randn(3, 5, 65)
    prune.l1_unstructured(model.fc1, "weight", amount=0.5)
    mask, y = model.fc1.weight_mask, model(x)
    convert(model, rules=linear_only())
    assert torch.equal(model(x), y)
    grad = gradients(model, x)["fc1.weight_orig"]
    assert torch.equal(grad != 0, mask.bool() & (grad != 0))
    assert grad.abs().sum() > 0


@pytest.mark.parametrize("pattern", ["encode", "dec*"])
def test_layer_under_two_names_stays_one_and_matches_by_either(pattern):
    tied = nn.Linear(65, 65)
    model = nn.ModuleDict({"encode": tied, "norm": nn.LayerNorm(65), "decode": tied})
    report = convert(model, rules={pattern: PRUNED, "*": None})
    assert [layer.fqn for layer in report.converted] == ["encode"]
    assert model["encode"] is model["decode"]
    assert revert(model) == ["encode"]


def test_names_are_those_without_wrappers():
    model = nn.ModuleDict({"block": checkpoint_wrapper(mlp()), "head": nn.Linear(3, 3)})
    report = convert(model, rules={"block.fc1": PRUNED, "*": None})
    assert [layer.fqn for layer in report.converted] == ["block.fc1"]


def test_no_layer_and_no_model_are_errors():
    model = nn.ModuleDict({"twice": TimesTwo(65, 33), "out": nn.Linear(65, 3)})
    before = state(model)
    with pytest.raises(ValueError, match=r"(?s)No layer was converted.*twice.*HINT"):
        convert(model, rules={"out": None, "type:linear": PRUNED, "*": None})
    assert state(model) == before
    for of_no_model in (convert, revert):
        with pytest.raises(TypeError, match=r"`model` must be a torch\.nn\.Module, got 3 of type int. HINT"):
            of_no_model(3)


# Whose it is, and what stays.


def test_a_layer_has_one_owner():
    model = mlp()
    convert(model, rules={"fc1": PRUNED, "*": None})
    before = state(model)
    with pytest.raises(ValueError, match=r"'fc1' is already converted by convert\(\), and .*HINT"):
        convert(model, rules=linear_only(Keep(bits=4)))
    assert state(model) == before
    assert model.fc1.keep == dataclasses.replace(PRUNED, min_rows_for_low_bits=1024)
    convert(model, rules={"fc2": Keep(bits=4), "*": None})
    assert revert(model, model.fc2.owner) == ["fc2"]
    assert (type(model.fc1), type(model.fc2)) == (ActivationPrunedLinear, nn.Linear)


PICKLED = """
import sys
sys.modules["lightning_actprune"] = None  # every import of it fails
import torch
torch.load("model.pt", weights_only=False)
"""


@pytest.mark.parametrize(
    "make", [pytest.param(mlp, marks=pytest.mark.integration), pytest.param(gpt2, marks=pytest.mark.foreign)]
)
def test_pickles_are_of_the_dense_model_and_load_without_the_package(make, tmp_path):
    model = make()
    before = {name: type(module) for name, module in model.named_modules()}
    count = len(convert(model, "max", rules={"*": Keep(bits=8)}).converted)
    torch.save({"model": model, "copies": [copy.deepcopy(model)]}, tmp_path / "model.pt")
    command, variables = [sys.executable, "-c", PICKLED], os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for each in (loaded["model"], *loaded["copies"]):
        assert {name: type(module) for name, module in each.named_modules()} == before
        assert len(convert(each, "max", rules={"*": Keep(bits=8)}).converted) == count
        revert(each)
        assert not any(module._forward_hooks for module in each.modules())


# Everything at once.


def everything() -> nn.Sequential:
    return nn.Sequential(OrderedDict(first=Transformer(), second=Transformer(), head=nn.Linear(64, 64)))


def assert_like(ours: nn.Module, dense: nn.Module, x: Tensor) -> None:
    for mine, exact in zip(*(gradients(model, x).values() for model in (ours, dense)), strict=True):
        assert nn.functional.cosine_similarity(mine.flatten(), exact.flatten(), 0) > 0.99


def test_a_preset_covers_every_operator_and_keeps_a_fraction():
    dense, x = everything(), torch.randn(64, 32, 64)
    ours = copy.deepcopy(dense)
    report = convert(ours, "balanced")
    operators = dict.fromkeys(("qkv", "proj", "mlp.0", "mlp.3"), "linear") | {"mlp.1": "activation"}
    operators |= dict.fromkeys(("norm1", "norm2"), "norm")
    expected = {f"{block}.{name}": operators[name] for block in ("first", "second") for name in operators}
    assert {layer.fqn: layer.operator for layer in report.converted} == {"head": "linear"} | expected
    assert report.saved is not None
    assert kept_bytes(ours, x) < 0.3 * kept_bytes(dense, x)
    assert_like(ours, dense, x)
    paper = convert(everything(), sparsity=0.5)
    assert {layer.operator for layer in paper.converted} == {"linear"}
    assert (dict(paper.uncovered), paper.saved) == ({"activation": 2, "norm": 4}, None)


@pytest.mark.parametrize(
    ("function", "norm", "layers", "preset", "activation", "convolution"),
    [
        (nn.SiLU, nn.BatchNorm2d, 8, "balanced", 8, 4),
        (nn.Hardswish, nn.BatchNorm2d, 8, "balanced", 8, 4),
        (nn.SiLU, nn.BatchNorm2d, 7, "balanced", 4, 4),
        (nn.ReLU, nn.BatchNorm2d, 8, "balanced", 4, 4),  # one bit, and exact
        (nn.SiLU, partial(nn.GroupNorm, 1), 8, "balanced", 4, 4),
        (nn.SiLU, nn.BatchNorm2d, 8, "max", 3, 3),
        (nn.ReLU, nn.BatchNorm2d, 8, "max", 3, 2),
        (nn.ReLU, nn.BatchNorm2d, 7, "max", 3, 3),
    ],
)
def test_bits_in_nets_with_batch_norms(function, norm, layers, preset, activation, convolution):
    model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Conv2d(8, 8, 3), norm(8), function())))
    for _ in range(2):  # converted again, as by a callback with a schedule, it is the same
        bits = {(row.operator, row.keep.bits) for row in convert(model, preset).converted if row.operator != "norm"}
        assert bits == {("activation", activation), ("convolution", convolution)}
        revert(model)
    ruled = convert(model, preset, rules={"2": Keep(bits=2)}).converted
    assert [row.keep.bits for row in ruled if row.operator == "activation"] == [2] + [activation] * (layers - 1)


@pytest.mark.integration
@pytest.mark.parametrize("norm", [nn.LayerNorm(64), Affine(64)], ids=["norm", "affine"])
def test_what_compiled_layers_return_may_be_written_to(norm):
    torch.compiler.reset()
    dense = nn.Sequential(nn.Linear(64, 64), copy.deepcopy(norm), nn.ReLU(inplace=True))
    ours = copy.deepcopy(dense)
    convert(ours, rules={"*": Keep(bits=8)})
    assert_like(torch.compile(ours, backend="aot_eager"), dense, torch.randn(4, 16, 64))


def test_copies_and_what_a_wrapper_holds_are_reverted_without_a_trace():
    def traces(model: nn.Module) -> dict[str, dict[str, str]]:
        return {name: {key: repr(value) for key, value in vars(m).items()} for name, m in model.named_modules()}

    model = everything()
    before = traces(model)
    for revert_all in (revert, lambda model: revert(nn.Sequential(model))):
        convert(model)
        twin = copy.deepcopy(model)
        for each in (model, twin):
            revert_all(each)
            assert traces(each) == before


@pytest.mark.parametrize("preset", ["max", "recompute"])
def test_a_dense_view_is_the_dense_model_until_it_is_closed(preset):
    dense, x = deep(), torch.randn(32, 65)
    ours, view = copy.deepcopy(dense), DenseView()
    assert convert_layers(ours, Config(preset), "me").converted or preset == "recompute"
    converted = [type(module) for module in ours.modules()]
    for owner in ("another", "me", "me"):
        view.open(ours, owner)
        assert ([type(module) for module in ours.modules()] == converted) is (owner == "another")
    assert state(ours).items() >= {**state(dense), "": state(ours)[""]}.items()
    torch.testing.assert_close(gradients(ours, x), gradients(dense, x), rtol=0, atol=0)
    pickle.loads(pickle.dumps(view)).close()
    view.close()
    assert [type(module) for module in ours.modules()] == converted
    convert(dense, preset)
    torch.testing.assert_close(gradients(ours, x), gradients(dense, x), rtol=0, atol=0)


def test_tools_find_layers_in_their_tables_by_class(monkeypatch):
    table = {nn.ReLU: "of activations"}
    monkeypatch.setitem(sys.modules, "captum.attr._core.deep_lift", SimpleNamespace(SUPPORTED_NON_LINEAR=table))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    convert(model)
    assert table == {nn.ReLU: "of activations", type(model[1]): "of activations"}


def saving(inner: nn.Module) -> Calls:
    """Return a module that saves itself what is compressed."""
    return Calls(lambda model, x: x + model.fc(model.inner(x)).square(), fc=nn.Linear(64, 64), inner=inner)


def test_rules_of_none_leave_alone_what_the_named_module_saves():
    """Of the model itself, that is what it saves in its own forward, and not what is in it."""
    rules: dict[str, None] = {}
    for named, names in ((None, {"(root)", "inner"}), ("(root)", {"inner"}), ("inner", set())):
        rules |= {named: None} if named else {}
        model = saving(saving(nn.Identity()))
        report = convert(model, "balanced", rules=rules)
        model(torch.randn(1024, 64)).sum().backward()
        [hooks] = vars(model)["_saved_tensor_compressions"].values()
        assert {row.fqn for row in hooks.rows} == names
        assert [layer.fqn for layer in report.converted] == ["fc", "inner.fc"]


@pytest.mark.parametrize(
    ("rule", "first", "last", "exact"),
    [
        ("type:linear", nn.GELU(), nn.Linear(64, 64), ["1.weight", "1.bias"]),
        ("1", nn.GELU(), nn.Linear(64, 64), ["1.weight", "1.bias"]),
        ("type:norm", nn.GELU(), nn.LayerNorm(64), ["1.weight", "1.bias"]),
        ("type:activation", nn.Linear(64, 64), nn.GELU(), ["0.bias"]),
    ],
)
def test_what_a_rule_keeps_dense_saves_its_input_uncompressed(
    rule: str, first: nn.Module, last: nn.Module, exact: list[str]
):
    dense, x = nn.Sequential(first, last), torch.randn(1024, 64, requires_grad=True)
    ours = copy.deepcopy(dense)
    assert len(convert(ours, "balanced", rules={rule: None}).converted) == 1
    for _ in range(4):  # as long as it may take until new sites are decided
        added = kept_bytes(ours, x) - kept_bytes(ours[0], x)
        assert added == kept_bytes(dense[1], x)
    found, expected = gradients(ours, x), gradients(dense, x)
    for name in exact:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)


def test_other_rules_on_the_root_are_about_it_as_a_layer():
    with pytest.raises(ValueError, match=r"'\(root\)' matches no layer"):
        convert(saving(nn.Identity()), rules={"(root)": Keep(bits=4)})
    [layer] = convert(nn.Linear(64, 64), rules={"(root)": Keep(bits=3), "*": None}).converted
    assert (layer.fqn, layer.keep) == ("(root)", Keep(bits=3, min_rows_for_low_bits=1024))


@pytest.mark.parametrize("pattern", ["fc", "type:linear"])
def test_a_layer_that_a_rule_leaves_dense_has_an_exact_input(pattern: str):
    model = nn.Sequential(OrderedDict(act=nn.GELU(), fc=nn.Linear(64, 64), norm=nn.LayerNorm(64)))
    x, expected = torch.randn(1024, 64), nn.Linear(64, 64)
    expected.load_state_dict(model.fc.state_dict())
    convert(model, "balanced", rules={pattern: None})
    model[:2](x.requires_grad_()).square().sum().backward()
    expected(nn.functional.gelu(x)).square().sum().backward()
    assert torch.equal(model.fc.weight.grad, expected.weight.grad)


def test_what_is_saved_is_claimed_once():
    model = everything()
    convert(model, rules={"type:saved": Keep(bits=8), "head": Keep(bits=4), "*": None})
    with pytest.raises(ValueError, match=r"already kept compressed by .*HINT"):
        convert(model, rules={"type:saved": Keep(bits=4), "first.qkv": Keep(bits=4), "*": None})


# What is reported.


def test_rows_are_flat_and_plain():
    layers = {"norm": nn.LayerNorm(64), "fc1": nn.Linear(64, 64), "act": nn.GELU(), "fc2": nn.Linear(64, 8)}
    rules = {"fc2": None, "fc1": Keep(bits=None, sparsity=0.5), "act": Keep(bits=4), "norm": None}
    report = convert(nn.Sequential(OrderedDict(layers)), rules=rules)
    rows = report.to_rows()
    assert all(list(row) == list(rows[0]) for row in rows)
    assert all(type(value) in (str, int, float, bool, type(None)) for row in rows for value in row.values())
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    by_name = {row["fqn"]: row for row in rows}
    assert {name for name, row in by_name.items() if row["converted"]} == {"fc1", "act"}
    assert (by_name["fc1"]["sparsity"], by_name["fc1"]["in_features"], by_name["fc1"]["bits"]) == (0.5, 64, None)
    assert (by_name["act"]["operator"], by_name["act"]["bits"], by_name["act"]["sparsity"]) == ("activation", 4, 0.0)
    assert "'fc2'" in by_name["fc2"]["reason"]
    assert "fc2 (Linear): " in report.describe_skipped()
    assert "│ fc1   │ Linear    │ uncompressed values, drops 50 %" in str(report)


def test_nothing_to_do_is_said():
    for model in nn.LSTM(8, 8), nn.Sequential(nn.Embedding(9, 8), nn.GRU(8, 8)), nn.Linear(8, 8):
        with pytest.raises(ValueError, match="nothing would be saved"):
            convert(model, "max")
    with pytest.warns(UserWarning, match=r"No layer of Calls was converted.*HINT"):
        convert(Calls(lambda model, x: model.gru(x)[0], gru=nn.GRU(8, 8)), "max")
    report = convert(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.0), nn.Dropout(0.1)), "max")
    assert [row.describe() for row in report.converted] == ["2 bits, 8 below 1024 rows", "1 bit"]
    report = convert(nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64)), "max")
    assert [row.frozen for row in report.converted] == [True, False]
