"""What a measurement of sensitivity found: rows, tables, a picture, and the rules that it suggests."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from glob import escape as escape_glob
from itertools import combinations
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from lightning_actprune.analysis.plots import heatmap_picture
from lightning_actprune.config import Keep, check_share
from lightning_actprune.report import LayerReport

if TYPE_CHECKING:
    from lightning_actprune.analysis.sensitivity_grid import SensitivityGrid

_Value = TypeVar("_Value")
_UNKNOWN = object()
"""In place of a rule: of a layer that was not measured nothing is to be said."""


@dataclass(frozen=True)
class LayerSensitivity:
    """What one setting does to the weight gradient of one layer.

    Args:
        fqn: Fully qualified name of the layer.
        kind: Name of its class.
        sparsity: Fraction of blocks dropped.
        bits: Bits of each kept value, ``None`` for values as they are.
        cosine: Of the angle between the weight gradient from what is kept and the exact one; 1 if nothing is lost.
        norm_ratio: Norm of the former over that of the latter.
        dropped_energy: Share of the input's sum of squares that the blocks of least norm hold, as many as are dropped.
        stored_share: Bytes kept of the input over those of the input.
    """

    fqn: str
    kind: str
    sparsity: float
    bits: int | None
    cosine: float
    norm_ratio: float
    dropped_energy: float
    stored_share: float


@dataclass
class SensitivityReport:
    """How sensitive the layers of a model are to compression.

    Args:
        rows: One for each layer and setting, layer by layer.
        skipped: Layers that were not measured, with the reason.
        batches: Batches that were measured.
        grid: What was measured, and of which layers.
        layer_names: First name of every layer and module, measured or not, by each of its names.
    """

    rows: list[LayerSensitivity]
    skipped: list[LayerReport]
    batches: int
    grid: SensitivityGrid
    layer_names: dict[str, str] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as numbers and strings; ``pandas.DataFrame(report.to_dict()["rows"])`` is a table."""
        grid = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self.grid).items()}
        skipped = [{"fqn": layer.fqn, "kind": layer.kind, "reason": layer.reason} for layer in self.skipped]
        return {"rows": [asdict(row) for row in self.rows], "skipped": skipped, "batches": self.batches, "grid": grid}

    def suggest(self, min_cosine: float = 0.9) -> dict[str, Keep | None]:
        """Return rules for the layers that were measured: what keeps the fewest bytes and is good enough.

        For ``ActivationPruning(rules=rules)`` or ``convert(model, rules=rules)``. Layers for which nothing is good
        enough stay dense (``None``). Layers that differ in nothing but indices share a pattern.

        Args:
            min_cosine: Least cosine between the weight gradient from what is kept and the exact one, in [0, 1].

        Raises:
            TypeError: If ``min_cosine`` is no number.
            ValueError: If ``min_cosine`` is out of range.
        """
        least, grid = check_share(min_cosine, "min_cosine"), self.grid
        measured = grid.block_size, grid.topk_over, grid.selection, 1.0, 0  # all of it, so that no preset changes it
        best: dict[str, Keep | None] = dict.fromkeys(row.fqn for row in self.rows)
        for row in sorted(self.rows, key=lambda row: (-row.stored_share, row.cosine)):
            if row.cosine >= least and row.stored_share < 1:
                best[row.fqn] = Keep(row.bits, row.sparsity, *measured)
        wanted: dict[str, Any] = {name: best.get(first, _UNKNOWN) for name, first in self.layer_names.items()} | best
        return grouped(wanted, best)

    def to_yaml(self, min_cosine: float = 0.9) -> str:
        """Return what ``suggest`` does as an entry of ``init_args`` of ``ActivationPruning`` in a YAML file."""
        rules = self.suggest(min_cosine)
        lines = [f"  {json.dumps(pattern)}: {_in_yaml(keep)}" for pattern, keep in rules.items()]
        return "\n".join(["rules:", *lines] if lines else ["rules: {}"]) + "\n"

    def table(self, max_layers: int | None = None) -> Group:
        """Return the cosines to print with ``rich``: for each number of bits a table of layers and sparsities.

        Args:
            max_layers: Rows of a table that are shown before the rest is counted in one; all by default.
        """
        parts: list[RenderableType] = []
        for bits in dict.fromkeys(row.bits for row in self.rows):
            kept = "values as they are" if bits is None else f"{bits} bits"
            parts += [f"Cosine of the weight gradient from {kept} and the exact one, by layer and sparsity:"]
            parts += [self._table_of(bits, max_layers)]
        return Group(*parts)

    def heatmap(self, path: str | PathLike[str]) -> None:
        """Write the cosines as a picture to ``path``, whose ending says in which format.

        Raises:
            ImportError: If matplotlib is not installed.
            ValueError: If no layer was measured.
        """
        title = f"Cosine of the weight gradient from what is kept and the exact one (blocks of {self.grid.block_size})"
        heatmap_picture(title, *self._matrix()).savefig(path)

    def _table_of(self, bits: int | None, max_layers: int | None) -> Table:
        lines: dict[str, dict[float, float]] = {}
        for row in self.rows:
            if row.bits == bits:
                lines.setdefault(row.fqn, {})[row.sparsity] = row.cosine
        made = Table("Layer")
        sparsities = list(next(iter(lines.values())))
        for sparsity in sparsities:
            made.add_column(f"{sparsity:g}", justify="right")
        cut = len(lines) if max_layers is None or len(lines) <= max_layers + 1 else max_layers
        for name, line in list(lines.items())[:cut]:
            made.add_row(escape(name), *(f"{line[sparsity]:.2f}" for sparsity in sparsities))
        if cut < len(lines):
            made.add_row(f"... and {len(lines) - cut} more")
        return made

    def _matrix(self) -> tuple[list[str], list[str], list[list[float]]]:
        """Return names of layers, names of settings, and cosines by both."""
        values: dict[str, dict[str, float]] = {}
        for row in self.rows:
            values.setdefault(row.fqn, {})[f"{_bits(row.bits)} {row.sparsity:g}"] = row.cosine
        settings = list(next(iter(values.values()), {}))
        return list(values), settings, [[line[name] for name in settings] for line in values.values()]


