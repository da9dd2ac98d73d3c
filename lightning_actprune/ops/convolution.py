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

Blocks are cut from a sample as it lies in memory (``input_rows``): of ``channels_last`` inputs they are channels of a
pixel, or of several if ``C`` is no multiple of the block, otherwise neighbouring pixels of a channel. So no copy is
made, no block is cut short, and how many channels there are does not matter: three of an image will do.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_actprune.ops import library, sharing
from lightning_actprune.ops.autocast import as_dtype, autocast_dtype, cast
from lightning_actprune.ops.dispatch import MAX_COLUMNS, on_device_of
from lightning_actprune.ops.geometry import AnyScope, block_and_keep, ceil_div, stored_view
from lightning_actprune.ops.plan import Setting, input_plan
from lightning_actprune.ops.second_derivative import without_derivative
from lightning_actprune.ops.setting import BlockSetting
from lightning_actprune.ops.sharing import Shared
from lightning_actprune.ops.unseen import eager_apply

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
        ctx.x_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        setting = Setting(parts, autocast_dtype(x), blocks)
        parameters = weight, bias
        if setting.autocast is not None:
            parameters = cast(weight, setting.autocast), None if bias is None else cast(bias, setting.autocast)
        key = sharing.key_of(x, setting) if eager else None
        # A linear layer that reads the same tensor cuts it into other rows.
        key = None if key is None else (*key, "convolution")
        shared = None if key is None else sharing.find(x, key)
        given = without_gaps(x)
        if shared is not None:
            given = given if setting.autocast is None else cast(given, setting.autocast)
        else:
            given, shared = _cast_and_pack(given, setting, eager)
            if key is not None:
                sharing.remember(x, key, shared)
        ctx.windows, ctx.shape, ctx.strides, ctx.dtype = windows, given.shape, given.stride(), given.dtype
        ctx.rows, ctx.block, ctx.value_format = shared.shape, shared.block, blocks.value_format
        ctx.save_for_backward(weight, *shared.packed)
        none = (0,) * len(windows.stride)
        stride, padding, dilation, groups = windows
        return torch.convolution(given, *parameters, stride, padding, dilation, False, none, groups)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        """Return exact input and bias gradients and the pruned weight gradient."""
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


def without_gaps(x: Tensor) -> Tensor:
    """Return ``x [N, C, *spatial]`` with its values side by side, channels last if they are: a copy if need be.

    Of what has gaps, such as one half of the channels, torch's convolution makes that copy too.
    """
    if x.is_contiguous() or _channels_last(x):
        return x
    if x.stride(1) == 1:
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    return x.contiguous()


def input_rows(x: Tensor, block_size: int, scope: AnyScope) -> Tensor:
    """Return ``x [N, C, *spatial]`` as rows ``[N, T, L]`` from which blocks are cut, in the order of memory.

    In a sample, rows are as long as a block where that divides it; all of it is one row otherwise, if kernels take so
    long a row. With scope ``"token"``, within a row of which blocks compete, they are the channels of a pixel, or the
    innermost dimension of a contiguous ``x``.
    """
    return _rows(without_gaps(x), block_size, scope)


def _rows(x: Tensor, block_size: int, scope: AnyScope) -> Tensor:
    """Return the rows of ``x``, which has no gaps."""
    memory = x if x.is_contiguous() else x.movedim(1, -1)
    values = math.prod(x.shape[1:])
    if scope != "token":
        if values % block_size == 0:
            return memory.reshape(x.shape[0], values // block_size, block_size)
        if ceil_div(values, block_size) <= MAX_COLUMNS:
            return memory.reshape(x.shape[0], 1, values)
    return memory.flatten(1, -2)


def _channels_last(x: Tensor) -> bool:
    if x.dim() == 4:  # without a view, which takes the host longer
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.movedim(1, -1).is_contiguous()


def _cast_and_pack(x: Tensor, setting: Setting, eager: bool) -> tuple[Tensor, Shared]:
    """Return ``x``, which has no gaps, as autocast would cast it, and what is kept of that."""
    blocks = setting.blocks
    rows = _rows(x, blocks.block_size, blocks.scope)
    shape = 1, rows.shape[0] * rows.shape[1], rows.shape[2]
    plan = input_plan(rows, setting) if eager else None
    if plan is not None and plan.new_cast is not None:
        copy = plan.new_cast()
        with on_device_of(x):
            packed = plan.launch(rows, copy)
        return copy.as_strided(x.shape, x.stride()), Shared(packed, shape, False, plan.block)
    given = x if setting.autocast is None else cast(x, setting.autocast)
    rows = rows if given is x else _rows(given, blocks.block_size, blocks.scope)
    if plan is not None:
        with on_device_of(x):
            return given, Shared(plan.launch(rows), shape, False, plan.block)
    stored, _ = stored_view(rows, blocks.block_size, blocks.scope)
    block, keep = block_and_keep(stored, blocks.block_size, setting.parts, blocks.value_format)
    packed = library.pack(stored, block, keep, blocks.value_format, blocks.block_selection, eager)
    return given, Shared(packed, shape, False, block)


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    weight, *packed = ctx.saved_tensors
    _, rows, length = ctx.rows
    stored = tuple(packed), ctx.block, ctx.value_format, ctx.dtype
    x_hat = library.unpack(rows, length, *stored, eager=library.in_plain_eager_mode(grad_y))
    x_hat = x_hat.as_strided(ctx.shape, ctx.strides)
    bias_shape, bias_dtype = (None, None) if ctx.bias is None else ctx.bias
    stride, padding, dilation, groups = ctx.windows
    moves = stride, padding, dilation, False, (0,) * len(stride), groups
    needed = ctx.needs_input_grad[:3]
    weight = as_dtype(weight, ctx.dtype)
    grads = torch.ops.aten.convolution_backward(grad_y, x_hat, weight, bias_shape, *moves, needed)
    dtypes = ctx.x_dtype, ctx.weight_dtype, bias_dtype
    return tuple(
        as_dtype(grad, dtype) if wanted else None for grad, dtype, wanted in zip(grads, dtypes, needed, strict=True)
    )
