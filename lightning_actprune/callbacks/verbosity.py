"""How much a callback prints: ``verbose`` means the same to all of them.

``False`` or 0: nothing; 1: what is said once a fit; ``True`` or 2: also what is said in each epoch.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, Literal, TypeAlias

from lightning.fabric.utilities.exceptions import MisconfigurationException

Verbosity: TypeAlias = bool | Literal[0, 1, 2]


def check_verbose(value: Any) -> Verbosity:
    """Return ``value`` if it says how much to print.

    Raises:
        MisconfigurationException: If it does not.
    """
    if isinstance(value, bool):
        return value
    if not isinstance(value, Integral) or value not in (0, 1, 2):
        raise MisconfigurationException(
            f"`verbose` must be a bool, 0, 1 or 2, got {value!r}. HINT: 0 (or False) prints nothing, 1 what is said "
            "once a fit, 2 (or True) also what is said in each epoch."
        )
    return int(value)  # type: ignore[return-value]


def each_epoch(verbose: Verbosity) -> bool:
    """Return whether to print what is said in each epoch."""
    return verbose is True or verbose == 2  # `True == 1`
