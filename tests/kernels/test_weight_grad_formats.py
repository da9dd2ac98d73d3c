"""Weight gradients of blocks in few bits by gathering: those of the values that the reference reads."""

from __future__ import annotations

import pytest
import torch

from lightning_actprune.kernels.columns import ColumnsPlan
from lightning_actprune.kernels.weight_grad import weight_grad as gathered
from lightning_actprune.ops import formats, reference
from tests import oracle
from tests.kernels.formats import QUANTIZED, expected, read, rounded
from tests.kernels.workload import launches, split_into

each_format = pytest.mark.parametrize("value_format", QUANTIZED)
each_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)


def weight_grad(grad_y, values, bitmap, offsets, length, block_size, value_format):
    """Return the gradient in fp32."""
    return gathered(grad_y, values, bitmap, offsets, length, torch.float32, block_size, value_format)


def packed_and_exact(x, block_size, keep, value_format, device, outputs):
    """Return what is packed on ``device``, an output gradient in the dtype of ``x``, and the fp64 weight gradient."""
    packed = expected(x, block_size, keep, value_format)
    values = rounded(read(packed, x.shape, block_size, value_format), x.dtype, device).flatten(0, 1)
    grad_y = torch.randn(values.shape[0], outputs).to(x.dtype)
    exact = grad_y.double().t() @ values.double()
    return [part.to(device) for part in packed], grad_y.to(device), exact


@each_dtype
@each_format
@pytest.mark.parametrize("block_size", [8, 16, 20, 32, 64, 128])
def test_equals_the_oracle(kernel_device, block_size, value_format, dtype):
    """Two samples of 37 rows, the last block of a row cut off."""
    length = block_size + block_size // 2 + 1
    x = (torch.randn(2, 37, length) + 1).to(dtype)
    packed, grad_y, exact = packed_and_exact(x, block_size, 45, value_format, kernel_device, 33)
    actual = weight_grad(grad_y, *packed, length, block_size, value_format)
    assert oracle.relative_error(actual, exact) < 1e-6


@each_dtype
@each_format
@pytest.mark.parametrize(
    ("block_size", "rows", "columns", "keep"),
    [(8, 1, 1, 1), (16, 129, 2, 129), (20, 300, 3, 700), (32, 20, 40, 500), (64, 33, 1, 33), (256, 40, 2, 7)],
)
def test_numbers_are_those_of_the_reference_and_lists_as_ever(
    kernel_device, block_size, rows, columns, keep, value_format, dtype
):
    """Blocks fill less than one program or several; of those that count, more than one lie along either axis."""
    x = torch.randn(1, rows, columns * block_size) * 10.0 ** torch.randint(-3, 4, (rows, 1))
    stored, bitmap, offsets = expected(x, block_size, keep, value_format)
    wide = formats.dequantize(stored, block_size, value_format, torch.float32)
    right = rounded(wide, dtype, kernel_device).to(kernel_device)
    positions = bitmap.to(kernel_device), offsets.to(kernel_device)
    from_numbers, from_few = (ColumnsPlan(1, rows, columns, (keep, block_size, v)) for v in ("same", value_format))
    lists, found_lists = torch.zeros(2, from_few.work, dtype=torch.int32, device=kernel_device)
    assert from_numbers(right, *positions, lists, dtype) is right
    found = from_few(stored.to(kernel_device), *positions, found_lists, dtype)
    assert found.dtype == dtype
    assert torch.equal(found, right)
    assert torch.equal(found_lists, lists)


@pytest.mark.parametrize("parts", [1, 3])
def test_few_bits_take_no_more_launches(kernel_device, parts):
    grad_y = torch.randn(200, 16, device=kernel_device)
    values, *positions = reference.pack(torch.randn(1, 200, 64, device=kernel_device), 16, 400)
    counts = []
    for value_format, stored in (("same", values), ("int4", formats.quantize(values, "int4"))):
        with split_into(parts), launches() as names:
            weight_grad(grad_y, stored, *positions, 64, 16, value_format)
        counts.append(len(names))
    assert counts[0] == counts[1] > 2


@each_format
def test_a_block_that_is_not_finite_reaches_its_column_and_no_other(kernel_device, value_format):
    x = torch.randn(1, 40, 64)
    x[0, 7, 20] = float("inf")
    packed, grad_y, _ = packed_and_exact(x, 16, 100, value_format, kernel_device, 16)
    actual = weight_grad(grad_y, *packed, 64, 16, value_format)
    finite = actual.isfinite().all(0).cpu()
    assert finite.tolist() == [not 16 <= column < 32 for column in range(64)]


@each_format
def test_rows_that_a_column_dropped_do_not_reach_it(kernel_device, value_format):
    """Stored blocks are not zero anywhere, so that an entry of a list too many would show."""
    x = torch.full((1, 40, 32), 5.0)
    x[:, 0, :16], x[:, 1:, 16:] = 0.1, 0.2  # row 0 is dropped of the first column, and of the second all but row 0
    packed, grad_y, _ = packed_and_exact(x, 16, 40, value_format, kernel_device, 16)
    grad_y[0] = float("inf")
    actual = weight_grad(grad_y, *packed, 32, 16, value_format)
    assert actual[:, :16].isfinite().all()
    assert not actual[:, 16:].isfinite().any()


@pytest.mark.gpu
@each_dtype
@each_format
@pytest.mark.parametrize(
    ("shape", "block_size"), [((64, 196, 384), 32), ((16, 197, 776), 64), ((8, 211, 500), 24)], ids=str
)
def test_large_gradients_on_the_gpu(shape, block_size, value_format, dtype):
    """Sums of 10,000 terms in fp32: an error of 2^-24 each, that grows with the root of their number."""
    x = torch.randn(shape).to(dtype)
    keep = round(0.4 * shape[1] * -(-shape[2] // block_size))
    packed, grad_y, exact = packed_and_exact(x, block_size, keep, value_format, torch.device("cuda"), 384)
    actual = weight_grad(grad_y, *packed, shape[2], block_size, value_format)
    assert oracle.relative_error(actual, exact) < 1e-5
