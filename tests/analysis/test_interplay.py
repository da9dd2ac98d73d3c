"""Meters, recorders and probes among hooks of others and checkpoints, and of layers that are quantized."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks

from lightning_actprune.analysis.first_batch import RetentionProbe
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.analysis.step_memory import StepMemoryRecorder
from lightning_actprune.config import Keep
from lightning_actprune.convert import convert
from tests.support.packing import packed


def quantizable() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8)
    )


@pytest.mark.parametrize(
    ("bits", "sparsity", "autocast"), [(8, 0.0, False), (4, 0.5, True), (3, 0.5, False), (2, 0.0, True)]
)
def test_reports_are_exact(bits: int, sparsity: float, autocast: bool):
    totals, x = [], torch.randn(6, 10, 64)
    for convert_it in (False, True):
        model = quantizable()
        if convert_it:
            report = convert(model, rules={"type:linear": Keep(bits=bits, sparsity=sparsity), "*": None})
            assert {layer.keep.bits for layer in report.converted} == {bits}
        with SavedTensorMeter(model, x) as meter, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x).sum()
        totals.append(meter.report())
        loss.backward()
    dense, compact = totals
    assert dense.stored_bytes - compact.stored_bytes == compact.saved_bytes
    stored = sum(row.stored_bytes for row in compact.rows)
    assert stored == sum(row.accounted_bytes for row in compact.rows)
    with StepMemoryRecorder(model, x) as recorder, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x).sum()
    assert recorder.result().packed_bytes[-1] == stored


class Projections(nn.Module):
    """Three layers on one tensor that nothing else keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(72, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = -x
        return self.q(y) + self.k(y) + self.v(y)


class Hooks:
    """Hooks that keep what ``copy`` makes of a tensor, and count what they are asked for."""

    def __init__(self, copy: Callable[[Tensor], Tensor] = lambda t: t.detach().clone()) -> None:
        self.copy = copy
        self.packed: list[Tensor] = []
        self.unpacked = 0

    def pack(self, tensor: Tensor) -> tuple[str, Tensor]:
        self.packed.append(tensor.detach())
        return "kept", self.copy(tensor)

    def unpack(self, kept: tuple[str, Tensor]) -> Tensor:
        self.unpacked += 1
        return kept[1]

    def open(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.pack, self.unpack)

    def sizes(self, model: nn.Module) -> list[int]:
        """Return the bytes of what was packed, parameters aside."""
        parameters = {p.data_ptr() for p in model.parameters()}
        return sorted(t.nbytes for t in self.packed if t.data_ptr() not in parameters)


def made() -> tuple[Projections, Tensor, list[int]]:
    """Return a compressed model, its input, and the bytes of what one of its layers packs."""
    model, x = Projections(), torch.randn(4, 10, 72, requires_grad=True)
    convert(model, sparsity=0.6, block_size=16)
    p = packed(-x.detach(), 16, 0.6)
    return model, x, sorted(t.nbytes for t in (p.values, p.bitmap, p.offsets))


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


@pytest.mark.parametrize(
    ("recorder", "inside"), [(SavedTensorMeter, False), (SavedTensorMeter, True), (RetentionProbe, False)]
)
def test_hooks_around_and_inside_a_recorder_get_what_they_get_without(recorder: Any, inside: bool):
    model, x, sizes = made()
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
        assert stored == ({} if inside else dict.fromkeys("qkv", sum(sizes)))
    else:
        assert opened.retained == []


def test_what_hooks_around_the_probe_keep_is_not_judged():
    """They may have moved it: then a ReLU's output is kept twice by a dense layer, and packing is worth it."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    report = convert(model, sparsity=0.6)
    x = torch.randn(3, 64)
    for context in (save_on_cpu(), Hooks().open()):
        with context, RetentionProbe(model, x) as probe:
            model(x).sum().backward()
        assert probe.apply(report) == []
    with RetentionProbe(model, x) as probe:
        model(x).sum().backward()
    assert [layer.fqn for layer in probe.apply(report)] == ["0", "2"]


def test_layers_work_where_hooks_are_disabled_and_only_the_probe_says_that_it_cannot():
    model, x, _ = made()
    expected = gradients(model, x)
    torch.testing.assert_close(
        gradients(model, x, disable_saved_tensors_hooks("none in here")), expected, rtol=0, atol=0
    )
    with pytest.raises(RuntimeError, match="none in here"):
        gradients(model, x, RetentionProbe(model), disable_saved_tensors_hooks("none in here"))
    with pytest.raises(RuntimeError, match="none in here"):
        gradients(model, x, disable_saved_tensors_hooks("none in here"), RetentionProbe(model))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.overrides._get_current_function_mode() is None
    torch.testing.assert_close(gradients(model, x), expected, rtol=0, atol=0)
