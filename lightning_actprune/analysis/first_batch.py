r"""What the first batch of a fit shows about each compressed layer: retained input, dropped energy, recomputation.

**Retained input.** A dense layer keeps the storage of its input. Compression stores the packed input in its place, and
frees that storage only if nothing else retains it until backward. Let ``c`` be the calls of one layer in one step. The
layer is worth compressing if ::

    sum_c freed(c) - packed(c) > 0

    freed(c)    bytes of the input, divided by the number of calls of compressed layers on that storage;
                0 if anything but a compressed layer retains it
    packed(c)   bytes of the packed input, divided by the number of calls that keep the same pack;
                0 if a norm keeps it anyway, quantized for itself

All layers for which this fails become dense at once. Each of them then retains its own inputs, so the sums are taken
again until no layer fails: the result does not depend on the order of layers. As every remaining sum is positive, the
compressed model keeps less than the dense one.

**Dropped energy.** Where dropped blocks hold much of a layer's input, the input is quantized, but no block is dropped.
With ``q_n`` the sum of squares of block ``n`` of an input, the share of its energy that a sparsity drops is ::

    e = sum_{n dropped} q_n / sum_n q_n

A dropped block is lost for the weight gradient, again and again where the same features have the smallest norms. The
error of quantization has mean zero instead, and cancels over rows and steps. So dropping suits inputs whose energy is
concentrated, for example behind an activation function. Behind a LayerNorm all blocks look alike, and half of them hold
nearly half of the energy (``docs/how_it_works.md``).

**Recomputation.** Compression saves next to nothing in layers that run only inside an activation checkpoint. Such a
region keeps only its input. It runs again when backward reaches it, and what its layers save then lives until its own
backward, which follows at once. Compression can only lower that short moment's memory, and it costs gradient quality.
There are two ways to record a graph:

- *in backward*: every recomputation shows this way, whatever causes it: both forms of ``torch.utils.checkpoint``, the
  wrappers of FSDP and Hugging Face, implementations of other libraries, or a reversible block.
- *in forward*: before backward, unless the innermost saved-tensor hooks are those with which torch's non-reentrant
  checkpoint drops what is saved. (Reentrant checkpoints record no graph before backward.)

A layer is reported if all its calls are in backward; one that also runs outside of checkpoints saves memory there. A
forward that the user runs in backward for another reason, such as in a tensor's hook, looks like a recomputation, but
is rarely the layer's only call.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

from lightning_actprune.analysis.recorder import (
    CallWatcher,
    LayerCall,
    ModuleNames,
    Saved,
    SavedTensorRecorder,
    ThreadContext,
    eager_stance,
    hooks_are_innermost,
    input_layers,
)
from lightning_actprune.codec.blocks import Blocks, block_and_keep, sparsity_parts, split_blocks, stored_view
from lightning_actprune.codec.dispatch import may_compress
from lightning_actprune.codec.pack_cache import Retainers
from lightning_actprune.codec.private import top_saved_tensors_hooks
from lightning_actprune.convert import is_converted, revert_layers
from lightning_actprune.operators.base import CompressedLayer, Converted, LayerState, torch_class
from lightning_actprune.operators.convolution import Convolution
from lightning_actprune.operators.hooks import ForwardHook, eager_modules, is_recomputation
from lightning_actprune.operators.recompute import RecomputedModule
from lightning_actprune.operators.regions import dropped_by_checkpoint
from lightning_actprune.operators.registry import ROOT, layers, operator_of
from lightning_actprune.report import ConversionReport, LayerReport
from lightning_actprune.schedules import check_sparsity

_dense_for_now: dict[object, LayerState] = {}
"""Compressed layers that a probe lets run dense in their current call, with their usual state."""

_DENSE_LAYER = "is kept for backward by {!r} (a layer that is dense)"


# === Retained input ===================================================================================================
class RetentionProbe(SavedTensorRecorder):
    """Find, in one real training forward, the compressed layers whose input something else retains anyway.

    These may retain it: operations and modules that save the same storage for backward (views and aliases included),
    such as ``scaled_dot_product_attention``, a ReLU, a norm or a dense linear layer; the batch, parameters and buffers;
    and references in Python, such as a list of features, which show because a storage is still alive though autograd
    saved it nowhere. Compressed layers do not count against each other.

    Bytes decide (see the module): a layer with several calls stays compressed if that saves memory over all of them.
    The probe does not judge a layer that was not called, got only empty inputs, or ran inside an activation checkpoint
    or other saved-tensor hooks that decide what is kept, such as those of ``save_on_cpu`` (inside this context or
    around it). The step is not disturbed: the probe adds no forward and keeps nothing alive. A layer whose input is
    known to be retained when it is called (saved before, or part of the batch) runs dense in that call, which avoids
    a useless pack.

    Compiled modules run eagerly in this context, since nothing inside a compiled region can be seen; compilation
    starts, or goes on, with the next step. ``torch.func`` transforms and ``disable_saved_tensors_hooks`` fail inside
    it: they forbid the hooks that see what is saved.

    Args:
        model: The module that ``convert`` was called on.
        batch: Holds the step's input tensors.
        sparsity: Least sparsity to assume, if you will raise it; layers at 0 are judged only then. Layers with a
            schedule in ``ActivationPruning`` always count at its highest sparsity.

    Example:
        >>> from lightning_actprune import convert
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        >>> report = convert(model, sparsity=0.6)
        >>> x = torch.randn(16, 64)
        >>> with RetentionProbe(model, x) as probe:
        ...     loss = model(x).sum()
        >>> for layer in probe.apply(report):
        ...     print(layer.fqn, layer.reason, sep=": ")
        0: its input is part of the batch
        2: its input is kept for backward by '1' (relu)
    """

    def __init__(self, model: nn.Module, batch: Any = None, *, sparsity: float = 0.0) -> None:
        super().__init__(model, batch)
        self._sparsity = check_sparsity(sparsity)
        self._calls: dict[LayerCall, float] = {}
        self._unchecked: list[LayerCall] = []
        self._retainers = Retainers()
        self._own: dict[StorageWeakRef, list[weakref.ref[Tensor]]] = {}
        self._packs: dict[StorageWeakRef, set[LayerCall]] = {}
        self._names = ModuleNames(model)
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
        super().__exit__(*exc_info)

    @property
    def retained(self) -> list[LayerReport]:
        """The layers that are better left dense, with reasons, in the order of the model."""
        pairs = [(fqns[0], layer) for fqns, layer in input_layers(self._model)]
        reasons = _Ledger(self._calls, self._packs).reasons(self._retainers, {layer: name for name, layer in pairs})
        return [
            LayerReport(name, torch_class(type(layer)).__name__, operator, reason=reasons[layer])
            for name, layer in pairs
            if layer in reasons and (operator := operator_of(layer)) is not None
        ]

    def check_alive(self) -> None:
        """Look for references in Python; leaving the context does it too.

        It works as soon as calls have let go of their inputs, that is from the end of a forward on. A layer that ran
        dense keeps its input until backward, so only a check after that can judge it.
        """
        unchecked, self._unchecked = self._unchecked, []
        for call in unchecked:
            key = call.dense_key
            if key is None or key.cdata in self._retainers or key.expired():  # type: ignore[no-untyped-call]
                continue
            if any(handle() is not None for handle in self._own.get(key, ())):
                self._unchecked.append(call)
            elif call.saved:
                reason = "is kept alive by a Python reference outside autograd (such as a list of features)"
                self._retainers.add(key, reason)

    def close(self) -> None:
        """Stop without looking for references in Python."""
        if self._active:
            super().close()
            for layer in [layer for layer in _dense_for_now if layer in self._names]:  # cut short by an interrupt
                _compress_again(layer)
        if self._operators is not None:
            self._operators = None
            _watching.leave()

    def apply(self, report: ConversionReport) -> list[LayerReport]:
        """Make these layers dense if ``report`` lists them as converted; call it after the context.

        Returns:
            The reports of these layers, which are in ``report`` now, with reasons.
        """
        return leave_dense(self._model, report, {layer.fqn: layer.reason or "" for layer in self.retained})

    def _list_modules(self) -> Iterable[nn.Module]:
        return self._model.modules()

    def _on_call(self, call: LayerCall) -> None:
        layer, key = call.layer, call.dense_key
        # A layer that was built compressed stays compressed.
        if not isinstance(layer, CompressedLayer) or layer.owner is None or call.shape.numel() == 0 or self.hands_on:
            return
        state = _dense_for_now.get(layer, layer._state)
        sparsity = max(state.sparsity, state.highest, self._sparsity)
        if sparsity == 0 and not state.keep.stored_bits:
            return
        if call.blocks is not None:
            call.fine = not isinstance(layer, Convolution) and state.is_fine(call.shape)
            call.blocks = call.blocks._replace(bits=8 if call.fine else state.keep.stored_bits)
        self._calls[call] = sparsity
        self._unchecked.append(call)
        if key is None:
            return
        if self._find_fixed_owner(key) is not None:
            self._retain(key, "")
        # A layer that runs dense inside a checkpoint would have to run dense again in its backward.
        if key.cdata in self._retainers and layer.packs and hooks_are_innermost():
            _dense_for_now[layer] = state
            layer._state = replace(state, keep=replace(state.keep, bits=None), sparsity=0.0)

    def _on_return(self, call: LayerCall) -> None:
        if call.layer in _dense_for_now:
            _compress_again(call.layer)

    def _on_saved(self, saved: Saved) -> None:
        call = saved.call
        if call is None or call not in self._calls:
            self._retain(saved.key, self._describe(saved))
        elif call.keeps(saved.key):
            self._own.setdefault(saved.key, []).append(saved.handle)
        elif call.packs and saved.key not in self._parameters:
            self._packs.setdefault(saved.key, set()).add(call)

    def _retain(self, key: StorageWeakRef, reason: str) -> None:
        """Record who retains a storage: the batch or a parameter if it is one, or else the first one."""
        if key.cdata not in self._retainers:
            self._retainers.add(key, self._find_fixed_owner(key) or reason)

    def _find_fixed_owner(self, key: StorageWeakRef) -> str | None:
        if key in self._batch:
            return "is part of the batch"
        return "is a parameter or buffer" if key in self._parameters else None

    def _describe(self, saved: Saved) -> str:
        name = ROOT if saved.module is None else self._names.get(saved.module, type(saved.module).__name__)
        if saved.call is not None and saved.call.keeps(saved.key):
            return _DENSE_LAYER.format(name)
        operator = self._operators.current if self._operators is not None else None
        if name == ROOT:
            return f"is kept for backward by {operator or 'the step itself'}"
        return f"is kept for backward by {name!r}" + (f" ({operator})" if operator else "")


def leave_dense(model: nn.Module, report: ConversionReport, retained: Mapping[str, str]) -> list[LayerReport]:
    """Make the converted layers dense that ``retained`` names, with reasons; see ``RetentionProbe.apply``."""
    reasons = {layer.fqn: retained[layer.fqn] for layer in report.converted if layer.fqn in retained}
    revert_layers(model, {layer for fqns, layer in input_layers(model) if fqns[0] in reasons}.__contains__)
    for fqn, reason in reasons.items():
        report.leave_dense(fqn, reason)
    return [layer for layer in report.skipped if layer.fqn in reasons]


def _compress_again(layer: object) -> None:
    state = _dense_for_now.pop(layer)
    if isinstance(layer, CompressedLayer):  # not reverted meanwhile
        layer._state = state


class _Ledger:
    """The bytes that compression frees and adds, layer by layer.

    Args:
        calls: Calls of compressed layers, each with the sparsity to assume.
        packs: The packed storages, each with the calls that keep it.
    """

    def __init__(self, calls: Mapping[LayerCall, float], packs: Mapping[StorageWeakRef, set[LayerCall]]) -> None:
        self._sparsity = calls
        self._layers: dict[nn.Module, list[LayerCall]] = {}
        for call in calls:
            self._layers.setdefault(call.layer, []).append(call)
        for layer in [call.layer for call in calls if not call.saved]:  # run inside a checkpoint
            self._layers.pop(layer, None)
        all_calls = [call for own in self._layers.values() for call in own]
        self._users = Counter(call.dense_key for call in all_calls)
        # Layers that ran dense have packed nothing yet: those that would share one pack read the same input.
        readers = Counter((call.reads, calls[call]) for call in all_calls)
        unpacked = [call for call in all_calls if not call.packs and call.dense_key is not None]
        self._sharers = {call: readers[call.reads, calls[call]] for call in unpacked}
        for sharers in packs.values():
            for call in sharers:
                self._sharers[call] = max(len(sharers), self._sharers.get(call, 1))

    def reasons(self, retainers: Retainers, names: Mapping[nn.Module, str]) -> dict[nn.Module, str]:
        """Return the layers that are not worth compressing, each with the reason."""
        layers = dict(self._layers)
        current = retainers.copy()
        reasons: dict[nn.Module, str] = {}
        while losing := [
            layer for layer, calls in layers.items() if self._count_freed(calls, current) <= self._count_added(calls)
        ]:
            reasons |= {layer: self._explain(layers[layer], current) for layer in losing}
            for layer in losing:
                for call in layers.pop(layer):
                    if call.dense_key is not None and call.dense_key.cdata not in current:
                        current.add(call.dense_key, _DENSE_LAYER.format(names[layer]))
        return reasons

    def _count_freed(self, calls: Iterable[LayerCall], retainers: Retainers) -> float:
        shares = {call: 1 if call.dense_key is None else self._users[call.dense_key] for call in calls}
        return sum(call.dense_bytes / share for call, share in shares.items() if not _is_retained(call, retainers))

    def _count_added(self, calls: Iterable[LayerCall]) -> float:
        own = [call for call in calls if not (call.reuses and self._sparsity[call] == 0)]
        return sum(call.packed_bytes(self._sparsity[call]) / self._sharers.get(call, 1) for call in own)

    def _explain(self, calls: Sequence[LayerCall], retainers: Retainers) -> str:
        added, freed = self._count_added(calls), self._count_freed(calls, retainers)
        numbers = f"packing would add {added:,.0f} bytes and free {freed:,.0f}"
        retained = [call for call in calls if _is_retained(call, retainers)]
        if not retained:
            return numbers
        key = max(retained, key=lambda call: call.dense_bytes).dense_key
        assert key is not None
        reason = f"its input {retainers.first_name(key.cdata)}"
        if len(retained) == len(calls):
            return reason
        return f"{reason} in {len(retained)} of {len(calls)} calls; {numbers}"


def _is_retained(call: LayerCall, retainers: Retainers) -> bool:
    """Return True if anything but compressed layers retains the storage of the call's input."""
    return call.dense_key is not None and call.dense_key.cdata in retainers


