"""What a run keeps for backward: everything (dense), or blocks of the inputs of the blocks' linear layers.

A setting is written `dense`, as the name of a preset, or as `sparsity:block_size:value_format`, such as `0.5:16:same`
(the kept values as they are) or `0:32:int4` (all blocks, 4 bits a value); which blocks are kept and the largest share
of the energy that may be dropped can follow: `0.8:32:same:unbiased`, `0.5:32:int2:0.2`. All linear layers of the
model's blocks are pruned but those that `RetentionProbe` finds in a first forward: an input that something else keeps
anyway would be packed on top. In a transformer that is the output projection of the attention, whose input the
attention keeps. Layers that would drop more than the limit keep all their blocks (see `EnergyProbe`). At the end of a
pruned setting `+others` lets the other operators of the blocks keep in few bits what they need, in the formats of the
preset or in those that are named: `max+others`, `max+others=activation:int2,rest:int4`.

`preset:max` is the package's own preset on the whole model, as `ActivationPruning("max")` converts it, and
`preset:max:0.5` the same with a sparsity in place of the preset's. After `+others=` it takes rules: operators or kinds
of layers that keep all blocks, in another format (`preset:max+others=linear:int3`, `preset:max+others=attn.proj:int2`).

Where blocks are made of convolutions, these are what is pruned, by plain settings too, in the format of the setting.
Their inputs are outputs of ReLUs, which would keep them anyway, so each ReLU keeps one bit a value then, exactly.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from examples.benchmarks.vocabulary import BITS, PRESETS, BlockSelection, Preset, ValueFormatName, rules_of
from examples.benchmarks.vocabulary import OTHERS as ALL_OTHERS
from lightning_actprune import Keep, config, convert
from lightning_actprune.analysis.first_batch import EnergyProbe, RetentionProbe
from lightning_actprune.analysis.memory import LayerFootprint, MemoryReport, SavedTensorMeter
from lightning_actprune.operators import recompute
from lightning_actprune.report import ConversionReport

Batch = tuple[Tensor, Tensor]
OTHERS = "+others"
PRESET = "preset:"
PRUNED = "pruned"
FEW_BITS = "|".join(name for name, bits in BITS.items() if bits)
WHOLE = rf"dense|({PRESET}(?:{'|'.join(config.PRESETS)}))(?::(0?\.\d*[1-9]\d*))?"
RULES_NAMED = rf"=[\w.]+:({FEW_BITS})(,[\w.]+:({FEW_BITS}))*"
OTHERS_NAMED = rf"=(({'|'.join(ALL_OTHERS)}):\w+)(,({'|'.join(ALL_OTHERS)}):\w+)*"


@dataclass(frozen=True)
class Setting:
    """A method and, for `PRUNED`, its settings; what says nothing else than the default is `None`."""

    method: str
    sparsity: float | None = None
    block_size: int | None = None
    value_format: str | None = None
    block_selection: str | None = None
    max_dropped_energy: float | None = None
    others: str | None = None

    def __str__(self) -> str:
        if self.method != PRUNED:
            text = self.method if self.sparsity is None else f"{self.method}:{self.sparsity:g}"
            return f"{text}{OTHERS}={self.others}" if self.others else text
        more = [str(value) for value in (self.block_selection, self.max_dropped_energy) if value is not None]
        text = ":".join([f"{self.sparsity:g}:{self.block_size}:{self.value_format}", *more])
        return f"{text}{OTHERS}={self.others}" if self.others else text

    @property
    def other_formats(self) -> dict[str, str]:
        """What other operators keep, and how."""
        return dict(pair.split(":") for pair in self.others.split(",")) if self.others else {}


def parse_setting(text: str) -> Setting:
    """Return the setting that `text` stands for; for argparse."""
    base, plus, named = text.partition(OTHERS)
    whole = re.fullmatch(WHOLE, base)
    if whole and (not plus or (whole[1] and re.fullmatch(RULES_NAMED, named))):
        return Setting(whole[1] or base, float(whole[2]) if whole[2] else None, others=named[1:] or None)
    if plus and not whole and (not named or re.fullmatch(OTHERS_NAMED, named)):
        preset = PRESETS.get(base, Preset())
        return replace(parse_setting(base), others=named[1:] or in_words(preset.others))
    if text in PRESETS:
        return _of_preset(PRESETS[text])
    selections = "|".join(get_args(BlockSelection))
    found = re.fullmatch(rf"(0|0?\.\d+):([1-9]\d*):(\w+)(?::({selections}))?(?::(0?\.\d+))?", text)
    if found is None or found[3] not in get_args(ValueFormatName):
        raise argparse.ArgumentTypeError(
            f"must be `dense`, a preset ({', '.join(PRESETS)}), `preset:` and one of the package's "
            f"({', '.join(config.PRESETS)}), perhaps with a sparsity (`preset:max:0.5`), or "
            "`sparsity:block_size:value_format`, perhaps with `:block_selection` and `:max_dropped_energy`, with a "
            f"sparsity in [0, 1), a format of {', '.join(get_args(ValueFormatName))} and a selection of {selections}, "
            f"got {text!r}. HINT: 0.5:16:same, for example."
        )
    selection = None if found[4] == "largest" else found[4]
    return Setting(PRUNED, float(found[1]), int(found[2]), found[3], selection, float(found[5]) if found[5] else None)


def in_words(others: Mapping[Any, str]) -> str:
    """Return the formats of other operators as a setting names them; convolutions have that of the setting."""
    return ",".join(f"{name}:{others[name]}" for name in ALL_OTHERS if name in others and name != "convolution")


def _of_preset(preset: Preset) -> Setting:
    selection = None if preset.block_selection == "largest" else preset.block_selection
    limit = None if preset.max_dropped_energy == 1 else preset.max_dropped_energy
    return Setting(PRUNED, preset.sparsity, preset.block_size, preset.value_format, selection, limit)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the autocast context; it caches no casts, which must not outlive a capture."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)


def training_loss(model: nn.Module, batch: Batch, precision: str) -> Tensor:
    """Return the cross-entropy of the class scores, be it one per image or one per byte."""
    inputs, targets = batch
    with autocast(inputs.device, precision):
        shares = targets.is_floating_point()  # of classes, by sample
        return F.cross_entropy(model(inputs).flatten(0, -2), targets if shares else targets.flatten())


def prune(model: nn.Module, setting: Setting, batch: Batch, precision: str) -> list[str]:
    """Convert the layers of the blocks of `model` that the setting says; `revert` undoes it.

    Returns:
        The kinds of layers that were left dense, since something else keeps their input.
    """
    if setting.method == "dense":
        return []
    report = converted(model, setting)
    probes = RetentionProbe(model, batch), EnergyProbe(model)
    with buffers_kept(model), probes[0] as retention, probes[1] as energy:
        training_loss(model, batch, precision)
    left_dense = sorted({kind(layer.fqn) for layer in retention.apply(report)})
    energy.apply(report)
    return left_dense


def converted(model: nn.Module, setting: Setting) -> ConversionReport:
    """Convert the layers of `model` that the setting says."""
    if setting.method.startswith(PRESET):
        preset = setting.method.removeprefix(PRESET)
        if preset == "recompute":
            # For good: a capture forbids to ask for the state of random generators, and no model here draws from them.
            recompute.checkpoint = partial(checkpoint, preserve_rng_state=False)
        rules = {pattern_of(name): Keep(BITS[value_format]) for name, value_format in setting.other_formats.items()}
        return convert(model, preset, sparsity=setting.sparsity, rules=rules)  # type: ignore[arg-type]
    names = "sparsity", "block_size", "value_format", "block_selection", "max_dropped_energy"
    preset = Preset(**{name: getattr(setting, name) for name in names if getattr(setting, name) is not None})
    return convert(model, rules=rules_of(preset, other_formats(model, setting), model))


def pattern_of(name: str) -> str:
    """Return the pattern of a rule for an operator, or for layers of the blocks by their kind."""
    operator = "saved" if name == "rest" else name
    return f"type:{operator}" if operator in config.PRESETS["max"] else f"blocks.*.{name}"


def other_formats(model: nn.Module, setting: Setting) -> Any:
    """Return what to pass on as `others`."""
    if not any(isinstance(layer, nn.Conv2d) for layer in model.blocks.modules()):
        return setting.other_formats
    return (setting.other_formats or {"activation": "int4"}) | {"convolution": setting.value_format}


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Undo what forwards inside do to the buffers of `model`: the statistics of batch norms."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)


def block_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers and convolutions of the blocks of `model` by name."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))}
    return {name: layer for name, layer in layers.items() if name.startswith("blocks.")}


def kind(fqn: str) -> str:
    """Return what the layers of all blocks that do the same are called: `blocks.3.attn.qkv` is an `attn.qkv`."""
    return re.sub(r"^blocks\.\d+\.", "", fqn)


def kept(model: nn.Module, batch: Batch, precision: str) -> MemoryReport:
    """Return what a model keeps in one forward."""
    with buffers_kept(model), SavedTensorMeter(model, batch) as meter:
        training_loss(model, batch, precision)
    return meter.report()


def kept_rows(model: nn.Module, batch: Batch, precision: str) -> list[LayerFootprint]:
    """Return what each linear layer, and each pruned convolution, of the blocks keeps in one forward."""
    return [row for row in kept(model, batch, precision).rows if row.fqn.startswith("blocks.")]


def bits_per_value(rows: Iterable[LayerFootprint], precision: str) -> float:
    """Return the bits that are kept, positions and the like included, of each value that dense layers would keep.

    An input that something else keeps would cost a dense layer nothing, so it does not count.
    """
    rows = list(rows)
    dense_bits = 16 if precision == "bf16" else 32
    if not rows:  # dense convolutions
        return dense_bits
    return round(dense_bits * sum(row.stored_bytes for row in rows) / sum(row.dense_bytes for row in rows), 4)


def bits_of_all(model: nn.Module, batch: Batch, precision: str) -> float:
    """Return the bits that a model keeps for 16, or 32, that it would keep if it were dense."""
    report = kept(model, batch, precision)
    return round((16 if precision == "bf16" else 32) * report.stored_bytes / report.dense_bytes, 4)
