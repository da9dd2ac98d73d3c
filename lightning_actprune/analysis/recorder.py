"""What autograd saves during forwards: which storage, by which module, in which call of a layer.

**One pair of hooks.** Autograd hands every tensor that it saves to the innermost pair of saved-tensor hooks alone. All
recorders of a thread therefore share one pair, entered with the first and left with the last of them, in whatever order
they close. What was saved is then handed on to the pair around theirs, if there is one, such as that of
``save_on_cpu``. A pair inside theirs, such as that of an activation checkpoint, keeps from them what it gets. What is
saved while backward runs is not recorded: an activation checkpoint runs a forward again there, for the moment. Storages
are known by weak references, which keep nothing alive and keep an address from being mistaken for that of a later
tensor.

**Autocast's copies.** Under autocast a linear layer multiplies by a 16-bit copy of its weight, and autograd saves that
copy wherever the input needs a gradient (``dx = g W``). A compressed layer saves the parameter itself, which is there
anyway, and casts it once more. Autocast makes the copy of a leaf in fp32 that needs a gradient once in a region, from
the outermost ``with torch.autocast`` to its end, and hands it to everybody who multiplies by that leaf. So the copy is
known by leaf and region. Of all other tensors, such as a part of an in-projection, it makes a new one each time, and of
leaves too with ``cache_enabled=False``. Which region it is, torch does not say. It shows in autocast's copy of a leaf
of our own without any values, on the CPU: within a region, that has one and the same node in the graph.
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
from lightning_actprune.operators.saved import packing, unpack_saved

_Hooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def input_layers(model: nn.Module) -> Iterator[tuple[list[str], nn.Module]]:
    """Yield the layers that keep their input: linear layers, attention for its projections, and convolutions."""
    return ((fqns, layer) for fqns, layer in layers(model) if operator_of(layer) in ("linear", "convolution"))


class ModuleNames(Mapping[nn.Module, str]):
    """The fully qualified name of each module, without what wrappers add to it.

    By identity: a metric has another hash whenever its state changes.
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
    """A context that several users hold open: entered with the first, left with the last, in any order."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._users = 0
        self._context: AbstractContextManager[Any] | None = None
        self._value: Any = None

    def enter(self) -> Any:
        """Return what the context gave when it was entered."""
        with self._lock:
            if self._context is None:
                context = self._make()
                self._value = context.__enter__()
                self._context = context
            self._users += 1
            return self._value

    @contextmanager
    def opened(self) -> Iterator[Any]:
        """Enter, and leave in the end."""
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
    """The same, one for each thread."""


eager_stance = SharedContext(lambda: torch.compiler.set_stance("force_eager"))
"""Lets compiled modules run eagerly: one for all threads, as the stance is the process's, and one that is left too
early leaves the other's behind."""


def copies_weight(weight: Tensor, x: Tensor) -> bool:
    """Return whether a dense product with ``x`` would make a copy of ``weight`` now.

    A linear layer keeps it if ``x`` needs a gradient, a convolution always.
    """
    dtype = autocast_dtype(x)
    return dtype is not None and weight.dtype not in (dtype, torch.float64)


def shared_copy(tensor: Tensor) -> Any:
    """Return the key of the copy that autocast would now make or take of ``tensor``, ``None`` if of one nobody shares.

    Autocast must be on, to a type that is not the tensor's.
    """
    leaf = tensor.is_leaf and tensor.requires_grad and not tensor._is_view()
    cached = leaf and tensor.dtype == torch.float32 and torch.is_autocast_cache_enabled()
    return _shared_key(tensor) if cached else None


def copied_leaf(saved: Tensor) -> Tensor | None:
    """Return the leaf of which ``saved`` is a copy in 16 bits, or a view of one; ``None`` if it is no such copy."""
    copy = saved._base if saved._is_view() and saved._base is not None else saved
    if copy.grad_fn is None or copy.grad_fn.name() != "ToCopyBackward0" or copy.dtype.itemsize != 2:
        return None
    return getattr(copy.grad_fn.next_functions[0][0], "variable", None)


