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
from lightning_actprune.analysis.memory import group_compiled
from lightning_actprune.analysis.step_memory import PHASES, StepMemory
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
            f"memory (skip_retained=False packs it anyway); {len(report.converted)} converted."
        )
        yield from describe_reasons(decision.retained)
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
