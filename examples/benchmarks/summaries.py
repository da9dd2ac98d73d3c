"""What the records say, as titled tables: printed by the benchmarks, written into the pages by ``tables.py``."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.table import Table

Record = dict[str, Any]
Records = list[Record]


class Summary(NamedTuple):
    """A table of text."""

    title: str
    header: Sequence[str]
    rows: list[list[str]]

    def rich(self) -> Table:
        """Return it for the terminal, figures to the right."""
        table = Table(title=self.title, title_justify="left")
        for number, name in enumerate(self.header):
            figures = are_figures([row[number] for row in self.rows])
            table.add_column(name, justify="right" if figures else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


def are_figures(cells: Sequence[str], longest: int = 40) -> bool:
    """Return whether the cells of a column are figures, which stand to the right; words stand to the left.

    A cell that goes on after its figure for more than ``longest`` characters is a sentence.
    """
    filled = [cell for cell in cells if cell not in ("", "-")]
    return all(re.match(r"(\*\*)?[-+]?\d", cell) and len(cell) <= longest for cell in filled)


BUDGET = "budget:"
"""Begins the names of methods that are a memory budget."""


def percent(ratio: float) -> str:
    """Return by how many percent something is more or less, if it is ``ratio`` times what it is compared with."""
    change = round(100 * (ratio - 1))
    return f"{change:+d} %" if change else "0 %"


def quickest(record: Record) -> float:
    """Return how long a step took in the quickest turn."""
    return min(record.get("step_ms_rounds") or [record["step_ms"]])


def time_change(record: Record, dense: Record) -> str:
    """Return how the time of a step changes, by the quickest turns and by the medians where these differ."""
    ratios = sorted((quickest(record) / quickest(dense), record["step_ms"] / dense["step_ms"]))
    least, most = map(percent, ratios)
    return least if least == most else f"{least.removesuffix(' %')} to {most}"


def groups(records: Records, *keys: str) -> dict[tuple[Any, ...], Records]:
    """Return ``records`` by the values of ``keys``, in order of appearance."""
    found: dict[tuple[Any, ...], Records] = {}
    for record in records:
        values = (record[key] for key in keys)
        found.setdefault(tuple(tuple(v) if isinstance(v, list) else v for v in values), []).append(record)
    return found


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean, which is the same for ratios and for their inverses."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def speedup(record: dict[str, Any]) -> float:
    """Return how many times faster than the dense weight gradient ours is."""
    return float(record["dense_us"] / record["ours_us"])


def picked(record: dict[str, Any]) -> float:
    """Return the time of the method the cost model picked over that of the better one."""
    return float(record["ours_us"] / min(record["gather_us"], record["unpack_us"]))


def case_name(case: Sequence[int]) -> str:
    """Return a case as samples, rows and input features, and output features."""
    return f"({', '.join(map(str, case[:3]))}) → {case[3]}"


def weight_gradient(records: Records) -> Summary:
    """Dense time over ours per setting: geometric mean over the cases, worst case, what was picked."""
    rows = []
    for (dtype, block, sparsity), group in groups(records, "dtype", "block_size", "sparsity").items():
        backends = Counter(r["backend"] for r in group)
        cells = [geometric_mean(map(speedup, group)), min(map(speedup, group)), max(map(picked, group))]
        named = ", ".join(f"{name} {count}" for name, count in sorted(backends.items()))
        rows.append([dtype, str(block), str(sparsity), *(f"{value:.2f}" for value in cells), named])
    header = ("dtype", "block", "sparsity", "dense / ours", "worst case", "picked / best", "methods picked")
    return Summary("Weight gradient, geometric mean over the cases (above 1: faster than dense)", header, rows)


def by_case(records: Records, tolerance: float = 1.1) -> Summary:
    """Per case over all settings: range of speedups, and how close the cost model's pick is to the better method."""
    rows = []
    for (dtype, case), group in groups(records, "dtype", "case").items():
        ratios, picks = [speedup(r) for r in group], [picked(r) for r in group]
        within = sum(pick <= tolerance for pick in picks)
        cells = [f"{group[0]['dense_us']:.1f}", f"{min(ratios):.2f} - {max(ratios):.2f}", f"{max(picks):.2f}"]
        rows.append([dtype, case_name(case), *cells, f"{within} of {len(group)}"])
    share = f"within {tolerance - 1:.0%} of best"
    header = ("dtype", "case", "dense us", "dense / ours", "worst picked / best", share)
    return Summary("Weight gradient, per case over all blocks and sparsities", header, rows)


