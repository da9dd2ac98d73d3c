"""Record the memory of one training step (``step_memory``), on any device.

What autograd keeps is known without asking the allocator: saved-tensor hooks see each tensor when it is saved, a weak
reference to what the graph holds in its place tells when it is let go, and when backward takes it up the running node
has the name of the operation. On CUDA the allocator is asked at each of these moments too, and its peak statistics are
reset, so the peak of every interval is measured, temporary tensors included. That takes some 20 us a moment.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_actprune.calls import storages
from lightning_actprune.hooks import backward_runs
from lightning_actprune.saved import Saved, SavedTensorRecorder, unpack_listeners
from lightning_actprune.selection import WRAPPERS
from lightning_actprune.step_memory import Holder, Holding, MemoryMoment, Phase, StepMemory

__all__ = ["StepMemoryRecorder"]

_NODE = re.compile(r"(Backward)?\d*(_compiled)?$")
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class StepMemoryRecorder(SavedTensorRecorder):
    """Record what is in use over the step that runs inside this context.

    The step begins with its forward; ``mark`` tells where backward and the optimizer begin. A backward that nobody
    marks begins where it takes up its first tensor, a further forward with the call of a module. Nothing is kept alive.
    Tensors on other devices do not count; what saved-tensor hooks around this context put elsewhere, such as those of
    ``save_on_cpu``, counts as if it stayed. Inside ``torch.compile``d modules moments are only those of their saved
    tensors, which are all credited to the module that calls the compiled one.

    Args:
        model: The module whose step it is.
        batch: Whatever holds the step's input tensors.
        optimizers: Those whose state counts.
        device: Where memory is looked at; by default the device of the first parameter, or the CPU.

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

    def __init__(
        self,
        model: nn.Module,
        batch: Any = None,
        optimizers: Sequence[Optimizer] = (),
        device: torch.device | None = None,
    ) -> None:
        super().__init__(model, batch)
        first = next(model.parameters(), None)
        self._device = device or (torch.device("cpu") if first is None else first.device)
        self._optimizers = optimizers
        self._names = {module: WRAPPERS.sub("", fqn).removeprefix(".") for fqn, module in model.named_modules()}
        self._sizes = {key: n for t in tree_leaves(batch) if self._is_here(t) for key, n in storages(t)}
        self._phase: Phase = "forward"
        self._taken_up: tuple[str, str | None] = "", None
        self._moments: list[MemoryMoment] = []
        self._holdings: dict[StorageWeakRef, Holding] = {}
        self._graph: dict[int, _Held] = {}
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
                    handle = parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
                    self._gradient_hooks.append(handle)
            self._ask_allocator()  # whose peak so far is not this step's
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
        """Stop recording; what was recorded stays."""
        if self._on_unpack in unpack_listeners:
            unpack_listeners.remove(self._on_unpack)
            for handle in self._gradient_hooks:
                handle.remove()
            self._gradient_hooks.clear()
            self._graph.clear()
        super().close()

    def mark(self, phase: Phase) -> None:
        """Say that this phase begins."""
        self.moment()
        self._phase, self._taken_up = phase, ("", None)

    def moment(self) -> None:
        """Note what is in use now, gradients and optimizer state looked up anew."""
        self._gradients.clear()
        self._gradient_bytes = 0
        for parameter in self._model.parameters():
            self._add_gradient(parameter)
        states = [state.values() for optimizer in self._optimizers for state in optimizer.state.values()]
        self._optimizer_bytes = self._bytes(tensor for state in states for tensor in state)
        self._add_moment("" if not self._running else self._names[self._running[-1][0]], None)

    def result(self) -> StepMemory:
        """Return what was recorded so far."""
        parameters = self._bytes((*self._model.parameters(), *self._model.buffers()))
        batch = sum(nbytes for key, nbytes in self._sizes.items() if key not in self._parameters)
        return StepMemory(parameters, batch, list(self._moments), list(self._holdings.values()))

    def _enter(self, module: nn.Module, call: Any) -> None:
        # A further forward in the same step, such as that of a second optimizer; not one that a checkpoint runs again.
        if self._phase != "forward" and not backward_runs():
            self.mark("forward")
        self._add_forward_moment()
        super()._enter(module, call)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._add_forward_moment()
        super()._leave_module(module, args, output)

    def _add_forward_moment(self) -> None:
        self._add_moment(self._names.get(self._running[-1][0], "") if self._running else "", None)

    def _on_saved(self, saved: Saved) -> None:
        held = saved.handle()
        known = saved.key in self._batch or saved.key in self._parameters
        if known or held is None or saved.device != self._device:
            return
        packed = saved.call is not None and saved.call.packs
        now = len(self._moments)
        holding = self._holdings.setdefault(saved.key, Holding(saved.nbytes, packed, now))
        holding.freed = None
        if id(held) not in self._graph:
            self._graph[id(held)] = _Held(held, self._on_let_go)
        self._graph[id(held)].saved.append((saved.key, len(holding.holders)))
        self._uses[saved.key] += 1
        holding.holders.append(Holder("" if saved.module is None else self._names[saved.module], None))

    def _on_unpack(self, value: Any) -> None:
        held = self._graph.get(id(value))
        if held is None:
            return
        if self._phase == "forward":
            self.mark("backward")
        self._add_moment(*self._taken_up)
        node = torch._C._current_autograd_node()
        operator = None if node is None else operator_name(node.name())
        for key, index in self._takers(held):
            holders = self._holdings[key].holders
            fqn = holders[index].fqn
            self._taken_up = fqn, operator
            holders[index] = Holder(fqn, operator)

    def _takers(self, held: _Held) -> Iterable[tuple[StorageWeakRef, int]]:
        """Return who takes up ``held`` now: of several who saved one object, the last that has not done so yet."""
        waiting = [(key, index) for key, index in held.saved if self._holdings[key].holders[index].operator is None]
        return dict(waiting or held.saved).items()

    def _on_let_go(self, number: int) -> None:
        held = self._graph.pop(number, None)
        for key, _ in () if held is None else held.saved:
            self._uses[key] -= 1
            if self._uses[key] == 0:
                self._holdings[key].freed = len(self._moments)

    def _on_gradient(self, parameter: Tensor) -> None:
        self._add_gradient(parameter)
        self._add_moment(*self._taken_up)

    def _add_gradient(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        for key, nbytes in storages(gradient) if self._is_here(gradient) else ():
            if key not in self._gradients:
                self._gradients[key] = nbytes
                self._gradient_bytes += nbytes

    def _add_moment(self, fqn: str, operator: str | None) -> None:
        known = self._gradient_bytes, self._optimizer_bytes
        self._moments.append(MemoryMoment(self._phase, fqn, operator, *known, *self._ask_allocator()))

    def _ask_allocator(self) -> tuple[int | None, int | None]:
        """Return the bytes in use now, and the most since the last time."""
        if self._device.type != "cuda":
            return None, None
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]
        torch.cuda.reset_peak_memory_stats(self._device)
        return int(stats["current"]), int(stats["peak"])

    def _is_here(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device == self._device

    def _bytes(self, values: Iterable[Any]) -> int:
        found = {key: nbytes for value in values if self._is_here(value) for key, nbytes in storages(value)}
        return sum(found.values())


class _Held:
    """What the graph holds in place of a tensor: tells when it lets go, and for whom it is held."""

    def __init__(self, value: Any, on_let_go: Callable[[int], None]) -> None:
        number = id(value)
        self.reference = weakref.ref(value, lambda _: on_let_go(number))
        self.saved: list[tuple[StorageWeakRef, int]] = []
        """The storages behind it, each time it was saved, with the index among their holders."""


def operator_name(node: str) -> str:
    """Return the name of an autograd node in snake case: ``NativeLayerNormBackward0`` is ``native_layer_norm``."""
    return _CAPITAL.sub("_", _NODE.sub("", node)).lower()
