"""The gather kernel on blocks in few bits: the gradient of the values that the reference reads."""

from __future__ import annotations

import pytest
import torch

from lightning_actprune.kernels.tiles import Config, Machine, choose_config
from lightning_actprune.kernels.weight_grad import Shape, WeightGradPlan, weight_grad
from tests import oracle
from tests.kernels.formats import QUANTIZED, expected, read, rounded

each_format = pytest.mark.parametrize("value_format", QUANTIZED)
each_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)


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
    actual = weight_grad(grad_y, *packed, length, torch.float32, block_size, value_format)
    assert oracle.relative_error(actual, exact) < 1e-6


@each_format
@pytest.mark.parametrize("values_first", [False, True])
@pytest.mark.parametrize("split", [1, 3])
def test_parts_and_both_ways_round(kernel_device, value_format, split, values_first):
    x = torch.randn(2, 65, 70)
    packed, grad_y, exact = packed_and_exact(x, 16, 300, value_format, kernel_device, 33)
    shape = Shape(33, 33, 2, 130, 70, 600, 16, 4, value_format)
    plan = WeightGradPlan(shape, torch.float32, Config(32, 16, 4, 3, values_first), split)
    assert oracle.relative_error(plan(grad_y, *packed), exact) < 1e-6


@each_format
def test_a_block_that_is_not_finite_reaches_its_column_and_no_other(kernel_device, value_format):
    x = torch.randn(1, 40, 64)
    x[0, 7, 20] = float("inf")
    packed, grad_y, _ = packed_and_exact(x, 16, 100, value_format, kernel_device, 16)
    actual = weight_grad(grad_y, *packed, 64, torch.float32, 16, value_format)
    finite = actual.isfinite().all(0).cpu()
    assert finite.tolist() == [not 16 <= column < 32 for column in range(64)]


@each_format
def test_rows_that_a_column_dropped_do_not_reach_it(kernel_device, value_format):
    """Stored blocks are not zero anywhere, so that an entry of a list too many would show."""
    x = torch.full((1, 40, 32), 5.0)
    x[:, 0, :16], x[:, 1:, 16:] = 0.1, 0.2  # row 0 is dropped of the first column, and of the second all but row 0
    packed, grad_y, _ = packed_and_exact(x, 16, 40, value_format, kernel_device, 16)
    grad_y[0] = float("inf")
    actual = weight_grad(grad_y, *packed, 32, torch.float32, 16, value_format)
    assert actual[:, :16].isfinite().all()
    assert not actual[:, 16:].isfinite().any()


@pytest.mark.parametrize("shared_memory", [101376, 166912, 232448])
@pytest.mark.parametrize("block_size", [16, 24, 32, 64, 128, 256])
def test_configuration_of_fp32_fits_the_shared_memory(block_size, shared_memory):
    config = choose_config(block_size, 1536, 4, Machine(132, shared_memory, 8), quantized=True)
    block = max(16, 1 << (block_size - 1).bit_length())
    assert config.stages * config.bk * (config.bm + block) * 4 <= shared_memory
    assert config.bk >= 16


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
    actual = weight_grad(grad_y, *packed, shape[2], torch.float32, block_size, value_format)
    assert oracle.relative_error(actual, exact) < 1e-5
