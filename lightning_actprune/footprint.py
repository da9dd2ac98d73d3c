"""What one training forward keeps for backward: bytes per layer, counted and by formula, on any device.

Autograd hands every tensor that it saves to a hook; ``SavedTensorMeter`` counts the distinct storages behind them and
credits each to the module that was running. That is exact, costs no memory and needs no GPU.

A row's ``dense_bytes`` is what the layer would hold *alone* if it were not pruned. A layer whose input is kept by
something else too (the activation before it, a sister layer, the batch) frees nothing by letting go of it, so such
bytes are counted once, where they stay. Hence ``dense_bytes + other_bytes`` is what the dense model keeps (less the
16-bit weight copies that it also keeps under autocast).
"""

from __future__ import annotations

import weakref
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_actprune.conversion import linear_layers
from lightning_actprune.nn.linear import ActivationPrunedLinear
from lightning_actprune.ops import sharing
from lightning_actprune.ops.autocast import autocast_dtype, compute_dtype
from lightning_actprune.ops.geometry import input_geometry, sparsity_parts
from lightning_actprune.ops.library import in_plain_eager_mode
from lightning_actprune.ops.plan import Setting

__all__ = ["LayerFootprint", "MemoryReport", "SavedTensorMeter"]


@dataclass
class LayerFootprint:
    """Bytes that one linear layer keeps for backward, summed over its calls.

    Args:
        fqn: Fully qualified name of the layer.
        kind: Name of its class.
        sparsity: Fraction of blocks dropped; 0 for a layer that is not pruned.
        calls: How often the layer kept something.
        dense_bytes: Bytes of the inputs that the layer alone would keep if it were not pruned.
        stored_bytes: Bytes of the distinct storages it did keep, its parameters aside.
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


@dataclass
class MemoryReport:
    """What one training forward keeps for backward.

    Args:
        rows: The linear layers that kept something, pruned or not, in the order of the model.
        other_bytes: All other distinct storages that autograd saved; parameters, buffers and the batch aside.
        measured_activation_bytes: Growth of the allocator's requested bytes over the forward, on CUDA only.
        measured_peak_bytes: Allocator's peak over the whole step, on CUDA only.
    """

    rows: list[LayerFootprint] = field(default_factory=list)
    other_bytes: int = 0
    measured_activation_bytes: int | None = None
    measured_peak_bytes: int | None = None

    @property
    def dense_bytes(self) -> int:
        """Bytes that the listed layers would keep if none were pruned."""
        return sum(row.dense_bytes for row in self.rows)

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
    def total_bytes(self) -> int:
        """All bytes that the forward keeps for backward."""
        return self.stored_bytes + self.other_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return everything as numbers and strings; ``pandas.DataFrame(report.to_dict()["rows"])`` is a table."""
        totals = "dense_bytes", "stored_bytes", "saved_bytes", "saved_fraction", "total_bytes"
        return asdict(self) | {name: getattr(self, name) for name in totals}


@dataclass
class _Call:
    """One forward of a linear layer that keeps its input, whole or pruned."""

    layer: nn.Linear
    sparsity: float
    dense_key: StorageWeakRef | None
    """Storage of the input if the dense layer would keep that very storage, ``None`` if it would keep a copy."""
    dense_bytes: int
    accounted_bytes: int
    saved: bool = False
    """Whether autograd saved anything: not so inside an activation checkpoint."""
    packed: dict[StorageWeakRef, int] = field(default_factory=dict)

    def holds_input(self, key: StorageWeakRef, nbytes: int) -> bool:
        """Return whether a storage packed during the call holds the input, not, say, autocast's copy of the weight."""
        if self.sparsity > 0:
            return True
        if self.dense_key is not None:
            return bool(key == self.dense_key)
        return not self.packed and nbytes == self.dense_bytes


