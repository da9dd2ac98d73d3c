"""Draw what the accuracy study found from the records of ``accuracy.py``.

    python examples/benchmarks/study_plots.py accuracy.json --out docs/

Writes up to three pictures per study, which are runs that train the same model on the same data in the same way:

- ``accuracy_heatmap_<task>.png``: mean accuracy less the mean of dense runs, by sparsity and block size;
- ``accuracy_losses_<task>.png``: training loss of every epoch, dense and at rising sparsity, at one block size;
- ``accuracy_bits_<task>.png``: accuracy against the bits that are stored per value, one point per setting.

A picture whose runs are not there is left out. Of text, the validation loss stands for the accuracy. The first two are
of kept values as they are and dropped ones as zeros, the method of the paper.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.plots import SETTINGS, STYLES, save
from examples.benchmarks.study import evidence, results
from examples.benchmarks.study.settings import PRUNED
from examples.benchmarks.summaries import Record, Records, groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def split(records: Records) -> tuple[Records, Records]:
    """Return the dense runs and those that keep values as they are and drop the others to zero."""
    dense = [r for r in records if r["method"] == "dense"]
    pruned = [r for r in records if r["method"] == PRUNED]
    paper = [r for r in pruned if r["value_format"] == "same" and results.selection(r) == "largest"]
    return dense, [r for r in paper if r.get("max_dropped_energy") is None]


def heatmap(records: Records) -> Figure:
    """Draw by how much each sparsity and block size differs from dense; red is worse, white as good."""
    dense, pruned = split(records)
    score = results.score_of(records[0])
    reference, deviation = mean_and_deviation(score.of(dense))
    cells = {
        key: statistics.mean(score.of(group)) - reference
        for key, group in groups(pruned, "sparsity", "block_size").items()
    }
    sparsities, sizes = (sorted({key[i] for key in cells}) for i in (0, 1))
    figure, axes = one(size=(max(4.2, 1.6 + 0.8 * len(sizes)), 1.4 + 0.45 * len(sparsities)))
    grid = [[score.sign * cells.get((s, b), float("nan")) for b in sizes] for s in sparsities]
    # At least so much that what the seeds make of dense runs stays pale.
    limit = max(2 * deviation, *map(abs, cells.values())) or 1.0
    axes.imshow(grid, cmap="RdBu", vmin=-limit, vmax=limit, origin="lower", aspect="auto")
    for (s, b), value in cells.items():
        # Far from zero the colours are dark.
        color = "white" if abs(value) > 0.6 * limit else "black"
        place = sizes.index(b), sparsities.index(s)
        axes.text(*place, f"{value:+.{score.digits}f}", ha="center", va="center", color=color)
    axes.set_xticks(range(len(sizes)), map(str, sizes))
    axes.set_yticks(range(len(sparsities)), map(str, sparsities))
    axes.set_xlabel("block size")
    axes.set_ylabel("sparsity")
    mean = results.mean_and_deviation(score.of(dense), score.digits)
    axes.set_title(f"{score.name}, difference to dense ({mean})")
    return titled(figure, records)


def loss_curves(records: Records) -> Figure:
    """Draw the mean loss over the seeds, at the block size with the most sparsities (the smallest of several)."""
    import matplotlib

    dense, pruned = split([r for r in records if "losses" in r])
    size = min({r["block_size"] for r in pruned}, key=lambda b: (-len(sparsities_at(pruned, b)), b))
    sparsities = sparsities_at(pruned, size)
    figure, axes = one(size=(4.5, 3.2))
    # Without the palest end of the colours.
    colors = matplotlib.colormaps["viridis_r"]([0.15 + 0.85 * i / len(sparsities) for i in range(len(sparsities))])
    for sparsity, color in zip(sparsities, colors, strict=True):
        runs = [r for r in pruned if (r["sparsity"], r["block_size"]) == (sparsity, size)]
        draw_losses(axes, runs, color=color, label=f"s = {sparsity}")
    draw_losses(axes, dense, color="black", linestyle="--", label="dense")
    axes.set_xlabel("epoch")
    axes.set_ylabel("training loss")
    axes.set_title(f"Mean over the seeds, b = {size}")
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.legend(frameon=False)
    return titled(figure, records)


def sparsities_at(records: Records, size: int) -> list[float]:
    """Return the sparsities of one block size, rising."""
    return sorted({r["sparsity"] for r in records if r["block_size"] == size})


def draw_losses(axes: Axes, runs: Records, **style: object) -> None:
    """Draw the mean loss of each epoch."""
    means = [statistics.mean(losses) for losses in zip(*(r["losses"] for r in runs), strict=True)]
    axes.plot(range(1, len(means) + 1), means, linewidth=1.2, **style)


def tradeoff(records: Records) -> Figure:
    """Draw every setting by the bits it stores per value; bars and the band of dense are one standard deviation."""
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    # Bits are those of linear layers alone: what other layers keep in few bits is not on this axis.
    alone = [r for r in records if not r.get("others") and r["method"] in ("dense", PRUNED)]
    settings = results.by_setting(sorted(alone, key=lambda r: r["bits_per_value"]))
    dense = settings.pop("dense")
    score = results.score_of(records[0])
    figure, axes = one(size=(6.5, 4.2))
    mean, deviation = mean_and_deviation(score.of(dense))
    axes.axhspan(mean - deviation, mean + deviation, color="black", alpha=0.12, linewidth=0)
    axes.axhline(mean, color="black", linestyle="--", linewidth=1, label="dense")
    storages = alike_in_storage(settings.values())
    styles = dict(zip(dict.fromkeys(value_format for value_format, _ in storages), STYLES, strict=False))
    for (value_format, selection), runs in storages.items():
        color, marker = styles[value_format]
        filled = color if selection == "largest" else "white"
        marker = {"unbiased": "D"}.get(selection, marker)
        stored = "as they are" if value_format == "same" else value_format
        label = stored if selection == "largest" else f"{stored}, {selection}"
        draw_points(axes, runs, score, label, color=color, marker=marker, markerfacecolor=filled)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("stored bits per value (beside each point: sparsity, block size, limit of the dropped energy)")
    axes.set_ylabel(score.name)
    axes.margins(x=0.08)
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.legend(frameon=False)
    return titled(figure, records)


def alike_in_storage(settings: Iterable[Records]) -> dict[tuple[str, str], list[Records]]:
    """Return the runs of each setting by how values are stored and by which blocks are kept."""
    found: dict[tuple[str, str], list[Records]] = {}
    for runs in settings:
        found.setdefault((runs[0]["value_format"], results.selection(runs[0])), []).append(runs)
    return found


def draw_points(axes: Axes, settings: list[Records], score: results.Score, label: str, **style: str) -> None:
    """Draw a point with an error bar and its setting for the runs of each setting."""
    for number, runs in enumerate(settings):
        x = statistics.mean(r["bits_per_value"] for r in runs)
        y, error = mean_and_deviation(score.of(runs))
        name = label if number == 0 else None
        axes.errorbar(x, y, error, markersize=4, linewidth=0.8, capsize=2, linestyle="none", label=name, **style)
        # Neighbours are labelled on different sides.
        side = {"ha": "right", "xytext": (-3, 2)} if number % 2 else {"ha": "left", "xytext": (3, 2)}
        limit = runs[0].get("max_dropped_energy")
        text = f"{runs[0]['sparsity']:g}, {runs[0]['block_size']}" + ("" if limit is None else f", e ≤ {limit:g}")
        axes.annotate(text, (x, y), textcoords="offset points", fontsize=5.5, color=style["color"], **side)


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard deviation, which of a single value is not known and drawn as zero."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def differences(studies: Sequence[Records]) -> Figure:
    """Draw how each setting differs from dense, a panel per study: to the right is better.

    Bars are the intervals in which the truth lies in 19 of 20 such studies.
    """
    import matplotlib
    from matplotlib.figure import Figure

    found = [(study, evidence.findings(study)) for study in studies]
    found = [(study, settings) for study, settings in found if settings]
    with matplotlib.rc_context(SETTINGS):
        heights = [len(settings) + 2 for _, settings in found]
        figure = Figure(figsize=(5.5, 0.6 + 0.24 * sum(heights)), layout="constrained")
        panels = figure.subplots(len(found), squeeze=False, height_ratios=heights)[:, 0]
        for axes, (study, settings) in zip(panels, found, strict=True):
            score = results.score_of(study[0])
            values = [score.sign * finding.difference for finding in settings.values()]
            bars = [finding.seen for finding in settings.values()]
            places = range(len(settings), 0, -1)
            axes.errorbar(values, places, xerr=bars, fmt=STYLES[0][1], color=STYLES[0][0], markersize=4, capsize=2)
            axes.axvline(0, color="black", linewidth=0.8, linestyle="--")
            axes.set_yticks(places, [setting.replace("`", "") for setting in settings])
            axes.set_ylim(0.3, len(settings) + 0.7)
            axes.set_title(brief(study[0]))
            axes.set_xlabel(f"{score.name}, {'less' if score.sign < 0 else 'points more'} than dense")
            axes.locator_params(axis="x", nbins=6)
            axes.grid(axis="x", alpha=0.25, linewidth=0.5)
    return figure


def brief(record: Record) -> str:
    """Return what a study trains in a few words."""
    parts = [results.model(record), f"{record['epochs']} epochs"]
    parts += [f"{record['classes']} classes"] if record.get("turned") else []
    parts += ["LoRA" if record.get("lora") else "fine-tuned"] if record.get("start") else []
    return ", ".join(parts)


def one(size: tuple[float, float]) -> tuple[Figure, Axes]:
    """Return an empty figure of ``size`` inches and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots()


