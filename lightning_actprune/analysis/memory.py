"""What one training forward keeps for backward, layer by layer: counted on any device, also measured on CUDA.

Autograd passes every tensor that it saves to a hook (``analysis.recorder``). ``SavedTensorMeter`` counts the distinct
storages behind them and credits each to the running module. That is exact, costs no memory and needs no GPU. A row's
``dense_bytes`` is what the layer *alone* would keep if it were dense. If something else retains its input too (the
activation before it, a sister layer, the batch), the layer frees nothing by dropping it, so such bytes count once,
where they stay.

The dense memory of the whole model is the union of two sets of storages: those that converted modules would keep if
they were dense (``analysis.dense_footprint``), and those that everything else keeps, or would keep unpacked. The latter
are counted when autograd saves a tensor: it may be packed after its module has returned, together with what a converted
module saved, or not at all, as rows that are selected again. Under autocast these include the copies of weights that
dense layers keep.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_actprune.analysis.dense_footprint import DenseForward
from lightning_actprune.analysis.recorder import (
    LayerCall,
    ModuleNames,
    Saved,
    SavedTensorRecorder,
    find_storages,
    hooks_are_innermost,
    input_layers,
)
from lightning_actprune.analysis.step_memory import LOSSES, Retainer, StepMemory
from lightning_actprune.codec.private import FOR_FAKES, refusal
from lightning_actprune.compiled.decision_log import Row
from lightning_actprune.compiled.marks import Model
from lightning_actprune.config import Keep
from lightning_actprune.operators.base import Converted, dense_class
from lightning_actprune.operators.hooks import in_compiled_region, is_recomputation
from lightning_actprune.report import (
    MAX_ROWS,
    MOST_NAMED,
    as_text,
    cut_rows,
    describe_keep,
    group_by_place,
    join_names,
    make_table,
    mib,
    percent,
)

_OUT_OF_REACH = 1 / 3
"""Share of what a dense model keeps from which on uncovered operations are named."""
_MOSTLY = 2 / 3
"""Share of the peak from which on parameters, gradients and the optimizer's state are named."""
_LOGITS_ADVICE = (
    "Compute head and loss together, so that the logits are never held at once: by "
    "`torch.nn.functional.linear_cross_entropy` with `options` (torch 2.14 and newer), or by Liger's fused loss."
)
_ADVICE = (
    (("lstm", "gru", "rnn"), "Recurrent layers are not covered: shorter sequences keep less."),
    (tuple(f"({name}" for name in LOSSES), _LOGITS_ADVICE),
)
"""Advice by words in the names of operations."""
_ANY_ADVICE = "A preset or a rule that covers these modules, or activation checkpointing, keeps less."
_COMPILED = "(compiled_function)"
"""What autograd calls all that one piece of compiled code keeps."""
_FULL = 0.999
"""Share of the most kept bytes from which on a moment of the forward counts as its end."""


@dataclass
class LayerFootprint:
    """Bytes that one layer keeps for backward, summed over its calls.

    Args:
        fqn: Fully qualified name of the layer.
        kind: Name of its class.
        sparsity: Fraction of blocks dropped, the largest of its calls; 0 for a dense layer.
        calls: How often the layer kept something.
        dense_bytes: Bytes of the inputs that the layer alone would keep if it were dense.
        stored_bytes: Bytes of the distinct storages it did keep, without its parameters; 0 behind a norm that keeps its
            output quantized for both.
        accounted_bytes: The same by formula, from shapes and settings alone.
        bits: Bits per kept value, ``None`` if values are not quantized.
    """

    fqn: str
    kind: str
    sparsity: float
    calls: int = 0
    dense_bytes: int = 0
    stored_bytes: int = 0
    accounted_bytes: int = 0
    bits: int | None = None

    @property
    def saved_bytes(self) -> int:
        """Bytes saved; negative if something else keeps the input anyway."""
        return self.dense_bytes - self.stored_bytes

    def to_dict(self) -> dict[str, str | float | None]:
        """Return all fields as numbers and strings."""
        return asdict(self) | {"saved_bytes": self.saved_bytes}


