"""Run the cells of a notebook and store their outputs in it, without Jupyter.

    python examples/run_notebook.py                     examples/notebook.ipynb, outputs stored in it
    python examples/run_notebook.py --out other.ipynb   outputs stored in another file

It stores printed text and the figures of matplotlib. An exception in a cell ends the run, and nothing is stored. With
Jupyter, `jupyter nbconvert --execute --inplace examples/notebook.ipynb` does the same.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # figures go to the notebook, not to a window
from matplotlib import pyplot as plt

NOTEBOOK = Path(__file__).with_name("notebook.ipynb")


class _Tee(io.StringIO):
    """Text that is also printed, since a cell may take minutes."""

    def write(self, text: str) -> int:
        sys.__stdout__.write(text)
        sys.__stdout__.flush()
        return super().write(text)


def run_cells(notebook: dict[str, Any]) -> dict[str, Any]:
    """Run the cells of code in order, replace their outputs, and return the variables of the notebook."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        with contextlib.redirect_stdout(_Tee()) as printed:
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), variables)  # noqa: S102
        cell["execution_count"], cell["outputs"] = number, []
        if printed.getvalue():
            text = printed.getvalue().splitlines(keepends=True)
            cell["outputs"].append({"output_type": "stream", "name": "stdout", "text": text})
        cell["outputs"] += [_to_output(figure) for figure in map(plt.figure, plt.get_fignums())]
        plt.close("all")
    return variables


def _to_output(figure: Any) -> dict[str, Any]:
    """Return a figure as an output of a cell."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=80, metadata={"Software": None})
    image = base64.b64encode(stream.getvalue()).decode()
    return {"output_type": "display_data", "data": {"image/png": image, "text/plain": ["<Figure>"]}, "metadata": {}}


def main() -> None:
    """Run the notebook and write it with its outputs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path, nargs="?", default=NOTEBOOK)
    parser.add_argument("--out", type=Path, help="file for the outputs (default: the notebook itself)")
    args = parser.parse_args()
    out = (args.out or args.notebook).resolve()
    notebook = json.loads(args.notebook.read_text())
    os.chdir(args.notebook.resolve().parent)  # as Jupyter does
    run_cells(notebook)
    out.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
