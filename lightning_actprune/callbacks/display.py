"""Tables beside Lightning's progress bars: how each layer is kept, and who keeps which bytes in a step."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichModelSummary, RichProgressBar, TQDMProgressBar
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from rich import get_console
from rich.console import Console, RenderableType
from rich.table import Table
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_actprune import config
from lightning_actprune.analysis.memory import LayerFootprint, MemoryReport
from lightning_actprune.analysis.step_memory import LOSSES, PHASES, StepMemory
from lightning_actprune.callbacks.first_batch import Decision
from lightning_actprune.compiled.report import Row
from lightning_actprune.config import Keep, Operator
from lightning_actprune.operators.recompute import kept_inputs
from lightning_actprune.report import BlockReport, ConversionReport, LayerReport

_Row = TypeVar("_Row", bound="LayerReport | BlockReport | LayerFootprint")

_NUMBER = re.compile(r"\b\d+\b")
_PLACE = re.compile(r"(?<![^.])\d+(?=\.)")
"""A number in the name of a layer, but for the last part: of ``blocks.0.fc1``, not of ``net.0``."""
MAX_ROWS = 40
"""Rows of a table that are shown before the rest is summed up in one."""
MIB = 2**20
_NAMES: dict[Operator, str] = {
    "linear": "linear layer",
    "convolution": "convolution",
    "activation": "activation function",
    "norm": "norm",
    "affine": "affine layer",
    "scale": "layer scale",
}
_TITLES = {"forward": "Forward", "backward": "Backward", "optimizer": "Optimizer step"}
_MOST_KEEPERS = 12
_MOST_NAMED = 3
"""Names in a sentence, of layers or of who keeps what."""
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
    for content in contents:
        if isinstance(bar, TQDMProgressBar):
            # Unlike the bar's own `print`, this also works while no bar is active.
            tqdm.write(as_text(content))
        elif isinstance(bar, RichProgressBar) or _has(trainer, RichModelSummary):
            # The console that Lightning's bar draws on: a second one would garble it.
            get_console().print(content, markup=False)
        else:
            rank_zero_info(as_text(content))


def _has(trainer: pl.Trainer, kind: type[pl.Callback]) -> bool:
    return any(isinstance(callback, kind) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def as_text(content: RenderableType) -> str:
    """Return ``content`` as plain text."""
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as capture:
        console.print(content, markup=False)  # names and patterns may have brackets
    return capture.get().rstrip()


def mib(nbytes: float) -> str:
    """Return ``nbytes`` in MiB with two decimals."""
    return f"{nbytes / MIB:.2f}"


def percent(fraction: float) -> str:
    """Return ``fraction`` in percent with one decimal."""
    return f"{100 * fraction:.1f} %"


def counted(number: int, noun: str) -> str:
    """Return ``1 layer`` or ``2 layers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def enumerated(names: Sequence[str]) -> str:
    """Return ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def table(title: str, *columns: str) -> Table:
    """Return an empty table whose columns after the first are right-aligned unless their name ends in a blank."""
    made = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        made.add_column(column.strip(), justify="left" if number == 0 or column.endswith(" ") else "right")
    return made


def shortened(rows: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the rows to show and the rest, which a single row sums up; never a rest of one."""
    cut = len(rows) if len(rows) <= MAX_ROWS + 1 else MAX_ROWS
    return rows[:cut], rows[cut:]


def corresponding(rows: Iterable[_Row], key: Callable[[_Row], Any]) -> list[tuple[str, list[_Row]]]:
    """Return the rows of layers at corresponding places that have the same ``key``, under a name for all of them."""
    groups: dict[Any, list[_Row]] = {}
    for row in rows:
        groups.setdefault((_PLACE.sub("*", row.fqn), key(row)), []).append(row)
    return [
        (found[0].fqn if len(found) == 1 else f"{name} ({len(found)})", found) for (name, _), found in groups.items()
    ]


def conversion_text(report: ConversionReport, last: Mapping[str, float]) -> str:
    """Return how each operator is kept, and which layers are dense and why; ``last``: sparsities in the end."""
    kept: dict[tuple[Operator, str], int] = Counter(
        (layer.operator, kept_text(layer.keep, layer.sparsity, last.get(layer.fqn, layer.sparsity)))
        for layer in report.converted
        if layer.keep is not None
    )
    by_operator = sorted(kept.items(), key=lambda entry: [*_NAMES].index(entry[0][0]))
    named = [f"{counted(number, _NAMES[operator])} ({how})" for (operator, how), number in by_operator]
    parts = [f"Activation pruning: {enumerated(named) or '0 layers'} converted, {len(report.skipped)} dense."]
    if left := [counted(count, _NAMES[operator]) for operator, count in report.uncovered.items() if count]:
        parts.append(f"Not covered: {enumerated(left)}.")
    if report.saved is not None:
        parts.append(f"What else modules keep for backward: {kept_text(report.saved, 0.0, 0.0)}.")
    blocks = Counter((_NUMBER.sub("*", b.fqn), b.kind, b.recompute) for b in report.recomputed)
    if alike := [
        f"{name} ({number} {kind}, {kept_inputs(how)})" for (name, kind, how), number in blocks.items() if how
    ]:
        parts.append(f"Run again in backward: {enumerated(alike)}.")
    if report.refused:
        parts.append(f"Dense: {_with_reasons(report.refused)}.")
    return " ".join(parts)


def _with_reasons(layers: Sequence[LayerReport | BlockReport]) -> str:
    """Return the names of some layers with their reasons, and how many more there are."""
    groups = corresponding(layers, lambda layer: layer.reason)
    cut = len(groups) if len(groups) <= _MOST_NAMED + 1 else _MOST_NAMED
    text = "; ".join(f"{name}: {alike[0].reason}" for name, alike in groups[:cut])
    rest = sum(len(alike) for _, alike in groups[cut:])
    return text + (f"; and {rest} more (see `skipped`)" if rest else "")