def titled(figure: Figure, records: Records) -> Figure:
    """Return ``figure`` with the study it is of above it."""
    seeds = sorted({len(runs) for runs in results.by_setting(records).values()})
    numbers = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])
    # Which data these are, to the last byte, says the page: a picture has no room for it.
    checksum = records[0].get("sha256")
    title = results.study_title(records[0]).replace(f" ({checksum})", "").replace(f", {checksum})", ")")
    figure.suptitle(f"{title}, {numbers} seeds", fontsize=7, wrap=True)
    return figure


def has_grid(records: Records) -> bool:
    """Return whether several sparsities or block sizes can be compared with dense."""
    dense, pruned = split(records)
    return bool(dense) and len(groups(pruned, "sparsity", "block_size")) > 1


def has_losses(records: Records) -> bool:
    """Return whether the losses of each epoch are known, dense and pruned."""
    return all(split([r for r in records if "losses" in r]))


def has_both(records: Records) -> bool:
    """Return whether there are dense and other runs."""
    return len({r["method"] == "dense" for r in records}) == 2


class Picture(NamedTuple):
    """A kind of picture: what it shows, what draws it, and whether there are runs for it."""

    title: str
    draw: Callable[[Records], Figure]
    possible: Callable[[Records], bool]


PICTURES = {
    "heatmap": Picture("Difference to dense by sparsity and block size", heatmap, has_grid),
    "losses": Picture("Training loss by epoch", loss_curves, has_losses),
    "bits": Picture("Score by stored bits per value", tradeoff, has_both),
}


