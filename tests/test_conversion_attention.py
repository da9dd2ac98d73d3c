"""``convert`` and ``revert`` of attention modules: two layers that share one module."""

from __future__ import annotations

import copy
import pickle
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_actprune import ActivationPrunedLinear, convert, revert
from lightning_actprune.nn import ActivationPrunedMultiheadAttention
from lightning_actprune.nn.attention import RoutedMultiheadAttention

ATTENTION, OUT = "self_attn", "self_attn.out_proj"


class OwnAttention(nn.MultiheadAttention):
    pass


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(66, 3, 99, dropout=0.0)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.linspace(-1, 1, 5 * 2 * 66).sin().view(5, 2, 66)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def state(model: nn.Module) -> dict[str, tuple[type, list[str]]]:
    return {name: (type(m), list(vars(m))) for name, m in model.named_modules()}


def test_both_projections_are_layers_of_their_own():
    model = layer()
    report = convert(model, sparsity=0.25, block_size=16, scope="token")
    attention, out = report.converted[:2]
    assert (attention.fqn, attention.kind, attention.in_features, attention.out_features) == (
        ATTENTION, "MultiheadAttention", 66, 198,
    )  # fmt: skip
    assert (out.fqn, out.kind, out.out_features) == (OUT, "NonDynamicallyQuantizableLinear", 66)
    assert type(model.self_attn) is ActivationPrunedMultiheadAttention
    assert isinstance(model.self_attn.out_proj, ActivationPrunedLinear)
    assert isinstance(model.self_attn.out_proj, NonDynamicallyQuantizableLinear)
    for pruned in (model.self_attn, model.self_attn.out_proj):
        assert (pruned.sparsity, pruned.block_size, pruned.scope) == (0.25, 16, "token")
        assert pruned.owner == model.linear1.owner
    assert "sparsity=0.25, block_size=16, scope='token'" in repr(model.self_attn).splitlines()[1]


@pytest.mark.parametrize(
    ("chosen", "kind"), [(ATTENTION, ActivationPrunedMultiheadAttention), (OUT, RoutedMultiheadAttention)]
)
def test_one_projection_alone_and_back(chosen: str, kind: type):
    model = layer()
    before, printed = state(model), repr(model)
    report = convert(model, include=chosen)
    assert [c.fqn for c in report.converted] == [chosen]
    assert type(model.self_attn) is kind
    assert {ATTENTION, OUT} - {chosen} <= {s.fqn for s in report.skipped}
    assert revert(model) == [chosen]
    assert (state(model), repr(model)) == (before, printed)


@pytest.mark.parametrize("first", [ATTENTION, OUT])
@pytest.mark.parametrize("reverted", [ATTENTION, OUT])
def test_the_projections_may_have_different_owners(first: str, reverted: str):
    model, (second,) = layer(), {ATTENTION, OUT} - {first}
    before = state(model)
    convert(model, include=first, sparsity=0.25)
    convert(model, include=second, sparsity=0.75)
    assert model.get_submodule(first).sparsity == 0.25
    owner = model.get_submodule(reverted).owner
    (kept,) = {ATTENTION, OUT} - {reverted}
    assert revert(model, owner) == [reverted]
    assert model.get_submodule(kept).sparsity == (0.25 if kept == first else 0.75)
    assert isinstance(model.self_attn, RoutedMultiheadAttention)
    assert revert(model) == [kept]
    assert state(model) == before


@pytest.mark.parametrize("claimed", [ATTENTION, OUT])
def test_a_projection_is_claimed_once(claimed: str):
    model = layer()
    convert(model, include=claimed)
    before = state(model)
    with pytest.raises(ValueError, match=rf"'{claimed}' is already converted by convert\(\) #\w+.*HINT"):
        convert(model, include="self_attn*")
    assert state(model) == before


def own_forward() -> nn.MultiheadAttention:
    attention = nn.MultiheadAttention(66, 3)
    attention.forward = MethodType(nn.MultiheadAttention.forward, attention)
    return attention


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: OwnAttention(66, 3), "OwnAttention, whose forward is not known to be nn.MultiheadAttention's"),
        (own_forward, "its forward was replaced on the instance"),
    ],
)
def test_attention_of_unknown_code_is_skipped_with_its_output_projection(make, reason: str):
    model = nn.ModuleDict({"odd": make(), "plain": nn.Linear(66, 3)})
    before = state(model)
    skipped = {s.fqn: s.reason for s in convert(model).skipped}
    assert reason in skipped["odd"]
    assert "uses its weight without calling its forward" in skipped["odd.out_proj"]
    revert(model)
    assert state(model) == before


@pytest.mark.parametrize(("vdim", "converted"), [(64, [ATTENTION, OUT]), (63, [OUT])])
def test_the_smallest_input_counts_for_min_features(vdim: int, converted: list[str]):
    model = nn.ModuleDict({ATTENTION: nn.MultiheadAttention(66, 3, kdim=70, vdim=vdim)})
    assert [c.fqn for c in convert(model).converted] == converted


def test_parameters_and_state_dict_are_unchanged():
    model = layer()
    parameters, keys = list(model.named_parameters()), list(model.state_dict())
    for step in (convert, revert):
        step(model)
        assert list(model.state_dict()) == keys
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in parameters]
        assert all(p is q for p, (_, q) in zip(model.parameters(), parameters, strict=True))
        layer().load_state_dict(model.state_dict())


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_pruned_and_independent(clone):
    model = layer()
    convert(model, sparsity=0.5, block_size=8)
    other = clone(model)
    assert repr(other) == repr(model)
    torch.testing.assert_close(gradients(other), gradients(model), rtol=0, atol=0)
    assert revert(other) == ["self_attn", "self_attn.out_proj", "linear1", "linear2"]
    assert type(model.self_attn) is ActivationPrunedMultiheadAttention


def test_attention_as_the_root():
    model = nn.MultiheadAttention(66, 3)
    assert [c.fqn for c in convert(model).converted] == ["(root)", "out_proj"]
    assert revert(model) == ["(root)", "out_proj"]
    assert type(model) is nn.MultiheadAttention
