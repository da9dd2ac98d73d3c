r"""Compute the weight gradient of a packed input, by one of two methods that a cost model chooses.

With ``g [R, OUT]`` and ``x_hat [R, IN]`` the packed input: ``dW = g^T x_hat``.

``gather``
    multiplies kept blocks directly with the matching rows of ``g``. The number of operations falls with the density,
    but each kept block reuses a gathered row for only ``b`` columns. The fp32 accumulator is written directly in the
    weight's dtype. If blocks are quantized, only the kept ones are dequantized, for the time of the product.
``unpack``
    rebuilds the pruned tensor for the time of one matrix product of the vendor library. It costs the dense product plus
    one write of the tensor. In 16 bits it rounds as the dense layer does, or not at all if the result is fp32. A
    transposed layout (blocks along the reduced dimension) is always unpacked, and so is one without bitmap and offsets.

Microseconds, with ``F`` the operations of the dense product, ``d`` the density and ``X`` the bytes of the dense input::

    gather  g + c_b d F / rate                   c_b: what a gathered operation costs, in dense ones
    unpack  u + F / rate + (1 + d) X / bandwidth  dense product, after writing X and reading d X

``benchmarks/tune.py costs`` fitted the constants on an H200 (Triton 3.6, inputs not in the cache) to the records of
``benchmarks/bench_kernels.py``. It minimizes regret, the most that a wrong choice costs, and not the error. The
constants of both sides scale alike from GPU to GPU, so the choice carries over. Inputs were normal random numbers,
whose columns keep about the same number of rows each. If columns differ, gathering takes up to twice as long, which a
choice by shapes cannot know.

**Behind a norm** or an affine layer, which stores x~, its normalised input x^ quantized, a linear layer packs nothing
itself (``codec.pack_cache``). Its input is the output ``y = x^ w + b [R, L]``, so with ``g [R, OUT]``::

    dW = g^T y = (g^T x~) w + (sum_r g) b        w along the rows of dW; b as an outer product

Both terms are computed in fp32 after the product, in the size of the weight. If the layer reads ``y [B, T, D]`` as
``y.transpose(1, 2)``, its features are tokens and w and b run along the summed dimension. They then scale x~ before the
product, while it is transposed. An affine layer stores x~ of its input itself, and ``y = x w + b``.

Errors n = x~ - x^ of mean zero give ``dW`` the error ``(g^T n) w``, as if ``y`` had been stored with errors n w. A
block of ``y`` itself, however, would have errors in proportion to its own largest value. If w makes the largest values
of x^ small, as it may for outlier features, n w is larger, by up to the ratio of the weights in a block. Therefore the
norm must store more bits than the layer asks for. w and b are saved without a copy, which takes no memory, and autograd
checks that they are unmodified in backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_actprune.codec.blocks import ceil_div
from lightning_actprune.codec.dispatch import (
    LaunchCache,
    TensorKey,
    as_dtype,
    choose_backend,
    has_fp32_product,
    on_device_of,
)
from lightning_actprune.codec.pack_cache import KeptOutput, OutputLayout
from lightning_actprune.codec.packed import LIBRARY, TAGS, Packed, dequantize, no_positions, unpack_all, unpack_batch

Method = Literal["gather", "unpack"]

MAX_GATHER_BLOCK = 256
"""Largest block of the gather kernel, whose accumulator is 128 outputs by one block."""

_forced: Method | None = None


class Costs(NamedTuple):
    """Constants of the cost model for one size of value.

    Args:
        gather_base: Microseconds of a gather without operations.
        gather: Pairs of a least block size and the cost of a gathered operation in dense ones, largest size first.
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
"""Constants by bytes per value."""