def pack(records: Records, block_size: int = 32, sparsity: float = 0.6) -> Summary:
    """Pack beside a device copy of the same tensor, per case at one setting."""
    rows = []
    for r in records:
        if (r["block_size"], r["sparsity"]) == (block_size, sparsity):
            cells = [f"{r['copy_us']:.1f}", f"{r['pack_us']:.1f}", percent(r["pack_us"] / r["copy_us"])]
            rows.append([r["dtype"], case_name(r["case"]), *cells])
    title = f"Pack at b = {block_size}, s = {sparsity}"
    return Summary(title, ("dtype", "case", "copy us", "pack us", "more than the copy"), rows)


def time_grid(records: Records) -> Summary:
    """Our time beside the dense one, sparsities across: geometric mean over the cases and, in brackets, the worst."""
    found = groups(records, "dtype", "block_size", "sparsity")
    sparsities = sorted({r["sparsity"] for r in records})
    rows = []
    for dtype, block in groups(records, "dtype", "block_size"):
        cells = []
        for sparsity in sparsities:
            ratios = [1 / speedup(r) for r in found.get((dtype, block, sparsity), [])]
            cells.append(f"{percent(geometric_mean(ratios))} ({percent(max(ratios))})" if ratios else "-")
        rows.append([f"{dtype}, b = {block}", *cells])
    return Summary(
        "Time beside that of the dense product", ("weight gradient", *(f"s = {s}" for s in sparsities)), rows
    )


STEP_METHODS = ("dense", "checkpoint", "pruned")


def steps(records: Records) -> Summary:
    """Training steps, one row per model and mode: times, also beside dense, and memory, by method."""
    rows = []
    for (model, batch, precision, mode), group in groups(records, "model", "batch", "precision", "mode").items():
        by_method = {r["method"]: r for r in group}
        cells = [_time(by_method.get(method), by_method.get("dense")) for method in STEP_METHODS]
        memory = [
            " / ".join(f"{by_method[m][name]:.0f}" if m in by_method else "-" for m in STEP_METHODS)
            for name in ("activations_mib", "peak_mib")
        ]
        rows.append([f"{model}, {batch} images, {precision}", mode, *cells, *memory])
    times = (f"{method} ms" for method in STEP_METHODS)
    return Summary("Training steps", ("step", "mode", *times, "activations MiB", "peak MiB"), rows)


def presets(records: Records) -> Summary:
    """Steps of real models, one row per model and method: memory and time, also beside dense in that mode.

    The last column is how long the host takes to issue a step; an eager step takes no less.
    """
    rows = []
    for (model, batch, _), group in groups(records, "model", "batch", "mode").items():
        dense = next(r for r in group if r["method"].startswith("dense"))
        for r in group:
            memory = [beside(r, dense, name, 0) for name in ("activations_mib", "peak_mib")]
            layers = f"{r['dropping']} of {r['converted']}" if r["converted"] else "-"
            host = f"{r['host_ms']:.1f}"
            rows.append([f"{model}, batch {batch}", r["method"], layers, *memory, _time(r, dense), host])
    header = ("model", "method", "layers that drop blocks", "activations MiB", "peak MiB", "ms a step", "host ms")
    return Summary("Presets on real models; in brackets, how much more or less than dense", header, rows)


def frontier(records: Records) -> Summary:
    """What each method needs of a model and how long it takes, beside dense, and how far its gradient is off."""
    titles = {"host_ms": "host's ms", "gpu_ms": "GPU's ms", "samples_per_s": "samples a second"}
    measured = {name: title for name, title in titles.items() if any(name in r for r in records)}
    rows = []
    for (model,), group in groups(records, "model").items():
        dense = dense_of(group)
        for r in group:
            cells = [r.get("error", "-"), *["-"] * (4 + len(measured))]
            if "error" not in r:
                figures = ("activations_mib", 0), ("peak_mib", 0), ("step_ms", 2)
                cells = [beside(r, dense or r, name, digits) for name, digits in figures]
                turn = f"{quickest(r):.2f}"
                cells.append(turn if dense in (None, r) else f"{turn} ({percent(quickest(r) / quickest(dense))})")
                cells += [f"{r[name]:.0f}" if name in r else "-" for name in measured]
                cells.append("-" if r.get("cosine") is None else f"{1 - r['cosine']:.1e}")
            rows.append([model, r["method"], *cells])
    header = (
        "model",
        "method",
        "activations MiB",
        "peak MiB",
        "ms a step",
        "quickest turn",
        *measured.values(),
        "1 - cosine",
    )
    return Summary("Memory, time and gradients; in brackets, how much more or less than dense", header, rows)


