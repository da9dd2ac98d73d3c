"""Sparsity as a pure function of training progress.

A schedule holds numbers only and has no state. The same progress always gives the same sparsity, so a resumed run
continues where it stopped and nothing has to be restored.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from numbers import Real
from typing import Any

__all__ = [
    "ConstantSchedule",
    "CosineSchedule",
    "CubicSchedule",
    "LinearSchedule",
    "SparsitySchedule",
    "StepSchedule",
]


class SparsitySchedule(ABC):
    """Sparsity as a function of progress; subclass it for your own shape.

    Example:
        >>> class Halfway(SparsitySchedule):
        ...     def __call__(self, progress: float) -> float:
        ...         return 0.0 if progress < 0.5 else 0.6
        >>> Halfway()(0.75)
        0.6
    """

    @abstractmethod
    def __call__(self, progress: float) -> float:
        """Return the sparsity in [0, 1) at ``progress`` in [0, 1], the completed fraction of training."""

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({numbers})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(repr(self))


class ConstantSchedule(SparsitySchedule):
    """The same sparsity throughout.

    Args:
        sparsity: Fraction of blocks dropped, in [0, 1).

    Raises:
        TypeError: If the argument is not a number.
        ValueError: If the argument is out of range.
    """

    def __init__(self, sparsity: float) -> None:
        self.sparsity = check_sparsity(sparsity)

    def __call__(self, progress: float) -> float:
        """Return the sparsity."""
        return self.sparsity


class _Ramp(SparsitySchedule):
    """A ramp from ``start`` to ``end`` between the progress values ``warmup`` and ``until``."""

    def __init__(self, end: float, start: float = 0.0, warmup: float = 0.0, until: float = 1.0) -> None:
        self.end = check_sparsity(end, "end")
        self.start = check_sparsity(start, "start")
        self.warmup = _check_fraction(warmup, "warmup")
        self.until = _check_fraction(until, "until")
        if self.until <= self.warmup:
            raise ValueError(
                f"`until` must be greater than `warmup`, got until={until!r} and warmup={warmup!r}. HINT: the sparsity "
                "moves between the two; StepSchedule jumps."
            )

    def _ramp_fraction(self, progress: float) -> float:
        """Return the completed fraction of the ramp at ``progress``, in [0, 1]."""
        return min(max((progress - self.warmup) / (self.until - self.warmup), 0.0), 1.0)


class LinearSchedule(_Ramp):
    """A straight ramp from ``start`` to ``end``.

    Args:
        end: Sparsity after the ramp, in [0, 1).
        start: Sparsity before the ramp, in [0, 1).
        warmup: Progress at which the ramp begins, in [0, 1): ``0.1`` is a tenth of the training.
        until: Progress at which the ramp ends, in (warmup, 1].

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is out of range.

    Example:
        >>> schedule = LinearSchedule(end=0.5, warmup=0.2, until=0.6)
        >>> [round(schedule(p), 3) for p in (0.0, 0.2, 0.4, 1.0)]
        [0.0, 0.0, 0.25, 0.5]
    """

    def __call__(self, progress: float) -> float:
        """Return the sparsity at ``progress``."""
        done = self._ramp_fraction(progress)
        return self.start * (1.0 - done) + self.end * done


class CubicSchedule(_Ramp):
    """A ramp from ``start`` to ``end`` that is steep at first and levels off.

    With ``r`` the completed fraction of the ramp, ``s = end + (start - end) (1 - r)^3``: Zhu & Gupta, "To prune, or not
    to prune", arXiv:1710.01878, equation 1.

    Args:
        end: Sparsity after the ramp, in [0, 1).
        start: Sparsity before the ramp, in [0, 1).
        warmup: Progress at which the ramp begins, in [0, 1): ``0.1`` is a tenth of the training.
        until: Progress at which the ramp ends, in (warmup, 1].

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is out of range.

    Example:
        >>> schedule = CubicSchedule(end=0.8)
        >>> [round(schedule(p), 3) for p in (0.0, 0.5, 1.0)]
        [0.0, 0.7, 0.8]
    """

    def __call__(self, progress: float) -> float:
        """Return the sparsity at ``progress``."""
        return self.end + (self.start - self.end) * (1.0 - self._ramp_fraction(progress)) ** 3


class CosineSchedule(_Ramp):
    """A ramp from ``start`` to ``end`` along half a cosine: slow at both ends and steepest halfway.

    With ``r`` the completed fraction of the ramp, ``s = start + (end - start) (1 - cos(pi r)) / 2``.

    Args:
        end: Sparsity after the ramp, in [0, 1).
        start: Sparsity before the ramp, in [0, 1).
        warmup: Progress at which the ramp begins, in [0, 1): ``0.1`` is a tenth of the training.
        until: Progress at which the ramp ends, in (warmup, 1].

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is out of range.

    Example:
        >>> schedule = CosineSchedule(end=0.8)
        >>> [round(schedule(p), 3) for p in (0.0, 0.25, 0.5, 1.0)]
        [0.0, 0.117, 0.4, 0.8]
    """

    def __call__(self, progress: float) -> float:
        """Return the sparsity at ``progress``."""
        weight = (1.0 - math.cos(math.pi * self._ramp_fraction(progress))) / 2.0
        return self.start * (1.0 - weight) + self.end * weight


class StepSchedule(SparsitySchedule):
    """Jumps from one sparsity to the next.

    Args:
        sparsities: The sparsities in order, each in [0, 1); one more than there are jumps.
        at: Progress of each jump, increasing, in (0, 1): ``0.5`` is halfway. The new sparsity holds from there on.

    Raises:
        TypeError: If an argument is not a list of numbers.
        ValueError: If a number is out of range, or the lengths do not match.

    Example:
        >>> schedule = StepSchedule(sparsities=[0.0, 0.5, 0.8], at=[0.1, 0.5])
        >>> [schedule(p) for p in (0.0, 0.1, 0.4, 0.5, 1.0)]
        [0.0, 0.5, 0.5, 0.8, 0.8]
    """

    def __init__(self, sparsities: Sequence[float], at: Sequence[float]) -> None:
        hint = "HINT: `sparsities=[0.0, 0.5, 0.8], at=[0.1, 0.5]` jumps after a tenth and halfway."
        arguments: dict[str, Any] = {"sparsities": sparsities, "at": at}
        for name, values in arguments.items():
            if isinstance(values, str) or not isinstance(values, Sequence):
                raise TypeError(f"`{name}` must be a list of numbers, got {values!r}. {hint}")
        self.sparsities = [check_sparsity(value, f"sparsities[{i}]") for i, value in enumerate(sparsities)]
        self.at = [_check_fraction(value, f"at[{i}]") for i, value in enumerate(at)]
        points = [0.0, *self.at, 1.0]
        if any(later <= earlier for earlier, later in pairwise(points)):
            raise ValueError(f"`at` must be numbers in (0, 1) that increase, got {list(at)!r}. {hint}")
        if len(self.sparsities) != len(self.at) + 1:
            raise ValueError(
                f"`sparsities` must have one number more than `at`, got {len(self.sparsities)} and {len(self.at)}. "
                f"{hint}"
            )

    def __call__(self, progress: float) -> float:
        """Return the sparsity at ``progress``."""
        return self.sparsities[bisect_right(self.at, progress)]


def sparsity_at(sparsity: float | SparsitySchedule, progress: float) -> float:
    """Return the sparsity of a schedule at ``progress`` in [0, 1]; a number is returned unchanged.

    Raises:
        TypeError: If the schedule does not return a number.
        ValueError: If the schedule returns a number outside [0, 1).
    """
    if not isinstance(sparsity, SparsitySchedule):
        return sparsity
    return check_sparsity(sparsity(progress), f"{sparsity!r}({progress:g})")


def highest_sparsity(sparsity: float | SparsitySchedule) -> float:
    """Return the highest sparsity of a training, sampled at 1001 points and at the jumps of a ``StepSchedule``."""
    return max(_list_sparsities(sparsity))


def lowest_sparsity(sparsity: float | SparsitySchedule) -> float:
    """Return the lowest sparsity of a training, sampled in the same way."""
    return min(_list_sparsities(sparsity))


def _list_sparsities(sparsity: float | SparsitySchedule) -> list[float]:
    if not isinstance(sparsity, SparsitySchedule):
        return [sparsity]
    jumps = sparsity.at if isinstance(sparsity, StepSchedule) else []
    return [sparsity_at(sparsity, progress) for progress in (*(part / 1000 for part in range(1001)), *jumps)]


def check_sparsity(value: Any, name: str = "sparsity") -> float:
    """Return ``value`` as a float in [0, 1), the fraction of blocks to drop."""
    hint = (
        "the fraction of blocks dropped, not a percentage; 0 keeps everything (the dense layer), 0.6 drops 60 %. Pass "
        "a SparsitySchedule if it changes in training."
    )
    return _check_number(value, name, "[0, 1)", hint)


def _check_fraction(value: Any, name: str) -> float:
    """Return ``value`` as a float in [0, 1], a point of the training."""
    return _check_number(value, name, "[0, 1]", "a fraction of the training, not a number of steps; 0.1 is a tenth.")


def _check_number(value: Any, name: str, interval: str, hint: str) -> float:
    """Return ``value`` as a float if it is in ``interval``, which is ``"[0, 1]"`` or ``"[0, 1)"``."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"`{name}` must be a number in {interval}, got {value!r} of type {type(value).__name__}. HINT: it is {hint}"
        )
    number = float(value)
    if not 0.0 <= number <= 1.0 or (number == 1.0 and interval == "[0, 1)"):
        raise ValueError(f"`{name}` must be in {interval}, got {value!r}. HINT: it is {hint}")
    return number
