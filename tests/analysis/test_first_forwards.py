"""``FirstForwards``: what two forwards of a loop show, which forwards it lets pass, and that it leaves nothing."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from lightning_actprune import convert, revert
from lightning_actprune.analysis.first_batch import RetentionProbe
from lightning_actprune.analysis.first_forwards import FirstForwards
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.codec import dispatch
from lightning_actprune.codec.private import top_saved_tensors_hooks
from tests.support.conversion_models import Calls
from tests.support.helpers import assert_plain, pruned_layers


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 64))


def make_batch() -> Tensor:
    return torch.randn(1024, 64, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, steps: int, forward: Any = None) -> list[float]:
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        loss = (forward or model)(make_batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def is_watched(model: nn.Module) -> bool:
    """Return True if the next forward of the model is watched; its own hooks are those of scopes, two in number."""
    return len(model._forward_hooks) == 2


def test_it_does_what_the_probe_and_the_meter_do(monkeypatch):
    monkeypatch.setattr(dispatch, "_interpreting", lambda: False)
    ours, theirs = build(), build()
    report, expected = convert(ours, "max"), convert(theirs, "max")
    keys, watch = list(ours.state_dict()), FirstForwards(ours, report)
    with pytest.warns(UserWarning, match="do not run here .device cpu is not cuda."):
        losses = train(ours, 1)
    assert losses == train(build(), 1)
    assert pruned_layers(ours) == ["0", "2", "4"]
    assert losses + train(ours, 3) == pytest.approx(train(build(), 4), rel=1e-3)
    assert not is_watched(ours)

    x = make_batch()
    with RetentionProbe(theirs, x) as probe:
        theirs(x)
    probe.apply(expected)
    assert report == expected
    assert [layer.fqn for layer in report.skipped] == ["0"]
    with SavedTensorMeter(theirs, x) as meter:
        theirs(x)
    assert watch.memory == meter.report()
    assert list(ours.state_dict()) == keys
    revert(ours)
    assert_plain(ours)


def call_without_gradients(model: nn.Module) -> None:
    with torch.no_grad():
        model(make_batch())


def call_in_evaluation(model: nn.Module) -> None:
    model.eval()
    model(make_batch()).sum().backward()
    model.train()


def call_and_raise(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(3, 5))


def call_a_replica(model: nn.Module) -> None:
    copy.copy(model)(make_batch())


def call_under_a_transform(model: nn.Module) -> None:
    def loss(parameters: Any) -> Tensor:
        return torch.func.functional_call(model, parameters, make_batch()).mean()

    revert(model, "nobody")  # as usual, it does not end the watch
    torch.func.grad(loss)(dict(model.named_parameters()))


@pytest.mark.parametrize(
    "call", [call_without_gradients, call_in_evaluation, call_and_raise, call_a_replica, call_under_a_transform]
)
@pytest.mark.parametrize("before", [0, 1])
def test_some_forwards_are_not_watched(call: Any, before: int):
    model = build()
    report = convert(model, "paper")  # which sets no hooks for saved tensors, so that transforms run
    watch = FirstForwards(model, report)
    train(model, before)
    call(model)
    assert watch.memory is None
    assert top_saved_tensors_hooks(False) is None
    train(model, 2 - before)
    assert watch.memory is not None
    assert [layer.fqn for layer in report.converted] == ["2"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_in_a_checkpoint_stays_converted(reentrant: bool):
    model = build()
    FirstForwards(model, convert(model, "max"))
    run = partial(checkpoint, model, use_reentrant=reentrant)
    losses = train(model, 3, lambda x: run(x.requires_grad_()))
    assert losses == pytest.approx(train(build(), 3), rel=1e-3)
    assert pruned_layers(model) == ["0", "2", "4"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_two_forwards_before_backward_with_a_checkpoint_inside(reentrant: bool):
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return model.tail(checkpoint(model.middle, model.head(x), use_reentrant=reentrant))

    def make() -> nn.Module:
        return Calls(forward, head=build(), middle=build(), tail=build())

    model, dense = make(), make()
    watch = FirstForwards(model, report := convert(model, "max"))
    losses = [train(each, 2, lambda x, each=each: each(x) + each(-x)) for each in (model, dense)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert watch.memory is not None
    assert {layer.fqn for layer in report.converted} >= {"middle.0", "middle.2", "middle.4"}


def test_a_model_that_calls_itself_stays_converted():
    model = Calls(lambda model, x: model.net(x) if x.shape[0] < 9 else model(x[:8]), net=build())
    FirstForwards(model, convert(model, "max"))
    train(model, 3)
    assert pruned_layers(model) == ["net.0", "net.2", "net.4"]
    assert not is_watched(model)


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_interrupt_leaves_nothing_open_for_long(goes_on: bool):
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        y = model.net(x)
        if next(interrupts):
            raise KeyboardInterrupt
        return y

    interrupts = iter([True, False])
    model = Calls(forward, net=build())
    FirstForwards(model, convert(model, "paper"))
    with pytest.raises(KeyboardInterrupt):
        train(model, 1)
    if goes_on:
        train(model, 1)
    else:
        revert(model)
    assert top_saved_tensors_hooks(False) is None
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_copies_are_not_watched():
    model = build()
    watch = FirstForwards(model, report := convert(model, "max"))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        train(copied, 2)
        revert(copied)
        assert_plain(copied)
    assert watch.memory is None
    train(model, 2)
    assert watch.memory is not None
    assert [layer.fqn for layer in report.skipped] == ["0"]


@pytest.mark.integration
@pytest.mark.parametrize("inside", [True, False])
def test_a_compiled_model_is_compiled_once_and_stays_converted(inside: bool):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = build()
    if inside:
        model.compile(backend=counter, fullgraph=True)
    FirstForwards(model, convert(model, "max"))
    compiled = model if inside else torch.compile(model, backend=counter, fullgraph=True)
    assert train(model, 4, compiled) == pytest.approx(train(build(), 4), rel=1e-3)
    assert counter.frame_count == 1
    assert pruned_layers(model) == ["0", "2", "4"]


@pytest.mark.integration
def test_a_compiled_part_runs_eagerly_in_the_first_forward_alone():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = nn.Sequential(build(), nn.Linear(64, 64))
    model[0].compile(backend=counter)
    watch = FirstForwards(model, report := convert(model, "max"))
    train(model, 1)
    assert counter.frame_count == 0
    train(model, 3)
    assert counter.frame_count == 1
    assert watch.memory.compiled_bytes > 0
    assert [layer.fqn for layer in report.skipped] == ["0.0"]
