"""Memory over one training step: where it is highest, what it is made of, and what saving activations would change.

A step is cut at *moments*: where modules begin and end, where backward takes up a saved tensor, where a phase ends.

    M_i    most bytes in use since moment i-1, by the allocator; without one, the sum of what is counted at moment i
    A_i    bytes of the distinct storages that autograd keeps at moment i
    a_i    the least that it keeps meanwhile, min(A_(i-1), A_i); if counted, A_i

The peak of the step is max M_i. If a fraction f of the activations were not kept, it would be at most ::

    P(f) = max_i ( M_i - f a_i )

which stops falling where something else is the peak: gradients and optimizer state, say, or temporary tensors.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeAlias

from lightning_actprune.arguments import check_share

__all__ = ["Holder", "HolderGroup", "Holding", "MemoryMoment", "StepMemory"]

Phase: TypeAlias = Literal["forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = "forward", "backward", "optimizer"
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_HOLDERS_NAMED = 3


@dataclass(frozen=True)
class Holder:
    """One who keeps a storage for backward.

    Args:
        fqn: Name of the module that was running, ``""`` outside of all.
        operator: What autograd calls the operation, in snake case (``native_layer_norm``); ``None`` if backward did not
            take the tensor up.
    """

    fqn: str
    operator: str | None

    @property
    def label(self) -> str:
        """Name for tables, with numbers in module names as ``*``."""
        name = _NUMBER.sub("*", self.fqn) or "(step)"
        return f"{name} ({self.operator})" if self.operator else name


@dataclass
class Holding:
    """A storage that autograd keeps.

    Args:
        nbytes: Its size.
        packed: Whether it is part of a pruned input.
        born: Index of the first moment at which it is kept.
        freed: Index of the first moment at which it no longer is, ``None`` if it outlives the step.
        holders: All who keep it, in the order in which they saved it; it goes when the last of them lets go.
    """

    nbytes: int
    packed: bool
    born: int
    freed: int | None = None
    holders: list[Holder] = field(default_factory=list)

    def kept_at(self, moment: int) -> bool:
        """Return whether autograd keeps it at the moment of that index."""
        return self.born <= moment and (self.freed is None or moment < self.freed)

    @property
    def label(self) -> str:
        """Names of the holders, without repetitions."""
        labels = list(dict.fromkeys(holder.label for holder in self.holders))
        more = len(labels) - _HOLDERS_NAMED
        return " + ".join(labels[:_HOLDERS_NAMED]) + (f" + {more} more" if more > 0 else "")


@dataclass(frozen=True)
class HolderGroup:
    """Storages with the same holders, in corresponding modules: how many, and their bytes."""

    label: str
    packed: bool
    count: int
    nbytes: int


@dataclass
class MemoryMoment:
    """A moment of a step, and the interval since the last one.

    Args:
        phase: Part of the step that the interval belongs to.
        fqn: Name of the module whose forward or backward ran in the interval, ``""`` outside of all.
        operator: The operation whose backward ran, ``None`` in a forward.
        gradient_bytes: Distinct storages of the parameters' gradients.
        optimizer_bytes: Distinct storages of the optimizers' state.
        used_bytes: Bytes in use by the allocator, ``None`` without one.
        peak_bytes: Most bytes in use in the interval, ``None`` without an allocator to ask.
    """

    phase: Phase
    fqn: str
    operator: str | None
    gradient_bytes: int
    optimizer_bytes: int
    used_bytes: int | None = None
    peak_bytes: int | None = None


@dataclass
class StepMemory:
    """Memory over one training step.

    Args:
        parameter_bytes: Distinct storages of parameters and buffers.
        batch_bytes: Distinct storages of the batch that are no parameters.
        moments: What was in use, in order; the first is the begin of the step.
        holdings: What autograd kept.
    """

    parameter_bytes: int
    batch_bytes: int
    moments: list[MemoryMoment] = field(default_factory=list)
    holdings: list[Holding] = field(default_factory=list)

    @property
    def measured(self) -> bool:
        """Whether an allocator was asked; counted bytes leave out temporary tensors."""
        return any(moment.peak_bytes is not None for moment in self.moments)

    @functools.cached_property
    def packed_bytes(self) -> list[int]:
        """Bytes of pruned inputs kept at each moment."""
        return self._kept(holding for holding in self.holdings if holding.packed)

    @functools.cached_property
    def activation_bytes(self) -> list[int]:
        """Bytes that autograd keeps at each moment, those of pruned inputs included."""
        return self._kept(self.holdings)

    @functools.cached_property
    def interval_bytes(self) -> list[int]:
        """Most bytes in use since the moment before, for each moment (M_i of the module)."""
        peaks = [moment.peak_bytes for moment in self.moments]
        return [sum(self._parts_at(i).values()) if peak is None else peak for i, peak in enumerate(peaks)]

    def peak_in(self, phase: Phase | None = None) -> int | None:
        """Return the index of the moment whose interval has the peak of a phase, or of the step; ``None`` if empty."""
        if phase not in (None, *PHASES):
            raise ValueError(
                f"`phase` must be {', '.join(map(repr, PHASES))} or None, got {phase!r}. HINT: None is all."
            )
        found = [i for i, moment in enumerate(self.moments) if phase in (None, moment.phase)]
        return max(found, key=self.interval_bytes.__getitem__, default=None)

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use during the step; 0 without moments."""
        return max(self.interval_bytes, default=0)

    @property
    def forward_end(self) -> int:
        """Index of the last moment before the first backward, where most is kept; of the last one without backward."""
        phases = [moment.phase for moment in self.moments]
        return (phases.index("backward") if "backward" in phases else len(phases)) - 1

    def bytes_without(self, fraction: float) -> list[int]:
        """Return for each moment the most that M_i would be if that fraction of the activations were not kept."""
        check_share(fraction, "fraction")
        kept = self.activation_bytes
        lowest = [min(kept[max(i - 1, 0)], here) for i, here in enumerate(kept)] if self.measured else kept
        return [round(m - fraction * a) for m, a in zip(self.interval_bytes, lowest, strict=True)]

    def peak_without(self, fraction: float) -> int:
        """Return the most that the peak would be in bytes if that fraction of the activations were not kept."""
        return max(self.bytes_without(fraction), default=0)

    def parts(self, index: int) -> dict[str, int]:
        """Return what the bytes in use in the interval before a moment were, by kind; they add up to M_i.

        Named are the bytes at the interval's end; in a measured backward those at its begin, since an operation lets go
        of its tensors only at its end.
        """
        at = index - 1 if self.measured and self.moments[index].phase == "backward" and index > 0 else index
        parts = self._parts_at(at)
        return parts | {"other": max(self.interval_bytes[index] - sum(parts.values()), 0)}

    def groups(self, index: int) -> list[HolderGroup]:
        """Return who keeps what at a moment, largest first, corresponding modules taken together."""
        found: dict[tuple[str, bool], list[int]] = {}
        for holding in self.holdings:
            if holding.kept_at(index):
                found.setdefault((holding.label, holding.packed), []).append(holding.nbytes)
        groups = [HolderGroup(*key, len(sizes), sum(sizes)) for key, sizes in found.items()]
        return sorted(groups, key=lambda group: -group.nbytes)

    def series(self, operators: int = 5) -> dict[str, list[int]]:
        """Return bytes at each moment by kind, those kept for backward by operation: what a stacked picture shows.

        Args:
            operators: How many operations are named, those with the most bytes over the step first; the others are
                taken together. A storage with several holders counts for the first.
        """
        parts = [self._parts_at(index) for index in range(len(self.moments))]
        names = "parameters", "optimizer state", "gradients", "batch", "packed inputs"
        made = {name: [part[name] for part in parts] for name in names}
        kept: dict[str, list[Holding]] = {}
        for holding in self.holdings:
            if not holding.packed:
                kept.setdefault(holding.holders[0].operator or "not used", []).append(holding)
        lines = sorted((self._kept(holdings), name) for name, holdings in kept.items())
        lines.sort(key=lambda line: -sum(line[0]))
        made |= {name: line for line, name in lines[:operators]}
        rest = [line for line, _ in lines[operators:]]
        return made | ({"other operations": [sum(column) for column in zip(*rest, strict=True)]} if rest else {})

    def to_rows(self) -> list[dict[str, str | int | None]]:
        """Return the moments as flat rows: ``pandas.DataFrame(step.to_rows())`` is a table.

        ``activation_bytes`` is what autograd keeps, ``packed_bytes`` included; ``interval_bytes`` is M_i of the module.
        """
        kept = zip(self.activation_bytes, self.packed_bytes, self.interval_bytes, strict=True)
        same = {"parameter_bytes": self.parameter_bytes, "batch_bytes": self.batch_bytes}
        return [
            {**asdict(moment), **same, "activation_bytes": held, "packed_bytes": packed, "interval_bytes": most}
            for moment, (held, packed, most) in zip(self.moments, kept, strict=True)
        ]

    def _parts_at(self, index: int) -> dict[str, int]:
        moment, packed = self.moments[index], self.packed_bytes[index]
        return {
            "parameters": self.parameter_bytes,
            "gradients": moment.gradient_bytes,
            "optimizer state": moment.optimizer_bytes,
            "batch": self.batch_bytes,
            "packed inputs": packed,
            "other saved tensors": self.activation_bytes[index] - packed,
        }

    def _kept(self, holdings: Iterable[Holding]) -> list[int]:
        changes = [0] * (len(self.moments) + 1)
        for holding in holdings:
            changes[min(holding.born, len(self.moments))] += holding.nbytes
            if holding.freed is not None:
                changes[min(holding.freed, len(self.moments))] -= holding.nbytes
        kept, total = [], 0
        for change in changes[:-1]:
            total += change
            kept.append(total)
        return kept
