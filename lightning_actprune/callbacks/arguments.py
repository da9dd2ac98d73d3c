"""What the arguments of all callbacks have in common: how errors are raised, and how much ``verbose`` prints.

``verbose`` of ``False`` or 0 prints nothing, 1 the most important once a fit, ``True`` or 2 all there is, each epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any, Literal, TypeAlias, TypeVar

from lightning.fabric.utilities.exceptions import MisconfigurationException

_Result = TypeVar("_Result")

Verbosity: TypeAlias = bool | Literal[0, 1, 2]


def checked(check: Callable[..., _Result], *arguments: Any, **named: Any) -> _Result:
    """Return ``check(*arguments, **named)``, with errors of arguments as the exception of Lightning's callbacks."""
    try:
        return check(*arguments, **named)
    except (TypeError, ValueError) as error:
        raise MisconfigurationException(str(error)) from error


def check_verbose(value: Any) -> Verbosity:
    """Return ``value`` if it says how much to print.

    Raises:
        MisconfigurationException: If it does not.
    """
    if isinstance(value, bool):
        return value
    if not isinstance(value, Integral) or value not in (0, 1, 2):
        raise MisconfigurationException(
            f"`verbose` must be a bool, 0, 1 or 2, got {value!r}. HINT: 0 (or False) prints nothing, 1 the most "
            "important once a fit, 2 (or True) all there is, in each epoch."
        )
    return int(value)  # type: ignore[return-value]


def in_detail(verbose: Verbosity) -> bool:
    """Return whether to print all there is."""
    return verbose is True or verbose == 2  # `True == 1`
