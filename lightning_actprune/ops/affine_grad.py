"""Gradients of an affine layer from its packed input: what ``actprune::affine_grad`` computes.

With ``g [R, L]``, ``w [L]`` and ``x_hat [R, L]`` the pruned input::

    grad_x = g w     grad_w = sum_r g x_hat     grad_b = sum_r g

in one pass over ``g``. Products and sums are in fp32 (fp64 for fp64), each gradient is rounded once. The operator is
opaque to a compiler as those of ``ops.library`` are, for the same reasons.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_actprune.ops.dispatch import on_device_of
from lightning_actprune.ops.normalize import takes
from lightning_actprune.ops.operators import as_operator
from lightning_actprune.ops.weight_grad import unpack

_library = torch.library.Library("actprune", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_library.define(
    "affine_grad(Tensor grad_y, Tensor values, Tensor bitmap, Tensor offsets, Tensor? weight, ScalarType dtype, "
    "int block_size, str value_format, bool biased) -> (Tensor grad_x, Tensor sums)",
    tags=_TAGS,
)


def affine_grad(
    grad_y: Tensor,
    values: Tensor,
    bitmap: Tensor,
    offsets: Tensor,
    weight: Tensor | None,
    dtype: torch.dtype,
    block_size: int,
    value_format: str,
    biased: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``x w + b`` for the packed input ``x [R, L]``.

    Args:
        grad_y: ``[R, L]``.
        values: Kept blocks ``[nnz, b]``, or ``[nnz, row_bytes]`` in few bits.
        bitmap: Positions ``[S, W]``; not without columns.
        offsets: Starts of runs of blocks in ``values``.
        weight: ``[L]``, or ``None`` if no gradient of the input is wanted.
        dtype: Type of the input gradient.
        block_size: Values per block, cut to a row.
        value_format: How the values are stored.
        biased: Whether the gradient of the bias is wanted.

    Returns:
        ``grad_x [R, L]``, ``[0, L]`` without a weight, and the gradients of weight and bias, ``[2, L]``, or ``[1, L]``
        of the weight alone, in fp32, in fp64 if that is the type of ``grad_y``.
    """
    if grad_y.stride(-1) != 1:
        grad_y = grad_y.contiguous()
    rows, length = grad_y.shape
    if takes((rows, length), grad_y.dtype, grad_y.device, block_size):
        from lightning_actprune.kernels import affine as kernels

        with on_device_of(grad_y):
            stored = dtype, block_size, value_format
            weight = None if weight is None else weight.contiguous()
            return kernels.affine_grad(grad_y, values, bitmap, offsets, weight, *stored, biased)
    wide = grad_y.dtype if grad_y.dtype == torch.float64 else torch.float32
    read = values.dtype if value_format == "same" else torch.float32
    x = unpack(values, bitmap, offsets, rows, length, block_size, value_format, read)
    grad = grad_y.to(wide)
    sums = torch.stack([(grad * x).sum(0), *([grad.sum(0)] if biased else [])])
    grad_x = grad_y.new_empty(0, length, dtype=dtype) if weight is None else (grad * weight).to(dtype)
    return grad_x, sums


_library.impl("affine_grad", as_operator(affine_grad), "CompositeExplicitAutograd")


@torch.library.register_fake("actprune::affine_grad", lib=_library)
def _affine_grad_fake(
    grad_y: Tensor,
    values: Tensor,
    bitmap: Tensor,
    offsets: Tensor,
    weight: Tensor | None,
    dtype: torch.dtype,
    block_size: int,
    value_format: str,
    biased: bool,
) -> tuple[Tensor, Tensor]:
    rows, length = grad_y.shape
    wide = torch.float64 if grad_y.dtype == torch.float64 else torch.float32
    return (
        grad_y.new_empty(0 if weight is None else rows, length, dtype=dtype),
        grad_y.new_empty(1 + biased, length, dtype=wide),
    )