class _OperatorNames(TorchFunctionMode):
    """Track the name of the running operator: the outermost function of torch, such as ``layer_norm``."""

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
def _watch_operators() -> Iterator[_OperatorNames]:
    with eager_stance.opened(), _OperatorNames() as operators:
        yield operators


_watching = ThreadContext(_watch_operators)


# === Dropped energy ===================================================================================================
def dropped_energy(x: Tensor, sparsity: float, blocks: Blocks) -> Tensor:
    """Return the energy of the blocks that ``sparsity`` drops and of all blocks of ``x``, ``[2]`` in fp32 or fp64.

    Args:
        x: Input of a layer, ``[..., features]``.
        sparsity: Fraction of blocks dropped, in [0, 1).
        blocks: How ``x`` is cut into blocks.
    """
    with torch.no_grad():
        stored, _ = stored_view(x, blocks.block_size, blocks.topk_over)
        block, keep = block_and_keep(stored, blocks.block_size, sparsity_parts(sparsity), 0)
        # Sum in fp32 without an fp32 copy, which would be the largest tensor of a step.
        wide = torch.promote_types(stored.dtype, torch.float32)
        norms = torch.linalg.vector_norm(split_blocks(stored, block), dim=-1, dtype=wide)
        energies = norms.square().flatten(1)
        largest, total = energies.topk(keep, dim=1).values.sum(), energies.sum()
        return torch.stack([total - largest, total])


