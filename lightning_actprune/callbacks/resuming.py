"""What a checkpoint says of the settings it was made with, in primitives, and whether they are still the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_actprune.conversion_options import ConversionOptions

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""In what Python prints of a function or an object that does not say how: another one in each process."""


def settings_state(options: ConversionOptions) -> dict[str, Any]:
    """Return the settings; mappings whose order counts as lists of pairs."""
    sparsity: Any = options.sparsity
    if options.schedule is not None:
        sparsity = _described(options.schedule)
    elif isinstance(sparsity, Mapping):
        sparsity = [[pattern, number] for pattern, number in sparsity.items()]
    return {
        "sparsity": sparsity,
        "block_size": options.block_size,
        "scope": options.scope,
        "value_format": options.value_format,
        "block_selection": options.block_selection,
        "others": dict(options.other_formats),
        "settings_by_name": [[pattern, _described(own)] for pattern, own in options.settings_by_name.items()],
        "exclude_first": options.exclude_first,
        "exclude_last": options.exclude_last,
    }


def _described(value: object) -> str:
    return _ADDRESS.sub("", repr(value))


def warn_of_other_settings(owner: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Warn of what is in both states and differs."""
    changes = [f"{name}: {then[name]!r} -> {now[name]!r}" for name in now if name in then and then[name] != now[name]]
    if changes:
        rank_zero_warn(
            f"{owner} continues a checkpoint made with other settings ({'; '.join(changes)}) and goes on "
            "with the new ones. HINT: give the callback its old arguments if this is not intended."
        )