def fp32_is_exact() -> bool:
    """Return True if torch's fp32 matrix products on CUDA use no TF32."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # raised once somebody has set the newer, per-backend switch
        return bool(torch.backends.cuda.matmul.fp32_precision != "tf32")


def gather_is_faster(grad_y: tuple[int, int], values: tuple[int, int], length: int, itemsize: int, exact: bool) -> bool:
    """Return True if the gather kernel is expected to beat unpacking and a matrix product.

    Args:
        grad_y: Rows and outputs of the output gradient.
        values: Number of kept blocks and values per block.
        length: Values per row of the input.
        itemsize: Bytes per value.
        exact: Result of ``fp32_is_exact``.
    """
    (rows, outputs), (kept, block) = grad_y, values
    # In 16 bits, rows of grad_y that are not aligned to 16 bytes are gathered in pieces of 4 bytes, far more slowly.
    # The exact fp32 kernel cannot win against TF32 on tensor cores.
    if block < 16 or (itemsize == 2 and outputs % 16) or (itemsize == 4 and not exact):
        return False
    costs, product, density = COSTS[itemsize], 2.0 * rows * length * outputs, kept * block / (rows * length)
    size = rows * length * itemsize
    return costs.gather_us(product, density, block) < costs.unpack_us(product, density, size)


@contextlib.contextmanager
def force_method(method: Method | None) -> Iterator[None]:
    """Compute weight gradients in this context by ``method`` where it applies; ``None`` restores the cost model."""
    global _forced
    if method not in ("gather", "unpack", None):
        raise ValueError(f'`method` must be "gather", "unpack" or None, got {method!r}.')
    before, _forced = _forced, method
    try:
        yield
    finally:
        _forced = before


def _launch(
    device: torch.device,
    grad_y: TensorKey,
    values: TensorKey,
    bitmap: TensorKey,
    offsets: TensorKey,
    shape: tuple[int, int, int],
    transposed: bool,
    dtype: torch.dtype,
    block_size: int,
    bits: int,
    exact: bool,
    method: Method | None,
) -> tuple[Callable[..., Tensor] | None, Callable[..., None] | None] | None:
    """Return what computes the gradients of a layout from kept blocks, or else what unpacks the input."""
    ((rows, outputs), strides, source, _), (samples, words), stored = grad_y, bitmap[0], (values[0][0], block_size)
    length = shape[2]
    if not stored[0] or choose_backend(stored, source, device, block_size, ceil_div(length, block_size)) == "reference":
        return None
    # Without positions all blocks are there, which gathering only takes longer to multiply.
    if not (transposed or words == 0 or block_size > MAX_GATHER_BLOCK) and (
        method == "gather"
        or (method is None and gather_is_faster((rows, outputs), stored, length, source.itemsize, exact))
    ):
        from lightning_actprune.kernels.linear import Shape, weight_grad_launch

        stride = strides[0] if strides[1] == 1 else outputs  # of rows, or of those of a copy
        sizes = outputs, stride, samples, rows, length, *stored, source.itemsize, bits
        return weight_grad_launch(Shape(*sizes), dtype, device), None
    from lightning_actprune.kernels.unpack import unpack_launch

    counts = samples if words else 0, stored[0] if bits else 0
    return None, unpack_launch(*counts, shape, transposed, block_size, bits, device)


_launches = LaunchCache(_launch)


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
        transposed: True if the features are the rows of the stored tensor, not its last dimension.
        dtype: Type of the result; sums are in fp32 (fp64 for fp64).
        block_size: Values per block, at most the length of a row.
        bits: Bits of a stored value, dequantized to the type of ``grad_y``; 0 if values are not quantized.
    """
    packed, shape = (values, bitmap, offsets), (batch, rows, length)
    exact = grad_y.dtype != torch.float32 or fp32_is_exact()
    settings = shape, transposed, dtype, block_size, bits, exact, _forced
    gather, write = _launches.find(settings, grad_y, *packed) or (None, None)
    if gather is not None:
        with on_device_of(values):
            return gather(grad_y if grad_y.stride(1) == 1 else grad_y.contiguous(), *packed)
    read = grad_y.dtype if bits else values.dtype
    if write is None:
        dense = unpack_batch(packed, shape, transposed, block_size, bits, read)
    else:
        dense = values.new_empty((rows, batch, length) if transposed else shape, dtype=read)
        with on_device_of(values):
            write(*packed, dense)
    if transposed:  # the reduced dimensions come last: [rows, batch * length] is read as the columns of [R, IN]
        return dense_weight_grad(grad_y, dense.view(rows, batch * length).t(), dtype)
    return dense_weight_grad(grad_y, dense.view(batch * rows, length), dtype)


