"""The weight gradient by gathering: shapes around its tile sizes, parts of a reduction, and quantized values."""

from __future__ import annotations

import itertools

import pytest
import torch

from lightning_actprune.codec import blocks, formats
from lightning_actprune.codec.blocks import BlockGeometry
from lightning_actprune.codec.formats import PLANES
from lightning_actprune.kernels import linear
from lightning_actprune.kernels.linear import (
    ColumnsLaunch,
    Config,
    Machine,
    Shape,
    SplitRule,
    WeightGradLaunch,
    choose_config,
    choose_split,
)
from tests.support import oracle
from tests.support.marks import cover
from tests.support.packing import DTYPES, expected, on_kernels, read, rounded
from tests.support.workload import weight_grad

SMALL = Config(bm=16, bk=16, warps=4, stages=3, values_first=False)


def run(device, shape, block_size, outputs, config, split, dtype=torch.float32):
    x = oracle.integers(*shape, dtype=dtype, device=device)
    geometry = BlockGeometry.of(*shape, block_size, 0.5)
    values, bitmap, offsets = blocks.pack(x, geometry.block_size, geometry.keep)
    total = geometry.total_rows
    grad_y = torch.randn(total, outputs, device=device).to(dtype)
    sizes = Shape(outputs, outputs, shape[0], total, shape[2], *values.shape, values.element_size())
    actual = WeightGradLaunch(sizes, torch.float32, config, split)(grad_y, values, bitmap, offsets)
    expected = grad_y.double().t() @ oracle.pruned(x, block_size, 0.5).flatten(0, 1).double()
    return oracle.relative_error(actual, expected)


@pytest.mark.parametrize(
    ("case", "split", "values_first", "dtype"),
    cover([((2, 21, 70), 16, 33), ((1, 31, 48), 24, 16)], (1, 3), (False, True), DTYPES),
    ids=str,
)
def test_equals_the_oracle(kernel_device, case, split, values_first, dtype):
    config = Config(bm=32, bk=16, warps=4, stages=3, values_first=values_first)
    assert run(kernel_device, *case, config, split, dtype) < 1e-6


def test_columns_of_unequal_length_have_unequal_parts(kernel_device):
    """The first column keeps all 120 rows, two share 40, and the last has none."""
    x = torch.randn(1, 120, 64, device=kernel_device)
    x[:, :, :16] *= 100
    x[:, :, 48:] = 0.0
    values, bitmap, offsets = blocks.pack(x, 16, 160)
    grad_y = torch.randn(120, 16, device=kernel_device)
    launch = WeightGradLaunch(Shape(16, 16, 1, 120, 64, 160, 16, 4), torch.float32, SMALL, 4)
    assert launch.parts == 10
    out = launch(grad_y, values, bitmap, offsets)
    expected = grad_y.double().t() @ blocks.unpack(values, bitmap, 120, 64, 16, 0, torch.float32).double()
    assert oracle.relative_error(out, expected) < 1e-6
    assert torch.equal(out, launch(grad_y, values, bitmap, offsets))
    assert not out[:, 48:].any()


@pytest.mark.parametrize(("least", "most"), [(16, 5), (128, 256)])
def test_columns_are_listed_over_several_programs_and_samples(kernel_device, monkeypatch, least, most):
    """Chunks of 16 rows are more in number than what one turn adds up the counts of."""
    monkeypatch.setattr(linear, "MIN_ROWS", least)
    monkeypatch.setattr(linear, "MAX_CHUNKS", most)
    assert run(kernel_device, (3, 60, 24), 8, 16, SMALL, 2) < 1e-6
    assert run(kernel_device, (20, 5, 24), 8, 16, SMALL, 1) < 1e-6


def test_configuration_fits_the_shared_memory():
    axes = (101376, 166912, 232448), (1, 16, 24, 32, 64, 128, 256), (2, 4)
    for shared_memory, block_size, itemsize in itertools.product(*axes):
        config = choose_config(block_size, 1536, itemsize, Machine(132, shared_memory, 8))
        block = max(16, 1 << (block_size - 1).bit_length())
        assert config.stages * config.bk * (config.bm + block) * itemsize <= shared_memory
        assert config.bk >= 16
        assert config.bm >= 16


def test_split_fills_the_machine_but_keeps_parts_long():
    config = Config(bm=128, bk=64, warps=8, stages=3, values_first=True)
    rule = SplitRule(full=8, aim=16, most=6, turns=4)

    for tiles, kept_per_column, split in ((72, 5000, 4), (36, 5000, 6), (144, 5000, 1), (1, 100, 1)):
        assert choose_split(tiles, kept_per_column, config, 132, rule) == split
    for rows, length, outputs in ((2**20, 1024, 1024), (12544, 384, 1536), (100, 64, 64)):
        sizes = Shape(outputs, outputs, 1, rows, length, rows, 64, 4)
        launch = WeightGradLaunch(sizes, torch.float32, config, split=800, balance=True)
        # At most twice the memory of the input.
        assert launch.parts == 1 or 1 < launch.parts * outputs * length <= 2 * rows * length


