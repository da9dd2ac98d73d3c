"""Layers that scale each feature, for a compiler: it may fuse all of them but reading and writing few bits.

Maths and storage are those of ``ops.normalize`` without ``normed``. One operator would have their input,
output and gradients written to memory for it, in fp32 under autocast; a compiler has casts, residual sums and the sums
over rows in kernels that it makes anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_actprune.ops.geometry import ALL_BLOCKS


def scaled(
    given: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    block_size: int,
    value_format: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``normalize`` does of rows ``x [R, L]``, weight, bias and residual."""
    x, weight, bias, residual = given
    values, *_ = torch.ops.actprune.pack(x[None], block_size, ALL_BLOCKS, value_format)
    y = x.float()
    if weight is not None:
        y = y * weight.float()
    for added in (bias, residual):
        if added is not None:
            y = y + added.float()
    return y.to(dtype), values, x.new_empty(0, dtype=torch.float32)


def scaled_grad(
    grad_y: Tensor,
    values: Tensor,
    weight: Tensor | None,
    block_size: int,
    value_format: str,
    dtype: torch.dtype,
    sums: bool,
) -> tuple[Tensor, Tensor]:
    """Return what ``normalize_grad`` does of ``grad_y [R, L]``; values are read in ``dtype``, that of the input."""
    rows, length = grad_y.shape
    grad = grad_y.float()
    grad_x = (grad if weight is None else grad * weight.float()).to(dtype)
    if not sums:
        return grad_x, grad.new_empty(0, length)
    nowhere = values.new_empty(1, 0, dtype=torch.int32)
    x = torch.ops.actprune.unpack(values, nowhere, nowhere, rows, length, block_size, value_format, dtype)
    return grad_x, torch.stack([(grad * x.float()).sum(0), grad.sum(0)])
