"""Estimate what each preset would save of a model, and which peak is left, before any training and without a GPU.

One training step per setting is simulated without values (``analysis.simulate_step``). Its row says ::

    activations    bytes of the distinct storages that autograd keeps at the end of forward
    peak           most bytes in use during the step, including cuBLAS's workspaces

and how much of the peak are parameters, gradients and optimizer state, which no preset lowers. If something that a
preset leaves uncompressed exceeds a third of the peak, the row names it: then another preset will not help, but less of
*that* will.

The peaks of 13 models were compared with those of CUDA's caching allocator on an H200 (``docs/estimate.md``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast, get_args

from rich.table import Table
from rich.text import Text
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_actprune.analysis.simulate_step import Loss, MakeOptimizer, simulate
from lightning_actprune.analysis.step_memory import StepMemory
from lightning_actprune.config import PresetName, join_names
from lightning_actprune.convert import convert
from lightning_actprune.operators.recompute import find_blocks
from lightning_actprune.report import MIB, ConversionReport

DENSE, CHECKPOINT = "dense", "checkpoint"
METHODS = DENSE, CHECKPOINT, *get_args(PresetName)
"""Rows of an estimate: the dense model, every repeated block checkpointed, and each preset."""
LARGE = 1 / 3
"""Share of a peak from which on something uncompressed is named."""
_HEADERS = "", "Activations", "Peak", "Parameters", "Gradients", "Optimizer", "Uncompressed"


@dataclass(frozen=True)
class EstimateRow:
    """A step under one setting.

    Args:
        method: ``"dense"``, ``"checkpoint"`` or a preset.
        step: The step, ``None`` if the setting does not apply to this model.
        reason: Why it does not apply.
    """

    method: str
    step: StepMemory | None = None
    reason: str | None = None

    @property
    def activation_bytes(self) -> int | None:
        """Bytes that autograd keeps at the end of forward."""
        return None if self.step is None else self.step.activation_bytes[self.step.forward_end]

    @property
    def peak_bytes(self) -> int | None:
        """Most bytes in use during the step."""
        return None if self.step is None else self.step.peak_bytes

    @property
    def parts(self) -> dict[str, int]:
        """Bytes in use at the peak by kind; they add up to it."""
        at = None if self.step is None else self.step.peak_in()
        return {} if self.step is None or at is None else self.step.parts(at)

    @property
    def large(self) -> tuple[str, int] | None:
        """The largest uncompressed part with its bytes, if it exceeds a third of the peak."""
        at = None if self.step is None else self.step.peak_in()
        if self.step is None or at is None:
            return None
        parts = self.parts
        sizes = {name: parts[name] for name in ("parameters", "gradients", "optimizer state", "batch")}
        sizes["temporary tensors"] = parts["other"]
        sizes["logits and loss"] = self.step.logits_bytes(at)
        if self.method != DENSE:
            sizes |= {group.label: group.nbytes for group in self.step.groups(at, uncovered=True)[:1]}
        name, nbytes = max(sizes.items(), key=lambda entry: entry[1])
        return (name, nbytes) if nbytes > LARGE * self.step.peak_bytes else None

    def to_dict(self) -> dict[str, Any]:
        """Return everything except single moments, ready for JSON."""
        sizes = {"activation_bytes": self.activation_bytes, "peak_bytes": self.peak_bytes}
        large = None if self.large is None else {"name": self.large[0], "bytes": self.large[1]}
        return {"method": self.method, **sizes, "parts": self.parts, "large": large, "reason": self.reason}


@dataclass(frozen=True)
class Estimate:
    """The memory of a training step under several settings.

    Args:
        rows: One per setting.
    """

    rows: list[EstimateRow] = field(default_factory=list)

    def __getitem__(self, method: str) -> EstimateRow:
        """Return the row of a setting."""
        return next(row for row in self.rows if row.method == method)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return the rows, ready for JSON."""
        return [row.to_dict() for row in self.rows]

    def rich(self) -> Table:
        """Return a table for ``rich`` in MiB, with changes against the dense model."""
        table = Table(title="Estimated memory of a training step in MiB", title_justify="left")
        for number, header in enumerate(_HEADERS):
            table.add_column(header, justify="right" if 0 < number < len(_HEADERS) - 1 else "left", overflow="fold")
        dense = next((row for row in self.rows if row.method == DENSE), None)
        for row in self.rows:
            table.add_row(*map(Text, _make_cells(row, dense)))
        return table


