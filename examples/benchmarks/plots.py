"""Draw the weight gradient's latency and throughput against sparsity from the records of ``kernels.py``.

    python examples/benchmarks/plots.py kernels.json --out kernels.png

Writes one picture per dtype (``kernels_bfloat16.png``, ...): a column per case, a line per block size, dense as a
horizontal line. The throughput is effective: the dense product's operations over the time taken, so that a line above
dense is a gain, whatever was left out.

``frontier_figure`` draws memory and time of whole methods, for the benchmarks that measure these.
"""

from __future__ import annotations

import argparse
import functools
import io
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.summaries import BUDGET, Record, Records, case_name, dense_of, groups, quickest
from lightning_actprune.codec.blocks import ceil_div

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart; markers differ too, for print.
Style = tuple[str, str]
STYLES: list[Style] = [
    ("#0072B2", "o"),
    ("#D55E00", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "D"),
    ("#E69F00", "v"),
    ("#56B4E9", "P"),
    ("#999999", "X"),
]
SETTINGS = {"font.size": 8, "axes.titlesize": 8, "axes.spines.top": False, "axes.spines.right": False}


def picture_path(out: Path, dtype: str) -> Path:
    """Return where the picture of ``dtype`` goes."""
    return out.with_name(f"{out.stem}_{dtype}{out.suffix}")


def tflops(case: tuple[int, ...], microseconds: float) -> float:
    """Return the operations of the dense product of ``case`` over ``microseconds``, in TFLOP/s."""
    samples, rows, features, outputs = case
    return 2 * samples * rows * features * outputs / microseconds / 1e6


def draw_lines(axes: Axes, records: Records, sizes: list[int], scale: Callable[[float], float]) -> None:
    """Draw the times of one case, as ``scale`` turns them into what the axis shows."""
    by_size = groups(sorted(records, key=lambda r: r["sparsity"]), "block_size")
    for size, (color, marker) in zip(sizes, itertools.cycle(STYLES), strict=False):
        line = by_size.get((size,), [])
        x, y = [r["sparsity"] for r in line], [scale(r["ours_us"]) for r in line]
        axes.plot(x, y, color=color, marker=marker, markersize=3.5, linewidth=1.2, label=f"b = {size}")
        for r, *point in zip(line, x, y, strict=True):
            if r["backend"] == "unpack":
                axes.plot(*point, marker, color=color, markerfacecolor="white", markersize=3.5)
    axes.axhline(scale(records[0]["dense_us"]), color="black", linestyle="--", linewidth=1, label="dense")
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25, linewidth=0.5)


def draw(records: Records, path: Path) -> None:
    """Write the picture of one dtype."""
    import matplotlib
    from matplotlib.figure import Figure

    cases = groups(records, "case")
    sizes = sorted({r["block_size"] for r in records})
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(2 * max(3, len(cases)), 4.2), layout="constrained")
        axes = figure.subplots(2, len(cases), sharex=True, squeeze=False)
        for column, ((case,), group) in enumerate(cases.items()):
            draw_lines(axes[0, column], group, sizes, float)
            draw_lines(axes[1, column], group, sizes, functools.partial(tflops, case))
            axes[0, column].set_title(case_name(case))
            axes[1, column].set_xlabel("sparsity")
        axes[0, 0].set_ylabel("latency (µs)")
        axes[1, 0].set_ylabel("effective TFLOP/s")
        dtype, gpu = records[0]["dtype"], records[0]["gpu"]
        figure.suptitle(f"Weight gradient, {dtype}, {gpu} (filled: gathered, hollow: unpacked first)", fontsize=9)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    save(figure, path)


PANELS = 5
"""In a row."""
HOLLOW = ", compiled"
"""Behind the names of hollow dots, which a legend shows of methods that there are compiled alone."""