def _bits(bits: int | None) -> str:
    return "as is" if bits is None else f"{bits} bits"


def _in_yaml(keep: Keep | None) -> str:
    """Return a rule as YAML reads it."""
    if keep is None:
        return "dense"
    values = {name: "null" if value is None else value for name, value in keep.named.items()}
    shown = {name: _number(value) if isinstance(value, float) else str(value) for name, value in values.items()}
    return f"{{{', '.join(f'{name}: {value}' for name, value in shown.items())}}}"


def _number(value: float) -> str:
    """Return ``value`` as YAML reads it, which takes 1e-05 for a word."""
    return f"{value:.20f}".rstrip("0") if "e" in repr(value) else repr(value)


def grouped(wanted: Mapping[str, _Value], needed: Container[str]) -> dict[str, _Value]:
    """Return patterns that give each name that is ``needed`` its value, and match no name of another value.

    Names that differ in nothing but indices share a pattern, such as ``"blocks.*.fc1"``, if no other value is in the
    way; of several, the one with the most stars. No name matches patterns of different values, so that their order
    says nothing.

    Example:
        >>> wanted = {"blocks.0.fc1": 0.5, "blocks.1.fc1": 0.5, "blocks.0.fc2": 0.8, "blocks.1.fc2": 0.7, "head": None}
        >>> grouped(wanted, [name for name in wanted if name != "head"])
        {'blocks.*.fc1': 0.5, 'blocks.0.fc2': 0.8, 'blocks.1.fc2': 0.7}
    """
    found: dict[str, _Value] = {}
    for name, value in wanted.items():
        if name in needed and not any(fnmatchcase(name, pattern) for pattern in found):
            found[_widest(name, value, wanted)] = value
    return found


def _widest(name: str, value: _Value, wanted: Mapping[str, _Value]) -> str:
    """Return the pattern with the most stars that matches ``name`` and no name of another value."""
    for pattern in _patterns(name):
        matched = [other for other in wanted if fnmatchcase(other, pattern)]
        if len(matched) > 1 and all(wanted[other] == value for other in matched):
            return pattern
    return escape_glob(name)


def _patterns(name: str) -> Iterator[str]:
    """Yield ``name`` with stars in place of its indices, of all of them first; never a star alone."""
    parts = name.split(".")
    indices = [place for place, part in enumerate(parts) if part.isdigit()]
    for stars in range(min(len(indices), len(parts) - 1), 0, -1):
        for chosen in combinations(indices, stars):
            yield ".".join("*" if place in chosen else escape_glob(part) for place, part in enumerate(parts))
