r"""Autograd of a convolution whose saved input is block-pruned.

With ``x [N, C, *spatial]``, ``W``, ``g = dL/dy`` and ``x_hat`` the pruned input::

    y  = x * W + b                             exact, dense
    dx = g * W, transposed                     exact: needs no activation
    db = sum of g over all but the channels    exact
    dW = g * x_hat                             the only approximation

Saved for backward: the packed input, and the weight as it is; never ``x`` and never the autocast copy of the weight.
Backward unpacks ``x_hat`` for the time of torch's own ``convolution_backward``, laid out as ``x`` was, so that the
vendor's library takes the same algorithms: of ``x_hat``, the input gradient takes its sizes alone. Convolutions that
read one tensor, such as the first one of a residual block and that of its shortcut, save the same packed input.

How blocks are cut from an input stands in ``ops.convolution_plan``.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_actprune.ops import library, sharing
from lightning_actprune.ops.autocast import as_dtype, autocast_dtype, cast
from lightning_actprune.ops.convolution_plan import (
    ConvolutionPlan,
    InputLayout,
    convolution_plan,
    rows_of,
    without_gaps,
)
from lightning_actprune.ops.geometry import block_and_keep, stored_view
from lightning_actprune.ops.plan import Setting
from lightning_actprune.ops.second_derivative import without_derivative
from lightning_actprune.ops.setting import BlockSetting
from lightning_actprune.ops.sharing import Packed, Shared
from lightning_actprune.ops.unseen import eager_apply

_convolution_backward = torch.ops.aten.convolution_backward.default
_NO_SECOND = (
    "Second derivatives through a convolution with pruned activations are not defined: the dropped blocks are no "
    "longer there. HINT: exclude the layer from pruning (`exclude=[...]`), or set its sparsity to 0 and its format to "
    "'same', where you need create_graph=True."
)


class Windows(NamedTuple):
    """Which values of the input each output is computed from.

    Args:
        stride: Steps from output to output, by dimension.
        padding: Zeros before and after, by dimension.
        dilation: Steps from weight to weight, by dimension.
        groups: Parts of the channels that do not see each other.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


class PrunedConvolutionFunction(torch.autograd.Function):
    """``torch.convolution`` whose weight gradient comes from a block-pruned input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        windows: Windows,
        parts: int,
        blocks: BlockSetting,
        eager: bool,
    ) -> Tensor:
        """Compute the exact output and pack the input at a sparsity of ``parts`` (see ``ops.geometry``)."""
        if eager:
            ctx.set_materialize_grads(False)  # see `backward`
        ctx.windows, ctx.dtypes = windows, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        setting = Setting(parts, autocast_dtype(x), blocks)
        ctx.bias_sizes = None if bias is None else bias.shape
        given, packed, ctx.layout, ctx.plan = _read_and_keep(x, setting, eager)
        ctx.save_for_backward(weight, *packed)
        if setting.autocast is not None:
            weight, bias = cast(weight, setting.autocast), None if bias is None else cast(bias, setting.autocast)
        stride, padding, dilation, groups = windows
        return torch.convolution(given, weight, bias, stride, padding, dilation, False, (0,) * len(stride), groups)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return exact input and bias gradients and the pruned weight gradient."""
        if grad_y is None:  # of an output on which nothing depends; torch's own layers leave gradients alone too
            return (None,) * 7
        if not torch.is_grad_enabled():
            return (*_backward(ctx, grad_y), None, None, None, None)
        return (*without_derivative(partial(_backward, ctx, grad_y), _NO_SECOND), None, None, None, None)


_apply_eagerly = eager_apply(PrunedConvolutionFunction)


def pruned_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, windows: Windows, parts: int, blocks: BlockSetting
) -> Tensor:
    """Return the convolution of ``x``, a batch, keeping ``x`` pruned at a sparsity of ``parts`` for backward."""
    eager = library.in_plain_eager_mode(x)
    apply = _apply_eagerly if eager else PrunedConvolutionFunction.apply
    y: Tensor = apply(x, weight, bias, windows, parts, blocks, eager)
    return y


