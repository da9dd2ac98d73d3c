"""Stored tensors that wait for backward in the memory of the host (``offload=True``).

A copy to pinned memory starts on a stream of its own as soon as a tensor is stored, and the tensor is freed once the
copy is done. Backward asks for the tensors last first, so each read starts the copies back of those stored before it:
they come while the block that was read runs. Bytes are copied as they are, so gradients do not change.

Tensors on their way, in either direction, stay on the device. They are the last one, and those before it of
``ON_THE_WAY`` bytes together. If the connection is too slow, the device waits, and memory stays bounded. The last
tensors of a forward are still on the device when backward begins.

A compiler cannot see the copies. What its code stores stays on the device, and so does what stays exact.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lightning_actprune.codec.pack_cache import Retainers, StorageKey
from lightning_actprune.codec.private import saved_tensors_hooks_are_enabled, top_saved_tensors_hooks
from lightning_actprune.operators.regions import Hooks, Uncompressed, dropped_by_checkpoint

ON_THE_WAY = 2**26
"""Bytes that may be on their way at once, besides the last tensor. An H200 moves them in 1.3 ms."""
MIN_BYTES = 2**16
"""Smaller tensors stay on the device: to copy one takes the host the same time whatever its size."""


class HostCopy:
    """A tensor in the memory of the host, which ``unpack`` brings back.

    Args:
        tensor: A tensor on a CUDA device that nobody writes to.
    """

    __slots__ = ("__weakref__", "_device", "_done", "_host", "_line", "_number", "readers")

    def __init__(self, tensor: Tensor) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a CUDA graph cannot hold what `offload=True` moves to the host")
        self.readers = 1
        """How many operations have saved the tensor and have not read it."""
        self._line = _line_of(tensor.device)
        self._device: Tensor | None = tensor
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._done = self._line.copy(self._host, tensor)
        self._number = self._line.leaves(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self._host.nbytes

    def free(self) -> None:
        """Free the memory of the device once the copy to the host is done."""
        self._line.wait(self._done)
        self._device = None

    def come(self) -> int:
        """Start the copy back unless the tensor is on the device or on its way; return the number of its bytes."""
        if self._device is None:
            self._device = torch.empty_like(self._host, device=self._line.device)
            self._done = self._line.copy(self._device, self._host)
            self._line.comes(self._number, self._device, self._done)
        return self.nbytes

    def unpack(self) -> Tensor:
        """Return the tensor on its device, and let those come that were stored before it."""
        self.come()
        tensor, self.readers = self._device, self.readers - 1
        assert tensor is not None
        self._line.wait(self._done)
        self._line.arrives(self._number)
        if self.readers <= 0:
            self._device = None
        return tensor


class _Line:
    """The copies between a device and the host, in order, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.known = Retainers()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._count = 0
        self._copies: WeakValueDictionary[int, HostCopy] = WeakValueDictionary()
        self._leaving: list[int] = []
        self._coming: dict[int, tuple[Tensor, torch.cuda.Event]] = {}

    def copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        """Copy after all that was launched so far, and return the event of its end."""
        # What is still running may use the memory of either.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream.record_event(done)
        return done

    def wait(self, event: torch.cuda.Event) -> None:
        """Let the device wait for the end of a copy."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def leaves(self, copy: HostCopy) -> int:
        """Free the tensors that left before ``copy``, but for the last ones; return the number of ``copy``."""
        self._count += 1
        self._copies[self._count] = copy
        leaving = [(number, each) for number in self._leaving if (each := self._copies.get(number)) is not None]
        while sum(each.nbytes for _, each in leaving) > ON_THE_WAY:
            leaving.pop(0)[1].free()
        self._leaving = [*(number for number, _ in leaving), self._count]
        return self._count

    def comes(self, number: int, tensor: Tensor, done: torch.cuda.Event) -> None:
        """Hold a tensor that is being written to, also if its graph is dropped meanwhile."""
        here = [key for key, (_, event) in self._coming.items() if event.query()]  # type: ignore[no-untyped-call]
        for key in here:
            del self._coming[key]
        self._coming[number] = tensor, done

    def arrives(self, number: int) -> None:
        """Start the copies back of the tensors that were stored before the one of ``number``."""
        self._coming.pop(number, None)
        self._leaving = []  # backward has begun
        nbytes = 0
        while nbytes <= ON_THE_WAY and (before := self._copies.get(number := number - 1)) is not None:
            nbytes += before.come()


@functools.cache
def _line_of(device: torch.device) -> _Line:
    return _Line(device)


def can_move(tensor: Tensor) -> bool:
    """Return whether a tensor is on a device that has streams, and is worth the host's time."""
    return type(tensor) is Tensor and tensor.is_cuda and tensor.nbytes >= MIN_BYTES


@contextmanager
def offload_packed() -> Iterator[None]:
    """Move bytes that layers pack to the host, but not inside a checkpoint, which has to see what is saved."""
    outer = top_saved_tensors_hooks(False)
    if dropped_by_checkpoint(outer) or not saved_tensors_hooks_are_enabled():
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(*offload_hooks(outer)):
        yield


def offload_hooks(outer: Hooks | None) -> Hooks:
    """Return saved-tensor hooks that move the bytes of packed tensors to the host; ``outer`` get all other tensors."""

    def pack(tensor: Tensor) -> HostCopy | Uncompressed:
        is_packed = tensor.dtype == torch.uint8 and can_move(tensor)
        return _share(tensor) if is_packed else Uncompressed(tensor, outer)

    def unpack(saved: HostCopy | Uncompressed) -> Tensor:
        return saved.unpack()

    return pack, unpack


def _share(tensor: Tensor) -> HostCopy:
    """Return the copy of a tensor, which several layers may save."""
    known, storage = _line_of(tensor.device).known, tensor.untyped_storage()
    name = tensor.storage_offset(), tensor.shape, tensor.stride()
    copy: HostCopy | None = known.find(storage._cdata, name)
    if copy is None:
        copy = HostCopy(tensor)
        known.add(StorageKey(storage), name, copy)  # type: ignore[no-untyped-call]
    else:
        copy.readers += 1
    return copy