def kept_copy(saved: Tensor) -> Any:
    """Return the key of the copy that ``saved`` is, or is a view of, ``None`` if it is no copy that others share."""
    leaf = copied_leaf(saved)
    return None if leaf is None else shared_copy(leaf)


def _shared_key(leaf: Tensor) -> Any:
    # The storage tells a tensor from a later one with the same id, the id from others with the same storage.
    return StorageKey(leaf.untyped_storage()), id(leaf), _region()  # type: ignore[no-untyped-call]


def _region() -> Any:
    """Return an object that is the same one throughout a region of autocast, whatever its device."""
    leaf = _empty_leaf()
    # Autocast is off inside the operations that save tensors, and nobody should see this one: no hooks, no modes.
    hidden = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with no_dispatch_modes(), hidden, torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        product = torch.mm(leaf, leaf).grad_fn
    assert product is not None
    return product.next_functions[0][0]


@functools.cache
def _empty_leaf() -> Tensor:
    return torch.empty(0, 0, device="cpu", dtype=torch.float32, requires_grad=True)


@dataclass(eq=False)
class LayerCall:
    """One forward of a layer that keeps its input, whole or packed.

    Args:
        layer: The layer.
        given: The input.
        shape: A tensor without memory that has the shape and strides of the input, as the layer cuts it.
        itemsize: Bytes of a value as the layer would keep it.
        dense_key: Storage of the input if the dense layer would keep that very storage, ``None`` if it would keep a
            copy of its own, as it does under autocast.
        dense_bytes: Bytes of what the dense layer would keep.
        dense_copy: Which of autocast's copies the dense layer would keep as its input, if one that others share.
        weight_keys: Storages of the weight, if the dense layer would keep that and no copy; only of a compressed one.
        blocks: How a compressed layer cuts its input into blocks and stores it, ``None`` of any other.
        sparsity: Fraction of blocks dropped in this call, known once it has saved something.
        packs: Whether what this call keeps is packed, known by then too.
        saved: Whether autograd saved anything: not so inside an activation checkpoint.
        reuses: Whether it keeps nothing of its own, but what the layer before keeps quantized (``codec.pack_cache``).
        fine: Whether it has so few rows that all its blocks are kept.
    """

    layer: nn.Module
    given: weakref.ref[Tensor]
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
        """Return whether the dense layer would keep that very storage as its input."""
        return self.dense_key is not None and bool(key == self.dense_key)

    @property
    def reads(self) -> tuple[Any, ...]:
        """What calls have in common that would share one pack: they read one tensor object, and pack it alike.

        There is one plain weak reference to an object, which the calls keep, so its number is no other's.
        """
        return id(self.given), self.blocks, self.shape.shape

    def packed_bytes(self, sparsity: float) -> int:
        """Return the bytes of the packed input by formula; the layer must be a compressed one."""
        assert self.blocks is not None
        sparsity = 0.0 if self.fine else sparsity
        geometry = input_geometry(self.shape, self.blocks.block_size, sparsity, self.blocks.scope)
        return geometry.stored_bytes(self.itemsize, self.blocks.bits)


