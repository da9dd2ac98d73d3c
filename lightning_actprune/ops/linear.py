r"""Autograd of a linear layer whose saved input is block-pruned.

With ``x [R, IN]``, ``W [OUT, IN]``, ``g = dL/dy`` and ``x_hat`` the pruned input::

    y  = x W^T + b            exact, dense
    dx = g W                  exact: needs no activation
    db = sum_r g[r]           exact
    dW = g^T x_hat            the only approximation

Saved for backward: the packed input, and the weight as it is if ``dx`` is needed; never ``x`` and never the autocast
copy of the weight (one cast in backward is cheaper than keeping both).

Method: Barley & Fröning, "Compressing the Backward Pass of Large-Scale Neural Architectures by Structured Activation
Pruning", arXiv:2311.16883.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from lightning_actprune.arguments import Scope
from lightning_actprune.ops import library
from lightning_actprune.ops.dispatch import has_fp32_product
from lightning_actprune.ops.geometry import along_tokens, block_and_keep, stored_view


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype of the active autocast for a type of device, ``None`` without one."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which ``F.linear`` would compute, and save, ``x``."""
    return (autocast_dtype(x.device.type) or x.dtype) if x.dtype != torch.float64 else x.dtype


def _cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Cast as autocast to ``dtype`` does: not fp64, and nothing if it is off (then mixed types are an error)."""
    return x if dtype is None or x.dtype == torch.float64 else x.to(dtype)


def _cast_input(x: Tensor, dtype: torch.dtype | None, block_size: int) -> Tensor:
    """Cast as ``_cast``; what has to be copied along its features anyway is so already."""
    cast = dtype is not None and x.dtype not in (dtype, torch.float64)
    if cast and x.dim() == 3 and x.stride(-1) != 1 and not along_tokens(x, block_size):
        return x.to(dtype, memory_format=torch.contiguous_format)
    return _cast(x, dtype)


class PrunedLinearFunction(torch.autograd.Function):
    """``F.linear`` whose weight gradient comes from a block-pruned input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, block_size: int, scope: Scope
    ) -> Tensor:
        """Compute the exact output and pack the input at a sparsity of ``parts`` (see ``ops.geometry``)."""
        ctx.x_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        dtype = autocast_dtype(x.device.type)
        x = _cast_input(x, dtype, block_size)
        stored, ctx.transposed = stored_view(x, block_size, scope)
        # Blocks along the features of a transposed view are packed from the copy that the product needs too.
        rows = x if ctx.transposed else stored
        y = _dense(x, rows, _cast(weight, dtype), None if bias is None else _cast(bias, dtype))
        packed = library.pack(stored, *block_and_keep(stored, block_size, parts))
        ctx.stored_shape = _stored_shape(x, ctx.transposed)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, *packed)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        """Return exact input and bias gradients and the pruned weight gradient."""
        grads = _backward(ctx, grad_y)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            # Its own leaf, since neither the gradient nor `grad_y` need require one: d(sum y) has a constant `grad_y`.
            leaf = torch.zeros((), requires_grad=True)
            grads = tuple(None if g is None else _RefuseSecondDerivative.apply(g, leaf) for g in grads)
        return (*grads, None, None, None)


def _dense(x: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``F.linear(x, weight, bias)``, of a transposed ``x`` by one product over ``rows``, or over a copy of them.

    That is what ``F.linear`` does when gradients are recorded. Inside a function they are not, and it would multiply
    sample by sample: 198 us where copy and product take 105 (token mixing of ResMLP-S12, 128 images, H200).
    """
    if x.dim() < 3 or x.stride(-1) == 1:
        return F.linear(x, weight, bias)
    return F.linear(rows.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.shape[0])


def _stored_shape(x: Tensor, transposed: bool) -> tuple[int, int, int]:
    """Return ``[batch, rows, length]`` of the stored layout, whatever the scope in which blocks compete."""
    features = x.shape[-1]
    if not transposed:
        return 1, x.numel() // max(features, 1), features
    return x.shape[0], features, x.shape[1:-1].numel()


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    weight, *packed = ctx.saved_tensors
    grad_x = grad_w = grad_b = None
    with torch.no_grad():
        flat = _flat(grad_y)
        if ctx.needs_input_grad[0]:
            grad_x = (flat @ weight.to(flat.dtype)).view(*grad_y.shape[:-1], weight.shape[1]).to(ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            grad_w = library.weight_grad(flat, tuple(packed), ctx.stored_shape, ctx.transposed, ctx.weight_dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_b = _column_sums(flat, ctx.bias_dtype)
    return grad_x, grad_w, grad_b


def _flat(grad_y: Tensor) -> Tensor:
    """Return ``grad_y [..., OUT]`` as ``[R, OUT]`` without turning it in memory.

    A transposed gradient (token mixing) has to be copied, but keeps its innermost dimension: on an H200, 9.6 million
    16-bit values take 23 us so and 55 turned, and their sum for the bias 7 us instead of 53.
    """
    if grad_y.dim() == 3 and grad_y.stride(1) == 1 and grad_y.stride(2) != 1:
        return grad_y.permute(2, 0, 1).reshape(grad_y.shape[2], -1).t()
    return grad_y.reshape(-1, grad_y.shape[-1])


def _column_sums(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum over the rows of ``flat [R, OUT]``.

    On GPUs 16-bit rows are summed by a product with ones, in fp32 as well: 24 us instead of 40 for 38.5 million values.
    """
    if flat.stride(1) == 1 and has_fp32_product(flat) and library.in_plain_eager_mode(flat):
        # Nothing made while a graph is captured may outlive it.
        make = _ones.__wrapped__ if torch.cuda.is_current_stream_capturing() else _ones
        ones = make(flat.shape[0], flat.dtype, flat.device, torch.cuda.current_stream(flat.device).cuda_stream)
        return torch.mm(ones, flat, out_dtype=torch.float32)[0].to(dtype)
    return flat.sum(0, dtype=dtype)


@functools.lru_cache(maxsize=32)
def _ones(rows: int, dtype: torch.dtype, device: torch.device, stream: int) -> Tensor:
    """Return a row of ones, for use on one stream: another would not wait until it is filled."""
    return torch.ones(1, rows, dtype=dtype, device=device)


class _RefuseSecondDerivative(torch.autograd.Function):
    """Identity whose derivative is an error: the dropped blocks are gone, so a second derivative would be wrong."""

    @staticmethod
    def forward(ctx: FunctionCtx, grad: Tensor, leaf: Tensor) -> Tensor:
        return grad.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "Second derivatives through a linear layer with pruned activations are not defined: the dropped blocks "
            "are no longer there. HINT: exclude the layer from pruning (`exclude=[...]`), or set its sparsity to 0, "
            "where you need create_graph=True."
        )
