"""The pictures of README and docs/, drawn by `report.py` from the records."""

from __future__ import annotations

import io
from itertools import cycle
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, ScalarFormatter

from benchmarks.evidence import findings
from benchmarks.report import HEADLINE, Records, groups, load, main_study, model_name, score, select, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers can tell apart; markers differ too, for print.
STYLES = [("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P"),
          ("#999999", "X")]  # fmt: skip
SETTINGS = {"font.size": 8, "axes.titlesize": 8, "axes.spines.top": False, "axes.spines.right": False}
TIMELINE = "vit_base_patch16_224"
COMPILED_METHODS = "dense", "checkpoint", "compiler:0.5", "max", "recompute"
COMPILED_STYLES = dict(zip(COMPILED_METHODS, [("black", "o"), *STYLES], strict=False))


def save(figure: Figure, path: Path, colors: int = 64) -> None:
    """Write a PNG with few colours, which a line drawing hardly shows."""
    from PIL import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=150, format="png")
    Image.open(buffer).convert("RGB").quantize(colors).save(path, optimize=True)


Point = tuple[str, float, float]


def points_of(records: Records) -> list[Point]:
    """Return the method of each record, its peak and its time, with those of the dense one as units."""
    dense = next(r for r in records if r["method"] == "dense")
    return [(r["method"], *(r[name] / dense[name] for name in ("peak_mib", "step_ms"))) for r in records]  # type: ignore[misc]


def compiled_points(model: str) -> list[Point]:
    """Return the points of compiled steps; the compiler's own budget was measured beside a dense model of its own."""
    ours, compiler = (
        points_of(select("steps", table=table, model=model, mode="default"))
        for table in ("compiled", "compiler budget")
    )
    return [point for point in (*ours, *(p for p in compiler if p[0] != "dense")) if point[0] in COMPILED_STYLES]


def draw_methods(axes: Axes, points: list[Point], styles: dict[str, Any]) -> None:
    """Draw a dot for each method."""
    for method, x, y in points:
        color, marker = styles[method]
        axes.plot(x, y, marker, color=color, markersize=4)
    for scale, axis in ((axes.set_xscale, axes.xaxis), (axes.set_yscale, axes.yaxis)):
        scale("log")
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
    axes.set_xticks([0.2, 0.3, 0.5, 1.0])
    axes.set_yticks([0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 4.0, 6.0])
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.margins(x=0.2, y=0.15)


