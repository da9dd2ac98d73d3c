"""Probe the first training batch of a fit for layers that are better not pruned.

Layers whose input is kept for backward anyway are turned dense, and those whose dropped blocks would hold too much of
the input's energy drop none. Of those inside an activation checkpoint a warning tells: which of the two to leave out is
the user's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_actprune.callbacks.verdict import Findings, Verdict, check_left
from lightning_actprune.conversion_report import ConversionReport, ConvertedLayer
from lightning_actprune.energy import EnergyProbe, keep_blocks
from lightning_actprune.holders import HolderProbe
from lightning_actprune.recomputed import RecomputationProbe

_MAX_NAMES = 8
"""Layers that the warning names."""


class Questions(NamedTuple):
    """What the first batch shall show.

    Args:
        sparsity: Highest sparsity that any of the layers will have.
        skip_held: Whether to turn held layers dense; without it, nothing inside compiled modules is seen.
        max_dropped_energy: Largest share of an input's energy that dropped blocks may hold.
    """

    sparsity: float
    skip_held: bool
    max_dropped_energy: float


class FirstBatchProbe:
    """Decides once, in the first training batch that runs a forward, which layers are left dense.

    Args:
        max_dropped_energy: Largest share of an input's energy that dropped blocks may hold.
        skip_held: Whether to turn held layers dense; without it, nothing inside compiled modules is seen.
    """

    def __init__(self, max_dropped_energy: float, skip_held: bool) -> None:
        self._max_dropped_energy, self._skip_held = max_dropped_energy, skip_held
        self.verdict = Verdict()
        self._questions: Questions | None = None
        self._holders: HolderProbe | None = None
        self._energy: EnergyProbe | None = None
        self._recomputations: RecomputationProbe | None = None

    @property
    def undecided(self) -> bool:
        """Whether this batch or the next will be probed: whoever keeps inputs alive in it is taken for a holder."""
        return self._questions is not None

    @property
    def judges_energy(self) -> bool:
        """Whether the next batch will show which layers drop nothing; not if a checkpoint has told."""
        return self.undecided and self._max_dropped_energy < 1 and self.verdict.spread is None

    def ask(self, report: ConversionReport, sparsity: float) -> None:
        """Probe the next batch for what is not known yet; nothing where no layer packs.

        Args:
            report: The conversion.
            sparsity: Highest sparsity that any of the layers will have.
        """
        self._questions = None
        quantizes = any(layer.value_format != "same" for layer in report.converted)
        if not self.verdict.complete and (sparsity > 0 or quantizes):
            limit = self._max_dropped_energy if self.verdict.spread is None else 1.0
            self._questions = Questions(sparsity, self._skip_held, limit)

    def batch_starts(self, model: nn.Module, batch: Any) -> None:
        """Open the probes unless all is decided."""
        self.stop()  # of a batch that was skipped
        if self._questions is None:
            return
        sparsity, skip_held, limit = self._questions
        self._recomputations = RecomputationProbe(model, eagerly=skip_held)
        self._recomputations.__enter__()
        if limit < 1 and sparsity > 0:
            self._energy = EnergyProbe(model, limit, eagerly=skip_held)
            self._energy.__enter__()
        if skip_held:
            self._holders = HolderProbe(model, batch)
            self._holders.__enter__()

    def backward_starts(self) -> None:
        """Look for references in Python while the graph still keeps what it needs, and nothing else does."""
        if self._holders is not None:
            self._holders.check_alive()

    def batch_ends(self, trainer: pl.Trainer, model: nn.Module, report: ConversionReport) -> Findings | None:
        """Turn layers dense, or let them drop nothing; warn of pruned ones inside activation checkpoints.

        Not before backward is over: a checkpointed region has to run there as it did in the forward. By then references
        in Python show also for layers that kept their input themselves, at sparsity 0.

        Args:
            trainer: Knows the other ranks.
            model: The module that holds the layers.
            report: The conversion, which is brought up to date.

        Returns:
            What was found; ``None`` unless this was the batch that was probed.

        Raises:
            MisconfigurationException: If no layer is left to prune. The fit is one step old, and would go on to save
                nothing.
        """
        holders, energy, recomputations = self._holders, self._energy, self._recomputations
        if recomputations is None:
            return None
        if holders is not None:
            holders.check_alive()
        self.stop()
        if not (holders or recomputations).ran:
            return None
        self._questions = None
        held = [] if holders is None else holders.apply(report)
        spread: dict[str, float] = {}
        if energy is not None:
            energy.add_up(partial(sum_over_ranks, trainer))
            converted = {layer.fqn for layer in report.converted}
            spread = {name: share for name, share in energy.spread.items() if name in converted}
            keep_blocks(model, report, spread)
        check_left(report)
        recomputed = set(recomputations.recomputed)
        _warn_of_checkpoints([layer for layer in report.converted if layer.fqn in recomputed])
        found = Findings(held, spread)
        self.verdict.add(found)
        return found

    def stop(self) -> None:
        """Close the probes, whatever happened in the step."""
        for probe in (self._holders, self._energy, self._recomputations):
            if probe is not None:
                probe.close()
        self._holders = self._energy = self._recomputations = None


def sum_over_ranks(trainer: pl.Trainer, values: Tensor) -> Tensor:
    """Return the sum of ``values`` over the ranks of a distributed training."""
    total = trainer.strategy.reduce(values, reduce_op="sum")
    assert isinstance(total, Tensor)
    return total


def _warn_of_checkpoints(layers: Sequence[ConvertedLayer]) -> None:
    names = [layer.fqn for layer in layers]
    if names:
        noun = "layers" if any(layer.operator != "linear" for layer in layers) else "linear layers"
        listing = ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
        rank_zero_warn(
            f"{len(names)} pruned {noun} run only inside an activation checkpoint: {listing}. Of a checkpointed "
            "region only the input is kept for backward, so pruning there costs gradient quality and saves memory for "
            "no longer than the region's own backward takes. HINT: leave these layers out with `exclude=[...]`, or do "
            "not checkpoint them."
        )
