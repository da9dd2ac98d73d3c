"""Packed tensors that wait for backward in the memory of the host (``offload=True``).

A copy to pinned memory starts on a stream of its own as soon as a tensor is stored, and the tensor is freed once the
copy is done. Backward asks for the tensors last first, so each read starts the copies back of those stored before it:
they come while the block that was read runs. Bytes are copied as they are, so gradients do not change.

Tensors on their way, in either direction, stay on the device. They are the last one, and those before it of
``ON_THE_WAY`` bytes together. If the connection is too slow, the device waits, and memory stays bounded. The last
tensors of a forward are still on the device when backward begins.

Compiled code calls ``actprune::to_host`` and ``actprune::from_host``. Between them it holds a ticket, a number, in
place of the tensor.
"""

from __future__ import annotations

import functools
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lightning_actprune.codec.pack_cache import Retainers, StorageKey
from lightning_actprune.codec.packed import LIBRARY, TAGS

ON_THE_WAY = 2**26
"""Bytes that may be on their way at once, besides the last tensor. An H200 moves them in 1.3 ms."""
MIN_BYTES = 2**16
"""Smaller tensors stay on the device: to copy one takes the host the same time whatever its size."""


class HostCopy:
    """A tensor in the memory of the host, which ``unpack`` brings back.

    Args:
        tensor: A tensor on a CUDA device that nobody writes to.
    """

    __slots__ = ("__weakref__", "_device", "_done", "_host", "_line", "number", "readers")

    def __init__(self, tensor: Tensor) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a CUDA graph cannot hold what `offload=True` moves to the host")
        self.readers = 1
        """How many operations have saved the tensor and have not read it."""
        self._line = _line_of(tensor.device)
        self._device: Tensor | None = tensor
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._done = self._line.copy(self._host, tensor)
        self.number = self._line.leaves(self)

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
            self._line.comes(self.number, self._device, self._done)
        return self.nbytes

    def unpack(self) -> Tensor:
        """Return the tensor on its device, and let those come that were stored before it."""
        self.come()
        tensor, self.readers = self._device, self.readers - 1
        assert tensor is not None
        self._line.wait(self._done)
        self._line.arrives(self.number)
        if self.readers <= 0:
            self._device = None
        return tensor


class _Line:
    """The copies between a device and the host, in order, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._known = Retainers()
        self._tickets: dict[int, tuple[StorageKey, HostCopy]] = {}
        self._stream = torch.cuda.Stream(device)
        self._count = 0
        self._copies: WeakValueDictionary[int, HostCopy] = WeakValueDictionary()
        self._leaving: list[int] = []
        self._coming: dict[int, tuple[Tensor, torch.cuda.Event]] = {}

    def share(self, tensor: Tensor) -> HostCopy:
        """Return the copy of a tensor, which several layers may save."""
        storage, name = tensor.untyped_storage(), (tensor.storage_offset(), tensor.shape, tensor.stride())
        copy: HostCopy | None = self._known.find(storage._cdata, name)
        if copy is None:
            copy = HostCopy(tensor)
            self._known.add(StorageKey(storage), name, copy)
        else:
            copy.readers += 1
        return copy

    def copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        """Copy after all that was launched so far, and return the event of its end."""
        # What is still running may use the memory of either.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
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
        here = [key for key, (_, event) in self._coming.items() if event.query()]
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

    def give_ticket(self, copy: HostCopy) -> Tensor:
        """Return a ticket, which keeps ``copy`` while its memory lives."""
        if len(self._leaving) == 1:  # a new forward
            self._tickets = {at: each for at, each in self._tickets.items() if not each[0].expired()}
        ticket = torch.tensor([copy.number])
        self._tickets[copy.number] = StorageKey(ticket.untyped_storage()), copy
        return ticket

    def of_ticket(self, ticket: Tensor) -> HostCopy:
        """Return the copy that a ticket is for."""
        return self._tickets[int(ticket)][1]


@functools.cache
def _line_of(device: torch.device) -> _Line:
    return _Line(device)


def can_move(tensor: Tensor) -> bool:
    """Return whether a tensor is on a device that has streams, and is worth the host's time."""
    return type(tensor) is Tensor and tensor.is_cuda and tensor.nbytes >= MIN_BYTES


def share_copy(tensor: Tensor) -> HostCopy:
    """Return the copy of a packed tensor in the memory of the host, which several layers may save."""
    return _line_of(tensor.device).share(tensor)


# === In compiled code =================================================================================================

LIBRARY.define("to_host(Tensor values) -> Tensor", tags=TAGS)
LIBRARY.define("from_host(Tensor ticket, SymInt rows, SymInt length, Device device) -> Tensor", tags=TAGS)


def to_host(values: Tensor) -> Tensor:
    """Copy bytes to the host, and return a ticket for them."""
    # A copy on the device first, since compiled code uses the memory of `values` again without asking the allocator.
    copy = HostCopy(values.clone())
    return _line_of(values.device).give_ticket(copy)


def from_host(ticket: Tensor, rows: int, length: int, device: torch.device) -> Tensor:
    """Return the bytes ``[rows, length]`` that a ticket is for, on their device."""
    return _line_of(device).of_ticket(ticket).unpack()


LIBRARY.impl("to_host", to_host, "CompositeExplicitAutograd")
LIBRARY.impl("from_host", from_host, "CompositeExplicitAutograd")


@torch.library.register_fake("actprune::to_host", lib=LIBRARY)
def _to_host_fake(values: Tensor) -> Tensor:
    return values.new_empty(1, dtype=torch.int64, device="cpu")


@torch.library.register_fake("actprune::from_host", lib=LIBRARY)
def _from_host_fake(ticket: Tensor, rows: int, length: int, device: torch.device) -> Tensor:
    return ticket.new_empty(rows, length, dtype=torch.uint8, device=device)
