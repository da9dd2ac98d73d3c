"""Autograd of normalisation layers that keep their normalised input in few bits; maths in ``ops.normalize``.

Saved for backward: the normalised input in few bits, ``rstd`` (fp32) per row, and the weight as it is. torch keeps the
input as it is and two numbers a row.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_actprune.arguments import ValueFormatName
from lightning_actprune.ops import derived, library
from lightning_actprune.ops.autocast import as_dtype, autocast_dtype
from lightning_actprune.ops.geometry import ceil_div
from lightning_actprune.ops.norm_plan import NormLayout, NormPlan, norm_plan
from lightning_actprune.ops.pack import MAX_KEPT_BLOCKS
from lightning_actprune.ops.second_derivative import without_derivative
from lightning_actprune.ops.unseen import eager_apply

_FP32_UNDER_AUTOCAST = {
    (operator, device)
    for operator in ("batch_norm", "group_norm", "layer_norm", "rms_norm")
    for device in ("cpu", "cuda")
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", f"Autocast{device.upper()}")
}
"""What autocast computes in fp32, which depends on the version of torch: ``rms_norm`` on a GPU in 2.15, not in 2.11."""


class NormSetting(NamedTuple):
    """What is computed, and how it is stored.

    Args:
        centred: Whether the mean is subtracted.
        rounded: Whether normalised values are rounded to the type of the input before they are multiplied.
        eps: Added to the variance.
        block_size: Values per block, not yet cut to a row.
        value_format: How values are stored, not ``"same"``.
        normed: Whether rows are normalised; if not, they are only scaled and shifted.
    """

    centred: bool
    rounded: bool
    eps: float
    block_size: int
    value_format: ValueFormatName
    normed: bool = True

    def cut_to(self, length: int) -> NormSetting:
        """Return the setting for rows of ``length`` values; torch 2.8 compiles no ``_replace``."""
        centred, rounded, eps, block_size, value_format, normed = self
        return NormSetting(centred, rounded, eps, max(1, min(block_size, length)), value_format, normed)


NO_SECOND = (
    "Second derivatives through a normalisation or affine layer that keeps its input in few bits are not defined: the "
    "input is no longer there. HINT: exclude the layer (`exclude=[...]`) where you need create_graph=True."
)


class FewBitNormFunction(torch.autograd.Function):
    """Normalisation over the last dimensions that keeps its normalised input in few bits."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shape: tuple[int, ...],
        setting: NormSetting,
        dtype: torch.dtype,
        eager: bool,
    ) -> Tensor:
        """Compute the exact output in ``dtype`` over the last dimensions, of ``shape``."""
        given = x, weight, bias, None
        ctx.plan = plan = norm_plan(given, shape, setting, dtype) if eager else None
        if plan is None:
            y, values, rstd, ctx.layout = normalized(given, shape, setting, dtype, eager)
        else:
            y, values, rstd = plan.forward(*given)
        if eager:
            ctx.set_materialize_grads(False)
        ctx.save_for_backward(values, rstd, weight)
        if eager and len(shape) == 1:
            derived.remember(y, values, weight, bias, (ctx.layout if plan is None else plan.layout).setting)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        if grad_y is None:  # of an output on which nothing depends
            return (None,) * 7
        if not torch.is_grad_enabled():
            needs = ctx.needs_input_grad
            return *gradients(ctx, grad_y, needs[1], needs[2]), None, None, None, None
        compute = partial(gradients, ctx, grad_y, *ctx.needs_input_grad[1:3])
        return (*without_derivative(compute, NO_SECOND), None, None, None, None)


_apply_eagerly = eager_apply(FewBitNormFunction)


