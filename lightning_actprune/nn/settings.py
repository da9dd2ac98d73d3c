"""What a pruned layer carries beside its parameters, and how it is read and set."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from lightning_actprune.arguments import BlockSelection, Scope, ValueFormatName, check_sparsity
from lightning_actprune.ops.geometry import AnyScope, sparsity_parts
from lightning_actprune.ops.setting import BlockSetting


@dataclass(frozen=True, eq=False)
class PruningSettings:
    """What a pruned layer carries beside its parameters: one plain attribute, so that reverting leaves nothing.

    ``forward`` reads the sparsity as the size of ``parts``, a tensor without memory: to ``torch.compile`` the size of a
    tensor is a symbol from its second value on, so a schedule compiles twice. A float attribute is a symbol too, but
    one from which no shape can be computed, and an int attribute of a module is a constant: each value would compile
    anew. ``turned_blocks`` is made here, not in ``forward``, for speed and because torch 2.8 compiles no ``_replace``.
    """

    sparsity: float
    blocks: BlockSetting
    owner: str | None = None
    highest: float = 0.0
    """Sparsity that a schedule will raise it to, by which layers are judged that are still at less."""
    features: tuple[int, int] | None = None
    """Sizes of input and output when it was converted: a strategy may flatten or partition its weights afterwards."""
    parts: Tensor = field(init=False, repr=False)
    turned_blocks: BlockSetting = field(init=False, repr=False)
    """For an input whose samples are its second dimension, as inside attention."""

    def __post_init__(self) -> None:
        scope: AnyScope = "sample_second" if self.blocks.scope == "sample" else "token"
        object.__setattr__(self, "turned_blocks", self.blocks._replace(scope=scope))
        parts = torch.empty(sparsity_parts(self.sparsity), 0, dtype=torch.bool, device="meta")
        object.__setattr__(self, "parts", parts)


class Converted:
    """Mixin of the classes that ``convert`` gives to modules."""

    dense_class: ClassVar[type[nn.Module]]
    """What the module is without pruning."""


class PrunedLayer(Converted):
    """Mixin of modules that prune what they keep of their input; an attention module stands for its in-projection."""

    _pruning: PruningSettings

    @property
    def sparsity(self) -> float:
        """Fraction of blocks dropped, in [0, 1)."""
        return self._pruning.sparsity

    @sparsity.setter
    def sparsity(self, value: float) -> None:
        self._pruning = replace(self._pruning, sparsity=check_sparsity(value))

    @property
    def highest_sparsity(self) -> float:
        """The highest sparsity that the layer has, or will have, in this training."""
        return max(self.sparsity, self._pruning.highest)

    def wait_at(self, sparsity: float) -> None:
        """Drop so many blocks for now; the layer is judged by what it would have dropped otherwise."""
        self._pruning = replace(self._pruning, sparsity=check_sparsity(sparsity), highest=self.highest_sparsity)

    def drop_nothing(self) -> None:
        """Keep all blocks from now on."""
        self._pruning = replace(self._pruning, sparsity=0.0, highest=0.0)

    @property
    def block_size(self) -> int:
        """Values per block."""
        return self._pruning.blocks.block_size

    @property
    def scope(self) -> Scope:
        """Within what blocks compete."""
        return cast(Scope, self._pruning.blocks.scope)

    @property
    def value_format(self) -> ValueFormatName:
        """How the values of kept blocks are stored."""
        return self._pruning.blocks.value_format

    @property
    def block_selection(self) -> BlockSelection:
        """Which blocks are kept."""
        return self._pruning.blocks.block_selection

    @property
    def packs(self) -> bool:
        """Whether what the layer keeps is not simply its input."""
        return self.sparsity > 0 or self.value_format != "same"

    @property
    def derives(self) -> bool:
        """Whether backward of the layer may use parameters of the norm before it, as ``ops.derived`` does.

        Not where FSDP gathers parameters for backward of one group of modules, which need not be that of the norm.
        """
        return "_is_fsdp_managed_module" not in self.__dict__

    @property
    def owner(self) -> str | None:
        """Who converted the layer from its dense class; ``None`` if it was built as it is."""
        return self._pruning.owner

    def describe_settings(self) -> str:
        """Return the settings as they are shown in a printed module."""
        shown = f"sparsity={self.sparsity:g}, block_size={self.block_size}, scope={self.scope!r}"
        shown += "" if self.value_format == "same" else f", value_format={self.value_format!r}"
        return shown if self.block_selection == "largest" else f"{shown}, block_selection={self.block_selection!r}"


def torch_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return what ``cls`` was before anything was converted."""
    while issubclass(cls, Converted):
        cls = cls.dense_class
    return cls


def dense_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return ``cls`` with the dense class in place of the converted one.

    ``parametrize`` and ``fully_shard`` put a class of their own on top of a layer's, made for it at run time.
    """
    if not issubclass(cls, Converted):
        return cls
    if "dense_class" in vars(cls):
        return cls.dense_class
    bases = tuple(dense_class(base) for base in cls.__bases__)
    namespace = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    converted = next(base for base in cls.__mro__ if "dense_class" in vars(base))
    return type(cls.__name__.replace(converted.__name__, cls.dense_class.__name__), bases, namespace)
