"""How the kernel computes the gradients of one affine layer: worked out once per layout, as in ``ops.plan``.

The result of one look-up allocates each gradient as the layer has it, and launches. What backward is given only decides
which: how the gradient's rows lie, and where tensors begin, if not all at multiples of 16 bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_actprune.ops.affine_grad import takes
from lightning_actprune.ops.dispatch import Backend, forced_backend, on_device_of

Parameter = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a parameter."""


class Layout(NamedTuple):
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
Plan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Gradients]
"""Returns the gradients for ``grad_y``, values, bitmap, offsets and the weight, or any tensor in its place."""


def gradients(
    layout: Layout, grad_y: Tensor, kept: tuple[Tensor, Tensor, Tensor, Tensor | None], needs_bias: bool
) -> Gradients | None:
    """Return the gradients of input, weight and bias, or ``None`` if they are not for the kernel to compute.

    Args:
        layout: That of the layer and its input.
        grad_y: Of the shape of the output.
        kept: Values, bitmap, offsets, and the weight if a gradient of the input is wanted.
        needs_bias: Whether one of the bias is.
    """
    *packed, weight = kept
    if not grad_y.is_cuda and forced_backend() is None:
        return None  # and no address is asked for, which not every device has
    rows, stride = grad_y, layout.rows[1]
    if not grad_y.is_contiguous():
        rows = grad_y.reshape(layout.rows)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        stride = rows.stride(0)
    given = rows, *packed, rows if weight is None else weight.contiguous()
    places = tuple([tensor.data_ptr() & 15 for tensor in given])
    plan = _plan(layout, stride, rows.dtype, rows.device, weight is not None, needs_bias, places, forced_backend())
    return None if plan is None else plan(*given)


@functools.lru_cache(maxsize=1024)
def _plan(
    layout: Layout,
    stride: int,
    dtype: torch.dtype,
    device: torch.device,
    needs_x: bool,
    needs_bias: bool,
    places: tuple[int, ...],
    forced: Backend | None,
) -> Plan | None:
    """Return the plan; ``places`` and ``forced`` are there because of the compiled kernels and the choice of them."""
    if not takes(layout.rows, dtype, device, layout.block_size):
        return None
    from lightning_actprune.kernels import affine as kernels

    flags, stored = (needs_x, 1 + needs_bias), (layout.block_size, layout.value_format)
    key = layout.dtype, dtype, layout.weight, layout.bias, tuple([place == 0 for place in places])
    launch = kernels.grad_launch(key, layout.rows, stride, layout.stored, flags, *stored, device)
    new_weight, new_x = _maker(*layout.weight, device), _maker(layout.shape, layout.dtype, device)
    new_bias = _maker(*layout.bias, device) if needs_bias and layout.bias is not None else None

    def run(*given: Tensor) -> Gradients:
        grad_w, grad_b = new_weight(), None if new_bias is None else new_bias()
        grad_x = new_x() if needs_x else None
        with on_device_of(grad_w):
            sums = (grad_w,) if grad_b is None else (grad_w, grad_b)
            launch(given, grad_w if grad_x is None else grad_x, sums)
        return grad_x, grad_w, grad_b

    return run


def _maker(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that allocates a contiguous tensor; asked for strides, torch takes half the time."""
    strides = torch.empty(shape, device="meta").stride()
    return functools.partial(torch.empty_strided, tuple(shape), strides, dtype=dtype, device=device)
