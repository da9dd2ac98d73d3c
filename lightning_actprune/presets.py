"""Bundles of settings for those who do not want to tune.

``paper``
    The method of arXiv:2311.16883 at its usual setting: 60 % of the blocks of 32 values are dropped, the rest kept as
    they are.
``balanced``
    No block is dropped and every value kept in four bits, 4.5 with the header of its block: a bit more than a quarter
    of 16-bit values, and gradients that are the exact ones but for noise of mean zero.
``max``
    Half of the blocks are dropped where these hold at most a fifth of the input's energy, and none elsewhere (see
    ``energy``); the rest is kept in two bits. 1.3 stored bits per value where blocks are dropped, 2.5 elsewhere. With
    ``others=True``, activation functions keep three bits, and two what only the gradient of a parameter needs; affine
    layers keep three, so that linear layers that read their output need none of their own (see ``ops.derived``).

With ``others=True``, convolutions, affine layers and layer scales drop as many blocks as linear layers do, under the
same conditions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lightning_actprune.arguments import OTHERS, BlockSelection, OtherOperator, ValueFormatName

PresetName = Literal["paper", "balanced", "max"]


@dataclass(frozen=True)
class Preset:
    """What a preset sets.

    Args:
        sparsity: Fraction of blocks dropped.
        block_size: Values per block.
        value_format: How kept values are stored.
        block_selection: Which blocks are kept.
        max_dropped_energy: Largest share of an input's energy that its dropped blocks may hold.
        others: How other operators store what they need where that is asked for (``others=True``).
    """

    sparsity: float = 0.0
    block_size: int = 32
    value_format: ValueFormatName = "same"
    block_selection: BlockSelection = "largest"
    max_dropped_energy: float = 1.0
    others: Mapping[OtherOperator, ValueFormatName] = field(default_factory=OTHERS.copy)


PRESETS: dict[PresetName, Preset] = {
    "paper": Preset(sparsity=0.6),
    "balanced": Preset(value_format="int4"),
    "max": Preset(
        sparsity=0.5,
        value_format="int2",
        max_dropped_energy=0.2,
        others={
            "activation": "int3",
            "affine": "int3",
            "convolution": "int2",
            "norm": "int4",
            "rest": "int8",
            "scale": "int2",
        },
    ),
}


def given(value: Any, default: Any) -> Any:
    """Return ``value``, or ``default`` if it is ``None``."""
    return default if value is None else value


def check_preset(value: Any) -> Preset:
    """Return the preset of that name."""
    if value not in get_args(PresetName):
        raise ValueError(
            f"`preset` must be one of {', '.join(map(repr, PRESETS))} or None, got {value!r}. HINT: 'paper' prunes as "
            "the paper does, 'balanced' only quantises, 'max' does both and saves most."
        )
    return PRESETS[value]
