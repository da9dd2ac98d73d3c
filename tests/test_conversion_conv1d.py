"""``Conv1D`` in models: chosen, reported, turned back, probed and measured as other linear layers are."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from types import MethodType

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import ActivationPruning, HolderProbe, convert, revert
from lightning_actprune.footprint import MemoryReport, SavedTensorMeter
from tests.conv1d import block
from tests.helpers import Net, trainer

ROOT = Path(__file__).parents[1]


def measure(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> MemoryReport:
    with SavedTensorMeter(model, (args, kwargs)) as meter:
        model(*args, **kwargs)
    return meter.report()


def test_conversion_keeps_parameters_and_names_and_reports_sizes(conv1d):
    model = block(conv1d)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    before = {name: (type(m), list(m.__dict__)) for name, m in model.named_modules()}
    report = convert(model, sparsity=0.25, block_size=16)
    found = [(c.fqn, c.kind, c.in_features, c.out_features, c.sparsity) for c in report.converted]
    assert found == [("c_fc", "Conv1D", 65, 97, 0.25), ("c_proj", "Conv1D", 97, 65, 0.25)]
    assert isinstance(model.c_fc, conv1d)
    assert list(model.state_dict()) == keys
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert revert(model) == ["c_fc", "c_proj"]
    assert {name: (type(m), list(m.__dict__)) for name, m in model.named_modules()} == before


def test_patterns_and_sizes_choose(conv1d):
    model = block(conv1d)
    assert [c.fqn for c in convert(model, include="c_*", exclude="c_fc").converted] == ["c_proj"]
    revert(model)
    report = convert(model, min_features=66)
    assert [c.fqn for c in report.converted] == ["c_proj"]
    assert report.skipped[0].reason.startswith("in_features=65 is below min_features=66")


def test_a_subclass_and_a_replaced_forward_are_skipped_with_a_reason(conv1d):
    class TimesTwo(conv1d):
        def forward(self, x):
            return 2 * super().forward(x)

    model = block(conv1d)
    model.add_module("twice", TimesTwo(65, 65))
    model.c_fc.forward = MethodType(conv1d.forward, model.c_fc)
    report = convert(model)
    assert [c.fqn for c in report.converted] == ["c_proj"]
    reasons = {s.fqn: s.reason for s in report.skipped}
    assert reasons["twice"].endswith("TimesTwo, whose forward is not known to be Conv1D's")
    assert (
        reasons["c_fc"] == "its forward was replaced on the instance, so the one of the converted class would never run"
    )
    assert report.skipped[0].kind == "Conv1D"


def test_error_where_nothing_can_be_converted_leaves_the_layers(conv1d):
    model = block(conv1d)
    with pytest.raises(ValueError, match="No layer was converted"):
        convert(model, min_features=1000)
    assert type(model.c_fc) is type(model.c_proj) is conv1d
    convert(model)
    with pytest.raises(ValueError, match="'c_fc' is already converted"):
        convert(model)


@pytest.mark.parametrize("scope", ["sample", "token"])
@pytest.mark.parametrize("shape", [(7, 65), (3, 5, 65), (2, 3, 5, 65)], ids=str)
def test_what_is_announced_is_what_is_kept(conv1d, shape, scope):
    model, x = block(conv1d), torch.randn(shape, requires_grad=True)
    dense = measure(model, x)
    convert(model, sparsity=0.6, block_size=16, scope=scope)
    pruned = measure(model, x)
    assert [(row.fqn, row.kind) for row in pruned.rows] == [(f, "ActivationPrunedConv1D") for f in ("c_fc", "c_proj")]
    assert [row.dense_bytes for row in pruned.rows] == [x.nbytes, x.nbytes // 65 * 97]
    assert [row.dense_bytes for row in pruned.rows] == [row.stored_bytes for row in dense.rows]
    assert all(row.stored_bytes == row.accounted_bytes for row in pruned.rows)
    assert pruned.dense_bytes + pruned.other_bytes == dense.total_bytes
    assert dense.total_bytes - pruned.total_bytes == pruned.saved_bytes > 0


def test_the_probe_leaves_what_is_held_dense(conv1d):
    model = block(conv1d)
    model.act = nn.ReLU()
    x = torch.randn(3, 5, 65, requires_grad=True)
    report = convert(model)
    with HolderProbe(model) as probe:
        model(x).sum().backward()
    assert [(s.fqn, s.kind, s.reason) for s in probe.apply(report)] == [
        ("c_proj", "Conv1D", "its input is kept for backward by 'act' (relu)")
    ]
    assert type(model.c_proj) is conv1d
    assert [c.fqn for c in report.converted] == ["c_fc"]


def test_a_dense_conv1d_holds_the_input_of_its_sister(conv1d):
    class Sisters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = conv1d(65, 65), conv1d(65, 65)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            return self.q(x) * self.k(x)

    model, x = Sisters(), torch.randn(3, 5, 65)
    convert(model, exclude="k")
    with HolderProbe(model, x) as probe:
        model(x)
    assert [s.reason for s in probe.held] == [
        "its input is kept for backward by 'k' (a linear layer that is not pruned)"
    ]
    revert(model)
    convert(model)
    assert [row.stored_bytes > 0 for row in measure(model, x).rows] == [True, False]  # one pack for both


def test_a_fit_prunes_and_restores(conv1d):
    class Gpt(Net):
        def make(self) -> None:
            if self.body is None:
                self.body, self.head = block(conv1d, 64), nn.Linear(64, 4)

    model, callback = Gpt(), ActivationPruning(0.6, verbose=False)
    model.watch = lambda net: type(net.body.c_proj).__name__
    trainer(callback).fit(model)
    assert set(model.seen) == {"ActivationPrunedConv1D"}
    assert [c.fqn for c in callback.converted] == ["body.c_fc", "body.c_proj", "head"]
    assert type(model.body.c_fc) is type(model.body.c_proj) is conv1d


def test_nothing_imports_transformers_and_a_model_without_it_is_converted():
    script = """
