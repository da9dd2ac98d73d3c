r"""The last linear layer of a language model and its loss, together, so that the logits are never there all at once.

With rows ``x_i`` of D hidden states, a weight ``W`` with a row for each of V classes and the label ``t_i``::

    z_i = W x_i + b                                                 the logits
    l_i = log sum_v exp(z_iv) - (1 - s) z_it - s mean_v z_iv        with s the label smoothing
    d_i = softmax(z_i) - (1 - s) onehot(t_i) - s / V                the gradient of l_i for z_i
    dx_i = c_i W^T d_i,  dW = sum_i c_i d_i x_i^T,  db = sum_i c_i d_i

where ``c_i`` is the gradient of the loss for ``l_i``, and 0 where the label is ``ignore_index``. Dense, the logits in
fp32, the log-probabilities and the gradients of both take 4 V bytes a row each, where ``x_i`` takes 2 D in 16 bits.
Here those of a chunk of rows are there alone, ``CHUNK_VALUES`` values.

**Sum and mean.** Then ``c_i = c`` is one number for all rows, and nothing but a factor is missing when the forward has
the logits of a chunk. So the forward computes the gradients too, without ``c``, and backward multiplies them by it.
That takes the three products of the dense layer, once each. Between forward and backward, ``sum_i d_i x_i^T`` is kept
in fp32 and ``W^T d_i`` in the type of the products, in place of ``x``, logits and log-probabilities. The former adds
nothing to what a dense step needs next, since its backward begins with making it. ``1 / N`` of the mean and what a loss
scaler multiplies by are part of ``c``: ``d_i`` in fp16 is as large as it can be.

**Each row by itself** (``reduction="none"``). ``dW`` cannot be summed before the ``c_i`` are known. ``x``, ``W`` and
the labels are kept, most of which are there anyway, and backward computes the logits of each chunk again: four products
in place of three.

**Types.** The products run in the type of ``x``, or in that of autocast; exponentials, losses and ``dW`` are in fp32
(in fp64 for fp64). ``d_i`` is rounded to the type of the products, as it is where dense code casts logits to fp32.
``dW`` is added up over the chunks in fp32, by the product itself on NVIDIA GPUs in eager mode. Elsewhere what a chunk
adds is rounded to 16 bits first, and must not exceed 65504 in fp16.

**torch.nn.functional.linear_cross_entropy** of newer versions of torch is not used. Without its ``options`` it holds
all logits; with them it runs in chunks, and was measured to hold no more than those of one. But of torch 2.14: its
products stay in fp32 under autocast; it adds ``dW`` up in bf16, which after eight chunks has three times the error of
the dense layer; its loss is in bf16; with label smoothing it holds all logits; where all labels are ignored, its
gradients are nan in place of 0; its backward may run once; and saved-tensor hooks, hence memory monitors, do not see
what it keeps.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_actprune.codec.autograd import applied, is_watched, once_differentiable
from lightning_actprune.codec.dispatch import as_dtype, compute_dtype, has_fp32_product
from lightning_actprune.codec.private import keeps_graph

Reduction: TypeAlias = Literal["mean", "sum", "none"]

CHUNK_VALUES = 2**25
"""Logits of a chunk, at most: 128 MiB in fp32 and 64 MiB in 16 bits are there at once. A chunk of a GPT-2 is 640 rows,
whose products are large enough to fill a GPU; per chunk, ``dW`` is read and written once."""
_ROWS = 64
"""A chunk of more rows is a multiple of so many, since products of other sizes are slower."""
_HINT = "HINT: compute `F.cross_entropy(F.linear(hidden, weight, bias), target)` where you need create_graph=True."


class _How(NamedTuple):
    """How the loss is computed.

    Args:
        dtype: Of the products.
        ignore_index: The label of rows that do not count.
        smoothing: Label smoothing.
    """

    dtype: torch.dtype
    ignore_index: int
    smoothing: float

    @property
    def wide(self) -> torch.dtype:
        """Type of exponentials and sums."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


class _Found(NamedTuple):
    """Losses of all rows, and the gradients of ``sum_i c_i l_i`` for hidden states, weight and bias; or ``None``."""

    losses: Tensor
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


