"""The notebook runs from top to bottom, and its stored outputs are those of one run."""

import json
import re
from pathlib import Path

import pytest
import torch

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"
LENGTH = 'LENGTH = {"max_epochs": 3}'
SHORT = 'LENGTH = {"max_epochs": 1, "limit_train_batches": 4, "limit_test_batches": 1}'


@pytest.fixture
def code():
    """The cells of code."""
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_stored_outputs_are_of_one_run_and_small(code):
    assert NOTEBOOK.stat().st_size < 150_000
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert [bool(cell["outputs"]) for cell in code] == [False, True, True, True, True, True]
    for output in (output for cell in code for output in cell["outputs"]):
        assert output["output_type"] != "error"
        shown = json.dumps({kind: text for kind, text in output.get("data", output).items() if kind != "image/png"})
        assert not re.search(r"/(home|root|tmp|usr|opt|work|Users)/|site-packages|https?://|Warning| at 0x", shown)


@pytest.mark.integration
def test_its_cells_run_in_order(code, monkeypatch, capfd):
    sources = ["".join(cell["source"]) for cell in code]
    assert sum(LENGTH in source for source in sources) == 1
    monkeypatch.chdir(NOTEBOOK.parent)
    names, threads = {"__name__": "__main__"}, torch.get_num_threads()
    try:
        for number, source in enumerate(sources):
            exec(compile(source.replace(LENGTH, SHORT), f"cell {number}", "exec"), names)
    finally:
        torch.set_num_threads(threads)
    assert names["pruned"].stored_bytes < 0.2 * names["dense"].stored_bytes
    assert 0.5 * names["dense"].stored_bytes < names["paper"].stored_bytes < 0.9 * names["dense"].stored_bytes
    for picture in ("memory", "gradients"):
        assert names[picture]._repr_png_().startswith(b"\x89PNG")
    cosines, layers = names["cosines"], list(names["exact"])
    assert len(layers) == 6
    for name in layers:
        # The same gradient; its cosine to itself is off by the rounding of sums of 128 * 512 fp32 numbers.
        assert cosines[None, 0.0][name] == pytest.approx(1, abs=2**-24 * (128 * 512) ** 0.5)
        assert 0 < cosines[None, 0.9][name] < cosines[None, 0.4][name] < 1
        assert cosines[2, 0.0][name] < 1
    assert "model.patch_embed" in "".join(capfd.readouterr())
