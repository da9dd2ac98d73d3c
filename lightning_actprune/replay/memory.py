"""The memory of a GPU around captures: a stream of their own, and what is free."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_actprune.codec.private import (
    clear_workspaces,
)

UNWRITTEN = 255
"""What is in each byte of memory that nothing was written to; as a floating-point number it is none."""
ALIGNED = 128
"""Values of which the places of gradients are multiples, so that kernels may read several at once."""
PIECE = 2**21
"""Bytes of which torch takes multiples from a GPU."""


def move_gradients(model: nn.Module) -> None:
    """Let gradients lie side by side, and give the memory between them back.

    It belonged to activations. An optimizer that steps for the first time would allocate its state there, for good, and
    graphs could not use the rest.
    """
    torch.cuda.empty_cache()
    owned = defaultdict[Any, list[Tensor]](list)
    for gradient in (p.grad for p in model.parameters() if p.grad is not None and p.grad.layout == torch.strided):
        if gradient.untyped_storage().nbytes() == gradient.nbytes:  # and it is no view
            owned[gradient.device, gradient.dtype].append(gradient)
    for (device, dtype), gradients in owned.items():
        sizes = [math.ceil(gradient.numel() / ALIGNED) * ALIGNED for gradient in gradients]
        parts = torch.split(torch.empty(sum(sizes), device=device, dtype=dtype), sizes)
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.data = part.as_strided(gradient.shape, gradient.stride()).copy_(gradient)
    torch.cuda.empty_cache()


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


def reserved(device: torch.device) -> int:
    """Return how many bytes torch has taken from a GPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


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


def written(memory: Tensor) -> int:
    """Return up to where something has been written since ``memory`` was filled with ``UNWRITTEN``, in whole pieces."""
    count = math.ceil(len(memory) / PIECE)
    while count and not (memory[(count - 1) * PIECE : count * PIECE] != UNWRITTEN).any():
        count -= 1
    return min(count * PIECE, len(memory))
