"""Inputs of few rows: eight bits and all blocks, in what is stored, in what is counted and in gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import Keep, convert
from lightning_actprune.analysis.first_batch import RetentionProbe
from lightning_actprune.analysis.memory import SavedTensorMeter

FINE = Keep(bits=2, sparsity=0.5, fine_rows=32)


def converted(layer: nn.Module, keep: Keep = FINE) -> nn.Sequential:
    model = nn.Sequential(copy.deepcopy(layer))
    convert(model, rules={"type:linear": keep, "*": None})
    return model


def stored(model: nn.Module, *inputs: Tensor) -> list[tuple[int, int, int | None]]:
    with SavedTensorMeter(model, inputs) as meter:
        model(*inputs)
    return [(row.stored_bytes, row.accounted_bytes, row.bits) for row in meter.report().rows]


def eight_bits(rows: int, features: int) -> int:
    return rows * features // 32 * 34


def test_few_rows_are_kept_in_eight_bits_and_all_of_them():
    dense, few, many = nn.Linear(64, 64), torch.randn(31, 64), torch.randn(32, 64)
    model, other = converted(dense), converted(dense, Keep(bits=8))
    assert stored(model, few) == [(eight_bits(31, 64), eight_bits(31, 64), 8)]
    ((bytes_of_many, accounted, bits),) = stored(model, many)
    assert (bytes_of_many, bits) == (accounted, 2)
    assert bytes_of_many < eight_bits(32, 64) / 3
    grads = [torch.autograd.grad(m(few).square().sum(), m[0].weight)[0] for m in (model, other)]
    assert torch.equal(*grads)


def test_attention_counts_the_rows_of_its_projections():
    model, x = converted(nn.MultiheadAttention(64, 4)), torch.randn(5, 4, 64)
    rows = stored(model[0], x, x, x)
    assert {bits for _, _, bits in rows} == {8}
    assert all(kept in (0, eight_bits(20, 64)) for kept, _, _ in rows)


def test_what_is_kept_anyway_is_found_for_few_rows_too():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    report = convert(model, rules={"type:linear": FINE, "*": None})
    x = torch.randn(8, 64, requires_grad=True) * 1
    with RetentionProbe(model, None) as probe:
        model(x).sum().backward()
    # The first one's is held here, the other's by the ReLU.
    assert [layer.fqn for layer in probe.apply(report)] == ["0", "2"]


def test_rows_are_a_count():
    for rows in (1.5, -1, True, "many"):
        with pytest.raises((TypeError, ValueError), match="`fine_rows`"):
            Keep(bits=4, fine_rows=rows)  # type: ignore[arg-type]