_Needs: TypeAlias = tuple[bool, bool, bool]
"""Whether hidden states, weight and bias need their gradients."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross entropy of a linear layer's output, of which only a chunk of rows is held at a time.

    Value and gradients are those of ``F.cross_entropy(F.linear(hidden, weight, bias).float(), target)`` up to rounding,
    and autocast decides about types as it does there. The weight may be that of the embedding, too. There are no second
    derivatives. In ``torch.func`` transforms, ``torch.jit.trace`` and ``torch.export`` it is that expression itself.

    Args:
        hidden: Floating tensor ``[..., features]``.
        weight: ``[classes, features]``, of the type of ``hidden`` unless there is an autocast.
        target: Classes in int64, ``[...]`` as in ``hidden``, which may be ``ignore_index``.
        bias: ``[classes]`` or ``None``.
        ignore_index: The label of rows that do not count.
        reduction: ``"mean"`` over the rows that count, ``"sum"``, or ``"none"``. The last one computes the logits again
            in backward.
        label_smoothing: Share of each target that goes to all classes alike, in [0, 1].

    Returns:
        The loss in fp32 (in fp64 for fp64): a scalar, or ``[...]`` without reduction. The mean over no rows is nan.

    Raises:
        TypeError: If a tensor has the wrong type or is a DTensor.
        ValueError: If shapes do not fit, or another argument is out of range.

    Example:
        >>> hidden, head = torch.randn(2, 8, 64), nn.Linear(64, 1000, bias=False)
        >>> linear_cross_entropy(hidden, head.weight, torch.randint(1000, (2, 8))).shape
        torch.Size([])
    """
    if is_watched():
        return _dense(hidden, weight, target, bias, ignore_index, reduction, label_smoothing)
    _check_types(hidden, weight, target, bias)
    _check_shapes(hidden, weight, target, bias)
    _check_settings(reduction, label_smoothing)
    how = _How(compute_dtype(hidden), ignore_index, label_smoothing)
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    needs = tuple(x is not None and x.requires_grad and torch.is_grad_enabled() for x in (hidden, weight, bias))
    if reduction == "none":
        each: Tensor = _each(rows, weight, bias, labels, how, needs)
        return each.reshape(target.shape)
    reduced: Tensor = _reduced(rows, weight, bias, labels, how, needs, reduction == "mean")
    return reduced


def _dense(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    reduction: Reduction,
    label_smoothing: float,
) -> Tensor:
    """Return the loss of logits that are all there."""
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        target.reshape(-1),
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return loss.reshape(target.shape) if reduction == "none" else loss


class ReducedLinearCrossEntropy(torch.autograd.Function):
    """The loss summed or averaged: the gradients are computed in the forward, but for one factor."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        how: _How,
        needs: _Needs,
        mean: bool,
        eager: bool,
    ) -> Tensor:
        """Return the loss, and keep the gradients of its sum."""
        counts = target != how.ignore_index
        found = _in_chunks(hidden, weight, bias, target, how, needs, as_dtype(counts, how.wide), eager)
        number = counts.sum() if mean else None
        loss = found.losses.sum()
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(found.hidden, found.weight, found.bias, number)
        return loss if number is None else loss / number

    @staticmethod
    @once_differentiable("linear_cross_entropy", _HINT)
    def backward(ctx: Any, eager: bool, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that were kept, times that of the loss."""
        *kept, number = ctx.saved_tensors
        # Where no row counts, all of them are 0, as in torch. One dimension, not none: the factor stays in fp32.
        factor = (grad if number is None else grad / number.clamp(min=1)).reshape(1)
        may_write = eager and not keeps_graph()
        return tuple(_scaled(x, factor, dtype, may_write) for x, dtype in zip(kept, ctx.dtypes, strict=True))


class LinearCrossEntropy(torch.autograd.Function):
    """The loss of each row: backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        how: _How,
        needs: _Needs,
        eager: bool,
    ) -> Tensor:
        """Return the losses, and keep what they were computed from."""
        ctx.how, ctx.needs = how, needs
        ctx.save_for_backward(hidden, weight, bias, target)
        return _in_chunks(hidden, weight, bias, target, how, (False, False, False), None, eager).losses

    @staticmethod
    @once_differentiable("linear_cross_entropy", _HINT)
    def backward(ctx: Any, eager: bool, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients for the one of each loss."""
        hidden, weight, bias, target = ctx.saved_tensors
        factors = grad * (target != ctx.how.ignore_index)
        _, *found = _in_chunks(hidden, weight, bias, target, ctx.how, ctx.needs, factors, eager)
        given = hidden, weight, bias
        return tuple(None if x is None else as_dtype(x, like.dtype) for x, like in zip(found, given, strict=True))


_reduced, _each = applied(ReducedLinearCrossEntropy), applied(LinearCrossEntropy)


def _in_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    how: _How,
    needs: _Needs,
    factors: Tensor | None,
    eager: bool,
) -> _Found:
    """Return the losses of all rows, and the gradients needed of their sum with these factors."""
    (count, _), (classes, _) = hidden.shape, weight.shape
    weight, bias = as_dtype(weight, how.dtype), None if bias is None else as_dtype(bias, how.dtype)
    found = _Found(
        hidden.new_empty(count, dtype=how.wide),
        hidden.new_empty(hidden.shape, dtype=how.dtype) if needs[0] else None,
        weight.new_zeros(weight.shape, dtype=how.wide) if needs[1] else None,
        weight.new_zeros(classes, dtype=how.wide) if needs[2] else None,
    )
    if not any(needs):
        factors = None
    size = chunk_rows(classes)
    for start in range(0, count, size):
        part = slice(start, start + size)
        rows, of_part = as_dtype(hidden[part], how.dtype), None if factors is None else factors[part]
        grad = _read_chunk(found.losses[part], F.linear(rows, weight, bias), target[part], of_part, how)
        if grad is not None:
            _add_gradients(found, part, rows, weight, grad, eager)
        del grad  # before the next chunk has its logits
    return found


