"""Saved-tensor hooks that move packed tensors to the memory of the host (``codec.host_copy``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_actprune.codec.host_copy import HostCopy, can_move, share_copy
from lightning_actprune.codec.private import saved_tensors_hooks_are_enabled, top_saved_tensors_hooks
from lightning_actprune.operators.regions import Hooks, Uncompressed, dropped_by_checkpoint


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
        return share_copy(tensor) if is_packed else Uncompressed(tensor, outer)

    def unpack(saved: HostCopy | Uncompressed) -> Tensor:
        return saved.unpack()

    return pack, unpack
