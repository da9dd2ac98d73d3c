"""Implementation of ``actprune::unpack`` and ``actprune::weight_grad``.

The weight gradient has two methods. ``gather`` multiplies the kept blocks directly with the matching rows of
``grad_y``: operations fall with the density, but each kept block brings only ``b`` columns of reuse per gathered row.
Its fp32 accumulator is written directly in the weight's dtype. Blocks in few bits are made numbers for the time of the
product, the kept ones alone. ``unpack`` rebuilds the pruned tensor for the time of
one matrix product of the vendor library; it costs the dense product plus one write of the tensor, and in 16 bits it
rounds as the dense layer does, or not at all if the result is wanted in fp32. A transposed layout (blocks along the
reduced dimension) always unpacks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_actprune.ops import formats, reference
from lightning_actprune.ops.cost import fp32_is_exact, gather_is_faster
from lightning_actprune.ops.dispatch import Backend, choose_backend, forced_backend, has_fp32_product, on_device_of
from lightning_actprune.ops.geometry import ceil_div

Method = Literal["gather", "unpack"]
Choice = Method | Literal["reference"]

MAX_GATHER_BLOCK = 256
"""Largest block of the gather kernel, whose accumulator is 128 outputs by one block."""

_forced: Method | None = None


@contextlib.contextmanager
def force_method(method: Method | None) -> Iterator[None]:
    """Compute weight gradients inside by ``method`` wherever it exists; ``None`` restores the cost model."""
    global _forced
    if method not in ("gather", "unpack", None):
        raise ValueError(f'`method` must be "gather", "unpack" or None, got {method!r}.')
    before, _forced = _forced, method
    try:
        yield
    finally:
        _forced = before


def choose_method(grad_y: Tensor, values: Tensor, length: int, transposed: bool, block_size: int) -> Choice:
    """Return how the weight gradient of this packed input is computed: by which kernel, or by the reference."""
    kept = values.shape[0], block_size
    return _choose(grad_y.shape, kept, length, transposed, grad_y.dtype, values.device, *_settings(grad_y.dtype))


def _settings(dtype: torch.dtype) -> tuple[bool, Method | None, Backend | None]:
    """Return what a choice depends on besides the tensors, of which the gradient has this ``dtype``."""
    return dtype != torch.float32 or fp32_is_exact(), _forced, forced_backend()


@functools.lru_cache(maxsize=1024)
def _choose(
    grad_y: tuple[int, int],
    values: tuple[int, int],
    length: int,
    transposed: bool,
    dtype: torch.dtype,
    device: torch.device,
    exact: bool,
    method: Method | None,
    backend: Backend | None,
) -> Choice:
    """Return the choice for shapes and settings; ``backend`` is there because ``choose_backend`` depends on it."""
    if _backend(values, length, dtype, device) == "reference":
        return "reference"
    if transposed or values[1] > MAX_GATHER_BLOCK:
        return "unpack"
    return method or ("gather" if gather_is_faster(grad_y, values, length, dtype.itemsize, exact) else "unpack")


class _Product(NamedTuple):
    """How a weight gradient is computed.

    Args:
        method: By which kernel, or by the reference.
        matrix: Sizes of the unpacked input as the product reads it, or turned.
        launch: Writes it, given what is stored; ``None`` if that is for others to do.
    """

    method: Choice
    matrix: tuple[int, int]
    launch: Callable[..., None] | None


@functools.lru_cache(maxsize=1024)
def _product(
    grad_y: tuple[int, int],
    kept: int,
    positions: tuple[int, int],
    shape: tuple[int, int, int],
    transposed: bool,
    blocks: Blocks,
    dtype: torch.dtype,
    device: torch.device,
    settings: tuple[bool, Method | None, Backend | None],
) -> _Product:
    """Return how the weight gradient of tensors that start at multiples of 16 bytes is computed."""
    batch, rows, length = shape
    # Without positions all blocks are there, which gathering only takes longer to multiply.
    turned = transposed or positions[1] == 0
    method = _choose(grad_y, (kept, blocks.block_size), length, turned, dtype, device, *settings)
    matrix = (rows, batch * length) if transposed else (batch * rows, length)
    if method != "unpack":
        return _Product(method, matrix, None)
    from lightning_actprune.kernels import unpack as kernels

    samples, counted = positions[0] if positions[1] else 0, 0 if blocks.value_format == "same" else kept
    return _Product(method, matrix, kernels.plan(samples, counted, shape, transposed, *blocks, device, (True,) * 3))


class Blocks(NamedTuple):
    """What is read of stored blocks: values per block, how they are stored, and the type that they are read as."""

    block_size: int
    value_format: str
    dtype: torch.dtype


def unpack(
    values: Tensor,
    bitmap: Tensor,
    offsets: Tensor,
    rows: int,
    length: int,
    block_size: int,
    value_format: str,
    dtype: torch.dtype,
) -> Tensor:
    """Return the pruned tensor ``[rows, length]`` in ``dtype``, contiguous."""
    backend = _backend((values.shape[0], block_size), length, dtype, values.device)
    blocks = Blocks(block_size, value_format, dtype)
    return _unpack((values, bitmap, offsets), (1, rows, length), False, backend, blocks)[0]


def _backend(values: Sequence[int], length: int, dtype: torch.dtype, device: torch.device) -> Backend:
    """Return what unpacks values of this shape."""
    kept, block_size = values
    return choose_backend(values, dtype, device, block_size, ceil_div(length, block_size)) if kept else "reference"


def _unpack(
    packed: tuple[Tensor, Tensor, Tensor],
    shape: tuple[int, int, int],
    features_first: bool,
    backend: Backend,
    blocks: Blocks,
) -> Tensor:
    """Return the pruned tensor of ``shape [batch, rows, length]``, or permuted to ``[rows, batch, length]``."""
    values, bitmap, offsets = packed
    batch, rows, length = shape
    if backend == "triton":
        from lightning_actprune.kernels import unpack as kernels

        with on_device_of(values):
            return kernels.unpack(values, bitmap, offsets, shape, features_first, *blocks)
    if blocks.value_format != "same":
        values = formats.dequantize(values, *blocks)
    if bitmap.shape[1] == 0:
        dense = values.view(batch * rows, ceil_div(length, blocks.block_size) * blocks.block_size)[:, :length]
    else:
        dense = reference.unpack(values, bitmap, batch * rows, length)
    dense = dense.reshape(batch, rows, length)
    return (dense.transpose(0, 1) if features_first else dense).contiguous()


def weight_grad(
    grad_y: Tensor,
    values: Tensor,
    bitmap: Tensor,
    offsets: Tensor,
    batch: int,
    rows: int,
    length: int,
    transposed: bool,
    dtype: torch.dtype,
    block_size: int,
    value_format: str = "same",
) -> Tensor:
    """Return ``grad_y^T @ x_hat`` in ``dtype``.

    Args:
        grad_y: ``[R, OUT]``; ``R = batch * rows``, or ``batch * length`` if transposed.
        values: Kept blocks ``[nnz, b]``, or ``[nnz, row_bytes]`` in few bits.
        bitmap: Positions ``[S, W]``.
        offsets: Starts of runs of blocks in ``values``.
        batch: First dimension of the stored tensor.
        rows: Second dimension of the stored tensor.
        length: Last dimension of the stored tensor.
        transposed: Whether the stored tensor's rows, not its last dimension, are the features.
        dtype: Type of the result; sums are in fp32 (fp64 for fp64).
        block_size: Values per block, cut to a row.
        value_format: How the values are stored; those of few bits are read as the type of ``grad_y``.
    """
    blocks = Blocks(block_size, value_format, values.dtype if value_format == "same" else grad_y.dtype)
    shape = batch, rows, length
    stored = values.shape[0], bitmap.shape, shape, transposed, blocks
    method, matrix, launch = _product(grad_y.shape, *stored, grad_y.dtype, values.device, _settings(grad_y.dtype))
    if method == "gather":
        from lightning_actprune.kernels import weight_grad

        with on_device_of(values):
            return weight_grad.weight_grad(grad_y, values, bitmap, offsets, length, dtype, block_size, value_format)
    if launch is not None and (values.data_ptr() | bitmap.data_ptr() | offsets.data_ptr()) % 16 == 0:
        dense = values.new_empty(matrix, dtype=blocks.dtype)
        with on_device_of(values):
            launch(values, bitmap, offsets, dense)
    else:
        backend: Backend = "reference" if method == "reference" else "triton"
        dense = _unpack((values, bitmap, offsets), shape, transposed, backend, blocks).view(matrix)
    if transposed:  # the reduced dimensions come last: [rows, batch * length] is read as the columns of [R, IN]
        dense = dense.t()
    return dense_weight_grad(grad_y, dense, dtype)


def dense_weight_grad(grad_y: Tensor, dense: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``grad_y^T @ dense`` in ``dtype``, of ``grad_y [R, OUT]`` and an input ``[R, IN]``."""
    if dtype != grad_y.dtype and dtype == torch.float32 and has_fp32_product(grad_y):
        return torch.mm(grad_y.t(), dense, out_dtype=dtype)  # spares a launch, and a rounding to 16 bits
    grad = torch.mm(grad_y.t(), dense)
    return grad if grad.dtype == dtype else grad.to(dtype=dtype)
