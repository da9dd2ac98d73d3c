r"""Track packed tensors and retained storages, so that a tensor that several layers read is packed once.

**Inputs.** Query, key and value projections, or gate and up, read one tensor. A dense model keeps it once, so packing
it once per layer could cost more than it saves. Layers find each other's packs by the tensor *object*, never by
address, because the allocator gives an address to other tensors later. Under autocast the object is the tensor before
the cast: each layer casts it for itself, to equal copies. For a view the object is its base, because each
tensor-parallel layer makes a view of its own of its input. Layers share a pack

- of the same object, unmodified since (its version counter is part of the key), or of the same view of it,
- with the same settings, under the same autocast,
- on the same CUDA stream, and in the same recording if a CUDA graph is being recorded. Otherwise a later layer could
  read memory that is not written yet, or a graph could replay reads of memory that is gone.

**Outputs of norms.** A norm or an affine layer stores x^ of its output ``y = x^ w + b`` quantized, which is all that
the next linear layer needs (``operators.weight_grad``). That layer finds ``y`` in the same way, under the same
conditions: ``y``, w and b are unmodified, same stream, same recording. Views that only transpose or flatten ``y`` have
it as their base. A layer packs its own copy if it drops blocks, if it wants at least as many bits as ``y`` has or
smaller blocks, or if it computes in fp16, where x^ or the product with it might overflow. It also packs its own inside
an activation checkpoint or other saved-tensor hooks, which decide what is saved.

Only weak references are held, to the tensor and to its packs. Packs belong to the autograd graph: they are gone once
backward has used them, or saved-tensor hooks have moved them elsewhere. The next layer then packs again.

**Storages** that stay alive for another reason need not be packed (``Retainers``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_actprune.codec.blocks import Blocks
from lightning_actprune.codec.packed import Packed
from lightning_actprune.codec.private import fix_weakref, raw_stream, top_saved_tensors_hooks

_Read = TypeVar("_Read")
_NO_STREAM = 0, False
_PACKAGE = __name__.partition(".")[0]

# === Packed inputs ====================================================================================================


class _Pack(NamedTuple):
    """A ``Packed`` with weak references to its tensors."""

    tensors: tuple[weakref.ref[Tensor], ...]
    layout: tuple[tuple[int, int, int], bool, int, int]


class _Entry:
    """Packs of one tensor.

    Args:
        tensor: The tensor. Once it is freed, another object may have its ``id``.
    """

    __slots__ = ("output", "packs", "tensor")

    def __init__(self, tensor: weakref.ref[Tensor]) -> None:
        self.tensor = tensor
        self.packs: dict[tuple[Any, ...], _Pack] = {}
        self.output: _Output | None = None
        """How a norm stores this tensor, its output."""


_entries: dict[int, _Entry] = {}
"""Entries by ``id`` of the tensor."""


def get_or_pack(
    x: Tensor,
    settings: tuple[Any, ...],
    pack: Callable[[], tuple[_Read, Packed]],
    read: Callable[[], _Read],
) -> tuple[_Read, Packed]:
    """Return the tensor that a layer reads in forward, and its packed copy, which another layer may have packed.

    Args:
        x: The input, before autocast.
        settings: Settings of the pack, including the type of autocast and the requested backend.
        pack: Returns both.
        read: Returns the tensor that the layer reads.
    """
    key = key_of(x, *settings)
    packed = None if key is None else find(x, key)
    if packed is not None:
        return read(), packed
    reading, packed = pack()
    if key is not None:
        remember(x, key, packed)
    return reading, packed


def key_of(x: Tensor, *settings: Any) -> tuple[Any, ...] | None:
    """Return the key under which a pack of ``x`` is shared, or ``None`` if ``x`` has no version counter."""
    if x.is_inference():
        return None
    base = x._base
    view = None if base is None or _region(x) == _region(base) else _region(x)
    return x._version, place_of(x), view, *settings


def find(x: Tensor, key: tuple[Any, ...]) -> Packed | None:
    """Return the pack of ``x`` under ``key``, or ``None`` if one of its tensors is gone."""
    entry = _entry_of(x)
    pack = None if entry is None else entry.packs.get(key)
    if pack is None:
        return None
    tensors = []
    for reference in pack.tensors:
        tensor = live(reference)
        if tensor is None:
            return None
        tensors.append(tensor)
    return Packed(tuple(tensors), *pack.layout)


def remember(x: Tensor, key: tuple[Any, ...], packed: Packed) -> None:
    """Let later layers find ``packed``, the pack of ``x``, for as long as both live."""
    entry = _entry_of(x)
    if entry is None:
        entry = _new_entry(x if x._base is None else x._base)
    elif entry.packs:
        # An input may live on, such as a batch that is used again: drop packs of earlier versions and graphs.
        for old in [k for k, pack in entry.packs.items() if k[0] != key[0] or pack.tensors[0]() is None]:
            del entry.packs[old]
    entry.packs[key] = _Pack(tuple([weakref.ref(tensor) for tensor in packed.tensors]), packed[1:])


def place_of(x: Tensor) -> tuple[int, bool]:
    """Return the number of the current stream of ``x``'s device, and True if the stream is being recorded."""
    if not x.is_cuda:
        return _NO_STREAM
    return raw_stream(x.device.index), is_current_stream_capturing()