def panels_of(count: int, columns: int, unit: str) -> tuple[Figure, list[Axes]]:
    """Return a figure with ``count`` panels of peak and time, ``columns`` side by side."""
    rows = -(-count // columns)
    figure = Figure(figsize=(2.6 * columns, 2.6 * rows + 0.4), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flatten())
    for axes in panels[count:]:
        axes.set_axis_off()
    for axes in panels[:count]:
        axes.set_xlabel(f"peak of a step, {unit} = 1")
    for axes in panels[::columns]:
        axes.set_ylabel(f"time of a step, {unit} = 1")
    return figure, panels[:count]


def explain(figure: Figure, styles: dict[str, Any]) -> None:
    """Write what the markers mean below the panels."""
    handles = [
        Line2D([], [], color=color, marker=marker, linestyle="", label=m) for m, (color, marker) in styles.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", frameon=False, ncols=len(handles))


def gain() -> Figure:
    """Draw the peak of a compiled step against its time: small dots for models, a large one for their mean."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    points = [point for model in HEADLINE for point in compiled_points(model)]
    for method, (color, marker) in COMPILED_STYLES.items():
        x, y = zip(*((x, y) for name, x, y in points if name == method), strict=True)
        axes.plot(x, y, marker, color=color, markersize=4, alpha=0.35, linestyle="")
        axes.plot(geometric_mean(x), geometric_mean(y), marker, color=color, markersize=11)
    axes.set_xlim(0.1, 1.05)
    axes.set_xlabel("peak of a step, compiled dense = 1")
    axes.set_ylabel("time of a step, compiled dense = 1")
    explain(figure, COMPILED_STYLES)
    return figure


def frontier() -> Figure:
    """Draw the peak of an eager step against its time, a panel for each model."""
    eager = groups(select("steps", table="trainer"), "model")
    methods = dict.fromkeys(r["method"] for rows in eager.values() for r in rows if r["method"] != "dense")
    styles = {"dense": ("black", "o")} | dict(zip(methods, cycle(STYLES), strict=False))
    figure, panels = panels_of(len(eager), 5, "eager dense")
    for axes, ((model,), records) in zip(panels, eager.items(), strict=True):
        draw_methods(axes, points_of(records), styles)
        axes.set_title(model)
    explain(figure, styles)
    return figure


def compiled_frontier() -> Figure:
    """Draw the peak of a compiled step against its time, a panel for each model."""
    figure, panels = panels_of(len(HEADLINE), 3, "compiled dense")
    for axes, (model, title) in zip(panels, HEADLINE.items(), strict=True):
        draw_methods(axes, compiled_points(model), COMPILED_STYLES)
        axes.set_xticks([0.15, 0.25, 0.35, 0.5, 0.7, 1.0])
        axes.set_yticks([0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5])
        axes.set_title(title)
    explain(figure, COMPILED_STYLES)
    return figure


def differences() -> Figure:
    """Draw differences to dense in long trainings and where the truth lies in 19 of 20 such studies."""
    studies = [main_study(task) for task in ("resnet", "vit", "resmlp", "gpt")]
    panels = [(study, findings(study, score(study)[2])) for study in studies]
    figure = Figure(figsize=(6.4, 1 + 0.24 * sum(len(each) + 1 for _, each in panels)), layout="constrained")
    heights = [len(each) for _, each in panels]
    for axes, (study, each) in zip(figure.subplots(len(panels), 1, height_ratios=heights), panels, strict=True):
        name, _, sign = score(study)
        for y, finding in enumerate(each.values()):
            axes.errorbar(sign * finding.difference, -y, xerr=finding.seen, fmt="o", color="#0072B2", markersize=4)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_yticks([-y for y in range(len(each))], [words(setting).replace("`", "") for setting in each])
        axes.set_ylim(0.5 - len(each), 0.5)
        axes.set_title(f"{model_name(study[0])}: {'less loss' if sign < 0 else name}")
    return figure


def errors() -> Figure:
    """Draw the errors of settings over dense trainings: lines as predicted, dots as they were."""
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    panels = list(groups(select("trainings", figure="error"), "model").values())
    settings = dict.fromkeys(r["setting"] for records in panels for r in records)
    styles = dict(zip(settings, STYLES, strict=False))
    for axes, records in zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True):
        for r in records:
            steps, predicted, actual, _ = zip(*r["errors"], strict=True)
            shares = [100 * step / (r["epochs"] * r["batches"]) for step in steps]
            color, marker = styles[r["setting"]]
            axes.plot(shares, predicted, color=color, linewidth=1)
            axes.plot(shares, actual, marker, color=color, markersize=4)
        axes.set_title(model_name(records[0]))
        axes.set_xlabel("share of the training, %")
    figure.axes[0].set_ylabel("error of the gradient")
    explain(figure, {words(setting).replace("`", ""): style for setting, style in styles.items()})
    return figure


def timeline() -> Figure:
    """Draw the memory of one step of a ViT-B/16, dense, checkpointed and with `max`, by what holds it."""
    records = [r for r in load("timeline") if r["model"] == TIMELINE]
    names = dict.fromkeys(name for r in records for name in r["series_mib"] if name != "in use")
    palette = matplotlib.color_sequences["tab20"]
    colors = {name: "#CCCCCC" if name.startswith("other") else palette[i % 20] for i, name in enumerate(names)}
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, r in zip(figure.subplots(1, len(records), sharey=True), records, strict=True):
        series = {name: r["series_mib"][name] for name in names if name in r["series_mib"]}
        x = range(len(r["phases"]))
        axes.stackplot(x, *series.values(), colors=[colors[name] for name in series], linewidth=0)
        axes.plot(x, r["series_mib"]["in use"], color="black", linewidth=0.8)
        axes.axvline(r["phases"].index("backward"), color="black", linestyle=":", linewidth=0.8)
        axes.set_title(f"{r['method']}: peak {r['peak_mib']:.0f} MiB")
        axes.set_xticks([])
        axes.set_xlabel("forward, then backward")
    figure.axes[0].set_ylabel("MiB")
    handles = [matplotlib.patches.Patch(color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside right", frameon=False, fontsize=7)
    return figure


def draw_all(folder: Path) -> None:
    """Draw all pictures into a folder."""
    with matplotlib.rc_context(SETTINGS):
        save(gain(), folder / "gain.png")
        save(frontier(), folder / "frontier.png", colors=256)
        save(compiled_frontier(), folder / "frontier_compiled.png")
        save(differences(), folder / "trainings.png")
        save(errors(), folder / "errors.png")
        save(timeline(), folder / f"timeline_{TIMELINE}.png", colors=128)
