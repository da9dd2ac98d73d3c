"""The operators ``torch.ops.actprune.activate`` and ``activation_grad``: kernels or reference, in the order of memory.

==================  ==================================================================================================
``activate``        ``x`` -> ``y``, laid out as torch lays it out, and what is kept of the derivative
``activation_grad`` ``g`` and what was kept -> ``dx``, laid out as ``y`` was
==================  ==================================================================================================

Opaque to the compiler, as those of ``ops.library``, so that a partitioner saves the codes. A dense tensor is read in
the order of its memory, whatever that is; one with gaps or overlaps is copied first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_actprune.ops import activations
from lightning_actprune.ops.activations import ACTIVATIONS, Kept, KeptMask
from lightning_actprune.ops.dispatch import choose_backend, on_device_of

_library = torch.library.Library("actprune", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_library.define(
    "activate(Tensor x, str function, float[] parameters, str value_format, ScalarType dtype) -> (Tensor y, Tensor "
    "codes)",
    tags=_TAGS,
)
_library.define(
    "activation_grad(Tensor grad, Tensor codes, SymInt[] strides, str function, float[] parameters, "
    "str value_format, ScalarType dtype) -> Tensor",
    tags=_TAGS,
)


def activate(x: Tensor, kept: Kept, dtype: torch.dtype, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """Return ``f(x)`` and what is kept of its derivative.

    Args:
        x: Floating tensor of any layout.
        kept: The function, and how its derivative is stored.
        dtype: Of ``f(x)``; that of ``x``, or a wider one.
        in_place: Write ``f(x)`` to ``x``, which is dense then.
    """
    y = x if in_place else torch.empty_like(x, dtype=dtype)
    if y.stride() != x.stride():  # not dense: the copy is
        x = torch.empty_like(x).copy_(x)
    codes = x.new_empty(kept.stored_bytes(x.numel()), dtype=torch.uint8)
    if not x.numel():
        return y, codes
    if choose_backend(x.shape, x.dtype, x.device, activations.ROW, 1) == "triton":
        from lightning_actprune.kernels import activations as kernels

        with on_device_of(x):
            kernels.activate(x, y, codes, kept)
        return y, codes
    flat = in_memory(x)
    codes = activations.encode(flat, kept)  # before `y` overwrites it
    y.copy_(ACTIVATIONS[kept.function].forward(x.to(dtype), *kept.parameters))
    return y, codes


def activation_grad(
    grad: Tensor, codes: Tensor, strides: Sequence[int], kept: Kept | KeptMask, dtype: torch.dtype
) -> Tensor:
    """Return ``dx`` in ``dtype`` from ``g``, which may have any layout, and what ``activate`` kept of ``x``.

    ``strides`` are those of the ``y`` of ``activate``.
    """
    if grad.stride() != strides:
        grad = torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device).copy_(grad)
    out = torch.empty_strided(grad.shape, strides, dtype=dtype, device=grad.device)
    if not grad.numel():
        return out
    if choose_backend(grad.shape, dtype, grad.device, activations.ROW, 1) == "triton":
        from lightning_actprune.kernels import activations as kernels

        with on_device_of(grad):
            kernels.activation_grad(grad, codes, out, kept)
        return out
    in_memory(out).copy_(activations.multiply(in_memory(grad), codes, kept, dtype))
    return out


def pack_mask(mask: Tensor) -> Tensor:
    """Return what is kept of a dense bool ``mask``: a bit a value, in the order of memory."""
    flat = in_memory(mask)
    if not len(flat) or choose_backend(mask.shape, torch.float32, mask.device, activations.ROW, 1) != "triton":
        return activations.encode_mask(flat)
    from lightning_actprune.kernels import activations as kernels

    with on_device_of(mask):
        return kernels.pack_mask(flat.view(torch.uint8))


def in_memory(x: Tensor) -> Tensor:
    """Return the values of a dense ``x`` as ``[N]``, in the order of memory."""
    return x.as_strided((x.numel(),), (1,))


def _activate(
    x: Tensor, function: str, parameters: Sequence[float], value_format: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return activate(x, Kept(function, tuple(parameters), value_format), dtype)


def _activation_grad(
    grad: Tensor,
    codes: Tensor,
    strides: Sequence[int],
    function: str,
    parameters: Sequence[float],
    value_format: str,
    dtype: torch.dtype,
) -> Tensor:
    return activation_grad(grad, codes, tuple(strides), Kept(function, tuple(parameters), value_format), dtype)


_library.impl("activate", _activate, "CompositeExplicitAutograd")
_library.impl("activation_grad", _activation_grad, "CompositeExplicitAutograd")


@torch.library.register_fake("actprune::activate", lib=_library)
def _activate_fake(
    x: Tensor, function: str, parameters: Sequence[float], value_format: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    kept = Kept(function, tuple(parameters), value_format)
    return torch.empty_like(x, dtype=dtype), x.new_empty(kept.stored_bytes(x.numel()), dtype=torch.uint8)


@torch.library.register_fake("actprune::activation_grad", lib=_library)
def _activation_grad_fake(
    grad: Tensor,
    codes: Tensor,
    strides: Sequence[int],
    function: str,
    parameters: Sequence[float],
    value_format: str,
    dtype: torch.dtype,
) -> Tensor:
    return torch.empty_strided(grad.shape, strides, dtype=dtype, device=grad.device)
