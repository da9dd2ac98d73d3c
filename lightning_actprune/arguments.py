"""Checks of the arguments shared by every entry point.

One function per argument. Each returns the value in its canonical type, or raises ``TypeError`` (wrong kind of value)
or ``ValueError`` (right kind, not allowed) with a message that names the argument, the value, the allowed range and a
fix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias, get_args

from torch import nn

Scope = Literal["sample", "token"]
ValueFormatName = Literal["same", "fp8", "int8", "int4", "int3", "int2"]
BlockSelection = Literal["largest", "swap", "unbiased"]
OtherOperator = Literal["activation", "affine", "convolution", "norm", "rest", "scale"]
PrunedOperator = Literal["affine", "convolution", "linear", "scale"]
OTHERS: dict[OtherOperator, ValueFormatName] = {
    "activation": "int4",
    "affine": "int4",
    "convolution": "int4",
    "norm": "int4",
    "rest": "int8",
    "scale": "int4",
}
"""What operators other than linear layers keep, and in which format if none is given."""
Others: TypeAlias = bool | Mapping[OtherOperator, ValueFormatName]
MIN_QUANTIZED_BLOCK = 8
"""Least block size of a format with a scale: below, scale and offset cost as much as the fewer bits save."""


def check_model(value: Any, name: str = "model") -> nn.Module:
    """Return ``value`` if it is a module."""
    if not isinstance(value, nn.Module):
        raise TypeError(
            f"`{name}` must be a torch.nn.Module, got {value!r} of type {type(value).__name__}. HINT: pass the network "
            "or the LightningModule, not its class, its layers or its weights."
        )
    return value


def check_flag(value: Any, name: str) -> bool:
    """Return ``value`` if it is a bool: ``"no"`` would count as true."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be a bool, got {value!r} of type {type(value).__name__}. HINT: True or False.")
    return value


def check_sparsity(value: Any, name: str = "sparsity") -> float:
    """Return ``value`` as a float in [0, 1), the fraction of blocks to drop."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"`{name}` must be a number in [0, 1), got {value!r} of type {type(value).__name__}. "
            "HINT: pass the fraction of blocks to drop, such as 0.6; a schedule is an argument of its own."
        )
    number = float(value)
    if math.isnan(number) or not 0.0 <= number < 1.0:
        raise ValueError(
            f"`{name}` must be in [0, 1), got {value!r}. HINT: it is the fraction of blocks dropped, not a percentage; "
            "0 keeps everything (the dense layer), 0.6 drops 60 %."
        )
    return number


def check_share(value: Any, name: str) -> float:
    """Return ``value`` as a float in [0, 1], a share of something."""
    hint = "HINT: it is a share of the whole, not a percentage; 0.2 is a fifth."
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a number in [0, 1], got {value!r} of type {type(value).__name__}. {hint}")
    if not 0.0 <= float(value) <= 1.0:
        raise ValueError(f"`{name}` must be in [0, 1], got {value!r}. {hint}")
    return float(value)


def check_block_size(value: Any) -> int:
    """Return ``value`` as a positive int, the number of consecutive values in a block."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"`block_size` must be a positive int, got {value!r} of type {type(value).__name__}. "
            "HINT: 32 is a good start; 16, 64 and 128 are the other usual choices."
        )
    if value < 1:
        raise ValueError(
            f"`block_size` must be a positive int, got {value!r}. HINT: 32 is a good start; a block larger than a row "
            "is cut to the row."
        )
    return int(value)


def check_scope(value: Any) -> Scope:
    """Return ``value`` if it names a scope within which blocks compete."""
    if value not in get_args(Scope):
        raise ValueError(
            f'`scope` must be "sample" or "token", got {value!r}. HINT: "sample" lets all blocks of one sample compete '
            '(the paper), "token" only those of one row, for very long sequences.'
        )
    return value  # type: ignore[no-any-return]


