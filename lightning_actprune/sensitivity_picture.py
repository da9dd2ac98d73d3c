"""A heatmap of numbers by layer and setting; it needs matplotlib, which is not a dependency of the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["heatmap_picture"]


def heatmap_picture(
    title: str, layers: Sequence[str], settings: Sequence[str], values: Sequence[list[float]]
) -> Figure:
    """Return a picture of cosines, one row a layer and one column a setting.

    Args:
        title: What the picture shows.
        layers: Names of the rows.
        settings: Names of the columns.
        values: Numbers of each row; values below 0 have the colour of 0, NaN has none.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If there is nothing to show.
    """
    if not values:
        raise ValueError("There is nothing to show: no layer was measured. HINT: `report.skipped` says why.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("A picture needs matplotlib. HINT: pip install 'lightning_actprune[plots]'.") from error
    width = 0.09 * max(map(len, layers)) + 0.42 * len(settings) + 1.2
    figure = Figure(figsize=(width, 0.2 * len(layers) + 1.4), layout="constrained")
    axes = figure.subplots()
    # Dark is where little is lost; one hue, so that grey prints and colour-blind readers see the same.
    image = axes.imshow(values, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(settings)), settings, rotation=90, fontsize=7)
    axes.set_yticks(range(len(layers)), layers, fontsize=7)
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            color = "white" if value > 0.6 else "black"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=6, color=color)
    axes.set_title(title, fontsize=9)
    figure.colorbar(image, ax=axes, shrink=0.6).ax.tick_params(labelsize=7)
    return figure