def few_bit_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: tuple[int, ...],
    setting: NormSetting,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``x`` normalised over its last dimensions, of ``shape``, in ``dtype``."""
    eager = library.in_plain_eager_mode(x)
    apply = _apply_eagerly if eager else FewBitNormFunction.apply
    y: Tensor = apply(x, weight, bias, shape, setting, dtype, eager)
    return y


def normalized(
    given: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    shape: tuple[int, ...],
    setting: NormSetting,
    dtype: torch.dtype,
    eager: bool,
) -> tuple[Tensor, Tensor, Tensor | None, NormLayout]:
    """Return output, values, ``rstd``, and what backward has to know besides, without a plan; see ``norm_plan``."""
    x, weight, bias, residual = given
    length = math.prod(shape)
    number = math.prod(x.shape[: x.dim() - len(shape)])
    rows, setting = x.reshape(number, length), setting.cut_to(length)
    check_stored(x, ceil_div(number * length, setting.block_size), setting.block_size, setting.value_format)
    added = None if residual is None else residual.reshape(number, length)
    y, values, rstd = library.normalize((rows, _flat(weight), _flat(bias), added), setting, dtype, eager)
    parameters = tuple(None if p is None else (p.shape, p.dtype) for p in (weight, bias))
    # No view to autograd, which lets nobody write to one that a function returns (an in-place ReLU, say).
    y = torch.ops.aten._unsafe_view.default(y, x.shape)
    return y, values, rstd, NormLayout(setting, x.shape, (number, length), x.dtype, parameters)


def gradients(
    ctx: Any, grad_y: Tensor, needs_weight: bool, needs_bias: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of the input and, as far as they are needed, of weight and bias."""
    plan: NormPlan | None = ctx.plan
    if plan is not None and plan.takes(grad_y):
        return plan.backward(grad_y, ctx.saved_tensors, needs_weight, needs_bias)
    layout: NormLayout = ctx.layout if plan is None else plan.layout
    values, rstd, weight = ctx.saved_tensors
    if rstd is None:  # as a plan has it
        rstd = values.new_empty(0, dtype=torch.float32)
    kept, wanted = (values, rstd, _flat(weight)), needs_weight or needs_bias
    rows, eager = grad_y.reshape(layout.rows), library.in_plain_eager_mode(grad_y)
    grad_x, sums = library.normalize_grad(rows, kept, layout.setting, layout.dtype, wanted, eager)
    of_weight, of_bias = layout.parameters
    return (
        grad_x.view(layout.shape),
        _of_parameter(sums[0], *of_weight) if of_weight and needs_weight else None,
        _of_parameter(sums[1], *of_bias) if of_bias and needs_bias else None,
    )


def output_dtype(x: Tensor, operator: str) -> torch.dtype:
    """Return the type in which torch's ``operator`` computes, and returns, the normalised ``x``.

    A kernel reads ``x`` as it is, and writes fp32 where autocast asks for it: no copy is made.
    """
    dtype = x.dtype
    if dtype in (torch.float32, torch.float64) or autocast_dtype(x) is None:
        return dtype
    return torch.float32 if (operator, x.device.type) in _FP32_UNDER_AUTOCAST else dtype


def check_stored(x: Tensor, blocks: int, block_size: int, value_format: str) -> None:
    """Raise if values cannot be stored."""
    if x.dtype == torch.float64:
        raise TypeError(
            f"float64 values cannot be stored as {value_format!r}, whose scales have 8 bits of precision. "
            "HINT: leave the layer as it is (`exclude=[...]`), or train in float32 or 16 bits."
        )
    if blocks > MAX_KEPT_BLOCKS:
        raise ValueError(
            f"An input of {tuple(x.shape)} has {blocks} blocks, more than 2^31 - 1, the most that can be numbered. "
            f"HINT: take a larger `block_size` than {block_size}."
        )


def _flat(parameter: Tensor | None) -> Tensor | None:
    return parameter if parameter is None or parameter.dim() == 1 else parameter.reshape(-1)


def _of_parameter(total: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the gradient ``[L]`` of a parameter as that has it, without a view where none is needed."""
    return as_dtype(total if len(shape) == 1 else total.view(shape), dtype)
