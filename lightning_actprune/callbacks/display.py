"""Texts and tables of a fit: the settings of layers, and who keeps which bytes in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichModelSummary, RichProgressBar, TQDMProgressBar
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from rich import get_console
from rich.console import RenderableType
from rich.table import Table
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_actprune import config
from lightning_actprune.analysis.memory import MemoryReport, group_compiled
from lightning_actprune.analysis.step_memory import LOSSES, PHASES, StepMemory
from lightning_actprune.callbacks.first_batch import Decision
from lightning_actprune.compiled.decision_log import Row
from lightning_actprune.report import (
    MOST_NAMED,
    ConversionReport,
    LayerReport,
    add_layers,
    as_text,
    cut_rows,
    describe_reasons,
    format_count,
    group_by_place,
    join_names,
    make_table,
    mib,
    percent,
)

_TITLES = {"forward": "Forward", "backward": "Backward", "optimizer": "Optimizer step"}
_MOST_KEEPERS = 12
_OUT_OF_REACH = 1 / 3
"""Share of what a dense model keeps from which on uncovered operations are named."""
_LOGITS_ADVICE = (
    "Compute head and loss together, so that the logits are never held at once: by "
    "`torch.nn.functional.linear_cross_entropy` with `options` (torch 2.14 and newer), or by Liger's fused loss."
)
_ADVICE = (
    (("lstm", "gru", "rnn"), "Recurrent layers are not covered: shorter sequences keep less."),
    (tuple(f"({name}" for name in LOSSES), _LOGITS_ADVICE),
)
"""Advice by words in the names of operations."""
_ANY_ADVICE = "A preset or a rule that covers these modules, or activation checkpointing, keeps less."
_FRACTIONS = {0.5: "half", 1.0: "all"}
_FULL = 0.999
"""Share of the most kept bytes from which on a moment of the forward counts as its end."""


@rank_zero_only
def show(trainer: pl.Trainer, *contents: RenderableType) -> None:
    """Print ``contents`` on rank zero in the way that suits the progress bar."""
    bar = trainer.progress_bar_callback
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for content in contents:
        if isinstance(bar, TQDMProgressBar):
            # Unlike the bar's own `print`, this also works while no bar is active.
            tqdm.write(as_text(content))
        elif isinstance(bar, RichProgressBar) or any(isinstance(each, RichModelSummary) for each in callbacks):
            # The console that Lightning's bar draws on; a second one would garble it.
            get_console().print(content, markup=False)
        else:
            rank_zero_info(as_text(content))


def describe_decision(decision: Decision, report: ConversionReport) -> Iterator[str]:
    """Yield what the first batch has changed: layers that became dense, and layers that drop no block."""
    if decision.retained:
        yield (
            f"Activation pruning: {_count_layers(decision.retained)} dense now, since packing the input would add "
            f"memory (skip_retained=False packs it anyway); {len(report.converted)} converted. "
            f"{describe_reasons(decision.retained)}."
        )
    if decision.idle:
        names = config.shorten([layer.fqn for layer in decision.idle])
        yield (
            f"Activation pruning: {_count_layers(decision.idle)} dense until something is kept for backward (frozen, "
            f"or not called): {names}."
        )
    if decision.spread:
        layers = [layer for layer in report.layers if layer.fqn in decision.spread]
        places = [name for name, _ in group_by_place(layers, lambda layer: None)]
        more = len(places) - MOST_NAMED
        text = ", ".join(places[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        yield (
            f"Activation pruning: {_count_layers(layers)} without dropped blocks, since the energy of the input is "
            f"spread over all blocks (max_dropped_energy=1 in a rule drops some anyway): {text}."
        )
    if decision.choice is not None and decision.choice.bits:
        bits, average, error, others, operators, _ = decision.choice
        counts = Counter("as it is" if each is None else f"{each} bits" for each in bits.values())
        text = ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))
        named = ", ".join(f"{operator} ({each} bits)" for operator, each in operators.items())
        extra = f". More bits than the preset's: {named}" if named else ""
        yield (
            f"Activation pruning: {format_count(len(bits), 'layer')} got {average:.2g} bits on average: {text}. The "
            f"predicted error of the gradient is {error:.2g}; {others:.2g} is from other operators"
            f"{extra}."
        )


def tabulate_decision(decision: Decision) -> Iterator[Table]:
    """Yield the same as tables, layer by layer."""
    if decision.retained:
        table = make_table("Layers that stay dense", "Layer", "Class ", "Kept ")
        add_layers(table, decision.retained, {})
        yield table
    if decision.spread:
        table = make_table("Layers that drop no block", "Layer", "Energy that would be dropped")
        rows, rest = cut_rows(list(decision.spread.items()))
        for name, share in rows:
            table.add_row(name, percent(share))
        if rest:
            table.add_row(f"... and {len(rest)} more")
        yield table


def describe_compiled(rows: Sequence[Row]) -> str:
    """Return a sentence with the memory of compiled code, dense and now."""
    dense, stored = (sum(getattr(row, of) for row in rows) for of in ("dense_bytes", "stored_bytes"))
    how = Counter(row.how for row in rows)
    parts = [f"{how[name]} {words}" for name, words in (("packed", "packed"), ("again", "computed again")) if how[name]]
    return (
        f"Activation pruning: of {format_count(len(rows), 'value')} that backward reads in compiled code, "
        f"{join_names(parts) or 'none packed'}: {mib(stored)} MiB are kept of {mib(dense)} ({percent(stored / dense)})."
    )


def tabulate_compiled(rows: Sequence[Row]) -> Table:
    """Return a table of these values, those of one layer with the same settings in one row."""
    table = make_table("What compiled code keeps", "Layer or operation", "Kept ", "Dense MiB", "Stored MiB")
    for name, how, dense, stored in group_compiled(rows):
        table.add_row(name, how, mib(dense), mib(stored))
    return table


def _count_layers(layers: Sequence[LayerReport]) -> str:
    noun = "linear layer" if {layer.operator for layer in layers} == {"linear"} else "layer"
    return format_count(len(layers), noun)


def describe_uncovered(report: MemoryReport) -> str:
    """Return who keeps uncovered tensors, with advice, if these exceed a third of what the dense model keeps.

    The same goes for the logits, covered or not, if they exceed a third of what is kept or of the peak.
    """
    step = report.step
    if step is None:
        return ""
    text, hints = "", list[str]()
    if report.dense_bytes is not None and any(storage.covered for storage in step.retained):
        groups = step.groups(step.forward_end, uncovered=True)
        total, largest = sum(group.nbytes for group in groups), groups[:MOST_NAMED]
        if total > report.dense_bytes * _OUT_OF_REACH:
            keepers = join_names([f"{group.label} {mib(group.nbytes)} MiB" for group in largest])
            hints = [hint for words, hint in _ADVICE if any(word in group.label for group in largest for word in words)]
            text = (
                f"Kept uncompressed: {mib(total)} MiB, {percent(total / report.dense_bytes)} of the dense model, most "
                f"of it by {keepers}."
            )
    if shares := _describe_logits(step):
        hints += [] if _LOGITS_ADVICE in hints else [_LOGITS_ADVICE]
        text = f"{text} {shares}".lstrip()
    return f"{text} HINT: {' '.join(hints or [_ANY_ADVICE])}" if text else ""


def _describe_logits(step: StepMemory) -> str:
    """Return the share of the logits in what is kept and in the peak, where it exceeds a third."""
    peak = step.peak_in()
    if peak is None:
        return ""
    end = step.forward_end
    saved = sum(storage.nbytes for storage in step.retained if storage.is_of_loss and storage.is_kept_at(end))
    parts = (
        (saved, step.activation_bytes[end], "what is kept"),
        (step.logits_bytes(peak), step.peak_bytes, "the peak, including what the loss computes from them"),
    )
    shares = [
        f"{mib(part)} MiB ({percent(part / whole)}) of {what}"
        for part, whole, what in parts
        if part > whole * _OUT_OF_REACH
    ]
    return f"Logits are {join_names(shares)}." if shares else ""


def describe_peak(step: StepMemory) -> str:
    """Return where the peak is, and an upper bound of it with fewer activations."""
    index = step.peak_in()
    if index is None:
        return ""
    kind = "measured" if step.measured else "counted, without temporary tensors"
    text = f"Peak of the step: {mib(step.peak_bytes)} MiB ({kind}), {_describe_moment(step, index)}"
    if step.moments[index].phase == "backward":
        text += f", where {percent(step.activation_bytes[index] / max(*step.activation_bytes, 1))} is kept of what the "
        text += "forward kept"
    text += "."
    for fraction, name in _FRACTIONS.items():
        without = step.bytes_without(fraction)
        peak = max(range(len(without)), key=without.__getitem__)
        text += f" With {name} of the activations gone: {mib(without[peak])} MiB, {_describe_moment(step, peak)}."
    return text


def tabulate_step(step: StepMemory, epoch: int) -> Table:
    """Return a table of the bytes in use at the peak of each phase, by kind."""
    indices = {phase: index for phase in PHASES if (index := step.peak_in(phase)) is not None}
    peak = step.peak_in()
    titles = [_TITLES[phase] + (" (peak)" if index == peak else "") for phase, index in indices.items()]
    table = make_table(f"Memory of the step at the peak of each part, MiB, epoch {epoch}", "", *titles)
    parts = [step.parts(index) for index in indices.values()]
    for name in parts[0] if parts else ():
        if name != "other" or step.measured:
            label = "temporary and other tensors" if name == "other" else name
            table.add_row(label.capitalize(), *(mib(part[name]) for part in parts))
    table.add_section()
    total = "In use" if step.measured else "Counted"
    table.add_row(total, *(mib(step.interval_bytes[index]) for index in indices.values()))
    return table


def tabulate_keepers(step: StepMemory, epoch: int) -> Table:
    """Return a table of who keeps what at the end of the forward."""
    groups = step.groups(step.forward_end)
    total = sum(group.nbytes for group in groups)
    table = make_table(
        f"Kept at the end of the forward, by who keeps it, epoch {epoch}", "Kept by", "Tensors", "MiB", "Share"
    )
    largest, rest = cut_rows(groups, _MOST_KEEPERS)
    rows = [(group.label + (", packed" if group.packed else ""), group.count, group.nbytes) for group in largest]
    if rest:
        count, nbytes = sum(group.count for group in rest), sum(group.nbytes for group in rest)
        rows.append((f"... and {len(rest)} more", count, nbytes))
    for label, count, nbytes in rows:
        table.add_row(label, str(count), mib(nbytes), percent(nbytes / total) if total else "-")
    return table


def _describe_moment(step: StepMemory, index: int) -> str:
    moment = step.moments[index]
    if moment.phase == "optimizer":
        return "in the optimizer step"
    if moment.phase == "forward" and step.activation_bytes[index] >= _FULL * max(step.activation_bytes):
        return "at the end of the forward"
    where = f" of {moment.fqn!r}" if moment.fqn else ""
    operator = f" ({moment.operator})" if moment.operator else ""
    return f"in the {moment.phase}{where}{operator}"
