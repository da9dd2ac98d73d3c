"""What a training step has in use, from beginning to end: counted on any device, measured on CUDA.

A step is cut at *moments*: where modules begin and end, where backward reads a saved tensor, where a phase ends.

    M_i    most bytes in use since moment i-1, by the allocator; without one, the sum of what is counted at moment i
    A_i    bytes of the distinct storages that autograd keeps at moment i
    a_i    the least that it keeps meanwhile, min(A_(i-1), A_i); if counted, A_i

The peak of the step is max M_i. If a fraction f of the activations were not kept, it would be at most ::

    P(f) = max_i ( M_i - f a_i )

which stops falling where something else is the peak, such as gradients and optimizer state, or temporary tensors.

Activations are counted without the allocator. Saved-tensor hooks see each tensor when it is saved, a weak
reference to what the graph holds in its place shows when it is released, and the running node names the operation when
backward reads it. On CUDA the allocator is also read at each of these moments and its peak statistics are reset, so the
peak of every interval is measured, including temporary tensors. That takes some 20 us per moment.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_actprune.analysis.recorder import (
    ModuleNames,
    Saved,
    SavedTensorRecorder,
    find_storages,
    unpack_listeners,
)
from lightning_actprune.codec.private import FOR_NODES, current_autograd_node, tree_leaves
from lightning_actprune.config import check_share
from lightning_actprune.operators.base import Converted
from lightning_actprune.operators.hooks import backward_runs
from lightning_actprune.operators.readers import operator_name

Phase: TypeAlias = Literal["forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = "forward", "backward", "optimizer"
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_RETAINERS_NAMED = 3
LOSSES = "log_softmax", "nll_loss", "cross_entropy"
"""Prefixes of operations that keep log-probabilities, one for each class."""


@dataclass(frozen=True)
class Retainer:
    """One who keeps a storage for backward.

    Args:
        fqn: Name of the running module, ``""`` outside of all modules.
        operator: Autograd's name of the operation in snake case (``native_layer_norm``); ``None`` if backward did not
            read the tensor.
    """

    fqn: str
    operator: str | None

    @property
    def label(self) -> str:
        """Name for tables, with numbers in module names as ``*``."""
        name = _NUMBER.sub("*", self.fqn) or "(step)"
        return f"{name} ({self.operator})" if self.operator else name


@dataclass
class Retained:
    """A storage that autograd keeps.

    Args:
        nbytes: Its size.
        packed: Whether it holds packed values.
        born: Index of the first moment at which it is kept.
        freed: Index of the first moment at which it is kept no more, ``None`` if it outlives the step.
        retainers: All who keep it, in the order in which they saved it; it is freed when the last of them releases it.
        covered: Whether it holds packed values, or a converted layer keeps it.
    """

    nbytes: int
    packed: bool
    born: int
    freed: int | None = None
    retainers: list[Retainer] = field(default_factory=list)
    covered: bool = False

    def is_kept_at(self, moment: int) -> bool:
        """Return True if autograd keeps it at the moment of this index."""
        return self.born <= moment and (self.freed is None or moment < self.freed)

    @property
    def is_of_loss(self) -> bool:
        """Whether it holds what a loss computes from its logits."""
        return any(retainer.operator and retainer.operator.startswith(LOSSES) for retainer in self.retainers)

    @property
    def label(self) -> str:
        """Names of the retainers, without repetition."""
        labels = list(dict.fromkeys(retainer.label for retainer in self.retainers))
        more = len(labels) - _RETAINERS_NAMED
        return " + ".join(labels[:_RETAINERS_NAMED]) + (f" + {more} more" if more > 0 else "")


@dataclass(frozen=True)
class RetainerGroup:
    """Number and bytes of storages with the same retainers in corresponding modules."""

    label: str
    packed: bool
    count: int
    nbytes: int


@dataclass
class MemoryMoment:
    """A moment of a step, and the interval since the previous one.

    Args:
        phase: Phase of the interval.
        fqn: Name of the module whose forward or backward ran in the interval, ``""`` outside of all modules.
        operator: The operation whose backward ran, ``None`` in a forward.
        gradient_bytes: Distinct storages of the parameters' gradients.
        optimizer_bytes: Distinct storages of the optimizers' state.
        used_bytes: Bytes in use by the allocator, ``None`` without one.
        peak_bytes: Most bytes in use in the interval, ``None`` without an allocator.
    """

    phase: Phase
    fqn: str
    operator: str | None
    gradient_bytes: int
    optimizer_bytes: int
    used_bytes: int | None = None
    peak_bytes: int | None = None


@dataclass
class StepMemory:
    """Memory over one training step.

    Args:
        parameter_bytes: Distinct storages of parameters and buffers.
        batch_bytes: Distinct storages of the batch that are not parameters.
        moments: The moments in order; the first is the beginning of the step.
        retained: The storages that autograd kept.
    """

    parameter_bytes: int
    batch_bytes: int
    moments: list[MemoryMoment] = field(default_factory=list)
    retained: list[Retained] = field(default_factory=list)

    @property
    def measured(self) -> bool:
        """Whether an allocator was read; counted bytes lack temporary tensors."""
        return any(moment.peak_bytes is not None for moment in self.moments)

    @functools.cached_property
    def packed_bytes(self) -> list[int]:
        """Bytes of packed values kept at each moment."""
        return self._sum_over_time(storage for storage in self.retained if storage.packed)

    @functools.cached_property
    def activation_bytes(self) -> list[int]:
        """Bytes that autograd keeps at each moment, including packed values."""
        return self._sum_over_time(self.retained)

    @functools.cached_property
    def interval_bytes(self) -> list[int]:
        """Most bytes in use since the previous moment, for each moment (M_i of the module)."""
        peaks = [moment.peak_bytes for moment in self.moments]
        return [sum(self._count_parts(i).values()) if peak is None else peak for i, peak in enumerate(peaks)]

    def peak_in(self, phase: Phase | None = None) -> int | None:
        """Return the index of the moment with the peak of a phase, or of the step; ``None`` without moments."""
        if phase not in (None, *PHASES):
            raise ValueError(
                f"`phase` must be {', '.join(map(repr, PHASES))} or None, got {phase!r}. HINT: None is the whole step."
            )
        indices = [i for i, moment in enumerate(self.moments) if phase in (None, moment.phase)]
        return max(indices, key=self.interval_bytes.__getitem__, default=None)

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use during the step; 0 without moments."""
        return max(self.interval_bytes, default=0)

    @property
    def forward_end(self) -> int:
        """Index of the last moment before the first backward, where most is kept; without backward, the last one."""
        phases = [moment.phase for moment in self.moments]
        return (phases.index("backward") if "backward" in phases else len(phases)) - 1

    def bytes_without(self, fraction: float) -> list[int]:
        """Return the upper bound of M_i at each moment if this fraction of the activations were not kept."""
        check_share(fraction, "fraction")
        return self._bytes_with(1 - fraction)

    def _bytes_with(self, factor: float) -> list[int]:
        """Return M_i at each moment if ``factor`` times as much were kept."""
        lowest = ends = self.activation_bytes
        if self.measured:
            lowest = [min(before, end) for before, end in zip(ends[:1] + ends, ends, strict=False)]
        return [round(m + (factor - 1) * a) for m, a in zip(self.interval_bytes, lowest, strict=True)]

    def peak_with(self, factor: float) -> int:
        """Return about the peak in bytes if ``factor`` times as much were kept, as in the dense model."""
        return max(self._bytes_with(factor), default=0)

    def peak_without(self, fraction: float) -> int:
        """Return the upper bound of the peak in bytes if this fraction of the activations were not kept."""
        return max(self.bytes_without(fraction), default=0)

    def parts(self, index: int) -> dict[str, int]:
        """Return the bytes in use in the interval before a moment by kind; they add up to M_i.

        These are the bytes at the end of the interval. In a measured backward they are those at its beginning, since an
        operation releases its tensors only when it ends.
        """
        parts = self._count_parts(self._find_named_moment(index))
        return parts | {"other": max(self.interval_bytes[index] - sum(parts.values()), 0)}

    def logits_bytes(self, index: int) -> int:
        """Return the bytes of logits, and of a loss with one value per logit, in the interval before a moment.

        They are what such a loss keeps, and also "other" of ``parts`` where the loss itself runs.
        """
        at, moment = self._find_named_moment(index), self.moments[index]
        of_loss = [storage for storage in self.retained if storage.is_of_loss]
        runs = (moment.operator or "").startswith(LOSSES) or any(storage.born == index for storage in of_loss)
        saved = sum(storage.nbytes for storage in of_loss if storage.is_kept_at(at))
        return saved + (self.parts(index)["other"] if runs else 0)

    def groups(self, index: int, *, uncovered: bool = False) -> list[RetainerGroup]:
        """Return who keeps what at a moment, largest first, with corresponding modules in one group.

        Args:
            index: The moment.
            uncovered: Whether to leave out packed values and what converted layers keep.
        """
        sizes_by_label: dict[tuple[str, bool], list[int]] = {}
        for storage in self.retained:
            if storage.is_kept_at(index) and not (uncovered and storage.covered):
                sizes_by_label.setdefault((storage.label, storage.packed), []).append(storage.nbytes)
        groups = [RetainerGroup(*key, len(sizes), sum(sizes)) for key, sizes in sizes_by_label.items()]
        return sorted(groups, key=lambda group: -group.nbytes)

    def series(self, operators: int = 5) -> dict[str, list[int]]:
        """Return bytes at each moment by kind, those kept for backward by operation: the data of a stacked picture.

        Args:
            operators: How many operations to name, those with the most bytes over the step; the others share one entry.
                A storage with several retainers counts for the first.
        """
        parts = [self._count_parts(index) for index in range(len(self.moments))]
        names = "parameters", "optimizer state", "gradients", "batch", "packed tensors"
        series = {name: [moment[name] for moment in parts] for name in names}
        by_operator: dict[str, list[Retained]] = {}
        for storage in self.retained:
            if not storage.packed:
                by_operator.setdefault(storage.retainers[0].operator or "not used", []).append(storage)
        curves = sorted((self._sum_over_time(retained), name) for name, retained in by_operator.items())
        curves.sort(key=lambda curve: -sum(curve[0]))
        series |= {name: curve for curve, name in curves[:operators]}
        others = [curve for curve, _ in curves[operators:]]
        return series | ({"other operations": [sum(column) for column in zip(*others, strict=True)]} if others else {})

    def to_rows(self) -> list[dict[str, str | int | None]]:
        """Return the moments as flat rows: ``pandas.DataFrame(step.to_rows())`` is a table.

        ``activation_bytes`` is what autograd keeps, including ``packed_bytes``; ``interval_bytes`` is M_i of the
        module.
        """
        columns = zip(self.activation_bytes, self.packed_bytes, self.interval_bytes, strict=True)
        same = {"parameter_bytes": self.parameter_bytes, "batch_bytes": self.batch_bytes}
        return [
            {**asdict(moment), **same, "activation_bytes": saved, "packed_bytes": packed, "interval_bytes": most}
            for moment, (saved, packed, most) in zip(self.moments, columns, strict=True)
        ]

    def _find_named_moment(self, index: int) -> int:
        """Return the moment whose bytes describe the interval before ``index``."""
        return index - 1 if self.measured and self.moments[index].phase == "backward" and index > 0 else index

    def _count_parts(self, index: int) -> dict[str, int]:
        moment, packed = self.moments[index], self.packed_bytes[index]
        return {
            "parameters": self.parameter_bytes,
            "gradients": moment.gradient_bytes,
            "optimizer state": moment.optimizer_bytes,
            "batch": self.batch_bytes,
            "packed tensors": packed,
            "other saved tensors": self.activation_bytes[index] - packed,
        }

    def _sum_over_time(self, retained: Iterable[Retained]) -> list[int]:
        changes = [0] * (len(self.moments) + 1)
        for storage in retained:
            changes[min(storage.born, len(self.moments))] += storage.nbytes
            if storage.freed is not None:
                changes[min(storage.freed, len(self.moments))] -= storage.nbytes
        totals, total = [], 0
        for change in changes[:-1]:
            total += change
            totals.append(total)
        return totals


