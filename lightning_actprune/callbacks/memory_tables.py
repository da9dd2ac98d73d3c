"""What ``ActivationMemoryMonitor`` prints: bytes per layer, the step's memory by kind, and who keeps it."""

from __future__ import annotations

from rich.table import Table

from lightning_actprune.callbacks.display import enumerated, mib, percent, shortened, table
from lightning_actprune.conversion_report import AFFINE_LAYERS, CONVOLUTIONS
from lightning_actprune.footprint import LayerFootprint, MemoryReport
from lightning_actprune.step_memory import PHASES, StepMemory

_TITLES = {"forward": "Forward", "backward": "Backward", "optimizer": "Optimizer step"}
_TOP_HOLDERS = 12
_FRACTIONS = {0.5: "half", 1.0: "all"}
_FULL = 0.999
"""Fraction of what is kept at most from which on a moment of the forward is called its end."""


def memory_table(report: MemoryReport, epoch: int) -> Table:
    """Return what each linear layer and each other pruned layer keeps, and the totals."""
    made = table(f"Kept for backward, epoch {epoch}", "Layer", "Sparsity", "Dense MiB", "Stored MiB", "Saved")
    shown, rest = shortened(report.rows)
    for row in shown:
        made.add_row(row.fqn, f"{row.sparsity:.2f}", *_byte_cells(row))
    if rest:
        made.add_row(f"... and {len(rest)} more", "", *_byte_cells(MemoryReport(list(rest))))
    if report.weight_copy_bytes:
        made.add_row("16-bit weight copies", "", *_byte_cells(MemoryReport(weight_copy_bytes=report.weight_copy_bytes)))
    made.add_section()
    kinds = {row.kind.removeprefix("ActivationPruned").removeprefix("Pruned") for row in report.rows}
    others = {"convolutions": CONVOLUTIONS, "affine layers": AFFINE_LAYERS}
    named = ["Linear layers", *[name for name, known in others.items() if not kinds.isdisjoint(known)]]
    made.add_row(enumerated(named), "", *_byte_cells(report))
    made.add_row("Other saved tensors", "", "", mib(report.other_bytes), "")
    if report.measured_activation_bytes is not None:
        made.add_row("Measured after forward", "", "", mib(report.measured_activation_bytes), "")
    if report.measured_peak_bytes is not None:
        made.add_row("Measured peak of the step", "", "", mib(report.measured_peak_bytes), "")
    return made


def peak_text(step: StepMemory) -> str:
    """Return where the peak is, and what it would at most be with fewer activations."""
    index = step.peak_in()
    if index is None:
        return ""
    kind = "measured" if step.measured else "counted, without temporary tensors"
    text = f"Peak of the step: {mib(step.peak_bytes)} MiB ({kind}), {_place(step, index)}"
    if step.moments[index].phase == "backward":
        text += f", where {percent(step.activation_bytes[index] / max(*step.activation_bytes, 1))} is kept of what the "
        text += "forward kept"
    text += "."
    for fraction, name in _FRACTIONS.items():
        without = step.bytes_without(fraction)
        there = max(range(len(without)), key=without.__getitem__)
        text += f" With {name} of the activations gone: {mib(without[there])} MiB, {_place(step, there)}."
    return text


def step_table(step: StepMemory, epoch: int) -> Table:
    """Return the bytes in use at the peak of each phase, by kind."""
    indices = {phase: index for phase in PHASES if (index := step.peak_in(phase)) is not None}
    peak = step.peak_in()
    titles = [_TITLES[phase] + (" (peak)" if index == peak else "") for phase, index in indices.items()]
    made = table(f"Memory of the step at the peak of each part, MiB, epoch {epoch}", "", *titles)
    parts = [step.parts(index) for index in indices.values()]
    for name in parts[0] if parts else ():
        if name != "other" or step.measured:
            shown = "temporary and other tensors" if name == "other" else name
            made.add_row(shown.capitalize(), *(mib(part[name]) for part in parts))
    made.add_section()
    made.add_row(
        "In use" if step.measured else "Counted", *(mib(step.interval_bytes[index]) for index in indices.values())
    )
    return made


def holders_table(step: StepMemory, epoch: int) -> Table:
    """Return who keeps what at the end of the forward."""
    groups = step.groups(step.forward_end)
    total = sum(group.nbytes for group in groups)
    made = table(f"Kept at the end of the forward, by holder, epoch {epoch}", "Holder", "Tensors", "MiB", "Share")
    cut = _TOP_HOLDERS if len(groups) > _TOP_HOLDERS + 1 else len(groups)
    for group in groups[:cut]:
        label = group.label + (", packed" if group.packed else "")
        made.add_row(label, str(group.count), mib(group.nbytes), percent(group.nbytes / total) if total else "-")
    if rest := groups[cut:]:
        nbytes = sum(group.nbytes for group in rest)
        count = sum(group.count for group in rest)
        made.add_row(f"... and {len(rest)} more", str(count), mib(nbytes), percent(nbytes / total) if total else "-")
    return made


def _place(step: StepMemory, index: int) -> str:
    moment = step.moments[index]
    if moment.phase == "optimizer":
        return "in the optimizer step"
    if moment.phase == "forward" and step.activation_bytes[index] >= _FULL * max(step.activation_bytes):
        return "at the end of the forward"
    where = f" of {moment.fqn!r}" if moment.fqn else ""
    operator = f" ({moment.operator})" if moment.operator else ""
    return f"in the {moment.phase}{where}{operator}"


def _byte_cells(part: LayerFootprint | MemoryReport) -> tuple[str, str, str]:
    if part.dense_bytes:
        saved = percent(part.saved_bytes / part.dense_bytes)
    else:
        saved = "kept anyway" if part.stored_bytes else "-"
    return mib(part.dense_bytes), mib(part.stored_bytes), saved
