"""What a layer carries beside its parameters if it keeps its input, or its derivative, in few bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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
    """What the module is: an ``"activation"`` function, a ``"norm"`` or a layer ``"scale"``."""
    replaced: ClassVar[str | None] = None
    """Name of a child that the converted layer computes itself, and does not call."""
    stores: ClassVar[bool] = True
    """Whether the layer keeps anything itself; one that only runs the layers in it in another way is not listed."""
    _few_bit: FewBitSettings

    @property
    def value_format(self) -> ValueFormatName:
        """How values are stored."""
        return self._few_bit.value_format

    @property
    def block_size(self) -> int:
        """Values per block."""
        return self._few_bit.block_size

    @classmethod
    def refusal(cls, layer: nn.Module) -> str | None:
        """Return why ``layer``, of a class that is known, cannot become one of this class all the same."""
        return None

    def describe_settings(self) -> str:
        """Return the settings as they are shown in a printed module."""
        return f"value_format={self.value_format!r}, block_size={self.block_size}"

    def extra_repr(self) -> str:
        """Show what the dense module prints, and the settings."""
        shown: str = super().extra_repr()  # type: ignore[misc]
        return ", ".join(filter(None, (shown, self.describe_settings())))

    def takes(self, x: Tensor, weight: Tensor | None, shape: tuple[int, ...]) -> bool:
        """Return whether ``x`` ends in dimensions of ``shape`` and can be stored; what torch refuses is left to torch.

        Kernels are given addresses, and would take those of a weight that is elsewhere for their own.

        Raises:
            TypeError: If a tensor is a DTensor.
        """
        if isinstance(x, DTensor) or isinstance(weight, DTensor):
            raise TypeError(
                "A layer that keeps its input in few bits cannot take DTensors: blocks would be those of one shard. "
                "HINT: exclude tensor-parallel layers (`exclude=[...]`)."
            )
        if weight is not None and weight.device != x.device:
            return False
        return x.is_floating_point() and x.layout == torch.strided and x.shape[-len(shape) :] == shape

    @property
    def owner(self) -> str | None:
        """Who converted the layer from its dense class; ``None`` if it was built as it is."""
        return self._few_bit.owner


def hooked(module: nn.Module) -> bool:
    """Return whether anything but the forward of its class runs when ``module`` is called."""
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(own) or "forward" in module.__dict__ or _any_global_hook()


def _any_global_hook() -> bool:
    modules = torch.nn.modules.module
    return bool(
        modules._global_forward_hooks
        or modules._global_forward_pre_hooks
        or modules._global_backward_hooks
        or modules._global_backward_pre_hooks
    )
