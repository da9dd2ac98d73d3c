"""All blocks in few bits, in one pass: the bytes and the values of the reference, without positions."""

from __future__ import annotations

import pytest
import torch

from lightning_actprune.kernels import pack as kernels
from lightning_actprune.kernels.unpack import unpack
from lightning_actprune.ops import formats, reference
from lightning_actprune.ops.dispatch import force_backend
from lightning_actprune.ops.geometry import ALL_BLOCKS
from lightning_actprune.ops.plan import Setting, input_plan
from lightning_actprune.ops.setting import BlockSetting
from tests.kernels.formats import QUANTIZED, each_large, rounded, strided
from tests.kernels.test_cast import nearly_integers

each_format = pytest.mark.parametrize("value_format", QUANTIZED)
each_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)


def stored(x: torch.Tensor, block_size: int, value_format: str) -> torch.Tensor:
    """What the reference stores of ``x [S, T, L]``, on the CPU."""
    return formats.quantize(reference.split_blocks(x.cpu(), block_size).reshape(-1, block_size), value_format)


def check(x: torch.Tensor, block_size: int, value_format: str) -> None:
    values, bitmap, offsets = kernels.pack(x, block_size, ALL_BLOCKS, value_format)
    right = stored(x, block_size, value_format)
    assert values.dtype == torch.uint8
    assert torch.equal(values.cpu(), right)
    assert bitmap.shape == offsets.shape == (x.shape[0], 0)
    wide = formats.dequantize(right, block_size, value_format, torch.float32)
    dense = rounded(wide.view(*x.shape[:2], -1)[..., : x.shape[2]], x.dtype, x.device)
    for features_first, expected in ((False, dense), (True, dense.transpose(0, 1))):
        found = unpack(values, bitmap, offsets, tuple(x.shape), features_first, block_size, value_format, x.dtype)
        assert torch.equal(found.cpu(), expected)


@each_dtype
@each_format
def test_bytes_and_values_are_those_of_the_reference(kernel_device, value_format, dtype):
    """Blocks of any size, the last of a row cut off, of few blocks and of more than a run of 128."""
    for block_size, rows in ((8, 41), (20, 3), (32, 5), (64, 2), (100, 5)):
        length = 2 * block_size + block_size // 2 + 1
        check((3 * torch.randn(2, rows, length) + 1).to(dtype).to(kernel_device), block_size, value_format)


@each_format
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 3, 5), (7, 1, 1500)], ids=str)
def test_small_and_long_rows(kernel_device, shape, value_format):
    check(torch.randn(shape, device=kernel_device), min(1024, shape[2]), value_format)


@pytest.mark.parametrize("kind", ["slice", "batch-second", "rows"])
def test_strides(kernel_device, kind):
    check(strided(kind, kernel_device), 16, "int4")


@each_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_plan_that_casts_stores_the_rounded_copy(kernel_device, value_format, dtype):
    x = nearly_integers(3, 42, 103, device=kernel_device)
    with force_backend("triton"):
        plan = input_plan(x, Setting(0, dtype, BlockSetting(16, "sample", value_format)))
    copy = plan.new_cast()
    values, bitmap, _ = plan.launch(x, copy)
    assert bitmap.shape == (3, 0)
    assert torch.equal(copy, x.to(dtype))
    assert torch.equal(values.cpu(), stored(x.to(dtype), 16, value_format))


@each_format
def test_all_blocks_of_any_sparsity_and_none_dropped_are_the_same_bytes(kernel_device, value_format):
    x = torch.randn(3, 20, 60, device=kernel_device)
    values, *_ = kernels.pack(x, 16, 80, value_format)
    assert torch.equal(kernels.pack(x, 16, ALL_BLOCKS, value_format)[0], values)


@pytest.mark.gpu
@each_dtype
@each_format
@each_large
def test_large_tensors_on_the_gpu(shape, block_size, value_format, dtype):
    check(torch.randn(shape, device="cuda").to(dtype), block_size, value_format)
