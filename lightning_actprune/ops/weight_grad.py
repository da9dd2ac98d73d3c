"""Implementation of ``actprune::unpack`` and ``actprune::weight_grad``.

The weight gradient has two methods. ``gather`` multiplies the kept blocks directly with the matching rows of
``grad_y``: operations fall with the density, but each kept block brings only ``b`` columns of reuse per gathered row.
Its fp32 accumulator is written directly in the weight's dtype. ``unpack`` rebuilds the pruned tensor for the time of
one matrix product of the vendor library; it costs the dense product plus one write of the tensor, and in 16 bits it
rounds as the dense layer does, or not at all if the result is wanted in fp32. A transposed layout (blocks along the
reduced dimension) always unpacks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from lightning_actprune.ops import reference
from lightning_actprune.ops.cost import gather_is_faster
from lightning_actprune.ops.dispatch import choose_backend, has_fp32_product, on_device_of
from lightning_actprune.ops.geometry import ceil_div

Method = Literal["gather", "unpack"]

MAX_GATHER_BLOCK = 256
"""Largest block of the gather kernel, whose accumulator is 128 outputs by one block."""

_forced: Method | None = None


@contextlib.contextmanager
def force_method(method: Method | None) -> Iterator[None]:
    """Compute weight gradients inside by ``method`` wherever it exists; ``None`` restores the cost model."""
    global _forced
    if method not in ("gather", "unpack", None):
        raise ValueError(f'`method` must be "gather", "unpack" or None, got {method!r}.')
    before, _forced = _forced, method
    try:
        yield
    finally:
        _forced = before


def choose_method(grad_y: Tensor, values: Tensor, length: int, transposed: bool) -> Method:
    """Return how the weight gradient of this packed input is computed."""
    block_size = values.shape[1]
    if transposed or values.shape[0] == 0 or block_size > MAX_GATHER_BLOCK:
        return "unpack"
    if choose_backend(values, block_size, ceil_div(length, block_size)) == "reference":
        return "unpack"
    if _forced is not None:
        return _forced
    return "gather" if gather_is_faster(grad_y, values, length) else "unpack"


def unpack(values: Tensor, bitmap: Tensor, offsets: Tensor, rows: int, length: int) -> Tensor:
    """Return the pruned tensor ``[rows, length]``, contiguous."""
    return _unpack((values, bitmap, offsets), (1, rows, length), features_first=False)[0]


def _unpack(packed: tuple[Tensor, Tensor, Tensor], shape: tuple[int, int, int], features_first: bool) -> Tensor:
    """Return the pruned tensor of ``shape [batch, rows, length]``, or permuted to ``[rows, batch, length]``."""
    values, bitmap, offsets = packed
    batch, rows, length = shape
    block_size = values.shape[1]
    if values.shape[0] > 0 and choose_backend(values, block_size, ceil_div(length, block_size)) == "triton":
        from lightning_actprune.kernels import unpack as kernels

        with on_device_of(values):
            return kernels.unpack(values, bitmap, offsets, shape, features_first)
    dense = reference.unpack(values, bitmap, batch * rows, length).reshape(batch, rows, length)
    return (dense.transpose(0, 1) if features_first else dense).contiguous()


def weight_grad(
    grad_y: Tensor,
    values: Tensor,
    bitmap: Tensor,
    offsets: Tensor,
    batch: int,
    rows: int,
    length: int,
    transposed: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``grad_y^T @ x_hat`` in ``dtype``.

    Args:
        grad_y: ``[R, OUT]``; ``R = batch * rows``, or ``batch * length`` if transposed.
        values: Kept blocks ``[nnz, b]``.
        bitmap: Positions ``[S, W]``.
        offsets: Starts of runs of blocks in ``values``.
        batch: First dimension of the stored tensor.
        rows: Second dimension of the stored tensor.
        length: Last dimension of the stored tensor.
        transposed: Whether the stored tensor's rows, not its last dimension, are the features.
        dtype: Type of the result; sums are in fp32 (fp64 for fp64).
    """
    if choose_method(grad_y, values, length, transposed) == "gather":
        from lightning_actprune.kernels import weight_grad as kernels

        with on_device_of(values):
            return kernels.weight_grad(grad_y, values, bitmap, offsets, length, dtype)
    dense = _unpack((values, bitmap, offsets), (batch, rows, length), features_first=transposed)
    # Transposed, the reduced dimensions come last: [rows, batch * length] is read as the columns of [R, IN].
    dense = dense.flatten(1).t() if transposed else dense.flatten(0, 1)
    if dtype == torch.float32 and has_fp32_product(grad_y):
        return torch.mm(grad_y.t(), dense, out_dtype=dtype)  # spares a launch, and a rounding to 16 bits
    return (grad_y.t() @ dense).to(dtype)
