"""Layers that scale each feature and prune their input: where they pack nothing, compiled, copied, refusals."""

from __future__ import annotations

import copy
import doctest
import io

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from lightning_actprune import convert, revert
from lightning_actprune.nn import ActivationPrunedAffine, Affine, affine
from lightning_actprune.nn.settings import PrunedLayer
from tests.affine import (
    FEATURES,
    MAKERS,
    SPARSITY,
    TimmLayerScale,
    factors_gradient,
    gradients,
    pair,
    pruned,
    scaling,
)
from tests.attention import saved_tensors
from tests.oracle import relative_error

each_kind = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@each_kind
@pytest.mark.parametrize("sparsity", [0.0, SPARSITY])
@pytest.mark.parametrize("why", ["frozen", "no_grad", "eval and no_grad", "nothing to store"])
def test_the_dense_layer_where_nothing_is_packed(make, sparsity, why):
    value_format = "same" if why == "nothing to store" else "int4"
    dense, ours = pair(make, value_format=value_format, sparsity=sparsity)
    if why == "nothing to store":
        ours[0].sparsity = 0.0
    for module in (dense, ours):
        module.requires_grad_(why != "frozen")
        module.train(why != "eval and no_grad")
    x = torch.randn(3, 5, FEATURES, requires_grad=True)
    with torch.set_grad_enabled("no_grad" not in why), saved_tensors() as saved:
        y = ours(x)
    assert torch.equal(y, dense(x))
    if "no_grad" in why:
        assert saved == []
        assert not y.requires_grad
        return
    assert all(t.dtype == torch.float32 for t in saved)
    inputs = [(x, *(p for p in module.parameters() if p.requires_grad)) for module in (ours, dense)]
    grad_y = torch.randn_like(y)
    grads = [torch.autograd.grad(m(x), i, grad_y) for m, i in zip((ours, dense), inputs, strict=True)]
    assert all(torch.equal(mine, right) for mine, right in zip(*grads, strict=True))


def test_evaluation_mode_with_gradients_packs_all_the_same():
    _, ours = pair(MAKERS["affine"])
    x = torch.randn(3, 5, FEATURES, requires_grad=True)
    with saved_tensors() as saved:
        ours.eval()(x)
    assert all(t.data_ptr() != x.data_ptr() for t in saved)


def test_a_layer_used_twice_adds_up():
    _, ours = pair(MAKERS["affine"])
    x = torch.randn(3, 5, FEATURES)
    weight = ours[0].weight
    inner = ours(x)
    y = ours(inner)
    grad_y = torch.randn_like(y)
    twice = torch.autograd.grad(y, weight, grad_y, retain_graph=True)[0]
    (through,) = torch.autograd.grad(y, inner, grad_y)
    alone = factors_gradient(pruned(inner), grad_y) + factors_gradient(pruned(x), through)
    assert relative_error(twice, alone) < 1e-5


def test_sparsity_may_change_between_steps():
    _, ours = pair(MAKERS["affine"])
    x = torch.randn(3, 5, FEATURES, requires_grad=True)
    grad_y = torch.randn_like(x)
    for sparsity in (0.0, 0.25, 0.75):
        ours[0].sparsity = sparsity
        dw = gradients(ours, x, grad_y)[1]
        assert relative_error(dw, factors_gradient(pruned(x, sparsity=sparsity), grad_y)) < 1e-5