def check_value_format(value: Any, block_size: int, name: str = "value_format") -> ValueFormatName:
    """Return ``value`` if it names a format of stored values that blocks of ``block_size`` values can have."""
    names = get_args(ValueFormatName)
    if value not in names:
        raise ValueError(
            f"`{name}` must be one of {', '.join(map(repr, names))}, got {value!r}. HINT: 'same' stores values "
            "as they are, 'int4' in four bits each with a scale and an offset per block."
        )
    if value != "same" and block_size < MIN_QUANTIZED_BLOCK:
        raise ValueError(
            f"`block_size` must be at least {MIN_QUANTIZED_BLOCK} with {name}={value!r}, got {block_size}. HINT: each "
            "block has a scale of its own; 32 is a good start. 'same', the format of preset='paper', has none."
        )
    return value  # type: ignore[no-any-return]


def check_few_bits(value: Any, block_size: int, name: str = "value_format") -> ValueFormatName:
    """Return ``value`` if it names a format of few bits, which ``"same"`` is not."""
    if value == "same":
        raise ValueError(
            f'`{name}` must be "fp8", "int8", "int4", "int3" or "int2" here, got "same". HINT: it would store '
            'everything that is saved a second time; take "int8", or none of this to keep tensors as they are.'
        )
    return check_value_format(value, block_size, name)


def check_min_values(value: Any) -> int:
    """Return ``value`` as a positive int, the least number of values of a tensor that is worth packing."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"`min_values` must be a positive int, got {value!r} of type {type(value).__name__}. HINT: it is the least "
            "number of values of a tensor that is packed; 2**16 is the default."
        )
    if value < 1:
        raise ValueError(f"`min_values` must be a positive int, got {value!r}. HINT: 1 packs everything that it can.")
    return int(value)


def check_count(value: Any, name: str, hint: str) -> int:
    """Return ``value`` as an int of at least 0; ``hint`` says what to do about an error."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must be an int >= 0, got {value!r}. HINT: {hint}")
    if value < 0:
        raise ValueError(f"`{name}` must be an int >= 0, got {value!r}. HINT: {hint}")
    return int(value)


def check_block_selection(value: Any) -> BlockSelection:
    """Return ``value`` if it names a way to choose the blocks that are kept."""
    if value not in get_args(BlockSelection):
        raise ValueError(
            f'`block_selection` must be "largest", "swap" or "unbiased", got {value!r}. HINT: "largest" keeps the '
            'blocks of the largest norm (the paper), "swap" lets those near the threshold change places at random, '
            '"unbiased" draws blocks at random and scales them up, so that what is stored is the input on average.'
        )
    return value  # type: ignore[no-any-return]


def check_patterns(value: Any, name: str) -> tuple[str, ...]:
    """Return ``value`` as a tuple of glob patterns; a single string is one pattern."""
    patterns = (value,) if isinstance(value, str) else value
    if not isinstance(patterns, Sequence) or not all(isinstance(p, str) and p for p in patterns):
        raise TypeError(
            f"`{name}` must be a glob pattern or a list of them, got {value!r}. "
            'HINT: patterns match fully qualified layer names, such as "blocks.*.fc1".'
        )
    return tuple(patterns)


def check_others(value: Any, block_size: int) -> dict[OtherOperator, ValueFormatName]:
    """Return how operators other than linear layers store what they keep: a format for each that is to be stored so."""
    hint = (
        "HINT: True stores all of it in few bits; {'activation': 'int4', 'norm': 'int4', 'rest': 'int8'} says what, "
        "and in which format."
    )
    if isinstance(value, bool):
        value = OTHERS if value else {}
    if not isinstance(value, Mapping):
        raise TypeError(f"`others` must be a bool or a mapping, got {value!r} of type {type(value).__name__}. {hint}")
    for operator, value_format in value.items():
        if operator not in OTHERS:
            raise ValueError(f"`others` must name {', '.join(map(repr, OTHERS))} only, got {operator!r}. {hint}")
        refused: tuple[str, ...] = ("same",)
        if operator == "activation":  # a derivative has a known range
            refused = ("same", "fp8")
        elif operator in get_args(PrunedOperator):  # drops blocks too
            refused = ()
        if check_value_format(value_format, block_size, f"others[{operator!r}]") in refused:
            raise ValueError(
                f"`others[{operator!r}]` must be a format of few bits{' of integers' * (len(refused) > 1)}, got "
                f"{value_format!r}. {hint}"
            )
    return dict(value)