def packed_and_exact(x, block_size, keep, bits, device, outputs):
    """Return what is packed on ``device``, an output gradient in the dtype of ``x``, and the fp64 weight gradient."""
    packed = expected(x, block_size, keep, bits)
    values = rounded(read(packed, x.shape, block_size, bits), x.dtype, device).flatten(0, 1)
    grad_y = torch.randn(values.shape[0], outputs).to(x.dtype)
    exact = grad_y.double().t() @ values.double()
    return [part.to(device) for part in packed], grad_y.to(device), exact


@on_kernels(
    "block_size, bits, dtype",
    [(8, 3, torch.bfloat16), (20, 4, torch.float32), (64, 2, torch.float16)],
    cover([8, 16, 20, 32, 64, 128], list(PLANES), DTYPES),
)
def test_quantized_values_equal_the_oracle(kernel_device, block_size, bits, dtype):
    """Two samples of 37 rows, the last block of a row cut off."""
    length = block_size + block_size // 2 + 1
    x = (torch.randn(2, 37, length) + 1).to(dtype)
    packed, grad_y, exact = packed_and_exact(x, block_size, 45, bits, kernel_device, 33)
    actual = weight_grad(grad_y, *packed, length, block_size, bits)
    assert oracle.relative_error(actual, exact) < 1e-6


SIZES = [(20, 129, 2, 129), (8, 1, 1, 1), (16, 300, 3, 700), (32, 20, 40, 500), (64, 33, 1, 33), (256, 40, 2, 7)]


@on_kernels(
    "sizes, bits, dtype",
    [(SIZES[0], 3, torch.bfloat16), (SIZES[1], 2, torch.float32), (SIZES[3], 8, torch.float16)],
    cover(SIZES, list(PLANES), DTYPES),
)
def test_numbers_are_those_of_the_reference_and_lists_as_ever(kernel_device, sizes, bits, dtype):
    """Blocks fill less than one program or several; of those that count, more than one lie along either axis."""
    block_size, rows, columns, keep = sizes
    x = torch.randn(1, rows, columns * block_size) * 10.0 ** torch.randint(-3, 4, (rows, 1))
    stored, bitmap, offsets = expected(x, block_size, keep, bits)
    wide = formats.dequantize(stored, block_size, bits, torch.float32)
    right = rounded(wide, dtype, kernel_device).to(kernel_device)
    positions = bitmap.to(kernel_device), offsets.to(kernel_device)
    from_numbers, from_codes = (ColumnsLaunch(1, rows, columns, (keep, block_size, v)) for v in (0, bits))
    lists, actual_lists = torch.zeros(2, from_codes.work, dtype=torch.int32, device=kernel_device)
    assert from_numbers(right, *positions, lists, dtype) is right
    actual = from_codes(stored.to(kernel_device), *positions, actual_lists, dtype)
    assert actual.dtype == dtype
    assert torch.equal(actual, right)
    assert torch.equal(actual_lists, lists)


@pytest.mark.parametrize("bits", [0, 2, 4])
def test_what_is_not_finite_reaches_its_column_and_no_other(kernel_device, bits):
    """Stored blocks are not zero anywhere, so that an entry of a list too many would show."""
    x = torch.full((1, 40, 32), 5.0)
    x[:, 0, :16], x[:, 1:, 16:] = 0.1, 0.2  # row 0 is dropped of the first column, and of the second all but row 0
    packed, grad_y, _ = packed_and_exact(x, 16, 40, bits, kernel_device, 16)
    grad_y[0] = float("inf")
    actual = weight_grad(grad_y, *packed, 32, 16, bits)
    assert actual[:, :16].isfinite().all()
    assert not actual[:, 16:].isfinite().any()
    x[0, 7, 3] = float("nan")
    packed, grad_y, _ = packed_and_exact(x, 16, 40, bits, kernel_device, 16)
    finite = weight_grad(grad_y, *packed, 32, 16, bits).isfinite().all(0)
    assert finite[16:].all()
    assert not finite[:16].all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "bits", "dtype"),
    cover([((64, 196, 384), 32), ((16, 197, 776), 64), ((8, 211, 500), 24)], list(PLANES), DTYPES),
    ids=str,
)
def test_large_gradients_on_the_gpu(case, bits, dtype):
    """Sums of 10,000 terms in fp32: an error of 2^-24 each, that grows with the root of their number."""
    shape, block_size = case
    x = torch.randn(shape).to(dtype)
    keep = round(0.4 * shape[1] * -(-shape[2] // block_size))
    packed, grad_y, exact = packed_and_exact(x, block_size, keep, bits, torch.device("cuda"), 384)
    actual = weight_grad(grad_y, *packed, shape[2], block_size, bits)
    assert oracle.relative_error(actual, exact) < 1e-5
