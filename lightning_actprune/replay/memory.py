"""GPU memory of graphs: the stream of captures, the size of their pool, and gradients out of the way."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_actprune.codec.private import clear_workspaces

UNWRITTEN = 255
"""A byte that few kernels write; as a floating-point number it is NaN."""
ALIGNMENT = 128
"""Gradients start at multiples of so many values, so that kernels can load several values at once."""
SEGMENT = 2**21
"""Bytes: torch takes multiples of this from the GPU."""


def move_gradients(model: nn.Module) -> None:
    """Move all gradients into one piece of memory, and give the memory between them back.

    After the first backward, gradients lie between activations. An optimizer would allocate its state there, too, for
    good, and graphs could not use the rest of these segments.
    """
    torch.cuda.empty_cache()
    owners = defaultdict[Any, list[Tensor]](list)
    for gradient in (p.grad for p in model.parameters() if p.grad is not None and p.grad.layout == torch.strided):
        if gradient.untyped_storage().nbytes() == gradient.nbytes:  # not a view
            owners[gradient.device, gradient.dtype].append(gradient)
    for (device, dtype), gradients in owners.items():
        sizes = [math.ceil(gradient.numel() / ALIGNMENT) * ALIGNMENT for gradient in gradients]
        parts = torch.split(torch.empty(sum(sizes), device=device, dtype=dtype), sizes)
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.data = part.as_strided(gradient.shape, gradient.stride()).copy_(gradient)
    torch.cuda.empty_cache()


@cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream of all captures on a device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def on_capture_stream(device: torch.device) -> Iterator[None]:
    """Run eagerly on the stream of captures: libraries allocate workspaces when they first see a stream."""
    if device.type != "cuda":
        yield
        return
    stream = capture_stream(torch.cuda.current_device() if device.index is None else device.index)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def reserved_bytes(device: torch.device) -> int:
    """Return the bytes that torch has taken from a GPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def free_cache() -> None:
    """Free all memory that no tensor uses, workspaces of cuBLAS included."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        clear_workspaces()
        torch.cuda.empty_cache()


class _Memory:
    """The memory of a tensor as an array that does not own it."""

    def __init__(self, x: Tensor) -> None:
        place = x.data_ptr(), False
        self.__cuda_array_interface__ = {"shape": (x.nbytes,), "typestr": "|u1", "data": place, "version": 3}


def alias_memory(x: Tensor) -> Tensor:
    """Return a tensor in the memory of ``x`` that does not own it: a capture can reuse it after ``x`` is gone."""
    if not x.is_cuda or not x.numel():
        return x.detach()
    memory: Tensor = torch.as_tensor(_Memory(x), device=x.device)
    return memory.view(x.dtype).as_strided(x.shape, x.stride())


def bytes_written(memory: Tensor) -> int:
    """Return the bytes up to the last one that is not ``UNWRITTEN``, rounded up to segments."""
    segments = math.ceil(len(memory) / SEGMENT)
    while segments and not (memory[(segments - 1) * SEGMENT : segments * SEGMENT] != UNWRITTEN).any():
        segments -= 1
    return min(segments * SEGMENT, len(memory))
