"""SavedTensorMeter: what one forward keeps, byte for byte; and meters, recorders and probes among hooks of others."""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_actprune.analysis.first_batch import RecomputationProbe, RetentionProbe
from lightning_actprune.analysis.memory import MemoryReport, SavedTensorMeter
from lightning_actprune.codec.blocks import input_geometry
from lightning_actprune.config import Keep
from lightning_actprune.convert import convert
from lightning_actprune.operators.attention import watchers
from lightning_actprune.operators.linear import ActivationPrunedLinear
from tests.analysis.test_step_memory import recorded_step
from tests.support.attention import Case
from tests.support.compressed import compressed, converted
from tests.support.conversion_models import Calls
from tests.support.packing import packed


def measure(model: nn.Module, *inputs: Tensor, batch: object = None) -> MemoryReport:
    with SavedTensorMeter(model, batch) as meter:
        model(*inputs)
    return meter.report()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 128), nn.GELU(), nn.Linear(128, 8))


def siblings() -> nn.Module:
    """Return three layers that read one tensor, and one that reads the sum of theirs behind a ReLU."""
    forward = lambda model, x: model.out(torch.relu(model.q(y := x * 2) + model.k(y) + model.v(y)))  # noqa: E731
    return Calls(forward, **{name: nn.Linear(64, 64) for name in ("q", "k", "v", "out")})


def test_dense_bytes_of_a_transposed_input():
    class Mixing(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x * 2).transpose(1, 2)).transpose(1, 2)

    model, x = Mixing(nn.Linear(64, 64)), torch.randn(4, 64, 96)
    assert measure(model, x).rows[0].dense_bytes == x.nbytes  # F.linear keeps a copy with contiguous features
    convert(model, sparsity=0.5)
    [row] = measure(model, x).rows
    assert row.dense_bytes == x.nbytes
    assert row.stored_bytes == row.accounted_bytes


def test_a_shared_input_counts_once_and_one_kept_elsewhere_not_at_all():
    model, x = siblings(), torch.randn(4, 6, 64)
    convert(model, sparsity=0.5)
    rows = {row.fqn: row for row in measure(model, x).rows}
    assert [rows[name].dense_bytes for name in ("q", "k", "v", "out")] == [x.nbytes, 0, 0, 0]
    stored = {name: row.stored_bytes for name, row in rows.items()}
    assert stored == {"q": stored["out"], "k": 0, "v": 0, "out": stored["out"]}
    assert all(row.accounted_bytes == row.stored_bytes for row in rows.values())
    assert rows["out"].saved_bytes < 0


def test_each_distinct_storage_counts_once():
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        y = x.exp()
        return y.exp() * y.view(-1).view_as(y) + y.sin()

    x = torch.randn(8, 64, requires_grad=True)
    assert measure(Calls(forward), x).other_bytes == 2 * x.nbytes  # exp(x) by three operations, exp(exp(x)) by two


@pytest.mark.parametrize("in_batch", [False, True])
def test_the_batch_does_not_count(in_batch: bool):
    model, x = mlp(), torch.randn(4, 64)
    report = measure(model, x, batch={"input": [x[:, :]]} if in_batch else None)
    assert report.rows[0].stored_bytes == (0 if in_batch else x.nbytes)
    convert(model, sparsity=0.5)
    report = measure(model, x, batch=(x, 3) if in_batch else None)
    assert report.rows[0].dense_bytes == (0 if in_batch else x.nbytes)


def test_a_layer_called_twice_sums_its_calls():
    layer = ActivationPrunedLinear(64, 64, sparsity=0.6, block_size=24, topk_over="token")
    model, x = nn.Sequential(layer, nn.GELU(), layer), torch.randn(2, 4, 64)
    [row] = measure(model, x).rows
    assert (row.kind, row.sparsity) == ("ActivationPrunedLinear", 0.6)
    assert (row.calls, row.dense_bytes) == (2, 2 * x.nbytes)
    once = input_geometry(x, 24, 0.6, "token").stored_bytes(4)
    assert row.stored_bytes == row.accounted_bytes == 2 * once


def test_inactive_layers():
    model, x = mlp(), torch.randn(4, 64)
    converted(model, sparsity=0.0)
    report = measure(model, x)
    assert [(row.sparsity, row.saved_bytes) for row in report.rows] == [(0.0, 0)] * 3
    assert sum(row.dense_bytes for row in report.rows) == 4 * (64 + 96 + 128) * 4
    report = measure(model.requires_grad_(False), x)
    assert report == MemoryReport()
    assert report.saved_fraction == 0.0


def test_reused_addresses_are_not_mistaken_for_seen_storages():
    x = torch.randn(256, 64, requires_grad=True)
    with SavedTensorMeter(nn.Identity()) as meter:
        for _ in range(20):
            x.exp()  # freed at once, so that the next result may lie at the same address
    assert meter.report().other_bytes == 20 * x.nbytes


