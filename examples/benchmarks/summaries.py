"""What the records say, as titled tables: printed by the benchmarks, written into the pages by ``tables.py``."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.table import Table

Records = list[dict[str, Any]]


class Summary(NamedTuple):
    """A table of text."""

    title: str
    header: Sequence[str]
    rows: list[list[str]]

    def rich(self) -> Table:
        """Return it for the terminal; columns whose every cell starts with a digit are aligned to the right."""
        table = Table(title=self.title, title_justify="left")
        for number, name in enumerate(self.header):
            figures = all(row[number][:1].isdigit() for row in self.rows)
            table.add_column(name, justify="right" if figures else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


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
            cells = [f"{r['copy_us']:.1f}", f"{r['pack_us']:.1f}", f"{r['pack_us'] / r['copy_us']:.2f}"]
            rows.append([r["dtype"], case_name(r["case"]), *cells])
    title = f"Pack at b = {block_size}, s = {sparsity}"
    return Summary(title, ("dtype", "case", "copy us", "pack us", "pack / copy"), rows)


def speedup_grid(records: Records) -> Summary:
    """Dense time over ours, sparsities across: geometric mean over the cases and, in brackets, the worst case."""
    found = groups(records, "dtype", "block_size", "sparsity")
    sparsities = sorted({r["sparsity"] for r in records})
    rows = []
    for dtype, block in groups(records, "dtype", "block_size"):
        cells = []
        for sparsity in sparsities:
            ratios = [speedup(r) for r in found.get((dtype, block, sparsity), [])]
            cells.append(f"{geometric_mean(ratios):.2f} ({min(ratios):.2f})" if ratios else "-")
        rows.append([f"{dtype}, b = {block}", *cells])
    return Summary("Dense / ours", ("weight gradient", *(f"s = {s}" for s in sparsities)), rows)


STEP_METHODS = ("dense", "checkpoint", "pruned")


def steps(records: Records) -> Summary:
    """Training steps, one row per model and mode: times with their ratio to dense, and memory, by method."""
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
    """Steps of real models, one row per model and method: memory and time with their ratio to dense in that mode.

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
    return Summary("Presets on real models; in brackets the ratio to dense", header, rows)


def beside(record: dict[str, Any], dense: dict[str, Any], name: str, digits: int) -> str:
    """Return a figure and, for other methods than dense, its ratio to that of dense."""
    if record[name] is None:
        return "-"
    figure = f"{record[name]:.{digits}f}"
    return figure if record is dense else f"{figure} ({record[name] / dense[name]:.2f})"


def _time(record: dict[str, Any] | None, dense: dict[str, Any] | None) -> str:
    """Return the milliseconds and, for other methods than dense, their ratio to it."""
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
        shares = fixed, parts["packed inputs"], parts["other saved tensors"], parts["other"]
        phases = " / ".join(f"{sum(part.values()):.0f}" for part in r["parts_mib"].values())
        without = [f"{mib:.0f} ({phase})" for mib, phase in r["without_mib"].values()]
        where = r["peak_phase"] + (f" of {r['peak_at']}" if r["peak_at"] else "")
        cells = [where, phases, *(f"{share:.0f}" for share in shares), *without]
        rows.append([f"{r['model']}, {r['method']}", f"{r['peak_mib']:.0f}", *cells])
    made_of = ("parameters, gradients, state", "packed", "other saved", "temporary")
    header = ("step", "peak MiB", "lies in", "forward / backward / optimizer", *made_of, "half gone", "all gone")
    return Summary("Where the peak of a step is", header, rows)


def _failures(group: Records) -> str:
    return "; ".join(f"{r['method']} failed: {r['error']}" for r in group if "error" in r)