def chunk_rows(classes: int) -> int:
    """Return how many rows a chunk has."""
    rows = max(CHUNK_VALUES // max(classes, 1), 1)
    return rows - rows % _ROWS or rows


def _read_chunk(losses: Tensor, logits: Tensor, target: Tensor, factors: Tensor | None, how: _How) -> Tensor | None:
    """Write the losses of rows of logits, and return ``c_i d_i`` in the type of the products if there are factors."""
    ignored = (target == how.ignore_index).unsqueeze(1)
    index = target.unsqueeze(1).masked_fill(ignored, 0)
    powers = as_dtype(logits, how.wide)
    del logits
    powers.sub_(powers.amax(1, keepdim=True))
    right = powers.gather(1, index)
    if how.smoothing:
        right = (1 - how.smoothing) * right + how.smoothing * powers.mean(1, keepdim=True)
    sums = powers.exp_().sum(1, keepdim=True)
    losses.copy_((sums.log() - right).masked_fill(ignored, 0.0).squeeze(1))
    if factors is None:
        return None
    factors = factors.unsqueeze(1)
    grad = powers.mul_(factors / sums)
    if how.smoothing:
        grad.sub_(factors * (how.smoothing / grad.shape[1]))
    grad.scatter_add_(1, index, factors * (how.smoothing - 1))
    return as_dtype(grad, how.dtype)


def _add_gradients(found: _Found, part: slice, rows: Tensor, weight: Tensor, grad: Tensor, eager: bool) -> None:
    """Write what a chunk adds to the gradients, ``grad`` being that of its logits."""
    if found.hidden is not None:
        found.hidden[part] = grad @ weight
    if found.bias is not None:
        found.bias.add_(grad.sum(0, dtype=found.bias.dtype))
    if found.weight is None:
        return
    if grad.dtype == found.weight.dtype:
        found.weight.addmm_(grad.t(), rows)
    elif eager and has_fp32_product(grad):
        torch.addmm(found.weight, grad.t(), rows, out_dtype=found.weight.dtype, out=found.weight)
    else:
        found.weight.add_(grad.t() @ rows)


def _scaled(kept: Tensor | None, factor: Tensor, dtype: torch.dtype | None, may_write: bool) -> Tensor | None:
    """Return ``kept`` times ``factor`` in that type, in its own memory if nobody reads it again."""
    if kept is None or dtype is None:
        return None
    if may_write and kept.dtype == dtype:
        return kept.mul_(factor)
    return as_dtype(kept * factor, dtype)


def _check_types(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    given = {"hidden": hidden, "weight": weight, "target": target} | ({} if bias is None else {"bias": bias})
    for name, tensor in given.items():
        if isinstance(tensor, DTensor):
            raise TypeError(
                f"`{name}` must be a plain tensor, got a DTensor. HINT: call this where FSDP has gathered the weight, "
                "in the forward of the module that holds it, or pass `weight.full_tensor()`."
            )
    if target.dtype != torch.int64:
        raise TypeError(
            f"`target` must hold classes in torch.int64, got {target.dtype}. HINT: pass `target.long()`; probabilities "
            "of classes are for F.cross_entropy."
        )
    floating = {name: tensor.dtype for name, tensor in given.items() if name != "target"}
    if not all(dtype.is_floating_point for dtype in floating.values()):
        raise TypeError(f"{_listed(floating)} must be floating-point tensors. HINT: convert them.")
    if len(set(floating.values())) > 1 and len({compute_dtype(given[name]) for name in floating}) > 1:
        raise TypeError(
            f"The types of {_listed(floating)} must be one unless autocast makes them one. HINT: convert them, or "
            "open `torch.autocast`."
        )


def _check_shapes(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    if hidden.dim() == 0 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"`hidden` must be [..., features] and `weight` [classes, features], got {list(hidden.shape)} and "
            f"{list(weight.shape)}. HINT: `weight` is that of an nn.Linear; a sharded one must be gathered first."
        )
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"`target` must have a class for each row of `hidden`, {list(hidden.shape[:-1])}, got "
            f"{list(target.shape)}. HINT: to predict the next token, pass `hidden[:, :-1]` and `tokens[:, 1:]`."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"`bias` must be [classes], {list(weight.shape[:1])}, got {list(bias.shape)}. HINT: pass that of the "
            "nn.Linear whose weight it is."
        )


def _check_settings(reduction: str, label_smoothing: float) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(
            f'`reduction` must be "mean", "sum" or "none", got {reduction!r}. HINT: "mean" is that of F.cross_entropy.'
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"`label_smoothing` must be in [0, 1], got {label_smoothing!r}. HINT: 0 is none.")


def _listed(dtypes: dict[str, torch.dtype]) -> str:
    return ", ".join(f"`{name}` ({dtype})" for name, dtype in dtypes.items())
