"""Autograd of batch and group normalisation that keep their normalised input in few bits (``ops.normalize_lines``).

Saved for backward: the normalised input in few bits, three numbers in fp32 for each set of values that has a mean of
its own, and the weight as it is. torch keeps the input as it is and two such numbers.

With statistics that are given, as those of batch normalisation in eval mode, the normalised input is needed for the
gradient of the weight alone: ``grad_x = g w rstd`` is exact. If the weight is frozen too, one number a channel is kept.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_actprune.arguments import ValueFormatName
from lightning_actprune.ops import library, line_plan, normalize_lines
from lightning_actprune.ops.autocast import as_dtype
from lightning_actprune.ops.geometry import ceil_div
from lightning_actprune.ops.line_plan import LinePlan, Running
from lightning_actprune.ops.norm import check_stored
from lightning_actprune.ops.second_derivative import without_derivative
from lightning_actprune.ops.unseen import eager_apply


class LineNormSetting(NamedTuple):
    """What is computed, and how it is stored.

    Args:
        groups: Groups of channels; 0 for batch normalisation.
        eps: Added to the variance.
        block_size: Values per block, not yet cut to the tensor.
        value_format: How values are stored, not ``"same"``.
    """

    groups: int
    eps: float
    block_size: int
    value_format: ValueFormatName

    def cut_to(self, count: int) -> LineNormSetting:
        """Return the setting for so many values; torch 2.8 compiles no ``_replace``."""
        groups, eps, block_size, value_format = self
        return LineNormSetting(groups, eps, max(1, min(block_size, count)), value_format)


_NO_SECOND = (
    "Second derivatives through a normalisation layer that keeps its input in few bits are not defined: the input is "
    "no longer there. HINT: exclude the layer (`exclude=[...]`) where you need create_graph=True."
)


class FewBitLineNormFunction(torch.autograd.Function):
    """Batch or group normalisation that keeps its normalised input in few bits."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        fixed: Tensor | None,
        setting: LineNormSetting,
        dtype: torch.dtype,
        eager: bool,
        running: Running | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the exact output in ``dtype``, and the statistics."""
        setting = setting.cut_to(x.numel())
        check_stored(x, ceil_div(x.numel(), setting.block_size), setting.block_size, setting.value_format)
        forward = normalize_lines.normalize_lines if eager else torch.ops.actprune.normalize_lines
        y, values, statistics = forward(x, weight, bias, fixed, *setting, dtype)
        ctx.setting, ctx.dtype, ctx.strides, ctx.fixed = setting, x.dtype, y.stride(), fixed is not None
        ctx.parameters = tuple(None if p is None else p.dtype for p in (weight, bias))
        if running is not None:  # before anything is saved: there a checkpoint that runs again may stop
            _move(running, statistics)
        ctx.save_for_backward(values, statistics, weight)
        ctx.mark_non_differentiable(statistics)
        if eager:
            ctx.set_materialize_grads(False)  # of the statistics: zeros that nobody reads
        return y, statistics

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        if grad_y is None:
            return (None,) * 8
        if not torch.is_grad_enabled():
            return (*_backward(ctx, grad_y), *[None] * 5)
        return (*without_derivative(partial(_backward, ctx, grad_y), _NO_SECOND), *[None] * 5)


_apply_eagerly = eager_apply(FewBitLineNormFunction)


def few_bit_line_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    setting: LineNormSetting,
    dtype: torch.dtype,
    fixed: Tensor | None = None,
    running: Running | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``x [N, C, ...]`` normalised, in ``dtype``, and ``statistics [3, sets]``; ``running`` are moved on.

    These are mean, rstd and unbiased variance, in fp32 and without a derivative; ``fixed``: those to be used.
    """
    eager = library.in_plain_eager_mode(x)
    apply = _apply_eagerly if eager else FewBitLineNormFunction.apply
    found: tuple[Tensor, Tensor] = apply(x, weight, bias, fixed, setting, dtype, eager, running if eager else None)
    if running is not None and not eager:
        _move(running, found[1])
    return found


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    stored = ctx.fixed, ctx.setting.groups, ctx.setting.block_size, ctx.setting.value_format
    return _gradients(ctx, grad_y, ctx.saved_tensors, ctx.strides, stored, (ctx.dtype, *ctx.parameters))


