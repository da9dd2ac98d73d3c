"""What compiled code keeps in a fit: layers say how, and a pass over the compiler's graphs packs it (``compiled``)."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_actprune.compiled.decision_log import Row
from lightning_actprune.compiled.install import CompiledPacking, why_not
from lightning_actprune.convert import mark_layers, unmark_layers
from lightning_actprune.operators.hooks import eager_modules


class CompiledLayers:
    """Lets compilers that trace layers of a fit see dense ones with marks, while a pass is there that packs by them.

    Where no such pass runs, they see the operators that pack in eager mode.

    Args:
        owner: Who converts the layers.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._packing: CompiledPacking | None = None
        self._reported = 0
        self.rows: list[Row] = []
        """How each value is kept that backward reads in the graphs that were compiled in this fit or the last."""

    def begin(self, model: pl.LightningModule) -> None:
        """Install the pass when a fit begins."""
        self.end()  # of a fit whose end it has not heard of
        reason = why_not()
        self.rows, self._reported = [], 0
        if reason is None:
            self._packing = CompiledPacking().open()
            self.rows = self._packing.rows
        elif is_compiled(model):
            rank_zero_warn(
                f"{reason} Layers pack by themselves, and the compiler keeps all that other operations save."
            )

    def mark(self, model: pl.LightningModule, weight_gradients: bool) -> None:
        """Mark the layers, after each conversion.

        Args:
            model: The module that holds them.
            weight_gradients: See ``convert.mark_layers``.
        """
        if self._packing is not None:
            mark_layers(model, self._owner, weight_gradients=weight_gradients)

    def news(self, model: pl.LightningModule) -> list[Row]:
        """Return how values are kept of which it is not known yet, after a step.

        Should a compiler have left the marks in, layers are no longer marked, and the user is warned.
        """
        if self._packing is None:
            return []
        if self._packing.was_missed:
            self.end()
            unmark_layers(model, self._owner)
            rank_zero_warn(
                "A compiler of this fit runs no pass over the graphs of forward and backward. Layers pack by "
                "themselves in what it compiles from now on, and all that other operations save is kept. HINT: compile "
                'with backend="inductor", the default.'
            )
        rows = self.rows[self._reported :]
        self._reported += len(rows)
        return rows

    def end(self) -> None:
        """Take the pass out. Does nothing outside of a fit."""
        if self._packing is not None:
            self._packing.close()
            self._packing = None


def is_compiled(model: pl.LightningModule) -> bool:
    """Return whether something in it is compiled."""
    return eager_modules(model) != set(model.modules())
