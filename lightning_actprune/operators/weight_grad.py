"""The weight gradient of a packed input, by one of two methods, and the cost model that chooses.

With ``g [R, OUT]`` and ``x_hat [R, IN]`` the packed input: ``dW = g^T x_hat``.

``gather``
    multiplies the kept blocks directly with the matching rows of ``g``: operations fall with the density, but each kept
    block brings only ``b`` columns of reuse per gathered row. Its fp32 accumulator is written directly in the weight's
    dtype. Quantized blocks are made numbers for the time of the product, the kept ones alone.
``unpack``
    rebuilds the pruned tensor for the time of one matrix product of the vendor library; it costs the dense product plus
    one write of the tensor, and in 16 bits it rounds as the dense layer does, or not at all if the result is wanted in
    fp32. A transposed layout (blocks along the reduced dimension) always unpacks, and so does one without positions.

Microseconds, with ``F`` the operations of the dense product, ``d`` the density and ``X`` the bytes of the dense input::

    gather  g + c_b d F / rate                   c_b: what a gathered operation costs, in dense ones
    unpack  u + F / rate + (1 + d) X / bandwidth  dense product, after writing X and reading d X

Fitted on an H200 (Triton 3.6, inputs not in the cache) by ``benchmarks/tune.py costs`` to the records of
``benchmarks/bench_kernels.py``, not to the least error but to the least regret: what a wrong choice costs in the worst
case. The constants of both sides scale alike from GPU to GPU, so the choice carries over. The inputs were normal random
numbers, whose columns keep about the same number of rows each; where columns differ, gathering takes up to twice as
long, which a choice from shapes alone cannot know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_actprune.codec.blocks import ceil_div
from lightning_actprune.codec.dispatch import (
    Backend,
    LaunchCache,
    choose_backend,
    forced_backend,
    has_fp32_product,
    is_aligned,
    on_device_of,
)
from lightning_actprune.codec.packed import LIBRARY, TAGS, unpack_batch
from lightning_actprune.codec.sharing import Shared

Method = Literal["gather", "unpack"]

MAX_GATHER_BLOCK = 256
"""Largest block of the gather kernel, whose accumulator is 128 outputs by one block."""

_forced: Method | None = None


class Costs(NamedTuple):
    """Constants for one size of value.

    Args:
        gather_base: Microseconds of a gather without operations.
        gather: Largest block size first: from which size on a gathered operation costs how many dense ones.
        unpack_base: Microseconds of unpacking and multiplying next to nothing.
        rate: Operations per microsecond of the dense product.
        bandwidth: Bytes per microsecond.
    """

    gather_base: float
    gather: tuple[tuple[int, float], ...]
    unpack_base: float
    rate: float
    bandwidth: float

    def gather_us(self, product: float, density: float, block_size: int) -> float:
        """Return the time of the gather kernel; ``product`` is the number of operations of the dense product."""
        cost = next(cost for size, cost in self.gather if block_size >= size)
        return self.gather_base + cost * density * product / self.rate

    def unpack_us(self, product: float, density: float, size: int) -> float:
        """Return the time of unpacking to ``size`` bytes and multiplying."""
        return self.unpack_base + product / self.rate + (1 + density) * size / self.bandwidth


COSTS = {
    2: Costs(19.5, ((128, 2.08), (64, 2.57), (32, 4.86), (16, 7.41)), 12.3, 868e6, 3.34e6),
    4: Costs(36.7, ((128, 1.25), (64, 1.23), (32, 1.31), (16, 1.43)), 14.2, 52e6, 3.08e6),
}
"""By bytes per value."""


def fp32_is_exact() -> bool:
    """Return whether torch's fp32 matrix products on CUDA use no TF32."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # raised once somebody has set the newer, per-backend switch
        return bool(torch.backends.cuda.matmul.fp32_precision != "tf32")


def gather_is_faster(grad_y: tuple[int, int], values: tuple[int, int], length: int, itemsize: int, exact: bool) -> bool:
    """Return whether the gather kernel is expected to beat unpack + matrix product.

    Args:
        grad_y: Rows and outputs of the output gradient.
        values: Kept blocks and values per block.
        length: Values per row of the input.
        itemsize: Bytes per value.
        exact: What ``fp32_is_exact`` returns.
    """
    (rows, outputs), (kept, block) = grad_y, values
    # In 16 bits, rows of grad_y that do not start at 16 bytes are gathered in 4-byte pieces, at a fraction of the
    # speed.
    # The exact fp32 kernel cannot win against TF32 on tensor cores.
    if block < 16 or (itemsize == 2 and outputs % 16) or (itemsize == 4 and not exact):
        return False
    costs, product, density = COSTS[itemsize], 2.0 * rows * length * outputs, kept * block / (rows * length)
    size = rows * length * itemsize
    return costs.gather_us(product, density, block) < costs.unpack_us(product, density, size)


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


class _Bound(NamedTuple):
    """How the weight gradients of one layout are computed.

    Args:
        gather: Computes them from gradient, values, bitmap and offsets; ``None`` if the input is unpacked first.
        matrix: Sizes of the unpacked input as the product reads it, or turned.
        unpack: Writes that, given values, bitmap, offsets and memory; ``None`` if there is no kernel for it.
    """

    gather: Callable[..., Tensor] | None
    matrix: tuple[int, int]
    unpack: Callable[..., None] | None


