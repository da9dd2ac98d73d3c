"""The notebook runs from top to bottom, and shows what it says."""

import json
from pathlib import Path

import pytest
import torch

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"
SHORTER = (
    'LENGTH = {"max_epochs": 3}',
    'LENGTH = {"max_epochs": 1, "limit_train_batches": 4, "limit_test_batches": 1}',
)
PNG = b"\x89PNG"


@pytest.fixture
def cells():
    return json.loads(NOTEBOOK.read_text())["cells"]


def test_it_is_a_notebook_without_outputs(cells):
    made = json.loads(NOTEBOOK.read_text())
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code")


def test_its_cells_run_in_order(cells, tmp_path, monkeypatch, capfd):
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    full, short = SHORTER
    assert sum(full in cell for cell in code) == 1
    monkeypatch.chdir(NOTEBOOK.parent)
    names, threads = {"__name__": "__main__"}, torch.get_num_threads()
    try:
        for i, cell in enumerate(code):
            exec(compile(cell.replace(full, short), f"cell {i}", "exec"), names)
    finally:
        torch.set_num_threads(threads)
    assert names["pruned"].total_bytes < 0.2 * names["dense"].total_bytes
    for picture in ("memory", "gradients"):
        assert names[picture]._repr_png_().startswith(PNG)
    cosines, layers = names["cosines"], list(names["exact"])
    assert len(layers) == 6
    for name in layers:
        # The same gradient; its cosine to itself is off by the rounding of sums of 128 * 512 fp32 numbers.
        assert cosines[None, 0.0][name] == pytest.approx(1, abs=2**-24 * (128 * 512) ** 0.5)
        assert 0 < cosines[None, 0.9][name] < cosines[None, 0.4][name] < 1
        assert cosines[2, 0.0][name] < 1
    assert "model.patch_embed stays dense: its input is part of the batch." in "".join(capfd.readouterr())
