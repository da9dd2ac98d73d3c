"""Estimate what each preset would save of a model, and which peak is left, before any training and without a GPU.

One training step per setting is simulated without values (``analysis.simulate_step``). Its row says ::

    activations    bytes of the distinct storages that autograd keeps at the end of forward
    peak           most bytes in use during the step, including cuBLAS's workspaces

and how much of the peak are parameters, gradients and optimizer state, which no preset lowers. If something that a
preset leaves uncompressed exceeds a third of the peak, the row names it: then another preset will not help, but less of
*that* will.

The largest batch that fits in some memory is found by steps of other batch sizes. A peak is nearly a line ::

    peak(n) = fixed + n * bytes of a sample

so the next size to simulate is where the line through two simulated peaks meets the memory. The search ends when a size
fits and the next one does not, in a simulation or on the line.

The peaks of 13 models were compared with those of CUDA's caching allocator on an H200 (``docs/memory.md``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast, get_args

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_actprune.analysis.simulate_step import (
    Loss,
    MakeOptimizer,
    Prepare,
    StepOptions,
    has_known_values,
    open_simulation,
)
from lightning_actprune.analysis.step_memory import StepMemory
from lightning_actprune.codec.private import tree_leaves
from lightning_actprune.config import PresetName, join_names
from lightning_actprune.convert import convert
from lightning_actprune.operators.containers import map_tensors
from lightning_actprune.operators.recompute import find_blocks
from lightning_actprune.report import MIB, ConversionReport

DENSE, CHECKPOINT = "dense", "checkpoint"
METHODS = DENSE, CHECKPOINT, *get_args(PresetName)
"""Rows of an estimate: the dense model, every repeated block checkpointed, and each preset."""
_MOST_LINES = 6
"""Steps after which a search for the largest batch halves what is left of it."""
_HEADERS = "", "Activations", "Peak", "Parameters", "Gradients", "Optimizer", "Largest of the rest"


@dataclass(frozen=True)
class EstimateRow:
    """A step under one setting.

    Args:
        method: ``"dense"``, ``"checkpoint"`` or a preset.
        step: The step, ``None`` if the setting does not apply to this model.
        reason: Why it does not apply.
        largest_batch: Most samples of a batch whose step fits in the memory that was asked for, 0 if not one does;
            ``None`` if none was asked for, or if steps with other numbers of samples cannot be simulated.
    """

    method: str
    step: StepMemory | None = None
    reason: str | None = None
    largest_batch: int | None = None

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
        """The largest part of the peak beside parameters, gradients and optimizer state, with its bytes."""
        at = None if self.step is None else self.step.peak_in()
        if self.step is None or at is None:
            return None
        sizes = {name: self.parts[name] for name in ("batch", "packed tensors")}
        sizes["saved tensors"] = self.parts["other saved tensors"]
        sizes["temporary tensors"] = self.parts["other"]
        sizes["logits and loss"] = self.step.logits_bytes(at)
        return max(sizes.items(), key=lambda entry: entry[1])

    def to_dict(self) -> dict[str, Any]:
        """Return everything except single moments, ready for JSON."""
        sizes = {name: getattr(self, name) for name in ("activation_bytes", "peak_bytes", "largest_batch")}
        large = None if self.large is None else {"name": self.large[0], "bytes": self.large[1]}
        return {"method": self.method, **sizes, "parts": self.parts, "large": large, "reason": self.reason}


@dataclass(frozen=True)
class Estimate:
    """The memory of a training step under several settings.

    Args:
        rows: One per setting.
        memory: Bytes that the largest batches fit in, if they were asked for.
    """

    rows: list[EstimateRow] = field(default_factory=list)
    memory: int | None = None

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
        if self.memory is not None:
            table.add_column("Largest\nbatch", justify="right")
        dense = next((row for row in self.rows if row.method == DENSE), None)
        for row in self.rows:
            cells = _make_cells(row, dense)
            if self.memory is not None:
                cells.append("" if row.largest_batch is None else f"{row.largest_batch:,}")
            table.add_row(*map(Text, cells))
        return table


def estimate(
    model: nn.Module,
    batch: Any,
    *,
    precision: str = "bf16-mixed",
    optimizer: MakeOptimizer | None = None,
    loss: Loss | None = None,
    presets: Sequence[str] = METHODS,
    memory: int | None = None,
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
        memory: Bytes of a GPU for which to find the largest batch of each row. Samples are the first dimension of the
            first tensor of ``batch``, and of all tensors in it that are as long.

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
    rows = []
    for name in check_methods(presets):
        prepare: Prepare | None = None
        if name != DENSE:
            prepare = _checkpoint_blocks if name == CHECKPOINT else partial(_convert, cast(PresetName, name))
        try:
            options: StepOptions = {"loss": loss, "precision": precision, "optimizer": optimizer}
            with open_simulation(model, batch, prepare, **options) as simulate_batch:
                step = simulate_batch(batch)
                largest = None if memory is None else find_largest_batch(simulate_batch, batch, step, memory)
                rows.append(EstimateRow(name, step, largest_batch=largest))
        except _NotForThisModelError as error:
            rows.append(EstimateRow(name, reason=str(error).splitlines()[0]))
    return Estimate(rows, memory)


def check_methods(names: Sequence[str]) -> Sequence[str]:
    """Return ``names`` if all of them are rows of an estimate."""
    for name in names:
        if name not in METHODS:
            raise ValueError(
                f"`presets` must be some of {join_names(METHODS)}, got {name!r}. HINT: 'dense' is the unchanged model, "
                "'checkpoint' runs every repeated block again."
            )
    return names


# === The largest batch ================================================================================================
def find_largest_batch(
    simulate_batch: Callable[[Any], StepMemory], batch: Any, step: StepMemory, memory: int
) -> int | None:
    """Return the most samples of a batch whose step fits, 0 if not one does (see the module).

    Args:
        simulate_batch: Returns the step of a batch.
        batch: A batch of any size.
        step: Its step.
        memory: Bytes to fit in.

    Returns:
        The number of samples, ``None`` if steps with other numbers of samples cannot be simulated.
    """
    samples = _count_samples(batch)
    if samples is None:
        return None
    peaks = {samples: step.peak_bytes}
    while True:
        fitting = max((n for n, peak in peaks.items() if peak <= memory), default=0)
        too_large = min((n for n, peak in peaks.items() if peak > memory and n > fitting), default=None)
        slope = _find_slope(peaks, fitting, too_large) or _bound_slope(step, samples)
        is_last = len(peaks) > 2 and fitting and peaks[fitting] + slope > memory
        if is_last or too_large == fitting + 1:
            return fitting
        guess = _guess_samples(peaks, fitting, too_large, memory, slope)
        try:
            peaks[guess] = simulate_batch(_resize(batch, samples, guess)).peak_bytes
        except Exception:  # any error of a step that takes no other number of samples
            return None


def _find_slope(peaks: Mapping[int, int], fitting: int, too_large: int | None) -> float | None:
    """Return bytes per sample between the two steps next to the memory, or ``None`` if there are no two."""
    below = sorted(n for n in peaks if n <= fitting)
    first, last = (below[0], fitting) if too_large is None and below else (fitting, too_large)
    if not first or last is None or first == last or peaks[first] >= peaks[last]:
        return None
    return (peaks[last] - peaks[first]) / (last - first)


def _bound_slope(step: StepMemory, samples: int) -> float:
    """Return bytes per sample that are rather too many: what does not grow with the samples counts, too."""
    at = step.peak_in()
    assert at is not None
    parts = step.parts(at)
    growing = step.peak_bytes - sum(parts[name] for name in ("parameters", "gradients", "optimizer state"))
    return max(growing, step.activation_bytes[step.forward_end], 1) / samples


def _guess_samples(peaks: Mapping[int, int], fitting: int, too_large: int | None, memory: int, slope: float) -> int:
    """Return the next number of samples to simulate, above ``fitting`` and below ``too_large``."""
    if too_large is None:
        return fitting + max(1, int((memory - peaks[fitting]) / slope))
    if len(peaks) > _MOST_LINES:
        return (fitting + too_large) // 2
    guess = too_large - math.ceil((peaks[too_large] - memory) / slope)
    return min(max(guess, fitting + 1), too_large - 1)


def _count_samples(batch: Any) -> int | None:
    """Return the length of the first tensor."""
    return next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), None)


def _resize(batch: Any, samples: int, wanted: int) -> Any:
    """Return a batch with another number of samples; known values are repeated, all others do not exist."""

    def resize(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != samples:
            return tensor
        if has_known_values(tensor):
            return tensor[torch.arange(wanted) % samples]
        shape = wanted, *tensor.shape[1:]
        empty = torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return empty.requires_grad_(tensor.requires_grad)

    return map_tensors(resize, batch)


# === Rows =============================================================================================================
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
