"""One tensor, several consumers: what one layer has packed, the next one that reads the same tensor takes over.

Query, key and value projections, or gate and up, read one tensor. A dense model keeps it once, so packing it once per
layer could cost more than it saves. The layers here find each other through the tensor *object*: nothing is looked up
by address, which the allocator gives to other tensors, and under autocast the object is the one before the cast (each
layer casts for itself, to equal copies). Of a view it is the tensor that this is a view of: each tensor-parallel layer
makes a view of its own of what it is given. Shared is what was packed

- from the same object, unmodified since (its version counter is part of the key), or from the same view of it,
- with the same settings, under the same autocast,
- on the same CUDA stream, and if a CUDA graph is being recorded, in that recording: otherwise a later consumer could
  read what is not written yet, or a graph replay what is no longer there.

Only weak references are held, to the tensor and to what was packed from it: the packed tensors belong to the autograd
graph, and are gone as soon as backward has used them, or as saved-tensor hooks have moved them elsewhere. The next
consumer then packs again.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import Tensor
from torch.cuda import is_current_stream_capturing

from lightning_actprune.codec.private import fix_weakref, raw_stream

_NO_STREAM = 0, False


class Shared(NamedTuple):
    """What the consumers of one tensor share.

    Args:
        packed: Values, bitmap and offsets.
        shape: ``[batch, rows, length]`` as stored.
        transposed: Whether the rows are the features.
        block: Values per block, cut to a row.
    """

    packed: tuple[Tensor, Tensor, Tensor]
    shape: tuple[int, int, int]
    transposed: bool
    block: int


class _Entry(NamedTuple):
    packed: tuple[weakref.ref[Tensor], weakref.ref[Tensor], weakref.ref[Tensor]]
    shape: tuple[int, int, int]
    transposed: bool
    block: int


_inputs: dict[int, tuple[weakref.ref[Tensor], dict[tuple[Any, ...], _Entry]]] = {}
"""By ``id``: a weak reference, which says whether the id still means that tensor, and what was packed from it."""


def key_of(x: Tensor, *settings: Any) -> tuple[Any, ...] | None:
    """Return what must be equal for a pack of ``x`` to be shared, ``None`` if changes of ``x`` are not counted.

    ``settings``: what it is packed with, the type of autocast and the backend that is asked for included.
    """
    if x.is_inference():
        return None
    base = x._base
    view = None if base is None or _place_in_memory(x) == _place_in_memory(base) else _place_in_memory(x)
    return x._version, place_of(x), view, *settings


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


def find(x: Tensor, key: tuple[Any, ...]) -> Shared | None:
    """Return what was packed from ``x`` under ``key`` if all of it is still there."""
    base = _base(x)
    known = _inputs.get(id(base))
    entry = known[1].get(key) if known is not None and known[0]() is base else None
    if entry is None:
        return None
    values, bitmap, offsets = [live(reference) for reference in entry.packed]
    if values is None or bitmap is None or offsets is None:
        return None
    return Shared((values, bitmap, offsets), *entry[1:])


def remember(x: Tensor, key: tuple[Any, ...], shared: Shared) -> None:
    """Let later consumers of ``x`` find ``shared`` for as long as both live."""
    values, bitmap, offsets = shared.packed
    references = weakref.ref(values), weakref.ref(bitmap), weakref.ref(offsets)
    entry = _Entry(references, shared.shape, shared.transposed, shared.block)
    base = _base(x)
    number = id(base)
    known = _inputs.get(number)
    if known is not None and known[0]() is base:
        # An input that lives on, such as a batch used again: entries of earlier versions and graphs go.
        for old in [k for k, e in known[1].items() if k[0] != key[0] or e.packed[0]() is None]:
            del known[1][old]
        known[1][key] = entry
        return
    _inputs[number] = weakref.ref(base, lambda _: _inputs.pop(number, None)), {key: entry}


def _place_in_memory(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.storage_offset()


def _base(x: Tensor) -> Tensor:
    """Return what ``x`` is a view of, or ``x``."""
    base: Tensor | None = x._base
    return x if base is None else base
