"""The pictures of layers, of epochs and of a step show the bytes they are given."""

from __future__ import annotations

import pytest

from lightning_actprune.analysis.pictures import epochs_picture, layers_picture, step_picture
from tests.analysis.test_step_memory import random_step

pytest.importorskip("matplotlib")
MIB = 2**20


def row(name: str, dense: float, stored: float) -> dict[str, object]:
    return {"fqn": name, "dense_bytes": dense * MIB, "stored_bytes": stored * MIB}


def test_bars_are_stacked_to_the_larger_of_dense_and_stored():
    (axes,) = layers_picture([row("a", 4, 1), row("b", 1, 3), row("c", 0, 2), row("d", 5, 5)], "a title").axes
    bars = [[(p.get_x(), p.get_width()) for p in c.patches] for c in axes.containers]
    assert bars == [  # stored, saved, stored beyond dense
        [(0, 1), (0, 1), (0, 0), (0, 5)],
        [(1, 3), (1, 0), (0, 0), (5, 0)],
        [(4, 0), (1, 2), (0, 2), (5, 0)],
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c", "d"]


def test_of_many_layers_the_first_are_shown():
    (axes,) = layers_picture([row(f"layer.{i}", 2, 1) for i in range(61)]).axes
    assert len(axes.get_yticklabels()) == 60
    assert "61" in axes.get_xlabel()


def test_curves_over_the_epochs_and_of_a_step(tmp_path):
    history = [
        {"epoch": 3 + i, "dense_bytes": 8 * MIB, "stored_bytes": (8 - i) * MIB, "sparsity": i / 8} for i in range(4)
    ]
    figure = epochs_picture(history, "a title")
    upper, lower = figure.axes
    assert [list(line.get_ydata()) for line in upper.get_lines()] == [[8.0] * 4, [8.0 - i for i in range(4)]]
    (sparsity,) = lower.get_lines()
    assert [*zip(sparsity.get_xdata(), sparsity.get_ydata(), strict=True)] == [(3 + i, i / 8) for i in range(4)]
    panels = step_picture({"dense": random_step(0, True), "pruned": random_step(1, False)}).get_axes()
    assert [len(axes.get_lines()) for axes in panels] == [4, 3]  # a line a phase, and the allocator's
    figure.savefig(tmp_path / "epochs.png")


@pytest.mark.parametrize("picture", [layers_picture, epochs_picture])
def test_pictures_of_nothing(picture):
    with pytest.raises(ValueError, match="HINT"):
        picture([])
