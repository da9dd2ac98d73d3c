"""Draw the weight gradient's latency and throughput against sparsity from the records of ``kernels.py``.

    python examples/benchmarks/plots.py kernels.json --out kernels.png

Writes one picture per dtype (``kernels_bfloat16.png``, ...): a column per case, a line per block size, dense as a
horizontal line. The throughput is effective: the dense product's operations over the time taken, so that a line above
dense is a gain, whatever was left out.
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

from examples.benchmarks.summaries import Records, case_name, groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart; markers differ too, for print.
STYLES = [("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P")]
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