def frontier_figure(records: Records, compiled: Records = ()) -> Figure:
    """Draw the peak of a step of each model against the time of its quickest turn, a panel a model and a dot a method.

    Models of which there is no dense record are left out.

    Args:
        records: With ``model``, ``method``, ``peak_mib`` and ``step_ms``; those with an ``error`` are passed over.
        compiled: Those of compiled models, as hollow dots beside the same eager dense step.
    """
    import matplotlib
    from matplotlib.figure import Figure

    measured = groups([r for r in records if "error" not in r], "model")
    models = {name: group for (name,), group in measured.items() if dense_of(group)}
    alone = dict.fromkeys(r["method"] for r in [*records, *compiled] if not r["method"].startswith((BUDGET, "dense")))
    styles = {"dense": ("black", "o"), **dict(zip(alone, STYLES[1:], strict=False))}
    if len(styles) <= len(alone):
        raise ValueError(f"There are styles for {len(STYLES) - 1} methods, and not for {', '.join(alone)}.")
    columns = min(PANELS, max(1, len(models)))
    rows = ceil_div(max(1, len(models)), columns)
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(max(4.5, 2.6 * columns), 2.6 * rows + 0.4), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, (name, group) in zip(panels, models.items(), strict=False):
            draw_methods(axes, group, dense_of(group), styles)
            also = [r for r in compiled if r["model"] == name and "error" not in r]
            draw_methods(axes, also, dense_of(group), styles, hollow=True)
            axes.set_title(name)
        for axes in panels[len(models) :]:
            axes.set_axis_off()
        for axes in panels[-columns:]:
            axes.set_xlabel("peak of a step, eager dense = 1")
        for axes in panels[::columns]:
            axes.set_ylabel("step time, eager dense = 1")
        known = dict[str, Any]()
        for axes in panels[: len(models)]:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                known.setdefault(label.removesuffix(HOLLOW), handle)
        figure.legend(known.values(), known, loc="outside lower center", frameon=False, ncols=max(1, len(known)))
    return figure


def draw_methods(axes: Axes, records: Records, dense: Record, styles: dict[str, Style], hollow: bool = False) -> None:
    """Draw a dot per record, and a line with numbers through those of budgets."""
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    for scale, axis in ((axes.set_xscale, axes.xaxis), (axes.set_yscale, axes.yaxis)):
        scale("log")
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
    axes.set_xticks([0.2, 0.3, 0.5, 1.0])
    axes.set_yticks([0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 4.0, 6.0])
    axes.grid(alpha=0.25, linewidth=0.5)
    points = sorted((r["peak_mib"] / dense["peak_mib"], quickest(r) / quickest(dense), r["method"]) for r in records)
    line = [point for point in points if point[2].startswith(BUDGET)]
    if line:
        x, y, _ = zip(*line, strict=True)
        axes.plot(x, y, color=STYLES[0][0], linewidth=1.2, label="memory_budget")
    for x, y, method in points:
        color, marker = styles.get(method, STYLES[0])
        label = None if method.startswith(BUDGET) else method + HOLLOW * hollow
        axes.plot(x, y, marker, color=color, markersize=4, fillstyle="none" if hollow else "full", label=label)
    for x, y, method in line:
        where = {"xytext": (3, 2), "textcoords": "offset points", "fontsize": 5.5}
        axes.annotate(method.removeprefix(BUDGET), (x, y), color=STYLES[0][0], **where)
    axes.margins(x=0.2, y=0.15)


def save(figure: Figure, path: Path, colors: int = 64) -> None:
    """Write ``figure``; as a PNG with few colours, which a line drawing hardly shows and which halves the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".png":
        figure.savefig(path)
        return
    from PIL import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=150, format="png")
    Image.open(buffer).convert("RGB").quantize(colors).save(path, optimize=True)


def write_pictures(records: Records, out: Path) -> list[Path]:
    """Write a picture per dtype, named after ``out``, and return where they are."""
    paths = []
    for (dtype,), group in groups(records, "dtype").items():
        paths.append(picture_path(out, dtype))
        draw(group, paths[-1])
    return paths


def main(argv: list[str] | None = None) -> None:
    """Draw the pictures of a record file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("--out", type=Path, default=Path("kernels.png"))
    args = parser.parse_args(argv)
    records: list[dict[str, Any]] = json.loads(args.records.read_text())
    for path in write_pictures(records, args.out):
        print(f"Wrote {path}")


if __name__ == "__main__":
    main()
