"""What a conversion did: the converted layers with their settings, and the others with reasons."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lightning_actprune.arguments import BlockSelection, OtherOperator, PrunedOperator, Scope, ValueFormatName

CONVOLUTIONS = ("Conv1d", "Conv2d", "Conv3d")
"""Kinds of convolutions."""
AFFINE_LAYERS = ("Affine", "LayerScale")
"""Kinds of affine layers and layer scales."""


@dataclass(frozen=True)
class ConvertedLayer:
    """A pruned layer: its name, its former class, its sizes (of a convolution its channels) and its settings."""

    fqn: str
    kind: str
    in_features: int
    out_features: int
    sparsity: float
    block_size: int
    scope: Scope
    value_format: ValueFormatName = "same"
    block_selection: BlockSelection = "largest"
    operator: PrunedOperator = "linear"


@dataclass(frozen=True)
class FewBitConversion:
    """A converted layer of another operator: its name, its former class, what it is and how it stores what it keeps."""

    fqn: str
    kind: str
    operator: OtherOperator
    value_format: ValueFormatName


@dataclass(frozen=True)
class SkippedLayer:
    """A layer that was left as it is, and why."""

    fqn: str
    kind: str
    reason: str


_KINDS_OF_LAYER = ConvertedLayer, FewBitConversion, SkippedLayer
_COLUMNS = "outcome", *dict.fromkeys(column.name for kind in _KINDS_OF_LAYER for column in fields(kind))


@dataclass
class ConversionReport:
    """What a conversion did: every linear layer, and every other one that was to be converted, is in one list.

    Args:
        converted: Linear layers, and convolutions, affine layers and layer scales if asked for, that are pruned.
        skipped: Layers left as they are.
        few_bit: Layers of other operators that keep in few bits what they need.
        rest: Format of what else autograd saves while the model runs, ``None`` if that is left as it is.
        left: How many layers of each other operator could be converted too, if ``others`` named it.
    """

    converted: list[ConvertedLayer] = field(default_factory=list)
    skipped: list[SkippedLayer] = field(default_factory=list)
    few_bit: list[FewBitConversion] = field(default_factory=list)
    rest: ValueFormatName | None = None
    left: Counter[OtherOperator] = field(default_factory=Counter)

    def describe_skipped(self) -> str:
        """Return the skipped layers with their reasons, one a line."""
        return "\n".join(f"  {s.fqn} ({s.kind}): {s.reason}" for s in self.skipped)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as numbers and strings, fit for JSON."""
        return asdict(self) | {"left": dict(self.left)}

    def to_rows(self) -> list[dict[str, str | float | None]]:
        """Return every layer as a flat row: ``pandas.DataFrame(report.to_rows())`` is a table.

        All rows have the same columns: ``outcome`` is ``"pruned"``, ``"few_bit"`` or ``"skipped"``, what a layer of
        that outcome does not have is ``None``.
        """
        rows = [{"outcome": "pruned", **asdict(layer)} for layer in self.converted]
        rows += [{"outcome": "few_bit", **asdict(layer)} for layer in self.few_bit]
        rows += [{"outcome": "skipped", **asdict(layer)} for layer in self.skipped]
        return [dict.fromkeys(_COLUMNS) | row for row in rows]
