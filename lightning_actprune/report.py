"""What a conversion did: one row for each layer that is known, with how it is kept, or the reason why it is dense."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from rich.console import Console, RenderableType
from rich.table import Table

from lightning_actprune import config
from lightning_actprune.config import Keep, Operator, Recompute
from lightning_actprune.operators.recompute import kept_inputs

_NUMBER = re.compile(r"\b\d+\b")
_NAMES: dict[Operator, str] = {
    "linear": "linear layer",
    "convolution": "convolution",
    "activation": "activation function",
    "norm": "norm",
    "affine": "affine layer",
    "scale": "layer scale",
}
MOST_NAMED = 3
"""Names in a sentence, of layers or of who keeps what."""
_PLACE = re.compile(r"(?<![^.])\d+(?=\.)")
"""A number in the name of a layer, but for the last part: of ``blocks.0.fc1``, not of ``net.0``."""
MAX_ROWS = 40
"""Rows of a table that are shown before the rest is summed up in one."""
MIB = 2**20


@dataclass(frozen=True)
class LayerReport:
    """What was done to a layer.

    Args:
        fqn: Its fully qualified name.
        kind: Name of the class that it is otherwise.
        operator: What it is.
        in_features: Size of its input, of a convolution its channels; ``None`` where that means nothing.
        out_features: Size of its output.
        keep: How it is kept, ``None`` if it is dense.
        sparsity: Fraction of blocks that it drops, or begins with under a schedule.
        reason: Why it is dense, ``None`` if it is not.
        one_bit: Whether it keeps one bit a value whatever ``keep`` says, as a ReLU.
    """

    fqn: str
    kind: str
    operator: Operator
    in_features: int | None = None
    out_features: int | None = None
    keep: Keep | None = None
    sparsity: float = 0.0
    reason: str | None = None
    one_bit: bool = False

    def describe(self, last: float | None = None) -> str:
        """Return how the layer is kept, or why it is dense; ``last``: its sparsity when the training ends."""
        if self.keep is None:
            return f"dense: {self.reason}"
        last = self.sparsity if last is None else last
        return kept_text(self.keep, self.sparsity, last, 1 if self.one_bit else None, self.operator == "linear")

    @property
    def converted(self) -> bool:
        """Whether the layer is compressed."""
        return self.keep is not None

    def to_dict(self) -> dict[str, str | float | None]:
        """Return everything as numbers and strings, one level deep."""
        keep = self.keep
        kept: dict[str, Any] = dict.fromkeys(("bits", "block_size", "scope", "selection", "max_dropped_energy"))
        if keep is not None:
            kept = {name: getattr(keep, name) for name in kept} | ({"bits": 1} if self.one_bit else {})
        row = {"fqn": self.fqn, "kind": self.kind, "operator": self.operator, "converted": self.converted}
        sizes = {"in_features": self.in_features, "out_features": self.out_features, "sparsity": self.sparsity}
        return {**row, **sizes, **kept, "reason": self.reason}


@dataclass(frozen=True)
class BlockReport:
    """A module that was to run again in backward.

    Args:
        fqn: Its fully qualified name.
        kind: Name of the class that it is otherwise.
        recompute: How its inputs are kept, ``None`` if it does not run again.
        reason: Why it does not.
    """

    fqn: str
    kind: str
    recompute: Recompute | None
    reason: str | None = None


@dataclass
class ConversionReport:
    """What a conversion did: every layer that was to be converted is in the list, converted or with a reason.

    Args:
        layers: One row for each, in the order of the model.
        saved: How what operations save is kept that no layer is known for, ``None`` if it is left as it is.
        uncovered: How many layers of each operator could be converted too, if the preset or a rule named it.
        blocks: One row for each module that was to run again in backward, in the order of the model.
    """

    layers: list[LayerReport] = field(default_factory=list)
    saved: Keep | None = None
    uncovered: Counter[Operator] = field(default_factory=Counter)
    blocks: list[BlockReport] = field(default_factory=list)

    @property
    def converted(self) -> list[LayerReport]:
        """The compressed layers."""
        return [layer for layer in self.layers if layer.converted]

    @property
    def recomputed(self) -> list[BlockReport]:
        """The modules that run again in backward."""
        return [block for block in self.blocks if block.recompute is not None]

    @property
    def refused(self) -> list[LayerReport | BlockReport]:
        """The layers left as they are, and the modules that do not run again, with reasons."""
        return [*self.skipped, *(block for block in self.blocks if block.recompute is None)]

    @property
    def skipped(self) -> list[LayerReport]:
        """The layers left as they are, with reasons."""
        return [layer for layer in self.layers if not layer.converted]

    def replace(self, fqn: str, **changes: Any) -> None:
        """Change the row of a layer."""
        self.layers[:] = [replace(layer, **changes) if layer.fqn == fqn else layer for layer in self.layers]

    def leave_dense(self, fqn: str, reason: str) -> None:
        """Say of a layer that was converted that it is dense again, and why."""
        self.replace(fqn, keep=None, sparsity=0.0, reason=reason)

    def describe_skipped(self) -> str:
        """Return the names of what was skipped with the reason, each reason and class in one line."""
        lines = []
        for alike in by_reason(self.refused):
            for kind in kinds_of(alike):
                names = config.shortened([row.fqn for row in alike if row.kind == kind])
                lines.append(f"  {names} ({kind}): {alike[0].reason}")
        return "\n".join(lines)

    def __str__(self) -> str:
        """Return a summary, and how each layer is kept as a table."""
        tables = [conversion_table(self, {})] if self.layers else []
        return "\n".join([as_text(conversion_text(self, {}, reasons=not tables)), *map(as_text, tables)])

    def to_rows(self) -> list[dict[str, str | float | None]]:
        """Return every layer as a flat row: ``pandas.DataFrame(report.to_rows())`` is a table."""
        return [layer.to_dict() for layer in self.layers]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as numbers and strings, fit for JSON."""
        saved = None if self.saved is None else self.saved.bits
        blocks = [{**vars(b), "recompute": None if b.recompute is None else vars(b.recompute)} for b in self.blocks]
        layers = self.to_rows()
        return {"layers": layers, "saved_bits": saved, "uncovered": dict(self.uncovered), "blocks": blocks}


