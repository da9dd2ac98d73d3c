"""What a run keeps for backward: everything (dense), or blocks of the inputs of the blocks' linear layers.

A setting is written `dense` or `sparsity:block_size:value_format`, such as `0.5:16:same` (the kept values as they are)
or `0:32:int4` (all blocks, 4 bits a value). All linear layers of the model's blocks are pruned but those that
`HolderProbe` finds in a first forward: an input that something else keeps anyway would be packed on top. In a
transformer that is the output projection of the attention, whose input the attention keeps.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_actprune import HolderProbe, convert
from lightning_actprune.footprint import LayerFootprint, SavedTensorMeter

FORMATS = ("same", "fp8", "int8", "int4", "int3", "int2")

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Setting:
    """A method and, for `pruned`, its settings."""

    method: str
    sparsity: float | None = None
    block_size: int | None = None
    value_format: str | None = None

    def __str__(self) -> str:
        if self.method == "dense":
            return self.method
        return f"{self.sparsity:g}:{self.block_size}:{self.value_format}"


def parse_setting(text: str) -> Setting:
    """Return the setting that `text` stands for; for argparse."""
    if text == "dense":
        return Setting("dense")
    found = re.fullmatch(r"(0|0?\.\d+):([1-9]\d*):(\w+)", text)
    if found is None or found[3] not in FORMATS:
        raise argparse.ArgumentTypeError(
            f"must be `dense` or `sparsity:block_size:value_format` with a sparsity in [0, 1) and a format of "
            f"{', '.join(FORMATS)}, got {text!r}. HINT: 0.5:16:same, for example."
        )
    return Setting("pruned", float(found[1]), int(found[2]), found[3])


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the autocast context; it caches no casts, which must not outlive a capture."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)


def training_loss(model: nn.Module, batch: Batch, precision: str) -> Tensor:
    """Return the cross-entropy of the class scores, be it one per image or one per byte."""
    inputs, targets = batch
    with autocast(inputs.device, precision):
        return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def prune(model: nn.Module, setting: Setting, batch: Batch, precision: str) -> list[str]:
    """Convert the linear layers of the blocks of `model`, if that is the setting; `revert` undoes it.

    Returns:
        The kinds of layers that were left dense, since something else keeps their input.
    """
    if setting.method == "dense":
        return []
    # An argument that is needed only where it says something else than its default.
    values = {} if setting.value_format == "same" else {"value_format": setting.value_format}
    sizes = {"sparsity": setting.sparsity, "block_size": setting.block_size}
    report = convert(model, **sizes, include="blocks.*", min_features=0, **values)
    with HolderProbe(model, batch) as probe:
        training_loss(model, batch, precision)
    return sorted({kind(layer.fqn) for layer in probe.apply(report)})


def kind(fqn: str) -> str:
    """Return what the layers of all blocks that do the same are called: `blocks.3.attn.qkv` is an `attn.qkv`."""
    return re.sub(r"^blocks\.\d+\.", "", fqn)


def kept_rows(model: nn.Module, batch: Batch, precision: str) -> list[LayerFootprint]:
    """Return what each linear layer of the blocks keeps in one forward."""
    with SavedTensorMeter(model, batch) as meter:
        training_loss(model, batch, precision)
    return [row for row in meter.report().rows if row.fqn.startswith("blocks.")]


def bits_per_value(rows: Iterable[LayerFootprint], precision: str) -> float:
    """Return the bits that are kept, positions and the like included, of each value that dense layers would keep.

    An input that something else keeps would cost a dense layer nothing, so it does not count.
    """
    rows = list(rows)
    dense_bits = 16 if precision == "bf16" else 32
    return round(dense_bits * sum(row.stored_bytes for row in rows) / sum(row.dense_bytes for row in rows), 4)