def test_a_caught_exception_does_not_shift_the_attribution():
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with suppress(RuntimeError):
            model.broken(x)
        return model.fine(x).sin()

    x = torch.randn(4, 64)
    tolerant = Calls(forward, broken=Broken(64, 64), fine=nn.Linear(64, 64))
    report = measure(nn.Sequential(tolerant, nn.Linear(64, 64)), x)
    assert {row.fqn: row.stored_bytes for row in report.rows} == {"0.fine": x.nbytes, "1": x.nbytes}


def test_other_models_are_not_seen_and_a_failed_call_leaves_no_trace():
    case = Case()
    other, model = compressed(case.make(), sparsity=0.5), compressed(case.make(), sparsity=0.5)
    with SavedTensorMeter(other) as unused:
        rows = measure(model, *case.tensors()).rows
    assert [(row.fqn, row.calls, row.sparsity) for row in rows] == [("(root)", 1, 0.5), ("out_proj", 1, 0.5)]
    assert unused.report().rows == []
    with pytest.raises(AssertionError), SavedTensorMeter(other):
        other(*(x[..., 1:] for x in case.tensors()))
    assert watchers == []
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in other.modules())


def test_replicas_transforms_and_copies():
    """Replicas share hooks with their originals, as those of DataParallel do."""
    model, x = mlp(), torch.randn(4, 64)
    convert(model, sparsity=0.5)
    expected = measure(model, x).rows
    with SavedTensorMeter(model) as meter, RecomputationProbe(model) as probe, RetentionProbe(model):
        nn.Sequential(*map(copy.copy, model))(x).sum().backward()
    assert [row.stored_bytes for row in meter.report().rows] == [row.stored_bytes for row in expected]
    assert probe.idle == []
    assert copy.deepcopy(meter).report() == meter.report()
    with SavedTensorMeter(model):
        torch.testing.assert_close(torch.vmap(model)(x), model(x))


def test_a_compiled_part_compiles_nothing_anew_and_is_counted_in_bytes():
    counter = CompileCounterWithBackend("aot_eager")
    model, x = nn.Sequential(mlp(), nn.Linear(8, 64)), torch.randn(4, 64)
    convert(model, sparsity=0.5)
    model[0].compile(backend=counter)
    model(x).sum().backward()
    compiled = counter.frame_count
    for _ in range(2):
        report = measure(model, x)
        model(x).sum().backward()
    assert counter.frame_count == compiled
    assert [row.fqn for row in report.rows] == ["1"]
    assert report.other_bytes >= 2 * 4 * (64 + 96 + 128)


# Among hooks, and of layers that keep nothing, since a norm before them does.


def counting_hooks(model: nn.Module) -> tuple[saved_tensors_hooks, Callable[[], tuple[int, list[int]]]]:
    """Return hooks that keep copies, and the number of tensors they unpacked with the bytes of those they packed."""
    packs: list[Tensor] = []
    unpacks: list[Tensor] = []
    hooks = saved_tensors_hooks(
        lambda t: packs.append(t.detach()) or t.detach().clone(), lambda t: unpacks.append(t) or t
    )
    parameters = {p.data_ptr() for p in model.parameters()}
    return hooks, lambda: (len(unpacks), sorted(t.nbytes for t in packs if t.data_ptr() not in parameters))


def made() -> tuple[nn.Module, Tensor]:
    model, x = siblings(), torch.randn(4, 10, 64, requires_grad=True)
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
        p, _ = packed(x.detach(), 16, 0.6)
        nbytes = sum(t.nbytes for t in p.tensors)
        assert stored == ({} if inside else dict.fromkeys(["q", "k", "v", "out"], nbytes))
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


def attention(**rules: Keep | None) -> tuple[nn.Module, Tensor]:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        y = model.norm(x)
        z = model.second(x + nn.functional.gelu(model.q(y) * model.k(y) + model.v(y)))
        return model.out(z) + model.late(torch.relu(x))

    norms = {name: nn.LayerNorm(64) for name in ("norm", "second")}
    model = Calls(forward, **norms, **{name: nn.Linear(64, 64) for name in ("q", "k", "v", "out", "late")})
    convert(
        model,
        rules={**rules, "type:linear": Keep(bits=2, min_rows_for_low_bits=0), "type:norm": Keep(bits=4), "*": None},
    )
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


@pytest.mark.parametrize(("sparsity", "pays"), [(0.0, True), (0.01, False)])
def test_a_pack_that_is_not_made_counts_for_nothing_unless_a_schedule_will_drop_blocks(sparsity, pays):
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        inputs = *(torch.relu(x + i) for i in range(7)), model.norm(x)
        return sum(model.fc(one) for one in inputs)

    model, x = Calls(forward, norm=nn.LayerNorm(64), fc=nn.Linear(64, 64)), torch.randn(4, 16, 64).requires_grad_()
    convert(model, rules={"type:linear": Keep(bits=4, min_rows_for_low_bits=0), "type:norm": Keep(bits=8), "*": None})
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
