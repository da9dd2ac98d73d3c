"""Show tables beside Lightning's progress bars without breaking them."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichModelSummary, RichProgressBar, TQDMProgressBar
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from rich import get_console
from rich.console import Console, Group, RenderableType
from rich.table import Table
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_actprune.arguments import OtherOperator, PrunedOperator
from lightning_actprune.callbacks.own_settings import differing_settings
from lightning_actprune.callbacks.verdict import Findings
from lightning_actprune.conversion_report import (
    AFFINE_LAYERS,
    CONVOLUTIONS,
    ConversionReport,
    ConvertedLayer,
    SkippedLayer,
)
from lightning_actprune.ops.geometry import BlockGeometry

MAX_ROWS = 40
"""Rows of a table that are shown before the rest is summed up in one."""
MIB = 2**20
_PRUNED: dict[PrunedOperator, str] = {
    "linear": "linear layer",
    "convolution": "convolution",
    "affine": "affine layer",
    "scale": "layer scale",
}
_NAMES = {"activation": "activation function", "affine": "affine layer", "scale": "layer scale"}
"""Operators that are not named as layers of theirs are."""
_TYPICAL_ROWS = 4096
"""Rows of an input for which the expected saving is stated; it barely depends on their number."""


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
    return " and ".join(", ".join(names).rsplit(", ", 1))


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


def conversion_summary(report: ConversionReport, last: Mapping[str, float], value_bytes: int) -> RenderableType:
    """Return what was converted and what was not, with the saving to expect at the ``last`` sparsity of each layer."""
    counts = Counter(layer.operator for layer in report.converted)
    named = [counted(counts[operator], name) for operator, name in _PRUNED.items() if counts[operator]]
    converted = enumerated(named) or "0 linear layers"
    text = f"Activation pruning: {converted} converted, {len(report.skipped)} skipped."
    parts: list[RenderableType] = []
    if report.converted:
        sparsities = [last.get(layer.fqn, layer.sparsity) for layer in report.converted]
        saved = [_expected_saving(*each, value_bytes) for each in zip(report.converted, sparsities, strict=True)]
        at, span = _span(f"{sparsity:g}" for sparsity in sorted(sparsities)), _span(map(percent, sorted(saved)))
        text += f" At sparsity {at} each keeps {span} less of its input for backward."
        parts.append(_converted_table(report.converted, differing_settings(report.converted, sparsities), saved))
    parts.insert(0, text + _others_text(report))
    if report.skipped:
        parts.append(_skipped_table(report.skipped))
    return Group(*parts)


def _span(shown: Iterable[str]) -> str:
    """Return the first and the last of some numbers, or the one that both are."""
    first, *_, last = (*shown,) * 2
    return first if first == last else f"{first} to {last}"


def _others_text(report: ConversionReport) -> str:
    """Return what layers of other operators keep in few bits, and what could be kept so."""
    made = Counter((layer.operator, layer.value_format) for layer in report.few_bit)
    text = "".join(
        f" Stored as {stored}: what {_counted_operator(operator, count)} {'needs' if count == 1 else 'need'}."
        for (operator, stored), count in made.items()
    )
    if report.rest is not None:
        text += f" Stored as {report.rest}: what else modules keep for backward."
    left = [_counted_operator(operator, count) for operator, count in report.left.items() if count]
    if left:
        need = "needs" if sum(report.left.values()) == 1 else "need"
        text += f" Stored as it is: what {enumerated(left)} {need} (others=True stores it in few bits)."
    return text


def _counted_operator(operator: OtherOperator, count: int) -> str:
    return counted(count, _NAMES.get(operator, operator))


def findings(found: Findings, report: ConversionReport) -> Iterator[RenderableType]:
    """Yield what the first batch has changed: layers turned dense, and layers that drop no block."""
    if found.held:
        one, left = len(found.held) == 1, len(report.converted)
        does, what, them = ("stays", "its input", "it") if one else ("stay", "their inputs", "them")
        text = (
            f"Activation pruning: {counted(len(found.held), _noun(layer.kind for layer in found.held))} {does} dense, "
            f"since packing {what} would add memory (skip_held=False prunes {them} all the same); "
            f"{left} {'is' if left == 1 else 'are'} pruned."
        )
        yield Group(text, _skipped_table(found.held))
    if found.spread:
        made = table("Layers that drop no block", "Layer", "Energy that would be dropped")
        shown, rest = shortened(list(found.spread.items()))
        for name, share in shown:
            made.add_row(name, percent(share))
        if rest:
            made.add_row(f"... and {len(rest)} more")
        kinds = {layer.fqn: layer.kind for layer in report.converted} | {s.fqn: s.kind for s in report.skipped}
        one, noun = len(found.spread) == 1, _noun(kinds[name] for name in found.spread if name in kinds)
        does, whose, them = ("drops", "its input", "it") if one else ("drop", "their inputs", "them")
        text = (
            f"Activation pruning: {counted(len(found.spread), noun)} {does} no block, since the energy of {whose} is "
            f"spread over all blocks (max_dropped_energy=1 prunes {them} all the same)."
        )
        yield Group(text, made)


def _noun(kinds: Iterable[str]) -> str:
    return "linear layer" if set(kinds).isdisjoint((*CONVOLUTIONS, *AFFINE_LAYERS)) else "layer"


def _expected_saving(layer: ConvertedLayer, sparsity: float, value_bytes: int) -> float:
    shape = (_TYPICAL_ROWS, 1) if layer.scope == "token" else (1, _TYPICAL_ROWS)
    geometry = BlockGeometry.of(*shape, _row(layer), layer.block_size, sparsity)
    return 1 - geometry.stored_bytes(value_bytes, layer.value_format) / geometry.dense_bytes(value_bytes)


def _row(layer: ConvertedLayer) -> int:
    """Return the length of the rows that are cut into blocks: convolutions cut a sample into rows of one block."""
    return layer.block_size if layer.operator == "convolution" and layer.scope == "sample" else layer.in_features


def _converted_table(
    layers: Sequence[ConvertedLayer], differing: Mapping[str, Sequence[str]], saved: Sequence[float]
) -> Table:
    made = table("Pruned layers", "Layer", "In", "Out", "Block", *differing, "Saved of input")
    shown, rest = shortened(layers)
    for layer, fraction, *own in zip(shown, saved, *differing.values(), strict=False):
        sizes = layer.in_features, layer.out_features, min(layer.block_size, _row(layer))
        made.add_row(layer.fqn, *map(str, sizes), *own, percent(fraction))
    if rest:
        made.add_row(f"... and {len(rest)} more")
    return made


def _skipped_table(layers: Sequence[SkippedLayer]) -> Table:
    made = table("Skipped layers", "Layer", "Class ", "Reason ")
    shown, rest = shortened(layers)
    for layer in shown:
        made.add_row(layer.fqn, layer.kind, layer.reason)
    if rest:
        made.add_row(f"... and {len(rest)} more")
    return made