def conversion_text(report: ConversionReport, last: Mapping[str, float], *, reasons: bool = True) -> str:
    """Return how each operator is kept, and which layers are dense.

    Args:
        report: What was done.
        last: Sparsities in the end.
        reasons: Whether to say why layers are dense, as the table does too.
    """
    kept: dict[tuple[Operator, str], int] = Counter(
        (layer.operator, layer.describe(last.get(layer.fqn))) for layer in report.converted
    )
    by_operator = sorted(kept.items(), key=lambda entry: [*_NAMES].index(entry[0][0]))
    named = [f"{counted(number, _NAMES[operator])} ({how})" for (operator, how), number in by_operator]
    parts = [f"Activation pruning: {enumerated(named) or '0 layers'} converted, {len(report.skipped)} dense."]
    if left := [counted(count, _NAMES[operator]) for operator, count in report.uncovered.items() if count]:
        parts.append(f"Not covered: {enumerated(left)}.")
    if report.saved is not None:
        parts.append(f"What else modules keep for backward: {kept_text(report.saved)}.")
    blocks = Counter((_NUMBER.sub("*", b.fqn), b.kind, b.recompute) for b in report.recomputed)
    if alike := [
        f"{name} ({number} {kind}, {kept_inputs(how)})" for (name, kind, how), number in blocks.items() if how
    ]:
        parts.append(f"Run again in backward: {enumerated(alike)}.")
    if report.refused and reasons:
        parts.append(f"Dense: {with_reasons(report.refused)}.")
    return " ".join(parts)


