"""How records name what layers keep, and the same as rules of the package.

Records say `value_format` (`same` or `int` and the bits), `block_selection` and, for operators other than linear
layers, `others`; `rest` is what no layer is known for. They stay comparable over the years, whatever the package calls
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from lightning_actprune import Keep, config
from lightning_actprune.config import Rule
from lightning_actprune.operators.registry import layers

ValueFormatName = Literal["same", "int8", "int4", "int3", "int2"]
BlockSelection = Literal["largest", "swap", "unbiased"]
BITS: dict[str, int | None] = {"same": None, "int8": 8, "int4": 4, "int3": 3, "int2": 2}
OTHERS = {
    "activation": "int4",
    "affine": "int4",
    "convolution": "int4",
    "norm": "int4",
    "rest": "int8",
    "scale": "int4",
}
"""What operators other than linear layers keep if nothing else is said."""


@dataclass(frozen=True)
class Preset:
    """What a preset sets: for linear layers and convolutions, and, if they are asked for, for the others."""

    sparsity: float = 0.0
    block_size: int = 32
    value_format: str = "same"
    block_selection: str = "largest"
    max_dropped_energy: float = 1.0
    others: Mapping[str, str] = field(default_factory=OTHERS.copy)


_MOST = {"activation": "int3", "affine": "int3", "convolution": "int2", "norm": "int4", "rest": "int8", "scale": "int2"}
PRESETS = {
    "paper": Preset(sparsity=0.6),
    "balanced": Preset(value_format="int4"),
    "max": Preset(value_format="int2", others=_MOST),
}


def arguments_of(preset: Preset, others: bool) -> dict[str, Any]:
    """Return the arguments of ``convert`` and ``ActivationPruning`` for one of ``PRESETS``, or its linear layers alone.

    Unlike rules, a preset leaves narrow linear layers dense.
    """
    (name,) = (name for name, known in PRESETS.items() if known == preset)
    covered = () if others else config.PRESETS[name]
    return {"preset": name, "rules": {f"type:{operator}": None for operator in covered if operator != "linear"}}


def rules_of(preset: Preset, others: Mapping[str, str], model: nn.Module | None = None) -> dict[str, Rule]:
    """Return what `preset` says as rules: linear layers, and of the `others` those that are named.

    With a `model`, its layers outside of `blocks.*` stay dense.
    """
    rules: dict[str, Rule] = {}
    if model is not None:
        names = [fqn for fqns, _ in layers(model) for fqn in fqns]
        rules |= {fqn: None for fqn in names if not fnmatchcase(fqn, "blocks.*")}
    blocks = {
        "sparsity": preset.sparsity,
        "block_size": preset.block_size,
        "selection": preset.block_selection,
        "max_dropped_energy": preset.max_dropped_energy,
    }
    rules["type:linear"] = Keep(BITS[preset.value_format], **blocks)
    for operator, value_format in others.items():
        dropping = blocks if operator == "convolution" else {"block_size": preset.block_size}
        rules[f"type:{'saved' if operator == 'rest' else operator}"] = Keep(BITS[value_format], **dropping)
    return {**rules, "*": None}