def drawn(study: Records, number: int = 1) -> dict[str, Picture]:
    """Return the pictures of a study that there are runs for by file name; further studies of a task are numbered."""
    task, suffix = study[0]["task"], f"_{number}" if number > 1 else ""
    found = {kind: picture for kind, picture in PICTURES.items() if picture.possible(study)}
    return {f"accuracy_{kind}_{task}{suffix}.png": picture for kind, picture in found.items()}


def pictures(records: Records) -> Iterator[tuple[str, Figure]]:
    """Yield every picture there are runs for, with its file name."""
    import matplotlib

    for group in groups(records, "task").values():
        for number, study in enumerate(results.studies(group), start=1):
            for name, picture in drawn(study, number).items():
                with matplotlib.rc_context(SETTINGS):
                    figure = picture.draw(study)
                yield name, figure


def write_pictures(records: Records, folder: Path) -> list[Path]:
    """Write the pictures into ``folder`` and return where they are."""
    paths = []
    for name, figure in pictures(records):
        paths.append(folder / name)
        save(figure, paths[-1], colors=256)  # of 64, blue and green points get the same one
    return paths


def main(argv: list[str] | None = None) -> None:
    """Draw the pictures of a record file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the pictures")
    args = parser.parse_args(argv)
    for path in write_pictures(json.loads(args.records.read_text()), args.out):
        print(f"Wrote {path}")


if __name__ == "__main__":
    main()
