"""Autocast's 16-bit copies, by which two linear layers may keep one thing, and a pruned layer keeps less.

Under autocast a linear layer multiplies by a copy of its weight, and autograd saves that copy wherever the input needs
a gradient (``dx = g W``). A pruned layer saves the parameter itself, which is there anyway, and casts it once more.

Autocast makes the copy of a leaf in fp32 that needs a gradient once in a region, from the outermost ``with
torch.autocast`` to its end, and hands it to everybody who multiplies by that leaf. So the copy is known by leaf and
region. Of all other tensors, such as a part of an in-projection, it makes a new one each time, and of leaves too with
``cache_enabled=False``.

Which region it is, torch does not say. It shows in autocast's copy of a leaf of our own without any values, on the CPU:
within a region, that has one and the same node in the graph.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_actprune.ops.autocast import autocast_dtype


class WeightCopy(NamedTuple):
    """A copy of a weight that a dense layer would keep.

    Args:
        key: Equal for two calls that would keep the same copy.
        nbytes: Its bytes.
    """

    key: Any
    nbytes: int


def weight_copy(weight: Tensor, x: Tensor) -> WeightCopy | None:
    """Return the copy of ``weight`` that a dense product with ``x`` would make now, ``None`` if it would make none.

    A linear layer keeps it if ``x`` needs a gradient, a convolution always.
    """
    dtype = autocast_dtype(x)
    if dtype is None or weight.dtype in (dtype, torch.float64):
        return None
    return WeightCopy(shared_copy(weight) or object(), weight.numel() * dtype.itemsize)


def shared_copy(tensor: Tensor) -> Any:
    """Return the key of the copy that autocast would now make or take of ``tensor``, ``None`` if of one nobody shares.

    Autocast must be on, to a type that is not the tensor's.
    """
    leaf = tensor.is_leaf and tensor.requires_grad and not tensor._is_view()
    cached = leaf and tensor.dtype == torch.float32 and torch.is_autocast_cache_enabled()
    return _shared_key(tensor) if cached else None


def kept_copy(saved: Tensor) -> Any:
    """Return the key of the copy that ``saved`` is, or is a view of, ``None`` if it is no copy that others share."""
    copy = saved._base if saved._is_view() and saved._base is not None else saved
    if copy.grad_fn is None or copy.grad_fn.name() != "ToCopyBackward0" or copy.dtype.itemsize != 2:
        return None
    leaf = getattr(copy.grad_fn.next_functions[0][0], "variable", None)
    return None if leaf is None else shared_copy(leaf)


def _shared_key(leaf: Tensor) -> Any:
    # The storage tells a tensor from a later one with the same id, the id from others with the same storage.
    return StorageWeakRef(leaf.untyped_storage()), id(leaf), _region()  # type: ignore[no-untyped-call]


def _region() -> Any:
    """Return an object that is the same one throughout a region of autocast, whatever its device."""
    leaf = _empty_leaf()
    # Autocast is off inside the operations that save tensors, and nobody should see this one: no hooks, no modes.
    hidden = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch._C._DisableTorchDispatch(), hidden, torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        product = torch.mm(leaf, leaf).grad_fn
    assert product is not None
    return product.next_functions[0][0]


@functools.cache
def _empty_leaf() -> Tensor:
    return torch.empty(0, 0, device="cpu", dtype=torch.float32, requires_grad=True)