# === The recorder =====================================================================================================
class StepMemoryRecorder(SavedTensorRecorder):
    """Record what is in use over the step that runs inside this context.

    The step begins with its forward; call ``mark`` where backward and the optimizer begin. A backward without a mark
    begins where it reads its first tensor, another forward begins with the call of a module. Nothing is kept alive.
    Tensors on other devices do not count; what saved-tensor hooks around this context move elsewhere, such as those of
    ``save_on_cpu``, counts as if it stayed. Inside ``torch.compile``d modules there are moments only for their saved
    tensors, which all count for the module that calls the compiled one.

    Args:
        model: The module that the step trains.
        batch: Holds the step's input tensors.
        optimizers: Optimizers whose state counts.
        device: Device whose memory counts; by default that of the first parameter, or the CPU.
        allocator: Returns the bytes in use now, and the most since its last call; by default that of CUDA.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> x = torch.randn(16, 64)
        >>> with StepMemoryRecorder(model, x, [optimizer]) as recorder:
        ...     loss = model(x).sum()
        ...     recorder.mark("backward")
        ...     loss.backward()
        ...     recorder.mark("optimizer")
        ...     optimizer.step()
        >>> step = recorder.result()
        >>> [(group.label, group.nbytes) for group in step.groups(step.forward_end)]
        [('* (gelu)', 4096), ('* (addmm)', 4096)]
    """

    needs = FOR_NODES

    def __init__(
        self,
        model: nn.Module,
        batch: Any = None,
        optimizers: Sequence[Optimizer] = (),
        device: torch.device | None = None,
        allocator: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        super().__init__(model, batch)
        self._allocator = allocator
        first = next(model.parameters(), None)
        self._device = device or (torch.device("cpu") if first is None else first.device)
        self._optimizers = optimizers
        self._names = ModuleNames(model)
        self._sizes = {key: n for t in tree_leaves(batch) if self._is_here(t) for key, n in find_storages(t)}
        self._phase: Phase = "forward"
        self._taken_up: tuple[str, str | None] = "", None
        self._moments: list[MemoryMoment] = []
        self._retained: dict[StorageWeakRef, Retained] = {}
        self._graph: dict[int, _InGraph] = {}
        self._uses: Counter[StorageWeakRef] = Counter()
        self._gradients: dict[StorageWeakRef, int] = {}
        self._gradient_bytes = 0
        self._optimizer_bytes = 0
        self._gradient_hooks: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        unpack_listeners.append(self._on_unpack)
        super().__enter__()
        try:
            for parameter in self._model.parameters():
                if parameter.requires_grad and parameter.is_leaf:
                    register: Any = parameter.register_post_accumulate_grad_hook
                    handle = register(self._on_gradient)
                    self._gradient_hooks.append(handle)
            self._ask_allocator()  # its peak so far is not of this step
            self.moment()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self._active:
            self.moment()
        self.close()

    def close(self) -> None:
        """Stop recording; the record stays."""
        if self._on_unpack in unpack_listeners:
            unpack_listeners.remove(self._on_unpack)
            while self._gradient_hooks:
                self._gradient_hooks.pop().remove()
            self._graph.clear()
        super().close()

    def mark(self, phase: Phase) -> None:
        """Begin this phase."""
        self.moment()
        self._phase, self._taken_up = phase, ("", None)

    def moment(self) -> None:
        """Record what is in use now, with gradients and optimizer state read again."""
        self._gradients.clear()
        self._gradient_bytes = 0
        for parameter in self._model.parameters():
            self._add_gradient(parameter)
        states = [state.values() for optimizer in self._optimizers for state in optimizer.state.values()]
        self._optimizer_bytes = self._sum_bytes(tensor for state in states for tensor in state)
        self._add_moment("" if not self._running else self._names[self._running[-1][0]], None)

    def result(self) -> StepMemory:
        """Return the record so far."""
        parameters = self._sum_bytes((*self._model.parameters(), *self._model.buffers()))
        batch = sum(nbytes for key, nbytes in self._sizes.items() if key not in self._parameters)
        return StepMemory(parameters, batch, list(self._moments), list(self._retained.values()))

    def _enter(self, module: nn.Module, call: Any) -> None:
        # Another forward in the same step, such as that of a second optimizer; not one that a checkpoint runs again.
        if self._phase != "forward" and not backward_runs():
            self.mark("forward")
        self._add_forward_moment()
        super()._enter(module, call)

    def _leave(self, module: nn.Module) -> None:
        self._add_forward_moment()
        super()._leave(module)

    def _add_forward_moment(self) -> None:
        self._add_moment(self._names.get(self._running[-1][0], "") if self._running else "", None)

    def _on_saved(self, saved: Saved) -> None:
        handle = saved.handle()
        is_there_anyway = saved.key in self._batch or saved.key in self._parameters
        if is_there_anyway or handle is None or saved.device != self._device:
            return
        inside = any(isinstance(module, Converted) for module, _ in self._running)
        packed = saved.is_packed or (saved.call is not None and saved.call.packs)
        packed |= inside and saved.dtype == torch.uint8
        now = len(self._moments)
        storage = self._retained.setdefault(saved.key, Retained(saved.nbytes, packed, now))
        storage.freed = None
        storage.covered |= inside or packed
        if id(handle) not in self._graph:
            self._graph[id(handle)] = _InGraph(handle, self._on_let_go)
        self._graph[id(handle)].saved.append((saved.key, len(storage.retainers)))
        self._uses[saved.key] += 1
        storage.retainers.append(Retainer("" if saved.module is None else self._names[saved.module], None))

    def _on_unpack(self, value: Any) -> None:
        entry = self._graph.get(id(value))
        if entry is None:
            return
        if self._phase == "forward":
            self.mark("backward")
        self._add_moment(*self._taken_up)
        node = current_autograd_node()
        operator = None if node is None else operator_name(node.name())
        # If several have saved this object, the last of those that have not read it yet reads it now.
        ahead = [(key, index) for key, index in entry.saved if self._retained[key].retainers[index].operator is None]
        for key, index in dict(ahead or entry.saved).items():
            retainers = self._retained[key].retainers
            fqn = retainers[index].fqn
            self._taken_up = fqn, operator
            retainers[index] = Retainer(fqn, operator)

    def _on_let_go(self, number: int) -> None:
        entry = self._graph.pop(number, None)
        for key, _ in () if entry is None else entry.saved:
            self._uses[key] -= 1
            if self._uses[key] == 0:
                self._retained[key].freed = len(self._moments)

    def _on_gradient(self, parameter: Tensor) -> None:
        self._add_gradient(parameter)
        self._add_moment(*self._taken_up)

    def _add_gradient(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        for key, nbytes in find_storages(gradient) if self._is_here(gradient) else ():
            if key not in self._gradients:
                self._gradients[key] = nbytes
                self._gradient_bytes += nbytes

    def _add_moment(self, fqn: str, operator: str | None) -> None:
        sizes = self._gradient_bytes, self._optimizer_bytes
        self._moments.append(MemoryMoment(self._phase, fqn, operator, *sizes, *self._ask_allocator()))

    def _ask_allocator(self) -> tuple[int | None, int | None]:
        """Return the bytes in use now, and the most since the last call."""
        if self._allocator is not None:
            return self._allocator()
        if self._device.type != "cuda":
            return None, None
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]
        torch.cuda.reset_peak_memory_stats(self._device)
        return int(stats["current"]), int(stats["peak"])

    def _is_here(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device == self._device

    def _sum_bytes(self, values: Iterable[Any]) -> int:
        sizes = {key: nbytes for value in values if self._is_here(value) for key, nbytes in find_storages(value)}
        return sum(sizes.values())


class _InGraph:
    """What the graph holds in place of a tensor: when it is released, and for whom it is kept."""

    def __init__(self, value: Any, on_let_go: Callable[[int], None]) -> None:
        number = id(value)
        self.reference = weakref.ref(value, lambda _: on_let_go(number))
        self.saved: list[tuple[StorageWeakRef, int]] = []
        """The storages behind it, one entry per save, with the index among their retainers."""
