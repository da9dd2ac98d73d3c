"""Which settings a measurement of sensitivity looks at, and of which layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, get_args

from torch import nn

from lightning_actprune.analysis.recorder import (
    input_layers,
)
from lightning_actprune.codec.blocks import (
    Blocks,
)
from lightning_actprune.config import (
    TYPE,
    Config,
    Keep,
    Operator,
    Selection,
    TopkOver,
    check_bits,
    drops_blocks,
    matches,
    shorten,
)
from lightning_actprune.operators.base import LayerState
from lightning_actprune.schedules import check_sparsity

SPARSITIES = (0.0, 0.3, 0.5, 0.7, 0.9)
BITS: tuple[int | None, ...] = (None, 4, 2)
LINEAR = ("type:linear",)
ANY = Keep(sparsity=0.5)
"""In a configuration that says no more than which layers there are."""


class GridSetting(NamedTuple):
    """One way to keep an input.

    Args:
        keep: What a rule would say.
        sparsity: Its sparsity.
        parts: The same as a layer takes it (``codec.blocks.sparsity_parts``).
        blocks: How inputs are cut into blocks and stored.
        turned_blocks: The same inside attention, where samples are the second dimension.
    """

    keep: Keep
    sparsity: float
    parts: int
    blocks: Blocks
    turned_blocks: Blocks

    @classmethod
    def of(cls, keep: Keep) -> GridSetting:
        """Return the setting of a layer that is kept so."""
        assert isinstance(keep.sparsity, float)
        state = LayerState(keep, keep.sparsity)
        return cls(keep, keep.sparsity, state.parts.size(0), state.blocks, state.turned_blocks)


@dataclass(frozen=True)
class SensitivityGrid:
    """Every sparsity with every number of bits, and the layers for which they are measured.

    Args:
        sparsities: Fractions of blocks dropped, each in [0, 1).
        bits: Bits of each kept value, 2, 3, 4 or 8, or ``None`` for values as they are.
        block_size: Consecutive values per block, positive; cut to the row if larger.
        topk_over: ``"sample"``: all blocks of a sample compete; ``"token"``: those of a row.
        selection: Which blocks are kept (see ``codec.blocks``).
        names: Which linear layers and convolutions are measured: patterns as in rules; ``"type:linear"`` are those that
            presets cover.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
    """

    sparsities: Sequence[float] = SPARSITIES
    bits: Sequence[int | None] = BITS
    block_size: int = 32
    topk_over: TopkOver = "sample"
    selection: Selection = "largest"
    names: Sequence[str] | str = LINEAR

    def __post_init__(self) -> None:
        sparsities = _several(self.sparsities, "sparsities", "[0.5, 0.8]")
        bits = _several(self.bits, "bits", "[None, 4]")
        names = _several([self.names] if isinstance(self.names, str) else self.names, "names", "['blocks.*.fc1']")
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"`names` must be patterns, got {name!r}. HINT: such as 'blocks.*.fc1', 'type:linear'.")
        object.__setattr__(self, "sparsities", tuple(check_sparsity(each, "sparsities") for each in sparsities))
        object.__setattr__(self, "bits", tuple(check_bits(each, "bits") for each in bits))
        object.__setattr__(self, "names", names)
        _ = self.settings  # checks the rest

    @cached_property
    def settings(self) -> tuple[GridSetting, ...]:
        """All settings, the sparsities of one number of bits after the other."""
        stored = self.block_size, self.topk_over, self.selection
        return tuple(
            GridSetting.of(Keep(bits, sparsity, *stored)) for bits in self.bits for sparsity in self.sparsities
        )

    @cached_property
    def config(self) -> Config:
        """Which layers are measured: those that it would convert."""
        by_name: dict[str, Keep | None] = {name: ANY for name in self.names if not name.startswith(TYPE)}
        by_type: dict[str, Keep | None] = {TYPE + each: None for each in get_args(Operator)}
        by_type |= {name: ANY for name in self.names if name.startswith(TYPE)}
        if by_type[LINEAR[0]] is not None:
            del by_type[LINEAR[0]]  # as the preset covers them
        return Config("paper", rules=by_name | by_type)


def check_names(model: nn.Module, grid: SensitivityGrid) -> None:
    """Raise ``ValueError`` if a pattern by name matches no layer of ``model`` that can drop blocks."""
    names = [fqn for fqns, _ in input_layers(model) for fqn in fqns]
    for pattern in grid.names:
        if not pattern.startswith(TYPE) and not matches(names, pattern):
            raise ValueError(
                f"`names` pattern {pattern!r} matches no linear layer or convolution of {type(model).__name__}. "
                f"HINT: patterns match the whole name; such layers are: {shorten(names) or 'none'}."
            )
        if pattern.startswith(TYPE) and not drops_blocks([pattern.removeprefix(TYPE)]):
            raise ValueError(
                f"`names` pattern {pattern!r} names no operator that drops blocks. HINT: those are 'type:linear' and "
                "'type:convolution'."
            )


def _several(values: Any, name: str, example: str) -> tuple[Any, ...]:
    """Return ``values`` as a tuple without repetitions, one at least."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"`{name}` must be a list, got {values!r}. HINT: {name}={example} is one.")
    if not values:
        raise ValueError(f"`{name}` must name at least one to measure, got {values!r}. HINT: {example} is a start.")
    return tuple(dict.fromkeys(values))
