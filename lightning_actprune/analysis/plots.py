"""Pictures of memory: over a training step, by layer, and over epochs.

They take plain data (``MemoryReport.to_rows()``, ``ActivationMemoryMonitor.history``, a ``StepMemory``). They need
matplotlib, which is an optional dependency. No figure is registered with pyplot, so none has to be closed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_actprune.analysis.step_memory import PHASES, StepMemory
from lightning_actprune.report import MIB

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["epochs_picture", "layers_picture", "step_picture"]

_FIXED = {
    "parameters": "#4d4d4d",
    "optimizer state": "#808080",
    "gradients": "#b3b3b3",
    "batch": "#d9d9d9",
    "packed tensors": "#0072B2",
    "other operations": "#F0F0F0",
}
"""Colours of fixed parts; activations do not change what is grey."""
# Colours of Okabe and Ito, which colour-blind readers can tell apart.
_COLORS = "#D55E00", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442"
_STORED, _SAVED, _ADDED, _SPARSITY = "#0072B2", "#d9d9d9", "#D55E00", "#009E73"
_MAX_BARS = 60
"""Most layers that ``layers_picture`` shows."""


def step_picture(steps: Mapping[str, StepMemory]) -> Figure:
    """Draw memory over the step, one panel per entry, on a common scale.

    Counted bytes are stacked: parameters, optimizer state, gradients, batch, packed tensors, and tensors that
    operations keep for backward. The line above is the peak by the allocator, if it was read; the gap is temporary
    memory.

    Args:
        steps: Steps by title, such as ``{"dense": dense.report.step, "max": compressed.report.step}``.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If there is nothing to show.
    """
    if not steps:
        raise ValueError("There is nothing to show: got no step. HINT: pass {'a title': monitor.report.step}.")
    # Two panels side by side: pages would shrink three too much to read.
    rows, columns = -(-len(steps) // 2), min(len(steps), 2)
    figure = _figure(4.4 * columns + 1.8, 3.4 if rows == 1 else 3.0 * rows)
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    series = {title: step.series() for title, step in steps.items()}
    colors = _color_map(series.values())
    legend: dict[str, Artist] = {}
    for empty in axes[len(steps) :]:
        empty.remove()
    for one, (title, step) in zip(axes, steps.items(), strict=False):
        _draw(one, step, series[title], colors)
        one.set_title(title, fontsize=9, pad=14)
        handles, labels = one.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    for first in axes[::columns]:
        first.set_ylabel("MiB", fontsize=8)
    names = [name for name in (*colors, "in use, at most") if name in legend][::-1]
    figure.legend([legend[name] for name in names], names, fontsize=7, frameon=False, loc="outside right center")
    return figure


def layers_picture(rows: Sequence[Mapping[str, Any]], title: str = "") -> Figure:
    """Draw what each layer keeps for backward: stored, saved, and added where compression costs memory.

    A bar is as long as what the dense layer or this layer keeps, whichever is more.

    Args:
        rows: The layers from top to bottom, with ``fqn``, ``dense_bytes`` and ``stored_bytes``, such as
            ``monitor.report.to_rows()``. The first 60 are shown.
        title: Title of the picture.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If there is nothing to show.
    """
    if not rows:
        raise ValueError("There is nothing to show: got no layer. HINT: pass monitor.report.to_rows().")
    bars = [(str(row["fqn"]), row["dense_bytes"], row["stored_bytes"]) for row in rows[:_MAX_BARS]]
    parts = {
        "stored": (_STORED, [min(dense, stored) for _, dense, stored in bars]),
        "saved": (_SAVED, [max(dense - stored, 0) for _, dense, stored in bars]),
        "stored beyond dense": (_ADDED, [max(stored - dense, 0) for _, dense, stored in bars]),
    }
    figure = _figure(6.4, 1.1 + 0.2 * len(bars))
    axes = figure.subplots()
    begins = [0.0] * len(bars)
    for label, (color, sizes) in parts.items():
        widths = [nbytes / MIB for nbytes in sizes]
        if any(widths):
            axes.barh(range(len(bars)), widths, left=begins, color=color, label=label, height=0.8)
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)  # from top to bottom
    _label(axes, title, x="kept for backward, MiB")
    if axes.containers:
        figure.legend(fontsize=7, loc="outside upper right", ncols=3, frameon=False)
    return figure


def epochs_picture(history: Sequence[Mapping[str, Any]], title: str = "") -> Figure:
    """Draw what the layers keep for backward, what is saved, and the sparsity, over the epochs.

    Args:
        history: The epochs in order, with ``epoch``, ``dense_bytes``, ``stored_bytes`` and ``sparsity``, such as
            ``monitor.history``.
        title: Title of the picture.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If there is nothing to show.
    """
    if not history:
        raise ValueError("There is nothing to show: got no epoch. HINT: pass monitor.history.")
    figure = _figure(6.4, 4.0)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    epochs = [row["epoch"] for row in history]
    dense, stored = ([row[name] / MIB for row in history] for name in ("dense_bytes", "stored_bytes"))
    upper.fill_between(epochs, stored, dense, color=_SAVED, label="saved", linewidth=0)
    upper.plot(epochs, dense, color=_FIXED["parameters"], marker=".", linewidth=1, label="dense")
    upper.plot(epochs, stored, color=_STORED, marker=".", linewidth=1, label="stored")
    upper.set_ylim(bottom=0)
    upper.legend(fontsize=7, loc="best", frameon=False)
    lower.plot(epochs, [row["sparsity"] for row in history], color=_SPARSITY, marker=".", linewidth=1)
    lower.set_ylim(-0.05, 1)
    lower.set_xlim(min(epochs) - 0.5, max(epochs) + 0.5)
    lower.xaxis.get_major_locator().set_params(integer=True)
    _label(upper, title, y="kept for backward, MiB")
    _label(lower, x="epoch", y="sparsity")
    return figure


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("A picture needs matplotlib. HINT: pip install 'lightning_actprune[plots]'.") from error
    return Figure(figsize=(width, height), layout="constrained")


def _label(axes: Axes, title: str = "", x: str = "", y: str = "") -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=7)


def _color_map(series: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, str]:
    """Return a colour of each kind that has any bytes, fixed kinds first."""
    names = [name for each in series for name in each if any(each[name])]
    operations = [name for name in dict.fromkeys(names) if name not in _FIXED]
    fixed = {name: color for name, color in _FIXED.items() if name in names}
    others = {name: fixed.pop(name) for name in ("other operations",) if name in fixed}
    return fixed | dict(zip(operations, itertools.cycle(_COLORS), strict=False)) | others


def _draw(axes: Axes, step: StepMemory, series: Mapping[str, Sequence[int]], colors: Mapping[str, str]) -> None:
    lines = {name: [nbytes / MIB for nbytes in series[name]] for name in colors if name in series}
    phases = [moment.phase for moment in step.moments]
    x, last = range(len(phases)), max(len(phases) - 1, 1)
    line_colors = [colors[name] for name in lines]
    if lines:
        axes.stackplot(x, *lines.values(), labels=list(lines), colors=line_colors, edgecolor="white", linewidth=0.2)
    if step.measured:
        peaks = [nbytes / MIB for nbytes in step.interval_bytes]
        axes.plot(x, peaks, color="black", linewidth=0.7, label="in use, at most")
    for phase in PHASES:
        if phase in phases:
            begin = phases.index(phase)
            axes.axvline(begin, color="black", linewidth=0.5, linestyle=":")
            side = "right" if begin > 0.8 * last else "left"
            axes.annotate(phase, (begin, 1), xycoords=("data", "axes fraction"), fontsize=7, va="bottom", ha=side)
    axes.set_xlim(0, last)
    axes.set_ylim(bottom=0)
    axes.set_xticks([])
    axes.set_xlabel("moments of the step", fontsize=8)
    axes.tick_params(labelsize=7)
