"""Probe the first training batch of a fit for layers whose input is kept for backward anyway."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_actprune.conversion import ConversionReport, SkippedLayer
from lightning_actprune.holders import HolderProbe


class FirstBatchProbe:
    """Decides once in a fit, in the first training batch that runs a forward, which layers are left dense."""

    def __init__(self) -> None:
        self._sparsity = 0.0
        self._probe: HolderProbe | None = None

    def fit_starts(self, sparsity: float) -> None:
        """Probe the next batch for layers that will have up to ``sparsity``; 0 probes none."""
        self._sparsity = sparsity

    def batch_starts(self, model: nn.Module, batch: Any) -> None:
        """Open the probe unless all is decided."""
        self.stop()  # of a batch that was skipped
        if self._sparsity > 0:
            self._probe = HolderProbe(model, batch, sparsity=self._sparsity)
            self._probe.__enter__()

    def backward_starts(self) -> None:
        """Look for references in Python while the graph still keeps what it needs, and nothing else does."""
        if self._probe is not None:
            self._probe.check_alive()

    def batch_ends(self, report: ConversionReport) -> list[SkippedLayer]:
        """Turn the held layers dense and return them.

        Not before backward is over: a checkpointed region has to run there as it did in the forward. By then references
        in Python show also for layers that kept their input themselves, at sparsity 0.

        Raises:
            MisconfigurationException: If no layer is left to prune. The fit is one step old, and would go on to save
                nothing.
        """
        probe = self._probe
        if probe is None:
            return []
        probe.check_alive()
        self.stop()
        if probe.ran:
            self._sparsity = 0.0
        held = probe.apply(report)
        if held and not report.converted:
            raise MisconfigurationException(
                "No layer is left to prune: the input of each is kept for backward anyway, so packing it would add "
                f"memory:\n{report.describe_skipped()}\nHINT: choose other layers with `include`, take the callback "
                "out, or prune all the same with `ActivationPruning(skip_held=False)`."
            )
        return held

    def stop(self) -> None:
        """Close the probe, whatever happened in the step."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None
