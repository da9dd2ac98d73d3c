"""Record what autograd saves during forwards: which storage, by which module, in which call of a layer.

**One pair of hooks.** Autograd passes every tensor that it saves to the innermost pair of saved-tensor hooks only. All
recorders of a thread therefore share one pair, entered with the first and left with the last of them, in any order. It
passes saved tensors on to the pair around it, if there is one, such as that of ``save_on_cpu``. A pair inside it, such
as that of an activation checkpoint, hides its tensors from the recorders. Nothing is recorded while backward runs: an
activation checkpoint runs a forward again there, whose tensors live for a moment only. Storages are identified by weak
references. These keep nothing alive, and an address that is used again is not mistaken for the same storage.

**Autocast's copies.** Under autocast a linear layer multiplies by a 16-bit copy of its weight, and autograd saves that
copy wherever the input needs a gradient (``dx = g W``). A compressed layer saves the parameter itself, which exists
anyway, and casts it once more. Autocast copies an fp32 leaf that needs a gradient once per region, from the outermost
``with torch.autocast`` to its end, and shares the copy with everyone who multiplies by that leaf. So leaf and region
identify the copy. It copies all other tensors anew each time, such as a part of an in-projection, and with
``cache_enabled=False`` all leaves, too. Torch does not say which region it is in. We find it through
autocast's copy of a leaf of our own, on the CPU and without values: within a region, its node in the graph is the same
object.
"""

from __future__ import annotations

import functools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_actprune.codec.blocks import Blocks, input_geometry
from lightning_actprune.codec.dispatch import autocast_dtype, compute_dtype, may_compress
from lightning_actprune.codec.pack_cache import StorageKey
from lightning_actprune.codec.private import (
    FOR_BACKWARD,
    FOR_RECORDERS,
    is_functorch_wrapped_tensor,
    no_dispatch_modes,
    require,
    top_saved_tensors_hooks,
    tree_leaves,
    unseen_by_compilers,
)
from lightning_actprune.operators.attention import Projection, watchers
from lightning_actprune.operators.base import CompressedLayer
from lightning_actprune.operators.convolution import Convolution
from lightning_actprune.operators.hooks import ForwardHook, eager_modules, explain, is_recomputation
from lightning_actprune.operators.registry import as_cut, layers, operator_of, plain_name, weight_of_call
from lightning_actprune.operators.saved import listeners, packing, unpack_saved

_Hooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def input_layers(model: nn.Module) -> Iterator[tuple[list[str], nn.Module]]:
    """Yield the layers that keep their input: linear layers, attention for its projections, and convolutions."""
    return ((fqns, layer) for fqns, layer in layers(model) if operator_of(layer) in ("linear", "convolution"))


