"""How the kernel computes the gradients of one affine layer: worked out once per layout, as in ``ops.plan``.

The result of one look-up allocates each gradient as the layer has it, and launches. Where tensors begin decides which
compiled kernels take them; that is asked last, of tensors that kernels take: not every device has addresses.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_actprune.ops.dispatch import Backend, forced_backend, on_device_of
from lightning_actprune.ops.norm_plan import maker
from lightning_actprune.ops.normalize import takes

Parameter = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a parameter."""


class AffineLayout(NamedTuple):
    """What backward has to know of forward, besides tensors.

    Args:
        shape: Of the input.
        dtype: Its type.
        rows: ``(R, L)``.
        stored: Samples, words and offsets of a sample, stored blocks of all.
        block_size: Values per block, cut to a row.
        value_format: How they are stored.
        weight: Shape and type.
        bias: The same, ``None`` without one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: tuple[int, int]
    stored: tuple[int, int, int, int]
    block_size: int
    value_format: str
    weight: Parameter
    bias: Parameter | None


Gradients = tuple[Tensor | None, Tensor, Tensor | None]


def gradients(
    layout: AffineLayout, grad_y: Tensor, kept: tuple[Tensor, Tensor, Tensor, Tensor | None], needs_bias: bool
) -> Gradients | None:
    """Return the gradients of input, weight and bias, or ``None`` if they are not for the kernel to compute.

    Args:
        layout: That of the layer and its input.
        grad_y: Of the shape of the output.
        kept: Values, bitmap, offsets, and the weight if a gradient of the input is wanted.
        needs_bias: Whether one of the bias is.
    """
    *packed, weight = kept
    rows, stride = grad_y, layout.rows[1]
    if not grad_y.is_contiguous():
        rows = grad_y.reshape(layout.rows)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        stride = rows.stride(0)
    plan = _plan(layout, stride, rows.dtype, rows.device, weight is not None, needs_bias, forced_backend())
    return None if plan is None else plan((rows, *packed, rows if weight is None else weight.contiguous()))


class _Plan:
    """What backward does with gradients of one layout; arguments: those of ``_plan``."""

    def __init__(
        self,
        layout: AffineLayout,
        stride: int,
        dtype: torch.dtype,
        device: torch.device,
        needs_x: bool,
        needs_bias: bool,
    ) -> None:
        from lightning_actprune.kernels import affine as kernels

        stored, flags = (layout.block_size, layout.value_format), (needs_x, 1 + needs_bias)
        arguments = layout.rows, stride, layout.stored, flags, *stored, device
        types = layout.dtype, dtype, layout.weight, layout.bias
        self._kernels, self._types, self._arguments = kernels, types, arguments
        self._launch = kernels.grad_launch((types, True), *arguments)
        self._new_x = maker(layout.shape, layout.dtype, device) if needs_x else None
        self._new_weight = maker(*layout.weight, device)
        self._new_bias = maker(*layout.bias, device) if needs_bias and layout.bias is not None else None

    def __call__(self, given: tuple[Tensor, ...]) -> Gradients:
        """Return the gradients for ``grad_y``, values, bitmap, offsets and the weight, or any tensor in its place."""
        first, second, third, fourth, fifth = [tensor.data_ptr() for tensor in given]
        launch = self._launch
        if (first | second | third | fourth | fifth) & 15:
            aligned = tuple([tensor.data_ptr() % 16 == 0 for tensor in given])
            launch = self._kernels.grad_launch((self._types, aligned), *self._arguments)
        grad_x = None if self._new_x is None else self._new_x()
        grad_w, grad_b = self._new_weight(), None if self._new_bias is None else self._new_bias()
        sums = (grad_w,) if grad_b is None else (grad_w, grad_b)
        with on_device_of(grad_w):
            launch(given, grad_w if grad_x is None else grad_x, sums)
        return grad_x, grad_w, grad_b


@functools.lru_cache(maxsize=1024)
def _plan(
    layout: AffineLayout,
    stride: int,
    dtype: torch.dtype,
    device: torch.device,
    needs_x: bool,
    needs_bias: bool,
    forced: Backend | None,
) -> _Plan | None:
    """Return the plan; ``forced`` is there because the choice depends on it."""
    if not takes(layout.rows, dtype, device, layout.block_size):
        return None
    return _Plan(layout, stride, dtype, device, needs_x, needs_bias)
