"""RetentionProbe: everything that retains an input, the rule of bytes, and a step that is what it would have been."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_actprune.analysis.first_batch import RetentionProbe
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.config import Keep
from lightning_actprune.convert import convert, revert
from lightning_actprune.operators.attention import (
    CompressedMultiheadAttention,
    CompressedOutProjection,
    RoutedMultiheadAttention,
    watchers,
)
from lightning_actprune.operators.base import CompressedLayer
from lightning_actprune.operators.linear import ActivationPrunedLinear
from lightning_actprune.report import ConversionReport
from tests.support.attention import BLOCK, SPARSITY, Attending, Case
from tests.support.compressed import converted, laid_out
from tests.support.conversion_models import Calls
from tests.support.helpers import assert_plain, pruned_layers
from tests.support.marks import cover
from tests.support.saving import bytes_saved, saved_tensors


class Step(nn.Module):
    """A layer ``fc`` whose input is made, and used otherwise too, in a way of its own; ``in_`` makes it a result."""

    def __init__(self) -> None:
        super().__init__()
        self.in_, self.fc = nn.Linear(64, 64), nn.Linear(64, 64)
        self.features: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.use(F.gelu(self.in_(x)))

    def use(self, h: Tensor) -> Tensor:
        return self.fc(h)


def step(use: Callable[[Any, Tensor], Tensor], **parts: Callable[[], nn.Module | nn.Parameter]) -> type[Step]:
    """Return a subclass with further modules or parameters, made by ``parts``."""

    class Made(Step):
        def __init__(self) -> None:
            super().__init__()
            for name, make in parts.items():
                setattr(self, name, make())

    Made.use = use
    return Made


def square() -> nn.Linear:
    return nn.Linear(64, 64)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.unflatten(2, (2, 32)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


Relu = step(lambda self, h: self.fc(F.relu(h)))
Sdpa = step(lambda self, h: self.fc(attend(h, h.sin(), h.cos())))
NormReadsResidual = step(lambda self, h: self.fc(h := h + 1) + self.norm(h), norm=lambda: nn.LayerNorm(64))
KeptFeatures = step(lambda self, h: (self.features.append(h), self.fc(h))[1])
Parameter = step(lambda self, h: self.fc(self.queries).mean() + h, queries=lambda: nn.Parameter(torch.randn(16, 64)))
BY = "its input is kept for backward by "
BATCH = "its input is part of the batch"
RETAINED = [
    (Relu, BY + "relu"),
    (
        step(lambda self, h: self.fc(self.block["act"](h)), block=lambda: nn.ModuleDict({"act": nn.ReLU()})),
        BY + "'block.act' (relu)",
    ),
    (step(lambda self, h: self.fc(h.relu()[1:].unsqueeze(1))[:, 0]), BY + "relu"),
    (Sdpa, BY + "scaled_dot_product_attention"),
    (NormReadsResidual, BY + "'norm' (layer_norm)"),
    (step(lambda self, h: self.fc(h) * self.dense(h), dense=square), BY + "'dense' (a layer that is dense)"),
    (KeptFeatures, "its input is kept alive by a Python reference outside autograd (such as a list of features)"),
    (Parameter, "its input is a parameter or buffer"),
]
FREE = [
    Step,
    step(lambda self, h: self.fc(F.leaky_relu(h))),
    step(lambda self, h: (h := h + 1) + self.fc(h)),
    step(lambda self, h: self.fc(h) * self.k(h) + self.v(h), k=square, v=square),
    step(lambda self, h: self.fc(self.bits(h)), bits=nn.ReLU),
    step(lambda self, h: self.fc(self.norm(h)), norm=lambda: nn.LayerNorm(64)),
    step(lambda self, h: self.fc(h[:, :5]).repeat(1, 4, 1)[:, : h.shape[1]]),
]
"""What shares an input, a ReLU that keeps a bit of each value, a part of a tensor that only the layer keeps."""


def rules_for(model: nn.Module) -> dict[str, Keep | None]:
    rules, names = {"dense": None, "bits": Keep(bits=4)}, [name for name, _ in model.named_modules()]
    return {f"*{end}": keep for end, keep in rules.items() if any(name.endswith(end) for name in names)}


def made(make: type[Step], sparsity: float = 0.6) -> tuple[Step, ConversionReport, Tensor]:
    model = make()
    return model, converted(model, sparsity, rules=rules_for(model)), torch.randn(3, 16, 64)


def retained(model: nn.Module, x: Tensor, **options: Any) -> dict[str, str]:
    """Return the layers with retained inputs and the reasons, from one forward; the batch is not said to be one."""
    with RetentionProbe(model, **options) as probe:
        model(x).sum()
    return {layer.fqn: layer.reason for layer in probe.retained}


@pytest.mark.parametrize(("make", "reason"), [*RETAINED, *((make, "") for make in FREE)])
def test_layers_with_a_retained_input_become_dense_and_the_reason_says_by_what(make, reason: str):
    model, report, x = made(make)
    backward_inside = (make, reason) in RETAINED[1::2]
    with RetentionProbe(model, x) as probe:
        loss = model(x).sum()
        if backward_inside:
            loss.backward()
    reasons, returned = {"in_": BATCH} | ({"fc": reason} if reason else {}), probe.apply(report)
    assert {layer.fqn: layer.reason for layer in returned} == reasons
    assert [layer for layer in report.skipped if layer.fqn != "dense"] == returned
    left = {name for name, layer in model.named_children() if isinstance(layer, nn.Linear | nn.ReLU)} - {"dense"}
    assert {layer.fqn for layer in report.converted} == left - reasons.keys()
    assert set(pruned_layers(model)) == left - reasons.keys() - {"bits"}
    if not backward_inside:
        loss.backward()
    if reason:
        assert_plain(model)


def test_convolutions_are_judged_as_linear_layers_are():
    layers = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2)
    model, x = nn.Sequential(*layers), laid_out(torch.randn(4, 3, 16, 16), True)
    report = convert(model, rules={"type:convolution": Keep(bits=4, sparsity=0.5), "*": None})
    with RetentionProbe(model, x) as probe:
        model(x).sum()
    assert {layer.fqn: layer.reason for layer in probe.apply(report)} == {"0": BATCH, "2": BY + "'1' (relu)"}
    assert [type(layer) for layer in model] == [nn.Conv2d, nn.ReLU, nn.Conv2d]


def test_layers_at_sparsity_0_are_judged_as_what_they_will_be():
    for make, reason in RETAINED:
        model, _, x = made(make, sparsity=0.0)
        assert retained(model, x, batch={"image": [x[1:]]}, sparsity=0.6) == {"in_": BATCH, "fc": reason}
    for make in FREE:
        model, _, x = made(make, sparsity=0.0)
        # Two sisters will share one pack of their input, which nobody has seen yet.
        assert retained(model, x, batch=x, sparsity=0.6).keys() == {"in_"}
        assert retained(model, x, batch=x) == {}


def test_a_copy_made_by_autocast_or_of_a_transposed_view_belongs_to_the_layer():
    model, _, x = made(Relu)
    with torch.autocast("cpu", torch.bfloat16):
        assert retained(model, x, batch=x) == {"fc": BY + "relu"}  # the batch is copied, the ReLU's output is not

    model = step(lambda self, h: self.fc(F.relu(h).transpose(1, 2)))()
    convert(model, sparsity=0.6)
    assert "fc" not in retained(model, torch.randn(3, 64, 64))


@pytest.mark.parametrize("small", [False, True])
def test_a_layer_called_twice_is_decided_by_bytes(small: bool):
    def use(self: Any, h: Tensor) -> Tensor:
        return self.fc(F.relu(h)[:, : 1 + 15 * small]).mean() + self.fc(h[:, : 16 - 15 * small].exp().sin())

    model, _, x = made(step(use))
    assert retained(model, x).get("fc", "").startswith(BY + "relu in 1 of 2 calls") is small


def siblings(names: str, twice: str = "") -> nn.Module:
    """Return layers with one input for each letter: a capital one reads it behind a ReLU, ``twice`` it both ways."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        h, large = x * 2, F.relu(x.repeat(4, 1, 1))
        used = {name: F.relu(h) if name.isupper() else h for name in names}
        again = model.layers[twice](large).sum() if twice else 0
        return sum(layer(used[name]).sum() for name, layer in model.layers.items()) + again

    return Calls(forward, layers=nn.ModuleDict({name: nn.Linear(64, 64) for name in names}))