@pytest.mark.parametrize("value_format", ["same", "int4"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_schedule_compiles_twice(value_format):
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    _, ours = pair(MAKERS["affine"], value_format=value_format)
    eager = copy.deepcopy(ours)
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    x = torch.randn(3, 5, FEATURES, requires_grad=True)
    grad_y = torch.randn_like(x)
    for sparsity in (0.2, 0.3, 0.4, 0.5):
        ours[0].sparsity = eager[0].sparsity = sparsity
        traced = torch.autograd.grad(compiled(x), (x, *ours.parameters()), grad_y)
        for mine, right in zip(traced, gradients(eager, x, grad_y), strict=True):
            torch.testing.assert_close(mine, right)
    assert counter.frame_count == 2


@each_kind
def test_a_compiled_layer_in_few_bits_is_one_graph_and_equal(make):
    torch.compiler.reset()
    _, ours = pair(make, value_format="int4", sparsity=0.0)
    x = torch.randn(4, 5, FEATURES, requires_grad=True)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    grads = [torch.autograd.grad(model(x).square().sum(), list(ours.parameters())) for model in (ours, compiled)]
    for eager, other in zip(*grads, strict=True):
        torch.testing.assert_close(other, eager)


@each_kind
def test_copies_and_what_is_printed(make):
    dense, ours = pair(make, value_format="int4")
    x = torch.randn(3, 5, FEATURES, requires_grad=True)
    grad_y = torch.randn_like(x)
    other = copy.deepcopy(ours)
    assert type(other[0]) is type(ours[0])
    for mine, right in zip(gradients(other, x, grad_y), gradients(ours, x, grad_y), strict=True):
        assert torch.equal(mine, right)
    assert list(ours.state_dict()) == list(dense.state_dict())
    assert "sparsity=0.6, block_size=16, scope='sample', value_format='int4')" in repr(ours[0])


def test_a_saved_layer_is_loaded_as_it_was():
    layer = ActivationPrunedAffine(FEATURES, sparsity=0.5, value_format="int8", scale=0.5)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    other = torch.load(buffer, weights_only=False)
    assert type(other) is ActivationPrunedAffine
    assert (other.sparsity, other.value_format) == (0.5, "int8")
    assert repr(Affine(8)) == "Affine(8, bias=True)"
    assert repr(ActivationPrunedAffine(8, False, sparsity=0.5)) == (
        "ActivationPrunedAffine(8, bias=False, sparsity=0.5, block_size=32, scope='sample')"
    )


@each_kind
def test_layers_go_back_to_what_they_were(make):
    dense, ours = pair(make)
    assert isinstance(ours[0], type(dense[0]))
    assert isinstance(ours[0], PrunedLayer)
    assert revert(ours) == ["0"]
    assert type(ours[0]) is type(dense[0])
    assert ours[0].__dict__.keys() == dense[0].__dict__.keys()


def test_scaling_in_place_is_left_to_timm():
    ours = nn.Sequential(TimmLayerScale(FEATURES, inplace=True), nn.Linear(FEATURES, FEATURES))
    report = convert(ours, others=scaling("int4"))
    assert {s.fqn: s.reason for s in report.skipped} == {"0": "scales in place, of which torch keeps a copy"}
    assert type(ours[0]) is TimmLayerScale
    later = nn.Sequential(TimmLayerScale(FEATURES))
    convert(later, others=scaling("int4"))
    later[0].inplace = True
    x = torch.randn(2, FEATURES)
    with torch.no_grad():
        assert later(x) is x


def test_inputs_that_are_not_packed_are_left_to_torch():
    """What torch multiplies all the same: other numbers, values that are expanded, and fewer dimensions."""
    for make, x in (
        (MAKERS["affine"], torch.ones(2, FEATURES, dtype=torch.int64)),
        (MAKERS["affine"], torch.randn(2, 1)),
        (MAKERS["affine"], torch.randn(())),
        (MAKERS["timm affine"], torch.randn(2, FEATURES)),
    ):
        dense, ours = pair(make)
        y, right = ours(x), dense(x)
        assert torch.equal(y, right)
        found, exact = (torch.autograd.grad(o.sum(), list(m.parameters())) for o, m in ((y, ours), (right, dense)))
        assert all(torch.equal(mine, other) for mine, other in zip(found, exact, strict=True))


def test_timms_affine_takes_more_dimensions():
    dense, ours = pair(MAKERS["timm affine"])
    x = torch.randn(2, 3, 4, FEATURES, requires_grad=True)
    grad_y = torch.randn_like(x)
    (dx, dw, _), exact = gradients(ours, x, grad_y), gradients(dense, x, grad_y)
    assert torch.equal(ours(x), dense(x))
    assert torch.equal(dx, exact[0])
    assert relative_error(dw.flatten(), factors_gradient(pruned(x), grad_y)) < 1e-5


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_what_cannot_be_stored_is_refused(sparsity):
    _, ours = pair(MAKERS["affine"], value_format="int4", sparsity=sparsity)
    with pytest.raises(TypeError, match=r"float64 values cannot be stored as 'int4'.* HINT"):
        ours.double()(torch.randn(2, FEATURES, dtype=torch.float64))


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"`sparsity` must be in \[0, 1\), got 1"):
        ActivationPrunedAffine(8, sparsity=1)
    with pytest.raises(ValueError, match="`block_size` must be at least 8"):
        ActivationPrunedAffine(8, sparsity=0.5, block_size=4, value_format="int4")


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_dtensors_are_refused(tmp_path, sparsity):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        _, ours = pair(MAKERS["affine"], value_format="int4", sparsity=sparsity)
        x = DTensor.from_local(torch.randn(2, 5, FEATURES), mesh, [Replicate()])
        with pytest.raises(TypeError, match=r"cannot take DTensors.*HINT"):
            ours(x)
    finally:
        dist.destroy_process_group()


def test_examples_of_the_docstrings():
    assert doctest.testmod(affine).failed == 0
