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
from lightning_actprune.ops.dispatch import forced_backend
from lightning_actprune.ops.geometry import ceil_div
from lightning_actprune.ops.norm_plan import Layout, NormPlan, norm_plan
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
        y, (values, rstd), ctx.plan, ctx.layout = normalized((x, weight, bias, None), shape, setting, dtype, eager)
        ctx.save_for_backward(values, rstd, weight)
        if eager and len(shape) == 1:
            derived.remember(y, values, weight, bias, ctx.layout.setting)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        if not torch.is_grad_enabled():
            return (*_backward(ctx, grad_y), None, None, None, None)
        return (*without_derivative(partial(_backward, ctx, grad_y), NO_SECOND), None, None, None, None)


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
) -> tuple[Tensor, tuple[Tensor, Tensor | None], NormPlan | None, Layout]:
    """Return the output, values and ``rstd``, and what ``gradients`` has to know besides; arguments: ``norm_plan``."""
    plan = norm_plan(given, shape, setting, dtype) if eager else None
    if plan is not None:
        y, values, rstd = plan.forward(*given)
        return y, (values, rstd), plan, plan.layout
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
    return y, (values, rstd), None, Layout(setting, x.shape, (number, length), x.dtype, parameters)


def gradients(ctx: Any, grad_y: Tensor, needed: tuple[bool, ...]) -> list[Tensor | None]:
    """Return the gradients of the input and, as far as they are ``needed``, of weight and bias."""
    values, rstd, weight = ctx.saved_tensors
    eager, plan, layout = library.in_plain_eager_mode(grad_y), ctx.plan, ctx.layout
    if plan is not None and eager and plan.forced == forced_backend():
        return plan.backward(grad_y, (values, rstd, weight), needed)  # type: ignore[no-any-return]
    if rstd is None:
        rstd = values.new_empty(0, dtype=torch.float32)
    kept = values, rstd, _flat(weight)
    rows = grad_y.reshape(layout.rows)
    grad_x, sums = library.normalize_grad(rows, kept, layout.setting, layout.dtype, any(needed), eager)
    grads = [
        _of_parameter(sums[place], *layout.parameters[place]) if wanted else None for place, wanted in enumerate(needed)
    ]
    return [grad_x.view(layout.shape), *grads]


def output_dtype(x: Tensor, operator: str) -> torch.dtype:
    """Return the type in which torch's ``operator`` computes, and returns, the normalised ``x``.

    A kernel reads ``x`` as it is, and writes fp32 where autocast asks for it: no copy is made.
    """
    if x.dtype == torch.float64 or autocast_dtype(x) is None:
        return x.dtype
    return torch.float32 if (operator, x.device.type) in _FP32_UNDER_AUTOCAST else x.dtype


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


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    _, of_weight, of_bias, *_ = ctx.needs_input_grad
    return tuple(gradients(ctx, grad_y, (of_weight, of_bias)))


def _of_parameter(total: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the gradient ``[L]`` of a parameter as that has it, without a view where none is needed."""
    return as_dtype(total if len(shape) == 1 else total.view(shape), dtype)
