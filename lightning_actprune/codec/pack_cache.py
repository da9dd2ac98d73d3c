r"""What is packed already: tensors that several layers read are packed once.

**Inputs.** Query, key and value projections, or gate and up, read one tensor. A dense model keeps it once, so packing
it once per layer could cost more than it saves. The layers find each other's packs by the tensor *object*: nothing is
looked up by address, which the allocator gives to other tensors, and under autocast the object is the one before the
cast (each layer casts for itself, to equal copies). Of a view it is the tensor that this is a view of: each
tensor-parallel layer makes a view of its own of its input. Shared is what was packed

- from the same object, unmodified since (its version counter is part of the key), or from the same view of it,
- with the same settings, under the same autocast,
- on the same CUDA stream, and if a CUDA graph is being recorded, in that recording: otherwise a later consumer could
  read what is not written yet, or a graph replay what is no longer there.

**Outputs of norms.** A norm or an affine layer keeps x^ of its output ``y = x^ w + b`` quantized, and that is all that
a linear layer behind it needs (``operators.weight_grad``). It finds ``y`` in the same way and under the same
conditions: not modified since, neither are w and b, same stream, same recording. Views that only turn or flatten ``y``
know it as their base. A layer that asks for as many bits, or for smaller blocks, than ``y`` has packs its own, and so
does one that computes in fp16, where x^ or the product with it might be too large. Inside an activation checkpoint, or
where other saved-tensor hooks say what is kept, each layer packs its own.

Only weak references are held, to the tensor and to what was packed from it: the packed tensors belong to the autograd
graph, and are gone as soon as backward has used them, or as saved-tensor hooks have moved them elsewhere. The next
consumer then packs again.

**Storages** that are retained anyway need not be packed (``Retainers``).
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
    """What was packed from a tensor.

    Args:
        tensor: The tensor; if it is gone, its ``id`` may be another one's.
    """

    __slots__ = ("output", "packs", "tensor")

    def __init__(self, tensor: weakref.ref[Tensor]) -> None:
        self.tensor = tensor
        self.packs: dict[tuple[Any, ...], _Pack] = {}
        self.output: _Output | None = None
        """How it is kept as the output of a norm."""


_entries: dict[int, _Entry] = {}
"""By ``id`` of the tensor."""


def get_or_pack(
    x: Tensor,
    settings: tuple[Any, ...],
    pack: Callable[[], tuple[_Read, Packed]],
    read: Callable[[], _Read],
) -> tuple[_Read, Packed]:
    """Return what a layer reads of ``x`` in forward, and what is kept of it, packed if no other layer has packed it.

    Args:
        x: The input, before autocast.
        settings: What it is packed with, the type of autocast and the backend that is asked for included.
        pack: Returns both.
        read: Returns what the layer reads.
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
    """Return what must be equal for a pack of ``x`` to be shared, ``None`` if changes of ``x`` are not counted."""
    if x.is_inference():
        return None
    base = x._base
    view = None if base is None or _region(x) == _region(base) else _region(x)
    return x._version, place_of(x), view, *settings


def find(x: Tensor, key: tuple[Any, ...]) -> Packed | None:
    """Return what was packed from ``x`` under ``key`` if all of it is still there."""
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
    """Let later consumers of ``x`` find ``packed`` for as long as both live."""
    entry = _entry_of(x)
    if entry is None:
        entry = _new_entry(x if x._base is None else x._base)
    elif entry.packs:
        # An input that lives on, such as a batch used again: packs of earlier versions and graphs go.
        for old in [k for k, pack in entry.packs.items() if k[0] != key[0] or pack.tensors[0]() is None]:
            del entry.packs[old]
    entry.packs[key] = _Pack(tuple([weakref.ref(tensor) for tensor in packed.tensors]), packed[1:])


def place_of(x: Tensor) -> tuple[int, bool]:
    """Return the number of the stream on which work for ``x`` is queued now, and whether it is being recorded."""
    if not x.is_cuda:
        return _NO_STREAM
    return raw_stream(x.device.index), is_current_stream_capturing()


