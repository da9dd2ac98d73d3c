"""What a layer is set to, beside the sparsity, which changes from step to step."""

from __future__ import annotations

from typing import Any, NamedTuple

from typing_extensions import Self

from lightning_actprune.arguments import (
    BlockSelection,
    ValueFormatName,
    check_block_selection,
    check_block_size,
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
        block_selection: Which blocks are kept (``ops.block_selection``).
    """

    block_size: int
    scope: AnyScope
    value_format: ValueFormatName = "same"
    block_selection: BlockSelection = "largest"

    @classmethod
    def checked(cls, block_size: Any, scope: Any, value_format: Any, block_selection: Any) -> Self:
        """Return the setting that a user asks for.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If an argument is out of range.
        """
        block_size, scope = check_block_size(block_size), check_scope(scope)
        value_format = check_value_format(value_format, block_size)
        return cls(block_size, scope, value_format, check_block_selection(block_selection))
