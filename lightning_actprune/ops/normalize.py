r"""Normalisation of rows whose normalised values are stored in few bits: what ``actprune::normalize*`` compute.

With ``x [R, L]``, per row::

    x^ = (x - mean) rstd,  rstd = 1 / sqrt(var + eps)      without ``centred``: mean = 0, var = mean of x^2
    y  = x^ w + b

    grad_b = sum_r g     grad_w = sum_r g x^     grad_x = rstd (g w - mean(g w) - x^ mean(g w x^))

(the second term only if ``centred``). Without ``normed`` rows are only scaled and shifted, as in an affine layer: the
mean is 0, rstd 1 and not stored, and ``grad_x = g w`` exact.

A residual may be added to y; its gradient is g itself.

Backward reads x~, which is what few bits hold of x^, in place of x^; output and ``grad_b`` are exact, ``rstd`` is kept
in fp32. x~ = x^ + n with errors n of mean zero in the integer formats and of root mean square s, where that of x^ is 1
(normal values in blocks of 32: int8 0.005, fp8 0.024, int4 0.09, int3 0.19, int2 0.44):

``grad_w``
    gets sum_r g n, whose mean is zero: as in the weight gradient of a linear layer, errors of many rows cancel.
``grad_x``
    With c = cos of the angle between g w and x^, and |x^| = sqrt(L)::

        error = -rstd (n mean(g w x~) + x^ mean(g w n))
        |error| <= rstd |g w| s (2 + s)                      in any case
        |error| ~  rstd |g w| s sqrt(c^2 + 2/L)              of errors that know nothing of g

    where the exact gradient has rstd |g w| sqrt(1 - c^2). Only as far as g w points along x^ is anything lost: at
    L = 768 int4 and int2 are off by 0.5 and 2.4 % of a random g (c = 0), and by 7 and 33 %, of mean zero, at c = 0.6.

Statistics are in fp32, as torch's. Rows are cut into blocks and stored as ``pack`` does with ``ALL_BLOCKS``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_actprune.ops.dispatch import choose_backend, on_device_of
from lightning_actprune.ops.geometry import ALL_BLOCKS, ceil_div
from lightning_actprune.ops.pack import pack
from lightning_actprune.ops.weight_grad import unpack


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    centred: bool,
    rounded: bool,
    eps: float,
    block_size: int,
    value_format: str,
    normed: bool,
    dtype: torch.dtype,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise the rows of ``x``, and store what backward needs.

    Args:
        x: ``[R, L]`` in fp32 or 16 bits.
        weight: ``[L]`` or ``None``.
        bias: ``[L]`` or ``None``.
        centred: Whether the mean is subtracted.
        rounded: Whether values are rounded to the type of ``x`` before they are multiplied by the weight.
        eps: Added to the variance.
        block_size: Values per block, in [1, max(L, 1)].
        value_format: How values are stored, not ``"same"``.
        normed: Whether rows are normalised; if not, they are scaled and shifted.
        dtype: Type of the output.
        residual: ``[R, L]`` to be added to the output, or ``None``.

    Returns:
        ``y [R, L]``, the bytes of all blocks and ``rstd [R]``, fp32, ``[0]`` without ``normed``.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    if _by_kernels(x, block_size):
        from lightning_actprune.kernels import norm_launch as kernels

        weight, bias, residual = (None if t is None else t.contiguous() for t in (weight, bias, residual))
        stored = block_size, value_format
        with on_device_of(x):
            return kernels.normalize(x, weight, bias, centred, rounded, eps, *stored, normed, dtype, residual)
    wide, rstd = x.float(), x.new_empty(0, dtype=torch.float32)
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    if normed:
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        wide = wide * rstd
    y = wide.to(x.dtype).float() if rounded else wide
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    if residual is not None:
        y = y + residual.float()
    values, *_ = pack(wide[None], block_size, ALL_BLOCKS, value_format)
    return y.to(dtype), values, rstd.view(-1)


def normalize_grad(
    grad_y: Tensor,
    values: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    centred: bool,
    block_size: int,
    value_format: str,
    normed: bool,
    dtype: torch.dtype,
    sums: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``normalize``.

    Args:
        grad_y: ``[R, L]``.
        values: The bytes of all blocks.
        rstd: ``[R]``, fp32, or ``[0]``.
        weight: ``[L]`` or ``None``.
        centred: Whether the mean was subtracted.
        block_size: Values per block.
        value_format: How they are stored.
        normed: Whether rows were normalised.
        dtype: Type of the input gradient.
        sums: Whether gradients of the parameters are wanted.

    Returns:
        ``grad_x [R, L]`` and, in fp32, those of weight and bias, ``[2, L]``, or ``[0, L]`` if they are not wanted.
    """
    if grad_y.stride(-1) != 1:
        grad_y = grad_y.contiguous()
    if _by_kernels(grad_y, block_size):
        from lightning_actprune.kernels import norm_launch as kernels

        weight = None if weight is None else weight.contiguous()
        with on_device_of(grad_y):
            stored = block_size, value_format
            return kernels.normalize_grad(grad_y, values, rstd, weight, centred, *stored, normed, dtype, sums)
    nowhere = rstd.new_empty(1, 0, dtype=torch.int32)  # no positions: all blocks are there
    x = unpack(values, nowhere, nowhere, grad_y.shape[0], grad_y.shape[1], block_size, value_format, torch.float32)
    grad = grad_y.float()
    of_parameters = torch.stack([(grad * x).sum(0), grad.sum(0)]) if sums else rstd.new_empty(0, grad_y.shape[1])
    if weight is not None:
        grad = grad * weight.float()
    if not normed:
        return grad.to(dtype), of_parameters
    rest = grad - x * (grad * x).mean(-1, keepdim=True)
    if centred:
        rest = rest - grad.mean(-1, keepdim=True)
    return (rest * rstd[:, None]).to(dtype), of_parameters


def _by_kernels(x: Tensor, block_size: int) -> bool:
    return takes(x.shape, x.dtype, x.device, block_size)


def takes(shape: Sequence[int], dtype: torch.dtype, device: torch.device, block_size: int) -> bool:
    """Return whether the kernels of their own take rows ``[R, L]``; others are normalised by torch, and packed."""
    rows, length = shape
    if rows == 0 or length == 0:
        return False
    if choose_backend(shape, dtype, device, block_size, ceil_div(length, block_size)) != "triton":
        return False
    from lightning_actprune.kernels import norm as kernels

    return kernels.takes_rows(length, block_size)
