"""Short glob patterns for layers that are to have the same setting."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from fnmatch import fnmatchcase
from glob import escape
from itertools import combinations
from typing import TypeVar

_Value = TypeVar("_Value")


def grouped(wanted: Mapping[str, _Value | None], needed: Container[str] | None = None) -> dict[str, _Value]:
    """Return patterns that give each name its value, and match no name of which that is ``None``.

    ``needed``: names that must have a pattern, all by default; others may go without.

    Names that differ in nothing but indices share a pattern, such as ``"blocks.*.fc1"``, if no other value is in the
    way; of several, the one with the most stars. No name matches patterns of different values, so that their order
    says nothing.

    Example:
        >>> grouped({"blocks.0.fc1": 0.5, "blocks.1.fc1": 0.5, "blocks.0.fc2": 0.8, "blocks.1.fc2": 0.7, "head": None})
        {'blocks.*.fc1': 0.5, 'blocks.0.fc2': 0.8, 'blocks.1.fc2': 0.7}
    """
    found: dict[str, _Value] = {}
    for name, value in wanted.items():
        if value is None or (needed is not None and name not in needed):
            continue
        if not any(fnmatchcase(name, pattern) for pattern in found):
            found[_widest(name, value, wanted)] = value
    return found


def _widest(name: str, value: _Value, wanted: Mapping[str, _Value | None]) -> str:
    """Return the pattern with the most stars that matches ``name`` and no name of another value."""
    for pattern in _patterns(name):
        matched = [other for other in wanted if fnmatchcase(other, pattern)]
        if len(matched) > 1 and all(wanted[other] == value for other in matched):
            return pattern
    return escape(name)


def _patterns(name: str) -> Iterator[str]:
    """Yield ``name`` with stars in place of its indices, of all of them first; never a star alone."""
    parts = name.split(".")
    indices = [place for place, part in enumerate(parts) if part.isdigit()]
    for stars in range(min(len(indices), len(parts) - 1), 0, -1):
        for chosen in combinations(indices, stars):
            yield ".".join("*" if place in chosen else escape(part) for place, part in enumerate(parts))
