"""Which memory a tensor's data is in, and whether a layer would keep that very memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


def storages(value: Any) -> list[tuple[StorageWeakRef, int]]:
    """Return the storages that hold ``value``'s data, with their bytes; none if it is no dense tensor."""
    if isinstance(value, Tensor) and is_wrapper(value):
        inner, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
        return [entry for name in inner for entry in storages(getattr(value, name))]
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return []
    storage = value.untyped_storage()
    return [(StorageWeakRef(storage), storage.nbytes())]  # type: ignore[no-untyped-call]


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor or its like, whose data is in other tensors."""
    return hasattr(tensor, "__tensor_flatten__")


def flattens_without_copy(x: Tensor) -> bool:
    """Return whether ``F.linear`` can keep a view of ``x``: only shape and strides are looked at."""
    if x.dim() <= 2 or x.is_contiguous():
        return True
    meta = torch.empty_strided(x.shape, x.stride(), device="meta")
    return meta.flatten(0, -2)._is_view()
