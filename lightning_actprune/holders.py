"""Who else keeps the input of a pruned layer: there, packing adds memory instead of saving it.

A dense linear layer keeps the storage of its input. Pruning frees that storage only if nothing else keeps it until
backward, and stores the packed input in its place. With the calls ``c`` of one layer in one step, a layer is worth
pruning if ::

    sum_c freed(c) - packed(c) > 0

    freed(c)    bytes of the input, divided by the number of calls of pruned layers on that storage;
                0 if anything but a pruned layer holds it
    packed(c)   bytes of the packed input, divided by the number of calls that keep the same pack;
                0 if a norm keeps it anyway, in few bits of its own

All layers for which it is not become dense at once. Each of them then holds its inputs itself, so the sums are taken
again until no layer is left to turn: the result does not depend on the order of the layers, and as every sum left is
positive, so is their total, the bytes that the pruned model keeps less than the dense one.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

from lightning_actprune.arguments import check_sparsity
from lightning_actprune.calls import LinearCall
from lightning_actprune.conversion import revert_layers
from lightning_actprune.conversion_report import ConversionReport, SkippedLayer
from lightning_actprune.nn.kinds import Layer
from lightning_actprune.nn.settings import PrunedLayer, PruningSettings, torch_class
from lightning_actprune.saved import Saved, SavedTensorRecorder, hooks_are_innermost
from lightning_actprune.selection import WRAPPERS, prunable_layers
from lightning_actprune.shared_context import SharedContext, eager_stance

__all__ = ["HolderProbe"]

_dense_for_now: dict[Layer, PruningSettings] = {}
"""Pruned layers that a probe lets run dense in their current call, with the settings that they have otherwise."""

_DENSE_LAYER = "is kept for backward by {!r} (a linear layer that is not pruned)"


class HolderProbe(SavedTensorRecorder):
    """Find, in one real training forward, the pruned layers whose input something else keeps anyway.

    Holders are: operations and modules that save the same storage for backward (views and aliases included), such as
    ``scaled_dot_product_attention``, a ReLU, a norm or a linear layer that is not pruned; the batch, parameters and
    buffers; and references in Python, such as a list of features, which show in that a storage is still alive though
    autograd saved it nowhere. Pruned layers do not hold their inputs against each other.

    Bytes decide (see the module): a layer with several calls stays pruned if that saves memory over all of them. Not
    judged is a layer that was not called, got only empty inputs, or ran inside an activation checkpoint or where other
    saved-tensor hooks, such as those of ``save_on_cpu``, say what is kept (inside this context or around it). The step
    is not disturbed: no forward is added and nothing is kept alive. A layer whose input is known to be held when it is
    called (saved before, or part of the batch) runs dense in that call, so that the step does not pack in vain.

    Compiled modules run eagerly in this context, since nothing in a compiled region can be seen; compilation then
    starts, or goes on, with the next step. ``torch.func`` transforms and ``disable_saved_tensors_hooks`` inside it
    fail: they forbid the hooks that see what is saved.

    Args:
        model: The module that ``convert`` was called on.
        batch: Whatever holds the step's input tensors.
        sparsity: Least sparsity to count with, where you will raise it; layers at 0 are judged only then. Those with a
            schedule in ``ActivationPruning`` are counted at its highest sparsity in any case.

    Example:
        >>> from lightning_actprune import convert
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        >>> report = convert(model, sparsity=0.6)
        >>> x = torch.randn(16, 64)
        >>> with HolderProbe(model, x) as probe:
        ...     loss = model(x).sum()
        >>> for layer in probe.apply(report):
        ...     print(layer.fqn, layer.reason, sep=": ")
        0: its input is part of the batch
        2: its input is kept for backward by '1' (relu)
    """

    def __init__(self, model: nn.Module, batch: Any = None, *, sparsity: float = 0.0) -> None:
        super().__init__(model, batch)
        self._sparsity = check_sparsity(sparsity)
        self._calls: dict[LinearCall, float] = {}
        self._unchecked: list[LinearCall] = []
        self._holders: dict[StorageWeakRef, str] = {}
        self._own: dict[StorageWeakRef, list[weakref.ref[Tensor]]] = {}
        self._packs: dict[StorageWeakRef, set[LinearCall]] = {}
        self._names = {module: WRAPPERS.sub("", fqn).removeprefix(".") for fqn, module in model.named_modules()}
        self._operators: _OperatorNames | None = None

    def __enter__(self) -> Self:
        self._operators = _watching.enter()
        try:
            return super().__enter__()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exc_info: Any) -> None:
        self.check_alive()
        self.close()

    @property
    def held(self) -> list[SkippedLayer]:
        """The layers that are better left dense, with the reason, in the order of the model."""
        names = {layer: fqns[0] for fqns, layer in prunable_layers(self._model)}
        reasons = _Ledger(self._calls, self._packs).reasons(self._holders, names)
        return [
            SkippedLayer(name, torch_class(type(layer)).__name__, reasons[layer])
            for layer, name in names.items()
            if layer in reasons
        ]

    def check_alive(self) -> None:
        """Look for references in Python; leaving the context does it too.

        It works whenever the calls so far have let go of their inputs: from the end of a forward on. A layer that ran
        dense keeps its input itself until backward, so it is only found out by a check after that.
        """
        unchecked, self._unchecked = self._unchecked, []
        for call in unchecked:
            key = call.dense_key
            if key is None or key in self._holders or key.expired():  # type: ignore[no-untyped-call]
                continue
            if any(handle() is not None for handle in self._own.get(key, ())):
                self._unchecked.append(call)
            elif call.saved:
                self._holders[key] = "is kept alive by a Python reference outside autograd (such as a list of features)"

    def close(self) -> None:
        """Stop without looking for references in Python."""
        if self._active:
            super().close()
            for layer in [layer for layer in _dense_for_now if layer in self._names]:  # cut short by an interrupt
                _prune_again(layer)
        if self._operators is not None:
            self._operators = None
            _watching.leave()

    def apply(self, report: ConversionReport) -> list[SkippedLayer]:
        """Turn the held layers among ``report.converted`` back to dense; call it when the context was left.

        Returns:
            These layers, which are now in ``report.skipped`` with the reason.
        """
        return leave_dense(self._model, report, self.held)

    def _followed(self) -> Iterable[nn.Module]:
        return self._model.modules()

    def _on_call(self, call: LinearCall) -> None:
        layer, key = call.layer, call.dense_key
        # One that was built pruned stays as it is.
        if not isinstance(layer, PrunedLayer) or layer.owner is None or call.shape.numel() == 0 or self.hands_on:
            return
        settings = _dense_for_now.get(layer, layer._pruning)
        sparsity = max(settings.sparsity, settings.highest, self._sparsity)
        if sparsity == 0 and settings.blocks.value_format == "same":
            return
        if call.blocks is not None:
            call.blocks = call.blocks._replace(value_format=settings.blocks.value_format)
        self._calls[call] = sparsity
        self._unchecked.append(call)
        if key is None:
            return
        if key in self._batch or key in self._parameters:
            self._holders[key] = "is part of the batch" if key in self._batch else "is a parameter or buffer"
        # What runs dense inside a checkpoint would have to run dense again in its backward.
        if key in self._holders and layer.packs and hooks_are_innermost():
            _dense_for_now[layer] = settings
            layer._pruning = replace(settings, sparsity=0.0, blocks=settings.blocks._replace(value_format="same"))

    def _on_return(self, call: LinearCall) -> None:
        if call.layer in _dense_for_now:
            _prune_again(call.layer)

    def _on_saved(self, saved: Saved) -> None:
        call = saved.call
        if call is None or call not in self._calls:
            self._holders.setdefault(saved.key, self._description(saved))
        elif call.keeps(saved.key):
            self._own.setdefault(saved.key, []).append(saved.handle)
        elif call.packs and saved.key not in self._parameters:
            self._packs.setdefault(saved.key, set()).add(call)

    def _description(self, saved: Saved) -> str:
        name = "" if saved.module is None else self._names[saved.module]
        if saved.call is not None and saved.call.keeps(saved.key):
            return _DENSE_LAYER.format(name)
        operator = self._operators.current if self._operators is not None else None
        if not name:
            return f"is kept for backward by {operator or 'the step itself'}"
        return f"is kept for backward by {name!r}" + (f" ({operator})" if operator else "")


def leave_dense(model: nn.Module, report: ConversionReport, held: Iterable[SkippedLayer]) -> list[SkippedLayer]:
    """Turn the converted layers that ``held`` names back to dense; see ``HolderProbe.apply``."""
    converted = {layer.fqn for layer in report.converted}
    found = {skipped.fqn: skipped for skipped in held if skipped.fqn in converted}
    revert_layers(model, {layer for fqns, layer in prunable_layers(model) if fqns[0] in found}.__contains__)
    report.converted[:] = [layer for layer in report.converted if layer.fqn not in found]
    report.skipped.extend(found.values())
    return list(found.values())


def _prune_again(layer: Layer) -> None:
    settings = _dense_for_now.pop(layer)
    if isinstance(layer, PrunedLayer):  # not reverted meanwhile
        layer._pruning = settings


class _Ledger:
    """The bytes that pruning frees and those that it adds, layer by layer.

    Args:
        calls: Calls of pruned layers, each with the sparsity to count with.
        packs: The packed storages, each with the calls that keep it.
    """

    def __init__(self, calls: Mapping[LinearCall, float], packs: Mapping[StorageWeakRef, set[LinearCall]]) -> None:
        self._sparsity = calls
        self._layers: dict[Layer, list[LinearCall]] = {}
        for call in calls:
            self._layers.setdefault(call.layer, []).append(call)
        for layer in [call.layer for call in calls if not call.saved]:  # run inside a checkpoint
            self._layers.pop(layer, None)
        judged = [call for own in self._layers.values() for call in own]
        self._users = Counter(call.dense_key for call in judged)
        # Of layers that ran dense none has packed anything yet: those that would share are told by what they read.
        alike = Counter((call.reads, calls[call]) for call in judged)
        unpacked = [call for call in judged if not call.packs and call.dense_key is not None]
        self._sharers = {call: alike[call.reads, calls[call]] for call in unpacked}
        for sharers in packs.values():
            for call in sharers:
                self._sharers[call] = max(len(sharers), self._sharers.get(call, 1))

    def reasons(self, holders: Mapping[StorageWeakRef, str], names: Mapping[Layer, str]) -> dict[Layer, str]:
        """Return the layers that are not worth pruning, each with the reason."""
        layers = dict(self._layers)
        known: dict[StorageWeakRef | None, str] = dict(holders.items())
        reasons: dict[Layer, str] = {}
        while turned := [layer for layer, calls in layers.items() if self._freed(calls, known) <= self._added(calls)]:
            reasons |= {layer: self._reason(layers[layer], known) for layer in turned}
            for layer in turned:
                for call in layers.pop(layer):
                    if call.dense_key is not None:
                        known.setdefault(call.dense_key, _DENSE_LAYER.format(names[layer]))
        return reasons

    def _freed(self, calls: Iterable[LinearCall], holders: Mapping[StorageWeakRef | None, str]) -> float:
        shares = {call: 1 if call.dense_key is None else self._users[call.dense_key] for call in calls}
        return sum(call.dense_bytes / share for call, share in shares.items() if call.dense_key not in holders)

    def _added(self, calls: Iterable[LinearCall]) -> float:
        own = [call for call in calls if not (call.derived and self._sparsity[call] == 0)]
        return sum(call.packed_bytes(self._sparsity[call]) / self._sharers.get(call, 1) for call in own)

    def _reason(self, calls: Sequence[LinearCall], holders: Mapping[StorageWeakRef | None, str]) -> str:
        numbers = f"packing would add {self._added(calls):,.0f} bytes and free {self._freed(calls, holders):,.0f}"
        held = [(call.dense_bytes, call.dense_key) for call in calls if call.dense_key in holders]
        if not held:
            return numbers
        _, key = max(held, key=lambda entry: entry[0])
        reason = f"its input {holders[key]}"
        return reason if len(held) == len(calls) else f"{reason} in {len(held)} of {len(calls)} calls; {numbers}"


class _OperatorNames(TorchFunctionMode):
    """Know the name of the running operator: the outermost function of torch, such as ``layer_norm``."""

    def __init__(self) -> None:
        super().__init__()
        self.current: str | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outer, self.current = self.current, getattr(func, "__name__", "").strip("_") or None
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.current = outer


@contextmanager
def _watched() -> Iterator[_OperatorNames]:
    with eager_stance.held(), _OperatorNames() as operators:
        yield operators


_watching = SharedContext(_watched)
