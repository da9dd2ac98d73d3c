"""What the graph holds in place of a saved tensor while the package's saved-tensor hooks are open.

Autograd checks the version of what it saves itself, not of what hooks hold. ``Dense`` does so in its place: a tensor
that is written to before backward is an error, as without hooks. ``FewBits`` has its values from when it was saved, so
they are right whatever happens to the tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_actprune.ops import library
from lightning_actprune.ops.geometry import ALL_BLOCKS
from lightning_actprune.ops.layout import Layout
from lightning_actprune.ops.weight_grad import unpack
from lightning_actprune.provenance import sensitive_reader

Hooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""A pair of pack and unpack hook."""


class Dense:
    """A tensor as it is, or what hooks around ours made of it.

    Args:
        tensor: A saved tensor.
        outer: The hooks around ours, ``None`` without any.
        version: Of the tensor when it was saved, by default now.
    """

    __slots__ = ("__weakref__", "_held", "_unpack", "_version")

    def __init__(self, tensor: Tensor, outer: Hooks | None, version: int | None = None) -> None:
        self._held: Any
        self._unpack: Callable[[Any], Tensor] | None = None
        if outer is not None:
            self._held, self._unpack = outer[0](tensor), outer[1]
            return
        # A result holds its node, which holds this: without its own history there is no cycle.
        self._held = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version if version is None else version

    def tensor(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: If it was written to since it was saved.
        """
        if self._unpack is not None:
            restored: Tensor = self._unpack(self._held)
            return restored
        held: Tensor = self._held
        if held._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{held.type()} {list(held.shape)}] is at version {held._version}; expected version {self._version} "
                "instead. HINT: torch.autograd.set_detect_anomaly(True) shows the operation whose gradient failed."
            )
        return held


class FewBits:
    """A region of memory in few bits, or what hooks around ours made of these.

    Args:
        region: Tensor over the region, which is not kept.
        layout: How it is read.
        value_format: How values are stored.
        outer: The hooks around ours, ``None`` without any.
    """

    __slots__ = ("__weakref__", "_dtype", "_held", "_none", "_rows", "_value_format", "nbytes", "outer")

    def __init__(self, region: Tensor, layout: Layout, value_format: str, outer: Hooks | None) -> None:
        samples, rows, length = layout.shape
        if layout.copied:
            sizes, strides = zip(*layout.region, strict=True)
            x = region.detach().as_strided(sizes, strides).contiguous().view(layout.shape)
        else:
            x = region.detach().as_strided(layout.shape, layout.strides)
        values, self._none, _ = library.pack(x, layout.block, ALL_BLOCKS, value_format, "largest", eager=True)
        self._rows = samples * rows, length, layout.block
        self._dtype, self._value_format = x.dtype, value_format
        self.nbytes, self.outer = values.nbytes, outer
        self._held: Any = values if outer is None else outer[0](values)

    def goes_to(self, outer: Hooks | None) -> bool:
        """Return whether hooks that ``outer`` is now got the values."""
        return self.outer is outer or (self.outer is not None and outer is not None and self.outer[0] is outer[0])

    def unpack(self) -> Tensor:
        """Return the values in the order of their addresses."""
        rows, length, block = self._rows
        values = self._held if self.outer is None else self.outer[1](self._held)
        made = unpack if library.in_plain_eager_mode(values) else torch.ops.actprune.unpack
        dense: Tensor = made(values, self._none, self._none, rows, length, block, self._value_format, self._dtype)
        return dense


class FewBitView:
    """A saved tensor in few bits.

    Args:
        shape: Of the tensor.
        strides: Of the tensor when it is unpacked.
        fqn: Name of the module that ran when it was saved.
    """

    __slots__ = ("_shape", "_strides", "fqn", "settle", "stored")

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], fqn: str) -> None:
        self._shape, self._strides, self.fqn = shape, strides, fqn
        self.settle: Callable[[], None] | None = None
        """Stores its region, if that is put off (``saved_operation``)."""
        self.stored: FewBits | Dense | None = None
        """Its region of memory, which others may share; as it is if it was written to too soon."""

    def tensor(self) -> Tensor:
        """Return the tensor, unpacked anew.

        Raises:
            RuntimeError: If errors of its values would be enlarged without bound.
        """
        reader = sensitive_reader()
        if reader is not None:
            raise RuntimeError(
                f"{reader} compares what it saved with its result, or has a pole, so its gradient would be wrong: "
                f"module {self.fqn!r} saved that in few bits (`others`, FewBitSaving). HINT: leave this module out "
                "with `exclude`, or store no 'rest'."
            )
        if self.settle is not None:
            self.settle()
        assert self.stored is not None
        if isinstance(self.stored, Dense):
            return self.stored.tensor()
        return self.stored.unpack().as_strided(self._shape, self._strides)


@dataclass
class FewBitRow:
    """Tensors of one kind that a module saved in few bits.

    Args:
        fqn: Fully qualified name of the innermost module with hooks that ran: where it has children, for these too.
        shape: Shape of the tensors.
        dtype: Type of their values.
        count: How many were packed; who saved what was packed already is not counted.
        dense_bytes: Bytes of their values as they are.
        stored_bytes: Bytes stored in their place.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    count: int = 0
    dense_bytes: int = 0
    stored_bytes: int = 0


class HeldOfStorage(NamedTuple):
    """What is held of a storage, which is looked up by its address: the reference keeps that from being used again.

    Args:
        reference: A weak one to the storage.
        held: Weak references to what is held, by region of memory.
    """

    reference: StorageWeakRef
    held: dict[Any, weakref.ref[Any]]


def remember(storages: dict[int, HeldOfStorage], tensor: Tensor, region: Any, held: Dense | FewBits) -> None:
    """Let ``held`` be found by the storage of ``tensor`` and the region for as long as it lives."""
    storage = tensor.untyped_storage()
    known = storages.get(storage._cdata)
    if known is None:
        known = storages[storage._cdata] = HeldOfStorage(StorageWeakRef(storage), {})  # type: ignore[no-untyped-call]
    known.held[region] = weakref.ref(held, partial(_forget, storages, storage._cdata, region))


def _forget(storages: dict[int, HeldOfStorage], address: int, region: Any, reference: weakref.ref[Any]) -> None:
    """Remove the entry of what is gone, unless something else has taken its place."""
    known = storages.get(address)
    if known is not None and known.held.get(region) is reference:
        del known.held[region]
        if not known.held:
            del storages[address]
