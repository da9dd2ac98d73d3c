"""Inputs of few rows: eight bits and all blocks, in what is stored, in what is counted and in gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import Keep, convert
from lightning_actprune.analysis.first_batch import RetentionProbe
from lightning_actprune.analysis.memory import SavedTensorMeter

FINE = Keep(bits=2, sparsity=0.5, fine_rows=32)


def stored(model: nn.Module, *inputs: Tensor) -> list[tuple[int, int, int | None]]:
    with SavedTensorMeter(model, inputs) as meter:
        output = model(*inputs)
        loss = output[0] if isinstance(output, tuple) else output
    del loss
    return [(row.stored_bytes, row.accounted_bytes, row.bits) for row in meter.report().rows]


def eight_bits(rows: int, features: int) -> int:
    return rows * features // 32 * 34


def test_few_rows_are_kept_in_eight_bits_and_all_of_them():
    model = nn.Sequential(nn.Linear(64, 64))
    convert(model, rules={"*": FINE, "type:saved": None})
    few, many = torch.randn(31, 64), torch.randn(32, 64)
    assert stored(model, few) == [(eight_bits(31, 64), eight_bits(31, 64), 8)]
    ((bytes_of_many, accounted, bits),) = stored(model, many)
    assert (bytes_of_many, bits) == (accounted, 2)
    assert bytes_of_many < eight_bits(32, 64) / 3


def test_gradients_of_few_rows_are_those_of_eight_bits():
    x, made = torch.randn(4, 5, 64), []
    for keep in (FINE, Keep(bits=8)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 16))
        convert(model, rules={"*": keep, "type:saved": None})
        model(x).square().sum().backward()
        made.append(model[0].weight.grad)
    assert torch.equal(*made)


def test_attention_counts_the_rows_of_its_projections():
    model = nn.MultiheadAttention(64, 4)
    convert(model, rules={"*": FINE, "type:saved": None})
    x = torch.randn(5, 4, 64)
    rows = stored(model, x, x, x)
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
