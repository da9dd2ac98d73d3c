"""How reports are printed: names at corresponding places in one row, sizes in MiB, settings in words."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from rich.console import Console, RenderableType
from rich.table import Table

from lightning_actprune.config import Keep


class _Named(Protocol):
    @property
    def fqn(self) -> str: ...


_Row = TypeVar("_Row", bound=_Named)
_PLACE = re.compile(r"(?<![^.])\d+(?=\.)")
"""A number in the name of a layer, but for the last part: of ``blocks.0.fc1``, not of ``net.0``."""
MAX_ROWS = 40
"""Rows of a table that are shown before the rest is summed up in one."""
MIB = 2**20


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
        parts.append(f"drops {_span([f'{100 * first:g}', f'{100 * last:g}'])} %")
        parts += [] if keep.selection == "largest" else [f"selection {keep.selection}"]
        parts += [] if keep.scope == "sample" else [f"per {keep.scope}"]
    parts += [] if keep.block_size == Keep.block_size else [f"blocks of {keep.block_size}"]
    return ", ".join(parts)


def _span(shown: Iterable[str]) -> str:
    """Return the first and the last of some numbers, or the one that both are."""
    first, *_, last = (*shown,) * 2
    return first if first == last else f"{first} to {last}"
