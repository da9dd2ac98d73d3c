"""Which cases of a test are quick, which ones are left to the slow tests, and which need a newer torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from packaging.version import Version

from lightning_actprune.compiled.scope import why_not

needs_passes = pytest.mark.skipif(why_not() is not None, reason="passes over joint graphs are of torch 2.10 and newer")

newer_norms = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.9"),
    reason="torch 2.8 composes an RMSNorm of operations, and backward of its GroupNorm may crash",
)


def quick(names: Iterable[Any], *few: Any) -> list[Any]:
    """Return all names for ``parametrize``, or tuples of them, of which only ``few`` are no slow tests."""
    found = list(names)
    assert all(name in found for name in few)
    slow = (name if isinstance(name, tuple) else (name,) for name in found)
    return [
        name if name in few else pytest.param(*values, marks=pytest.mark.slow)
        for name, values in zip(found, slow, strict=True)
    ]


def one_in(count: int, names: Iterable[Any]) -> list[Any]:
    """Return all names for ``parametrize``, of which one in ``count`` is no slow test."""
    found = list(names)
    return quick(found, *found[::count])