def layer_call(layer: nn.Module, weight: Tensor, x: Any, blocks: Blocks | None = None) -> LayerCall | None:
    """Return the record of a call that keeps its input ``x``, ``None`` if it keeps nothing.

    Args:
        layer: The layer.
        weight: What ``x`` is multiplied with: the layer's weight, or some rows of that of an in-projection.
        x: The first argument, whatever it is.
        blocks: How a compressed layer cuts ``x`` into blocks if that does not lie as the layer's own means it.
    """
    if not (isinstance(x, Tensor) and weight.requires_grad and may_compress(x)):
        return None
    if _is_wrapper(x) or not x.is_floating_point():
        return None
    dtype, convolution = compute_dtype(x), isinstance(layer, Convolution)
    dense_key, dense_bytes = None, x.numel() * dtype.itemsize
    flat = convolution or _flattens_without_copy(x)
    if dtype == x.dtype and flat:
        [(dense_key, dense_bytes)] = storages(x)
    shape = as_cut(layer, torch.empty_strided(x.shape, x.stride(), device="meta"))
    call = LayerCall(layer, weakref.ref(x), shape, dtype.itemsize, dense_key, dense_bytes)
    if dtype != x.dtype and flat:
        call.dense_copy = shared_copy(x)
    if isinstance(layer, CompressedLayer):
        linear = not convolution and x.dim() > 0
        call.blocks = blocks or (layer._state.of(x)[1] if linear else layer._state.blocks)
        call.fine = linear and layer._state.is_fine(x)
        if not (copies_weight(weight, x) and (x.requires_grad or convolution)):
            call.weight_keys = frozenset(key for key, _ in storages(weight))
    return call


def sparsity_of(layer: nn.Module) -> float:
    """Return the fraction of blocks that ``layer`` drops, 0 if it is dense."""
    return layer.sparsity if isinstance(layer, CompressedLayer) else 0.0


def packs(layer: nn.Module) -> bool:
    """Return whether ``layer`` keeps its input in another form than a dense layer."""
    return isinstance(layer, CompressedLayer) and layer.packs


def _flattens_without_copy(x: Tensor) -> bool:
    """Return whether ``F.linear`` can keep a view of ``x``: only shape and strides are looked at."""
    if x.dim() <= 2 or x.is_contiguous():
        return True
    meta = torch.empty_strided(x.shape, x.stride(), device="meta")
    return meta.flatten(0, -2)._is_view()


def storages(value: Any) -> list[tuple[StorageWeakRef, int]]:
    """Return the storages that hold ``value``'s data, with their bytes; none if it is not dense, or ``vmap``'s."""
    if isinstance(value, Tensor) and _is_wrapper(value):
        inner, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
        return [entry for name in inner for entry in storages(getattr(value, name))]
    if not isinstance(value, Tensor) or value.layout != torch.strided or is_functorch_wrapped_tensor(value):
        return []
    storage = value.untyped_storage()
    return [(StorageKey(storage), storage.nbytes())]  # type: ignore[no-untyped-call]


def is_expanded(tensor: Tensor) -> bool:
    """Return whether values of ``tensor`` are one value in many places."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _is_wrapper(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor or its like, whose data is in other tensors."""
    return hasattr(tensor, "__tensor_flatten__")


@dataclass(frozen=True)
class Saved:
    """A storage that autograd saved.

    Args:
        key: The storage.
        nbytes: Its bytes, those outside a saved view included.
        module: The innermost running module, ``None`` outside of all.
        call: The call of a layer, if that is what is running.
        handle: What the graph holds; gone once the graph is.
        device: Where the storage is.
        dtype: Type of the saved tensor.
        copy_key: Which of autocast's copies it is, ``None`` if none that others share.
        original: The storage that it is saved in place of, with its bytes, if a tensor was packed for it.
    """

    key: StorageWeakRef
    nbytes: int
    module: nn.Module | None
    call: LayerCall | None
    handle: weakref.ref[Any]
    device: torch.device
    dtype: torch.dtype
    copy_key: Any
    original: tuple[StorageWeakRef, int] | None = None


class _Open(threading.local):
    """The open recorders of a thread."""

    def __init__(self) -> None:
        self.recorders: list[SavedTensorRecorder] = []


@dataclass(frozen=True, eq=False)
class _HandedOn:
    """What the graph holds if other saved-tensor hooks are open around the recorders'.

    Args:
        value: What their pack hook made of the tensor.
        unpack: Their unpack hook, which may be called when they are no longer open.
    """

    value: Any
    unpack: Callable[[Any], Tensor]


_open = _Open()


@contextmanager
def _recording() -> Iterator[bool]:
    """Open the recorders' hooks; gives whether there are others around them."""
    outer = top_saved_tensors_hooks(False)
    with torch.autograd.graph.saved_tensors_hooks(partial(_pack, outer), _unpack):
        yield outer is not None


