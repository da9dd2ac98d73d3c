"""Settings of layers by their names.

A mapping goes from glob patterns on fully qualified names to what layers of these names are given. The first pattern,
in the order given, that matches one of a layer's names counts, so ``"*"`` as the last pattern is for all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from lightning_actprune.arguments import (
    MIN_QUANTIZED_BLOCK,
    BlockSelection,
    Scope,
    ValueFormatName,
    check_block_selection,
    check_block_size,
    check_scope,
    check_sparsity,
    check_value_format,
)
from lightning_actprune.schedules import SparsitySchedule, check_schedule

__all__ = ["LayerSettings"]


@dataclass(frozen=True, repr=False)
class LayerSettings:
    """Settings of the layers of one name pattern; ``None`` is what all other layers have.

    Args:
        sparsity: Fraction of blocks dropped, in [0, 1).
        block_size: Values per block, positive.
        value_format: How kept values are stored.
        block_selection: Which blocks are kept.
        scope: Within what blocks compete, ``"sample"`` or ``"token"``.
        schedule: Sparsity as a function of training progress, instead of ``sparsity``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or there are both a ``sparsity`` and a ``schedule``.

    Example:
        >>> from torch import nn
        >>> from lightning_actprune import convert
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> report = convert(model, sparsity=0.6, layers={"2": LayerSettings(sparsity=0.3, value_format="int4")})
        >>> [(layer.fqn, layer.sparsity, layer.value_format) for layer in report.converted]
        [('0', 0.6, 'same'), ('2', 0.3, 'int4')]
    """

    sparsity: float | None = None
    block_size: int | None = None
    value_format: ValueFormatName | None = None
    block_selection: BlockSelection | None = None
    scope: Scope | None = None
    schedule: SparsitySchedule | None = None

    def __post_init__(self) -> None:
        if self.sparsity is not None:
            object.__setattr__(self, "sparsity", check_sparsity(self.sparsity))
        if self.block_size is not None:
            object.__setattr__(self, "block_size", check_block_size(self.block_size))
        if self.value_format is not None:
            check_value_format(self.value_format, self.block_size or MIN_QUANTIZED_BLOCK)
        if self.block_selection is not None:
            check_block_selection(self.block_selection)
        if self.scope is not None:
            check_scope(self.scope)
        if check_schedule(self.schedule) is not None and self.sparsity is not None:
            raise ValueError(
                f"`sparsity` must be None in LayerSettings with a `schedule`, got {self.sparsity!r} and "
                f"{self.schedule!r}. HINT: a schedule says what the sparsity is; leave out one of the two."
            )

    def __repr__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return f"LayerSettings({', '.join(f'{name}={value!r}' for name, value in given.items() if value is not None)})"


def matches(fqns: Iterable[str], pattern: str) -> bool:
    """Return whether one of a layer's names matches ``pattern``."""
    return any(fnmatchcase(fqn, pattern) for fqn in fqns)


def first_match(fqns: Sequence[str], patterns: Iterable[str]) -> str | None:
    """Return the pattern that counts for a layer with these names, ``None`` if none matches."""
    return next((pattern for pattern in patterns if matches(fqns, pattern)), None)


def check_sparsities(value: Any) -> float | dict[str, float]:
    """Return ``value`` as a sparsity in [0, 1), or as a mapping from patterns to such."""
    if not isinstance(value, Mapping):
        return check_sparsity(value)
    example = '{"blocks.*.fc1": 0.3, "*": 0.6}'
    _check_patterns(value, "sparsity", example)
    if not value:
        raise ValueError(f"`sparsity` must have at least one pattern, got {value!r}. HINT: such as {example}.")
    return {pattern: check_sparsity(number, f"sparsity[{pattern!r}]") for pattern, number in value.items()}


def check_layers(value: Any) -> dict[str, LayerSettings]:
    """Return ``value`` as a mapping from patterns to settings; ``None`` is an empty one."""
    example = '{"blocks.*.fc1": LayerSettings(sparsity=0.3)}'
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(
            f"`layers` must be a mapping from glob patterns to LayerSettings, got {value!r} of type "
            f"{type(value).__name__}. HINT: such as {example}."
        )
    _check_patterns(value, "layers", example)
    if not value:
        raise ValueError(f"`layers` must have at least one pattern or be None, got {value!r}. HINT: such as {example}.")
    return {pattern: _as_settings(settings, f"layers[{pattern!r}]", example) for pattern, settings in value.items()}


def _as_settings(value: Any, name: str, example: str) -> LayerSettings:
    """Return ``value``, or what its entries say: what others make of a dataclass (Hydra), or a report suggests."""
    if isinstance(value, LayerSettings):
        return value
    known = [field.name for field in fields(LayerSettings)]
    if not isinstance(value, Mapping) or not all(key in known for key in value):
        raise TypeError(
            f"`{name}` must be LayerSettings, or a mapping of some of {', '.join(known)}, got {value!r}. HINT: such as "
            f"{example}."
        )
    try:
        return LayerSettings(**value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"`{name}`: {error}") from error


def check_that_all_count(patterns: Sequence[str], layers: Sequence[Sequence[str]], argument: str) -> None:
    """Raise ``ValueError`` if a pattern counts for no layer, since it matches none or earlier ones match all of its.

    Args:
        patterns: The patterns in their order.
        layers: All names of each layer.
        argument: What the patterns were given as.
    """
    counting = {first_match(fqns, patterns) for fqns in layers}
    for pattern in patterns:
        if pattern in counting:
            continue
        if any(matches(fqns, pattern) for fqns in layers):
            raise ValueError(
                f"`{argument}` pattern {pattern!r} never counts, since earlier patterns match all its layers. HINT: "
                "the first pattern that matches a layer counts; put this one before them."
            )
        names = [fqns[0] for fqns in layers]
        listing = ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")
        raise ValueError(
            f"`{argument}` pattern {pattern!r} matches no layer that can be pruned. HINT: patterns match the whole "
            f"name; these layers are: {listing}."
        )


def _check_patterns(value: Mapping[Any, Any], name: str, example: str) -> None:
    if not all(isinstance(pattern, str) and pattern for pattern in value):
        raise TypeError(f"`{name}` must have glob patterns as its keys, got {list(value)!r}. HINT: such as {example}.")
