"""What autocast does to the arguments of ``F.linear``: a function of our own has to do it itself."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_actprune.ops.geometry import along_tokens


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype of the active autocast for the device of ``x``, ``None`` without one."""
    device = "cuda" if x.is_cuda else x.device.type  # whose text takes a while to make
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which ``F.linear`` would compute, and save, ``x``."""
    return (autocast_dtype(x) or x.dtype) if x.dtype != torch.float64 else x.dtype


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x.to(dtype)``, which takes a microsecond or two to find out that there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype=dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast as autocast to ``dtype`` does: not fp64."""
    return x if x.dtype == torch.float64 else as_dtype(x, dtype)


def cast_input(x: Tensor, dtype: torch.dtype, block_size: int) -> Tensor:
    """Cast as autocast does; what has to be copied along its features anyway lies so at once."""
    turns = x.dim() == 3 and x.stride(-1) != 1 and not along_tokens(x, block_size)
    if turns and x.dtype not in (dtype, torch.float64):
        return x.to(dtype=dtype, memory_format=torch.contiguous_format)
    return cast(x, dtype)