def conversion_table(report: ConversionReport, last: Mapping[str, float]) -> Table:
    """Return how layers are kept, those at corresponding places in one row; ``last``: sparsities in the end."""
    made = table("Layers", "Layer", "Class ", "Kept ")
    for layers in (report.converted, report.skipped):
        _add_layers(made, layers, last)
        made.add_section()
    return made


def _add_layers(made: Table, layers: Sequence[LayerReport], last: Mapping[str, float]) -> None:
    """Add a row for the layers at corresponding places that are of one class and kept alike."""

    def cells(layer: LayerReport) -> tuple[str, str]:
        """Return the class of a layer and how it is kept."""
        if layer.keep is None:
            return layer.kind, f"dense: {layer.reason}"
        return layer.kind, kept_text(layer.keep, layer.sparsity, last.get(layer.fqn, layer.sparsity))

    shown, rest = shortened(corresponding(layers, cells))
    for name, alike in shown:
        made.add_row(name, *cells(alike[0]))
    if rest:
        made.add_row(f"... and {sum(len(alike) for _, alike in rest)} more")


def kept_text(keep: Keep, first: float, last: float) -> str:
    """Return how a tensor is kept, as ``"2 bits, drops 50 %"``.

    Args:
        keep: How it is kept.
        first: Sparsity before the first step.
        last: Sparsity when the training ends.
    """
    parts = ["values as they are" if keep.bits is None else f"{keep.bits} bits"]
    if first or last:
        parts.append(f"drops {_span([f'{100 * first:g}', f'{100 * last:g}'])} %")
        parts += [] if keep.selection == "largest" else [f"selection {keep.selection}"]
        parts += [] if keep.scope == "sample" else [f"per {keep.scope}"]
    parts += [] if keep.block_size == Keep.block_size else [f"blocks of {keep.block_size}"]
    return ", ".join(parts)


def decision_text(decision: Decision, report: ConversionReport) -> Iterator[str]:
    """Yield what the first batch has changed: layers turned dense, and layers that drop no block."""
    if decision.retained:
        one, left = len(decision.retained) == 1, len(report.converted)
        does, what, them = ("stays", "its input", "it") if one else ("stay", "their inputs", "them")
        yield (
            f"Activation pruning: {counted(len(decision.retained), _noun(decision.retained))} {does} dense, "
            f"since packing {what} would add memory (skip_retained=False packs {them} all the same); "
            f"{left} {'is' if left == 1 else 'are'} converted. {_with_reasons(decision.retained)}."
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
        more = len(named) - _MOST_NAMED
        shown = ", ".join(named[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        yield (
            f"Activation pruning: {counted(len(decision.spread), _noun(layers))} {does} no block, since the energy of "
            f"{whose} is spread over all blocks (max_dropped_energy=1 of a rule lets {them} drop some all the same): "
            f"{shown}."
        )


def decision_tables(decision: Decision) -> Iterator[Table]:
    """Yield the same layer by layer."""
    if decision.retained:
        made = table("Layers that stay dense", "Layer", "Class ", "Kept ")
        _add_layers(made, decision.retained, {})
        yield made
    if decision.spread:
        made = table("Layers that drop no block", "Layer", "Energy that would be dropped")
        shown, rest = shortened(list(decision.spread.items()))
        for name, share in shown:
            made.add_row(name, percent(share))
        if rest:
            made.add_row(f"... and {len(rest)} more")
        yield made


_HOW = {"again": "computed again", "signs": "signs", "shape": "its shape alone"}


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
    for name, kept, dense, stored in _compiled_cells(rows):
        made.add_row(name, kept, mib(dense), mib(stored))
    return made


def _compiled_cells(rows: Sequence[Row]) -> Iterator[tuple[str, str, int, int]]:
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


def _span(shown: Iterable[str]) -> str:
    """Return the first and the last of some numbers, or the one that both are."""
    first, *_, last = (*shown,) * 2
    return first if first == last else f"{first} to {last}"


def _noun(layers: Iterable[LayerReport]) -> str:
    return "linear layer" if {layer.operator for layer in layers} == {"linear"} else "layer"


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
    named = groups[:_MOST_NAMED]
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


def memory_table(report: MemoryReport, epoch: int, compiled: Sequence[Row] = ()) -> Table:
    """Return what each linear layer, each other pruned layer and compiled code keeps, and the totals.

    Args:
        report: What was measured.
        epoch: When.
        compiled: How what compiled code keeps of it is kept, if that is known.
    """
    made = table(f"Kept for backward, epoch {epoch}", "Layer", "Kept ", "Dense MiB", "Stored MiB", "Saved")
    shown, rest = shortened(corresponding(report.rows, _kept))
    for name, rows in shown:
        made.add_row(name, _kept(rows[0]), *_bytes_of(rows))
    if rest:
        left = [row for _, rows in rest for row in rows]
        made.add_row(f"... and {len(left)} more", "", *_bytes_of(left))
    made.add_section()
    for name, kept, dense, stored in _compiled_cells(compiled):
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


def _bytes_of(rows: Sequence[LayerFootprint]) -> tuple[str, str, str]:
    return _byte_cells(sum(row.dense_bytes for row in rows), sum(row.stored_bytes for row in rows))


def _byte_cells(dense: int | None, stored: int) -> tuple[str, str, str]:
    if dense is None:
        return "not known", mib(stored), ""
    saved = percent((dense - stored) / dense) if dense else "kept anyway" if stored else "-"
    return mib(dense), mib(stored), saved
