"""Blocks in few bits: kernels store the bytes of the reference and read the values of the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from lightning_actprune.kernels import pack as kernels
from lightning_actprune.kernels.pack import PackPlan
from lightning_actprune.kernels.pack_sample import SampleConfig, SamplePlan, choose_config
from lightning_actprune.kernels.unpack import unpack
from lightning_actprune.ops import formats
from lightning_actprune.ops.geometry import ceil_div
from tests.kernels.formats import QUANTIZED, each_large, expected, pack, read, rounded, strided
from tests.kernels.test_cast import nearly_integers

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One tile of all kept blocks, and tiles of 256 values: many, overwriting the list that is read.
ONE_TILE = SampleConfig(warps=4, piece=256, keys_kib=4, keys_stages=1, copy_kib=2, copy_stages=1)

each_format = pytest.mark.parametrize("value_format", QUANTIZED)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
each_plan = pytest.mark.parametrize("plan", ["three-launches", "one-launch", "one-launch-tiles"])


@pytest.fixture
def config(plan, monkeypatch):
    """The configuration of one launch, ``None`` for three."""
    if plan == "one-launch-tiles":
        monkeypatch.setattr("lightning_actprune.kernels.pack_sample.THREAD_VALUES", 2)
    return None if plan == "three-launches" else ONE_TILE


def check(x, block_size, keep, value_format, config):
    packed = pack(x, block_size, keep, value_format, config)
    for actual, right in zip(packed, expected(x, block_size, keep, value_format), strict=True):
        assert actual.dtype == right.dtype
        assert torch.equal(actual.cpu(), right)
    return packed


@pytest.mark.parametrize("plan", ["three-launches", "one-launch"])
@each_dtype
@each_format
def test_bytes_are_those_of_the_reference(kernel_device, value_format, dtype, config):
    """Blocks of any size, the last of a row cut off; its rest counts as zeros."""
    for block_size in (8, 16, 20, 32, 64, 100, 128):
        length = 2 * block_size + block_size // 2 + 1
        x = (3 * torch.randn(2, 5, length) + 1).to(dtype).to(kernel_device)
        check(x, block_size, 9, value_format, config)


@each_plan
@each_format
@pytest.mark.parametrize(
    ("shape", "block_size", "keep"),
    [
        ((20, 3, 20), 8, 4),  # several samples a program
        ((2, 151, 30), 8, 400),  # several runs a sample
        ((2, 151, 30), 8, 604),
        ((1, 3, 5), 5, 2),  # a block cut to a row that is shorter than a byte of codes
        ((1, 2, 3), 3, 1),
        ((1, 3, 300), 300, 2),
        ((2, 2, 1500), 1024, 3),
        ((1, 1, 9), 8, 0),
    ],
    ids=str,
)
def test_places_of_blocks_are_those_among_all_samples(kernel_device, shape, block_size, keep, value_format, config):
    """Every row is the same, so that only the places of its blocks tell their codes apart."""
    x = torch.randn(1, 1, shape[2], device=kernel_device).expand(shape)
    check(x, block_size, keep, value_format, config)


@each_dtype
def test_small_numbers_beside_large_ones(kernel_device, dtype):
    """fp8 has subnormal codes for them, which are made of subnormal fp32 numbers."""
    x = torch.randn(4, 3, 64).to(dtype) * 2.0 ** -torch.arange(64).remainder(22).to(dtype)
    check(x.to(kernel_device), 32, 5, "fp8", None)


@each_plan
@pytest.mark.parametrize("kind", ["slice", "batch-second", "rows"])
def test_strides(kernel_device, kind, config):
    check(strided(kind, kernel_device), 16, 40, "int4", config)


def peculiar(dtype, device):
    """A sample of 12 blocks of 16 values: constants, extremes, not finite ones, and zeros of both signs among them.

    No subnormals of bf16 in the interpreter, which reads them wrongly.
    """
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    least *= 2.0**20 if dtype == torch.bfloat16 and device.type == "cpu" else 2.0**-6
    x = torch.randn(12, 16)
    x[0], x[1], x[2] = 0.0, 1.7, -most
    x[3] *= least
    x[3, ::3] = 0.0
    x[4, ::2], x[4, 1::2] = most, -most  # further from each other than fp32 reaches, or not, in fp16
    x[5, ::2] = most
    x[6, 3], x[7, 4], x[8, 5] = float("nan"), float("inf"), -float("inf")
    x[9] = x[9].abs()
    x[9, ::2] = -0.0
    x[10, 1] = 1e-4 * least
    x[11] = -0.0
    return x.to(dtype).view(1, 3, 64).to(device)


@each_plan
@each_dtype
@each_format
def test_peculiar_blocks(kernel_device, value_format, dtype, config):
    x = peculiar(dtype, kernel_device)
    packed = check(x, 16, 12, value_format, config)
    values = read(packed, (1, 12, 16), 16, value_format)[0]
    # Blocks of NaN, and of what is too far apart or from zero.
    apart = [] if dtype == torch.float16 else [2, 4, 5]
    lost = [6, 7, 8, *(apart if value_format != "fp8" else [])]
    assert values[lost].isnan().all()
    assert values[[0, 1, 3, 9, 10, 11]].isfinite().all()
    assert not values[[0, 11]].any()


@each_plan
@each_format
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=["bf16", "fp16"])
def test_a_plan_that_casts_quantizes_the_rounded_copy(kernel_device, value_format, dtype, config):
    x = nearly_integers(3, 42, 103, device=kernel_device)[:, 1:, 3:]
    copy = torch.empty(x.shape, dtype=dtype, device=kernel_device)
    arguments = x.shape, x.stride()[:2], 16, 200
    if config is None:
        plan = PackPlan(*arguments, x.device, True, value_format)
    else:
        plan = SamplePlan(*arguments, 4, config, dtype, value_format)
    packed = plan(x, copy)
    assert torch.equal(copy, x.to(dtype))
    for actual, right in zip(packed, expected(x.to(dtype), 16, 200, value_format), strict=True):
        assert torch.equal(actual.cpu(), right)


@pytest.mark.parametrize(
    ("value_format", "block_size", "keep", "allocated"),
    [
        ("int4", 32, 200, False),  # 16 bytes of codes: a quarter of the blocks has room for all keys
        ("int4", 32, 199, True),
        ("fp8", 32, 100, False),
        ("int4", 20, 400, False),
        ("int4", 20, 401, True),  # 10 bytes: the second sample's codes do not start at a multiple of 4
        ("int3", 32, 400, False),  # 8 bytes in the first plane
        ("int2", 24, 700, True),  # 6 bytes would overtake the list
    ],
)
def test_keys_lie_in_the_values_where_these_have_room(kernel_device, value_format, block_size, keep, allocated):
    x = torch.randn(2, 200, 4 * block_size, device=kernel_device)
    plan = SamplePlan(x.shape, x.stride()[:2], block_size, keep, 4, ONE_TILE, value_format=value_format)
    assert plan.scratch == 1600 * allocated
    for actual, right in zip(plan(x), expected(x, block_size, keep, value_format), strict=True):
        assert torch.equal(actual.cpu(), right)


@each_format
@pytest.mark.parametrize("samples", [2, 12], ids=["three-launches", "one-launch"])
def test_plan_and_pack_take_the_format(kernel_device, monkeypatch, value_format, samples):
    monkeypatch.setattr("lightning_actprune.kernels.pack_sample.multiprocessors", lambda device: samples // 2)
    monkeypatch.setattr("lightning_actprune.kernels.pack_sample.FEWEST_BLOCKS", 1 if samples > 2 else 10**6)
    kernels.plan.cache_clear()
    x = torch.randn(samples, 3, 24, device=kernel_device)
    packed = kernels.pack(x, 8, 5, value_format)
    kernels.plan.cache_clear()
    for actual, right in zip(packed, expected(x, 8, 5, value_format), strict=True):
        assert torch.equal(actual.cpu(), right)
    assert packed[0].shape == (5 * samples, formats.FORMATS[value_format].row_bytes(8, 0))


@each_dtype
@each_format
def test_unpack_reads_the_values_of_the_reference(kernel_device, value_format, dtype):
    for block_size in (8, 16, 20, 32, 64, 100, 200):
        shape = 2, 5, 2 * block_size + block_size // 2 + 1
        packed = expected(torch.randn(shape).to(dtype), block_size, 9, value_format)
        dense = rounded(read(packed, shape, block_size, value_format), dtype, kernel_device)
        packed = tuple(part.to(kernel_device) for part in packed)
        for features_first, right in ((False, dense), (True, dense.transpose(0, 1))):
            actual = unpack(*packed, shape, features_first, block_size, value_format, dtype)
            assert actual.dtype == dtype
            assert torch.equal(actual.cpu(), right)


@each_format
def test_unpack_reads_codes_of_any_bits_and_what_is_not_finite(kernel_device, value_format):
    """Any bytes, among them headers of no scale, of the largest, and of NaN; scales of fp8 are moderate."""
    row = formats.FORMATS[value_format].row_bytes(32, 0)
    _, bitmap, offsets = expected(torch.randn(2, 20, 70), 32, 40, value_format)
    values = torch.randint(0, 256, (80, row), dtype=torch.uint8)
    headers = values.flatten()[-160:].view(torch.int16)
    headers[17] = 0x7FC0 if value_format == "fp8" else -512 | 511
    if value_format == "fp8":
        headers[18:] %= 0x4000
        headers[:17] %= 0x4000
        codes = values.flatten()[:-160]
        codes[codes % 128 == 127] = 5  # codes of NaN are never stored
    else:
        headers[18], headers[19] = -512, 510
    packed = values, bitmap, offsets
    right = read(packed, (2, 20, 70), 32, value_format)
    packed = tuple(part.to(kernel_device) for part in packed)
    actual = unpack(*packed, (2, 20, 70), False, 32, value_format, torch.float32).cpu()
    assert right.isnan().any()
    assert torch.equal(actual.isnan(), right.isnan())
    assert torch.equal(actual.nan_to_num(0), right.nan_to_num(0))


@pytest.mark.gpu
@each_dtype
@each_format
@each_large
def test_large_samples_on_the_gpu(shape, block_size, value_format, dtype):
    """Values whose sums of squares are exact, so that the reference keeps the same blocks."""
    x = (torch.randint(-64, 65, shape) / 8).to(dtype).cuda()
    blocks = shape[1] * ceil_div(shape[2], block_size)
    for sparsity in (0.1, 0.6, 0.97):
        keep = round(blocks * (1 - sparsity))
        right = expected(x, block_size, keep, value_format, x.device)
        for config in (None, choose_config(blocks)):
            for _ in range(3):  # a race need not show the first time
                packed = pack(x, block_size, keep, value_format, config)
                assert all(torch.equal(part, wanted) for part, wanted in zip(packed, right, strict=True))
        dense = unpack(*packed, shape, False, block_size, value_format, dtype)
        assert torch.equal(dense, read(packed, shape, block_size, value_format, x.device).to(dtype))


@pytest.mark.gpu
def test_planes_beyond_32_bits():
    """Over 2^31 bytes of codes: the last blocks, all others zero."""
    rows = 2**21 + 2**12
    x = torch.zeros(1, rows, 1024, dtype=torch.bfloat16, device="cuda")
    x[0, -50:] = torch.randn(50, 1024, device="cuda")
    values, bitmap, offsets = pack(x, 1024, rows, "int8")
    codes, headers = values.view(-1)[: rows * 1024], values.view(-1)[rows * 1024 :].view(torch.int16)
    assert not codes[: -50 * 1024].any()
    assert not headers[:-50].any()
    dense = unpack(values, bitmap, offsets, (1, rows, 1024), False, 1024, "int8", torch.bfloat16)
    scale = (((headers[-50:].int() & 511) + formats.SCALE_CODES) << 20).view(torch.float32)[:, None]
    assert scale.max() < 10 / 255
    error = (dense[0, -50:].float() - x[0, -50:].float()).abs()
    assert (error <= scale * (0.5 + 2**-10) + (x[0, -50:].abs() + scale) * 2**-8).all()
    assert not dense[0, :-50].any()
