"""What autograd saves during forwards: which storage, by which module, in which call of a linear layer.

Autograd hands every tensor that it saves to the innermost pair of saved-tensor hooks alone. All recorders of a thread
therefore share one pair, entered with the first and left with the last of them, in whatever order they close. What was
saved is then handed on to the pair around theirs, if there is one, such as that of ``save_on_cpu``. A pair inside
theirs, such as that of an activation checkpoint, keeps from them what it gets.

What is saved while backward runs is not recorded: an activation checkpoint runs a forward again there, for the moment.

Storages are known by weak references, which keep nothing alive and keep an address from being mistaken for that of a
later tensor.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_actprune.calls import LinearCall, linear_call, packs, sparsity_of, storages
from lightning_actprune.copies import kept_copy
from lightning_actprune.hooks import ForwardHook, backward_runs, eager_modules
from lightning_actprune.nn.attention import Projection, watchers
from lightning_actprune.nn.kinds import weight_of_call
from lightning_actprune.ops.unseen import settle_open_hooks
from lightning_actprune.selection import prunable_layers
from lightning_actprune.shared_context import SharedContext


@dataclass(frozen=True)
class Saved:
    """A storage that autograd saved.

    Args:
        key: The storage.
        nbytes: Its bytes, those outside a saved view included.
        module: The innermost running module, ``None`` outside of all.
        call: The call of a linear layer, if that is what is running.
        handle: What the graph holds; gone once the graph is.
        device: Where the storage is.
        copy_key: Which of autocast's copies it is, ``None`` if none that others share.
    """

    key: StorageWeakRef
    nbytes: int
    module: nn.Module | None
    call: LinearCall | None
    handle: weakref.ref[Any]
    device: torch.device
    copy_key: Any


class _Open(threading.local):
    """The open recorders of a thread."""

    def __init__(self) -> None:
        self.recorders: list[SavedTensorRecorder] = []


_Hooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


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
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
    with torch.autograd.graph.saved_tensors_hooks(partial(_pack, outer), _unpack):
        yield outer is not None


_saving = SharedContext(_recording)
unpack_listeners: list[Callable[[Any], None]] = []
"""Told what backward takes up (what the graph holds) while its node runs, on a GPU in a thread of autograd's own."""


def _pack(outer: _Hooks | None, tensor: Tensor) -> Tensor | _HandedOn:
    again = backward_runs()
    recorders = () if again else tuple(_open.recorders)
    held: Tensor | _HandedOn
    if outer is not None:
        pack, unpack = outer
        held = _HandedOn(pack(tensor), unpack)
    else:
        # Holding the tensor itself would be a cycle if it is the result of the operation that saves it. A packed input
        # is none, nor are integers, and other layers share it only as long as it is this object.
        packed = tensor.dtype == torch.uint8
        if not packed and not tensor.requires_grad:
            packed = again or any(recorder.runs_pruned for recorder in recorders)
        held = tensor if packed else tensor.detach()
    copy_key = kept_copy(tensor) if recorders else None
    for recorder in recorders:
        recorder.see(tensor, held, copy_key)
    return held


def _unpack(held: Tensor | _HandedOn) -> Tensor:
    for listener in tuple(unpack_listeners):
        listener(held)
    return held.unpack(held.value) if isinstance(held, _HandedOn) else held


