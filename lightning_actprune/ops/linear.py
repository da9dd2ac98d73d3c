r"""Autograd of a linear layer whose saved input is block-pruned.

With ``x [R, IN]``, ``W [OUT, IN]``, ``g = dL/dy`` and ``x_hat`` the pruned input::

    y  = x W^T + b            exact, dense
    dx = g W                  exact: needs no activation
    db = sum_r g[r]           exact
    dW = g^T x_hat            the only approximation

Saved for backward: the packed input, and the weight as it is if ``dx`` is needed; never ``x`` and never the autocast
copy of the weight (one cast in backward is cheaper than keeping both). Several layers that read one tensor save the
same packed input (``ops.sharing``), and behind a norm that stores its output in few bits nothing is packed at all
(``ops.derived``).

Method: Barley & Fröning, "Compressing the Backward Pass of Large-Scale Neural Architectures by Structured Activation
Pruning", arXiv:2311.16883.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_actprune.ops import derived, library, sharing
from lightning_actprune.ops.autocast import as_dtype, autocast_dtype, cast, cast_input
from lightning_actprune.ops.dispatch import choose_backend, on_device_of
from lightning_actprune.ops.geometry import block_and_keep, stored_shape, stored_view
from lightning_actprune.ops.plan import Setting, input_plan
from lightning_actprune.ops.second_derivative import without_derivative
from lightning_actprune.ops.setting import BlockSetting
from lightning_actprune.ops.sharing import Shared
from lightning_actprune.ops.unseen import eager_apply
from lightning_actprune.ops.weight_grad import dense_weight_grad

WeightGradOf = Callable[[Tensor], Tensor]
"""Returns a weight gradient, given an input."""
_NO_SECOND = (
    "Second derivatives through a linear layer with pruned activations are not defined: the dropped blocks are no "
    "longer there. HINT: exclude the layer from pruning (`exclude=[...]`), or set its sparsity to 0, where you need "
    "create_graph=True."
)


class PrunedLinearFunction(torch.autograd.Function):
    """``F.linear`` whose weight gradient comes from a block-pruned input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        parts: int,
        blocks: BlockSetting,
        eager: bool,
        derives: bool,
    ) -> Tensor:
        """Compute the exact output and pack the input at a sparsity of ``parts`` (see ``ops.geometry``)."""
        if eager:
            ctx.set_materialize_grads(False)  # see `backward`
        ctx.x_shape, ctx.x_dtype, ctx.weight_dtype = x.shape, x.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        autocast = autocast_dtype(x)
        parameters = weight, bias
        if autocast is not None:
            parameters = cast(weight, autocast), None if bias is None else cast(bias, autocast)
        kept_weight = weight if ctx.needs_input_grad[0] else None
        found = derived.find(x, parts, blocks, autocast or x.dtype) if eager and derives else None
        if found is not None:
            kept, ctx.layout = found
            ctx.save_for_backward(kept_weight, *kept)
            rows = _rows_of(x, autocast)
            return _dense(rows, rows, *parameters)
        ctx.layout = None
        ctx.samples_second = blocks.scope == "sample_second"
        y, shared = _dense_and_share(x, parameters, Setting(parts, autocast, blocks), eager)
        ctx.transposed, ctx.stored_shape, ctx.block = shared.transposed, shared.shape, shared.block
        ctx.value_format = blocks.value_format
        ctx.save_for_backward(kept_weight, *shared.packed)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return exact input and bias gradients and the pruned weight gradient."""
        if grad_y is None:  # of an output on which nothing depends; torch's own layers leave gradients alone too
            return (None,) * 7
        if not torch.is_grad_enabled():
            return (*_backward(ctx, grad_y), None, None, None, None)
        return (*without_derivative(partial(_backward, ctx, grad_y), _NO_SECOND), None, None, None, None)


_apply_eagerly = eager_apply(PrunedLinearFunction)


def pruned_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, blocks: BlockSetting, derives: bool = False
) -> Tensor:
    """Return ``F.linear(x, weight, bias)``, keeping ``x`` pruned at a sparsity of ``parts`` for backward.

    ``derives``: whether ``x`` may be made again from what the layer before keeps, and from that layer's parameters.
    """
    eager = library.in_plain_eager_mode(x)
    apply = _apply_eagerly if eager else PrunedLinearFunction.apply
    y: Tensor = apply(x, weight, bias, parts, blocks, eager, derives)
    return y


def weight_grad_of(grad_y: Tensor, blocks: BlockSetting, shape: tuple[int, int, int], transposed: bool) -> WeightGradOf:
    """Return what computes the weight gradient of an input, or of what is kept of it, as backward does.

    ``grad_y``: gradient of the output, inside attention ``[T, N, OUT]``; ``shape``, ``transposed``: of the input as
    stored. The function takes that as ``[batch * rows, length]``, and returns fp32, or fp64 of fp64.
    """
    rows = _flat(grad_y.transpose(0, 1) if blocks.scope == "sample_second" else grad_y)
    dtype = torch.promote_types(grad_y.dtype, torch.float32)

    def weight_grad(stored: Tensor) -> Tensor:
        if transposed:  # [rows, batch * length] is read as the columns of [R, IN]
            stored = stored.reshape(shape).transpose(0, 1).reshape(shape[1], -1).t()
        return dense_weight_grad(rows, stored, dtype)

    return weight_grad


def _dense_and_share(
    x: Tensor, parameters: tuple[Tensor, Tensor | None], setting: Setting, eager: bool
) -> tuple[Tensor, Shared]:
    """Return ``F.linear(x, *parameters)`` and what is kept of ``x``, by an earlier layer perhaps."""
    key = sharing.key_of(x, setting) if eager else None
    if key is None:
        return _dense_and_pack(x, parameters, setting, eager)
    shared = sharing.find(x, key)
    if shared is not None:
        rows = cast_input(x, setting.autocast, setting.blocks.block_size)
        return _dense(rows, rows, *parameters), shared
    y, shared = _dense_and_pack(x, parameters, setting, eager)
    sharing.remember(x, key, shared)
    return y, shared


def _rows_of(x: Tensor, autocast: torch.dtype | None) -> Tensor:
    """Return ``x`` as autocast casts it; a cast that the product would turn in memory is made turned at once."""
    if autocast is None or x.dtype == autocast:
        return x
    return x.to(dtype=autocast, memory_format=torch.contiguous_format)


def _dense_and_pack(
    x: Tensor, parameters: tuple[Tensor, Tensor | None], setting: Setting, eager: bool
) -> tuple[Tensor, Shared]:
    """Return ``F.linear(x, *parameters)``, whose parameters are cast already, and what is kept of ``x``."""
    blocks = setting.blocks
    plan = input_plan(x, setting) if eager else None
    if plan is not None and plan.new_cast is not None:
        rows = plan.new_cast()
        with on_device_of(x):
            packed = plan.launch(x, rows)
        return _dense(rows, rows, *parameters), Shared(packed, plan.shape, plan.transposed, plan.block)
    x = cast_input(x, setting.autocast, blocks.block_size)
    if plan is not None:
        rows = x.contiguous() if plan.copied else x
        y = _dense(x, rows, *parameters)
        with on_device_of(rows):
            return y, Shared(plan.launch(rows), plan.shape, plan.transposed, plan.block)
    stored, transposed = stored_view(x, blocks.block_size, blocks.scope)
    # Blocks along the features of a transposed view are packed from the copy that the product needs too.
    y = _dense(x, x if transposed or blocks.scope == "sample_second" else stored, *parameters)
    block, keep = block_and_keep(stored, blocks.block_size, setting.parts, blocks.value_format)
    packed = library.pack(stored, block, keep, blocks.value_format, blocks.block_selection, eager)
    return y, Shared(packed, stored_shape(x, transposed), transposed, block)


def _dense(x: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``F.linear(x, weight, bias)``, of a transposed ``x`` by one product over ``rows``, or over a copy of them.

    That is what ``F.linear`` does when gradients are recorded. Inside a function they are not, and it would multiply
    sample by sample: 198 us where copy and product take 105 (token mixing of ResMLP-S12, 128 images, H200).
    """
    if x.stride()[-1] == 1 or x.dim() < 3:
        return F.linear(x, weight, bias)
    y = F.linear(rows.reshape(-1, x.shape[-1]), weight, bias)
    # Of a view that a function returns, autograd lets nobody write to it.
    made: Tensor = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], weight.shape[0]))
    return made


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    weight, *kept = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    eager = library.in_plain_eager_mode(grad_y)
    grad_x = grad_w = grad_b = None
    flat = _flat(grad_y)
    if needs_x:
        weight = as_dtype(weight, flat.dtype)
        # The same product: `matmul` flattens a contiguous gradient itself, in less time than a view takes from here.
        whole = grad_y.is_contiguous()
        grad_x = torch.matmul(grad_y, weight) if whole else torch.mm(flat, weight).view(*ctx.x_shape)
        grad_x = as_dtype(grad_x, ctx.x_dtype)
    if ctx.layout is not None:
        return grad_x, *_derived_gradients(ctx, grad_y, flat, kept, eager)
    if needs_weight:
        rows = _flat(grad_y.transpose(0, 1)) if ctx.samples_second else flat  # in the order of the packed samples
        shared = Shared(tuple(kept), ctx.stored_shape, ctx.transposed, ctx.block)
        grad_w = library.weight_grad(rows, shared, ctx.weight_dtype, ctx.value_format, eager)
    if needs_bias:
        grad_b = _column_sums(flat, ctx.bias_dtype, eager)
    return grad_x, grad_w, grad_b