def estimate(
    model: nn.Module,
    batch: Any,
    *,
    precision: str = "bf16-mixed",
    optimizer: MakeOptimizer | None = None,
    loss: Loss | None = None,
    presets: Sequence[str] = METHODS,
) -> Estimate:
    """Estimate what a training step would take on a GPU: dense, checkpointed and under each preset.

    Nothing is computed and the model does not change. Model and batch may be on any device, also ``meta``.

    Args:
        model: The dense model.
        batch: Batch of a step; only shapes, strides and types of its tensors matter.
        precision: One of Lightning's names, such as ``"bf16-mixed"`` or ``"32-true"``.
        optimizer: Creates the optimizer of the trained parameters; by default fused AdamW.
        loss: Returns the loss, given a copy of the model and the batch. By default that of ``training_step``, the
            model's own loss for a mapping, or for ``(inputs, targets)`` the cross entropy or the squared error.
        presets: Rows to make: ``"dense"``, ``"checkpoint"`` and presets.

    Returns:
        One row per entry of ``presets``.

    Raises:
        TypeError: If an argument has the wrong type, or the model cannot be copied.
        ValueError: If an argument is out of range, or a module reads values that do not exist.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
        >>> batch = torch.empty(4096, 64), torch.empty(4096, dtype=torch.int64)
        >>> result = estimate(model, batch, presets=["dense", "max"])
        >>> [round(row.activation_bytes / 2**20, 1) for row in result.rows]
        [4.7, 0.9]
    """
    for name in presets:
        if name not in METHODS:
            raise ValueError(
                f"`presets` must be some of {join_names(METHODS)}, got {name!r}. HINT: 'dense' is the unchanged model, "
                "'checkpoint' runs every repeated block again."
            )
    rows = []
    for name in presets:
        reason, prepare = None, None
        if name != DENSE:
            prepare = _checkpoint_blocks if name == CHECKPOINT else partial(_convert, cast(PresetName, name))
        try:
            step = simulate(model, batch, prepare, loss=loss, precision=precision, optimizer=optimizer)
        except _NotForThisModelError as error:
            step, reason = None, str(error).splitlines()[0]
        rows.append(EstimateRow(name, step, reason))
    return Estimate(rows)


class _NotForThisModelError(Exception):
    """A setting changes nothing in a model."""


def _convert(preset: PresetName, model: nn.Module) -> ConversionReport:
    try:
        return convert(model, preset)
    except ValueError as error:
        raise _NotForThisModelError(error) from error


def _checkpoint_blocks(model: nn.Module) -> None:
    names = find_blocks(model)
    if not names:
        raise _NotForThisModelError(f"{type(model).__name__} has no class of blocks that is repeated in a list.")
    for name in names:
        block = model.get_submodule(name)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _make_cells(row: EstimateRow, dense: EstimateRow | None) -> list[str]:
    if row.step is None:
        return [row.method, *[""] * (len(_HEADERS) - 2), row.reason or ""]
    sizes = []
    for name in ("activation_bytes", "peak_bytes"):
        nbytes, whole = getattr(row, name), getattr(dense, name, None)
        change = f" ({100 * nbytes / whole - 100:+.0f} %)" if whole and nbytes != whole else ""
        sizes.append(f"{nbytes / MIB:,.0f}{change}")
    parts = [f"{row.parts[name] / MIB:,.0f}" for name in ("parameters", "gradients", "optimizer state")]
    large = "" if row.large is None else f"{row.large[0]}: {row.large[1] / MIB:,.0f}"
    return [row.method, *sizes, *parts, large]
