"""What one training forward keeps for backward: bytes per layer, counted and by formula, on any device.

Autograd hands every tensor that it saves to a hook (``saved``); ``SavedTensorMeter`` counts the distinct storages
behind them and credits each to the module that was running. That is exact, costs no memory and needs no GPU.

A row's ``dense_bytes`` is what the layer would hold *alone* if it were not pruned. A layer whose input is kept by
something else too (the activation before it, a sister layer, the batch) frees nothing by letting go of it, so such
bytes are counted once, where they stay. Under autocast the dense layers also keep copies of their weights
(``copies``); a report counts those that pruned layers do without. Hence its ``dense_bytes + other_bytes`` is
what the dense model keeps, and ``saved_bytes`` the difference to what this one does.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_actprune.calls import LinearCall
from lightning_actprune.saved import Saved, SavedTensorRecorder
from lightning_actprune.selection import prunable_layers
from lightning_actprune.step_memory import StepMemory

__all__ = ["LayerFootprint", "MemoryReport", "SavedTensorMeter"]


@dataclass
class LayerFootprint:
    """Bytes that one linear layer, or another pruned one, keeps for backward, summed over its calls.

    Args:
        fqn: Fully qualified name of the layer.
        kind: Name of its class.
        sparsity: Fraction of blocks dropped, the largest of its calls; 0 for a layer that is not pruned.
        calls: How often the layer kept something.
        dense_bytes: Bytes of the inputs that the layer alone would keep if it were not pruned.
        stored_bytes: Bytes of the distinct storages it did keep, its parameters aside; none behind a norm that keeps
            its output in few bits, which do for both.
        accounted_bytes: The same by formula, from shapes and settings alone.
    """

    fqn: str
    kind: str
    sparsity: float
    calls: int = 0
    dense_bytes: int = 0
    stored_bytes: int = 0
    accounted_bytes: int = 0

    @property
    def saved_bytes(self) -> int:
        """Bytes saved; negative if the input is kept elsewhere anyway."""
        return self.dense_bytes - self.stored_bytes

    def to_dict(self) -> dict[str, str | float]:
        """Return everything as numbers and strings."""
        return asdict(self) | {"saved_bytes": self.saved_bytes}


@dataclass
class MemoryReport:
    """What one training forward keeps for backward.

    Args:
        rows: The linear layers that kept something, pruned or not, and other pruned ones, in the order of the model.
        other_bytes: All other distinct storages that autograd saved; parameters, buffers and the batch aside.
        measured_activation_bytes: Growth of the allocator's requested bytes over the forward, on CUDA only.
        measured_peak_bytes: Allocator's peak over the whole step, on CUDA only.
        weight_copy_bytes: Autocast's copies of weights that the pruned layers would keep, if they were not pruned, and
            that nothing else keeps; those of other layers are among ``other_bytes``.
        step: Memory over the whole step, if it was recorded.
    """

    rows: list[LayerFootprint] = field(default_factory=list)
    other_bytes: int = 0
    measured_activation_bytes: int | None = None
    measured_peak_bytes: int | None = None
    weight_copy_bytes: int = 0
    step: StepMemory | None = None

    @property
    def dense_bytes(self) -> int:
        """Bytes that the listed layers would keep if none were pruned: inputs and copies of weights."""
        return sum(row.dense_bytes for row in self.rows) + self.weight_copy_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes that the listed layers keep."""
        return sum(row.stored_bytes for row in self.rows)

    @property
    def saved_bytes(self) -> int:
        """Bytes saved by pruning."""
        return self.dense_bytes - self.stored_bytes

    @property
    def saved_fraction(self) -> float:
        """Saved bytes as a fraction of the listed layers' dense bytes; 0 if there are none."""
        return self.saved_bytes / self.dense_bytes if self.dense_bytes else 0.0

    @property
    def sparsity(self) -> float:
        """Highest sparsity of a listed layer; 0 if there are none."""
        return max((row.sparsity for row in self.rows), default=0.0)

    @property
    def total_bytes(self) -> int:
        """All bytes that the forward keeps for backward."""
        return self.stored_bytes + self.other_bytes

    def totals(self) -> dict[str, float | None]:
        """Return the totals as one flat row, with ``None`` for what was not measured.

        ``peak_bytes`` is that of the step, if it was recorded: measured on CUDA, elsewhere counted.
        """
        names = ["sparsity", "dense_bytes", "stored_bytes", "saved_bytes", "saved_fraction", "weight_copy_bytes"]
        names += ["other_bytes", "total_bytes", "measured_activation_bytes", "measured_peak_bytes"]
        peak = None if self.step is None else self.step.peak_bytes
        return {**{name: getattr(self, name) for name in names}, "peak_bytes": peak}

    def to_rows(self) -> list[dict[str, str | float]]:
        """Return the layers as flat rows: ``pandas.DataFrame(report.to_rows())`` is a table."""
        return [row.to_dict() for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as numbers and strings, fit for JSON: the totals, the layers as ``rows``, and the step."""
        return self.totals() | {"rows": self.to_rows(), "step": None if self.step is None else asdict(self.step)}


class SavedTensorMeter(SavedTensorRecorder):
    """Count what the forward passes run inside this context keep for backward.

    Every distinct storage counts once, in full, for the first module that saved it. Nothing is kept alive.

    Modules called inside a ``torch.compile``d one are not seen one by one; what the compiled graph saves is in
    ``other_bytes`` and ``rows`` may be empty. What happens inside an activation checkpoint is not kept, so it is not
    counted, nor is what goes to saved-tensor hooks opened inside this context. Hooks that are open around it, such as
    those of ``save_on_cpu``, still get what was counted. Sparse tensors are not counted.

    Args:
        model: The module whose layers are listed by name.
        batch: Whatever holds the step's input tensors; they are alive anyway and do not count.

    Example:
        >>> import torch
        >>> from lightning_actprune import convert
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        >>> _ = convert(model, sparsity=0.5)
        >>> with SavedTensorMeter(model) as meter:
        ...     loss = model(torch.randn(16, 64)).sum()
        >>> report = meter.report()
        >>> [(row.fqn, row.dense_bytes, row.stored_bytes) for row in report.rows]
        [('0', 4096, 2068), ('2', 4096, 2068)]
    """

    def __init__(self, model: nn.Module, batch: Any = None) -> None:
        super().__init__(model, batch)
        self._packed: dict[LinearCall, dict[StorageWeakRef, int]] = {}
        self._other: dict[StorageWeakRef, int] = {}
        self._seen: set[StorageWeakRef] = set()
        self._sharing: set[LinearCall] = set()
        self._kept_copies: set[Any] = set()

    def report(self) -> MemoryReport:
        """Return what was kept so far."""
        elsewhere = self._batch | self._parameters | self._other.keys() | self._kept_copies
        elsewhere |= {key for call, packed in self._packed.items() if not call.packs for key in packed}
        named = prunable_layers(self._model)
        rows = {layer: LayerFootprint(fqns[0], type(layer).__name__, 0.0) for fqns, layer in named}
        for call, packed in self._packed.items():
            _add(rows[call.layer], call, sum(packed.values()), elsewhere, call in self._sharing)
        let_go = dict(call.weight_copy for call in self._packed if call.packs and call.weight_copy is not None)
        return MemoryReport(
            [row for row in rows.values() if row.calls],
            sum(self._other.values()),
            weight_copy_bytes=sum(nbytes for key, nbytes in let_go.items() if key not in self._kept_copies),
        )

    def _on_saved(self, saved: Saved) -> None:
        packed = self._packed.setdefault(saved.call, {}) if saved.call is not None else {}
        if saved.copy_key is not None:
            self._kept_copies.add(saved.copy_key)
        if saved.key in self._batch or saved.key in self._parameters:
            return
        if saved.key in self._seen:
            if saved.call is not None and saved.call.packs and saved.key not in packed:
                self._sharing.add(saved.call)
            return
        self._seen.add(saved.key)
        if saved.call is not None and _holds_input(saved.call, packed, saved):
            packed[saved.key] = saved.nbytes
        else:
            self._other[saved.key] = saved.nbytes


def _holds_input(call: LinearCall, packed: dict[StorageWeakRef, int], saved: Saved) -> bool:
    """Return whether a storage saved during ``call`` is kept for the input, not, say, autocast's copy of the weight.

    Also what a pruned layer keeps in place of that copy: a weight that is no parameter (one with a mask, say).
    """
    if call.packs:
        return saved.key not in call.weight_keys
    if call.dense_key is not None:
        return call.keeps(saved.key)
    return not packed and saved.nbytes == call.dense_bytes


def _add(row: LayerFootprint, call: LinearCall, stored: int, elsewhere: set[Any], shares: bool) -> None:
    """Add ``call`` to its layer's row; ``shares``: what it keeps was packed by another call.

    A dense input already in ``elsewhere`` would cost the dense layer nothing.
    """
    row.calls += 1
    row.sparsity = max(row.sparsity, call.sparsity)
    row.stored_bytes += stored
    if not call.packs:
        row.dense_bytes += stored
        row.accounted_bytes += stored
        return
    row.accounted_bytes += 0 if shares or call.derived else call.packed_bytes(call.sparsity)
    held = call.dense_copy if call.dense_key is None else call.dense_key
    if held is None or held not in elsewhere:
        row.dense_bytes += call.dense_bytes
    if held is not None:
        elsewhere.add(held)
