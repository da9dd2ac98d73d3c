r"""Autograd of an affine layer whose saved input is block-pruned.

With ``x [R, L]``, ``w [L]``, ``b [L]``, ``g = dL/dy`` and ``x_hat`` the pruned input::

    y  = x w + b              exact, by torch's own operator
    dx = g w                  exact: needs no activation
    db = sum_r g              exact
    dw = sum_r g x_hat        the only approximation

Saved for backward: the packed input, and the weight as it is if ``dx`` is needed; never ``x``. The input is packed as
that of a linear layer, so that both share one pack where they read one tensor (``ops.sharing``), but for two things: no
autocast casts it, since none casts what is multiplied here, and blocks always run along the features.

Layers that keep all blocks in few bits have a pass of their own, see ``ops.norm``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_actprune.ops import library, sharing
from lightning_actprune.ops.affine_grad import affine_grad
from lightning_actprune.ops.affine_plan import AffineLayout, gradients
from lightning_actprune.ops.autocast import as_dtype
from lightning_actprune.ops.dispatch import on_device_of
from lightning_actprune.ops.geometry import block_and_keep, stored_shape, stored_view
from lightning_actprune.ops.plan import Setting, input_plan
from lightning_actprune.ops.second_derivative import without_derivative
from lightning_actprune.ops.setting import BlockSetting
from lightning_actprune.ops.sharing import Shared
from lightning_actprune.ops.unseen import eager_apply

_NO_SECOND = (
    "Second derivatives through an affine layer with pruned activations are not defined: the dropped blocks are no "
    "longer there. HINT: exclude the layer from pruning (`exclude=[...]`), or set its sparsity to 0 and its format to "
    "'same', where you need create_graph=True."
)


class PrunedAffineFunction(torch.autograd.Function):
    """``x * weight + bias`` whose weight gradient comes from a block-pruned input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        parts: int,
        blocks: BlockSetting,
        eager: bool,
    ) -> Tensor:
        """Compute the exact output and pack the input at a sparsity of ``parts`` (see ``ops.geometry``)."""
        if eager:
            ctx.set_materialize_grads(False)  # see `backward`
        rows, setting = input_rows(x), Setting(parts, None, blocks)
        key = sharing.key_of(x, setting) if eager else None
        if key is not None and rows is not x:  # a linear layer's blocks may run along the tokens here
            key = *key, "affine"
        shared = None if key is None else sharing.find(x, key)
        if shared is None:
            shared = _pack(rows, setting, eager)
            if key is not None:
                sharing.remember(x, key, shared)
        values, bitmap, offsets = shared.packed
        stored = *bitmap.shape, offsets.shape[1], values.shape[0]
        of_bias = None if bias is None else (bias.shape, bias.dtype)
        layout = x.shape, x.dtype, shared.shape[1:], stored, shared.block, blocks.value_format
        ctx.layout = AffineLayout(*layout, (weight.shape, weight.dtype), of_bias)
        ctx.save_for_backward(*shared.packed, weight if ctx.needs_input_grad[0] else None)
        return scaled(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return exact input and bias gradients and the pruned weight gradient."""
        if grad_y is None:  # of an output on which nothing depends; torch's own layers leave gradients alone too
            return (None,) * 6
        if not torch.is_grad_enabled():
            return (*_backward(ctx, grad_y), None, None, None)
        return (*without_derivative(partial(_backward, ctx, grad_y), _NO_SECOND), None, None, None)


_apply_eagerly = eager_apply(PrunedAffineFunction)


def pruned_affine(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, blocks: BlockSetting) -> Tensor:
    """Return ``scaled(x, weight, bias)``, keeping ``x`` pruned at a sparsity of ``parts``, above 0, for backward.

    Args:
        x: ``[..., L]``, floating point.
        weight: ``L`` values, in any number of dimensions of size 1 before.
        bias: The same, or ``None``.
        parts: The sparsity (see ``ops.geometry``).
        blocks: How ``x`` is cut into blocks and stored.
    """
    eager = library.in_plain_eager_mode(x)
    apply = _apply_eagerly if eager else PrunedAffineFunction.apply
    y: Tensor = apply(x, weight, bias, parts, blocks, eager)
    return y


def scaled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x * weight + bias`` as the dense layers compute it."""
    return x * weight if bias is None else torch.addcmul(bias, weight, x)


def input_rows(x: Tensor) -> Tensor:
    """Return ``x [..., L]`` with its features side by side: a copy if they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _pack(rows: Tensor, setting: Setting, eager: bool) -> Shared:
    """Return what is kept of an input whose features lie side by side."""
    blocks = setting.blocks
    plan = input_plan(rows, setting) if eager else None
    if plan is not None:
        with on_device_of(rows):
            packed = plan.launch(rows.contiguous() if plan.copied else rows)
        return Shared(packed, plan.shape, False, plan.block)
    stored, _ = stored_view(rows, blocks.block_size, blocks.scope)
    block, keep = block_and_keep(stored, blocks.block_size, setting.parts, blocks.value_format)
    packed = library.pack(stored, block, keep, blocks.value_format, blocks.block_selection, eager)
    return Shared(packed, stored_shape(rows, False), False, block)


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    values, bitmap, offsets, weight = kept = ctx.saved_tensors
    needs_x, _, needs_bias, *_ = ctx.needs_input_grad  # what needs no gradient of the weight is not packed
    eager = library.in_plain_eager_mode(grad_y)
    found = gradients(ctx.layout, grad_y, kept, needs_bias) if eager else None
    if found is not None:
        return found
    shape, dtype, rows, _, block, value_format, of_weight, of_bias = ctx.layout
    operator = affine_grad if eager else torch.ops.actprune.affine_grad
    factors = weight if weight is None or weight.dim() == 1 else weight.reshape(-1)
    given = grad_y.reshape(rows), values, bitmap, offsets, factors
    grad_x, sums = operator(*given, dtype, block, value_format, needs_bias)
    grad_b = _of_parameter(sums[1], *of_bias) if needs_bias else None
    return grad_x.view(shape) if needs_x else None, _of_parameter(sums[0], *of_weight), grad_b


def _of_parameter(total: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the gradient ``[L]`` of a parameter as that has it."""
    return as_dtype(total if len(shape) == 1 else total.view(shape), dtype)