def live(reference: weakref.ref[Tensor]) -> Tensor | None:
    """Return the tensor of a weak reference, or ``None`` if it is gone; let it own its Python object again."""
    if fix_weakref is None:
        return None
    tensor = reference()
    if tensor is not None:
        fix_weakref(tensor)
    return tensor


def _region(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.storage_offset()


def _entry_of(x: Tensor) -> _Entry | None:
    """Return the entry of ``x``, or of its base if ``x`` is a view."""
    base = x if x._base is None else x._base
    entry = _entries.get(id(base))
    return entry if entry is not None and entry.tensor() is base else None


def _new_entry(x: Tensor) -> _Entry:
    number = id(x)
    entry = _entries[number] = _Entry(weakref.ref(x, lambda _: _entries.pop(number, None)))
    return entry


# === Outputs of norms =================================================================================================

Order = Literal["rows", "columns", "samples_second"]
"""Where ``y`` has the rows of a layer's input: in its rows; in its columns, sample by sample; or in the rows of
``y.transpose(0, 1)``."""
KeptOutput = tuple[Tensor, Tensor | None, Tensor | None]
"""The bytes of x^, and w and b."""


class OutputLayout(NamedTuple):
    """How the output of a norm is stored, and how a linear layer reads it.

    Args:
        order: Where ``y`` has the rows of the layer's input.
        shape: Samples, rows of ``y`` per sample, and their length; one sample unless the layer reads columns.
        block: Values per block.
        bits: Bits of a stored value.
    """

    order: Order
    shape: tuple[int, int, int]
    block: int
    bits: int


class _Output(NamedTuple):
    values: weakref.ref[Tensor]
    parameters: tuple[Tensor | None, Tensor | None]
    versions: tuple[int, ...]
    place: tuple[int, bool]
    order: Order
    shape: torch.Size
    dtype: torch.dtype
    block: int
    bits: int


def remember_output(
    y: Tensor, values: Tensor, weight: Tensor | None, bias: Tensor | None, bits: int, block_size: int
) -> None:
    """Let linear layers find that ``y = x^ weight + bias`` with x^ stored in ``values``; for plain eager mode.

    Args:
        y: ``[..., L]``, contiguous, of at most 32 bits, not a view.
        values: The bytes of all blocks of x^, ``[R, L]``.
        weight: ``[L]`` or ``None``.
        bias: ``[L]`` or ``None``.
        bits: Bits of a stored value of x^.
        block_size: Values per block, at most ``L``.
    """
    if not y.numel() or y.dtype == torch.float64 or y.is_inference():
        return
    if (weight is not None and weight.is_inference()) or (bias is not None and bias.is_inference()):
        return  # inference tensors have no version counter
    versions = *_state(y), *_state(weight), *_state(bias)
    _new_entry(y).output = _Output(
        weakref.ref(values), (weight, bias), versions, place_of(y), "rows", y.shape, y.dtype, block_size, bits
    )


def remember_copy(copy: Tensor, x: Tensor) -> None:
    """Let linear layers that read ``copy``, a contiguous copy of the transposed ``x``, find how ``x`` is stored."""
    entry, y = _entry_of(x), x if x._base is None else x._base
    output = None if entry is None else entry.output
    if output is None or output.order != "rows" or output.dtype != x.dtype or len(output.shape) != 3:
        return
    if not _is_swapped(x, y, 0, 1) or not _is_current(output, x):
        return
    versions = *_state(copy), *output.versions[2:]
    _new_entry(copy).output = output._replace(order="samples_second", versions=versions)


def find_output(x: Tensor, parts: int, blocks: Blocks, dtype: torch.dtype) -> tuple[KeptOutput, OutputLayout] | None:
    """Return the stored form of ``x``, the output of the layer before, or ``None`` if it does not suffice.

    ``parts`` and ``blocks`` are the settings of the layer that reads ``x``, ``dtype`` the type in which it computes.
    """
    entry = None if parts or dtype == torch.float16 else _entry_of(x)
    output = None if entry is None else entry.output
    # The output needs more bits than the settings ask for: its errors may exceed those of a pack of the input.
    if output is None or not 0 < blocks.bits < output.bits or output.block > blocks.block_size:
        return None
    order = output.order if x._base is None else _order(x, x._base, output)
    values = live(output.values)
    if order is None or values is None or not _is_current(output, x) or _is_kept_by_others():
        return None
    shape = output.shape
    stored = (shape[0], shape[1], shape[2]) if order == "columns" else (1, shape[:-1].numel(), shape[-1])
    return (values, *output.parameters), OutputLayout(order, stored, output.block, output.bits)


def _is_current(output: _Output, x: Tensor) -> bool:
    """Return True if no tensor was modified since, and the stream is that of ``y``; views share versions with ``y``."""
    weight, bias = output.parameters
    return output.versions == (*_state(x), *_state(weight), *_state(bias)) and output.place == place_of(x)


def _is_kept_by_others() -> bool:
    """Return True if saved-tensor hooks of other code decide what is saved.

    The hooks of an activation checkpoint save nothing at first, and expect the same tensors when it runs again.
    """
    hooks = top_saved_tensors_hooks(False)
    return hooks is not None and getattr(hooks[1], "__module__", "").partition(".")[0] != _PACKAGE


def _state(x: Tensor | None) -> tuple[int, int]:
    """Return values that change if ``x`` is written to or gets other memory; writes to ``x.data`` go unnoticed."""
    return (0, 0) if x is None else (x._version, x.data_ptr())


def _order(x: Tensor, y: Tensor, output: _Output) -> Order | None:
    """Return the order of the rows of ``x``, a view of ``y``, in ``y``, or ``None`` for any other view."""
    if output.order != "rows" or x.dtype != output.dtype or x.numel() != y.numel():
        return None
    if x.shape[-1] == y.shape[-1] and x.is_contiguous() and y.is_contiguous():
        return "rows"
    return "columns" if y.dim() == 3 and _is_swapped(x, y, 1, 2) else None


def _is_swapped(x: Tensor, y: Tensor, first: int, second: int) -> bool:
    """Return True if ``x`` is the three-dimensional ``y`` with two dimensions swapped."""
    order = [0, 1, 2]
    order[first], order[second] = second, first
    return x.shape == tuple([y.shape[dim] for dim in order]) and x.stride() == tuple([y.stride(dim) for dim in order])


# === Retained storages ================================================================================================


class StorageKey(StorageWeakRef):
    """A weak reference to a storage that is its own deep copy: a copy by torch would free the reference twice."""

    __slots__ = ()

    def __deepcopy__(self, memo: Any) -> StorageKey:
        return self


class Retainers:
    """Track what retains which storage, so that it is not packed too, and so that savings are counted correctly.

    A storage is identified by its address; a weak reference keeps the address from being reused. Nothing is kept alive.
    """

    def __init__(self) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, dict[Any, weakref.ref[Any] | None]]] = {}

    def __contains__(self, address: int) -> bool:
        return address in self._storages

    def add(self, storage: StorageWeakRef, name: Any, retainer: Any = None) -> None:
        """Note that ``retainer`` retains ``storage`` while it lives; with ``None``, ``name`` does forever."""
        address: int = storage.cdata
        names = self._storages.setdefault(address, (storage, {}))[1]
        names[name] = None if retainer is None else weakref.ref(retainer, partial(self._forget, address, name))

    def find(self, address: int, name: Any) -> Any:
        """Return the retainer called ``name`` of the storage, or ``None``."""
        entry = self._storages.get(address)
        reference = None if entry is None else entry[1].get(name)
        return None if reference is None else reference()

    def first_name(self, address: int) -> Any:
        """Return the name of the storage's first retainer."""
        return next(iter(self._storages[address][1]))

    def copy(self) -> Retainers:
        """Return an independent copy for a trial; it does not forget retainers that die."""
        trial = Retainers()
        trial._storages = {address: (storage, dict(names)) for address, (storage, names) in self._storages.items()}
        return trial

    def _forget(self, address: int, name: Any, reference: weakref.ref[Any]) -> None:
        """Remove a dead retainer, unless another one has taken its name."""
        entry = self._storages.get(address)
        if entry is not None and entry[1].get(name) is reference:
            del entry[1][name]
            if not entry[1]:
                del self._storages[address]
