"""Saved-tensor hooks of others: they get the packed tensors and nothing else, and the package's own hand on to them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    disable_saved_tensors_hooks,
    save_on_cpu,
    saved_tensors_hooks,
)

from lightning_actprune import HolderProbe, convert, functional
from lightning_actprune.footprint import SavedTensorMeter
from tests.allocated import growth


class Projections(nn.Module):
    """Three layers on one tensor that nothing else keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(72, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = -x
        return self.q(y) + self.k(y) + self.v(y)


class Hooks:
    """Hooks that hold what ``copy`` makes of a tensor, and count what they are asked for."""

    def __init__(self, copy: Callable[[Tensor], Tensor] = lambda t: t.detach().clone()) -> None:
        self.copy = copy
        self.packed: list[Tensor] = []
        self.unpacked = 0

    def pack(self, tensor: Tensor) -> tuple[str, Tensor]:
        self.packed.append(tensor.detach())
        return "held", self.copy(tensor)

    def unpack(self, held: tuple[str, Tensor]) -> Tensor:
        self.unpacked += 1
        return held[1]

    def open(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.pack, self.unpack)

    def sizes(self, model: nn.Module) -> list[int]:
        """Return the bytes of what was packed, parameters aside."""
        parameters = {p.data_ptr() for p in model.parameters()}
        return sorted(t.nbytes for t in self.packed if t.data_ptr() not in parameters)


def made() -> tuple[Projections, Tensor, list[int]]:
    """Return a pruned model, its input, and the bytes of what one of its layers packs."""
    model, x = Projections(), torch.randn(4, 10, 72, requires_grad=True)
    convert(model, sparsity=0.6, block_size=16)
    packed = functional.pack(-x.detach(), sparsity=0.6, block_size=16)
    return model, x, sorted(t.nbytes for t in (packed.values, packed.bitmap, packed.offsets))


def gradients(model: nn.Module, x: Tensor, *contexts: Any) -> list[Tensor]:
    """Return the gradients of one step whose forward runs in ``contexts``, the first of them outermost."""
    model.zero_grad(set_to_none=True)
    x.grad = None
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        loss = model(x).square().sum()
    loss.backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def test_a_pack_hook_gets_the_packed_input_and_the_weight_alone():
    model, x, packed = made()
    expected, hooks = gradients(model, x), Hooks()
    # Each of the three packs anew, since the hooks hold copies.
    square = x.numel() // 72 * 64 * 4
    torch.testing.assert_close(gradients(model, x, hooks.open()), expected, rtol=0, atol=0)
    assert hooks.sizes(model) == sorted([*packed * 3, square])
    assert hooks.unpacked == len(hooks.packed) == 3 * 4 + 1


@pytest.mark.parametrize("moved", [False, True], ids=["held", "copied"])
def test_what_hooks_hold_is_shared_if_they_hold_the_very_tensor(moved: bool):
    model, x, packed = made()
    hooks = Hooks() if moved else Hooks(lambda t: t)

    def forward() -> Tensor:
        with hooks.open():
            y = model(x)
        hooks.packed.clear()
        return y

    forward()
    y, nbytes = growth(forward)
    weights = 3 * model.q.weight.nbytes
    assert nbytes == y.nbytes + (sum(packed) * 3 + weights if moved else sum(packed))


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_save_on_cpu_changes_nothing(autocast: bool):
    model, x, _ = made()

    def run(*contexts: Any) -> list[Tensor]:
        return gradients(model, x, torch.autocast("cpu", torch.bfloat16, enabled=autocast), *contexts)

    expected = run()
    torch.testing.assert_close(run(save_on_cpu()), expected, rtol=0, atol=0)
    torch.testing.assert_close(run(save_on_cpu(), save_on_cpu()), expected, rtol=0, atol=0)


@pytest.mark.parametrize("recorder", [SavedTensorMeter, HolderProbe])
@pytest.mark.parametrize("inside", [False, True])
def test_hooks_around_and_inside_a_recorder_get_what_they_get_without(recorder: Any, inside: bool):
    model, x, packed = made()
    expected, alone = gradients(model, x), Hooks()
    gradients(model, x, alone.open())
    hooks, opened = Hooks(), recorder(model)
    contexts = (opened, hooks.open()) if inside else (hooks.open(), opened)
    torch.testing.assert_close(gradients(model, x, *contexts), expected, rtol=0, atol=0)
    assert hooks.sizes(model) == alone.sizes(model)
    assert hooks.unpacked == alone.unpacked
    if recorder is SavedTensorMeter:
        report = opened.report()
        stored = {row.fqn: row.stored_bytes for row in report.rows}
        assert stored == ({} if inside else dict.fromkeys("qkv", sum(packed)))
    else:
        assert opened.held == []


def test_recorders_inside_recorders_inside_hooks():
    model, x, packed = made()
    expected, hooks = gradients(model, x), Hooks()
    outer, probe, inner = SavedTensorMeter(model), HolderProbe(model), SavedTensorMeter(model)
    torch.testing.assert_close(gradients(model, x, hooks.open(), outer, probe, inner), expected, rtol=0, atol=0)
    assert outer.report() == inner.report()
    assert hooks.sizes(model) == sorted([*packed * 3, x.numel() // 72 * 64 * 4])


def test_what_hooks_around_the_probe_hold_is_not_judged():
    """They may have moved it: then a ReLU's output is held twice by a dense layer, and packing is worth it."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    report = convert(model, sparsity=0.6)
    x = torch.randn(3, 64)
    for context in (save_on_cpu(), Hooks().open()):
        with context, HolderProbe(model, x) as probe:
            model(x).sum().backward()
        assert probe.apply(report) == []
    with HolderProbe(model, x) as probe:
        model(x).sum().backward()
    assert [layer.fqn for layer in probe.apply(report)] == ["0", "2"]


def test_hooks_around_the_meter_are_those_of_the_forward_though_backward_runs_later():
    model, x, _ = made()
    expected, hooks = gradients(model, x), Hooks()
    with hooks.open(), SavedTensorMeter(model):
        loss = model(x).square().sum()
    x.grad = None
    model.zero_grad()
    with Hooks(lambda t: t * 0).open():
        loss.backward()
    torch.testing.assert_close([x.grad, *(p.grad for p in model.parameters())], expected, rtol=0, atol=0)


@pytest.mark.parametrize("allowed", [False, True])
def test_an_input_may_change_once_it_is_packed_and_is_copied_nowhere_for_that(allowed: bool):
    """A dense layer refuses it, unless saved tensors may change; then its whole input is copied."""
    model, x, _ = made()
    expected = gradients(model, x)[1:]
    model.zero_grad()
    with allow_mutation_on_saved_tensors() if allowed else nullcontext() as mutation:
        y = -x.detach()
        loss = (model.q(y) + model.k(y) + model.v(y)).square().sum()
        y.zero_()
        copies = len(mutation.cloned) if allowed else 0
        loss.backward()
    assert copies == 0
    torch.testing.assert_close([p.grad for p in model.parameters()], expected, rtol=0, atol=0)


def test_layers_work_where_hooks_are_disabled_and_only_the_probe_says_that_it_cannot():
    model, x, _ = made()
    expected = gradients(model, x)
    torch.testing.assert_close(
        gradients(model, x, disable_saved_tensors_hooks("none in here")), expected, rtol=0, atol=0
    )
    with pytest.raises(RuntimeError, match="none in here"):
        gradients(model, x, HolderProbe(model), disable_saved_tensors_hooks("none in here"))
    with pytest.raises(RuntimeError, match="none in here"):
        gradients(model, x, disable_saved_tensors_hooks("none in here"), HolderProbe(model))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.overrides._get_current_function_mode() is None
    torch.testing.assert_close(gradients(model, x), expected, rtol=0, atol=0)
