"""What a measurement of sensitivity covers: which settings, and which layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from glob import escape
from typing import Any, NamedTuple

from torch import nn

from lightning_actprune.arguments import (
    MIN_QUANTIZED_BLOCK,
    BlockSelection,
    Scope,
    ValueFormatName,
    check_flag,
    check_sparsity,
    check_value_format,
)
from lightning_actprune.conversion_options import MIN_FEATURES, ConversionOptions
from lightning_actprune.nn.settings import PruningSettings
from lightning_actprune.ops.geometry import sparsity_parts
from lightning_actprune.ops.setting import BlockSetting
from lightning_actprune.selection import prunable_layers

SPARSITIES = (0.0, 0.3, 0.5, 0.7, 0.9)
VALUE_FORMATS: tuple[ValueFormatName, ...] = ("same", "int4", "int2")


class GridSetting(NamedTuple):
    """One way to keep an input.

    Args:
        sparsity: Fraction of blocks dropped.
        parts: The same as a layer takes it (``ops.geometry``).
        blocks: How inputs are cut into blocks and stored.
        turned_blocks: The same inside attention, where samples are the second dimension.
    """

    sparsity: float
    parts: int
    blocks: BlockSetting
    turned_blocks: BlockSetting

    @classmethod
    def of(cls, sparsity: float, blocks: BlockSetting) -> GridSetting:
        """Return the setting of a layer with this sparsity."""
        return cls(sparsity, sparsity_parts(sparsity), blocks, PruningSettings(sparsity, blocks).turned_blocks)

    @property
    def value_format(self) -> ValueFormatName:
        """How kept values are stored."""
        return self.blocks.value_format

    @property
    def is_dense(self) -> bool:
        """Whether inputs are kept as they are."""
        return self.parts == 0 and self.value_format == "same"


@dataclass(frozen=True)
class SensitivityGrid:
    """Every sparsity with every value format, and the layers for which they are measured.

    Args:
        sparsities: Fractions of blocks dropped, each in [0, 1).
        value_formats: How kept values are stored, each as in ``convert``.
        block_size: Consecutive values per block, positive; cut to the row if larger.
        scope: ``"sample"``: all blocks of a sample compete; ``"token"``: those of a row.
        block_selection: Which blocks are kept (see ``functional.linear``).
        include: Glob patterns on fully qualified names; a layer must match one.
        exclude: Glob patterns on fully qualified names; a layer must match none.
        min_features: Linear layers with fewer input features are not measured.
        convolutions: Whether convolutions are measured too, which ``others`` of ``convert`` prunes.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
    """

    sparsities: Sequence[float] = SPARSITIES
    value_formats: Sequence[ValueFormatName] = VALUE_FORMATS
    block_size: int = 32
    scope: Scope = "sample"
    block_selection: BlockSelection = "largest"
    include: Sequence[str] | str = ("*",)
    exclude: Sequence[str] | str = ()
    min_features: int = MIN_FEATURES
    convolutions: bool = False

    def __post_init__(self) -> None:
        sparsities = _several(self.sparsities, "sparsities", "[0.5, 0.8]")
        formats = _several(self.value_formats, "value_formats", "['same', 'int4']")
        object.__setattr__(self, "sparsities", tuple(check_sparsity(each, "sparsities") for each in sparsities))
        for each in formats:
            check_value_format(each, MIN_QUANTIZED_BLOCK, "value_formats")
        check_flag(self.convolutions, "convolutions")
        object.__setattr__(self, "value_formats", formats)
        object.__setattr__(self, "include", self.options.include)
        object.__setattr__(self, "exclude", self.options.exclude)
        _ = self.settings  # checks the rest

    @cached_property
    def settings(self) -> tuple[GridSetting, ...]:
        """All settings, the sparsities of one format after the other."""
        checked = [
            BlockSetting.checked(self.block_size, self.scope, each, self.block_selection) for each in self.value_formats
        ]
        return tuple(GridSetting.of(sparsity, blocks) for blocks in checked for sparsity in self.sparsities)

    @cached_property
    def options(self) -> ConversionOptions:
        """Which layers are measured."""
        return ConversionOptions(0.0, self.block_size, self.scope, self.include, self.exclude, self.min_features)

    def dense_options(self, names: Iterable[str]) -> ConversionOptions:
        """Return options that convert layers of these names to ones that keep their inputs as they are."""
        return ConversionOptions(0.0, include=[escape(name) for name in names], min_features=0)


def check_names(model: nn.Module, grid: SensitivityGrid) -> None:
    """Raise ``ValueError`` if a pattern matches no layer of ``model`` that can be pruned."""
    names = [fqn for fqns, _ in prunable_layers(model) for fqn in fqns]
    listing = ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")
    for argument, patterns in (("include", grid.options.include), ("exclude", grid.options.exclude)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"`{argument}` pattern {pattern!r} matches no layer of {type(model).__name__} that can be pruned. "
                    f"HINT: patterns match the whole name; such layers are: {listing or 'none'}."
                )


def _several(values: Any, name: str, example: str) -> tuple[Any, ...]:
    """Return ``values`` as a tuple without repetitions, one at least."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"`{name}` must be a list, got {values!r}. HINT: {name}={example} measures two.")
    if not values:
        raise ValueError(f"`{name}` must name at least one to measure, got {values!r}. HINT: {example} is a start.")
    return tuple(dict.fromkeys(values))
