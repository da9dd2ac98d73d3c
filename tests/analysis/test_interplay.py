"""Meters, recorders and probes: among hooks, and of layers that keep nothing, since a norm before them does."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_actprune.analysis.first_batch import RetentionProbe
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.config import Keep
from lightning_actprune.convert import convert
from tests.analysis.test_step_memory import recorded_step
from tests.support.packing import packed


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(72, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = -x
        return self.q(y) + self.k(y) + self.v(y)


def counting_hooks(model: nn.Module) -> tuple[saved_tensors_hooks, Callable[[], tuple[int, list[int]]]]:
    """Return hooks that keep copies, and the number of tensors they unpacked with the bytes of those they packed."""
    packs: list[Tensor] = []
    unpacks: list[Tensor] = []
    hooks = saved_tensors_hooks(
        lambda t: packs.append(t.detach()) or t.detach().clone(), lambda t: unpacks.append(t) or t
    )
    parameters = {p.data_ptr() for p in model.parameters()}
    return hooks, lambda: (len(unpacks), sorted(t.nbytes for t in packs if t.data_ptr() not in parameters))


def made() -> tuple[Projections, Tensor]:
    model, x = Projections(), torch.randn(4, 10, 72, requires_grad=True)
    convert(model, sparsity=0.6, block_size=16)
    return model, x


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


@pytest.mark.parametrize("recorder", [SavedTensorMeter, RetentionProbe])
def test_no_recorder_keeps_anything_alive(recorder: Any):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(4, 64)
    convert(model, sparsity=0.5)
    with recorder(model, x):
        y = model[0](x).sigmoid()  # whose backward keeps the result itself
        h = nn.functional.gelu(y)
        out = model[1](h)
        references, storage = [weakref.ref(of) for of in (x, y)], StorageWeakRef(h.untyped_storage())
        gc.disable()
        try:
            del h
            assert storage.expired()
            del x, y, out
            assert [reference() for reference in references] == [None, None]  # without a cycle
        finally:
            gc.enable()


@pytest.mark.parametrize(("recorder", "inside"), itertools.product([SavedTensorMeter, RetentionProbe], [False, True]))
def test_hooks_around_and_inside_a_recorder_get_what_they_get_without(recorder: Any, inside: bool):
    model, x = made()
    expected, (alone, counted_alone), (hooks, counted) = (
        gradients(model, x),
        counting_hooks(model),
        counting_hooks(model),
    )
    gradients(model, x, alone)
    opened = recorder(model)
    contexts = (opened, hooks) if inside else (hooks, opened)
    torch.testing.assert_close(gradients(model, x, *contexts), expected, rtol=0, atol=0)
    assert counted() == counted_alone()
    if recorder is SavedTensorMeter:
        stored = {row.fqn: row.stored_bytes for row in opened.report().rows}
        p = packed(-x.detach(), 16, 0.6)
        nbytes = sum(t.nbytes for t in (p.values, p.bitmap, p.offsets))
        assert stored == ({} if inside else dict.fromkeys("qkv", nbytes))
    else:
        assert opened.retained == []


def test_what_hooks_around_the_probe_keep_is_not_judged():
    """They may have moved it: then a ReLU's output is kept twice by a dense layer, and packing is worth it."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(3, 64)
    report = convert(model, sparsity=0.6)
    for context in (save_on_cpu(), counting_hooks(model)[0], nullcontext()):
        with context, RetentionProbe(model, x) as probe:
            model(x).sum().backward()
        assert [layer.fqn for layer in probe.apply(report)] == (["0", "2"] if isinstance(context, nullcontext) else [])


def test_layers_work_where_hooks_are_disabled_and_only_the_probe_says_that_it_cannot():
    model, x = made()
    expected, disabled = gradients(model, x), partial(disable_saved_tensors_hooks, "none in here")
    torch.testing.assert_close(gradients(model, x, disabled()), expected, rtol=0, atol=0)
    for contexts in ((RetentionProbe(model), disabled()), (disabled(), RetentionProbe(model))):
        with pytest.raises(RuntimeError, match="none in here"):
            gradients(model, x, *contexts)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.overrides._get_current_function_mode() is None
    torch.testing.assert_close(gradients(model, x), expected, rtol=0, atol=0)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second = nn.LayerNorm(64), nn.LayerNorm(64)
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))
        self.late = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        z = self.second(x + torch.nn.functional.gelu(self.q(y) * self.k(y) + self.v(y)))
        return self.out(z) + self.late(torch.relu(x))


def attention(**rules: Keep | None) -> tuple[nn.Module, torch.Tensor]:
    model = Attention()
    convert(model, rules={**rules, "type:linear": Keep(bits=2, fine_rows=0), "type:norm": Keep(bits=4), "*": None})
    return model, torch.randn(4, 16, 64).requires_grad_()


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_what_is_counted_is_what_is_allocated(autocast: bool):
    model, x = attention()
    context = partial(torch.autocast, "cpu", torch.bfloat16, enabled=autocast)
    with context(), SavedTensorMeter(model, x) as meter:
        model(x)
    report = meter.report()
    assert {row.fqn for row in report.rows if row.stored_bytes} == {"late"}
    assert all(row.stored_bytes == row.accounted_bytes for row in report.rows)
    gc.collect()  # what is freed during the call must have been allocated in it
    with warnings.catch_warnings(), context():
        warnings.simplefilter("ignore")  # of the profiler
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            y = model(x)
    events = profile.profiler.kineto_results.events()
    allocated = sum(event.nbytes() for event in events if event.name() == "[memory]")
    assert allocated - y.untyped_storage().nbytes() == report.stored_bytes


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [torch.relu(x + i) for i in range(7)]
        return sum(self.fc(one) for one in (*kept, self.norm(x)))


@pytest.mark.parametrize(("sparsity", "pays"), [(0.0, True), (0.01, False)])
def test_a_pack_that_is_not_made_counts_for_nothing_unless_a_schedule_will_drop_blocks(sparsity, pays):
    model, x = Reused(), torch.randn(4, 16, 64).requires_grad_()
    convert(model, rules={"type:linear": Keep(bits=4, fine_rows=0), "type:norm": Keep(bits=8), "*": None})
    with RetentionProbe(model, x, sparsity=sparsity) as probe:
        model(x).sum().backward()
    # Of 4 bytes a value freed once, seven packs of four bits add 3.9, and eight 4.5.
    assert [layer.fqn for layer in probe.retained] == ([] if pays else ["fc"])


def test_layers_that_keep_nothing_pay_unless_a_dense_layer_keeps_the_norms_output():
    for rules, names in (({}, {"late"}), ({"k": None}, {"q", "v", "late"})):
        model, x = attention(**rules)
        with RetentionProbe(model, x) as probe:
            model(x).sum().backward()
        reasons = {layer.fqn: layer.reason for layer in probe.retained}
        assert set(reasons) == names  # ReLU keeps the input of ``late``
    assert reasons["q"] == "its input is kept for backward by 'k' (a layer that is dense)"


def test_each_retainer_has_the_operation_that_takes_it_up():
    model, x = attention()
    step = recorded_step(model, x, torch.optim.SGD(model.parameters(), lr=0.1))
    labels = {group.label: group.count for group in step.groups(step.forward_end)}
    layers = " + ".join(f"{name} (linear_function)" for name in ("q", "k"))
    assert labels[f"norm (norm_function) + {layers} + 1 more"] == 1
    assert labels["second (norm_function) + out (linear_function)"] == 1
    assert step.peak_bytes > 0
