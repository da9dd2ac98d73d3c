"""Meters, recorders and probes: among hooks, of quantized layers and convolutions, of layers that keep nothing."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks

from lightning_actprune.analysis.first_batch import EnergyProbe, RetentionProbe
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.analysis.step_memory import StepMemoryRecorder
from lightning_actprune.config import Keep
from lightning_actprune.convert import convert, revert
from lightning_actprune.operators.base import CompressedLayer
from tests.support import oracle
from tests.support.allocated import growth
from tests.support.convolutions import laid_out
from tests.support.packing import packed
from tests.support.recorded import recorded_step


@pytest.mark.parametrize(
    ("bits", "sparsity", "autocast"), [(8, 0.0, False), (4, 0.5, True), (3, 0.5, False), (2, 0.0, True)]
)
def test_reports_of_quantized_layers_are_exact(bits: int, sparsity: float, autocast: bool):
    reports, x = [], torch.randn(6, 10, 64)
    norm, linear = nn.LayerNorm(64), nn.Linear
    model = nn.Sequential(norm, linear(64, 128), nn.GELU(), linear(128, 64), nn.ReLU(), linear(64, 8))
    for convert_it in (False, True):
        if convert_it:
            convert(model, rules={"type:linear": Keep(bits=bits, sparsity=sparsity), "*": None})
        with SavedTensorMeter(model, x) as meter, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(x).sum()
        reports.append(meter.report())
    dense, compact = reports
    assert dense.stored_bytes - compact.stored_bytes == compact.saved_bytes
    stored = sum(row.stored_bytes for row in compact.rows)
    assert stored == sum(row.accounted_bytes for row in compact.rows)
    with StepMemoryRecorder(model, x) as recorder, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x).sum()  # noqa: F841 (which is alive at the last moment)
    assert recorder.result().packed_bytes[-1] == stored


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


@pytest.mark.parametrize(
    ("recorder", "inside"), [(SavedTensorMeter, False), (SavedTensorMeter, True), (RetentionProbe, False)]
)
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


FOUR = Keep(bits=4)
HALF = Keep(bits=4, sparsity=0.5)
RULES = {"type:convolution": HALF, "type:linear": Keep(sparsity=0.5), "type:activation": FOUR, "*": None}
READS = {"conv1": 1, "conv2": 2, "shortcut": 1}


class Block(nn.Module):
    def __init__(self, inputs: int = 16, outputs: int = 32) -> None:
        super().__init__()
        self.norm1, self.act1 = nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.norm2, self.act2 = nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.norm1(x))
        return self.conv2(self.act2(self.norm2(self.conv1(x)))) + self.shortcut(x)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    stem = nn.Conv2d(3, 16, 3, padding=1)
    return nn.Sequential(
        OrderedDict(stem=stem, block=Block(), pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), head=nn.Linear(32, 3))
    )


def images(last: bool = True) -> Tensor:
    return laid_out(torch.randn(4, 3, 16, 16), last)


@pytest.mark.parametrize(("last", "autocast"), [(False, True), (True, False)])
def test_what_is_accounted_is_what_is_kept(last, autocast):
    module, x, reports = model(), images(last=last), []
    for convert_it in (False, True):
        if convert_it:
            convert(module, rules=RULES)
        with SavedTensorMeter(module, x) as meter, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            module(x).sum()
        reports.append(meter.report())
    rows = {row.fqn: row for row in reports[1].rows}
    assert [*rows] == ["stem", "block.conv1", "block.conv2", "block.shortcut", "head"]
    assert rows["block.shortcut"].stored_bytes == 0  # shares what conv1 has packed
    assert all(row.stored_bytes == row.accounted_bytes for row in rows.values())
    assert rows["block.conv1"].sparsity == 0.5
    # What the dense model keeps is what the compressed one says that it would.
    assert [row.fqn for row in reports[0].rows] == ["head"]
    assert reports[0].stored_bytes == reports[1].dense_bytes
    assert reports[1].saved_bytes == reports[0].stored_bytes - reports[1].stored_bytes


@pytest.mark.parametrize("activation", [None, FOUR])
def test_convolutions_behind_a_relu_are_retained_unless_that_keeps_one_bit(activation):
    module, x = model(), images()
    report = convert(module, rules={"type:convolution": HALF, "type:activation": activation, "*": None})
    with RetentionProbe(module, x) as probe:
        module(x).sum()
    reasons = {layer.fqn: layer.reason for layer in probe.apply(report)}
    by_relu = "its input is kept for backward by 'block.act{}' (relu)"
    assert reasons == {"stem": "its input is part of the batch"} | (
        {} if activation else {f"block.{name}": by_relu.format(n) for name, n in READS.items()}
    )
    assert {type(module.get_submodule(name)) for name in reasons} == {nn.Conv2d}


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_energy_is_judged_by_the_blocks_that_are_dropped(last):
    module = nn.Sequential(nn.Conv2d(32, 8, 3))
    report = convert(module, rules={"type:convolution": HALF})
    x = torch.ones(2, 32, 8, 8)
    x[:, :, :4] = 0  # half of the rows, whichever way blocks run
    with EnergyProbe(module, 0.2) as probe:
        module(laid_out(x, last)).sum()
    assert probe.shares == {"0": 0.0}
    with EnergyProbe(module, 0.2) as probe:
        module(laid_out(torch.ones_like(x), last)).sum()
    assert probe.shares == {"0": 0.5}
    assert probe.apply(report) == ["0"]
    assert (module[0].sparsity, module[0].bits) == (0.0, 4)


def counted(model: nn.Module, x: torch.Tensor, autocast: bool = False):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), SavedTensorMeter(model, x) as meter:
        y = model(x)
    return meter.report(), y


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_layers_behind_a_norm_keep_nothing_and_only_their_weight_gradients_tell(autocast):
    (reusing, x), results = attention(), []
    own, dense = copy.deepcopy(reusing), copy.deepcopy(reusing)
    revert(dense)
    for layer in own.modules():
        if isinstance(layer, CompressedLayer):
            layer._is_fsdp_managed_module = True
    for model in (dense, reusing, own):
        report, y = counted(model, x, autocast)
        y.float().square().sum().backward()
        results.append((report, {row.fqn: row.stored_bytes for row in report.rows}))
    (_, _), (report, reused), (own_report, packs) = results
    assert {fqn for fqn in packs if packs[fqn] and not reused[fqn]} == {"q", "out"}  # ``k`` and ``v`` share a pack
    assert own_report.stored_bytes - report.stored_bytes == packs["q"] + packs["out"]
    assert all(row.stored_bytes == row.accounted_bytes for row in (*report.rows, *own_report.rows))
    for (name, p), q, exact in zip(reusing.named_parameters(), own.parameters(), dense.parameters(), strict=True):
        if name in ("q.weight", "k.weight", "v.weight", "out.weight"):
            # Four bits are off by a fifth of two.
            errors = [oracle.relative_error(grad, exact.grad) for grad in (p.grad, q.grad)]
            assert errors[0] <= errors[1] + 0.01
        else:
            assert torch.equal(p.grad, q.grad), name


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
    convert(model, rules={**rules, "type:linear": Keep(bits=2), "type:norm": Keep(bits=4), "*": None})
    return model, torch.randn(4, 16, 64).requires_grad_()


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_what_is_counted_is_what_is_allocated(autocast):
    model, x = attention()
    report, y = counted(model, x, autocast)
    assert {row.fqn: row.stored_bytes > 0 for row in report.rows} == dict.fromkeys("qkv", False) | {
        "out": False,
        "late": True,
    }
    del y
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, nbytes = growth(lambda: model(x))
    assert nbytes - y.untyped_storage().nbytes() == report.stored_bytes


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
    convert(model, rules={"type:linear": Keep(bits=4), "type:norm": Keep(bits=8), "*": None})
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
