"""A compressed module is the same object (names, parameters, hooks, copies, pickles), and every class has a case."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lightning_actprune.convert import convert, revert
from lightning_actprune.operators.base import CompressedLayer
from tests.support.cases import CASES, Case, Holder, tables
from tests.support.compressed import compressed
from tests.support.helpers import all_traces
from tests.support.measured import gradients, run


def saved_and_loaded(model: Holder) -> Holder:
    torch.save(model, buffer := io.BytesIO())
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def assert_same_gradients(first: Holder, second: Holder, case: Case) -> None:
    x = case.input()
    right = gradients(copy.deepcopy(second), x)
    for name, grad in gradients(copy.deepcopy(first), x).items():
        assert torch.equal(grad, right[name]), name


def test_conversion_leaves_everything_in_place_and_reverting_leaves_nothing(case: Case):
    model = case.dense()
    reference, before = copy.deepcopy(model), all_traces(model)
    state = copy.deepcopy(model.state_dict())
    parameters, modules = list(model.named_parameters()), list(model.modules())
    convert(model, rules={f"type:{case.operator}": case.keep, "*": None})
    assert type(model.layer) is not type(reference.layer)
    assert isinstance(model.layer, type(reference.layer))
    assert list(model.state_dict()) == list(state)
    assert model.state_dict()._metadata == state._metadata
    model.load_state_dict(state, strict=True)
    reference.load_state_dict(model.state_dict(), strict=True)
    assert [(name, id(p)) for name, p in model.named_parameters()] == [(name, id(p)) for name, p in parameters]
    assert [id(m) for m in model.modules()] == [id(m) for m in modules]
    assert revert(model)
    assert all_traces(model) == before
    assert repr(model) == repr(reference)
    assert_same_gradients(model, reference, case)
    assert revert(model) == []


def test_copies_and_pickles(case: Case):
    dense, model = case.pair()
    other = copy.deepcopy(model)
    assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
    assert repr(other) == repr(model)
    assert_same_gradients(other, model, case)
    assert revert(other) == revert(copy.deepcopy(model))
    for loaded in (other, saved_and_loaded(model)):  # of a pickle, which is of the dense module
        assert all_traces(loaded) == all_traces(dense)
        assert_same_gradients(loaded, dense, case)
    revert(model)
    for other in (copy.deepcopy(model), saved_and_loaded(model)):
        assert all_traces(other) == all_traces(dense)
        assert_same_gradients(other, dense, case)


def test_hooks_run(case: Case):
    """Those attached before too; backward hooks get the gradients of the layer, forward hooks may change its output."""
    called: list[list[object]] = []
    for converts in (False, True):
        model, seen = case.dense(), []
        model.layer.register_forward_pre_hook(lambda module, args, seen=seen: seen.append("before"))
        model.layer.register_forward_hook(lambda module, args, y, seen=seen: seen.append("after"))
        shapes = lambda module, grad_x, grad_y, seen=seen: seen.append([getattr(g, "shape", None) for g in grad_y])  # noqa: E731
        model.layer.register_full_backward_hook(shapes)
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, seen=seen, name=name: seen.append(name))
        if converts:
            convert(model, rules={f"type:{case.operator}": case.keep, "*": None})
        y = run(model, case.input())
        y.square().sum().backward()
        called.append(seen)
    assert sorted(map(str, called[1])) == sorted(map(str, called[0]))
    _, model = case.pair()
    x = case.input()
    y = run(model, x)
    model.layer.register_forward_hook(lambda module, args, y: (2 * y[0], *y[1:]) if isinstance(y, tuple) else 2 * y)
    assert torch.equal(run(model, x), 2 * y)


def test_a_forward_that_was_wrapped_survives_reverting(case: Case):
    """Whoever wraps it, for example to move weights, holds the method of the converted layer and goes on calling it."""
    dense, model = case.pair()
    x, called = case.input(), []
    for module in filter(lambda module: isinstance(module, CompressedLayer), model.modules()):
        inner = module.forward
        module.forward = lambda *args, inner=inner, **kwargs: called.append(inner) or inner(*args, **kwargs)
    for _ in range(2):
        run(model, x)
    count = len(called) // 2
    assert revert(model)
    dense.load_state_dict(model.state_dict())
    found, right = gradients(model, x), gradients(dense, x)
    assert len(called) == 3 * count > 0
    for name, grad in found.items():
        assert torch.equal(grad, right[name]), name


def test_second_derivatives_are_refused(case: Case):
    """Nodes that lead to no input are not run there, so an error in their own derivative would not be raised."""
    dense, model = case.pair()
    x = case.input()

    def penalised(module: nn.Module) -> torch.Tensor:
        (grad,) = torch.autograd.grad(run(module, x * x).square().sum(), x, create_graph=True)
        return torch.autograd.grad((grad.norm() - 1).square(), x, allow_unused=True)[0]

    with pytest.raises(RuntimeError, match="create_graph=True"):
        penalised(model)
    revert(model)
    try:
        right = penalised(dense)
    except RuntimeError:  # torch implements none for attention on the CPU, nor for hardsigmoid
        assert isinstance(dense.layer, (nn.MultiheadAttention, nn.Hardsigmoid))
        return
    assert torch.equal(penalised(model), right)


@pytest.mark.cases(lambda case: not case.inside and not case.seeded)  # a bit of dropout belongs to one value
def test_dtensors_are_refused(case: Case, mesh: DeviceMesh):
    _, model = case.pair()
    if not list(model.parameters()) and getattr(model.layer, "takes_shards", False):
        return  # a norm without a weight runs on shards
    x = DTensor.from_local(case.input().detach(), mesh, [Replicate()]).requires_grad_()
    with pytest.raises(TypeError, match="DTensors"):
        run(model, x)


def test_a_weight_that_is_still_split_is_refused_with_the_way_out(mesh: DeviceMesh):
    layer = compressed(nn.Linear(64, 64), "linear", bits=4)
    layer.weight = nn.Parameter(DTensor.from_local(layer.weight.detach(), mesh, [Replicate()]))
    with pytest.raises(TypeError, match="fully_shard"):
        layer(torch.randn(8, 64))


def test_a_printed_model_shows_the_settings_of_layers_that_have_any(case: Case):
    dense, model = case.pair()
    assert repr(dense) != repr(model)
    assert (f"bits={case.keep.bits}" in repr(model)) != (case.exact == ("*",))


def test_every_registered_class_has_a_case():
    assert {key for case in CASES.values() for key in case.covers} == {*tables("CLASSES"), *tables("FOREIGN")}
