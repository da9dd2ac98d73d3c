"""What a layer carries beside its parameters if it keeps its input, or its derivative, in few bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_actprune.arguments import OtherOperator, ValueFormatName
from lightning_actprune.nn.settings import Converted


@dataclass(frozen=True, eq=False)
class FewBitSettings:
    """How a layer stores what it keeps for backward: one plain attribute, so that reverting leaves nothing.

    Args:
        value_format: How values are stored, not ``"same"``.
        block_size: Values per block.
        owner: Who converted the layer from its dense class; ``None`` if it was built as it is.
    """

    value_format: ValueFormatName
    block_size: int = 32
    owner: str | None = None


class FewBitLayer(Converted):
    """Mixin of modules that keep all of what backward needs, but in few bits; nothing of it is dropped."""

    operator: ClassVar[OtherOperator]
    """What the module is: an ``"activation"`` function, an ``"affine"`` layer or a ``"norm"``."""
    _few_bit: FewBitSettings

    @property
    def value_format(self) -> ValueFormatName:
        """How values are stored."""
        return self._few_bit.value_format

    @property
    def block_size(self) -> int:
        """Values per block."""
        return self._few_bit.block_size

    def describe_settings(self) -> str:
        """Return the settings as they are shown in a printed module."""
        return f"value_format={self.value_format!r}, block_size={self.block_size}"

    @property
    def owner(self) -> str | None:
        """Who converted the layer from its dense class; ``None`` if it was built as it is."""
        return self._few_bit.owner
