"""What autograd saves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


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