def graphs(records: Records) -> Summary:
    """What the allocator holds where steps are replayed from CUDA graphs, and how long they take, beside dense."""
    figures, rows = (("reserved_mib", 0), ("step_ms", 2)), list[list[str]]()
    for (model,), group in groups(records, "model").items():
        dense = dense_of(group)
        rows += [[model, r["method"], *(beside(r, dense or r, *figure) for figure in figures)] for r in group]
    header = ("model", "method", "reserved MiB", "ms a step")
    return Summary("Memory and time with CUDA graphs; in brackets, how much more or less than dense", header, rows)


def scaling(records: Records) -> Summary:
    """What each process needs on several GPUs and how long its steps take, beside dense on as many and on one.

    Memory repeats; times are compared with those of the same command alone, since the hosts of two differ.
    """
    rows = []
    alone = {_of_one(r): r for r in records if r["devices"] == 1 and "error" not in r}
    for (model, compiled, strategy, devices), group in groups(
        records, "model", "compiled", "strategy", "devices"
    ).items():
        dense = dense_of(group)
        for r in group:
            cells = [r.get("error", "-"), *"----"]
            if "error" not in r:
                one = _timed_with(r, alone.get(_of_one(r)))
                cells = [beside(r, dense or r, name, 0) for name in ("activations_mib", "peak_mib")]
                cells.append(beside(r, _timed_with(r, dense) or r, "step_ms", 2))
                cells.append("-" if one is None or one is r else percent(r["step_ms"] / one["step_ms"]))
                cells.append(f"{r['host_ms']:.0f}")
            name = f"{model}, compiled" if compiled else model
            rows.append([name, strategy if devices == 1 else f"{strategy}, {devices}", r["method"], *cells])
    header = ("model", "on", "method", "activations MiB", "peak MiB", "ms a step", "than on one GPU", "host's ms")
    return Summary("Memory and time of each process; in brackets, how much more or less than dense", header, rows)


def _of_one(r: Record) -> tuple[Any, ...]:
    """Return what a case on several GPUs shares with the one on a single GPU that it is compared with."""
    return r["model"], r["method"], r["compiled"]


def _timed_with(r: Record, other: Record | None) -> Record | None:
    """Return another case if the same command has timed both."""
    return None if other is None or r.get("command") != other.get("command") else other


def budgets(records: Records) -> Summary:
    """What was allowed, predicted and measured of each budget, and what was chosen, or why nothing was; in MiB."""
    rows = []
    for (model, batch), group in groups(records, "model", "batch").items():
        dense = dense_of(group)
        rows += [[f"{model}, batch {batch}", *_budget_cells(r, dense)] for r in group]
    sizes = ("MiB", "predicted peak", "measured peak", "off by", "activations MiB")
    return Summary("Peaks of steps under a budget", ("model", "budget", *sizes, "ms a step"), rows)


def _budget_cells(r: Record, dense: Record | None) -> list[str]:
    """Return the cells of a fit with a budget, or without one for comparison."""
    label = r["method"].removeprefix(BUDGET)
    if "error" in r:
        least = re.search(r"at the least, ([\d,]+ MiB)", r["error"])
        return [label, "-", f"refused: a step takes {least[1]}" if least else r["error"], *["-"] * 4]
    sizes, off = ["-", "-", f"{r['peak_mib']:.0f}"], "-"
    if "predicted_mib" in r:
        sizes = [f"{r[name]:.0f}" for name in ("budget_mib", "predicted_mib", "peak_mib")]
        off = f"{100 * (r['peak_mib'] / r['predicted_mib'] - 1):+.1f} %"
    time = "-" if dense is None or "step_ms" not in r else beside(r, dense, "step_ms", 1)
    return [label, *sizes, off, f"{r['activations_mib']:.0f}", time]


