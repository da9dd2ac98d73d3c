"""Pruned operators as functions, without modules.

``linear`` computes exactly ``y = x W^T + b``; only what it keeps for the weight gradient is pruned (see ``ops.linear``
for the maths, ``ops.geometry`` for the storage). ``activation`` computes exactly ``y = f(x)`` and keeps its derivative
in few bits (``ops.activations``), and ``gated`` computes ``f(a) u`` and keeps the factors of its gradients
(``ops.gate``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_actprune.arguments import (
    BlockSelection,
    Scope,
    ValueFormatName,
    check_block_size,
    check_sparsity,
    check_value_format,
)
from lightning_actprune.ops.activations import ACTIVATIONS, Kept, check_kept
from lightning_actprune.ops.convolution import Windows, pruned_convolution
from lightning_actprune.ops.few_bit_activation import activated_dtype, check_activated, few_bit_activation
from lightning_actprune.ops.gated import gated_halves, gated_product
from lightning_actprune.ops.geometry import BlockGeometry, block_and_keep, sparsity_parts, stored_view
from lightning_actprune.ops.linear import pruned_linear
from lightning_actprune.ops.packed import Packed
from lightning_actprune.ops.setting import BlockSetting

__all__ = ["activation", "gated", "linear", "pack"]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    sparsity: float,
    block_size: int = 32,
    scope: Scope = "sample",
    value_format: ValueFormatName = "same",
    block_selection: BlockSelection = "largest",
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
        block_selection: Which blocks are kept: ``"largest"``, those of the largest L2 norm (the paper); ``"swap"``,
            those of the largest norm times a random factor of at most 2^0.75 up or down, so that blocks near the
            threshold change places; ``"unbiased"``, blocks drawn at random, the larger the more often, and scaled up
            so that the expectation of what is stored is the input. The random numbers are hashes of the input: the
            same input, the same choice. Without effect at ``sparsity=0``, where all are kept.

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
    parts = sparsity_parts(check_sparsity(sparsity))
    blocks = BlockSetting.checked(block_size, scope, value_format, block_selection)
    return linear_unchecked(x, weight, bias, parts, blocks)


def linear_unchecked(
    x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, blocks: BlockSetting, derives: bool = False
) -> Tensor:
    """Apply ``linear`` to settings that were checked when they were set: the path of the modules.

    ``derives``: whether parameters of the layer before are there in backward too, to make ``x`` again from what that
    keeps (``ops.derived``).
    """
    if not prunes(weight, parts, blocks):
        return F.linear(x, weight, bias)
    check_input(x, weight)
    return pruned_linear(x, weight, bias, parts, blocks, derives)


def convolution_unchecked(
    x: Tensor, weight: Tensor, bias: Tensor | None, windows: Windows, parts: int, blocks: BlockSetting
) -> Tensor:
    """Convolve ``x``, a batch or one sample, for a weight that ``prunes``: the path of the modules."""
    check_input(x, weight)
    if x.dim() == weight.dim() - 1:
        return pruned_convolution(x.unsqueeze(0), weight, bias, windows, parts, blocks).squeeze(0)
    return pruned_convolution(x, weight, bias, windows, parts, blocks)


def prunes(weight: Tensor, parts: int, blocks: BlockSetting) -> bool:
    """Return whether an input is kept for the gradient of ``weight``, and packed."""
    return (parts != 0 or blocks.value_format != "same") and torch.is_grad_enabled() and weight.requires_grad


def check_input(x: Tensor, weight: Tensor) -> None:
    """Raise if a pruned operator cannot take ``x`` and ``weight``."""
    if isinstance(x, DTensor) or isinstance(weight, DTensor):
        raise TypeError(
            "A pruned layer cannot take DTensors: choosing blocks on one shard is a different method. HINT: "
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
    block_selection: BlockSelection = "largest",
) -> Packed:
    """Return the packed form that a pruned layer keeps of ``x``, for inspection.

    Args:
        x: Floating tensor ``[..., features]``.
        sparsity: Fraction of blocks dropped, in [0, 1).
        block_size: Values per block, positive.
        scope: Within what blocks compete, ``"sample"`` or ``"token"``.
        value_format: How the kept values are stored.
        block_selection: Which blocks are kept; those that ``"unbiased"`` keeps are scaled up.

    Raises:
        TypeError: If an argument has the wrong type or ``x`` is not floating point.
        ValueError: If an argument is out of range or ``x`` is sparse or has no dimension.
    """
    sparsity, blocks = check_sparsity(sparsity), BlockSetting.checked(block_size, scope, value_format, block_selection)
    check_input(x, x)
    with torch.no_grad():
        stored, _ = stored_view(x, blocks.block_size, blocks.scope)
        geometry = BlockGeometry.of_stored(stored, blocks.block_size, sparsity)
        sizes = block_and_keep(stored, blocks.block_size, sparsity_parts(sparsity), blocks.value_format)
        values, bitmap, offsets = torch.ops.actprune.pack(stored, *sizes, blocks.value_format, blocks.block_selection)
    return Packed(values, bitmap, offsets, geometry, x.dtype, blocks.value_format)


def activation(
    x: Tensor,
    function: str,
    *parameters: float,
    value_format: ValueFormatName = "int4",
    inplace: bool = False,
) -> Tensor:
    """Apply an activation function that keeps its derivative, not its input, for backward, and in few bits.

    The output is exact. The input gradient is ``f'(x) g`` with an ``f'`` that is off by a random error of mean zero,
    at most half a step of the codes, or, of functions whose derivative takes two values, is exact in one bit
    (``ops.activations``). In no-grad mode, or if ``x`` needs no gradient, this is the function of torch.

    Args:
        x: Input of any shape, in fp32 or 16 bits; where one bit is exact also in fp64.
        function: ``"gelu"``, ``"gelu_tanh"``, ``"quick_gelu"``, ``"silu"``, ``"mish"``, ``"sigmoid"``, ``"tanh"``,
            ``"softplus"``, ``"elu"``, ``"hardswish"``, or, in one bit, ``"relu"``, ``"relu6"``, ``"hardtanh"``,
            ``"leaky_relu"``, ``"hardsigmoid"``.
        parameters: Those of the function, all of them: of softplus beta and threshold, of elu alpha, of hardtanh the
            least and the largest value, of leaky_relu the slope.
        value_format: ``"int8"``, ``"int4"``, ``"int3"`` or ``"int2"``: so many bits for each value.
        inplace: Write the output to ``x``.

    Returns:
        ``f(x)``, laid out and typed as by torch (autocast included).

    Raises:
        TypeError: If ``x`` is a DTensor or has no type that can be kept.
        ValueError: If an argument is out of range or ``x`` is sparse.

    Example:
        >>> import torch
        >>> from lightning_actprune import functional
        >>> x = torch.randn(8, 16, requires_grad=True)
        >>> functional.activation(x, "gelu", value_format="int4").shape
        torch.Size([8, 16])
    """
    kept = check_kept(function, parameters, value_format)
    if keeps_derivative(x):
        return activation_unchecked(x, kept, inplace)
    y = ACTIVATIONS[function].forward(x, *kept.parameters)
    return x.copy_(y) if inplace else y


def activation_unchecked(x: Tensor, kept: Kept, inplace: bool = False, widens: bool | None = None) -> Tensor:
    """Apply ``activation`` to an input that needs a gradient: the path of the modules.

    ``widens``: whether autocast on a GPU makes the output fp32; by default as torch's function of that name.
    """
    check_activated(x, kept, kept.exact)
    return few_bit_activation(x, kept, activated_dtype(x, kept, widens), inplace)


def gated(
    a: Tensor,
    u: Tensor | None,
    function: str,
    *parameters: float,
    value_format: ValueFormatName = "int4",
    block_size: int = 32,
) -> Tensor:
    """Multiply a gate ``f(a)`` with ``u``, keeping neither but the factors of both gradients, and in few bits.

    The output is exact. The gradients are ``u f'(a) g`` and ``f(a) g`` with factors that are off by a random error of
    mean zero (``ops.gate``). In no-grad mode, or if no input needs a gradient, this is the function of torch and a
    product.

    Args:
        a: What the function is applied to, in fp32 or 16 bits. Rows may have gaps: a half of a joint projection is read
            where it lies.
        u: Of the same shape. ``None``: ``a`` is a joint projection, whose first half along the last dimension is the
            gate and the second ``u``; its gradient is then written at once, without a copy.
        function: As of ``activation``.
        parameters: Those of the function, all of them.
        value_format: ``"int8"``, ``"int4"``, ``"int3"`` or ``"int2"``: so many bits for each value of each factor.
        block_size: Consecutive values that share a scale, at least 8; cut to the row if larger.

    Returns:
        ``f(a) u``, typed as by torch (autocast included).

    Raises:
        TypeError: If an input is a DTensor or has no type that can be kept.
        ValueError: If an argument is out of range, shapes differ, halves do too, or an input is sparse.

    Example:
        >>> import torch
        >>> from lightning_actprune import functional
        >>> a, u = torch.randn(2, 8, 64, requires_grad=True).unbind()
        >>> functional.gated(a, u, "silu", value_format="int4").shape
        torch.Size([8, 64])
    """
    kept = check_kept(function, parameters, value_format)
    check_value_format(value_format, check_block_size(block_size))
    if u is None and (a.dim() == 0 or a.shape[-1] % 2):
        raise ValueError(f"`a` must have two halves along its last dimension, got {tuple(a.shape)}. HINT: pass `u`.")
    if u is not None and a.shape != u.shape:
        raise ValueError(
            f"`a` and `u` must have one shape, got {tuple(a.shape)} and {tuple(u.shape)}. HINT: expand one of them."
        )
    if keeps_derivative(a) or (u is not None and keeps_derivative(u)):
        return gated_halves(a, kept, block_size) if u is None else gated_product(a, u, kept, block_size)
    first, second = a.chunk(2, -1) if u is None else (a, u)
    return ACTIVATIONS[function].forward(first, *kept.parameters) * second


def keeps_derivative(x: Tensor) -> bool:
    """Return whether anything is kept of an activation function of ``x``."""
    return torch.is_grad_enabled() and x.requires_grad
