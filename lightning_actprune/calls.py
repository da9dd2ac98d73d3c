"""One call of a linear layer, or another pruned one: what it keeps for backward, and what the dense layer would."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_actprune.copies import WeightCopy, shared_copy, weight_copy
from lightning_actprune.nn.affine import PrunedAffine
from lightning_actprune.nn.kinds import Layer, as_cut, is_convolution
from lightning_actprune.nn.settings import PrunedLayer
from lightning_actprune.ops.autocast import compute_dtype
from lightning_actprune.ops.geometry import input_geometry
from lightning_actprune.ops.setting import BlockSetting


@dataclass(eq=False)
class LinearCall:
    """One forward of a linear layer that keeps its input, whole or pruned.

    Args:
        layer: The layer.
        given: The input.
        shape: A tensor without memory that has the shape and strides of the input, as the layer cuts it.
        itemsize: Bytes of a value as the layer would keep it.
        dense_key: Storage of the input if the dense layer would keep that very storage, ``None`` if it would keep a
            copy of its own, as it does under autocast.
        dense_bytes: Bytes of what the dense layer would keep.
        dense_copy: Which of autocast's copies the dense layer would keep as its input, if one that others share.
        weight_copy: Autocast's copy of the weight that the dense layer would keep too; only known of a pruned layer.
        weight_keys: Storages of the weight itself, if that is what the dense layer would keep.
        blocks: How a pruned layer cuts its input into blocks and stores it, ``None`` of any other.
        sparsity: Fraction of blocks dropped in this call, known once it has saved something.
        packs: Whether what this call keeps is packed, known by then too.
        saved: Whether autograd saved anything: not so inside an activation checkpoint.
        derived: Whether it keeps nothing of its own, but what the layer before keeps in few bits (``ops.derived``).
    """

    layer: Layer
    given: weakref.ref[Tensor]
    shape: Tensor
    itemsize: int
    dense_key: StorageWeakRef | None
    dense_bytes: int
    dense_copy: Any = None
    weight_copy: WeightCopy | None = None
    weight_keys: frozenset[StorageWeakRef] = frozenset()
    blocks: BlockSetting | None = None
    sparsity: float = 0.0
    packs: bool = False
    saved: bool = False
    derived: bool = False

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
        """Return the bytes of the packed input by formula; the layer must be a pruned one."""
        assert self.blocks is not None
        geometry = input_geometry(self.shape, self.blocks.block_size, sparsity, self.blocks.scope)
        return geometry.stored_bytes(self.itemsize, self.blocks.value_format)


def linear_call(layer: Layer, weight: Tensor, x: Any, blocks: BlockSetting | None = None) -> LinearCall | None:
    """Return the record of a call that keeps its input ``x``, ``None`` if it keeps nothing.

    Args:
        layer: The layer.
        weight: What ``x`` is multiplied with: the layer's weight, or some rows of that of an in-projection.
        x: The first argument, whatever it is.
        blocks: How a pruned layer cuts ``x`` into blocks if that does not lie as the layer's setting means it.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return None
    if not isinstance(x, Tensor) or _is_wrapper(x) or x.layout != torch.strided or not x.is_floating_point():
        return None
    convolution, affine = is_convolution(layer), isinstance(layer, PrunedAffine)
    dtype = layer.dense_dtype(x) if isinstance(layer, PrunedAffine) else compute_dtype(x)
    dense_key, dense_bytes = None, x.numel() * dtype.itemsize
    flat = convolution or affine or _flattens_without_copy(x)
    if dtype == x.dtype and flat:
        [(dense_key, dense_bytes)] = storages(x)
    shape = as_cut(layer, torch.empty_strided(x.shape, x.stride(), device="meta"))
    itemsize = x.itemsize if affine else dtype.itemsize  # no autocast casts what an affine layer packs
    call = LinearCall(layer, weakref.ref(x), shape, itemsize, dense_key, dense_bytes)
    if dtype != x.dtype and flat and not affine:
        call.dense_copy = shared_copy(x)
    if isinstance(layer, PrunedLayer):
        call.blocks = layer._pruning.blocks if blocks is None else blocks
        copied = not affine and (x.requires_grad or convolution)
        call.weight_copy = weight_copy(weight, x) if copied else None
        if call.weight_copy is None:
            call.weight_keys = frozenset(key for key, _ in storages(weight))
    return call


def sparsity_of(layer: Layer) -> float:
    """Return the fraction of blocks that ``layer`` drops, 0 if it is not pruned."""
    return layer.sparsity if isinstance(layer, PrunedLayer) else 0.0


def packs(layer: Layer) -> bool:
    """Return whether ``layer`` keeps its input in another form than a dense layer."""
    return isinstance(layer, PrunedLayer) and layer.packs


def _flattens_without_copy(x: Tensor) -> bool:
    """Return whether ``F.linear`` can keep a view of ``x``: only shape and strides are looked at."""
    if x.dim() <= 2 or x.is_contiguous():
        return True
    meta = torch.empty_strided(x.shape, x.stride(), device="meta")
    return meta.flatten(0, -2)._is_view()


def storages(value: Any) -> list[tuple[StorageWeakRef, int]]:
    """Return the storages that hold ``value``'s data, with their bytes; none if it is no dense tensor."""
    if isinstance(value, Tensor) and _is_wrapper(value):
        inner, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
        return [entry for name in inner for entry in storages(getattr(value, name))]
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return []
    storage = value.untyped_storage()
    return [(StorageWeakRef(storage), storage.nbytes())]  # type: ignore[no-untyped-call]


def _is_wrapper(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor or its like, whose data is in other tensors."""
    return hasattr(tensor, "__tensor_flatten__")
