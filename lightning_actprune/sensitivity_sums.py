"""What is added up while the sensitivity of one layer is measured (maths: ``sensitivity_probe``)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_actprune.conversion_report import SkippedLayer
from lightning_actprune.nn.settings import torch_class
from lightning_actprune.ops.ranked_blocks import KeptBlocks
from lightning_actprune.selection import Candidate
from lightning_actprune.sensitivity_grid import GridSetting, SensitivityGrid
from lightning_actprune.sensitivity_input import LayerInput, RankedCall
from lightning_actprune.sensitivity_report import LayerSensitivity

Pair = tuple[LayerInput, Tensor]
"""An input and the gradient of the output."""
SUMS = 5
"""Numbers that are added up for each setting."""


@dataclass
class Pending:
    """Calls of one weight in a batch: how many there were, and those whose gradient has arrived."""

    calls: int = 0
    arrived: list[Pair] = field(default_factory=list)


@dataclass(eq=False)
class MeasuredLayer:
    """A layer that is measured.

    Args:
        candidate: The layer and its names.
        grid: The settings.
        sums: Per setting ``<G, P>``, ``<P, P>``, ``<G, G>``, dropped and whole energy, fp64 ``[settings, 5]``.
        dense_bytes: Bytes of all its inputs.
        stored_bytes: The same as each setting would store them.
        pending: What waits in the current batch, by the weight that is multiplied.
        reason: Why it cannot be measured after all.
        unmeasured: Why its calls have shown nothing, if no gradient comes; ``None`` before the first one.
    """

    candidate: Candidate
    grid: SensitivityGrid
    sums: Tensor | None = None
    dense_bytes: int = 0
    stored_bytes: list[int] = field(default_factory=list)
    pending: dict[Any, Pending] = field(default_factory=dict)
    reason: str | None = None
    unmeasured: str | None = None

    @property
    def name(self) -> str:
        """The first name of the layer."""
        return self.candidate.fqns[0]

    @property
    def kind(self) -> str:
        """The class of the layer, before it was converted."""
        return torch_class(type(self.candidate.layer)).__name__

    @torch.no_grad()
    def measure(self, pending: Pending) -> None:
        """Compare the gradients of all settings with the exact one, and let go of what they were computed from."""
        arrived = [pair for pair in pending.arrived if pair[1].numel()]
        if pending.arrived and not arrived:
            self.unmeasured = "its inputs were empty"
        pending.calls, pending.arrived = 0, []
        if not arrived:
            return
        sums = self._compare(arrived)
        sums = torch.where(sums[0, 2].isfinite(), sums, 0.0)
        self.sums = sums if self.sums is None else self.sums.to(sums.device) + sums
        self.dense_bytes += sum(given.x.nbytes for given, _ in arrived)
        stored = [sum(given.stored_bytes(setting) for given, _ in arrived) for setting in self.grid.settings]
        self.stored_bytes = [a + b for a, b in zip(self.stored_bytes or [0] * len(stored), stored, strict=True)]

    def rows(self, sums: list[list[float]]) -> Iterator[LayerSensitivity]:
        """Yield what ``sums``, read, say of each setting; nothing of a layer without a gradient."""
        # Bytes are this rank's own; without any, nothing is known of the share.
        shares = [stored / self.dense_bytes for stored in self.stored_bytes] or [math.nan] * len(sums)
        for setting, (dot, pruned, exact, dropped, energy), share in zip(self.grid.settings, sums, shares, strict=True):
            if exact > 0:
                # Two roots, since the product may be no fp64 number.
                cosine = dot / (exact**0.5 * pruned**0.5) if pruned != 0 else 0.0
                found = cosine, (pruned / exact) ** 0.5, dropped / energy if energy else 0.0, share
                yield LayerSensitivity(self.name, self.kind, setting.sparsity, setting.value_format, *found)

    def skipped(self) -> SkippedLayer:
        """Return why nothing was measured."""
        # Not `sums`, which are there once those of other ranks were added.
        vanished = "its weight gradient was zero or not finite" if self.dense_bytes else None
        reason = self.reason or vanished or self.unmeasured or "it was not called"
        if not any(weight.requires_grad for weight in self.candidate.weights):
            reason = "its weight is frozen"
        return SkippedLayer(self.name, self.kind, reason)

    def _compare(self, arrived: list[Pair]) -> Tensor:
        """Return the sums of all settings."""
        settings = self.grid.settings
        calls = [given.ranked(grad_y, settings[0]) for given, grad_y in arrived]
        exact = _total(call.exact() for call in calls)
        products: dict[GridSetting, list[Tensor]] = {}
        energies: dict[int, Tensor] = {}
        for parts in {setting.parts: None for setting in settings}:
            kept = [call.blocks.kept(parts) for call in calls]  # for all formats
            energies[parts] = torch.stack([call.blocks.energy(parts) for call in calls]).sum(0, dtype=torch.float64)
            for setting in settings:
                if setting.parts == parts:
                    pruned = exact if setting.is_dense else _pruned(calls, kept, setting.value_format)
                    products[setting] = [_dot(exact, pruned), _dot(pruned, pruned)]
        dots = torch.stack([product for setting in settings for product in products[setting]]).view(-1, 2)
        squares = _dot(exact, exact).expand(len(settings), 1)
        return torch.cat([dots, squares, torch.stack([energies[setting.parts] for setting in settings])], dim=1)


def _pruned(calls: list[RankedCall], kept: list[KeptBlocks], value_format: str) -> Tensor:
    """Return the weight gradient of all calls as training computes it."""
    return _total(call.pruned(blocks, value_format) for call, blocks in zip(calls, kept, strict=True))


def _total(grads: Iterable[Tensor]) -> Tensor:
    """Return the sum of tensors, of which two are in memory at once."""
    return functools.reduce(torch.add, grads)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dtype=torch.float64)
