"""What a first batch has shown of the layers of a model, and what is done about it."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_actprune.conversion_report import ConversionReport, SkippedLayer
from lightning_actprune.energy import keep_blocks
from lightning_actprune.holders import leave_dense


class Findings(NamedTuple):
    """What the first batch has shown and what was done about it.

    Args:
        held: Layers turned dense, since something else keeps their input.
        spread: Share of the energy that was to be dropped, by the name of the layers that drop nothing for it.
    """

    held: list[SkippedLayer]
    spread: dict[str, float]


class Verdict:
    """What a first batch has shown of the layers, and for how long it holds."""

    def __init__(self) -> None:
        self.layers: list[str] = []
        """Names of the layers that were converted, whatever was found of them."""
        self.spread: dict[str, float] | None = None
        """Share of the energy that was to be dropped, of the layers that drop none for it; ``None`` if not judged."""
        self._held: list[SkippedLayer] = []
        self._judged: frozenset[str] = frozenset()
        self._tried: weakref.ref[nn.Module] | None = None

    def fit_begins(self, model: nn.Module) -> None:
        """Forget all, unless it was found in trials of ``model`` that no training has followed yet."""
        if self._tried is None or self._tried() is not model:
            self.forget()

    def forget(self) -> None:
        """Forget all."""
        self.spread, self._held, self._judged, self._tried = None, [], frozenset(), None

    def end_with_the_fit(self) -> None:
        """Let what was found hold for this fit only."""
        self._tried = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_tried": None}  # a copy of the model is another one

    def add(self, found: Findings) -> None:
        """Take note of what was found of the layers."""
        self.spread = (self.spread or {}) | found.spread
        self._held += found.held
        self._judged |= set(self.layers)

    def add_trial_of(self, model: nn.Module) -> None:
        """Let what was found hold for the next training of ``model``, in this fit or, after ``Tuner``, in another."""
        self._tried = weakref.ref(model)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to be found out of the layers."""
        return bool(self.layers) and self._judged.issuperset(self.layers)

    def apply(self, model: nn.Module, report: ConversionReport) -> None:
        """Change layers that were converted anew as it was found."""
        self.layers = [layer.fqn for layer in report.converted]
        self._change(model, report)

    def restore(self, model: nn.Module, report: ConversionReport, spread: dict[str, float]) -> None:
        """Go on with what was found before a checkpoint."""
        self.spread = spread
        self._change(model, report)
        check_left(report)

    def _change(self, model: nn.Module, report: ConversionReport) -> None:
        leave_dense(model, report, self._held)
        keep_blocks(model, report, self.spread or {})


def check_left(report: ConversionReport) -> None:
    """Raise if no layer is left to prune, and none of another operator is converted."""
    if not report.converted and not report.few_bit and report.rest is None:
        raise MisconfigurationException(
            "No layer is left to prune: packing their inputs would add memory, or drop too much of them:\n"
            f"{report.describe_skipped()}\nHINT: choose other layers with `include`, take the callback out, or prune "
            "all the same with `ActivationPruning(skip_held=False)` or a higher `max_dropped_energy`."
        )
