"""The notebook runs from top to bottom without a GPU, and its stored outputs are those of one run."""

import json
import re

import pytest
import torch

from examples.run_notebook import NOTEBOOK, run_cells

SMALLER = {"32 * 2**20": "4 * 2**20", "range(20)": "range(2)"}
"""Replacements in the notebook that let the test end early."""


@pytest.fixture
def notebook():
    return json.loads(NOTEBOOK.read_text())


def test_the_stored_outputs_are_of_one_run_and_small(notebook):
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert NOTEBOOK.stat().st_size < 100_000
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(cell["outputs"] for cell in code)
    outputs = [output for cell in code for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    for output in outputs:
        assert output["output_type"] != "error"
        shown = json.dumps({kind: text for kind, text in output.get("data", output).items() if kind != "image/png"})
        assert not re.search(r"/(home|root|tmp|usr|opt|work|Users)/|site-packages|https?://|Warning| at 0x", shown)


@pytest.mark.integration
def test_its_cells_run_in_order(notebook, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(NOTEBOOK.parent)
    for full, small in SMALLER.items():
        assert sum(full in line for cell in notebook["cells"] for line in cell["source"]) == 1
        for cell in notebook["cells"]:
            cell["source"] = [line.replace(full, small) for line in cell["source"]]
    threads = torch.get_num_threads()
    try:
        variables = run_cells(notebook)
    finally:
        torch.set_num_threads(threads)
    largest = variables["largest"]
    assert 3 * largest["dense"] < min(largest["checkpointing"], largest["max"])
    assert variables["speeds"] == {}
    shown = json.dumps([cell.get("outputs") for cell in notebook["cells"]])
    assert "No GPU" in shown
    assert "Skipped: speeds need a GPU" in shown
    assert shown.count("image/png") == 1
    losses = re.findall(r"loss (\d+\.\d+) in the first step", shown)
    assert len(losses) == 3
    assert len(set(losses)) == 1  # up to rounding