class ModuleNames(Mapping[nn.Module, str]):
    """The fully qualified name of each module, without what wrappers add to it.

    Modules are compared by identity: the hash of a metric changes with its state.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): (module, plain_name(fqn)) for fqn, module in model.named_modules()}

    def __getitem__(self, module: nn.Module) -> str:
        return self._names[id(module)][1]

    def __iter__(self) -> Iterator[nn.Module]:
        return (module for module, _ in self._names.values())

    def __len__(self) -> int:
        return len(self._names)


class SharedContext:
    """A context that several users hold open: entered with the first and left with the last, in any order."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._users = 0
        self._context: AbstractContextManager[Any] | None = None
        self._value: Any = None

    def enter(self) -> Any:
        """Return the value of the context."""
        with self._lock:
            if self._context is None:
                context = self._make()
                self._value = context.__enter__()
                self._context = context
            self._users += 1
            return self._value

    @contextmanager
    def opened(self) -> Iterator[Any]:
        """Enter, and leave at the end."""
        value = self.enter()
        try:
            yield value
        finally:
            self.leave()

    def leave(self) -> None:
        """Undo one ``enter``."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._context is not None:
                context, self._context, self._value = self._context, None, None
                context.__exit__(None, None, None)


class ThreadContext(SharedContext, threading.local):
    """One such context per thread."""


eager_stance = SharedContext(lambda: torch.compiler.set_stance("force_eager"))
"""Lets compiled modules run eagerly. It is shared by all threads, since the stance belongs to the process."""


# === Copies that autocast makes of weights ============================================================================
def copies_weight(weight: Tensor, x: Tensor) -> bool:
    """Return True if a dense product with ``x`` would copy ``weight`` now.

    A linear layer keeps the copy if ``x`` needs a gradient, a convolution always.
    """
    dtype = autocast_dtype(x)
    return dtype is not None and weight.dtype not in (dtype, torch.float64)


def find_shared_copy(tensor: Tensor) -> Any:
    """Return the key of the shared copy that autocast would make or reuse for ``tensor``, ``None`` if it is not shared.

    Autocast must be on, to another type than that of ``tensor``.
    """
    leaf = tensor.is_leaf and tensor.requires_grad and not tensor._is_view()
    cached = leaf and tensor.dtype == torch.float32 and torch.is_autocast_cache_enabled()
    if not cached:
        return None
    # The storage distinguishes a tensor from a later one with the same id, the id from others with the same storage.
    return StorageKey(tensor.untyped_storage()), id(tensor), _find_region()  # type: ignore[no-untyped-call]


def find_copied_leaf(saved: Tensor) -> Tensor | None:
    """Return the leaf of which ``saved`` is a 16-bit copy, or a view of one; ``None`` if it is not such a copy."""
    copy = saved._base if saved._is_view() and saved._base is not None else saved
    if copy.grad_fn is None or copy.grad_fn.name() != "ToCopyBackward0" or copy.dtype.itemsize != 2:
        return None
    return getattr(copy.grad_fn.next_functions[0][0], "variable", None)


def find_copy_key(saved: Tensor) -> Any:
    """Return the key of the shared copy that ``saved`` is, or is a view of; ``None`` if it is no shared copy."""
    leaf = find_copied_leaf(saved)
    return None if leaf is None else find_shared_copy(leaf)


def _find_region() -> Any:
    """Return an object that stays the same throughout a region of autocast, on any device."""
    leaf = _make_empty_leaf()
    # Autocast is off inside operations that save tensors. No hook and no mode may see this operation.
    hidden = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with no_dispatch_modes(), hidden, torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        product = torch.mm(leaf, leaf).grad_fn
    assert product is not None
    return product.next_functions[0][0]


@functools.cache
def _make_empty_leaf() -> Tensor:
    return torch.empty(0, 0, device="cpu", dtype=torch.float32, requires_grad=True)


# === Calls of layers, and the storages behind tensors =================================================================
@dataclass(eq=False)
class LayerCall:
    """One forward of a layer that keeps its input, whole or packed.

    Args:
        layer: The layer.
        input_ref: The input.
        shape: A tensor without memory that has the shape and strides of the input, as the layer cuts it.
        itemsize: Bytes per value as the layer would keep it.
        dense_key: Storage of the input if the dense layer would keep that storage, ``None`` if it would keep a copy of
            its own, as under autocast.
        dense_bytes: Bytes that the dense layer would keep.
        dense_copy: Key of the shared autocast copy that the dense layer would keep as its input, if any.
        weight_keys: Storages of the weight, if the dense layer would keep the weight and no copy; for compressed
            layers.
        blocks: How a compressed layer cuts its input into blocks and stores it, ``None`` for other layers.
        sparsity: Fraction of blocks dropped in this call; set once it has saved something.
        packs: Whether this call packs what it keeps; set once it has saved something.
        saved: Whether autograd saved anything; not so inside an activation checkpoint.
        reuses: Whether it keeps what the layer before keeps quantized (``codec.pack_cache``), and nothing of its own.
        fine: Whether all blocks are kept, since there are few rows.
    """

    layer: nn.Module
    input_ref: weakref.ref[Tensor]
    shape: Tensor
    itemsize: int
    dense_key: StorageWeakRef | None
    dense_bytes: int
    dense_copy: Any = None
    weight_keys: frozenset[StorageWeakRef] = frozenset()
    blocks: Blocks | None = None
    sparsity: float = 0.0
    packs: bool = False
    saved: bool = False
    reuses: bool = False
    fine: bool = False

    def keeps(self, key: StorageWeakRef) -> bool:
        """Return True if the dense layer would keep this storage as its input."""
        return self.dense_key is not None and bool(key == self.dense_key)

    @property
    def reads(self) -> tuple[Any, ...]:
        """A key that calls share if one pack would do for all: they read the same tensor object and pack it alike.

        An object has one plain weak reference, which the calls keep alive, so its id is unique.
        """
        return id(self.input_ref), self.blocks, self.shape.shape

    def packed_bytes(self, sparsity: float) -> int:
        """Return the bytes of the packed input by formula; for compressed layers."""
        assert self.blocks is not None
        sparsity = 0.0 if self.fine else sparsity
        geometry = input_geometry(self.shape, self.blocks.block_size, sparsity, self.blocks.topk_over)
        return geometry.stored_bytes(self.itemsize, self.blocks.bits)


def make_layer_call(layer: nn.Module, weight: Tensor, x: Any, blocks: Blocks | None = None) -> LayerCall | None:
    """Return the record of a call that keeps its input ``x``, ``None`` if it keeps nothing.

    Args:
        layer: The layer.
        weight: What ``x`` is multiplied by: the weight of the layer, or some rows of that of an in-projection.
        x: The first argument, of any type.
        blocks: How a compressed layer cuts ``x`` into blocks, if not as its state says.
    """
    if not (isinstance(x, Tensor) and weight.requires_grad and may_compress(x)):
        return None
    if _is_wrapper(x) or not x.is_floating_point():
        return None
    dtype, convolution = compute_dtype(x), isinstance(layer, Convolution)
    dense_key, dense_bytes = None, x.numel() * dtype.itemsize
    flat = convolution or _flattens_without_copy(x)
    if dtype == x.dtype and flat:
        [(dense_key, dense_bytes)] = find_storages(x)
    shape = as_cut(layer, torch.empty_strided(x.shape, x.stride(), device="meta"))
    call = LayerCall(layer, weakref.ref(x), shape, dtype.itemsize, dense_key, dense_bytes)
    if dtype != x.dtype and flat:
        call.dense_copy = find_shared_copy(x)
    if isinstance(layer, CompressedLayer):
        linear = not convolution and x.dim() > 0
        call.blocks = blocks or (layer._state.of(x)[1] if linear else layer._state.blocks)
        call.fine = linear and layer._state.is_fine(x)
        if not (copies_weight(weight, x) and (x.requires_grad or convolution)):
            call.weight_keys = frozenset(key for key, _ in find_storages(weight))
    return call


def packs(layer: nn.Module) -> bool:
    """Return True if ``layer`` keeps its input in another form than a dense layer."""
    return isinstance(layer, CompressedLayer) and layer.packs


def _flattens_without_copy(x: Tensor) -> bool:
    """Return True if ``F.linear`` can keep a view of ``x``, judged by shape and strides."""
    if x.dim() <= 2 or x.is_contiguous():
        return True
    meta = torch.empty_strided(x.shape, x.stride(), device="meta")
    return meta.flatten(0, -2)._is_view()


def find_storages(value: Any) -> list[tuple[StorageWeakRef, int]]:
    """Return the storages that hold the data of ``value``, with their bytes; none if it is not dense, or ``vmap``'s."""
    if isinstance(value, Tensor) and _is_wrapper(value):
        inner, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
        return [entry for name in inner for entry in find_storages(getattr(value, name))]
    if not isinstance(value, Tensor) or value.layout != torch.strided or is_functorch_wrapped_tensor(value):
        return []
    storage = value.untyped_storage()
    return [(StorageKey(storage), storage.nbytes())]  # type: ignore[no-untyped-call]