class EnergyProbe(CallWatcher):
    """Find, in one real training forward, the layers whose dropped blocks hold too much of their input's energy.

    It does not judge a layer that keeps nothing (a frozen one), was not called, or got only zeros or non-finite values.
    The step is not disturbed.

    Args:
        model: The module that ``convert`` was called on.
        sparsity: Least sparsity to judge layers at, if you will raise it; layers at 0 are judged only then. Layers with
            a schedule in ``ActivationPruning`` are always judged at its highest sparsity.
        eagerly: Whether compiled modules run eagerly in this context, as inside ``RetentionProbe``. Otherwise nothing
            inside them is seen.

    Raises:
        TypeError: If ``sparsity`` is not a number.
        ValueError: If ``sparsity`` is out of range.

    Example:
        >>> from lightning_actprune import Keep, convert
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        >>> report = convert(model, rules={"*": Keep(bits=4, sparsity=0.5, max_dropped_energy=0.2)})
        >>> with EnergyProbe(model) as probe:
        ...     loss = model(torch.ones(16, 64)).sum()
        >>> probe.shares["0"]  # of two equal blocks one is dropped
        0.5
        >>> probe.apply(report)[0], model[0].sparsity
        ('0', 0.0)
    """

    def __init__(self, model: nn.Module, *, sparsity: float = 0.0, eagerly: bool = False) -> None:
        super().__init__(model, eagerly=eagerly)
        self._sparsity = check_sparsity(sparsity)
        self._sums: dict[object, Tensor] = {}

    def add_up(self, over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Let all ranks of a distributed training judge by the same shares.

        Args:
            over_ranks: Returns the sum of a tensor over the ranks; called once on each rank, with equally many values.
        """
        layers = [layer for _, layer in input_layers(self._model) if layer in self._layers]
        if not layers:
            return
        device = next((sums.device for sums in self._sums.values()), next(layers[0].parameters()).device)
        rows = [self._sums.get(layer, torch.zeros(2)).to(device) for layer in layers]
        self._sums = dict(zip(layers, over_ranks(torch.stack(rows)), strict=True))

    @property
    def shares(self) -> dict[str, float]:
        """Share of the energy that would be dropped, by name of the layer, over all its calls."""
        pairs = [(fqns[0], layer) for fqns, layer in input_layers(self._model) if layer in self._sums]
        sums = [(name, *self._sums[layer].tolist()) for name, layer in pairs]
        return {name: dropped / total for name, dropped, total in sums if total > 0}

    @property
    def spread(self) -> dict[str, float]:
        """The shares above the limit of a layer, its ``keep.max_dropped_energy``."""
        limits = {
            fqns[0]: layer.keep.max_dropped_energy for fqns, layer in input_layers(self._model) if is_converted(layer)
        }
        return {name: share for name, share in self.shares.items() if share > limits.get(name, 1.0)}

    def apply(self, report: ConversionReport) -> list[str]:
        """Let the layers above the limit drop no block; call it after the context.

        Quantized layers keep all their blocks, at sparsity 0. Other layers become dense and are in ``report.skipped``,
        with the reason.

        Returns:
            The names of these layers.
        """
        return keep_blocks(self._model, report, self.spread)

    def _see(self, layer: CompressedLayer, weight: Tensor, x: Any, blocks: Blocks) -> None:
        if layer.owner is None or is_recomputation():
            return
        sparsity = max(layer.highest_sparsity, self._sparsity)
        if sparsity == 0 or not weight.requires_grad:
            return
        if isinstance(x, Tensor) and may_compress(x) and x.numel() > 0:
            sums = dropped_energy(x.detach(), sparsity, blocks)
            self._sums[layer] = self._sums[layer].to(sums.device) + sums if layer in self._sums else sums


def keep_blocks(model: nn.Module, report: ConversionReport, shares: Mapping[str, float]) -> list[str]:
    """Let the converted layers that ``shares`` names drop no block; see ``EnergyProbe.apply``."""
    layers = {fqns[0]: layer for fqns, layer in input_layers(model)}
    names = [layer.fqn for layer in report.converted if layer.fqn in shares]
    for fqn in names:
        layer = layers[fqn]
        assert isinstance(layer, CompressedLayer)
        if layer.bits:
            layer.drop_nothing()
            report.replace(fqn, sparsity=0.0)
            continue
        revert_layers(model, {layer}.__contains__)
        report.leave_dense(fqn, f"the blocks that would be dropped hold {shares[fqn]:.0%} of its input's energy")
    return names


# === Recomputation ====================================================================================================
class RecomputationProbe(CallWatcher):
    """Find, in one real training step, the compressed layers that run only inside an activation checkpoint.

    Open it around forward and backward: a checkpoint shows because a layer runs again while backward runs (see the
    module). It uses plain forward hooks, removes them at the end, and reads no tensors. It does not report layers that
    keep nothing, such as frozen ones.

    Args:
        model: The module that ``convert`` was called on.
        eagerly: Whether compiled modules run eagerly in this context, as inside ``RetentionProbe``. Otherwise nothing
            inside them is seen.

    Example:
        >>> from lightning_actprune import convert
        >>> from torch.utils.checkpoint import checkpoint
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        >>> _ = convert(model, sparsity=0.6)
        >>> with RecomputationProbe(model) as probe:
        ...     x = model[0](torch.randn(16, 64))
        ...     checkpoint(model[1:], x, use_reentrant=False).sum().backward()
        >>> probe.recomputed
        ['2']
    """

    def __init__(self, model: nn.Module, *, eagerly: bool = False) -> None:
        super().__init__(model, eagerly=eagerly)
        self._in_backward: set[object] = set()
        self._in_forward: set[object] = set()

    @property
    def recomputed(self) -> list[str]:
        """Names of these layers so far, in the order of the model; without modules that this package runs again."""
        own = [module for module in self._model.modules() if isinstance(module, RecomputedModule)]
        recomputed = self._in_backward - self._in_forward - {layer for module in own for layer in module.modules()}
        return [fqns[0] for fqns, layer in input_layers(self._model) if layer in recomputed]

    @property
    def idle(self) -> list[str]:
        """Names of the layers that have kept nothing in any call so far.

        They are frozen, were not called, or got nothing, like an expert without tokens.
        """
        called, eager = self._in_backward | self._in_forward, eager_modules(self._model)
        return [
            fqns[0]
            for fqns, layer in input_layers(self._model)
            # Calls of a trained layer in a compiled module cannot be seen.
            if layer in self._layers and layer not in called and (layer in eager or not is_trained(layer))
        ]

    def _see(self, layer: CompressedLayer, weight: Tensor, x: Any, blocks: Blocks) -> None:
        if not (torch.is_grad_enabled() and weight.requires_grad) or _is_empty(x):
            return
        if is_recomputation():
            self._in_backward.add(layer)
        elif not dropped_by_checkpoint(top_saved_tensors_hooks(False)):
            self._in_forward.add(layer)


# === Layers that begin to keep something later ========================================================================
class IdleLayers:
    """Find out when dense layers that kept nothing so far begin to keep their inputs.

    A frozen layer begins when its weight is trained, a trained one when it is called, which plain forward hooks see.

    Args:
        model: The module that holds the layers.
        names: Their names.
    """

    def __init__(self, model: nn.Module, names: Container[str]) -> None:
        idle = [layer for fqns, layer in input_layers(model) if fqns[0] in names]
        self._frozen = [layer for layer in idle if not is_trained(layer)]
        self._called = False
        trained = [layer for layer in idle if is_trained(layer)]
        self._handles = [layer.register_forward_pre_hook(ForwardHook(self._see)) for layer in trained]
        self.watches = bool(trained)
        """Whether calls are watched; a call need not happen on every rank."""

    def is_awake(self) -> bool:
        """Return True if one of them keeps its input from now on."""
        return self._called or any(map(is_trained, self._frozen))

    def close(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _see(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        self._called |= torch.is_grad_enabled() and not is_recomputation() and not _is_empty(next(iter(args), None))


class AddedLayers:
    """Find out when a model gets new layers, such as adapters in the middle of a training.

    A global hook of torch sees when any module gets a child; only then the model is searched.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._changed = False
        self._look_at(model)
        self._handle = register_module_module_registration_hook(self._see)

    def has_grown(self, model: nn.Module) -> bool:
        """Return True if the model has new layers since the last call."""
        if not self._changed:
            return False
        self._changed, before = False, self._names
        self._look_at(model)
        return not self._names <= before

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def _look_at(self, model: nn.Module) -> None:
        self._modules = set(map(id, model.modules()))
        self._names = {fqns[0] for fqns, layer in layers(model) if not isinstance(layer, Converted)}

    def _see(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        self._changed |= id(module) in self._modules


def _is_empty(x: Any) -> bool:
    return isinstance(x, Tensor) and x.numel() == 0


def is_trained(layer: nn.Module) -> bool:
    """Return True if a weight of ``layer`` needs a gradient."""
    return any(parameter.requires_grad and parameter.dim() > 1 for parameter in layer.parameters())
