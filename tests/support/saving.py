"""What autograd saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """Yield a list of what autograd saves inside this context."""
    saved: list[Tensor] = []

    def hold(tensor: Tensor) -> Tensor:
        # A result held by the operation that saves it is a cycle, and never freed.
        saved.append(tensor.detach() if tensor.requires_grad else tensor)
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda t: t):
        yield saved


def bytes_saved(
    model: nn.Module,
    *inputs: Tensor,
    context: AbstractContextManager[object] | None = None,
    also: Callable[[], list[Tensor]] = list,
) -> int:
    """Return the bytes of the distinct storages that a forward saves, and ``also``, beside parameters and inputs."""
    with saved_tensors() as saved, context or nullcontext():
        model(*inputs)
    return storage_bytes((*saved, *also()), but=(*inputs, *model.parameters(), *model.buffers()))


def storage_bytes(tensors: Iterable[Tensor], but: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages of ``tensors``, without those of others."""
    own = {t.untyped_storage().data_ptr() for t in but}
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(nbytes for pointer, nbytes in found.items() if pointer not in own)


def nodes_of(y: Tensor) -> list[Any]:
    """Return the nodes of the graph of ``y``, that of ``y`` first."""
    nodes = [y.grad_fn]
    for node in nodes:
        nodes += [after for after, _ in node.next_functions if after is not None and after not in nodes]
    return nodes