class SavedTensorMeter:
    """Count what the forward passes run inside this context keep for backward.

    Every distinct storage counts once, in full, for the first module that saved it. Nothing is kept alive: storages are
    known by weak references, which also keep an address from being mistaken for that of a later tensor.

    Modules called inside a ``torch.compile``d one are not seen one by one; what the compiled graph saves is in
    ``other_bytes`` and ``rows`` may be empty. What happens inside an activation checkpoint is not kept, so it is not
    counted. Sparse tensors are not counted.

    Args:
        model: The module whose layers are listed by name.
        batch: Whatever holds the step's input tensors; they are alive anyway and do not count.

    Example:
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
        self._model = model
        self._running: list[tuple[nn.Module, _Call | None]] = []
        self._calls: list[_Call] = []
        self._other: dict[StorageWeakRef, int] = {}
        self._seen: set[StorageWeakRef] = set()
        self._ignored = {key for tensor in tree_leaves(batch) for key, _ in _storages(tensor)}
        self._handles: list[RemovableHandle] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._active = False
        self._packed: dict[int, tuple[weakref.ref[Tensor], set[tuple[Any, ...]]]] = {}
        """By ``id``: which tensor, and how it was packed."""

    def __enter__(self) -> Self:
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            self._ignore(tensor)
        for module in _eager_modules(self._model):
            self._handles.append(module.register_forward_pre_hook(self._enter_module, with_kwargs=True))
            # Always: a forward may raise and its caller go on without it.
            self._handles.append(module.register_forward_hook(self._leave_module, always_call=True))
        self._hooks.__enter__()
        self._active = True
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if not self._active:
            return
        self._active = False
        self._hooks.__exit__()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._running.clear()

    def report(self) -> MemoryReport:
        """Return what was kept so far."""
        calls = [call for call in self._calls if call.saved]
        elsewhere = self._ignored | self._other.keys()
        elsewhere |= {key for call in calls if not call.sparsity for key in call.packed}
        rows: dict[nn.Module, LayerFootprint] = {}
        for fqns, layer in linear_layers(self._model):
            sparsity = layer.sparsity if isinstance(layer, ActivationPrunedLinear) else 0.0
            rows[layer] = LayerFootprint(fqns[0], type(layer).__name__, sparsity)
        for call in calls:
            _add(rows[call.layer], call, elsewhere)
        return MemoryReport([row for row in rows.values() if row.calls], sum(self._other.values()))

    def _enter_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():  # a hook that a compiled graph has taken in must do nothing
            return
        # Sharded parameters are gathered into new storages just before the forward.
        for parameter in module.parameters(recurse=False):
            self._ignore(parameter)
        inputs = (*args, *kwargs.values())
        call = _linear_call(module, inputs[0]) if inputs and isinstance(module, nn.Linear) else None
        if call is not None:
            self._calls.append(call)
            if isinstance(module, ActivationPrunedLinear) and self._is_packed(inputs[0], module):
                call.accounted_bytes = 0
        self._running.append((module, call))

    def _is_packed(self, x: Tensor, layer: ActivationPrunedLinear) -> bool:
        """Return whether an earlier layer packed ``x`` as this one would, and keep in mind that this one does."""
        setting = Setting(sparsity_parts(layer.sparsity), layer.block_size, layer.scope, autocast_dtype(x))
        key = sharing.key_of(x, setting) if in_plain_eager_mode(x) else None
        if key is None:
            return False
        reference, keys = self._packed.setdefault(id(x), (weakref.ref(x), set()))
        if reference() is not x:  # the id of a tensor that is gone
            self._packed[id(x)] = weakref.ref(x), {key}
            return False
        known = key in keys
        keys.add(key)
        return known

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running and self._running[-1][0] is module:
            self._running.pop()

    def _ignore(self, tensor: Tensor) -> None:
        self._ignored.update(key for key, _ in _storages(tensor))

    def _pack(self, tensor: Tensor) -> Tensor:
        if self._active:
            call = self._running[-1][1] if self._running else None
            if call is not None:
                call.saved = True
            for key, nbytes in _storages(tensor):
                if key not in self._ignored and key not in self._seen:
                    self._seen.add(key)
                    if call is not None and call.holds_input(key, nbytes):
                        call.packed[key] = nbytes
                    else:
                        self._other[key] = nbytes
        # Holding the tensor itself would be a cycle if it is the result of the operation that saves it. A packed input
        # is none, and other layers can only share it as long as it is this object.
        return tensor if tensor.grad_fn is None else tensor.detach()


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def _add(row: LayerFootprint, call: _Call, elsewhere: set[StorageWeakRef]) -> None:
    """Add ``call`` to its layer's row; a dense input already in ``elsewhere`` would cost the dense layer nothing."""
    stored = sum(call.packed.values())
    row.calls += 1
    row.stored_bytes += stored
    if not call.sparsity:
        row.dense_bytes += stored
        row.accounted_bytes += stored
        return
    row.accounted_bytes += call.accounted_bytes
    if call.dense_key is None or call.dense_key not in elsewhere:
        row.dense_bytes += call.dense_bytes
    if call.dense_key is not None:
        elsewhere.add(call.dense_key)


def _linear_call(layer: nn.Linear, x: Any) -> _Call | None:
    """Return the record of a call that keeps its input ``x``, ``None`` if it keeps nothing."""
    if not (torch.is_grad_enabled() and layer.weight.requires_grad):
        return None
    if not isinstance(x, Tensor) or _is_wrapper(x) or x.layout != torch.strided or not x.is_floating_point():
        return None
    itemsize = compute_dtype(x).itemsize
    dense_key, dense_bytes = None, x.numel() * itemsize
    if compute_dtype(x) == x.dtype and _flattens_without_copy(x):
        [(dense_key, dense_bytes)] = _storages(x)
    sparsity, accounted = 0.0, 0
    if isinstance(layer, ActivationPrunedLinear) and layer.sparsity > 0:
        sparsity = layer.sparsity
        accounted = input_geometry(x, layer.block_size, sparsity, layer.scope).stored_bytes(itemsize)
    return _Call(layer, sparsity, dense_key, dense_bytes, accounted)


def _flattens_without_copy(x: Tensor) -> bool:
    """Return whether ``F.linear`` can keep a view of ``x``: only shape and strides are looked at."""
    if x.dim() <= 2 or x.is_contiguous():
        return True
    meta = torch.empty_strided(x.shape, x.stride(), device="meta")
    return meta.flatten(0, -2)._is_view()


def _storages(value: Any) -> list[tuple[StorageWeakRef, int]]:
    """Return the storages that hold ``value``'s data, with their bytes; none if it is no dense tensor."""
    if isinstance(value, Tensor) and _is_wrapper(value):
        inner, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
        return [entry for name in inner for entry in _storages(getattr(value, name))]
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return []
    storage = value.untyped_storage()
    return [(StorageWeakRef(storage), storage.nbytes())]  # type: ignore[no-untyped-call]


def _is_wrapper(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor or its like, whose data is in other tensors."""
    return hasattr(tensor, "__tensor_flatten__")


def _eager_modules(module: nn.Module) -> set[nn.Module]:
    """Return the modules whose calls Python sees: not those inside a compiled one."""
    if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
        return set()
    return {module}.union(*(_eager_modules(child) for child in module.children()))
