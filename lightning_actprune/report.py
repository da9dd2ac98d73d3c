"""Report what a conversion did: one row per supported layer, with its settings or the reason why it stays dense."""

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
from lightning_actprune.operators.recompute import describe_inputs

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
"""How many names a sentence lists before it says "and N more"."""
MOST_REASONS = 2
"""How many reasons for dense layers have a line of their own."""
_PLACE = re.compile(r"(?<![^.'])\d+(?=\.)")
"""Numbers in the name of a layer, except in the last part: that of ``blocks.0.fc1``, not that of ``net.0``."""
MAX_ROWS = 40
"""Rows that a table shows; the others share one row."""
MIB = 2**20
GIB = 2**30


@dataclass(frozen=True)
class LayerReport:
    """One layer, and how it is compressed.

    Args:
        fqn: Its fully qualified name.
        kind: Name of its dense class.
        operator: Kind of operator that it is.
        in_features: Size of its input, or input channels of a convolution; ``None`` for other operators.
        out_features: Size of its output.
        keep: Its settings, ``None`` if it is dense.
        sparsity: Fraction of blocks that it drops; under a schedule, the fraction at the start.
        reason: Why it is dense, ``None`` if it is compressed.
        one_bit: Whether it keeps one bit per value, whatever ``keep`` says (as a ReLU does).
        frozen: Whether it keeps nothing, since its weight needs no gradient.
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
    frozen: bool = False

    def describe(self, last: float | None = None) -> str:
        """Return the settings of the layer, or why it is dense; ``last`` is its sparsity at the end of training."""
        if self.keep is None:
            return f"dense: {self.reason}"
        if self.frozen:
            return "frozen, nothing is kept"
        last = self.sparsity if last is None else last
        return describe_keep(self.keep, self.sparsity, last, 1 if self.one_bit else None, self.operator == "linear")

    @property
    def converted(self) -> bool:
        """Whether the layer is compressed."""
        return self.keep is not None

    def to_dict(self) -> dict[str, str | float | None]:
        """Return all fields as numbers and strings, one level deep."""
        keep = self.keep
        settings: dict[str, Any] = dict.fromkeys(("bits", "block_size", "topk_over", "selection", "max_dropped_energy"))
        if keep is not None:
            settings = {name: getattr(keep, name) for name in settings} | ({"bits": 1} if self.one_bit else {})
        row = {"fqn": self.fqn, "kind": self.kind, "operator": self.operator, "converted": self.converted}
        sizes = {"in_features": self.in_features, "out_features": self.out_features, "sparsity": self.sparsity}
        return {**row, **sizes, **settings, "reason": self.reason}


@dataclass(frozen=True)
class BlockReport:
    """A module that should run again in backward.

    Args:
        fqn: Its fully qualified name.
        kind: Name of its dense class.
        recompute: How its inputs are kept, ``None`` if it does not run again.
        reason: Why it does not run again.
    """

    fqn: str
    kind: str
    recompute: Recompute | None
    reason: str | None = None


class Measured(Protocol):
    """What a training step keeps, in words."""

    def describe_sizes(self) -> list[str]:
        """Return lines on activations and on the peak."""

    def describe_rest(self) -> list[str]:
        """Return lines on the largest of what is kept."""


@dataclass
class ConversionReport:
    """What a conversion did: each layer that the settings cover is listed, converted or with a reason.

    Args:
        layers: One row per layer, in the order of the model.
        saved: How tensors of other operations are kept, ``None`` if they stay uncompressed.
        uncovered: How many layers of each operator neither the preset nor a rule covers.
        blocks: One row per module that should run again in backward, in the order of the model.
        memory: What a step keeps, if it was measured (``analysis.memory.MemoryReport``).
    """

    layers: list[LayerReport] = field(default_factory=list)
    saved: Keep | None = None
    uncovered: Counter[Operator] = field(default_factory=Counter)
    blocks: list[BlockReport] = field(default_factory=list)
    memory: Measured | None = field(default=None, compare=False)

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
        """The layers that stay dense and the modules that do not run again, each with a reason."""
        return [*self.skipped, *(block for block in self.blocks if block.recompute is None)]

    @property
    def skipped(self) -> list[LayerReport]:
        """The layers that stay dense, each with a reason."""
        return [layer for layer in self.layers if not layer.converted]

    def replace(self, fqn: str, **changes: Any) -> None:
        """Change the row of a layer."""
        self.layers[:] = [replace(layer, **changes) if layer.fqn == fqn else layer for layer in self.layers]

    def leave_dense(self, fqn: str, reason: str) -> None:
        """Record that a converted layer is dense again, and why."""
        self.replace(fqn, keep=None, sparsity=0.0, reason=reason)

    def describe_skipped(self) -> str:
        """Return one line per reason and class, with the names of the layers."""
        lines = []
        for rows in group_by_reason(self.refused):
            for kind in list_kinds(rows):
                names = config.shorten([row.fqn for row in rows if row.kind == kind])
                lines.append(f"  {names} ({kind}): {reason_of(rows)}")
        return "\n".join(lines)

    def summary(self) -> str:
        """Return at most eight lines: activations and peak if measured, settings, and what stays dense and why."""
        memory = self.memory
        sizes, rest = ([], []) if memory is None else (memory.describe_sizes(), memory.describe_rest())
        return "\n".join([*sizes, *describe_layers(self, {}), *rest])

    def __str__(self) -> str:
        """Return a summary and a table of the layers."""
        tables = [tabulate_conversion(self, {})] if self.layers else []
        return "\n".join([as_text(describe_conversion(self, {})), *map(as_text, tables)])

    def to_rows(self) -> list[dict[str, str | float | None]]:
        """Return one flat row per layer: ``pandas.DataFrame(report.to_rows())`` is a table."""
        return [layer.to_dict() for layer in self.layers]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as numbers and strings, ready for JSON."""
        saved = None if self.saved is None else self.saved.bits
        blocks = [{**vars(b), "recompute": None if b.recompute is None else vars(b.recompute)} for b in self.blocks]
        layers = self.to_rows()
        return {"layers": layers, "saved_bits": saved, "uncovered": dict(self.uncovered), "blocks": blocks}