@pytest.mark.parametrize(
    ("names", "twice", "expected"),
    [
        ("qkV", "", {"V": BY + "relu"}),
        ("Vqk", "", {"V": BY + "relu"}),
        ("qk", "q", {"q": BY + "relu in 1 of 2 calls", "k": BY + "'layers.q' (a layer that is dense)"}),
    ],
)
def test_sisters_are_judged_together_in_any_order(names: str, twice: str, expected: dict[str, str]):
    model = siblings(names, twice)
    convert(model, sparsity=0.6)
    result = retained(model, torch.randn(3, 16, 64, requires_grad=True))
    assert {name.removeprefix("layers."): reason.split(";")[0] for name, reason in result.items()} == expected


def test_an_input_is_freed_once_however_many_layers_read_it():
    model = siblings("qkv")
    keeps = {f"layers.{name}": Keep(None, 0.6, block_size=16 * (i + 1)) for i, name in enumerate("qkv")}
    convert(model, rules={**keeps, "*": None})
    # Three packs of two fifths each are more than the input.
    assert retained(model, torch.randn(3, 16, 64, requires_grad=True)).keys() == keeps.keys()


def test_layers_without_a_backward_or_rows_are_not_judged():
    model, _, x = made(Relu)
    assert retained(model, x[:0]) == {}
    assert retained(model.requires_grad_(False), x) == {}
    built = nn.Sequential(nn.ReLU(), ActivationPrunedLinear(64, 64, sparsity=0.5))
    assert retained(built, x.requires_grad_()) == {}


