"""The memory of a GPU around captures: a stream of their own, and what is free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn

from lightning_actprune.codec.private import (
    clear_workspaces,
)


def move_gradients(model: nn.Module) -> None:
    """Let gradients lie side by side, and give the memory between them back.

    It belonged to activations. An optimizer that steps for the first time would allocate its state there, for good, and
    graphs could not use the rest.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None and p.grad.is_cuda and not p.grad.is_sparse]
    copies = [gradient.to("cpu", copy=True) for gradient in gradients]
    for gradient in gradients:
        gradient.data = gradient.new_empty(0)
    torch.cuda.empty_cache()
    for gradient, copy in zip(gradients, copies, strict=True):
        gradient.data = copy.to(gradient.device)


@cache
def stream_beside(device: int) -> torch.cuda.Stream:
    """Return the stream of all captures on a device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Run on the stream of captures: libraries take their memory for a stream when they meet it first."""
    if device.type != "cuda":
        yield
        return
    stream = stream_beside(torch.cuda.current_device() if device.index is None else device.index)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def memory(device: torch.device, most: bool = False) -> tuple[int, int]:
    """Return how many bytes are allocated, now or at ``most`` so far, and how many are reserved now."""
    if device.type != "cuda":
        return 0, 0
    allocated = torch.cuda.max_memory_allocated if most else torch.cuda.memory_allocated
    return allocated(device), torch.cuda.memory_reserved(device)


def free_cache() -> None:
    """Give back what no tensor needs, and what libraries of products hold for each stream."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        clear_workspaces()
        torch.cuda.empty_cache()


class _Memory:
    """The memory of a tensor, which this does not keep."""

    def __init__(self, x: Tensor) -> None:
        place = x.data_ptr(), False
        self.__cuda_array_interface__ = {"shape": (x.nbytes,), "typestr": "|u1", "data": place, "version": 3}


def at_its_place(x: Tensor) -> Tensor:
    """Return a tensor in the memory of ``x``, which what is captured may use again where ``x`` is no longer read."""
    if not x.is_cuda or not x.numel():
        return x.detach()
    memory: Tensor = torch.as_tensor(_Memory(x), device=x.device)
    return memory.view(x.dtype).as_strided(x.shape, x.stride())