class SavedTensorRecorder:
    """Follow the forwards run inside this context; a subclass says what to do with what is saved.

    Args:
        model: The module whose calls are followed.
        batch: Whatever holds the step's input tensors, which are alive anyway.
    """

    def __init__(self, model: nn.Module, batch: Any = None) -> None:
        self._model = model
        self._layers = {layer for _, layer in prunable_layers(model)}
        self._batch = {key for tensor in tree_leaves(batch) for key, _ in storages(tensor)}
        self._parameters: set[StorageWeakRef] = set()
        self._in_few_bits: set[StorageWeakRef] = set()
        """What other layers than those of ``_layers`` keep in few bits; linear layers may read it too."""
        self._running: list[tuple[nn.Module, LinearCall | None]] = []
        self._handles: list[RemovableHandle] = []
        self._active = False
        self.ran = False
        """Whether a module was called or something saved."""
        self.hands_on = False
        """Whether other saved-tensor hooks, open around the recorders', decide what the graph holds."""

    def __enter__(self) -> Self:
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

    def __exit__(self, *exc_info: Any) -> None:
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
    def runs_pruned(self) -> bool:
        """Whether a layer that prunes its input is what is running."""
        _, call = self._running[-1] if self._running else (None, None)
        return call is not None and packs(call.layer)

    def see(self, tensor: Tensor, held: Tensor | _HandedOn, copy_key: Any) -> None:
        """Take note of a tensor that autograd saves: what the graph holds in its place, and which copy it is."""
        self.ran = True
        module, call = self._running[-1] if self._running else (None, None)
        if call is not None and not call.saved:
            call.saved, call.sparsity, call.packs = True, sparsity_of(call.layer), packs(call.layer)
        for key, nbytes in storages(tensor):
            if tensor.dtype == torch.uint8:
                self._note_few_bits(key, call)
            self._on_saved(Saved(key, nbytes, module, call, weakref.ref(held), tensor.device, copy_key))

    def _note_few_bits(self, key: StorageWeakRef, call: LinearCall | None) -> None:
        if call is None:
            self._in_few_bits.add(key)
        elif call.packs and key in self._in_few_bits:
            call.derived = True

    def _follow(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
            return
        self._handles.append(module.register_forward_pre_hook(ForwardHook(self._enter_module), with_kwargs=True))
        # Always: a forward may raise and its caller go on without it.
        self._handles.append(module.register_forward_hook(ForwardHook(self._leave_module), always_call=True))

    def _followed(self) -> Iterable[nn.Module]:
        """Return the modules whose calls are followed: those that Python sees."""
        return eager_modules(self._model)

    def _on_call(self, call: LinearCall) -> None:
        """Act on a linear layer that is about to run."""

    def _on_return(self, call: LinearCall) -> None:
        """Act on a linear layer that has run."""

    def _on_saved(self, saved: Saved) -> None:
        """Act on a storage that autograd saves."""

    def _enter_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs, weight = (*args, *kwargs.values()), weight_of_call(module)
        self._enter(module, linear_call(module, weight, inputs[0]) if inputs and weight is not None else None)

    def enter_projection(self, projection: Projection, x: Tensor) -> None:
        """Follow a projection inside an attention module as the call of a layer, which it is not."""
        layer = projection.layer
        if layer in self._layers:
            self._enter(layer, linear_call(layer, projection.weight, projection.with_samples(x), projection.blocks))

    def leave_projection(self, projection: Projection, y: Tensor | None) -> None:
        """Note that what ``enter_projection`` announced is over, also by an exception."""
        self._leave_module(projection.layer, None, None)

    def _enter(self, module: nn.Module, call: LinearCall | None) -> None:
        self.ran = True
        settle_open_hooks()  # what was saved before belongs to who ran then
        call = None if backward_runs() else call
        # Sharded parameters are gathered into new storages just before the forward.
        self._add_parameters(module.parameters(recurse=False))
        self._running.append((module, call))
        if call is not None:
            self._on_call(call)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        settle_open_hooks()
        if self._running and self._running[-1][0] is module:
            _, call = self._running.pop()
            if call is not None:
                self._on_return(call)

    def _add_parameters(self, tensors: Iterable[Tensor]) -> None:
        self._parameters.update(key for tensor in tensors for key, _ in storages(tensor))


def hooks_are_innermost() -> bool:
    """Return whether what is saved now reaches the recorders, not hooks of the model such as a checkpoint's."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[1] is _unpack
