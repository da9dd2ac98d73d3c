"""What a conversion did: one row for each layer that is known, with how it is kept, or the reason why it is dense."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_actprune.config import Keep, Operator, Recompute


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
    """

    fqn: str
    kind: str
    operator: Operator
    in_features: int | None = None
    out_features: int | None = None
    keep: Keep | None = None
    sparsity: float = 0.0
    reason: str | None = None

    @property
    def converted(self) -> bool:
        """Whether the layer is compressed."""
        return self.keep is not None

    def to_dict(self) -> dict[str, str | float | None]:
        """Return everything as numbers and strings, one level deep."""
        keep = self.keep
        kept: dict[str, Any] = dict.fromkeys(("bits", "block_size", "scope", "selection", "max_dropped_energy"))
        if keep is not None:
            kept = {name: getattr(keep, name) for name in kept}
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
        """Return what was skipped with its reason, one a line."""
        skipped: list[LayerReport | BlockReport] = [
            *self.skipped,
            *(block for block in self.blocks if block.recompute is None),
        ]
        return "\n".join(f"  {row.fqn} ({row.kind}): {row.reason}" for row in skipped)

    def to_rows(self) -> list[dict[str, str | float | None]]:
        """Return every layer as a flat row: ``pandas.DataFrame(report.to_rows())`` is a table."""
        return [layer.to_dict() for layer in self.layers]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as numbers and strings, fit for JSON."""
        saved = None if self.saved is None else self.saved.bits
        blocks = [{**vars(b), "recompute": None if b.recompute is None else vars(b.recompute)} for b in self.blocks]
        layers = self.to_rows()
        return {"layers": layers, "saved_bits": saved, "uncovered": dict(self.uncovered), "blocks": blocks}