def _derived_gradients(
    ctx: Any, grad_y: Tensor, flat: Tensor, kept: derived.Kept, eager: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weight and bias where the layer before keeps the input."""
    layout: derived.DerivedLayout = ctx.layout
    _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    needs_sums = needs_weight and kept[2] is not None and layout.order != "turned"
    dtype = torch.float32 if needs_sums else ctx.bias_dtype
    sums = _column_sums(flat, dtype, eager) if needs_sums or needs_bias else None
    grad_w = None
    if needs_weight:
        rows = _flat(grad_y.transpose(0, 1)) if layout.order == "samples_second" else flat
        grad_w = derived.weight_grad(rows, sums, kept, layout, ctx.weight_dtype, eager)
    return grad_w, as_dtype(sums, ctx.bias_dtype) if needs_bias and sums is not None else None


def _flat(grad_y: Tensor) -> Tensor:
    """Return ``grad_y [..., OUT]`` as ``[R, OUT]`` without turning it in memory.

    A transposed gradient (token mixing) has to be copied, but keeps its innermost dimension: on an H200, 9.6 million
    16-bit values take 23 us so and 55 turned, and their sum for the bias 7 us instead of 53.
    """
    if grad_y.dim() == 2:
        return grad_y
    if grad_y.dim() == 3 and grad_y.stride(1) == 1 and grad_y.stride(2) != 1:
        return grad_y.permute(2, 0, 1).reshape(grad_y.shape[2], -1).t()
    return grad_y.reshape(-1, grad_y.shape[-1])


def _column_sums(flat: Tensor, dtype: torch.dtype, eager: bool) -> Tensor:
    """Return the sum over the rows of ``flat [R, OUT]``: a compiler makes its own, and torch reads columns fastest."""
    kernel = eager and flat.stride(1) == 1 and flat.numel() > 0
    if kernel and choose_backend(flat.shape, flat.dtype, flat.device, 1, 1) == "triton":
        from lightning_actprune.kernels.column_sums import column_sums

        with on_device_of(flat):
            return column_sums(flat, dtype)
    return flat.sum(0, dtype=dtype)
