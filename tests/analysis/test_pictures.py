"""The pictures of layers and of epochs show the bytes they are given."""

from __future__ import annotations

import pytest

from lightning_actprune.analysis.pictures import epochs_picture, layers_picture

pytest.importorskip("matplotlib")
MIB = 2**20


def row(name: str, dense: float, stored: float) -> dict[str, object]:
    return {"fqn": name, "dense_bytes": dense * MIB, "stored_bytes": stored * MIB}


def test_bars_are_stacked_to_the_larger_of_dense_and_stored():
    figure = layers_picture([row("a", 4, 1), row("b", 1, 3), row("c", 0, 2), row("d", 5, 5)], "a title")
    (axes,) = figure.axes
    bars = {c.get_label(): [(p.get_x(), p.get_width()) for p in c.patches] for c in axes.containers}
    assert bars == {
        "stored": [(0, 1), (0, 1), (0, 0), (0, 5)],
        "saved": [(1, 3), (1, 0), (0, 0), (5, 0)],
        "stored beyond dense": [(4, 0), (1, 2), (0, 2), (5, 0)],
    }
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c", "d"]
    low, high = axes.get_ylim()
    assert low > high  # the first layer is on top
    assert axes.get_title() == "a title"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(bars)


@pytest.mark.parametrize("layers", [60, 61])
def test_of_many_layers_the_first_are_shown(layers: int):
    (axes,) = layers_picture([row(f"layer.{i}", 2, 1) for i in range(layers)]).axes
    assert len(axes.get_yticklabels()) == 60
    assert (str(layers) in axes.get_xlabel()) is (layers > 60)


@pytest.mark.parametrize("epochs", [1, 4])
def test_curves_over_the_epochs(epochs: int, tmp_path):
    history = [
        {"epoch": 3 + i, "dense_bytes": 8 * MIB, "stored_bytes": (8 - i) * MIB, "sparsity": i / 8}
        for i in range(epochs)
    ]
    figure = epochs_picture(history, "a title")
    upper, lower = figure.axes
    lines = {line.get_label(): list(line.get_ydata()) for line in upper.get_lines()}
    assert lines == {"dense": [8.0] * epochs, "stored": [8.0 - i for i in range(epochs)]}
    (sparsity,) = lower.get_lines()
    assert list(sparsity.get_xdata()) == [3 + i for i in range(epochs)]
    assert list(sparsity.get_ydata()) == [i / 8 for i in range(epochs)]
    figure.savefig(tmp_path / "epochs.png")
    assert (tmp_path / "epochs.png").stat().st_size > 1000


@pytest.mark.parametrize(("picture", "hint"), [(layers_picture, r"report\.to_rows"), (epochs_picture, r"history")])
def test_pictures_of_nothing(picture, hint: str):
    with pytest.raises(ValueError, match=rf"nothing to show.* HINT: pass monitor\.{hint}"):
        picture([])