def describe_layers(report: ConversionReport, last: Mapping[str, float]) -> list[str]:
    """Return a line on the settings, and lines on what stays dense; ``last``: sparsities at the end of training."""
    return [describe_conversion(report, last), *describe_reasons(report.refused)]


def describe_conversion(report: ConversionReport, last: Mapping[str, float]) -> str:
    """Return the settings of each operator, and how many layers are dense.

    Args:
        report: The conversion.
        last: Sparsity of each layer at the end of training.
    """
    rows = sorted(report.converted, key=lambda layer: [*_NAMES].index(layer.operator))
    counts = Counter((_name_layer(layer), layer.describe(last.get(layer.fqn))) for layer in rows)
    by_setting = [f"{format_count(number, noun)} ({how})" for (noun, how), number in counts.items()]
    parts = [f"Activation pruning: {join_names(by_setting) or '0 layers'} converted, {len(report.skipped)} dense."]
    if uncovered := [format_count(count, _NAMES[operator]) for operator, count in report.uncovered.items() if count]:
        parts.append(f"Not covered: {join_names(uncovered)}.")
    if report.saved is not None and (report.converted or report.recomputed):
        parts.append(f"Large tensors that other operations keep: {describe_keep(report.saved)}.")
    blocks: dict[tuple[str, str, Recompute], list[str]] = {}
    for block in report.recomputed:
        assert block.recompute is not None
        blocks.setdefault((_NUMBER.sub("*", block.fqn), block.kind, block.recompute), []).append(block.fqn)
    if repeated := [
        f"{name if fqns[1:] else fqns[0]} ({len(fqns)} {kind}, {describe_inputs(how)})"
        for (name, kind, how), fqns in blocks.items()
    ]:
        parts.append(f"Run again in backward: {join_names(repeated)}.")
    return " ".join(parts)


def _name_layer(layer: LayerReport) -> str:
    return "dropout" if "Dropout" in layer.kind else _NAMES[layer.operator]


def describe_reasons(layers: Sequence[LayerReport | BlockReport]) -> list[str]:
    """Return a line for each of the reasons that hold for most layers, and how many have others."""
    groups = sorted(group_by_reason(layers), key=len, reverse=True)
    lines = []
    for group in groups[:MOST_REASONS]:
        places = group_by_place(group, lambda row: row.kind)
        names = [name for name, _ in places[:MOST_NAMED]]
        more = sum(len(members) for _, members in places[MOST_NAMED:])
        what = "Dense" if isinstance(group[0], LayerReport) else "Not run again"
        lines.append(f"{what}: {join_names([*names, *([f'{more} more'] if more else [])])}: {reason_of(group)}.")
    if rest := sum(map(len, groups[MOST_REASONS:])):
        lines[-1] += f" For {rest} more see `skipped`."
    return lines


def group_by_reason(rows: Sequence[LayerReport | BlockReport]) -> list[list[LayerReport | BlockReport]]:
    """Return the rows of dense layers and blocks in groups of one reason each, which may name modules of each block."""
    groups: dict[str, list[LayerReport | BlockReport]] = {}
    for row in rows:
        groups.setdefault(_PLACE.sub("*", row.reason or ""), []).append(row)
    return list(groups.values())


