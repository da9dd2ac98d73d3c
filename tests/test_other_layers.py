"""Conversion of activation functions, norms and the rest: what is converted, what is not and why, what goes back."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import convert, revert
from lightning_actprune.arguments import OTHERS
from lightning_actprune.footprint import SavedTensorMeter
from lightning_actprune.nn import Affine
from lightning_actprune.nn.few_bit import FewBitLayer
from tests.attention import saved_tensors


class OwnNorm(nn.LayerNorm):
    """A norm whose forward is its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Scaled(nn.Module):
    """A block whose residual branch is scaled by a bare parameter, as in many models."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.fc1, self.act, self.fc2 = nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)
        self.gamma = nn.Parameter(torch.full((64,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.fc2(self.act(self.fc1(self.norm(x))))


def model() -> nn.Sequential:
    return nn.Sequential(OrderedDict(first=Scaled(), second=Scaled(), head=nn.Linear(64, 3)))


def kept(module: nn.Module, x: Tensor) -> int:
    """Return the bytes that one forward keeps."""
    with SavedTensorMeter(module, x) as meter:
        module(x).sum()
    return meter.report().total_bytes


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    return torch.autograd.grad(module(x).square().mean(), list(module.parameters()))


def test_only_linear_layers_are_converted_unless_asked_for_more():
    report = convert(module := model())
    assert report.few_bit == []
    assert report.rest is None
    assert report.left == {"activation": 2, "norm": 2}
    assert not any(isinstance(m, FewBitLayer) for m in module.modules())


def test_everything_is_converted_on_request_and_keeps_a_fraction():
    dense, x = model(), torch.randn(64, 32, 64)
    ours = copy.deepcopy(dense)
    report = convert(ours, sparsity=0.0, value_format="int4", others=True)
    assert {(layer.fqn, layer.operator, layer.value_format) for layer in report.few_bit} == {
        (f"{block}.{name}", operator, OTHERS[operator])
        for block in ("first", "second")
        for name, operator in (("act", "activation"), ("norm", "norm"))
    }
    assert report.rest == OTHERS["rest"]
    assert kept(ours, x) < 0.3 * kept(dense, x)
    for mine, exact in zip(gradients(ours, x), gradients(dense, x), strict=True):
        assert torch.nn.functional.cosine_similarity(mine.flatten(), exact.flatten(), 0) > 0.99


@pytest.mark.parametrize("operator", ["activation", "norm", "rest"])
def test_each_operator_can_be_asked_for_alone_and_saves(operator):
    x, dense = torch.randn(64, 32, 64), model()
    alone = copy.deepcopy(dense)
    linear = copy.deepcopy(dense)
    convert(linear, sparsity=0.0, value_format="int4")
    report = convert(alone, sparsity=0.0, value_format="int4", others={operator: "int8"})
    assert {layer.operator for layer in report.few_bit} == ({operator} if operator != "rest" else set())
    assert kept(alone, x) < kept(linear, x)


def test_reverting_leaves_nothing():
    module = model()
    before, plain = copy.deepcopy(module.state_dict()), [type(m) for m in module.modules()]
    convert(module, others=True)
    assert set(revert(module)) >= {"first.act", "second.norm", "head"}
    assert [type(m) for m in module.modules()] == plain
    assert all(m.__dict__.keys() == nn.Module().__dict__.keys() for m in module.modules() if type(m) is nn.Sequential)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_reverting_one_owner_leaves_the_others_layers():
    module = model()
    convert(module, include="first.*", others=True)
    [*_] = convert(module, include=["second.*", "head"], others={"norm": "int2"}).few_bit
    owner = module.second.norm.owner
    assert revert(module, owner) == ["second.fc1", "second.fc2", "head", "second.norm"]
    assert isinstance(module.first.norm, FewBitLayer)
    assert revert(module) == ["first.fc1", "first.fc2", "first.norm", "first.act"]


def test_what_is_not_converted_is_listed_with_its_reason():
    module = nn.Sequential(
        OrderedDict(own=OwnNorm(64), out=nn.GELU(), replaced=nn.ReLU(), norm=nn.LayerNorm(64), fc=nn.Linear(64, 64))
    )
    module.replaced.forward = torch.relu
    report = convert(module, exclude="out", others=True)
    reasons = {layer.fqn: layer.reason for layer in report.skipped}
    assert reasons["own"].endswith("OwnNorm, whose forward may be another than that of the class it derives from")
    assert reasons["out"] == "matches the `exclude` pattern 'out'"
    assert reasons["replaced"].startswith("its forward was replaced on the instance")
    assert [layer.fqn for layer in report.few_bit] == ["norm"]


def test_a_model_without_linear_layers_can_be_converted():
    module = nn.Sequential(nn.LayerNorm(64), nn.GELU())
    assert len(convert(module, others=True).few_bit) == 2
    with pytest.raises(ValueError, match="has no linear layers"):
        convert(nn.Sequential(nn.LayerNorm(64)))
    with pytest.raises(ValueError, match="`include` pattern 'x' matches no convertible layer"):
        convert(nn.Sequential(nn.LayerNorm(64)), include="x", others=True)


def test_a_layer_claimed_twice_is_an_error():
    module = model()
    convert(module, others={"norm": "int4"})
    with pytest.raises(ValueError, match=r"'first.norm' is already converted by .*HINT"):
        convert(module, include="*.norm", others={"norm": "int4"})


@pytest.mark.parametrize(
    ("others", "error", "message"),
    [
        ("all", TypeError, r"`others` must be a bool or a mapping, got 'all'.*HINT"),
        ({"dropout": "int4"}, ValueError, r"`others` must name 'activation', .* only, got 'dropout'.*HINT"),
        ({"norm": "same"}, ValueError, r"`others\['norm'\]` must be a format of few bits, got 'same'.*HINT"),
        ({"activation": "fp8"}, ValueError, r"`others\['activation'\]` must be .* of integers, got 'fp8'.*HINT"),
        ({"norm": "int5"}, ValueError, r"`others\['norm'\]` must be one of .*got 'int5'.*HINT"),
    ],
)
def test_bad_requests_are_refused(others, error, message):
    with pytest.raises(error, match=message):
        convert(model(), others=others)


def test_a_layer_that_is_not_asked_for_is_not_claimed():
    module = model()
    convert(module, include="*.norm", others={"norm": "int4"})
    report = convert(module)
    assert len(report.converted) == 5
    assert report.left == {"activation": 2}


def test_copies_and_pickles_of_a_converted_model_work():
    module, x = model(), torch.randn(4, 32, 64)
    convert(module, sparsity=0.5, others=True)
    right = gradients(module, x)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert isinstance(copied.first.norm, FewBitLayer)
        for mine, first in zip(gradients(copied, x), right, strict=True):
            torch.testing.assert_close(mine, first)
        assert revert(copied)
        assert type(copied.first.norm) is nn.LayerNorm


def test_a_graph_made_before_reverting_still_runs_backward():
    module = model()
    convert(module, others=True)
    loss = module(torch.randn(4, 32, 64)).sum()
    revert(module)
    loss.backward()
    assert all(p.grad is not None for p in module.parameters())


def test_evaluation_keeps_nothing_and_is_exact():
    dense, x = model(), torch.randn(4, 32, 64)
    ours = copy.deepcopy(dense)
    convert(ours, others=True)
    with torch.no_grad(), saved_tensors() as saved:
        assert torch.equal(ours(x), dense(x))
    assert saved == []


class Pooled(nn.Module):
    """A block whose pooling compares what it saved with its result."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.pool, self.head = nn.Linear(64, 64), Largest(), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.body(x) * 2))