def dense_of(records: Records) -> Record | None:
    """Return the dense one among the records of a model, if it could be measured."""
    return next((r for r in records if r["method"] == "dense" and "error" not in r), None)


def beside(record: dict[str, Any], dense: dict[str, Any], name: str, digits: int) -> str:
    """Return a figure and, for other methods than dense, how much more or less than that of dense it is."""
    if record[name] is None:
        return "-"
    figure = f"{record[name]:.{digits}f}"
    compared = record is not dense and dense[name]  # of CUDA graphs all that a step keeps is in their own memory
    return f"{figure} ({percent(record[name] / dense[name])})" if compared else figure


def _time(record: dict[str, Any] | None, dense: dict[str, Any] | None) -> str:
    """Return the milliseconds and, for other methods than dense, how much more or less they are."""
    if record is None:
        return "-"
    return f"{record['ms_median']:.2f}" if dense is None else beside(record, dense, "ms_median", 2)


def measured_pairs(records: Records) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the dense and the pruned record of each model of which both were measured."""
    for group in groups(records, "model").values():
        by_method = {r["method"]: r for r in group if "error" not in r}
        if {"dense", "pruned"} <= by_method.keys():
            yield by_method["dense"], by_method["pruned"]


def models(records: Records) -> Summary:
    """Third-party models, one row each: how many layers pack of those converted, memory as dense / pruned, savings."""
    found = {dense["model"]: (dense, pruned) for dense, pruned in measured_pairs(records)}
    rows = []
    for (name,), group in groups(records, "model").items():
        source = f"{group[0]['source']} {group[0]['version'] or '(not installed)'}"
        cells = _model_cells(*found[name]) if name in found else [_failures(group), *["-"] * 5]
        rows.append([name, source, str(group[0]["batch"]), *cells])
    memory = ("activations MiB", "peak MiB", "saved MiB", "announced MiB")
    return Summary("Third-party models", ("model", "library", "batch", "pruned layers", "left dense", *memory), rows)


def _model_cells(dense: dict[str, Any], pruned: dict[str, Any]) -> list[str]:
    # Layers of one kind, numbered by their block, have one reason.
    reasons = dict.fromkeys(re.sub(r"(?<=[._])\d+(?=[.'])", "*", reason) for reason in pruned["reasons"])
    left = f"{pruned['skipped']} ({'; '.join(reasons)})" if pruned["skipped"] else "0"
    memory = [f"{dense[name]:.0f} / {pruned[name]:.0f}" for name in ("activations_mib", "peak_mib")]
    saved = f"{pruned['saved_mib']:.1f} ({100 * pruned['saved_mib'] / dense['activations_mib']:.0f} %)"
    return [f"{pruned['packed']} of {pruned['converted']}", left, *memory, saved, f"{pruned['announced_mib']:.1f}"]


def timeline(records: Records) -> Summary:
    """Where the peak of a step is and what it is made of, and the peak with half or all of the activations gone."""
    rows = []
    for r in records:
        parts = r["parts_mib"][r["peak_phase"]]
        fixed = sum(parts[name] for name in ("parameters", "gradients", "optimizer state", "batch"))
        shares = fixed, parts["packed tensors"], parts["other saved tensors"], parts["other"]
        phases = " / ".join(f"{sum(part.values()):.0f}" for part in r["parts_mib"].values())
        without = [f"{mib:.0f} ({phase})" for mib, phase in r["without_mib"].values()]
        where = r["peak_phase"] + (f" of {r['peak_at']}" if r["peak_at"] else "")
        cells = [where, phases, *(f"{share:.0f}" for share in shares), *without]
        rows.append([f"{r['model']}, {r['method']}", f"{r['peak_mib']:.0f}", *cells])
    made_of = ("parameters, gradients, state", "packed", "other saved", "temporary")
    header = ("step", "peak MiB", "lies in", "forward / backward / optimizer", *made_of, "half gone", "all gone")
    return Summary("Where the peak of a step is", header, rows)


ZOO_MIN_VALUES = 1024
"""Least values of a tensor that is packed there: inputs are small."""
ZOO_PRESETS = "balanced", "max"
ZOO_STEADY = 0.95
"""A model whose gradient with rounded inputs has a cosine below that is chaotic: its gradients prove nothing."""
_AS_IT_IS = {ord(mark): f"&#{ord(mark)};" for mark in "|*_`<[]"}
"""Marks of Markdown in what is quoted there, as text."""
_ZOO_HEADER = ("model", "rounded inputs", "bfloat16", "balanced", "max", "kept, balanced", "kept, max")


def zoo(records: Records, most: int = 10) -> list[Summary]:
    """The models of the zoo whose gradients with ``max`` are furthest off, and those that keep most with it."""
    measured = [r for r in records if zoo_is_measured(r)]
    by_cosine = sorted(measured, key=lambda r: r["max_cosine"])[:most]
    by_bytes = sorted(measured, key=lambda r: -zoo_share(r, "max"))[:most]
    return [
        Summary(f"Models with the {what}, max", _ZOO_HEADER, [zoo_cells(r) for r in worst])
        for what, worst in (("lowest cosine", by_cosine), ("most kept", by_bytes))
    ]


def zoo_models(records: Records) -> Summary:
    """All models of the zoo, with the largest difference of an output and what is to be said of them."""
    rows = []
    for r in records:
        differences = [r[f"{preset}_forward"] for preset in ZOO_PRESETS if f"{preset}_forward" in r]
        difference = f"{max(differences):.0e}".replace("0e+00", "0") if differences else "-"
        notes = ["chaotic"] if r.get("noise") is not None and r["noise"] < ZOO_STEADY else []
        notes += dict.fromkeys(r[key] for key in r if key.endswith(("error", "left")))
        rows.append([*zoo_cells(r), difference, "; ".join(notes).translate(_AS_IT_IS)])
    return Summary("All models of the zoo", (*_ZOO_HEADER, "output", "notes"), rows)


def zoo_worst(records: Records, most: int) -> Records:
    """Return the models of the zoo with the lowest cosines with ``balanced``, of those that are not chaotic."""
    steady = [r for r in records if zoo_is_measured(r) and r["noise"] >= ZOO_STEADY]
    return sorted(steady, key=lambda r: float(r["balanced_cosine"]))[:most]


def zoo_rounding(record: Record) -> float:
    """Return the least cosine that rounding alone makes of a gradient of the zoo."""
    return min(float(record[name]) for name in ("noise", "bfloat16") if record.get(name) is not None)


def zoo_causes(records: Records) -> Summary:
    """What eight bits for one operator make of the worst gradients of the zoo, and bytes that they cost."""
    labels = "balanced", "linear", "convolution", "activation", "norm", "all"
    rows = []
    for r in sorted(records, key=lambda r: float(r["balanced"])):
        cosines = [f"{r[label]:.4f}" if label in r else "-" for label in labels]
        costs = [
            f"{r[f'{label}_kib'] / r['balanced_kib'] - 1:+.0%}".replace("%", " %") for label in ("activation", "all")
        ]
        rows.append([f"{r['zoo_causes']}/{r['model']}", *cosines, *costs])
    return Summary("Eight bits in place of four", ("model", *labels, "bytes, activation", "bytes, all"), rows)


def zoo_is_measured(record: Record) -> bool:
    """Return whether a model of the zoo has gradients with both presets."""
    return all(record.get(f"{preset}_cosine") is not None for preset in ZOO_PRESETS)


def zoo_name(record: Record) -> str:
    """Return the name of a model of the zoo with its library."""
    return f"{record['zoo']}/{record['model']}"


def zoo_share(record: Record, preset: str) -> float:
    """Return what a model keeps with a preset, over what it keeps dense."""
    return float(record[f"{preset}_kib"] / record["kib"])


def zoo_cells(record: Record) -> list[str]:
    """Return the name of a model, the cosines of its gradients, and what it keeps, ``-`` for what is not known."""
    cosines = [record.get(name) for name in ("noise", "bfloat16", *(f"{preset}_cosine" for preset in ZOO_PRESETS))]
    shares = [f"{100 * zoo_share(record, p):.1f} %" if f"{p}_kib" in record else "-" for p in ZOO_PRESETS]
    return [zoo_name(record), *("-" if value is None else f"{value:.4f}" for value in cosines), *shares]


def _failures(group: Records) -> str:
    return "; ".join(f"{r['method']} failed: {r['error']}" for r in group if "error" in r)