def _bound(
    grad_y: tuple[int, int],
    stride: int,
    kept: int,
    positions: tuple[int, int],
    shape: tuple[int, int, int],
    transposed: bool,
    block_size: int,
    bits: int,
    read: torch.dtype,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    aligned: tuple[bool, ...],
    exact: bool,
    method: Method | None,
    backend: Backend | None,
) -> _Bound:
    """Return how the gradients of a layout are computed; ``aligned`` and ``backend`` matter to what is kept of it."""
    batch, rows, length = shape
    matrix = (rows, batch * length) if transposed else (batch * rows, length)
    source, target = dtypes
    stored = kept, block_size
    if not kept or choose_backend(stored, source, device, block_size, ceil_div(length, block_size)) == "reference":
        return _Bound(None, matrix, None)
    # Without positions all blocks are there, which gathering only takes longer to multiply.
    if not (transposed or positions[1] == 0 or block_size > MAX_GATHER_BLOCK) and (
        method == "gather" or (method is None and gather_is_faster(grad_y, stored, length, source.itemsize, exact))
    ):
        from lightning_actprune.kernels.linear import Shape, weight_grad_launch

        sizes = grad_y[1], stride, positions[0], grad_y[0], length, kept, block_size, source.itemsize, bits
        return _Bound(weight_grad_launch(Shape(*sizes), target, device), matrix, None)
    from lightning_actprune.kernels.unpack import unpack_launch

    samples, counted = positions[0] if positions[1] else 0, kept if bits else 0
    return _Bound(None, matrix, unpack_launch(samples, counted, shape, transposed, block_size, bits, device))


_launches = LaunchCache(_bound)


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
    bits: int = 0,
) -> Tensor:
    """Return ``grad_y^T @ x_hat`` in ``dtype``.

    Args:
        grad_y: ``[R, OUT]``; ``R = batch * rows``, or ``batch * length`` if transposed.
        values: Kept blocks ``[nnz, b]``, or their bytes if they are quantized.
        bitmap: Positions ``[S, W]``.
        offsets: Starts of runs of blocks in ``values``.
        batch: First dimension of the stored tensor.
        rows: Second dimension of the stored tensor.
        length: Last dimension of the stored tensor.
        transposed: Whether the stored tensor's rows, not its last dimension, are the features.
        dtype: Type of the result; sums are in fp32 (fp64 for fp64).
        block_size: Values per block, cut to a row.
        bits: To how many bits the values are quantized; they are read as the type of ``grad_y``.
    """
    read = grad_y.dtype if bits else values.dtype
    shape = batch, rows, length
    aligned = is_aligned(grad_y), is_aligned(values), is_aligned(bitmap), is_aligned(offsets)
    stored = values.shape[0], bitmap.shape, shape, transposed, block_size, bits, read
    exact = grad_y.dtype != torch.float32 or fp32_is_exact()
    chosen = (grad_y.dtype, dtype), values.device, aligned, exact, _forced, forced_backend()
    stride = grad_y.stride(0) if grad_y.stride(1) == 1 else grad_y.shape[1]  # of rows, or of those of a copy
    bound = _launches[(grad_y.shape, stride, *stored, *chosen)]
    if bound.gather is not None:
        rows_of_grad = grad_y if grad_y.stride(1) == 1 else grad_y.contiguous()
        with on_device_of(values):
            return bound.gather(rows_of_grad, values, bitmap, offsets)
    if bound.unpack is not None:
        dense = values.new_empty(bound.matrix, dtype=read)
        with on_device_of(values):
            bound.unpack(values, bitmap, offsets, dense)
    else:
        dense = unpack_batch((values, bitmap, offsets), shape, transposed, block_size, bits, read).view(bound.matrix)
    if transposed:  # the reduced dimensions come last: [rows, batch * length] is read as the columns of [R, IN]
        dense = dense.t()
    return dense_weight_grad(grad_y, dense, dtype)


def dense_weight_grad(grad_y: Tensor, dense: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``grad_y^T @ dense`` in ``dtype``, of ``grad_y [R, OUT]`` and an input ``[R, IN]``."""
    if dtype != grad_y.dtype and dtype == torch.float32 and has_fp32_product(grad_y):
        return torch.mm(grad_y.t(), dense, out_dtype=dtype)  # spares a launch, and a rounding to 16 bits
    grad = torch.mm(grad_y.t(), dense)
    return grad if grad.dtype == dtype else grad.to(dtype=dtype)


def shared_weight_grad(grad_y: Tensor, shared: Shared, dtype: torch.dtype, bits: int, eager: bool) -> Tensor:
    """Return the weight gradient of a packed input in ``dtype``, where it is not eager through the operator."""
    packed, shape, transposed, block = shared
    compute = weight_grad if eager else torch.ops.actprune.weight_grad
    grad: Tensor = compute(grad_y, *packed, *shape, transposed, dtype, block, bits)
    return grad


LIBRARY.define(
    "weight_grad(Tensor grad_y, Tensor values, Tensor bitmap, Tensor offsets, SymInt batch, SymInt rows, "
    "SymInt length, bool transposed, ScalarType dtype, int block_size, int bits=0) -> Tensor",
    tags=TAGS,
)
LIBRARY.impl("weight_grad", weight_grad, "CompositeExplicitAutograd")


@torch.library.register_fake("actprune::weight_grad", lib=LIBRARY)
def _weight_grad_fake(
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
    bits: int = 0,
) -> Tensor:
    return grad_y.new_empty(grad_y.shape[1], rows if transposed else length, dtype=dtype)
