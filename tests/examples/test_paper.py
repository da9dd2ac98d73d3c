"""The paper's accounting: formulas against packed tensors and counted bytes, and the page against its records."""

import json

import pytest
import torch
from torch.nn import functional as F

from examples.benchmarks import paper, paper_page, tables, trainings_page
from examples.models import build_model
from lightning_actprune import convert, functional
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.codec.blocks import BlockGeometry

RECORDS = tables.load("paper")
SHAPES = [(3, 7, 48), (2, 9, 50), (1, 1, 16), (4, 64, 130)]


def committed(table):
    return [
        {key: value for key, value in r.items() if key not in ("torch", "command")}
        for r in RECORDS
        if r["table"] == table
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sparsity", [0.29, 0.6, 0.9])
@pytest.mark.parametrize("shape", SHAPES)
def test_overhead_is_that_of_packed_tensors(shape, sparsity, dtype):
    record = paper.overhead(torch.randn(shape, dtype=dtype), 16, sparsity)
    assert record["formula_bytes"] == record["packed_bytes"] > 0
    assert record["dense_bytes"] == torch.empty(shape, dtype=dtype).nbytes
    assert (record["samples"], record["rows"], record["length"]) == shape


@pytest.mark.parametrize("sparsity", [0.29, 0.6, 0.9])
@pytest.mark.parametrize("shape", SHAPES)
def test_indices_are_those_of_a_bsr_tensor(shape, sparsity):
    packed = functional.pack(torch.randn(shape), sparsity=sparsity, block_size=16)
    pruned = packed.unpack().flatten(0, 1)
    matrix = F.pad(pruned, (0, -shape[2] % 16)).to_sparse_bsr((1, 16))
    entries = matrix.col_indices().numel(), matrix.crow_indices().numel()
    for index in (4, 8):
        assert paper.bsr_index_bytes(packed.geometry, index) == tuple(index * count for count in entries)


@pytest.mark.parametrize(("block", "length"), [(16, 384), (64, 1536)])
def test_unpruned_bsr_has_the_overhead_on_record(block, length):
    geometry = BlockGeometry.of(32, 196, length, block, 0.0)
    share = sum(paper.bsr_index_bytes(geometry, 4)) / geometry.dense_bytes(4)
    assert share == pytest.approx(1 / block + 1 / length, rel=1e-3)


def test_kinds_add_up_to_what_the_meter_counts():
    model = build_model("resmlp_tiny", image_size=8, patch_size=2, in_channels=1, num_classes=10)
    images, labels = torch.randn(4, 1, 8, 8), torch.randint(10, (4,))
    found, loss = paper.saved_by_kind(model, images, labels)
    with SavedTensorMeter(model, (images, labels)) as meter:
        expected = F.cross_entropy(model(images), labels)
    report = meter.report()
    assert sum(found.values()) == report.stored_bytes
    assert found["linear layers"] == report.stored_bytes - report.other_bytes
    assert found["GELU"] == 3 * 4 * 16 * 4 * 128 * 4
    torch.testing.assert_close(loss, expected)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_formula_of_savings_is_what_a_converted_model_saves():
    for record in paper.savings()[::4]:
        model, images, labels = paper.subject()
        convert(model.blocks, sparsity=record["sparsity"], block_size=record["block_size"])
        with SavedTensorMeter(model, (images, labels)) as meter:
            F.cross_entropy(model(images), labels)
        assert meter.report().saved_bytes == record["ours_saved_bytes"]


def test_formula_of_savings_is_what_the_allocator_measured():
    measured = {(r["sparsity"], r["block_size"]): r for r in tables.load("memory")}
    for record in committed("savings"):
        found = measured[record["sparsity"], record["block_size"]]
        assert record["ours_saved_bytes"] / 2**20 == pytest.approx(found["saved_mib"], abs=0.05)
        assert record["paper_saved_mib"] == found["paper_saved_mib"]


def test_records_are_what_is_computed_today():
    assert committed("components") == paper.components()
    assert committed("savings") == paper.savings()
    for record in committed("overhead"):
        itemsize = getattr(torch, record["dtype"]).itemsize
        sizes = (record[name] for name in ("samples", "rows", "length", "block_size", "sparsity"))
        geometry = BlockGeometry.of(*sizes)
        assert record["formula_bytes"] == record["packed_bytes"] == paper.positions_bytes(geometry, itemsize)
        indices = record["bsr_columns_bytes"], record["bsr_pointers_bytes"]
        assert indices == paper.bsr_index_bytes(geometry, 4)


def test_page_is_generated_from_the_committed_records():
    assert paper.PAGE.read_text() == paper_page.page(RECORDS, tables.load("memory"), tables.load("long"))


def test_the_paper_s_method_costs_what_its_page_says():
    text = paper_page.page(RECORDS, [], tables.load("long"))
    lines = text.split("## Accuracy")[1].splitlines()
    assert "Here it costs more than the noise of the seeds" in " ".join(lines)
    of_paper, *pruned = (line for line in lines if line.startswith(("| `paper`", "| pruned")))
    assert " * |" in of_paper
    assert pruned
    shown = trainings_page.PAGE.read_text().splitlines()
    assert {of_paper, *pruned} <= set(shown)  # with the errors of the whole study
    assert not any("`max`" in line for line in lines)


def test_page_without_measurements_says_so():
    text = paper_page.page(RECORDS, [], [])
    assert "## Accuracy" not in text
    assert "allocator measured" not in text
    assert "| s = 0.6, b = 16 | 395.3 | - |" in text


def test_page_refuses_positions_that_depend_on_the_sparsity():
    changed = json.loads(json.dumps(RECORDS))
    next(r for r in changed if r["table"] == "overhead")["packed_bytes"] *= 2
    with pytest.raises(ValueError, match="too many values to unpack"):
        paper_page.page(changed, [], [])


def test_command_writes_records_and_page(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(paper, "RESULTS", tmp_path)
    monkeypatch.setattr(paper, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(paper, "overheads", lambda: committed("overhead"))
    paper.main()
    records = json.loads((tmp_path / "paper.json").read_text())
    assert [r["table"] for r in records] == [r["table"] for r in RECORDS]
    assert (tmp_path / "page.md").read_text().count("\n## Table ") == 3
    assert "keeps 1805.5 MiB" in capsys.readouterr().out