def _gradients(
    ctx: Any,
    grad_y: Tensor,
    saved: tuple[Tensor, Tensor, Tensor | None],
    strides: tuple[int, ...],
    stored: tuple[bool, int, int, str],
    types: tuple[torch.dtype, torch.dtype | None, torch.dtype | None],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weight and bias, in ``types``, through the operator."""
    needs_x, *needed = ctx.needs_input_grad[:3]
    of_x, *of_parameters = types
    eager = library.in_plain_eager_mode(grad_y)
    backward = normalize_lines.normalize_lines_grad if eager else torch.ops.actprune.normalize_lines_grad
    values, statistics, weight = saved
    grad_x, sums = backward(grad_y, values, statistics, weight, strides, *stored, of_x)
    grads = [
        as_dtype(total, dtype) if wanted and dtype is not None else None
        for total, dtype, wanted in zip(sums, of_parameters, needed, strict=True)
    ]
    return (grad_x if needs_x else None, *grads)


class PlannedBatchNormFunction(torch.autograd.Function):
    """``FewBitLineNormFunction`` of a batch in plain eager mode, by a plan."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: LinePlan, running: Running | None
    ) -> Tensor:
        """Compute the exact output, and move ``running`` on."""
        y, values, statistics = plan.forward(x, weight, bias, running)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(values, statistics, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        if grad_y is None:  # of an output on which nothing depends
            return (None,) * 5
        if not torch.is_grad_enabled():
            return (*_planned_backward(ctx, grad_y), None, None)
        return (*without_derivative(partial(_planned_backward, ctx, grad_y), _NO_SECOND), None, None)


_apply_planned = eager_apply(PlannedBatchNormFunction)


def _planned_backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    plan: LinePlan = ctx.plan
    values, statistics, weight = ctx.saved_tensors
    if library.in_plain_eager_mode(grad_y):
        grad_y = normalize_lines.as_laid_out(grad_y, plan.strides)
        grads = plan.backward(grad_y, values, statistics, weight, ctx.needs_input_grad[:3])
        if grads is not None:
            return grads
    grad_y, values = plan.without_relu(grad_y, values)
    return _gradients(ctx, grad_y, (values, statistics, weight), plan.strides, plan.stored, plan.types)


def few_bit_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    setting: LineNormSetting,
    dtype: torch.dtype,
    running: Running | None = None,
) -> Tensor:
    """Return ``x [N, C, ...]`` normalised over all but the channels, in ``dtype``, and move ``running`` on."""
    planned = _planned(x, weight, bias, setting, dtype, running, False)
    if planned is not None:
        return planned
    y, _ = few_bit_line_norm(x, weight, bias, setting, dtype, running=running)
    return y


def few_bit_batch_norm_relu(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    setting: LineNormSetting,
    dtype: torch.dtype,
    running: Running | None = None,
) -> Tensor | None:
    """Return the ReLU of what ``few_bit_batch_norm`` returns, from the same passes, or ``None`` where there are none.

    Then nothing has been done.
    """
    return _planned(x, weight, bias, setting, dtype, running, True)


def _planned(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    setting: LineNormSetting,
    dtype: torch.dtype,
    running: Running | None,
    relu: bool,
) -> Tensor | None:
    plan = None
    if library.in_plain_eager_mode(x):
        plan = line_plan.plan_of(x, weight, bias, setting, dtype, running, relu)
    if plan is None:
        return None
    y: Tensor = _apply_planned(x, weight, bias, plan, running)
    if running is not None:  # autograd would not notice what a kernel writes
        torch.autograd.graph.increment_version([t for t in running[:3] if t is not None])
    return y


@torch.no_grad()
def _move(running: Running, statistics: Tensor) -> None:
    """Move the running statistics towards those of a batch."""
    mean, var, batches, momentum = running
    share: float | Tensor | None = momentum
    if batches is not None:
        batches.add_(1)
        if share is None:  # the mean of all batches; torch reads the number back, and waits for the device
            share = batches.float().reciprocal()
    share = 0.0 if share is None else share
    for moved, found in ((mean, statistics[0]), (var, statistics[2])):
        if moved is None:
            continue
        if moved.dtype == torch.float32:
            moved.lerp_(found, share)
        else:
            moved.copy_(moved.float().lerp_(found, share))


class FrozenBatchNormFunction(torch.autograd.Function):
    """Batch normalisation in eval mode with a weight that needs no gradient: keeps what its input is multiplied by."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        eps: float,
    ) -> Tensor:
        """Compute what torch computes."""
        scale = torch.rsqrt(var.to(torch.promote_types(x.dtype, torch.float32)) + eps)
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)
        ctx.save_for_backward(scale if weight is None else scale * weight)
        ctx.dtype, ctx.bias = x.dtype, None if bias is None else bias.dtype
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of input and bias, which have derivatives of their own."""
        if grad_y is None:  # of an output on which nothing depends
            return (None,) * 6
        (scale,) = ctx.saved_tensors
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            scale = scale.view(-1, *[1] * (grad_y.dim() - 2))
            if torch.is_grad_enabled() or not library.in_plain_eager_mode(grad_y):
                grad_x = (grad_y * scale).to(ctx.dtype)
            else:  # in one pass
                grad_x = torch.mul(grad_y, scale, out=torch.empty_like(grad_y, dtype=ctx.dtype))
        if ctx.needs_input_grad[2]:
            grad_bias = grad_y.sum([0, *range(2, grad_y.dim())], dtype=scale.dtype).to(ctx.bias)
        return grad_x, None, grad_bias, None, None, None


def frozen_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: tuple[Tensor, Tensor], eps: float
) -> Tensor:
    """Return ``x [N, C, ...]`` normalised with mean and variance that are constants, as is the weight."""
    y: Tensor = FrozenBatchNormFunction.apply(x, weight, bias, *statistics, eps)
    return y