def weight_grad(x: Tensor, grad_y: Tensor, sizes: torch.Size, windows: Windows) -> Tensor:
    """Return the weight gradient that backward of ``pruned_convolution`` computes from ``x``, the pruned input.

    ``sizes``: those of the weight, whose values are not needed.
    """
    stride, padding, dilation, groups = windows
    moves = stride, padding, dilation, False, (0,) * len(stride), groups
    grads = _convolution_backward(grad_y, x, x.new_empty(sizes), None, *moves, [False, True, False])
    grad: Tensor = grads[1]
    return grad


def _read_and_keep(
    x: Tensor, setting: Setting, eager: bool
) -> tuple[Tensor, Packed, InputLayout, ConvolutionPlan | None]:
    """Return what the convolution reads of ``x``, what is kept of that, its layout, and in eager mode its plan."""
    key = sharing.key_of(x, setting) if eager else None
    # A linear layer that reads the same tensor cuts it into other rows.
    key = None if key is None else (*key, "convolution")
    shared = None if key is None else sharing.find(x, key)
    plan = convolution_plan(x, setting) if eager else None
    given = x
    if plan is None:
        given = without_gaps(x)
        plan = convolution_plan(given, setting) if eager and given is not x else None
    if shared is not None:
        given = given if setting.autocast is None else cast(given, setting.autocast)
    else:
        given, shared = plan.cast_and_pack(given) if plan is not None else _cast_and_pack(given, setting, eager)
        if key is not None:
            sharing.remember(x, key, shared)
    if plan is not None:
        return given, shared.packed, plan.layout, plan
    layout = given.shape, given.stride(), given.dtype, shared.shape, shared.block, setting.blocks.value_format
    return given, shared.packed, InputLayout(*layout), None


def _cast_and_pack(x: Tensor, setting: Setting, eager: bool) -> tuple[Tensor, Shared]:
    """Return ``x``, which has no gaps, as autocast would cast it, and what is kept of that, without a plan."""
    blocks = setting.blocks
    given = x if setting.autocast is None else cast(x, setting.autocast)
    rows = rows_of(given, blocks.block_size, blocks.scope)
    stored, _ = stored_view(rows, blocks.block_size, blocks.scope)
    block, keep = block_and_keep(stored, blocks.block_size, setting.parts, blocks.value_format)
    packed = library.pack(stored, block, keep, blocks.value_format, blocks.block_selection, eager)
    return given, Shared(packed, (1, rows.shape[0] * rows.shape[1], rows.shape[2]), False, block)


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    weight, *packed = ctx.saved_tensors
    needed = ctx.needs_input_grad[:3]
    x_hat = _unpack(ctx.plan, ctx.layout, tuple(packed), library.in_plain_eager_mode(grad_y))
    stride, padding, dilation, groups = ctx.windows
    moves = stride, padding, dilation, False, (0,) * len(stride), groups
    weight = as_dtype(weight, ctx.layout.dtype)
    grads = _convolution_backward(grad_y, x_hat, weight, ctx.bias_sizes, *moves, needed)
    return tuple(
        [as_dtype(g, dtype) if wanted else None for g, dtype, wanted in zip(grads, ctx.dtypes, needed, strict=True)]
    )


def _unpack(plan: ConvolutionPlan | None, layout: InputLayout, packed: Packed, eager: bool) -> Tensor:
    """Return the pruned input laid out as the convolution read it."""
    if plan is not None and eager and plan.unpacks(*packed):
        return plan.unpack(packed)
    _, rows, length = layout.rows
    stored = packed, layout.block, layout.value_format, layout.dtype
    return library.unpack(rows, length, *stored, eager=eager).as_strided(layout.shape, layout.strides)