def dense_weight_grad(grad_y: Tensor, dense: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``grad_y^T @ dense`` in ``dtype``, with ``grad_y [R, OUT]`` and ``dense [R, IN]``."""
    if dtype != grad_y.dtype and dtype == torch.float32 and has_fp32_product(grad_y):
        return torch.mm(grad_y.t(), dense, out_dtype=dtype)  # saves a launch, and a rounding to 16 bits
    grad = torch.mm(grad_y.t(), dense)
    return grad if grad.dtype == dtype else grad.to(dtype=dtype)


def packed_weight_grad(grad_y: Tensor, packed: Packed, dtype: torch.dtype, eager: bool) -> Tensor:
    """Return the weight gradient ``[OUT, IN]`` of a packed input in ``dtype``.

    Args:
        grad_y: ``[R, OUT]``.
        packed: The input.
        dtype: Type of the result.
        eager: True in plain eager mode. Otherwise an operator computes it, or traceable plain torch if the pack has no
            bitmap and offsets.
    """
    tensors, shape, transposed, block, bits = packed
    if len(tensors) == 1:
        dense = packed.unpack(grad_y.dtype, eager)  # [batch * rows, length]
        if transposed:  # [IN, batch * length], read as its columns
            dense = dense.reshape(shape).transpose(0, 1).reshape(shape[1], -1).t()
        return dense_weight_grad(grad_y, dense, dtype)
    compute: Callable[..., Tensor] = weight_grad if eager else torch.ops.actprune.weight_grad
    return compute(grad_y, *tensors, *shape, transposed, dtype, block, bits)


def weight_grad_behind_norm(
    grad_y: Tensor, sums: Tensor | None, kept: KeptOutput, layout: OutputLayout, dtype: torch.dtype, eager: bool
) -> Tensor:
    """Return the weight gradient ``[OUT, IN]`` of an input that is the output of a norm, in ``dtype``.

    Args:
        grad_y: ``[R, OUT]``; rows in the order of the norm's output, or of its columns.
        sums: Its sums over the rows, in fp32; needed if there is a bias, unless columns are read.
        kept: The bytes of x~, and w and b of the norm.
        layout: How the norm stores its output.
        dtype: Type of the result.
        eager: True in plain eager mode.
    """
    values, weight, bias = kept[0], flat_parameter(kept[1]), flat_parameter(kept[2])
    if layout.order == "columns":
        dense = _scale_columns(values, weight, bias, layout, grad_y.dtype, eager)
        return dense_weight_grad(grad_y, dense.view(layout.shape[1], -1).t(), dtype)
    if not eager:
        batch, rows, length = layout.shape
        dense = unpack_all(values, batch * rows, length, layout.block, layout.bits, grad_y.dtype)
        grad = as_dtype(torch.mm(grad_y.t(), dense), torch.float32)
        grad = grad if weight is None else grad * weight
        return as_dtype(grad if bias is None or sums is None else grad + torch.outer(sums, bias.float()), dtype)
    nowhere = no_positions(values.device)
    packed = Packed((values, nowhere, nowhere), layout.shape, False, layout.block, layout.bits)
    grad = packed_weight_grad(grad_y, packed, torch.float32, eager)
    if weight is not None:
        grad.mul_(weight)
    if bias is not None:
        assert sums is not None
        grad.addr_(sums, as_dtype(bias, torch.float32))
    return as_dtype(grad, dtype)


def _scale_columns(
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    layout: OutputLayout,
    dtype: torch.dtype,
    eager: bool,
) -> Tensor:
    """Return the output of a norm transposed to ``[rows, samples, length]`` in ``dtype``, contiguous."""
    samples, rows, length = layout.shape
    stored = samples * rows, length, layout.block, layout.bits, dtype
    if not eager:  # inside a transform, operations cannot write to `out`
        x = unpack_all(values, *stored).reshape(layout.shape).transpose(0, 1)
        x = x if weight is None else x * weight
        return (x if bias is None else x + bias).to(dtype).contiguous()
    x = dequantize(values, *stored).view(layout.shape).transpose(0, 1)  # [rows, samples, length]
    turned = x.new_empty(x.shape)
    if weight is None:
        return turned.copy_(x) if bias is None else torch.add(x, bias, out=turned)
    if bias is None:
        return torch.mul(x, weight, out=turned)
    return torch.addcmul(bias, x, weight, out=turned)


def flat_parameter(parameter: Tensor | None) -> Tensor | None:
    """Return a parameter as ``[L]``."""
    return parameter if parameter is None or parameter.dim() == 1 else parameter.reshape(-1)


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
