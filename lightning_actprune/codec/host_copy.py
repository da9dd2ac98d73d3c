"""Packed tensors that wait for backward in the memory of the host (``offload=True``).

A copy to pinned memory starts on a stream of its own as soon as a tensor is stored, and the tensor is freed once the
copy is done. Backward asks for the tensors last first, so each read starts the copies back of those stored before it:
they come while the block that was read runs. Bytes are copied as they are, so gradients do not change.

Tensors on their way, in either direction, stay on the device. They are the last one, and those before it of
``ON_THE_WAY`` bytes together. If the connection is too slow, the device waits, and memory stays bounded. The last
tensors of a forward are still on the device when backward begins.

Compiled code calls ``actprune::to_host`` and ``actprune::from_host``. Between them it holds a ticket, a number, in
place of the tensor. The memory of the ticket keeps the copy.

A model may use several streams. The allocator gives memory that is freed to the stream on which it was allocated, and
knows of no other one: so that stream waits for a copy, and a tensor that another one reads is recorded there.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import deque
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lightning_actprune.codec.pack_cache import Retainers, StorageKey
from lightning_actprune.codec.packed import LIBRARY, TAGS

ON_THE_WAY = 2**26
"""Bytes that may be on their way at once, besides the last tensor."""
MIN_BYTES = 2**16
"""Smaller tensors stay on the device: to copy one takes the host the same time whatever its size."""


class HostCopy:
    """A tensor in the memory of the host, which ``unpack`` brings back.

    Args:
        tensor: A tensor on a CUDA device that nobody writes to.
    """

    __slots__ = ("__weakref__", "_device", "_done", "_host", "_line", "_stream", "number", "readers")

    def __init__(self, tensor: Tensor) -> None:
        self._device: Tensor | None = None
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a CUDA graph cannot hold what `offload=True` moves to the host")
        self.readers = 1
        """How many operations have saved the tensor and have not read it."""
        self._line = _line_of(tensor.device)
        self._device, self._stream = tensor, self._line.current_stream()
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._done = self._line.copy(self._host, tensor)
        self.number = self._line.leaves(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self._host.nbytes

    def free(self) -> None:
        """Free the memory of the device once the copy to the host is done."""
        self._stream.wait_event(self._done)
        self._device = None

    def __del__(self) -> None:
        # The graph was dropped: a copy from or to this memory may still run.
        if self._device is not None:
            self._line.holds(self._device)

    def come(self) -> int:
        """Start the copy back unless the tensor is on the device or on its way; return the number of its bytes."""
        if self._device is None:
            tensor, self._stream = torch.empty_like(self._host, device=self._line.device), self._line.current_stream()
            self._done = self._line.copy(tensor, self._host)
            self._device = tensor
        return self.nbytes

    def unpack(self) -> Tensor:
        """Return the tensor on its device, and let those come that were stored before it."""
        self.come()
        tensor, stream, self.readers = self._device, self._line.current_stream(), self.readers - 1
        assert tensor is not None
        stream.wait_event(self._done)
        if stream != self._stream:
            tensor.record_stream(stream)
        self._line.arrives(self.number)
        if self.readers <= 0:
            self._device = None
        return tensor


class _OnTheWay(deque[tuple[int, int]]):
    """Numbers of tensors on their way, with their bytes, in order."""

    nbytes = 0

    def add(self, number: int, nbytes: int) -> None:
        """Add a tensor."""
        self.append((number, nbytes))
        self.nbytes += nbytes

    def pop_first(self) -> int:
        """Remove the first tensor, and return its number."""
        number, nbytes = self.popleft()
        self.nbytes -= nbytes
        return number

    def clear(self) -> None:
        """Remove all."""
        super().clear()
        self.nbytes = 0


class _Line:
    """The copies between a device and the host, in order, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._known = Retainers()
        self._stream = torch.cuda.Stream(device)
        self._count = 0
        self._copies: WeakValueDictionary[int, HostCopy] = WeakValueDictionary()
        self._leaving, self._coming = _OnTheWay(), _OnTheWay()

    def share(self, tensor: Tensor) -> HostCopy:
        """Return the copy of a tensor, which several layers may save."""
        storage, region = tensor.untyped_storage(), (tensor.storage_offset(), tensor.shape, tensor.stride())
        name = *region, tensor._version  # a user's bytes may be written to, and saved again
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
        self._stream.wait_stream(self.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        self._stream.record_event(done)
        return done

    def current_stream(self) -> torch.cuda.Stream:
        """Return the current stream of the device."""
        return torch.cuda.current_stream(self.device)

    def holds(self, tensor: Tensor) -> None:
        """Let nobody have the memory of a tensor before the copies end that were started."""
        tensor.record_stream(self._stream)

    def leaves(self, copy: HostCopy) -> int:
        """Free the tensors that left before ``copy``, but for the last ones; return the number of ``copy``."""
        while self._leaving.nbytes > ON_THE_WAY:
            before = self._copies.get(self._leaving.pop_first())
            if before is not None:
                before.free()
        self._count += 1
        self._copies[self._count] = copy
        self._leaving.add(self._count, copy.nbytes)
        return self._count

    def arrives(self, number: int) -> None:
        """Start the copies back of the tensors that were stored before the one of ``number``."""
        self._leaving.clear()  # backward has begun
        coming = self._coming
        while coming and coming[0][0] >= number:
            coming.pop_first()
        if coming and coming[0][0] != number - 1:  # another graph
            coming.clear()
        first = coming[-1][0] if coming else number
        with contextlib.suppress(torch.OutOfMemoryError):  # what has no room comes when it is read
            while coming.nbytes <= ON_THE_WAY and (before := self._copies.get(first := first - 1)) is not None:
                coming.add(first, before.come())

    def of_ticket(self, ticket: Tensor) -> HostCopy:
        """Return the copy that a ticket is for."""
        copy = self._copies.get(int(ticket))
        if copy is None:
            raise RuntimeError(
                "saved-tensor hooks around compiled code have copied what it keeps for `offload=True`. HINT: leave out "
                "the hooks, such as `save_on_cpu(pin_memory=True)`, or `offload`."
            )
        return copy


@functools.cache
def _line_of(device: torch.device) -> _Line:
    return _Line(device)


def can_move(tensor: Tensor) -> bool:
    """Return whether a tensor is on a CUDA device, and large enough to be moved."""
    return type(tensor) is Tensor and tensor.is_cuda and tensor.nbytes >= MIN_BYTES


def share_copy(tensor: Tensor) -> HostCopy:
    """Return the copy of a packed tensor in the memory of the host, which several layers may save."""
    return _line_of(tensor.device).share(tensor)


# === In compiled code =================================================================================================

_TAGS = (*TAGS, torch.Tag.cudagraph_unsafe)
"""A CUDA graph would copy from and to the memory that was there when it was recorded."""
LIBRARY.define("to_host(Tensor values) -> Tensor", tags=_TAGS)
LIBRARY.define("from_host(Tensor ticket, SymInt rows, SymInt length, Device device) -> Tensor", tags=_TAGS)


class _Ticket(bytearray):
    """The memory of a ticket, which keeps a copy."""

    content: HostCopy


def to_host(values: Tensor) -> Tensor:
    """Copy bytes to the host, and return a ticket for them."""
    # A copy on the device first, since compiled code uses the memory of `values` again without asking the allocator.
    copy = HostCopy(values.clone())
    ticket = _Ticket(copy.number.to_bytes(8, sys.byteorder))
    ticket.content = copy
    return torch.frombuffer(ticket, dtype=torch.int64)


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