class Largest(nn.Module):
    """Pooling over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.amax(1)


def test_an_operation_that_few_bits_would_break_is_a_clear_error_and_can_be_left_out():
    module, x = Pooled(), torch.randn(32, 64, 64)
    right = gradients(module, x)
    convert(module, others={"rest": "int8"})
    with pytest.raises(RuntimeError, match=r"AmaxBackward0 compares .* module 'pool' saved that .*HINT"):
        gradients(module, x)
    revert(module)
    convert(module, sparsity=0.0, value_format="int8", exclude="pool", others={"rest": "int8"})
    for mine, exact in zip(gradients(module, x), right, strict=True):
        assert torch.nn.functional.cosine_similarity(mine.flatten(), exact.flatten(), 0) > 0.99


@pytest.mark.parametrize("norm", [nn.LayerNorm(64), Affine(64)], ids=["norm", "affine"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_converted_layers_return_may_be_written_to(norm, compiled):
    dense = nn.Sequential(nn.Linear(64, 64), copy.deepcopy(norm), nn.ReLU(inplace=True))
    ours = copy.deepcopy(dense)
    convert(ours, sparsity=0.0, value_format="int8", others={"norm": "int8", "affine": "int8"})
    x = torch.randn(4, 16, 64)
    run = torch.compile(ours, backend="aot_eager") if compiled else ours
    parameters = list(ours.parameters())
    for mine, exact in zip(torch.autograd.grad(run(x).square().mean(), parameters), gradients(dense, x), strict=True):
        assert torch.nn.functional.cosine_similarity(mine.flatten(), exact.flatten(), 0) > 0.99


def test_a_copy_is_reverted_without_a_trace():
    module = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 1))
    before = {name: {key: repr(value) for key, value in vars(m).items()} for name, m in module.named_modules()}
    for _ in range(2):
        convert(module, 0.5, value_format="int8", others=True)
        module = copy.deepcopy(module)
        revert(module)
    assert {name: {k: repr(v) for k, v in vars(m).items()} for name, m in module.named_modules()} == before
    assert b"lightning_actprune" not in pickle.dumps(module)


def test_reverting_a_wrapper_takes_the_hooks_off_what_it_wraps():
    inner = model()
    convert(inner, others=True)
    revert(nn.Sequential(inner))
    assert "_few_bit_savings" not in inner.__dict__
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in inner.modules())


def test_the_rest_is_claimed_once():
    module = model()
    convert(module, others={"rest": "int8"}, include="head")
    with pytest.raises(ValueError, match=r"already stored in few bits by .*HINT"):
        convert(module, others={"rest": "int4"}, include="first.*")


def test_an_interrupted_forward_is_over_when_the_model_is_called_again():
    module, x = model(), torch.randn(64, 32, 64)
    convert(module, others={"rest": "int8"})

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = module.second.fc1.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        module(x)
    handle.remove()
    gradients(module, x)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
