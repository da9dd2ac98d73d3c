"""Columns of a table of layers for the settings in which these differ."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_actprune.conversion_report import ConvertedLayer


def differing_settings(layers: Sequence[ConvertedLayer], last: Sequence[float]) -> dict[str, list[str]]:
    """Return, by the title of the column, the values of each setting that not all layers have in common.

    Args:
        layers: The layers, with the sparsity before the first step.
        last: Sparsity of each when the training ends.
    """
    changes = [(layer.sparsity, sparsity) for layer, sparsity in zip(layers, last, strict=True)]
    columns: dict[str, list[str]] = {
        "Sparsity": [f"{a:g}" if a == b else f"{a:g} to {b:g}" for a, b in changes],
        "Format ": [str(layer.value_format) for layer in layers],
        "Selection ": [str(layer.block_selection) for layer in layers],
        "Scope ": [str(layer.scope) for layer in layers],
    }
    return {title: values for title, values in columns.items() if len(set(values)) > 1}