@pytest.mark.parametrize("seed", range(12))
def test_a_model_never_keeps_more_than_the_dense_one(seed: int):
    draw, kinds = random.Random(seed), [*(make for make, _ in RETAINED), *FREE]
    model = nn.Sequential(*(make() for make in draw.choices(kinds, k=draw.randint(1, 6))))
    x = torch.randn(8, 8, 64, requires_grad=True)

    def measured() -> tuple[int, int]:
        stored = bytes_saved(model, x, also=lambda: [t for block in model for t in block.features])
        with SavedTensorMeter(model, x) as meter:
            model(x)
        for block in model:
            block.features.clear()
        return stored, meter.report().stored_bytes

    dense, counted = measured()
    report = convert(model, sparsity=(0.3, 0.6, 0.9)[seed % 3], block_size=16, rules=rules_for(model))
    always, _ = measured()
    with RetentionProbe(model, x) as probe:
        model(x)
    probe.apply(report)
    for block in model:
        block.features.clear()
    stored, now_counted = measured()
    assert now_counted <= counted
    assert stored <= min(dense, always)


@pytest.mark.parametrize("make", [Relu, Sdpa, Parameter, KeptFeatures, NormReadsResidual])
def test_the_probed_step_is_exact_but_for_layers_whose_input_is_retained_later(make):
    model, _, x = made(make)
    dense = make()
    dense.load_state_dict(model.state_dict())
    with SavedTensorMeter(dense, x) as before:
        expected = dense(x).square().sum()
    state = torch.get_rng_state()
    with RetentionProbe(model, x), SavedTensorMeter(model, x) as meter:
        loss = model(x).square().sum()
    assert torch.equal(torch.get_rng_state(), state)
    later = make in (KeptFeatures, NormReadsResidual)
    if not later:  # nothing that was retained before is packed
        assert meter.report().stored_bytes == meter.report().dense_bytes == before.report().stored_bytes
    expected.backward()
    loss.backward()
    assert torch.equal(loss, expected)
    for (name, ours), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad) == (not later or name != "fc.weight"), name
    assert model.fc.sparsity == model.in_.sparsity == 0.6


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_everything_as_it_was(error: type[BaseException]):
    def fail(*args):
        raise error

    class Refusing(nn.Identity):
        def register_forward_pre_hook(self, *args, **kwargs):
            raise error

    model, _, x = made(Relu)
    handle = model.fc.register_forward_hook(fail)
    with pytest.raises(error), RetentionProbe(model, x):
        model(x)
    handle.remove()
    model.attention, model.refusing = Attending(norm=True), Refusing()
    with pytest.raises(error):
        RetentionProbe(model, x).__enter__()
    assert model.fc.sparsity == model.in_.sparsity == 0.6
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert watchers == []
    assert torch.overrides._get_current_function_mode() is None
    with saved_tensors() as packed:
        model(x).sum().backward()
    assert packed


def test_a_model_copied_in_the_probed_step_takes_no_hook_along():
    model, _, x = made(Step)
    with RetentionProbe(model, x):
        twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert not any("RetentionProbe" in repr(vars(module)) for module in twin.modules())
    twin(x).sum().backward()


class Stack(nn.Sequential):
    """With a forward of its own: torch 2.10 and 2.11 compile none of torch's containers in place."""

    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("wrapped", [False, pytest.param(True, marks=pytest.mark.integration)])
