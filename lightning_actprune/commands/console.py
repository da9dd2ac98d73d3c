"""How commands print."""

from __future__ import annotations

import sys

from rich.console import Console

_PIPED_WIDTH = 120


def make_console() -> Console:
    """Return a console as wide as the terminal, or ``_PIPED_WIDTH`` if the output is piped."""
    return Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)


def format_error(error: Exception) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