def live(reference: weakref.ref[Tensor]) -> Tensor | None:
    """Return the tensor of a weak reference, ``None`` if it is gone; autograd may have let go of its Python object."""
    if fix_weakref is None:
        return None
    tensor = reference()
    if tensor is not None:
        fix_weakref(tensor)
    return tensor


def _region(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.storage_offset()


def _entry_of(x: Tensor) -> _Entry | None:
    """Return the entry of what ``x`` is a view of, or of ``x``."""
    base = x if x._base is None else x._base
    entry = _entries.get(id(base))
    return entry if entry is not None and entry.tensor() is base else None


def _new_entry(x: Tensor) -> _Entry:
    number = id(x)
    entry = _entries[number] = _Entry(weakref.ref(x, lambda _: _entries.pop(number, None)))
    return entry


# === Outputs of norms =================================================================================================

Order = Literal["rows", "columns", "samples_second"]
"""How the rows of a layer's input lie in ``y``: as its rows; as its columns, sample by sample; or as the rows of
``y.transpose(0, 1)``."""
KeptOutput = tuple[Tensor, Tensor | None, Tensor | None]
"""The bytes of x^, w and b."""


class OutputLayout(NamedTuple):
    """How the output of a norm is kept, and read by a linear layer.

    Args:
        order: How the rows of the layer's input lie in ``y``.
        shape: Samples, rows of ``y`` per sample, and their length; one sample unless they are read as columns.
        block: Values per block.
        bits: To how many bits they are quantized.
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
    """Let linear layers find that ``y = x^ weight + bias``, of which ``values`` keep x^; of plain eager mode alone.

    Args:
        y: ``[..., L]``, without gaps, in no more than 32 bits, no view.
        values: The bytes of all blocks of x^, ``[R, L]``.
        weight: ``L`` values or ``None``.
        bias: ``L`` values or ``None``.
        bits: To how many bits x^ is quantized.
        block_size: Values per block, cut to ``L``.
    """
    if not y.numel() or y.dtype == torch.float64 or y.is_inference():
        return
    if (weight is not None and weight.is_inference()) or (bias is not None and bias.is_inference()):
        return  # changes of it are not counted
    versions = *_state(y), *_state(weight), *_state(bias)
    _new_entry(y).output = _Output(
        weakref.ref(values), (weight, bias), versions, place_of(y), "rows", y.shape, y.dtype, block_size, bits
    )


def remember_copy(copy: Tensor, x: Tensor) -> None:
    """Let linear layers find how ``x`` is kept, of which ``copy`` is a contiguous copy: of a turned batch."""
    entry = _entry_of(x)
    output = None if entry is None else entry.output
    if entry is None or output is None or output.order != "rows" or output.dtype != x.dtype or len(output.shape) != 3:
        return
    if not _is_swapped(x, entry, 0, 1) or not _is_current(output, x):
        return
    versions = *_state(copy), *output.versions[2:]
    _new_entry(copy).output = output._replace(order="samples_second", versions=versions)


def find_output(x: Tensor, parts: int, blocks: Blocks, dtype: torch.dtype) -> tuple[KeptOutput, OutputLayout] | None:
    """Return what the layer before keeps of ``x``, if that will do for a layer of these settings.

    ``dtype``: in which that computes.
    """
    entry = None if parts or dtype == torch.float16 else _entry_of(x)
    output = None if entry is None else entry.output
    # Only what is kept in more bits than are asked for: errors may exceed those of a pack of its own.
    if entry is None or output is None or not 0 < blocks.bits < output.bits or output.block > blocks.block_size:
        return None
    order = output.order if entry.tensor() is x else _order(x, entry, output)
    values = live(output.values)
    if order is None or values is None or not _is_current(output, x) or _is_kept_by_others():
        return None
    shape = output.shape
    stored = (shape[0], shape[1], shape[2]) if order == "columns" else (1, shape[:-1].numel(), shape[-1])
    return (values, *output.parameters), OutputLayout(order, stored, output.block, output.bits)


def _is_current(output: _Output, x: Tensor) -> bool:
    """Return whether nothing was modified since, and ``x`` is read where ``y`` was made; views share versions."""
    weight, bias = output.parameters
    return output.versions == (*_state(x), *_state(weight), *_state(bias)) and output.place == place_of(x)


def _is_kept_by_others() -> bool:
    """Return whether saved-tensor hooks other than this package's say what is kept.

    Those of an activation checkpoint keep nothing at first, and want to be given the same when it runs again.
    """
    hooks = top_saved_tensors_hooks(False)
    return hooks is not None and getattr(hooks[1], "__module__", "").partition(".")[0] != _PACKAGE


def _state(x: Tensor | None) -> tuple[int, int]:
    """Return what changes if ``x`` is written to, or gets other memory; what is written to ``x.data`` nobody sees."""
    return (0, 0) if x is None else (x._version, x.data_ptr())


def _order(x: Tensor, entry: _Entry, output: _Output) -> Order | None:
    """Return how the rows of ``x``, a view, lie in what it is a view of; ``None`` if it shows anything else."""
    y = entry.tensor()
    if y is None or output.order != "rows" or x.dtype != output.dtype or x.numel() != y.numel():
        return None
    if x.shape[-1] == y.shape[-1] and x.is_contiguous() and y.is_contiguous():
        return "rows"
    return "columns" if y.dim() == 3 and _is_swapped(x, entry, 1, 2) else None


def _is_swapped(x: Tensor, entry: _Entry, first: int, second: int) -> bool:
    """Return whether ``x`` is a view of an entry's tensor, of three dimensions, with two of them swapped."""
    y = entry.tensor()
    if y is None:
        return False
    order = [0, 1, 2]
    order[first], order[second] = second, first
    return x.shape == tuple([y.shape[dim] for dim in order]) and x.stride() == tuple([y.stride(dim) for dim in order])


# === Storages that are retained anyway ================================================================================


class StorageKey(StorageWeakRef):
    """A weak reference to a storage that is its own copy: each copy of torch's own frees what it refers to again."""

    __slots__ = ()

    def __deepcopy__(self, memo: Any) -> StorageKey:
        return self


class Retainers:
    """Who retains which storage: asked before something is packed in its place, and when it is judged what that saved.

    A storage is known by its address, which a weak reference to it keeps from being used again. Nothing is kept alive.
    """

    def __init__(self) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, dict[Any, weakref.ref[Any] | None]]] = {}

    def __contains__(self, address: int) -> bool:
        return address in self._storages

    def add(self, storage: StorageWeakRef, name: Any, retainer: Any = None) -> None:
        """Note that ``retainer`` retains ``storage`` for as long as it lives, or somebody by that name for good."""
        address: int = storage.cdata
        known = self._storages.setdefault(address, (storage, {}))[1]
        known[name] = None if retainer is None else weakref.ref(retainer, partial(self._forget, address, name))

    def find(self, address: int, name: Any) -> Any:
        """Return who retains the storage by that name, ``None`` if nobody."""
        known = self._storages.get(address)
        reference = None if known is None else known[1].get(name)
        return None if reference is None else reference()

    def all_of(self, address: int) -> list[Any]:
        """Return all who retain the storage and are still alive."""
        known = self._storages.get(address)
        references = () if known is None else tuple(known[1].values())
        found = (None if reference is None else reference() for reference in references)
        return [retainer for retainer in found if retainer is not None]

    def first_name(self, address: int) -> Any:
        """Return the name of who came first of those that retain the storage."""
        return next(iter(self._storages[address][1]))

    def copy(self) -> Retainers:
        """Return the same for trying what would be, for those that are here for good."""
        made = Retainers()
        made._storages = {address: (storage, dict(names)) for address, (storage, names) in self._storages.items()}
        return made

    def _forget(self, address: int, name: Any, reference: weakref.ref[Any]) -> None:
        """Remove the entry of what is gone, unless something else has taken its place."""
        known = self._storages.get(address)
        if known is not None and known[1].get(name) is reference:
            del known[1][name]
            if not known[1]:
                del self._storages[address]