def is_expanded(tensor: Tensor) -> bool:
    """Return True if one value of ``tensor`` stands in several places."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _is_wrapper(tensor: Tensor) -> bool:
    """Return True if ``tensor`` is a DTensor or similar, whose data is in other tensors."""
    return hasattr(tensor, "__tensor_flatten__")


# === The pair of hooks that all recorders of a thread share ===========================================================
@dataclass(frozen=True)
class Saved:
    """A storage that autograd saved.

    Args:
        key: The storage.
        nbytes: Its bytes, including those outside a saved view.
        module: The innermost running module, ``None`` outside of all modules.
        call: The running call of a layer, if there is one.
        handle: What the graph holds; it dies with the graph.
        device: Device of the storage.
        dtype: Type of the saved tensor.
        copy_key: Key of autocast's shared copy that it is, ``None`` if it is none.
        is_packed: Whether it replaces a tensor that was packed.
        is_late: Whether the tensor was saved before (``SavedTensorRecorder._on_delayed``).
    """

    key: StorageWeakRef
    nbytes: int
    module: nn.Module | None
    call: LayerCall | None
    handle: weakref.ref[Any]
    device: torch.device
    dtype: torch.dtype
    copy_key: Any
    is_packed: bool = False
    is_late: bool = False


class _Open(threading.local):
    """The open recorders of a thread."""

    def __init__(self) -> None:
        self.recorders: list[SavedTensorRecorder] = []


@dataclass(frozen=True, eq=False)
class _HandedOn:
    """What the graph holds if other saved-tensor hooks are open around those of the recorders.

    Args:
        value: Result of their pack hook.
        unpack: Their unpack hook, which may be called after they are closed.
    """

    value: Any
    unpack: Callable[[Any], Tensor]


_open = _Open()


@contextmanager
def _record() -> Iterator[bool]:
    """Open the hooks of the recorders; yields True if there are others around them."""
    outer = top_saved_tensors_hooks(False)
    with torch.autograd.graph.saved_tensors_hooks(partial(_pack, outer), _unpack):
        yield outer is not None


_saving = ThreadContext(_record)
unpack_listeners: list[Callable[[Any], None]] = []
"""Called with what the graph holds when backward reads it, while the node runs; on a GPU in a thread of autograd."""


@unseen_by_compilers
def _pack(outer: _Hooks | None, tensor: Tensor) -> Tensor | _HandedOn:
    is_again = is_recomputation()
    recorders = () if is_again else tuple(_open.recorders)
    handle: Tensor | _HandedOn
    if outer is not None:
        pack, unpack = outer
        handle = _HandedOn(pack(tensor), unpack)
    else:
        # Holding the tensor itself would be a cycle if it is the result of the operation that saves it. Packed inputs
        # and integers are not results, and other layers share a packed input only while it is the same object.
        packed = tensor.dtype == torch.uint8
        if not packed and not tensor.requires_grad:
            packed = is_again or any(recorder.runs_compressed for recorder in recorders)
        handle = tensor if packed else tensor.detach()
    copy_key = find_copy_key(tensor) if recorders else None
    for recorder in recorders:
        recorder.see(tensor, handle, copy_key)
    return handle


def _hear(tensor: Tensor) -> None:
    for recorder in () if packing.is_late else tuple(_open.recorders):
        recorder._on_delayed(tensor)


@unseen_by_compilers
def _unpack(handle: Tensor | _HandedOn) -> Tensor:
    for listener in tuple(unpack_listeners):
        listener(handle)
    return handle.unpack(handle.value) if isinstance(handle, _HandedOn) else handle


listeners[_unpack] = listeners[unpack_saved] = _hear  # a scope may be inside another


# === Recorders: of saved tensors, and of calls ========================================================================
class SavedTensorRecorder:
    """Follow the forwards inside this context; a subclass handles what is saved.

    Args:
        model: The module whose calls are followed.
        batch: Holds the step's input tensors, which are alive anyway.

    Raises:
        RuntimeError: When entered, if torch lacks a private name that it needs (see ``codec.private``).
    """

    needs: ClassVar[tuple[str, ...]] = FOR_RECORDERS
    """Private names of torch that it needs."""

    def __init__(self, model: nn.Module, batch: Any = None) -> None:
        self._model = model
        self._layers = {layer for _, layer in input_layers(model)}
        self._batch = {key for tensor in tree_leaves(batch) for key, _ in find_storages(tensor)}
        self._parameters: set[StorageWeakRef] = set()
        self._quantized: set[StorageWeakRef] = set()
        """Storages that layers outside ``_layers`` keep quantized; layers in ``_layers`` may read them too."""
        self._running: list[tuple[nn.Module, LayerCall | None]] = []
        self._handles: list[RemovableHandle] = []
        self._active = self._is_inside = False
        self.ran = False
        """Whether a module was called or something was saved."""
        self.hands_on = False
        """Whether other saved-tensor hooks, open around those of the recorders, decide what the graph holds."""

    def __enter__(self) -> Self:
        require(type(self).__name__, self.needs)
        self.hands_on = _saving.enter()
        _open.recorders.append(self)
        watchers.append(self)
        self._active = True
        try:
            self._add_parameters((*self._model.parameters(), *self._model.buffers()))
            for module in self._list_modules():
                # Torch is going through the hooks of a model that runs already, which must not change meanwhile.
                if not (self._is_inside and module is self._model):
                    self._follow(module)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        explain(error)
        self.close()

    def close(self) -> None:
        """Stop following; the record stays. Closing twice does nothing."""
        if not self._active:
            return
        self._active = False
        watchers.remove(self)
        _open.recorders.remove(self)
        _saving.leave()
        while self._handles:
            self._handles.pop().remove()
        self._running.clear()

    def enter_inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        """Enter from a hook of the model, which is about to run with these arguments."""
        self._is_inside = True
        self.__enter__()
        self._enter_module(self._model, args, kwargs)
        return self

    def exit_inside(self, args: Any, output: Any) -> None:
        """Exit from a hook of the model, which has run."""
        self._leave_module(self._model, args, output)
        self.__exit__(None, None, None)

    @property
    def runs_compressed(self) -> bool:
        """Whether a layer that packs its input is running."""
        _, call = self._running[-1] if self._running else (None, None)
        return call is not None and packs(call.layer)

    def see(self, tensor: Tensor, handle: Tensor | _HandedOn, copy_key: Any) -> None:
        """Record a tensor that autograd saves: what the graph holds in its place, and which copy it is."""
        self.ran = True
        module, call = self._running[-1] if self._running else (None, None)
        if call is not None and not call.saved:
            call.saved, call.packs = True, packs(call.layer)
            call.sparsity = call.layer.sparsity if isinstance(call.layer, CompressedLayer) else 0.0
        for key, nbytes in find_storages(tensor):
            if tensor.dtype == torch.uint8 and call is None:
                self._quantized.add(key)
            elif tensor.dtype == torch.uint8 and call is not None and call.packs and key in self._quantized:
                call.reuses = True
            what = tensor.device, tensor.dtype, copy_key, packing.is_packed, packing.is_late
            self._on_saved(Saved(key, nbytes, module, call, weakref.ref(handle), *what))

    def _follow(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
            return
        self._handles.append(module.register_forward_pre_hook(ForwardHook(self._enter_module), with_kwargs=True))
        # Always: a forward may raise, and its caller may go on without it.
        self._handles.append(module.register_forward_hook(ForwardHook(self._leave_module), always_call=True))

    def _list_modules(self) -> Iterable[nn.Module]:
        """Return the modules whose calls Python sees."""
        return eager_modules(self._model)

    def _on_call(self, call: LayerCall) -> None:
        """Called when a layer is about to run."""

    def _on_return(self, call: LayerCall) -> None:
        """Called when a layer has run."""

    def _on_saved(self, saved: Saved) -> None:
        """Called when autograd saves a storage."""

    def _on_delayed(self, tensor: Tensor) -> None:
        """Called when autograd saves a tensor that the graph will hold in another form, or that waits."""

    def _enter_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs, weight = (*args, *kwargs.values()), weight_of_call(module)
        self._enter(module, make_layer_call(module, weight, inputs[0]) if inputs and weight is not None else None)

    def enter_projection(self, projection: Projection, x: Tensor) -> None:
        """Record a projection inside an attention module as the call of a layer."""
        layer = projection.layer
        if layer in self._layers:
            cut = projection.with_samples(x)
            self._enter(layer, make_layer_call(layer, projection.weight, cut, projection.blocks(cut)))

    def leave_projection(self, projection: Projection, y: Tensor | None) -> None:
        """End a projection that ``enter_projection`` began, also after an exception."""
        if projection.layer in self._layers:
            self._leave(projection.layer)

    def _enter(self, module: nn.Module, call: LayerCall | None) -> None:
        self.ran = True
        call = None if is_recomputation() else call
        # Sharded parameters are gathered into new storages just before the forward.
        self._add_parameters(module.parameters(recurse=False))
        self._running.append((module, call))
        if call is not None:
            self._on_call(call)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._leave(module)

    def _leave(self, module: nn.Module) -> None:
        if self._running and self._running[-1][0] is module:
            _, call = self._running.pop()
            if call is not None:
                self._on_return(call)

    def _add_parameters(self, tensors: Iterable[Tensor]) -> None:
        self._parameters.update(key for tensor in tensors for key, _ in find_storages(tensor))


def hooks_are_innermost() -> bool:
    """Return True if saved tensors reach the recorders now, and not hooks of the model such as a checkpoint's."""
    hooks = top_saved_tensors_hooks(False)
    return hooks is not None and hooks[1] in (_unpack, unpack_saved)


