"""The notebook runs from top to bottom, and shows what it says."""

import base64
import json
import re
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


SHOWING = {
    "cell-03": "text/html",
    "cell-05": "text/html",
    "cell-07": "image/png",
    "cell-09": "text/html",
    "cell-10": "image/png",
}
"""What the outputs of the cells that show something must hold."""


def contents(cell):
    """Return what a cell has put out by media type, what was printed as plain text, all of a type together."""
    found = {}
    for output in cell["outputs"]:
        assert output["output_type"] != "error"
        for kind, data in output.get("data", {"text/plain": output.get("text")}).items():
            found[kind] = found.get(kind, "") + "".join(data)
    return found


def test_it_is_a_notebook_with_the_outputs_of_one_run(cells):
    made = json.loads(NOTEBOOK.read_text())
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in cells}) == len(cells)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    printing = {cell["id"] for cell in code if re.search(r"print\(|^\w+$", "".join(cell["source"]), re.MULTILINE)}
    assert printing == SHOWING.keys() == {cell["id"] for cell in code if cell["outputs"]}


def test_the_stored_outputs_are_those_of_its_cells(cells):
    found = {cell["id"]: contents(cell) for cell in cells if cell["cell_type"] == "code"}
    for cell, kind in SHOWING.items():
        assert kind in found[cell]
        if kind == "image/png":
            assert base64.b64decode(found[cell][kind]).startswith(PNG)
    table = found["cell-03"]["text/plain"]
    assert table.index("dense") < table.index("max") < table.index("paper")  # what saves most comes before the paper
    kept = {name: float(re.search(rf"{name} .*│ +(\S+) +│ +\d+%", table)[1]) for name in ("dense", "max", "paper")}
    assert kept["max"] < 0.2 * kept["dense"]
    assert 0.5 * kept["dense"] < kept["paper"] < 0.9 * kept["dense"]
    assert "model.patch_embed stays dense: its input is part of the batch." in found["cell-05"]["text/plain"]


def test_the_stored_outputs_tell_nothing_of_the_machine_that_made_them(cells):
    assert NOTEBOOK.stat().st_size < 600_000
    for cell in cells:
        for output in cell.get("outputs", ()):
            shown = json.dumps({kind: text for kind, text in output.get("data", output).items() if kind != "image/png"})
            assert not re.search(r"/(home|root|tmp|usr|opt|work|Users)/|site-packages|https?://|Warning| at 0x", shown)


@pytest.mark.slow
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
    assert names["pruned"].stored_bytes < 0.2 * names["dense"].stored_bytes
    assert 0.5 * names["dense"].stored_bytes < names["paper"].stored_bytes < 0.9 * names["dense"].stored_bytes
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
