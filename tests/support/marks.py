"""Choose which cases of a test run by default, and which ones wait for CI or for the nightly run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def only(values: Iterable[Any], *default: Any, rest: str = "nightly") -> list[Any]:
    """Return all values for ``parametrize``; those that are not in ``default`` carry the marker ``rest``."""
    values = list(values)
    assert all(value in values for value in default), default
    return [value if value in default else _marked(value, rest) for value in values]


def pairs(*axes: Sequence[Any], rest: str = "nightly") -> list[Any]:
    """Return the product of axes for ``parametrize``; beyond a few that show each pair of values, all carry ``rest``.

    A fault that one value causes, or two values of different axes together, shows in the cases without the marker,
    of which there are about as many as the two longest axes have combinations.
    """
    product = list(itertools.product(*map(range, map(len, axes))))
    missing = {pair for case in product for pair in itertools.combinations(enumerate(case), 2)}
    chosen = set()
    while missing:
        best = max(product, key=lambda case: len(missing.intersection(itertools.combinations(enumerate(case), 2))))
        missing.difference_update(itertools.combinations(enumerate(best), 2))
        chosen.add(best)
    cases = ((case, tuple(axis[i] for axis, i in zip(axes, case, strict=True))) for case in product)
    return [values if case in chosen else _marked(values, rest) for case, values in cases]


def in_turn(values: Iterable[Any], *others: Sequence[Any]) -> list[Any]:
    """Return each value with one of each of ``others`` for ``parametrize``, which take turns."""
    return [(value, *(other[place % len(other)] for other in others)) for place, value in enumerate(values)]


def _marked(value: Any, mark: str) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=getattr(pytest.mark, mark))


def cover(*axes: Sequence[Any]) -> list[Any]:
    """Return the cases of ``pairs`` that run by default, and no others."""
    return [case for case in pairs(*axes) if type(case) is tuple]
