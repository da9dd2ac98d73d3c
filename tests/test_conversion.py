"""``convert`` and ``revert``: what stays the same object, and what goes back."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lightning_actprune import ActivationPrunedLinear, convert, revert
from tests.conversion_models import TwoNames, deep, gradients, mlp

# What stays the same.


def test_state_dict_is_unchanged_and_loads_into_the_dense_model():
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    convert(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert after._metadata == before._metadata
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert mlp().load_state_dict(after, strict=True).missing_keys == []


def test_parameters_are_the_same_objects_and_no_buffer_appears():
    model = mlp()
    before = list(model.named_parameters())
    for step in (convert, revert):
        step(model)
        after = list(model.named_parameters())
        assert [name for name, _ in after] == [name for name, _ in before]
        assert all(new is old for (_, new), (_, old) in zip(after, before, strict=True))
        assert list(model.buffers()) == []


def test_optimizer_built_before_conversion_updates_the_pruned_layers():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    convert(model, sparsity=0.5, block_size=8)
    before = copy.deepcopy(model.state_dict())
    grads = gradients(model, torch.randn(4, 5, 65))
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert grads[name].abs().sum() > 0
        torch.testing.assert_close(parameter.detach(), before[name] - 0.5 * grads[name])


@pytest.mark.parametrize("pattern", ["encode", "decode", ["dec*"], "*"], ids=str)
def test_layer_under_two_names_stays_one_and_matches_by_either(pattern):
    model = TwoNames()
    report = convert(model, include=pattern)
    assert [layer.fqn for layer in report.converted] == ["encode"]
    assert report.skipped == []
    assert model.encode is model.decode
    assert type(model.decode) is ActivationPrunedLinear
    assert revert(model) == ["encode"]


def test_layer_under_two_names_is_excluded_by_either():
    model = nn.ModuleDict({"tied": TwoNames(), "free": nn.Linear(65, 65)})
    report = convert(model, exclude="*.decode")
    assert [layer.fqn for layer in report.converted] == ["free"]
    assert [(layer.fqn, layer.reason) for layer in report.skipped] == [
        ("tied.encode", "matches the `exclude` pattern '*.decode'")
    ]


def test_tied_parameter_stays_tied():
    model = nn.ModuleDict({"embed": nn.Embedding(11, 65), "head": nn.Linear(65, 11, bias=False)})
    model["head"].weight = model["embed"].weight
    convert(model)
    assert model["head"].weight is model["embed"].weight


def test_hooks_still_fire_after_conversion_and_after_revert():
    model, calls = mlp(), []
    model.fc1.register_forward_pre_hook(lambda *_: calls.append("pre"))
    model.fc1.register_forward_hook(lambda *_: calls.append("forward"))
    model.fc1.register_full_backward_hook(lambda *_: calls.append("backward"))
    model.fc1.weight.register_post_accumulate_grad_hook(lambda _: calls.append("grad"))
    for step in (convert, revert):
        step(model)
        calls.clear()
        gradients(model, torch.randn(2, 65, requires_grad=True))
        assert sorted(calls) == ["backward", "forward", "grad", "pre"]


def test_training_flags_are_kept():
    model = mlp()
    model.fc2.eval()
    flags = [m.training for m in model.modules()]
    for step in (convert, revert):
        step(model)
        assert [m.training for m in model.modules()] == flags


def test_printing_shows_the_settings_and_revert_restores_it():
    model = mlp()
    before = repr(model)
    convert(model, sparsity=0.25, block_size=16, scope="token")
    line = "in_features=97, out_features=3, bias=True, sparsity=0.25, block_size=16, scope='token')"
    assert f"(fc2): ActivationPrunedLinear({line}" in repr(model)
    revert(model)
    assert repr(model) == before


def test_report_holds_sizes_and_settings():
    layer = convert(mlp(), sparsity=0.25, block_size=16, scope="token").converted[1]
    assert (layer.fqn, layer.kind, layer.in_features, layer.out_features) == ("fc2", "Linear", 97, 3)
    assert (layer.sparsity, layer.block_size, layer.scope) == (0.25, 16, "token")


def test_deepcopy_is_pruned_and_independent():
    model, x = mlp(), torch.randn(3, 5, 65)
    convert(model, sparsity=0.5, block_size=8)
    clone = copy.deepcopy(model)
    assert clone.fc1.weight is not model.fc1.weight
    assert repr(clone) == repr(model)
    torch.testing.assert_close(gradients(clone, x), gradients(model, x), rtol=0, atol=0)
    assert revert(clone) == ["fc1", "fc2"]
    assert type(model.fc1) is ActivationPrunedLinear
    assert type(clone.fc1) is nn.Linear


def test_pickle_of_the_converted_model_keeps_the_pruning():
    model, x = mlp(), torch.randn(3, 5, 65)
    convert(model, sparsity=0.5, block_size=8)
    loaded = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(gradients(loaded, x), gradients(model, x), rtol=0, atol=0)
    assert revert(loaded) == ["fc1", "fc2"]


def test_pickle_after_revert_loads_without_the_package(tmp_path):
    model = mlp()
    convert(model)
    torch.save(model, tmp_path / "pruned.pt")
    revert(model)
    torch.save(model, tmp_path / "reverted.pt")
    script = """
import sys
sys.modules["lightning_actprune"] = None  # every import of it fails
import torch
model = torch.load("reverted.pt", weights_only=False)
print(type(model.fc1) is torch.nn.Linear, model(torch.ones(65)).shape == (3,))
try:
    torch.load("pruned.pt", weights_only=False)
except ImportError:
    print("blocked")
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["True", "True", "blocked"], run.stderr


# Revert.


def test_revert_leaves_exactly_what_was_there():
    model = deep()
    model.head.tag = "mine"
    before = {name: (type(m), list(m.__dict__)) for name, m in model.named_modules()}
    names = [layer.fqn for layer in convert(model, scope="token").converted]
    assert revert(model) == names
    assert {name: (type(m), list(m.__dict__)) for name, m in model.named_modules()} == before
    assert revert(model) == []


def test_revert_of_one_owner_leaves_the_others():
    model = mlp()
    convert(model, include="fc1")
    convert(model, include="fc2", sparsity=0.25)
    assert revert(model, model.fc2.owner) == ["fc2"]
    assert (type(model.fc1), type(model.fc2)) == (ActivationPrunedLinear, nn.Linear)


def test_revert_keeps_a_parametrization_registered_after_conversion():
    model, x = mlp(), torch.randn(3, 65)
    convert(model)
    parametrizations.weight_norm(model.fc1)
    y = model(x)
    revert(model)
    assert not isinstance(model.fc1, ActivationPrunedLinear)
    assert torch.equal(model(x), y)


def test_converting_twice_names_the_layer_and_the_first_owner():
    model = mlp()
    convert(model, sparsity=0.25)
    with pytest.raises(ValueError, match=r"Layer 'fc1' is already converted by convert\(\) #\w+.*HINT"):
        convert(model, sparsity=0.75)
    assert (model.fc1.sparsity, model.fc2.sparsity) == (0.25, 0.25)


def test_claim_on_the_last_layer_leaves_the_first_dense():
    model = mlp()
    convert(model, include="fc2")
    with pytest.raises(ValueError, match="'fc2' is already converted"):
        convert(model)
    assert type(model.fc1) is nn.Linear