def reason_of(group: Sequence[LayerReport | BlockReport]) -> str:
    """Return the reason of a group, with ``*`` for numbers in names if they differ."""
    reasons = {row.reason or "" for row in group}
    return reasons.pop() if len(reasons) == 1 else _PLACE.sub("*", reasons.pop())


def list_kinds(rows: Sequence[LayerReport | BlockReport]) -> list[str]:
    """Return the class names of the rows, each once."""
    return list(dict.fromkeys(row.kind for row in rows))


def tabulate_conversion(report: ConversionReport, last: Mapping[str, float]) -> Table:
    """Return a table of the layers, corresponding ones in one row; ``last``: their final sparsities."""
    table = make_table("Layers", "Layer", "Class ", "Kept ")
    add_layers(table, report.converted, last)
    table.add_section()
    for group in group_by_reason(report.refused):
        for kind, rows in ((kind, [row for row in group if row.kind == kind]) for kind in list_kinds(group)):
            names, rest = cut_rows([name for name, _ in group_by_place(rows, lambda _: None)])
            table.add_row(", ".join([*names, *(["..."] if rest else [])]), kind, f"dense: {reason_of(group)}")
    return table


def add_layers(table: Table, layers: Sequence[LayerReport], last: Mapping[str, float]) -> None:
    """Add one row for corresponding layers of the same class and settings."""

    def cells(layer: LayerReport) -> tuple[str, str]:
        """Return the class of a layer and its settings."""
        return layer.kind, layer.describe(last.get(layer.fqn))

    groups, rest = cut_rows(group_by_place(layers, cells))
    for name, members in groups:
        table.add_row(name, *cells(members[0]))
    if rest:
        table.add_row(f"... and {sum(len(members) for _, members in rest)} more")


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
    """Format bytes in MiB with two decimals."""
    return f"{nbytes / MIB:.2f}"


def percent(fraction: float) -> str:
    """Format a fraction in percent with one decimal."""
    return f"{100 * fraction:.1f} %"


def format_count(number: int, noun: str) -> str:
    """Return ``1 layer`` or ``2 layers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def join_names(names: Sequence[str]) -> str:
    """Return ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def make_table(title: str, *columns: str) -> Table:
    """Return an empty table; columns after the first are right-aligned unless their name ends in a blank."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        is_text = number == 0 or column.endswith(" ")
        table.add_column(column.strip(), justify="left" if is_text else "right", overflow="fold")
    return table


def cut_rows(rows: Sequence[Any], most: int = MAX_ROWS) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the rows to show and the others, which one more row sums up; a single row is always shown."""
    cut = len(rows) if len(rows) <= most + 1 else most
    return rows[:cut], rows[cut:]


def group_by_place(rows: Iterable[_Row], key: Callable[[_Row], Any]) -> list[tuple[str, list[_Row]]]:
    """Group rows at corresponding places (``blocks.*.fc1``) with the same ``key``, each group under one name."""
    groups: dict[Any, list[_Row]] = {}
    for row in rows:
        groups.setdefault((_PLACE.sub("*", row.fqn), key(row)), []).append(row)
    return [
        (members[0].fqn if len(members) == 1 else f"{name} ({len(members)})", members)
        for (name, _), members in groups.items()
    ]


def describe_keep(keep: Keep, first: float = 0.0, last: float = 0.0, bits: int | None = None, few: bool = False) -> str:
    """Return settings in words, such as ``"2 bits, drops 50 %"``.

    Args:
        keep: The settings.
        first: Sparsity before the first step.
        last: Sparsity at the end of training.
        bits: Bits per value if they do not depend on ``keep``.
        few: Whether inputs with few rows get more bits, as in linear layers.
    """
    bits = bits or keep.bits
    parts = ["uncompressed values" if bits is None else "1 bit" if bits == 1 else f"{bits} bits"]
    parts += (
        [f"8 below {keep.min_rows_for_low_bits} rows"]
        if few and 0 < keep.stored_bits < 8 and keep.min_rows_for_low_bits
        else []
    )
    if first or last:
        ends = dict.fromkeys((f"{100 * first:g}", f"{100 * last:g}"))
        parts.append(f"drops {' to '.join(ends)} %")
        parts += [] if keep.selection == "largest" else [f"selection {keep.selection}"]
        parts += [] if keep.topk_over == "sample" else [f"per {keep.topk_over}"]
    parts += [] if keep.block_size == Keep.block_size else [f"blocks of {keep.block_size}"]
    parts += ["on the host"] if keep.offload and bits is not None else []
    return ", ".join(parts)