def with_reasons(layers: Sequence[LayerReport | BlockReport]) -> str:
    """Return each reason once, behind the names of some layers that it is about."""
    groups = [(alike, corresponding(alike, lambda row: row.kind)) for alike in by_reason(layers)]
    named = [
        (enumerated([name for name, _ in found[:MOST_NAMED]]), alike, found[MOST_NAMED:]) for alike, found in groups
    ]
    shown = named[:MOST_NAMED]
    more = [sum(len(some) for _, some in rest) for _, _, rest in shown]
    parts = [
        f"{names}{f' and {count} more' if count else ''}: {alike[0].reason}"
        for (names, alike, _), count in zip(shown, more, strict=True)
    ]
    rest = sum(len(alike) for _, alike, _ in named[MOST_NAMED:])
    return "; ".join(parts) + (f"; and {rest} more (see `skipped`)" if rest else "")


def by_reason(rows: Sequence[LayerReport | BlockReport]) -> list[list[LayerReport | BlockReport]]:
    """Return the rows of dense layers and blocks, those with the same reason together."""
    groups: dict[str | None, list[LayerReport | BlockReport]] = {}
    for row in rows:
        groups.setdefault(row.reason, []).append(row)
    return list(groups.values())


def kinds_of(rows: Sequence[LayerReport | BlockReport]) -> list[str]:
    """Return the names of the classes of some rows, each once."""
    return list(dict.fromkeys(row.kind for row in rows))


def conversion_table(report: ConversionReport, last: Mapping[str, float]) -> Table:
    """Return how layers are kept, those at corresponding places in one row; ``last``: sparsities in the end."""
    made = table("Layers", "Layer", "Class ", "Kept ")
    add_layers(made, report.converted, last)
    made.add_section()
    for alike in by_reason(report.refused):
        for kind, rows in ((kind, [row for row in alike if row.kind == kind]) for kind in kinds_of(alike)):
            names, rest = shortened([name for name, _ in corresponding(rows, lambda _: None)])
            made.add_row(", ".join([*names, *(["..."] if rest else [])]), kind, f"dense: {alike[0].reason}")
    return made


def add_layers(made: Table, layers: Sequence[LayerReport], last: Mapping[str, float]) -> None:
    """Add a row for the layers at corresponding places that are of one class and kept alike."""

    def cells(layer: LayerReport) -> tuple[str, str]:
        """Return the class of a layer and how it is kept."""
        return layer.kind, layer.describe(last.get(layer.fqn))

    shown, rest = shortened(corresponding(layers, cells))
    for name, alike in shown:
        made.add_row(name, *cells(alike[0]))
    if rest:
        made.add_row(f"... and {sum(len(alike) for _, alike in rest)} more")


# === Words and tables of every report =================================================================================


class _Named(Protocol):
    @property
    def fqn(self) -> str: ...


_Row = TypeVar("_Row", bound=_Named)


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


def kept_text(keep: Keep, first: float = 0.0, last: float = 0.0, bits: int | None = None, few: bool = False) -> str:
    """Return how a tensor is kept, as ``"2 bits, drops 50 %"``.

    Args:
        keep: How it is kept.
        first: Sparsity before the first step.
        last: Sparsity when the training ends.
        bits: Bits of a value where they do not depend on ``keep``.
        few: Whether inputs with few rows are kept in more bits, as of linear layers.
    """
    bits = bits or keep.bits
    parts = ["values as they are" if bits is None else "1 bit" if bits == 1 else f"{bits} bits"]
    parts += [f"8 below {keep.fine_rows} rows"] if few and 0 < keep.stored_bits < 8 and keep.fine_rows else []
    if first or last:
        ends = dict.fromkeys((f"{100 * first:g}", f"{100 * last:g}"))
        parts.append(f"drops {' to '.join(ends)} %")
        parts += [] if keep.selection == "largest" else [f"selection {keep.selection}"]
        parts += [] if keep.scope == "sample" else [f"per {keep.scope}"]
    parts += [] if keep.block_size == Keep.block_size else [f"blocks of {keep.block_size}"]
    return ", ".join(parts)
