"""Draw the weight gradient's latency and throughput against sparsity from the records of ``kernels.py``.

    python examples/benchmarks/plots.py kernels.json --out kernels.png

Writes one picture per dtype (``kernels_bfloat16.png``, ...): a column per case, a line per block size, dense as a
horizontal line. The throughput is effective: the dense product's operations over the time taken, so that a line above
dense is a gain, whatever was left out.

``frontier_figure`` draws the memory, time and gradients of whole methods, for the benchmarks that measure these.
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

from examples.benchmarks.summaries import BUDGET, Record, Records, case_name, dense_of, groups

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


LEAST_ERROR = 1e-8
"""What a cosine is rounded to: a gradient that equals the dense one has no place on an axis of powers of ten."""


def frontier_figure(records: Records) -> Figure:
    """Draw what methods keep of each model against the time they take, and against how far the gradient is off.

    A column per model: steps beside those of dense above, one minus the cosine below, where methods without one, whose
    gradient is exact, are missing. Models of which there is no dense record are left out.

    Args:
        records: With ``model``, ``method``, ``activations_mib``, ``step_ms`` and ``cosine``; those with an ``error``
            are passed over.
    """
    import matplotlib
    from matplotlib.figure import Figure

    measured = groups([r for r in records if "error" not in r], "model")
    models = {name: group for (name,), group in measured.items() if dense_of(group)}
    alone = dict.fromkeys(r["method"] for r in records if not r["method"].startswith((BUDGET, "dense")))
    styles = {"dense": ("black", "o"), **dict(zip(alone, itertools.cycle(STYLES[1:])))}
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(max(4.5, 3 * len(models)), 5.4), layout="constrained")
        axes = figure.subplots(2, max(1, len(models)), sharex="col", squeeze=False)
        for (top, bottom), (name, group) in zip(axes.T, models.items(), strict=False):
            dense = dense_of(group)
            draw_methods(top, group, dense, styles, lambda r, dense=dense: r["step_ms"] / dense["step_ms"])
            ours = [r for r in group if r.get("cosine") is not None]
            draw_methods(bottom, ours, dense, styles, lambda r: max(LEAST_ERROR, 1 - r["cosine"]))
            bottom.set_yscale("log")
            bottom.set_xlabel("activations, dense = 1")
            bottom.set_xlim(0.01, 1.6)
            top.set_title(name)
        axes[0, 0].set_ylabel("step time, dense = 1")
        axes[1, 0].set_ylabel("1 - cosine of the gradient")
        if any(r["method"].startswith(BUDGET) for r in records):
            handles, labels = axes[0, 0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", frameon=False)
    return figure


def draw_methods(
    axes: Axes, records: Records, dense: Record, styles: dict[str, Style], height: Callable[[Record], float]
) -> None:
    """Draw a labelled dot per record, and a line through those of budgets."""
    axes.set_xscale("log")
    axes.grid(alpha=0.25, linewidth=0.5)
    points = sorted((r["activations_mib"] / dense["activations_mib"], height(r), r["method"]) for r in records)
    line = [point for point in points if point[2].startswith(BUDGET)]
    axes.plot([x for x, *_ in line], [y for _, y, _ in line], color=STYLES[0][0], linewidth=1.2, label="memory_budget")
    for x, y, method in points:
        color, marker = styles.get(method, STYLES[0])
        axes.plot(x, y, marker, color=color, markersize=4)
        # On the line a number says enough, on the side of it where the others have no label.
        side = {"xytext": (3, 2), "ha": "left", "va": "bottom"}
        if (x, y, method) in line:
            side = {"xytext": (-3, -2), "ha": "right", "va": "top"}
        text = method.removeprefix(BUDGET)
        axes.annotate(text, (x, y), textcoords="offset points", fontsize=5.5, color=color, **side)
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
