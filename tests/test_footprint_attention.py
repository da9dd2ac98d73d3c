"""SavedTensorMeter and attention: rows of projections, which are no module calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import convert
from lightning_actprune.footprint import MemoryReport, SavedTensorMeter
from lightning_actprune.nn.attention import watchers
from lightning_actprune.ops.geometry import BlockGeometry
from tests.attention import BLOCK, SPARSITY, Case, E, L, N, S, pruned_copy


def measure(model: nn.Module, inputs: tuple[Tensor, ...], **call: object) -> MemoryReport:
    with SavedTensorMeter(model) as meter:
        model(*inputs, **call)
    return meter.report()


def packed_bytes(samples: int, rows: int, width: int, itemsize: int = 4) -> int:
    return BlockGeometry.of(samples, rows, width, BLOCK, SPARSITY).stored_bytes(itemsize)


ROWS = {
    "self": [(L, E)],
    "cross": [(L, E), (S, E)],
    "three": [(L, E), (S, E), (S, E)],
    "sizes": [(L, E), (S, 40), (S, 24)],
}


@pytest.mark.parametrize("scope", ["sample", "token"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", ROWS)
def test_rows_are_byte_exact(kind: str, batch_first: bool, scope: str):
    case = Case(kind, {"batch_first": batch_first})
    dense, inputs = case.make(), case.tensors()
    pruned = pruned_copy(dense, scope=scope)
    plain, report = measure(dense, inputs), measure(pruned, inputs)
    attention, out = report.rows
    assert (attention.fqn, attention.calls, attention.sparsity) == ("(root)", len(ROWS[kind]), SPARSITY)
    assert (out.fqn, out.calls, out.sparsity) == ("out_proj", 1, SPARSITY)
    samples = (lambda rows: (N, rows)) if scope == "sample" else (lambda rows: (N * rows, 1))
    assert attention.stored_bytes == sum(packed_bytes(*samples(rows), width) for rows, width in ROWS[kind])
    assert out.stored_bytes == packed_bytes(*samples(L), E)
    assert (attention.dense_bytes, out.dense_bytes) == (4 * N * sum(r * w for r, w in ROWS[kind]), 4 * N * L * E)
    for row in report.rows:
        assert row.accounted_bytes == row.stored_bytes
    assert report.dense_bytes + report.other_bytes == plain.total_bytes


def test_autocast_counts_16_bits():
    case = Case("cross", {"batch_first": True})
    with torch.autocast("cpu", torch.bfloat16):
        attention, out = measure(pruned_copy(case.make()), case.tensors()).rows
    assert attention.stored_bytes == attention.accounted_bytes == packed_bytes(N, L, E, 2) + packed_bytes(N, S, E, 2)
    assert out.stored_bytes == out.accounted_bytes == packed_bytes(N, L, E, 2)
    assert out.dense_bytes == 2 * N * L * E


def test_an_encoder_keeps_less_by_what_the_rows_say():
    dense = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, 4, 96, dropout=0.0), 2, enable_nested_tensor=False)
    pruned, x = pruned_copy(dense), torch.randn(L, N, E)
    plain, report = measure(dense, (x,)), measure(pruned, (x,))
    assert [row.fqn for row in report.rows[:3]] == [
        f"layers.0.{name}" for name in ("self_attn", "self_attn.out_proj", "linear1")
    ]
    assert len(report.rows) == 8
    assert report.dense_bytes + report.other_bytes == plain.total_bytes
    assert report.saved_bytes > 0
    assert all(row.stored_bytes == row.accounted_bytes for row in report.rows)


def test_at_sparsity_zero_the_rows_are_those_of_dense_layers():
    case = Case("three")
    dense, inputs = case.make(), case.tensors()
    report = measure(pruned_copy(dense, sparsity=0.0), inputs)
    assert [(row.fqn, row.sparsity, row.saved_bytes) for row in report.rows] == [("(root)", 0, 0), ("out_proj", 0, 0)]
    assert report.dense_bytes == 4 * N * E * (L + S + S + L)
    assert report.total_bytes == measure(dense, inputs).total_bytes


def test_the_meter_takes_no_notice_of_other_models_and_leaves_no_trace():
    case = Case()
    mine, other = pruned_copy(case.make()), pruned_copy(case.make())
    with SavedTensorMeter(mine) as meter:
        other(*case.tensors())
    assert meter.report().rows == []
    assert watchers == []
    with pytest.raises(AssertionError, match="key shape"), SavedTensorMeter(mine) as meter:
        mine(torch.randn(L, N, E), torch.randn(L, N, E), torch.randn(S, N, E))
    assert watchers == []


def test_an_error_inside_a_projection_ends_its_call():
    case = Case()
    model, inputs = nn.ModuleDict({"attention": case.make(), "linear": nn.Linear(E, E)}), case.tensors()
    convert(model, min_features=0)
    with SavedTensorMeter(model) as meter:
        with pytest.raises(RuntimeError):
            model["attention"](*(torch.randn(L, N, E, dtype=torch.float64),) * 3)
        model["linear"](inputs[0] + 0)
        (inputs[0] + 0).exp()
    [row] = [row for row in meter.report().rows if row.fqn == "linear"]
    assert row.stored_bytes == row.accounted_bytes > 0
    assert meter.report().other_bytes == inputs[0].nbytes
