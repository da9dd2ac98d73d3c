"""Transformers' ``Conv1D`` is measured as other linear layers are: what is announced is what is kept."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune.analysis.first_batch import RetentionProbe
from lightning_actprune.analysis.memory import MemoryReport, SavedTensorMeter
from lightning_actprune.config import Keep
from lightning_actprune.convert import convert


def measure(model: nn.Module, batch: dict[str, Tensor]) -> MemoryReport:
    with SavedTensorMeter(model, batch) as meter:
        model(**batch)
    return meter.report()


@pytest.mark.foreign
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_gpt2_saves_what_is_announced_and_changes_no_other_gradient(autocast):
    import transformers

    sizes = {"vocab_size": 99, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
    drop = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drop, use_cache=False)).train()
    batch = dict.fromkeys(("input_ids", "labels"), torch.randint(99, (3, 32)))
    dense = copy.deepcopy(model)
    report = convert(model, rules={"type:linear": Keep(sparsity=0.6, block_size=16), "*": None})
    names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    layers = [f"transformer.h.{i}.{name}" for i in (0, 1) for name in names]
    assert [layer.fqn for layer in report.converted] == [*layers, "lm_head"]
    context = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with context, RetentionProbe(model, batch) as probe:
        model(**batch)
    retained = {layer.fqn: layer.reason for layer in probe.apply(report)}
    assert all("attn.c_proj" in fqn and "scaled_dot_product" in reason for fqn, reason in retained.items())
    with context:
        plain, found = measure(dense, batch), measure(model, batch)
    assert [row.fqn for row in found.rows if row.sparsity] == [layer.fqn for layer in report.converted]
    assert all(row.stored_bytes == row.accounted_bytes for row in found.rows)
    assert found.dense_bytes == plain.stored_bytes
    assert plain.stored_bytes - found.stored_bytes == found.saved_bytes > 0
    losses = [net(**batch).loss for net in (dense, model)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    weights = {f"{layer.fqn}.weight" for layer in report.converted} | {"transformer.wte.weight"}  # tied to the head
    for (name, ours), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad) == (name not in weights), name
        assert ours.grad.stride() == theirs.grad.stride()
