"""What a layer is set to, beside the sparsity, which changes from step to step."""

from __future__ import annotations

from typing import Any, NamedTuple

from typing_extensions import Self

from lightning_actprune.arguments import (
    Remainder,
    ValueFormatName,
    check_block_size,
    check_remainder,
    check_scope,
    check_value_format,
)
from lightning_actprune.ops.geometry import AnyScope


class BlockSetting(NamedTuple):
    """How inputs are cut into blocks and stored: made once, when it is set, and handed on whole from there.

    Args:
        block_size: Values per block, not yet cut to a row.
        scope: Within what blocks compete.
        value_format: How the values of kept blocks are stored (``ops.formats``).
        remainder: What dropped blocks leave behind (``ops.remainder``).
    """

    block_size: int
    scope: AnyScope
    value_format: ValueFormatName = "same"
    remainder: Remainder = "zero"

    @classmethod
    def checked(cls, block_size: Any, scope: Any, value_format: Any, remainder: Any) -> Self:
        """Return the setting that a user asks for.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If an argument is out of range.
        """
        block_size, scope = check_block_size(block_size), check_scope(scope)
        return cls(block_size, scope, check_value_format(value_format, block_size), check_remainder(remainder))
