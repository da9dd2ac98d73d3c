"""Probe the first training batch of a fit for layers that are better not pruned.

Layers whose input is kept for backward anyway are turned dense. Of those inside an activation checkpoint a warning
tells: which of the two to leave out is the user's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_actprune.conversion import ConversionReport, SkippedLayer
from lightning_actprune.holders import HolderProbe
from lightning_actprune.recomputed import RecomputationProbe

_MAX_NAMES = 8
"""Layers that the warning names."""


class FirstBatchProbe:
    """Decides once in a fit, in the first training batch that runs a forward, which layers are left dense."""

    def __init__(self) -> None:
        self._sparsity: float | None = None
        self._skip_held = True
        self._holders: HolderProbe | None = None
        self._recomputations: RecomputationProbe | None = None

    def fit_starts(self, sparsity: float, skip_held: bool, quantizes: bool = False) -> None:
        """Probe the next batch for layers that will have up to ``sparsity``; none at 0, unless values are quantised.

        Layers are turned dense only with ``skip_held``; without it, nothing inside compiled modules is seen.
        """
        self._sparsity, self._skip_held = sparsity if sparsity > 0 or quantizes else None, skip_held

    def batch_starts(self, model: nn.Module, batch: Any) -> None:
        """Open the probes unless all is decided."""
        self.stop()  # of a batch that was skipped
        if self._sparsity is None:
            return
        self._recomputations = RecomputationProbe(model, eagerly=self._skip_held)
        self._recomputations.__enter__()
        if self._skip_held:
            self._holders = HolderProbe(model, batch, sparsity=self._sparsity)
            self._holders.__enter__()

    def backward_starts(self) -> None:
        """Look for references in Python while the graph still keeps what it needs, and nothing else does."""
        if self._holders is not None:
            self._holders.check_alive()

    def batch_ends(self, report: ConversionReport) -> list[SkippedLayer]:
        """Turn the held layers dense and return them; warn of pruned ones inside activation checkpoints.

        Not before backward is over: a checkpointed region has to run there as it did in the forward. By then references
        in Python show also for layers that kept their input themselves, at sparsity 0.

        Raises:
            MisconfigurationException: If no layer is left to prune. The fit is one step old, and would go on to save
                nothing.
        """
        holders, recomputations = self._holders, self._recomputations
        if recomputations is None:
            return []
        if holders is not None:
            holders.check_alive()
        self.stop()
        if (holders or recomputations).ran:
            self._sparsity = None
        held = [] if holders is None else holders.apply(report)
        if held and not report.converted:
            raise MisconfigurationException(
                "No layer is left to prune: the input of each is kept for backward anyway, so packing it would add "
                f"memory:\n{report.describe_skipped()}\nHINT: choose other layers with `include`, take the callback "
                "out, or prune all the same with `ActivationPruning(skip_held=False)`."
            )
        recomputed = set(recomputations.recomputed)
        _warn_of_checkpoints([layer.fqn for layer in report.converted if layer.fqn in recomputed])
        return held

    def stop(self) -> None:
        """Close the probes, whatever happened in the step."""
        if self._holders is not None:
            self._holders.close()
            self._holders = None
        if self._recomputations is not None:
            self._recomputations.close()
            self._recomputations = None


def _warn_of_checkpoints(names: Sequence[str]) -> None:
    if names:
        listing = ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
        rank_zero_warn(
            f"{len(names)} pruned linear layers run only inside an activation checkpoint: {listing}. Of a checkpointed "
            "region only the input is kept for backward, so pruning there costs gradient quality and saves memory for "
            "no longer than the region's own backward takes. HINT: leave these layers out with `exclude=[...]`, or do "
            "not checkpoint them."
        )
