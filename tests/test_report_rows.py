"""What a conversion, a measurement and a step found, as flat rows: they fit JSON, CSV and a DataFrame."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from lightning_actprune import ConversionReport, StepMemoryRecorder, convert
from lightning_actprune.footprint import MemoryReport, SavedTensorMeter


class Made:
    """A model converted in part, one step of it, and the three reports."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8), nn.Linear(8, 64))
        self.conversion = convert(model, 0.5, exclude="3", others={"activation": "int4"})
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(16, 64)
        with StepMemoryRecorder(model, x, [optimizer], x.device) as recorder:
            with SavedTensorMeter(model, x) as meter:
                loss = model(x).square().mean()
            self.memory = meter.report()
            recorder.mark("backward")
            loss.backward()
            recorder.mark("optimizer")
            optimizer.step()
        self.memory.step = recorder.result()


@pytest.fixture(scope="module")
def made() -> Made:
    return Made()


def check_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Assert that the rows have the same columns, hold primitives, and come back from JSON and CSV."""
    assert rows
    columns = list(rows[0])
    assert all(list(row) == columns for row in rows)
    assert all(type(value) in (str, int, float, type(None)) for row in rows for value in row.values())
    assert json.loads(json.dumps(rows)) == rows
    file = io.StringIO()
    writer = csv.DictWriter(file, columns)
    writer.writeheader()
    writer.writerows(rows)
    file.seek(0)
    texts = [{name: "" if value is None else str(value) for name, value in row.items()} for row in rows]
    assert list(csv.DictReader(file)) == texts


def test_rows_of_a_conversion(made):
    report = made.conversion
    rows = report.to_rows()
    check_rows(rows)
    outcomes = {row["fqn"]: row["outcome"] for row in rows}
    assert outcomes == {"1": "pruned", "2": "few_bit", "3": "skipped", "4": "skipped"}
    by_name = {row["fqn"]: row for row in rows}
    assert (by_name["1"]["sparsity"], by_name["1"]["in_features"], by_name["1"]["reason"]) == (0.5, 64, None)
    assert (by_name["2"]["operator"], by_name["2"]["value_format"], by_name["2"]["sparsity"]) == (
        "activation",
        "int4",
        None,
    )
    assert [by_name[layer.fqn]["reason"] for layer in report.skipped] == [layer.reason for layer in report.skipped]


def test_a_conversion_is_plain_data(made):
    table = made.conversion.to_dict()
    assert json.loads(json.dumps(table)) == table
    assert table["converted"][0]["fqn"] == "1"
    assert table["left"] == dict(made.conversion.left)
    assert table["rest"] is None
    empty = ConversionReport()
    assert (empty.to_rows(), empty.to_dict()["left"]) == ([], {})


def test_rows_of_a_measurement(made):
    report = made.memory
    rows = report.to_rows()
    check_rows(rows)
    assert [row["fqn"] for row in rows] == ["1", "3", "4"]
    assert [row["saved_bytes"] for row in rows] == [layer.saved_bytes for layer in report.rows]
    totals = report.totals()
    check_rows([totals])
    for name in ("dense_bytes", "stored_bytes", "saved_bytes"):
        assert totals[name] == sum(row[name] for row in rows)
    assert (totals["sparsity"], totals["peak_bytes"]) == (0.5, report.step.peak_bytes)
    assert MemoryReport().totals()["sparsity"] == 0
    assert MemoryReport().totals()["peak_bytes"] is None


def test_a_measurement_is_plain_data(made):
    table = made.memory.to_dict()
    assert json.loads(json.dumps(table)) == table
    assert table["rows"] == made.memory.to_rows()
    assert table.items() >= made.memory.totals().items()
    assert len(table["step"]["holdings"]) == len(made.memory.step.holdings)
    assert MemoryReport().to_dict()["step"] is None


def test_rows_of_a_step(made):
    step = made.memory.step
    rows = step.to_rows()
    check_rows(rows)
    assert [row["phase"] for row in rows] == [moment.phase for moment in step.moments]
    assert [row["activation_bytes"] for row in rows] == step.activation_bytes
    assert max(row["interval_bytes"] for row in rows) == step.peak_bytes
    for row in rows:  # counted, without an allocator
        kinds = ("parameter", "batch", "gradient", "optimizer", "activation")
        assert sum(row[f"{kind}_bytes"] for kind in kinds) == row["interval_bytes"]
        assert row["used_bytes"] is None