def test_a_compiled_model_is_probed_eagerly_and_compiles_once_more_for_what_changes(wrapped: bool):
    torch._dynamo.reset()
    counters.clear()
    model = Stack(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    report, x, counter = convert(model, sparsity=0.5), torch.randn(4, 8, 64), CompileCounterWithBackend("aot_eager")
    if wrapped:
        call = torch.compile(model, backend=counter, fullgraph=True)
    else:
        model.compile(backend=counter, fullgraph=True)
        call = model
    for frames in (1, 1):
        call(x * 2).sum().backward()
        assert counter.frame_count == frames
    with RetentionProbe(model, x) as probe:
        call(x * 2).sum().backward()
    call(x * 2).sum().backward()
    assert counter.frame_count == 1  # nothing of the probe is left
    assert {layer.fqn: layer.reason for layer in probe.apply(report)} == {"2": BY + "'1' (relu)"}
    assert pruned_layers(model) == ["0", "4"]
    for _ in range(2):
        call(x * 2).sum().backward()
    assert counter.frame_count == 2
    assert not counters["graph_break"]


BY_ATTENTION = BY + "'attn' (multi_head_attention_forward)"


OUT = NonDynamicallyQuantizableLinear, CompressedOutProjection


@pytest.mark.parametrize(
    ("norm", "copies", "samples", "reasons", "attention", "sparsity"),
    [
        (True, True, 3, {}, CompressedMultiheadAttention, 0.6),
        (False, True, 3, {"attn": BATCH}, RoutedMultiheadAttention, 0.0),
        (True, False, 1, {"attn.out_proj": BY_ATTENTION}, CompressedMultiheadAttention, 0.0),
        (False, False, 1, {"attn": BATCH, "attn.out_proj": BY_ATTENTION}, nn.MultiheadAttention, 0.6),
    ],
    ids=["none", "in", "out", "both"],
)
def test_exactly_the_projection_with_a_retained_input_is_turned(norm, copies, samples, reasons, attention, sparsity):
    model, x = Attending(norm, copies), torch.randn(7, samples, 64)
    report = converted(model, sparsity)
    with RetentionProbe(model, x, sparsity=0.6) as probe:
        model(x).sum().backward()
    result = probe.apply(report)
    assert {layer.fqn: layer.reason for layer in result} == reasons
    classes = {"attn": "MultiheadAttention", "attn.out_proj": "NonDynamicallyQuantizableLinear"}
    assert all(layer.kind == classes[layer.fqn] for layer in result)
    assert report.skipped == result
    assert type(model.attn) is attention
    assert type(model.attn.out_proj) is OUT["attn.out_proj" not in reasons]
    left = [name for name in classes if name not in reasons]
    assert [layer.fqn for layer in report.converted] == left
    model(x).sum().backward()
    assert revert(model) == left
    plain = nn.MultiheadAttention(64, 4)
    for ours, theirs in ((model.attn, plain), (model.attn.out_proj, plain.out_proj)):
        assert type(ours) is type(theirs)
        assert vars(ours).keys() == vars(theirs).keys()


def test_such_a_projection_runs_dense_in_the_probed_step_and_changes_no_other():
    model, x = Attending(need_weights=True), torch.randn(7, 3, 64)
    expected = model(x).square().sum()
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    convert(model, sparsity=0.6)
    with RetentionProbe(model, x), SavedTensorMeter(model, x) as meter:
        loss = model(x).square().sum()
    rows = {row.fqn: row for row in meter.report().rows}
    assert rows["attn"].stored_bytes == rows["attn"].sparsity == 0  # the batch, which is there anyway
    assert rows["attn.out_proj"].stored_bytes < rows["attn.out_proj"].dense_bytes == 4 * 7 * 3 * 64
    assert torch.equal(loss, expected)
    result = torch.autograd.grad(loss, list(model.parameters()))
    for (name, _), ours, theirs in zip(model.named_parameters(), result, wanted, strict=True):
        assert torch.equal(ours, theirs) == (name != "attn.out_proj.weight"), name


@pytest.mark.parametrize(
    ("inputs", "batch_first", "need_weights", "batched", "given", "sparsity"),
    cover(["self", "cross", "three", "sizes"], *[(False, True)] * 4, [0.0, SPARSITY]),
)
def test_attention_never_keeps_more_than_the_dense_one(inputs, batch_first, need_weights, batched, given, sparsity):
    case = Case(inputs, {"batch_first": batch_first}, {"need_weights": need_weights}, batched)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = case.make()

        def forward(self, *inputs: Tensor) -> Tensor:
            made = {id(x): x if given else x + 1 for x in inputs}
            return self.attn(*(made[id(x)] for x in inputs), **case.call)[0]

    model, inputs = Attention(), case.tensors()
    dense = bytes_saved(model, *inputs)
    report = converted(model, sparsity, rules={"type:linear": Keep(None, sparsity or SPARSITY, block_size=BLOCK)})
    with RetentionProbe(model, inputs, sparsity=SPARSITY) as probe:
        model(*inputs).sum().backward()
    probe.apply(report)
    for layer in model.modules():
        if isinstance(layer, CompressedLayer) and "_state" in vars(layer):
            layer.sparsity = SPARSITY
    assert len(report.converted) + len(report.skipped) == 2
    assert bytes_saved(model, *inputs) <= dense
