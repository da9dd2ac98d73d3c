"""What a measurement of sensitivity found: rows, tables, pictures, and the settings that it suggests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any, TypedDict

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from lightning_actprune.arguments import ValueFormatName, check_share
from lightning_actprune.conversion_report import SkippedLayer
from lightning_actprune.name_patterns import grouped
from lightning_actprune.sensitivity_grid import SensitivityGrid
from lightning_actprune.sensitivity_picture import heatmap_picture

__all__ = ["LayerSensitivity", "SensitivityReport"]


@dataclass(frozen=True)
class LayerSensitivity:
    """What one setting does to the weight gradient of one layer.

    Args:
        fqn: Fully qualified name of the layer.
        kind: Name of its class.
        sparsity: Fraction of blocks dropped.
        value_format: How kept values are stored.
        cosine: Of the angle between the weight gradient from what is kept and the exact one; 1 if nothing is lost.
        norm_ratio: Norm of the former over that of the latter.
        dropped_energy: Share of the input's sum of squares that the blocks of least norm hold, as many as are dropped.
        stored_share: Bytes kept of the input over those of the input.
    """

    fqn: str
    kind: str
    sparsity: float
    value_format: ValueFormatName
    cosine: float
    norm_ratio: float
    dropped_energy: float
    stored_share: float


class SuggestedSettings(TypedDict):
    """Settings of one layer, as keyword arguments."""

    sparsity: float
    value_format: ValueFormatName


@dataclass
class SensitivityReport:
    """How sensitive the layers of a model are to pruning.

    Args:
        rows: One for each layer and setting, layer by layer.
        skipped: Layers that were not measured, with the reason.
        batches: Batches that were measured.
        grid: What was measured, and of which layers.
        layer_names: First name of every layer that can be pruned, measured or not, by each of its names.
    """

    rows: list[LayerSensitivity]
    skipped: list[SkippedLayer]
    batches: int
    grid: SensitivityGrid
    layer_names: dict[str, str] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as numbers and strings; ``pandas.DataFrame(report.to_dict()["rows"])`` is a table."""
        values = {name: value for name, value in asdict(self).items() if name != "layer_names"}
        grid = {name: list(value) if isinstance(value, tuple) else value for name, value in values["grid"].items()}
        return values | {"grid": grid}

    def suggest(self, min_cosine: float = 0.9, value_format: ValueFormatName | None = None) -> dict[str, float]:
        """Return sparsities by pattern: the highest that is good enough.

        For ``ActivationPruning(sparsity=sparsities, value_format=value_format)``. Layers for which none is good enough
        are left out, and stay dense.

        Args:
            min_cosine: Least cosine between pruned and exact weight gradient, in [0, 1].
            value_format: How values will be stored; by default the first format that was measured.

        Raises:
            TypeError: If ``min_cosine`` is no number.
            ValueError: If ``min_cosine`` is out of range, or ``value_format`` was not measured.
        """
        value_format = self._measured_format(value_format)
        good = [row for row in self._good(min_cosine) if row.value_format == value_format]
        best: dict[str, float | None] = {}
        for row in sorted(good, key=lambda row: row.sparsity):
            best[row.fqn] = row.sparsity
        return grouped(self._by_name(best), best)

    def suggest_layers(self, min_cosine: float = 0.9) -> dict[str, SuggestedSettings]:
        """Return settings by pattern: the least stored that is good enough.

        For ``ActivationPruning(include=list(settings), layers=settings)``, as ``to_yaml`` has it: layers for which
        nothing is good enough are left out, and stay dense because of ``include``.

        Args:
            min_cosine: Least cosine between pruned and exact weight gradient, in [0, 1].

        Raises:
            TypeError: If ``min_cosine`` is no number.
            ValueError: If ``min_cosine`` is out of range.
        """
        best: dict[str, SuggestedSettings | None] = {}
        for row in sorted(self._good(min_cosine), key=lambda row: (-row.stored_share, row.cosine)):
            best[row.fqn] = {"sparsity": row.sparsity, "value_format": row.value_format}
        return grouped(self._by_name(best), best)

    def to_yaml(
        self, min_cosine: float = 0.9, value_format: ValueFormatName | None = None, *, layers: bool = False
    ) -> str:
        """Return the ``init_args`` of ``ActivationPruning`` in a YAML file that do what is suggested.

        Args:
            min_cosine: As in ``suggest``.
            value_format: As in ``suggest``.
            layers: Whether each layer has a format of its own, as in ``suggest_layers``.
        """
        if layers:
            settings = self.suggest_layers(min_cosine)
            given = {
                pattern: f"{{sparsity: {_number(setting['sparsity'])}, value_format: {setting['value_format']}}}"
                for pattern, setting in settings.items()
            }
            lines = [f"include: {json.dumps(list(settings))}", *_mapping("layers", given)]
        else:
            sparsities = self.suggest(min_cosine, value_format)
            lines = _mapping("sparsity", {pattern: _number(value) for pattern, value in sparsities.items()})
            lines.append(f"value_format: {self._measured_format(value_format)}")
        if self.grid.convolutions:  # which are pruned on request only
            lines.append(f"others: {{convolution: {'same' if layers else self._measured_format(value_format)}}}")
        same = "block_size", "scope", "block_selection", "min_features"
        lines += [f"{name}: {getattr(self.grid, name)}" for name in same]
        return "\n".join(lines) + "\n"

    def table(self, max_layers: int | None = None) -> Group:
        """Return the cosines to print with ``rich``: for each format a table of layers and sparsities.

        Args:
            max_layers: Rows of a table that are shown before the rest is counted in one; all by default.
        """
        formats = dict.fromkeys(row.value_format for row in self.rows)
        title = "Cosine of pruned and exact weight gradient, values stored as {!r}, by layer and sparsity:"
        parts: list[RenderableType] = []
        for each in formats:
            parts += [title.format(each), self._table_of(each, max_layers)]
        return Group(*parts)

    def heatmap(self, path: str | PathLike[str]) -> None:
        """Write the cosines as a picture to ``path``, whose ending says in which format.

        Raises:
            ImportError: If matplotlib is not installed.
            ValueError: If no layer was measured.
        """
        title = f"Cosine of pruned and exact weight gradient (blocks of {self.grid.block_size})"
        heatmap_picture(title, *self._matrix()).savefig(path)

    def _table_of(self, value_format: ValueFormatName, max_layers: int | None) -> Table:
        lines: dict[str, dict[float, float]] = {}
        for row in self.rows:
            if row.value_format == value_format:
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
            values.setdefault(row.fqn, {})[f"{row.value_format} {row.sparsity:g}"] = row.cosine
        settings = list(next(iter(values.values()), {}))
        return list(values), settings, [[line[name] for name in settings] for line in values.values()]

    def _good(self, min_cosine: float) -> list[LayerSensitivity]:
        """Return the rows that lose little enough and store less than a dense layer."""
        least = check_share(min_cosine, "min_cosine")
        return [row for row in self.rows if row.cosine >= least and row.stored_share < 1]

    def _by_name(self, best: dict[str, Any]) -> dict[str, Any]:
        """Return what is best for each layer by each of its names, ``None`` of those that stay dense."""
        return {name: best.get(first) for name, first in self.layer_names.items()}

    def _measured_format(self, value_format: ValueFormatName | None) -> ValueFormatName:
        formats = list(dict.fromkeys(row.value_format for row in self.rows))
        if value_format is not None and value_format not in formats:
            raise ValueError(
                f"`value_format` must be one that was measured ({', '.join(formats) or 'none'}), got {value_format!r}. "
                "HINT: name it in `value_formats` of the measurement."
            )
        return next(iter(formats), "same") if value_format is None else value_format


def _number(value: float) -> str:
    """Return ``value`` as YAML reads it, which takes 1e-05 for a word."""
    return f"{value:.20f}".rstrip("0") if "e" in repr(value) else repr(value)


def _mapping(name: str, values: Mapping[str, str]) -> list[str]:
    """Return lines of YAML."""
    lines = [f"  {json.dumps(key)}: {value}" for key, value in values.items()]
    return [f"{name}:", *lines] if lines else [f"{name}: {{}}"]
