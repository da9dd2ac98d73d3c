"""The benchmark of memory over a step, on a small model on the CPU: records, table and picture."""

from __future__ import annotations

import json

import pytest
import torch

from examples.benchmarks import models, summaries, third_party, timeline
from tests.examples.stand_ins import Blocks, vectors


@pytest.fixture
def records(monkeypatch, tmp_path):
    workload = third_party.Workload("torch", 4, Blocks, vectors, third_party._cross_entropy)
    for module in (models, timeline):
        monkeypatch.setattr(module, "WORKLOADS", {"small": workload})
    monkeypatch.setattr(timeline, "MODELS", ("small",))
    monkeypatch.setattr(timeline, "require_gpu", lambda: None)
    head = {"model": "small", "batch": 4, "precision": "bf16-mixed"}
    measure = lambda name, method: {**head, "method": method, **timeline.measure(name, method, torch.device("cpu"))}  # noqa: E731
    monkeypatch.setattr(timeline, "run_case", measure)
    monkeypatch.setattr("sys.argv", ["timeline.py", "--out", str(tmp_path / "timeline.json")])
    timeline.main()
    return json.loads((tmp_path / "timeline.json").read_text())


def test_records(records):
    assert [record["method"] for record in records] == list(timeline.METHODS)
    kept = {}
    for record in records:
        lengths = {len(line) for line in record["series_mib"].values()}
        assert lengths == {len(record["phases"])}
        assert len(record["phases"]) <= timeline.POINTS + 3
        assert set(record["phases"]) == {"forward", "backward", "optimizer"}
        assert max(sum(parts.values()) for parts in record["parts_mib"].values()) == pytest.approx(
            record["peak_mib"], abs=0.5
        )
        peaks = [mib for mib, _ in record["without_mib"].values()]
        assert record["peak_mib"] >= peaks[0] >= peaks[1] > 0
        forward = record["parts_mib"]["forward"]
        kept[record["method"]] = forward["packed tensors"] + forward["other saved tensors"]
        assert (forward["packed tensors"] > 0) == (record["method"] == "max")
    assert max(kept["checkpoint"], kept["max"]) < kept["dense"]


def test_table(records):
    summary = summaries.timeline(records)
    assert [row[0] for row in summary.rows] == [f"small, {method}" for method in timeline.METHODS]
    for row, record in zip(summary.rows, records, strict=True):
        assert len(row) == len(summary.header)
        assert row[1] == f"{record['peak_mib']:.0f}"
        assert row[2].startswith(record["peak_phase"])


def test_pictures(records, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(timeline, "DOCS", tmp_path)
    [path] = timeline.draw(records)
    assert path.name == "timeline_small.png"
    assert path.read_bytes()[:4] == b"\x89PNG"
