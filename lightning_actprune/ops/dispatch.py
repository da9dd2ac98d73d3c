"""Which implementation of an operator runs: the Triton kernels, or the plain-PyTorch reference, and why.

The kernels take CUDA tensors of a supported dtype and block structure on compute capability 8.0 or newer; everything
else takes the reference. Both use the same storage, so forward and backward need not agree. ``force_backend`` overrides
the choice, for tests and for comparing the two.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_actprune.ops.geometry import MAX_BLOCK_SIZE

Backend = Literal["triton", "reference"]
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_CAPABILITY = (8, 0)
MAX_COLUMNS = 65535
"""CUDA's limit for the second axis of a grid, along which the kernels put the column blocks."""

_forced: Backend | None = None


@functools.cache
def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def kernel_refusals(dtype: torch.dtype, device: torch.device, block_size: int, columns: int) -> list[str]:
    """Return the reasons why the Triton kernels cannot take a tensor; an empty list means that they can.

    Args:
        dtype: Type of the tensor to pack, or of the values packed from it.
        device: Where it is.
        block_size: Values per block.
        columns: Blocks per row.
    """
    reasons = []
    if not _triton_installed():
        reasons.append("triton is not installed")
    if dtype not in KERNEL_DTYPES:
        reasons.append(f"dtype {dtype} is not float32, bfloat16 or float16")
    if block_size > MAX_BLOCK_SIZE:
        reasons.append(f"block_size {block_size} is above {MAX_BLOCK_SIZE}")
    if columns > MAX_COLUMNS:
        reasons.append(f"{columns} blocks in a row are more than {MAX_COLUMNS}")
    if device.type != "cuda":
        if not _interpreting():
            reasons.append(f"device {device.type} is not cuda (TRITON_INTERPRET=1 is not set either)")
    elif torch.version.cuda is None:
        reasons.append("the GPU is not an NVIDIA one")
    elif _capability(device.index or 0) < MIN_CAPABILITY:
        major, minor = _capability(device.index or 0)
        reasons.append(f"compute capability {major}.{minor} is below 8.0")
    return reasons


def forced_backend() -> Backend | None:
    """Return what ``force_backend`` asks for; part of the key wherever a choice is kept."""
    return _forced


def choose_backend(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, block_size: int, columns: int
) -> Backend:
    """Return the implementation for a tensor with rows of ``columns`` blocks of ``block_size`` values.

    Raises:
        RuntimeError: If the kernels are forced on a tensor they cannot take; the message lists the reasons.
    """
    if _forced is None:
        return _automatic(dtype, device, block_size, columns)
    if _forced == "reference":
        return "reference"
    reasons = kernel_refusals(dtype, device, block_size, columns)
    if reasons:
        raise RuntimeError(
            f"The Triton kernels were forced but cannot take a {tuple(shape)} tensor: {'; '.join(reasons)}. "
            'HINT: use force_backend("reference") or a supported tensor.'
        )
    return "triton"


@functools.lru_cache(maxsize=1024)
def _automatic(dtype: torch.dtype, device: torch.device, block_size: int, columns: int) -> Backend:
    if device.type != "cuda" or kernel_refusals(dtype, device, block_size, columns):
        return "reference"
    return "triton"


@functools.cache
def _several_gpus() -> bool:
    return torch.cuda.device_count() > 1


_NOTHING = contextlib.nullcontext()


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which the GPU of ``x`` is the current one: Triton launches on that, not on its arguments'."""
    if not x.is_cuda or not _several_gpus() or x.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(x.device)


def has_fp32_product(x: Tensor) -> bool:
    """Return whether torch multiplies 16-bit matrices like ``x`` to an fp32 result (``torch.mm(out_dtype=)``)."""
    if not x.is_cuda or torch.version.cuda is None:
        return False
    if x.dtype == torch.float16:
        return not torch.backends.cuda.matmul.allow_fp16_accumulation
    return x.dtype == torch.bfloat16


@contextlib.contextmanager
def force_backend(backend: Backend | None) -> Iterator[None]:
    """Run every operator called inside on ``backend``; ``None`` restores the automatic choice."""
    global _forced
    if backend not in ("triton", "reference", None):
        raise ValueError(f'`backend` must be "triton", "reference" or None, got {backend!r}.')
    before, _forced = _forced, backend
    try:
        yield
    finally:
        _forced = before
