"""What a forward keeps for backward, as a headline and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from lightning_actprune.compiled.decision_log import Row
from lightning_actprune.config import Keep
from lightning_actprune.tables import corresponding, kept_text, mib, percent, shortened, table

if TYPE_CHECKING:
    from lightning_actprune.analysis.memory import LayerFootprint, MemoryReport

_HOW = {"again": "computed again", "signs": "signs", "shape": "its shape alone"}


def compiled_cells(rows: Sequence[Row]) -> Iterator[tuple[str, str, int, int]]:
    """Yield name, how it is kept, dense and stored bytes of what is kept alike, the largest first."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        packed = f"{row.bits} bits" if row.bits else "fewer blocks"
        kept = _HOW.get(row.how) or (packed if row.how == "packed" else f"as it is: {row.reason}")
        groups.setdefault((row.name, kept), []).append(row)
    by_size = sorted(groups.items(), key=lambda group: -sum(row.stored_bytes for row in group[1]))
    shown, rest = shortened(by_size)
    for (name, kept), of in [*shown, *([(("... and more", ""), [r for _, one in rest for r in one])] if rest else [])]:
        dense, stored = sum(row.dense_bytes for row in of), sum(row.stored_bytes for row in of)
        yield name if len(of) == 1 else f"{name} ({len(of)})", kept, dense, stored


def headline(report: MemoryReport, compiled: Sequence[Row] = ()) -> str:
    """Return what the whole model keeps, and what it would keep if it were dense.

    Args:
        report: What was measured.
        compiled: How what compiled code keeps of it is kept, if that is known.
    """
    stored = f"{mib(report.stored_bytes)} MiB"
    if report.dense_bytes is None:
        read = f"backward reads {mib(sum(row.dense_bytes for row in compiled))} MiB"
        return (
            f"Activations: {stored}, {mib(report.compiled_bytes)} MiB of it kept by compiled code, whose "
            f"{read if compiled else 'layers are not seen one by one'}; what the dense model would keep is not known."
        )
    if report.dense_bytes == report.stored_bytes:
        return f"Activations: {stored}, as in the dense model."
    change = -100 * (report.saved_fraction or 0.0)
    return f"Activations: {mib(report.dense_bytes)} MiB dense -> {stored} ({change:+.1f} %)."


def memory_table(report: MemoryReport, epoch: int | None = None, compiled: Sequence[Row] = ()) -> Table:
    """Return what each linear layer, each other pruned layer and compiled code keeps, and the totals.

    Args:
        report: What was measured.
        epoch: When.
        compiled: How what compiled code keeps of it is kept, if that is known.
    """
    made = table(
        "Kept for backward" + ("" if epoch is None else f", epoch {epoch}"),
        "Layer",
        "Kept ",
        "Dense MiB",
        "Stored MiB",
        "Saved",
    )
    shown, rest = shortened(corresponding(report.rows, _kept))
    for name, rows in shown:
        made.add_row(name, _kept(rows[0]), *_bytes_of(rows))
    if rest:
        left = [row for _, rows in rest for row in rows]
        made.add_row(f"... and {len(left)} more", "", *_bytes_of(left))
    made.add_section()
    for name, kept, dense, stored in compiled_cells(compiled):
        made.add_row(name, kept, *_byte_cells(dense, stored))
    if compiled:
        made.add_section()
    others = max(0, report.other_bytes - sum(row.stored_bytes for row in compiled))
    made.add_row("Everything else", "", *_byte_cells(report.other_dense_bytes, others))
    made.add_row("Whole model", "", *_byte_cells(report.dense_bytes, report.stored_bytes))
    if report.measured_activation_bytes is not None:
        made.add_row("Measured after forward", "", "", mib(report.measured_activation_bytes), "")
    return made


def _kept(row: LayerFootprint) -> str:
    if not row.bits and not row.sparsity:
        return "whole"
    return kept_text(Keep(bits=row.bits), row.sparsity, row.sparsity)


def _bytes_of(rows: Sequence[LayerFootprint]) -> tuple[str, str, str]:
    return _byte_cells(sum(row.dense_bytes for row in rows), sum(row.stored_bytes for row in rows))


def _byte_cells(dense: int | None, stored: int) -> tuple[str, str, str]:
    if dense is None:
        return "not known", mib(stored), ""
    saved = percent((dense - stored) / dense) if dense else "kept anyway" if stored else "-"
    return mib(dense), mib(stored), saved