@dataclass
class MemoryReport:
    """What one training forward keeps for backward.

    Args:
        rows: The layers that kept their input, whole or packed, in the order of the model.
        other_bytes: All other distinct storages that autograd saved, without parameters, buffers and the batch.
        dense_bytes: Distinct bytes that the whole model would keep without conversion, ``None`` if compiled code hides
            converted layers.
        measured_activation_bytes: Growth of the allocator's requested bytes over the forward, on CUDA only.
        measured_peak_bytes: Allocator's peak over the whole step, on CUDA only.
        compiled_bytes: Part of ``other_bytes`` that compiled code keeps.
        keepers: Parts of ``other_bytes`` by the module that keeps them; corresponding modules share one name.
        step: Memory over the whole step, if it was recorded.
        compiled: How compiled code keeps its values, if it is known.
    """

    rows: list[LayerFootprint] = field(default_factory=list)
    other_bytes: int = 0
    dense_bytes: int | None = 0
    measured_activation_bytes: int | None = None
    measured_peak_bytes: int | None = None
    compiled_bytes: int = 0
    keepers: dict[str, int] = field(default_factory=dict)
    step: StepMemory | None = None
    compiled: Sequence[Row] = ()

    @property
    def stored_bytes(self) -> int:
        """Bytes that the whole model keeps."""
        return sum(row.stored_bytes for row in self.rows) + self.other_bytes

    @property
    def saved_bytes(self) -> int | None:
        """Bytes by which the whole model keeps less than the dense one."""
        return None if self.dense_bytes is None else self.dense_bytes - self.stored_bytes

    @property
    def saved_fraction(self) -> float | None:
        """Saved bytes as a fraction of ``dense_bytes``; 0 if nothing would be kept."""
        saved, dense = self.saved_bytes, self.dense_bytes
        return None if saved is None or dense is None else saved / max(dense, 1)

    @property
    def other_dense_bytes(self) -> int | None:
        """Part of ``dense_bytes`` that is not inputs of the listed layers."""
        return None if self.dense_bytes is None else self.dense_bytes - sum(row.dense_bytes for row in self.rows)

    @property
    def sparsity(self) -> float:
        """Highest sparsity of a listed layer; 0 if there are none."""
        return max((row.sparsity for row in self.rows), default=0.0)

    def __str__(self) -> str:
        """Return the sentence on the whole model, and a table of the layers."""
        return f"{describe_memory(self)}\n{as_text(tabulate_memory(self))}"

    def describe_sizes(self) -> list[str]:
        """Return a line on activations, dense and now, and one on the peak if the step was recorded."""
        return [describe_memory(self), *([] if self.step is None else [_describe_peak(self, self.step)])]

    def describe_rest(self) -> list[str]:
        """Return a line on the largest of what is kept, and advice if much of it is uncompressed."""
        sizes = Counter(self.keepers)
        for name, rows in group_by_place(self.rows, _describe_layer):
            sizes[name] += sum(row.stored_bytes for row in rows)
        if self.step is not None:
            sizes = Counter()
            for group in self.step.groups(self.step.forward_end):
                sizes[group.label] += group.nbytes
        if self.compiled:
            sizes = Counter({name: nbytes for name, nbytes in sizes.items() if _COMPILED not in name})
            for name, how, _, stored in group_compiled(self.compiled):
                sizes[f"{name} ({how.partition(':')[0]})"] += stored
        largest = join_names([f"{name} {mib(nbytes)} MiB" for name, nbytes in sizes.most_common(MOST_NAMED) if nbytes])
        advice = "" if self.step is None else _describe_fixed(self.step) or describe_uncovered(self)
        return [f"Largest of what is kept: {largest}.", *([advice] if advice else [])]

    def totals(self) -> dict[str, float | None]:
        """Return the totals as one flat row, with ``None`` for what was not measured.

        ``peak_bytes`` is the peak of the step, if it was recorded: measured on CUDA, counted elsewhere.
        """
        names = ["sparsity", "dense_bytes", "stored_bytes", "saved_bytes", "saved_fraction"]
        names += ["other_bytes", "compiled_bytes", "measured_activation_bytes", "measured_peak_bytes"]
        peak = None if self.step is None else self.step.peak_bytes
        return {**{name: getattr(self, name) for name in names}, "peak_bytes": peak}

    def to_rows(self) -> list[dict[str, str | float | None]]:
        """Return the layers as flat rows: ``pandas.DataFrame(report.to_rows())`` is a table."""
        return [row.to_dict() for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as numbers and strings, ready for JSON: totals, layers as ``rows``, and the step."""
        return self.totals() | {"rows": self.to_rows(), "step": None if self.step is None else asdict(self.step)}


class SavedTensorMeter(SavedTensorRecorder):
    """Count what the forward passes inside this context keep for backward.

    Each distinct storage counts once, in full, for the first module that saved it. Nothing is kept alive.

    Modules inside a ``torch.compile``d one are not seen separately: what the compiled graph saves is in
    ``other_bytes``, and ``rows`` may be empty. Tensors inside an activation checkpoint are not kept and not counted,
    nor are those that go to saved-tensor hooks opened inside this context. Hooks open around it, such as those of
    ``save_on_cpu``, still get what was counted. Sparse tensors are not counted.

    Args:
        model: The module whose layers are listed by name.
        batch: Holds the step's input tensors, which are alive anyway and do not count.

    Example:
        >>> import torch
        >>> from lightning_actprune import convert
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        >>> _ = convert(model, sparsity=0.5)
        >>> with SavedTensorMeter(model) as meter:
        ...     loss = model(torch.randn(16, 64)).sum()
        >>> report = meter.report()
        >>> [(row.fqn, row.dense_bytes, row.stored_bytes) for row in report.rows]
        [('0', 4096, 2176), ('2', 4096, 2176)]
    """

    def __init__(self, model: nn.Module, batch: Any = None) -> None:
        super().__init__(model, batch)
        problem = refusal("Counting what the dense model would keep", FOR_FAKES)
        if problem is not None:
            warnings.warn(f"{problem} What is kept now counts as dense.", stacklevel=2)
        self._packed: dict[LayerCall, dict[StorageWeakRef, int]] = {}
        self._other: dict[StorageWeakRef, int] = {}
        self._seen: set[StorageWeakRef] = set()
        self._sharing: set[LayerCall] = set()
        self._kept_copies: set[Any] = set()
        self._converted: list[tuple[nn.Module, DenseForward | None]] = []
        self._called: set[nn.Module] = set()
        self._dense: dict[Any, int] = {}
        self._compiled_bytes = 0
        self._names = ModuleNames(model)
        self._keepers: Counter[str] = Counter()

    def report(self) -> MemoryReport:
        """Return what was kept so far."""
        elsewhere = self._batch | self._parameters | self._other.keys() | self._kept_copies
        elsewhere |= {key for call, packed in self._packed.items() if not call.packs for key in packed}
        pairs = input_layers(self._model)
        rows = {layer: LayerFootprint(fqns[0], type(layer).__name__, 0.0) for fqns, layer in pairs}
        for call, packed in self._packed.items():
            layer = call.layer  # replicas of DataParallel have no name
            row = rows.setdefault(layer, LayerFootprint(type(layer).__name__, type(layer).__name__, 0.0))
            _add_call(row, call, sum(packed.values()), elsewhere, call in self._sharing)
        ignored = self._batch | self._parameters | self._kept_copies
        converted = {module for module in self._model.modules() if isinstance(module, Converted)}
        # Compiled code that keeps something may contain converted modules whose calls were not seen.
        hidden = self._compiled_bytes > 0 and not converted <= self._called
        return MemoryReport(
            [row for row in rows.values() if row.calls],
            sum(self._other.values()),
            None if hidden else sum(nbytes for key, nbytes in self._dense.items() if key not in ignored),
            compiled_bytes=self._compiled_bytes,
            keepers=dict(self._keepers),
        )

    def _enter_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._enter_module(module, args, kwargs)
        self._called.add(module)
        if isinstance(module, Converted) and not self._converted:
            self._called.update(module.modules())
            self._converted.append((module, _run_dense_forward(module, args, kwargs)))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        super()._leave_module(module, args, output)
        if self._converted and self._converted[-1][0] is module:
            _, dense = self._converted.pop()
            if dense is not None:
                self._dense |= dense.find_storages(output)

    def _on_delayed(self, tensor: Tensor) -> None:
        if not self._has_dense_footprint:
            self._dense |= dict(find_storages(tensor))

    @property
    def _has_dense_footprint(self) -> bool:
        """Whether a module runs of which is known what it would keep if it were dense."""
        return bool(self._converted) and self._converted[-1][1] is not None

    def _on_saved(self, saved: Saved) -> None:
        packed = self._packed.setdefault(saved.call, {}) if saved.call is not None else {}
        if saved.copy_key is not None:
            self._kept_copies.add(saved.copy_key)
        if not saved.is_late and not self._has_dense_footprint:
            self._dense[saved.key] = saved.nbytes
        if saved.key in self._batch or saved.key in self._parameters:
            return
        if saved.key in self._seen:
            if saved.call is not None and saved.call.packs and saved.key not in packed:
                self._sharing.add(saved.call)
            return
        self._seen.add(saved.key)
        if saved.call is not None and _keeps_input(saved.call, packed, saved):
            packed[saved.key] = saved.nbytes
            return
        self._other[saved.key] = saved.nbytes
        name = "" if saved.module is None else self._names.get(saved.module, "")
        kind = None if saved.module is None else dense_class(type(saved.module)).__name__
        label = Retainer(name, kind).label
        if in_compiled_region():
            self._compiled_bytes += saved.nbytes
            label = f"{name} {_COMPILED}"
        self._keepers[label] += saved.nbytes


def _run_dense_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DenseForward | None:
    """Run the forward of the dense module; ``None`` if it keeps nothing or cannot run without values."""
    if is_recomputation() or not (torch.is_grad_enabled() and hooks_are_innermost()):
        return None
    try:
        return DenseForward(module, args, kwargs)
    except Exception:  # any error of a user's module: what it keeps now then counts as dense
        return None


def _keeps_input(call: LayerCall, packed: dict[StorageWeakRef, int], saved: Saved) -> bool:
    """Return True if a storage saved during ``call`` is kept for the input, unlike autocast's copy of the weight.

    A compressed layer may also save a weight that is not a parameter (one with a mask, say) in place of that copy.
    """
    if call.packs:
        return saved.key not in call.weight_keys
    if call.dense_key is not None:
        return call.keeps(saved.key)
    return not packed and saved.nbytes == call.dense_bytes


def _add_call(row: LayerFootprint, call: LayerCall, stored: int, elsewhere: set[Any], shares: bool) -> None:
    """Add ``call`` to the row of its layer; ``shares``: another call has packed what it keeps.

    A dense input already in ``elsewhere`` would cost the dense layer nothing.
    """
    row.calls += 1
    row.sparsity = max(row.sparsity, call.sparsity)
    row.bits = (call.blocks.bits or None) if call.packs and call.blocks is not None else row.bits
    row.stored_bytes += stored
    if not call.packs:
        row.dense_bytes += stored
        row.accounted_bytes += stored
        return
    row.accounted_bytes += 0 if shares or call.reuses else call.packed_bytes(call.sparsity)
    input_key = call.dense_copy if call.dense_key is None else call.dense_key
    if input_key is None or input_key not in elsewhere:
        row.dense_bytes += call.dense_bytes
    if input_key is not None:
        elsewhere.add(input_key)


# === The table and its headline =======================================================================================

_HOW = {"again": "computed again", "signs": "signs", "shape": "its shape alone"}


def group_compiled(rows: Sequence[Row]) -> Iterator[tuple[str, str, int, int]]:
    """Yield name, settings, dense and stored bytes of values with the same settings, the largest first."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        packed = f"{row.bits} bits" if row.bits else "fewer blocks"
        how = _HOW.get(row.how) or (packed if row.how == "packed" else f"uncompressed: {row.reason}")
        groups.setdefault((row.name, how), []).append(row)
    by_size = sorted(groups.items(), key=lambda group: -sum(row.stored_bytes for row in group[1]))
    largest, rest = cut_rows(by_size)
    if rest:
        largest = [*largest, (("... and more", ""), [row for _, members in rest for row in members])]
    for (name, how), members in largest:
        dense, stored = sum(row.dense_bytes for row in members), sum(row.stored_bytes for row in members)
        yield name if len(members) == 1 else f"{name} ({len(members)})", how, dense, stored


def describe_memory(report: MemoryReport) -> str:
    """Return a sentence with the memory of the whole model, now and dense."""
    stored = f"{mib(report.stored_bytes)} MiB"
    if report.dense_bytes is None:
        if not report.compiled:
            return (
                f"Activations: {stored}; compiled code hides what the dense model would keep. It packs only tensors of "
                f"{Model.min_values:,} values or more."
            )
        dense = mib(sum(row.dense_bytes for row in report.compiled))
        return f"Activations: {stored}; uncompressed, compiled code would keep up to {dense} MiB."
    if report.dense_bytes == report.stored_bytes:
        return f"Activations: {stored}, as in the dense model."
    change = -100 * (report.saved_fraction or 0.0)
    return f"Activations: {mib(report.dense_bytes)} MiB dense -> {stored} ({change:+.1f} %)."


def describe_uncovered(report: MemoryReport) -> str:
    """Return who keeps uncovered tensors, with advice, if these exceed a third of what the dense model keeps.

    The same goes for the logits, covered or not, if they exceed a third of what is kept or of the peak.
    """
    step = report.step
    if step is None:
        return ""
    text, hints = "", list[str]()
    if report.dense_bytes is not None and any(storage.covered for storage in step.retained):
        groups = step.groups(step.forward_end, uncovered=True)
        total, largest = sum(group.nbytes for group in groups), groups[:MOST_NAMED]
        if total > report.dense_bytes * _OUT_OF_REACH:
            keepers = join_names([f"{group.label} {mib(group.nbytes)} MiB" for group in largest])
            hints = [hint for words, hint in _ADVICE if any(word in group.label for group in largest for word in words)]
            text = (
                f"Kept uncompressed: {mib(total)} MiB, {percent(total / report.dense_bytes)} of the dense model, most "
                f"of it by {keepers}."
            )
    if shares := _describe_logits(step):
        hints += [] if _LOGITS_ADVICE in hints else [_LOGITS_ADVICE]
        text = f"{text} {shares}".lstrip()
    return f"{text} HINT: {' '.join(hints or [_ANY_ADVICE])}" if text else ""


def _describe_logits(step: StepMemory) -> str:
    """Return the share of the logits in what is kept and in the peak, where it exceeds a third."""
    peak = step.peak_in()
    if peak is None:
        return ""
    end = step.forward_end
    saved = sum(storage.nbytes for storage in step.retained if storage.is_of_loss and storage.is_kept_at(end))
    parts = (
        (saved, step.activation_bytes[end], "what is kept"),
        (step.logits_bytes(peak), step.peak_bytes, "the peak, including what the loss computes from them"),
    )
    shares = [
        f"{mib(part)} MiB ({percent(part / whole)}) of {what}"
        for part, whole, what in parts
        if part > whole * _OUT_OF_REACH
    ]
    return f"Logits are {join_names(shares)}." if shares else ""


def _describe_fixed(step: StepMemory) -> str:
    """Return advice if most of the peak is none of activations."""
    index = step.peak_in()
    parts = {} if index is None else step.parts(index)
    fixed = sum(parts.get(name, 0) for name in ("parameters", "gradients", "optimizer state"))
    if fixed <= _MOSTLY * step.peak_bytes:
        return ""
    share = percent(fixed / max(step.peak_bytes, 1))
    return (
        f"HINT: parameters, gradients and optimizer state are {share} of the peak; to lower it, take an optimizer with "
        "less state, or shard them over several GPUs."
    )


def _describe_peak(report: MemoryReport, step: StepMemory) -> str:
    """Return the peak, about that of the dense model, and where it is."""
    index = step.peak_in()
    if index is None:
        return ""
    now, kind = f"{mib(step.peak_bytes)} MiB", "measured" if step.measured else "counted, without temporary tensors"
    if report.saved_bytes:
        dense = step.peak_with((report.dense_bytes or 0) / max(report.stored_bytes, 1))
        now = f"about {mib(dense)} MiB dense -> {now} ({100 * (step.peak_bytes / dense - 1):+.1f} %)"
    return f"Peak of the step: {now}, {_describe_moment(step, index)} ({kind})."


def _describe_moment(step: StepMemory, index: int) -> str:
    moment = step.moments[index]
    if moment.phase == "optimizer":
        return "in the optimizer step"
    if moment.phase == "forward" and step.activation_bytes[index] >= _FULL * max(step.activation_bytes):
        return "at the end of the forward"
    where = f" of {moment.fqn!r}" if moment.fqn else ""
    operator = f" ({moment.operator})" if moment.operator else ""
    return f"in the {moment.phase}{where}{operator}"


def tabulate_memory(report: MemoryReport, epoch: int | None = None) -> Table:
    """Return a table of what each linear layer, each other pruned layer and compiled code keeps, with totals."""
    title = "Kept for backward" + ("" if epoch is None else f", epoch {epoch}")
    table = make_table(title, "Layer", "Kept ", "Dense MiB", "Stored MiB", "Saved")
    groups, rest = cut_rows(group_by_place(report.rows, _describe_layer))
    for name, rows in groups:
        table.add_row(name, _describe_layer(rows[0]), *_sum_cells(rows))
    if rest:
        more = [row for _, rows in rest for row in rows]
        table.add_row(f"... and {len(more)} more", "", *_sum_cells(more))
    table.add_section()
    for name, how, dense, stored in group_compiled(report.compiled):
        table.add_row(name, how, *_format_cells(dense, stored))
    if report.compiled:
        table.add_section()
    kept_by = sorted((-nbytes, name) for name, nbytes in report.keepers.items() if _COMPILED not in name)
    for nbytes, name in kept_by[:MAX_ROWS]:
        table.add_row(name, "", "", mib(-nbytes), "")
    others = report.other_bytes - sum(row.stored_bytes for row in report.compiled)
    others = max(0, others + sum(nbytes for nbytes, _ in kept_by[:MAX_ROWS]))
    *sizes, saved = _format_cells(None if kept_by else report.other_dense_bytes, others)
    # What layers share may be stored by others.
    if others or not kept_by:
        table.add_row("Everything else", "", *sizes, "" if saved.startswith("-") else saved)
    table.add_row("Whole model", "", *_format_cells(report.dense_bytes, report.stored_bytes))
    if report.measured_activation_bytes is not None:
        table.add_row("Measured after forward", "", "", mib(report.measured_activation_bytes), "")
    return table


def _describe_layer(row: LayerFootprint) -> str:
    if not row.bits and not row.sparsity:
        return "whole"
    return describe_keep(Keep(bits=row.bits), row.sparsity, row.sparsity)


def _sum_cells(rows: Sequence[LayerFootprint]) -> tuple[str, str, str]:
    return _format_cells(sum(row.dense_bytes for row in rows), sum(row.stored_bytes for row in rows))


def _format_cells(dense: int | None, stored: int) -> tuple[str, str, str]:
    if dense is None:
        return "not known", mib(stored), ""
    saved = percent((dense - stored) / dense) if dense else "kept anyway" if stored else "-"
    return mib(dense), mib(stored), saved