_saving = ThreadContext(_recording)
unpack_listeners: list[Callable[[Any], None]] = []
"""Told what backward takes up (what the graph holds) while its node runs, on a GPU in a thread of autograd's own."""


@unseen_by_compilers
def _pack(outer: _Hooks | None, tensor: Tensor) -> Tensor | _HandedOn:
    again = is_recomputation()
    recorders = () if again else tuple(_open.recorders)
    kept: Tensor | _HandedOn
    if outer is not None:
        pack, unpack = outer
        kept = _HandedOn(pack(tensor), unpack)
    else:
        # Holding the tensor itself would be a cycle if it is the result of the operation that saves it. A packed input
        # is none, nor are integers, and other layers share it only as long as it is this object.
        packed = tensor.dtype == torch.uint8
        if not packed and not tensor.requires_grad:
            packed = again or any(recorder.runs_compressed for recorder in recorders)
        kept = tensor if packed else tensor.detach()
    copy_key = kept_copy(tensor) if recorders else None
    for recorder in recorders:
        recorder.see(tensor, kept, copy_key)
    return kept


@unseen_by_compilers
def _unpack(kept: Tensor | _HandedOn) -> Tensor:
    for listener in tuple(unpack_listeners):
        listener(kept)
    return kept.unpack(kept.value) if isinstance(kept, _HandedOn) else kept