class CallWatcher(ABC):
    """A context that sees each call of a model's compressed layers when it begins, including projections of attention.

    It uses plain forward hooks and removes them at the end.

    Args:
        model: The module that holds the layers.
        eagerly: Whether compiled modules run eagerly in this context, as inside ``RetentionProbe``. Otherwise nothing
            inside them is seen.
    """

    def __init__(self, model: nn.Module, *, eagerly: bool = False) -> None:
        self._model = model
        self._eagerly = eagerly
        self._layers: set[nn.Module] = set()
        self._handles: list[RemovableHandle] = []
        self._active = False
        self.ran = False
        """Whether a layer was called, or there is none whose calls are seen."""

    def __enter__(self) -> Self:
        require(type(self).__name__, FOR_BACKWARD)
        followed = set(self._model.modules()) if self._eagerly else eager_modules(self._model)
        compressed = [layer for _, layer in input_layers(self._model) if isinstance(layer, CompressedLayer)]
        self._layers = {layer for layer in compressed if layer in followed and layer.stores}
        self.ran = not self._layers
        self._active = True
        watchers.append(self)
        for layer in self._layers:
            if weight_of_call(layer) is not None:
                # A replica of DataParallel has the hooks of its original, and counts for it.
                self._handles.append(layer.register_forward_pre_hook(ForwardHook(partial(self._see_layer, layer))))
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching; results stay. Closing twice does nothing."""
        if self._active:
            self._active = False
            watchers.remove(self)
            while self._handles:
                self._handles.pop().remove()

    def enter_projection(self, projection: Projection, x: Tensor) -> None:
        """See a projection inside an attention module as the call of a layer."""
        if projection.layer in self._layers:
            self.ran = True
            cut = projection.with_samples(x)
            self._see(projection.layer, projection.weight, cut, projection.blocks(cut))

    def leave_projection(self, projection: Projection, y: Tensor | None) -> None:  # noqa: B027  # nothing is the default on purpose
        """Do nothing: a call counts when it begins."""

    def _see_layer(self, layer: nn.Module, called: nn.Module, args: Any) -> None:
        weight = weight_of_call(layer)
        self.ran = True
        if isinstance(layer, CompressedLayer) and weight is not None:  # not reverted meanwhile
            x = args[0] if args else None
            self._see(layer, weight, as_cut(layer, x) if isinstance(x, Tensor) else x, layer._state.blocks)

    @abstractmethod
    def _see(self, layer: CompressedLayer, weight: Tensor, x: Any, blocks: Blocks) -> None:
        """See a call with its first argument, and how that is cut into blocks."""
