"""Pruned operators as functions, without modules.

``linear`` computes exactly ``y = x W^T + b``; only what it keeps for the weight gradient is pruned (see ``ops.linear``
for the maths, ``ops.geometry`` for the storage).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_actprune.arguments import (
    Scope,
    ValueFormatName,
    check_block_size,
    check_scope,
    check_sparsity,
    check_value_format,
)
from lightning_actprune.ops.geometry import AnyScope, BlockGeometry, block_and_keep, sparsity_parts, stored_view
from lightning_actprune.ops.linear import pruned_linear
from lightning_actprune.ops.packed import Packed

__all__ = ["linear", "pack"]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    sparsity: float,
    block_size: int = 32,
    scope: Scope = "sample",
    value_format: ValueFormatName = "same",
) -> Tensor:
    """Apply a linear layer that keeps only the largest blocks of its input for backward.

    Output, input gradient and bias gradient are exact. In no-grad mode, with a weight that needs no gradient, or at
    ``sparsity=0`` with values stored as they are, this is ``F.linear`` and nothing is packed.

    Args:
        x: Input ``[..., in_features]``, floating point.
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]`` or ``None``.
        sparsity: Fraction of blocks dropped, in [0, 1).
        block_size: Consecutive values per block, positive; cut to the row if larger. Blocks run along the features, or,
            of a transposed view ``[B, T, D]`` with ``T`` innermost in memory, along ``T`` if they fill up better there.
        scope: ``"sample"``: the blocks of ``x[i]`` compete (1-D and 2-D input: of a row); ``"token"``: of a row, that
            is of the values along which blocks run.
        value_format: How the kept values are stored: ``"same"``, in their own type; ``"int8"``, ``"int4"``, ``"int3"``,
            ``"int2"``, in so many bits each, with random errors of mean zero; ``"fp8"`` (``ops.formats``).

    Returns:
        ``[..., out_features]``, as ``F.linear`` returns it (autocast included).

    Raises:
        TypeError: If an argument has the wrong type, ``x`` is not floating point or a tensor is a DTensor.
        ValueError: If an argument is out of range or ``x`` is sparse or has no dimension.

    Example:
        >>> import torch
        >>> from lightning_actprune import functional
        >>> x, w = torch.randn(8, 16, 64), torch.randn(32, 64, requires_grad=True)
        >>> functional.linear(x, w, sparsity=0.5, block_size=16).shape
        torch.Size([8, 16, 32])
    """
    sparsity, block_size, scope = check_sparsity(sparsity), check_block_size(block_size), check_scope(scope)
    value_format = check_value_format(value_format, block_size)
    return linear_unchecked(x, weight, bias, sparsity_parts(sparsity), block_size, scope, value_format)


def linear_unchecked(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    parts: int,
    block_size: int,
    scope: AnyScope,
    value_format: ValueFormatName,
) -> Tensor:
    """Apply ``linear`` to settings that were checked when they were set: the path of the modules."""
    if not prunes(weight, parts, value_format):
        return F.linear(x, weight, bias)
    check_input(x, weight)
    return pruned_linear(x, weight, bias, parts, block_size, scope, value_format)


def prunes(weight: Tensor, parts: int, value_format: ValueFormatName) -> bool:
    """Return whether an input is kept for the gradient of ``weight``, and packed."""
    return (parts != 0 or value_format != "same") and torch.is_grad_enabled() and weight.requires_grad


def check_input(x: Tensor, weight: Tensor) -> None:
    """Raise if a pruned operator cannot take ``x`` and ``weight``."""
    if isinstance(x, DTensor) or isinstance(weight, DTensor):
        raise TypeError(
            "A pruned linear layer cannot take DTensors: choosing blocks on one shard is a different method. HINT: "
            "exclude tensor-parallel layers from pruning (`exclude=[...]`)."
        )
    if x.layout != torch.strided:
        raise ValueError(f"`x` must be a dense tensor, got layout {x.layout}. HINT: pass `x.to_dense()`.")
    if x.dim() == 0:
        raise ValueError("`x` must have at least one dimension, its features. HINT: pass `x.reshape(1)`.")
    if not x.is_floating_point():
        raise TypeError(
            f"`x` must be a floating-point tensor (float16, bfloat16, float32 or float64), got {x.dtype}. "
            "HINT: convert it, or leave the layer unpruned."
        )


def pack(
    x: Tensor,
    *,
    sparsity: float,
    block_size: int = 32,
    scope: Scope = "sample",
    value_format: ValueFormatName = "same",
) -> Packed:
    """Return the packed form that a pruned layer keeps of ``x``, for inspection.

    Args:
        x: Floating tensor ``[..., features]``.
        sparsity: Fraction of blocks dropped, in [0, 1).
        block_size: Values per block, positive.
        scope: Within what blocks compete, ``"sample"`` or ``"token"``.
        value_format: How the kept values are stored.

    Raises:
        TypeError: If an argument has the wrong type or ``x`` is not floating point.
        ValueError: If an argument is out of range or ``x`` is sparse or has no dimension.
    """
    sparsity, block_size, scope = check_sparsity(sparsity), check_block_size(block_size), check_scope(scope)
    value_format = check_value_format(value_format, block_size)
    check_input(x, x)
    with torch.no_grad():
        stored, _ = stored_view(x, block_size, scope)
        geometry = BlockGeometry.of_stored(stored, block_size, sparsity)
        block, keep = block_and_keep(stored, block_size, sparsity_parts(sparsity), value_format)
        values, bitmap, offsets = torch.ops.actprune.pack(stored, block, keep, value_format)
    return Packed(values, bitmap, offsets, geometry, x.dtype, value_format)
