"""Which implementation of an operator runs: the Triton kernels, or the plain-PyTorch reference, and why.

The choice is a function of the tensor alone, so that forward and backward agree: CUDA tensors of a supported dtype on
compute capability 8.0 or newer take the kernels, everything else the reference. ``force_backend`` overrides it, for
tests and for comparing the two.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["triton", "reference"]
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_CAPABILITY = (8, 0)

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


def kernel_refusals(x: Tensor) -> list[str]:
    """Return the reasons why the Triton kernels cannot take ``x``; an empty list means that they can."""
    reasons = []
    if not _triton_installed():
        reasons.append("triton is not installed")
    if x.dtype not in KERNEL_DTYPES:
        reasons.append(f"dtype {x.dtype} is not float32, bfloat16 or float16")
    if x.device.type != "cuda":
        if not _interpreting():
            reasons.append(f"device {x.device.type} is not cuda (TRITON_INTERPRET=1 is not set either)")
    elif torch.version.cuda is None:
        reasons.append("the GPU is not an NVIDIA one")
    elif _capability(x.device.index or 0) < MIN_CAPABILITY:
        major, minor = _capability(x.device.index or 0)
        reasons.append(f"compute capability {major}.{minor} is below 8.0")
    return reasons


def choose_backend(x: Tensor) -> Backend:
    """Return the implementation for ``x``.

    Raises:
        RuntimeError: If the kernels are forced on a tensor they cannot take; the message lists the reasons.
    """
    if _forced == "triton":
        reasons = kernel_refusals(x)
        if reasons:
            raise RuntimeError(
                f"The Triton kernels were forced but cannot take a {tuple(x.shape)} tensor: {'; '.join(reasons)}. "
                'HINT: use force_backend("reference") or a supported tensor.'
            )
        return "triton"
    if _forced == "reference" or x.device.type != "cuda" or kernel_refusals(x):
        return "reference"
    return "triton"


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
