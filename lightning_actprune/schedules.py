"""Sparsity as a pure function of training progress.

A schedule holds numbers only and keeps no state: the same progress always gives the same sparsity, so a resumed run
continues where it left off without anything being restored.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from numbers import Real
from typing import Any

from lightning_actprune.arguments import check_sparsity

__all__ = ["ConstantSchedule", "CubicSchedule", "LinearSchedule", "SparsitySchedule"]


class SparsitySchedule(ABC):
    """Sparsity as a function of progress; subclass it for a shape of your own.

    Example:
        >>> class Halfway(SparsitySchedule):
        ...     def __call__(self, progress: float) -> float:
        ...         return 0.0 if progress < 0.5 else 0.6
        >>> Halfway()(0.75)
        0.6
    """

    @abstractmethod
    def __call__(self, progress: float) -> float:
        """Return the sparsity in [0, 1) at ``progress`` in [0, 1], the fraction of training that is done."""

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({numbers})"


class ConstantSchedule(SparsitySchedule):
    """The same sparsity throughout.

    Args:
        sparsity: Fraction of blocks dropped, in [0, 1).

    Raises:
        TypeError: If the argument is no number.
        ValueError: If the argument is out of range.
    """

    def __init__(self, sparsity: float) -> None:
        self.sparsity = check_sparsity(sparsity)

    def __call__(self, progress: float) -> float:
        """Return the sparsity."""
        return self.sparsity


class _Ramp(SparsitySchedule):
    """A way from ``start`` to ``end`` between the progress values ``warmup`` and ``until``."""

    def __init__(self, end: float, start: float = 0.0, warmup: float = 0.0, until: float = 1.0) -> None:
        self.end = check_sparsity(end, "end")
        self.start = check_sparsity(start, "start")
        self.warmup = _check_fraction(warmup, "warmup")
        self.until = _check_fraction(until, "until")
        if self.until <= self.warmup:
            raise ValueError(
                f"`until` must be greater than `warmup`, got until={until!r} and warmup={warmup!r}. HINT: the sparsity "
                "moves between the two; for one jump write your own SparsitySchedule."
            )

    def _travelled(self, progress: float) -> float:
        """Return the fraction of the ramp, in [0, 1], that lies behind ``progress``."""
        return min(max((progress - self.warmup) / (self.until - self.warmup), 0.0), 1.0)


class LinearSchedule(_Ramp):
    """A straight ramp from ``start`` to ``end``.

    Args:
        end: Sparsity after the ramp, in [0, 1).
        start: Sparsity before the ramp, in [0, 1).
        warmup: Progress at which the ramp begins, in [0, 1): ``0.1`` is a tenth of the training.
        until: Progress at which the ramp ends, in (warmup, 1].

    Raises:
        TypeError: If an argument is no number.
        ValueError: If an argument is out of range.

    Example:
        >>> schedule = LinearSchedule(end=0.5, warmup=0.2, until=0.6)
        >>> [round(schedule(p), 3) for p in (0.0, 0.2, 0.4, 1.0)]
        [0.0, 0.0, 0.25, 0.5]
    """

    def __call__(self, progress: float) -> float:
        """Return the sparsity at ``progress``."""
        travelled = self._travelled(progress)
        return self.start * (1.0 - travelled) + self.end * travelled


class CubicSchedule(_Ramp):
    """A ramp from ``start`` to ``end`` that is steep at first and levels off.

    With ``r`` the travelled fraction of the ramp, ``s = end + (start - end) (1 - r)^3``: Zhu & Gupta, "To prune, or not
    to prune", arXiv:1710.01878, equation 1.

    Args:
        end: Sparsity after the ramp, in [0, 1).
        start: Sparsity before the ramp, in [0, 1).
        warmup: Progress at which the ramp begins, in [0, 1): ``0.1`` is a tenth of the training.
        until: Progress at which the ramp ends, in (warmup, 1].

    Raises:
        TypeError: If an argument is no number.
        ValueError: If an argument is out of range.

    Example:
        >>> schedule = CubicSchedule(end=0.8)
        >>> [round(schedule(p), 3) for p in (0.0, 0.5, 1.0)]
        [0.0, 0.7, 0.8]
    """

    def __call__(self, progress: float) -> float:
        """Return the sparsity at ``progress``."""
        return self.end + (self.start - self.end) * (1.0 - self._travelled(progress)) ** 3


def _check_fraction(value: Any, name: str) -> float:
    """Return ``value`` as a float in [0, 1], a point of the training."""
    hint = "HINT: it is a fraction of the whole training, not a number of steps; 0.1 is a tenth of it."
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a number in [0, 1], got {value!r} of type {type(value).__name__}. {hint}")
    number = float(value)
    if math.isnan(number) or not 0.0 <= number <= 1.0:
        raise ValueError(f"`{name}` must be in [0, 1], got {value!r}. {hint}")
    return number
