"""Compiled code in a fit: layers carry marks, and a pass over the compiler's graphs packs by them (``compiled``)."""

from __future__ import annotations

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_actprune.compiled.decision_log import Row
from lightning_actprune.compiled.install import CompiledPacking, why_not
from lightning_actprune.convert import mark_layers, unmark_layers
from lightning_actprune.operators.hooks import eager_modules


class CompiledLayers:
    """Shows compilers the layers of a fit as dense ones with marks while the pass that packs by them is installed.

    Without the pass, compilers see the operators that pack in eager mode.

    Args:
        owner: Who converts the layers.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._packing: CompiledPacking | None = None
        self._reported = 0
        self.rows: list[Row] = []
        """How compiled code keeps each value that backward reads, in the current or the last fit."""

    def begin(self, model: nn.Module) -> None:
        """Install the pass when a fit begins."""
        self.end()  # of a fit whose end it has missed
        reason = why_not()
        self.rows, self._reported = [], 0
        if reason is None:
            self._packing = CompiledPacking().open()
            self.rows = self._packing.rows
        elif is_compiled(model):
            rank_zero_warn(
                f"{reason} Layers pack by themselves, and the compiler keeps all tensors of other operations."
            )

    def mark(self, model: nn.Module, unmarked_layers: bool) -> None:
        """Mark the layers after a conversion.

        Args:
            model: The module that holds them.
            unmarked_layers: See ``convert.mark_layers``.
        """
        if self._packing is not None:
            mark_layers(model, self._owner, unmarked_layers=unmarked_layers)

    def news(self, model: nn.Module) -> list[Row]:
        """Return the rows that are new since the last call; called after each step.

        If a compiler has left marks in its graphs, remove them from the layers and warn the user.
        """
        if self._packing is None:
            return []
        if self._packing.was_missed:
            self.end()
            unmark_layers(model, self._owner)
            rank_zero_warn(
                "A compiler of this fit runs no pass over the graphs of forward and backward. From now on layers pack "
                "by themselves in compiled code, and it keeps all tensors of other operations. HINT: compile with "
                'backend="inductor", the default.'
            )
        rows = self.rows[self._reported :]
        self._reported += len(rows)
        return rows

    def end(self) -> None:
        """Remove the pass; does nothing outside of a fit."""
        if self._packing is not None:
            self._packing.close()
            self._packing = None


def is_compiled(model: nn.Module) -> bool:
    """Return True if some part of the model is compiled."""
    return eager_modules(model) != set(model.modules())
