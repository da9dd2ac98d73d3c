"""Tables beside Lightning's progress bars: how each layer is kept, and who keeps which bytes in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichModelSummary, RichProgressBar, TQDMProgressBar
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from rich import get_console
from rich.console import RenderableType
from rich.table import Table
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_actprune import config
from lightning_actprune.analysis.memory import MemoryReport, compiled_cells
from lightning_actprune.analysis.step_memory import LOSSES, PHASES, StepMemory
from lightning_actprune.callbacks.first_batch import Decision
from lightning_actprune.compiled.report import Row
from lightning_actprune.report import (
    MOST_NAMED,
    ConversionReport,
    LayerReport,
    add_layers,
    as_text,
    corresponding,
    counted,
    enumerated,
    mib,
    percent,
    shortened,
    table,
    with_reasons,
)

_TITLES = {"forward": "Forward", "backward": "Backward", "optimizer": "Optimizer step"}
_MOST_KEEPERS = 12
_OUT_OF_REACH = 1 / 3
"""Fraction of what a dense model keeps above which what nothing covers is named."""
_LOGITS_ADVICE = (
    "Compute head and loss together, so that the logits are never held at once: by "
    "`torch.nn.functional.linear_cross_entropy` with `options` (torch 2.14 and newer), or by Liger's fused loss."
)
_ADVICE = (
    (("lstm", "gru", "rnn"), "Recurrent layers are not covered: shorter sequences keep less."),
    (tuple(f"({name}" for name in LOSSES), _LOGITS_ADVICE),
)
"""What can be done about operations by their names."""
_ANY_ADVICE = "A preset or a rule that covers these modules, or activation checkpointing, keeps less."
_FRACTIONS = {0.5: "half", 1.0: "all"}
_FULL = 0.999
"""Fraction of what is kept at most from which on a moment of the forward is called its end."""


@rank_zero_only
def show(trainer: pl.Trainer, *contents: RenderableType) -> None:
    """Print ``contents`` on rank zero by the way that suits the progress bar in use."""
    bar = trainer.progress_bar_callback
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for content in contents:
        if isinstance(bar, TQDMProgressBar):
            # Unlike the bar's own `print`, this also works while no bar is active.
            tqdm.write(as_text(content))
        elif isinstance(bar, RichProgressBar) or any(isinstance(each, RichModelSummary) for each in callbacks):
            # The console that Lightning's bar draws on: a second one would garble it.
            get_console().print(content, markup=False)
        else:
            rank_zero_info(as_text(content))


def decision_text(decision: Decision, report: ConversionReport) -> Iterator[str]:
    """Yield what the first batch has changed: layers turned dense, and layers that drop no block."""
    if decision.retained:
        one, left = len(decision.retained) == 1, len(report.converted)
        does, what, them = ("stays", "its input", "it") if one else ("stay", "their inputs", "them")
        yield (
            f"Activation pruning: {counted(len(decision.retained), _noun(decision.retained))} {does} dense, "
            f"since packing {what} would add memory (skip_retained=False packs {them} all the same); "
            f"{left} {'is' if left == 1 else 'are'} converted. {with_reasons(decision.retained)}."
        )
    if decision.idle:
        one = len(decision.idle) == 1
        names = config.shortened([layer.fqn for layer in decision.idle])
        yield (
            f"Activation pruning: {counted(len(decision.idle), _noun(decision.idle))} {'stays' if one else 'stay'} "
            f"dense until {'it keeps' if one else 'they keep'} something for backward (frozen, or not called): {names}."
        )
    if decision.spread:
        layers = [layer for layer in report.layers if layer.fqn in decision.spread]
        one = len(decision.spread) == 1
        does, whose, them = ("drops", "its input", "it") if one else ("drop", "their inputs", "them")
        named = [name for name, _ in corresponding(layers, lambda layer: None)]
        more = len(named) - MOST_NAMED
        shown = ", ".join(named[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        yield (
            f"Activation pruning: {counted(len(decision.spread), _noun(layers))} {does} no block, since the energy of "
            f"{whose} is spread over all blocks (max_dropped_energy=1 of a rule lets {them} drop some all the same): "
            f"{shown}."
        )


def decision_tables(decision: Decision) -> Iterator[Table]:
    """Yield the same layer by layer."""
    if decision.retained:
        made = table("Layers that stay dense", "Layer", "Class ", "Kept ")
        add_layers(made, decision.retained, {})
        yield made
    if decision.spread:
        made = table("Layers that drop no block", "Layer", "Energy that would be dropped")
        shown, rest = shortened(list(decision.spread.items()))
        for name, share in shown:
            made.add_row(name, percent(share))
        if rest:
            made.add_row(f"... and {len(rest)} more")
        yield made


def compiled_text(rows: Sequence[Row]) -> str:
    """Return how much of what backward reads in compiled code is kept."""
    dense, stored = (sum(getattr(row, of) for row in rows) for of in ("dense_bytes", "stored_bytes"))
    how = Counter(row.how for row in rows)
    parts = [f"{how[name]} {said}" for name, said in (("packed", "packed"), ("again", "computed again")) if how[name]]
    return (
        f"Activation pruning: of {counted(len(rows), 'value')} that backward reads in compiled code, "
        f"{enumerated(parts) or 'none packed'}: {mib(stored)} MiB are kept of {mib(dense)} ({percent(stored / dense)})."
    )


def compiled_table(rows: Sequence[Row]) -> Table:
    """Return how the values are kept, those of one layer that are kept alike in one row."""
    made = table("What compiled code keeps", "Layer or operation", "Kept ", "Dense MiB", "Stored MiB")
    for name, kept, dense, stored in compiled_cells(rows):
        made.add_row(name, kept, mib(dense), mib(stored))
    return made


def _noun(layers: Iterable[LayerReport]) -> str:
    return "linear layer" if {layer.operator for layer in layers} == {"linear"} else "layer"


def uncovered_text(report: MemoryReport) -> str:
    """Return who keeps what nothing covers, and what can be done, if that is more than a third of the dense model.

    Or else the same of the logits, covered or not, if they are more than a third of what is kept or of the peak.
    """
    step = report.step
    if step is None:
        return ""
    if report.dense_bytes is None or not any(storage.covered for storage in step.retained):
        return _logits_text(step)
    groups = step.groups(step.forward_end, uncovered=True)
    total = sum(group.nbytes for group in groups)
    if total <= report.dense_bytes * _OUT_OF_REACH:
        return _logits_text(step)
    named = groups[:MOST_NAMED]
    shown = enumerated([f"{group.label} {mib(group.nbytes)} MiB" for group in named])
    hints = [hint for words, hint in _ADVICE if any(word in group.label for group in named for word in words)]
    shares = _logits_shares(step)
    if shares and _LOGITS_ADVICE not in hints:
        hints.append(_LOGITS_ADVICE)
    return (
        f"Kept as it is: {mib(total)} MiB, {percent(total / report.dense_bytes)} of the dense model, most of it by "
        f"{shown}.{shares} HINT: {' '.join(hints or [_ANY_ADVICE])}"
    )


def _logits_text(step: StepMemory) -> str:
    shares = _logits_shares(step).lstrip()
    return f"{shares} HINT: {_LOGITS_ADVICE}" if shares else ""


def _logits_shares(step: StepMemory) -> str:
    """Return how much the logits are of what is kept and of the peak, where that is more than a third."""
    peak = step.peak_in()
    if peak is None:
        return ""
    end = step.forward_end
    kept = sum(storage.nbytes for storage in step.retained if storage.of_loss and storage.kept_at(end))
    found = (
        (kept, step.activation_bytes[end], "what is kept"),
        (step.logits_bytes(peak), step.peak_bytes, "the peak, what the loss computes from them included"),
    )
    shares = [
        f"{mib(part)} MiB ({percent(part / whole)}) of {what}"
        for part, whole, what in found
        if part > whole * _OUT_OF_REACH
    ]
    return f" Logits are {enumerated(shares)}." if shares else ""


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


def keepers_table(step: StepMemory, epoch: int) -> Table:
    """Return who keeps what at the end of the forward."""
    groups = step.groups(step.forward_end)
    total = sum(group.nbytes for group in groups)
    made = table(
        f"Kept at the end of the forward, by who keeps it, epoch {epoch}", "Kept by", "Tensors", "MiB", "Share"
    )
    cut = _MOST_KEEPERS if len(groups) > _MOST_KEEPERS + 1 else len(groups)
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
