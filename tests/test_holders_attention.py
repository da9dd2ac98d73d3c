"""HolderProbe and attention, whose projections are no module calls and are judged and turned one by one."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_actprune import HolderProbe, convert, revert
from lightning_actprune.footprint import SavedTensorMeter
from lightning_actprune.nn.attention import (
    ActivationPrunedMultiheadAttention,
    ActivationPrunedOutProjection,
    RoutedMultiheadAttention,
    watchers,
)
from lightning_actprune.nn.settings import PrunedLayer
from tests.attention import BLOCK, SPARSITY, Case, saved_tensors

BATCH = "its input is part of the batch"
BY_ATTENTION = "its input is kept for backward by 'attn' (multi_head_attention_forward)"


class Model(nn.Module):
    """Self-attention on ``[T, N, E]``: on the batch itself or behind a norm, its heads copied (``copies``) or not."""

    def __init__(self, norm: bool, copies: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64) if norm else nn.Identity()
        self.attn = nn.MultiheadAttention(64, 4)
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.attn(h, h, h, need_weights=self.copies)[0]


def probed(model: nn.Module, x: Tensor, sparsity: float = 0.6):
    """Convert ``model``, probe one step, apply, and return the report and the held layers by name."""
    report = convert(model, sparsity=sparsity)
    with HolderProbe(model, x, sparsity=0.6) as probe:
        model(x).sum().backward()
    return report, {layer.fqn: layer for layer in probe.apply(report)}


def kept(model: nn.Module, *args: object, **kwargs: object) -> int:
    """Return the bytes of all distinct storages that a forward saves beside parameters and inputs."""
    with saved_tensors() as saved:
        model(*args, **kwargs)
    own = {t.untyped_storage().data_ptr() for t in (*args, *model.parameters())}
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(nbytes for pointer, nbytes in found.items() if pointer not in own)


OUT = NonDynamicallyQuantizableLinear, ActivationPrunedOutProjection


@pytest.mark.parametrize("sparsity", [0.0, 0.6])
@pytest.mark.parametrize(
    ("norm", "copies", "samples", "reasons", "attention"),
    [
        (True, True, 3, {}, ActivationPrunedMultiheadAttention),
        (False, True, 3, {"attn": BATCH}, RoutedMultiheadAttention),
        (True, False, 1, {"attn.out_proj": BY_ATTENTION}, ActivationPrunedMultiheadAttention),
        (False, False, 1, {"attn": BATCH, "attn.out_proj": BY_ATTENTION}, nn.MultiheadAttention),
    ],
    ids=["none", "in", "out", "both"],
)
def test_exactly_the_held_projection_is_turned(norm, copies, samples, reasons, attention, sparsity):
    model = Model(norm, copies)
    report, held = probed(model, torch.randn(7, samples, 64), sparsity)
    assert {name: layer.reason for name, layer in held.items()} == reasons
    classes = {"attn": "MultiheadAttention", "attn.out_proj": "NonDynamicallyQuantizableLinear"}
    assert {name: layer.kind for name, layer in held.items()} == {name: classes[name] for name in reasons}
    assert report.skipped == list(held.values())
    assert type(model.attn) is attention
    assert type(model.attn.out_proj) is OUT["attn.out_proj" not in reasons]
    left = [name for name in classes if name not in reasons]
    assert [layer.fqn for layer in report.converted] == left
    model(torch.randn(7, samples, 64)).sum().backward()
    assert revert(model) == left
    assert type(model.attn) is nn.MultiheadAttention
    assert type(model.attn.out_proj) is NonDynamicallyQuantizableLinear
    assert vars(model.attn).keys() == vars(nn.MultiheadAttention(64, 4)).keys()
    assert vars(model.attn.out_proj).keys() == vars(nn.MultiheadAttention(64, 4).out_proj).keys()


def test_a_held_projection_runs_dense_in_the_probed_step_and_prunes_no_other():
    model, x = Model(norm=False), torch.randn(7, 3, 64)
    with SavedTensorMeter(model, x) as meter:
        expected = model(x).square().sum()
    dense, wanted = meter.report(), torch.autograd.grad(expected, list(model.parameters()))
    convert(model, sparsity=0.6)
    with HolderProbe(model, x), SavedTensorMeter(model, x) as meter:
        loss = model(x).square().sum()
    rows = {row.fqn: row for row in meter.report().rows}
    assert rows["attn"].stored_bytes == rows["attn"].sparsity == 0  # the batch, which is there anyway
    assert rows["attn.out_proj"].stored_bytes < rows["attn.out_proj"].dense_bytes == 4 * 7 * 3 * 64
    assert meter.report().total_bytes == dense.total_bytes - rows["attn.out_proj"].saved_bytes
    assert model.attn.sparsity == model.attn.out_proj.sparsity == 0.6
    assert torch.equal(loss, expected)
    names = [name for name, _ in model.named_parameters()]
    for name, ours, theirs in zip(names, torch.autograd.grad(loss, list(model.parameters())), wanted, strict=True):
        assert torch.equal(ours, theirs) == (name != "attn.out_proj.weight"), name


def test_an_exception_in_a_projection_leaves_all_as_it_was():
    model = Model(norm=False)
    convert(model, sparsity=0.6)
    x = torch.randn(7, 3, 64, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="dtype"), HolderProbe(model, x):
        model(x)
    assert model.attn.sparsity == model.attn.out_proj.sparsity == 0.6
    assert watchers == []


def test_a_probe_that_cannot_open_watches_nothing():
    class Refusing(nn.Identity):
        def register_forward_pre_hook(self, *args, **kwargs):
            raise RuntimeError("no hooks")

    model = nn.Sequential(Model(norm=True), Refusing())
    with pytest.raises(RuntimeError, match="no hooks"):
        HolderProbe(model).__enter__()
    assert watchers == []


def test_projections_of_another_model_are_none_of_the_probes():
    model, other = Model(norm=True), Model(norm=True)
    convert(model, sparsity=0.6)
    convert(other, sparsity=0.6)
    x = torch.randn(7, 3, 64)
    with HolderProbe(model, x) as probe:
        other(x).sum()
    assert probe.held == []


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_encoder_layer(batch_first: bool, norm_first: bool):
    model = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
    x = torch.randn(3, 7, 64)
    dense = kept(model, x)
    report, held = probed(model, x)
    assert kept(model, x) <= dense
    # With the batch first, torch copies the input to project it; behind a norm it is the norm's result.
    reasons = {} if batch_first or norm_first else {"self_attn": BATCH}
    reasons |= {"linear2": "its input is kept for backward by relu"}
    if "self_attn.out_proj" in held:  # depends on how the kernel of attention lays out its output
        reasons |= {"self_attn.out_proj": BY_ATTENTION.replace("attn", "self_attn")}
    assert {name: layer.reason for name, layer in held.items()} == reasons
    layers = {"self_attn", "self_attn.out_proj", "linear1", "linear2"}
    assert {layer.fqn for layer in report.converted} == layers - held.keys()


CASES = [
    Case(inputs, {"batch_first": batch_first}, {"need_weights": need_weights}, batched)
    for inputs, batch_first, need_weights, batched in itertools.product(
        ["self", "cross", "three", "sizes"], [False, True], [False, True], [False, True]
    )
]


@pytest.mark.parametrize("sparsity", [0.0, SPARSITY])
@pytest.mark.parametrize("given", [False, True], ids=["result", "batch"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_never_keeps_more_than_the_dense_one(case: Case, given: bool, sparsity: float):
    module = case.make()

    class Attention(nn.Module):
        """Attention on the batch or on what something makes of it."""

        def __init__(self) -> None:
            super().__init__()
            self.attn = module

        def forward(self, *inputs: Tensor) -> Tensor:
            made = {id(x): x if given else x + 1 for x in inputs}
            output, _ = self.attn(*(made[id(x)] for x in inputs), **case.call)
            return output

    model, inputs = Attention(), case.tensors()
    dense = kept(model, *inputs)
    report = convert(model, sparsity=sparsity, block_size=BLOCK, min_features=0)
    with HolderProbe(model, inputs, sparsity=SPARSITY) as probe:
        model(*inputs).sum().backward()
    probe.apply(report)
    for layer in model.modules():
        if isinstance(layer, PrunedLayer):
            layer.sparsity = SPARSITY
    assert len(report.converted) + len(report.skipped) == 2
    assert kept(model, *inputs) <= dense