import sys
import lightning.pytorch  # what Lightning asks for is not ours
sys.modules["transformers"] = sys.modules["transformers.pytorch_utils"] = None  # every import of them fails
from torch import nn
import lightning_actprune
print(len(lightning_actprune.convert(nn.Linear(64, 64)).converted))
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["1"], run.stderr


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 99, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
    drop = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    config = transformers.GPT2Config(**sizes, **drop, use_cache=False)
    tokens = torch.randint(99, (3, 32))
    return transformers.GPT2LMHeadModel(config).train(), {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_gpt2_saves_what_is_announced_and_changes_no_other_gradient(autocast):
    model, batch = gpt2()
    dense = copy.deepcopy(model)
    report = convert(model, sparsity=0.6, block_size=16)
    layers = [
        f"transformer.h.{i}.{name}" for i in (0, 1) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert [c.fqn for c in report.converted] == [*layers, "lm_head"]
    context = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with context, HolderProbe(model, batch) as probe:
        model(**batch)
    held = {s.fqn: s.reason for s in probe.apply(report)}
    assert all("attn.c_proj" in fqn and "scaled_dot_product_attention" in reason for fqn, reason in held.items())
    with context:
        plain, found = measure(dense, **batch), measure(model, **batch)
    assert [row.fqn for row in found.rows if row.sparsity] == [c.fqn for c in report.converted]
    assert all(row.stored_bytes == row.accounted_bytes for row in found.rows)
    assert found.dense_bytes + found.other_bytes == plain.total_bytes
    assert plain.total_bytes - found.total_bytes == found.saved_bytes > 0
    losses = [net(**batch).loss for net in (dense, model)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    weights = {f"{c.fqn}.weight" for c in report.converted} | {"transformer.wte.weight"}  # tied to the head
    for (name, ours), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad) == (name not in weights), name
        assert ours.grad.stride() == theirs.grad.stride()


def test_gpt2_pickles_pruned_and_loads_in_a_fresh_process(tmp_path):
    model, batch = gpt2()
    convert(model)
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(loaded(**batch).loss, model(**batch).loss)
    torch.save(model, tmp_path / "pruned.pt")
    script = """
import sys
import torch
model = torch.load(sys.argv[1], weights_only=False)  # as a spawned worker does
from lightning_actprune import revert
print(type(model.lm_head).__name__, type(model.transformer.h[0].mlp.c_fc).__name__, len(revert(model)))
"""
    command = [sys.executable, "-c", script, str(tmp_path / "pruned.pt")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["ActivationPrunedLinear", "ActivationPrunedConv1D", "9"], run.stderr
    assert len(revert(model)) == 9
    assert [type(m) for m in model.modules()] == [type(m) for m in gpt2()[0].modules()]