class SavedTensorRecorder:
    """Follow the forwards run inside this context; a subclass says what to do with what is saved.

    Args:
        model: The module whose calls are followed.
        batch: Whatever holds the step's input tensors, which are alive anyway.

    Raises:
        RuntimeError: When it is entered, if torch does not say what it needs to know (see ``codec.private``).
    """

    needs: ClassVar[tuple[str, ...]] = FOR_RECORDERS
    """Private names of torch that it rests on."""

    def __init__(self, model: nn.Module, batch: Any = None) -> None:
        self._model = model
        self._layers = {layer for _, layer in input_layers(model)}
        self._batch = {key for tensor in tree_leaves(batch) for key, _ in storages(tensor)}
        self._parameters: set[StorageWeakRef] = set()
        self._quantized: set[StorageWeakRef] = set()
        """What layers other than those of ``_layers`` keep quantized; these may read it too."""
        self._running: list[tuple[nn.Module, LayerCall | None]] = []
        self._handles: list[RemovableHandle] = []
        self._active = False
        self.ran = False
        """Whether a module was called or something saved."""
        self.hands_on = False
        """Whether other saved-tensor hooks, open around the recorders', decide what the graph holds."""

    def __enter__(self) -> Self:
        require(type(self).__name__, self.needs)
        self.hands_on = _saving.enter()
        _open.recorders.append(self)
        watchers.append(self)
        self._active = True
        try:
            self._add_parameters((*self._model.parameters(), *self._model.buffers()))
            for module in self._followed():
                self._follow(module)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        explain(error)
        self.close()

    def close(self) -> None:
        """Stop following; what was recorded stays. Closing twice does nothing."""
        if not self._active:
            return
        self._active = False
        watchers.remove(self)
        _open.recorders.remove(self)
        _saving.leave()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._running.clear()

    @property
    def runs_compressed(self) -> bool:
        """Whether a layer that packs its input is what is running."""
        _, call = self._running[-1] if self._running else (None, None)
        return call is not None and packs(call.layer)

    def see(self, tensor: Tensor, kept: Tensor | _HandedOn, copy_key: Any) -> None:
        """Take note of a tensor that autograd saves: what the graph holds in its place, and which copy it is."""
        self.ran = True
        module, call = self._running[-1] if self._running else (None, None)
        if call is not None and not call.saved:
            call.saved, call.sparsity, call.packs = True, sparsity_of(call.layer), packs(call.layer)
        original = next(iter(storages(packing.original)), None)
        for key, nbytes in storages(tensor):
            if tensor.dtype == torch.uint8:
                self._note_quantized(key, call)
            where = tensor.device, tensor.dtype
            self._on_saved(Saved(key, nbytes, module, call, weakref.ref(kept), *where, copy_key, original))

    def _note_quantized(self, key: StorageWeakRef, call: LayerCall | None) -> None:
        if call is None:
            self._quantized.add(key)
        elif call.packs and key in self._quantized:
            call.reuses = True

    def _follow(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
            return
        self._handles.append(module.register_forward_pre_hook(ForwardHook(self._enter_module), with_kwargs=True))
        # Always: a forward may raise and its caller go on without it.
        self._handles.append(module.register_forward_hook(ForwardHook(self._leave_module), always_call=True))

    def _followed(self) -> Iterable[nn.Module]:
        """Return the modules whose calls are followed: those that Python sees."""
        return eager_modules(self._model)

    def _on_call(self, call: LayerCall) -> None:
        """Act on a layer that is about to run."""

    def _on_return(self, call: LayerCall) -> None:
        """Act on a layer that has run."""

    def _on_saved(self, saved: Saved) -> None:
        """Act on a storage that autograd saves."""

    def _enter_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs, weight = (*args, *kwargs.values()), weight_of_call(module)
        self._enter(module, layer_call(module, weight, inputs[0]) if inputs and weight is not None else None)

    def enter_projection(self, projection: Projection, x: Tensor) -> None:
        """Follow a projection inside an attention module as the call of a layer, which it is not."""
        layer = projection.layer
        if layer in self._layers:
            given = projection.with_samples(x)
            self._enter(layer, layer_call(layer, projection.weight, given, projection.blocks(given)))

    def leave_projection(self, projection: Projection, y: Tensor | None) -> None:
        """Note that what ``enter_projection`` announced is over, also by an exception."""
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
        self._parameters.update(key for tensor in tensors for key, _ in storages(tensor))


def hooks_are_innermost() -> bool:
    """Return whether what is saved now reaches the recorders, not hooks of the model such as a checkpoint's."""
    hooks = top_saved_tensors_hooks(False)
    return hooks is not None and hooks[1] in (_unpack, unpack_saved)


class CallWatcher(ABC):
    """A context that sees each call of a model's compressed layers when it begins, attention's projections included.

    It uses plain forward hooks, which are gone when it is left.

    Args:
        model: The module that holds the layers.
        eagerly: Whether compiled modules run eagerly in this context, as they do inside ``RetentionProbe``. Otherwise
            nothing inside them is seen.
    """

    def __init__(self, model: nn.Module, *, eagerly: bool = False) -> None:
        self._model = model
        self._eagerly = eagerly
        self._layers: set[nn.Module] = set()
        self._handles: list[RemovableHandle] = []
        self._active = False
        self.ran = False
        """Whether one of the layers was called, or there is none whose calls are seen."""

    def __enter__(self) -> Self:
        require(type(self).__name__, FOR_BACKWARD)
        seen = set(self._model.modules()) if self._eagerly else eager_modules(self._model)
        compressed = [layer for _, layer in input_layers(self._model) if isinstance(layer, CompressedLayer)]
        self._layers = {layer for layer in compressed if layer in seen and layer.stores}
        self.ran = not self._layers
        self._active = True
        watchers.append(self)
        for layer in self._layers:
            if weight_of_call(layer) is not None:
                # A replica of DataParallel's has the hooks of its original, and counts for that.
                self._handles.append(layer.register_forward_pre_hook(ForwardHook(partial(self._see_layer, layer))))
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching; what was found stays. Closing twice does nothing."""
        if self._active:
            self._active = False
            watchers.remove(self)
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def enter_projection(self, projection: Projection, x: Tensor) -> None:
        """Take note of a projection inside an attention module as the call of a layer, which it is not."""
        if projection.layer in self._layers:
            self.ran = True
            given = projection.with_samples(x)
            self._see(projection.layer, projection.weight, given, projection.blocks(given))

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
        """Look at a call with its first argument, and how that is cut into blocks."""
