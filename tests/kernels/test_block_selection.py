"""Kernels keep the blocks that the reference keeps and store what it stores, whichever blocks are selected."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from lightning_actprune.kernels import pack as kernels
from lightning_actprune.kernels import rescale
from lightning_actprune.kernels.pack import PackPlan
from lightning_actprune.kernels.pack_sample import SampleConfig, SamplePlan, choose_config
from lightning_actprune.ops import block_selection, reference
from lightning_actprune.ops.formats import FORMATS
from lightning_actprune.ops.geometry import ceil_div
from tests import oracle
from tests.kernels.formats import rounded
from tests.kernels.test_cast import nearly_integers

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL = SampleConfig(warps=4, piece=256, keys_kib=4, keys_stages=1, copy_kib=2, copy_stages=1)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
each_way = pytest.mark.parametrize("way", ["swap", "swap-one-launch", "unbiased"])


def expected(x, block_size, keep, value_format, selection, device):
    """Return what the reference stores of ``x`` if values were rounded as they are on ``device``."""
    exact = block_selection.rescale

    def rescale(values, by):
        if values.dtype != torch.bfloat16:
            return exact(values, by)
        wide = rounded(values.float() * by[:, None] + 0.0, torch.bfloat16, device)
        return torch.where(by[:, None] > 1, wide, values)

    with mock.patch.object(block_selection, "rescale", rescale):
        return reference.pack(x.cpu(), block_size, keep, value_format, selection)


def assert_same(packed, right):
    for actual, wanted in zip(packed, right, strict=True):
        assert actual.dtype == wanted.dtype
        assert torch.equal(actual.cpu().isnan(), wanted.isnan())
        assert torch.equal(actual.cpu().nan_to_num(0), wanted.nan_to_num(0))


def check(x, block_size, keep, way, value_format="same", dtype=None):
    """Compare a plan with the reference; ``dtype``: that the plan casts to."""
    selection = way.removesuffix("-one-launch")
    head = x.shape, x.stride()[:2], block_size, keep
    if way == selection:
        plan = PackPlan(*head, x.device, dtype is not None, value_format, selection)
    else:
        plan = SamplePlan(*head, x.element_size(), SMALL, dtype, value_format, selection)
    copy = None if dtype is None else torch.empty(x.shape, dtype=dtype, device=x.device)
    packed = plan(x, copy)
    assert_same(packed, expected(x.to(dtype or x.dtype), block_size, keep, value_format, selection, x.device))
    return packed


@each_dtype
@each_way
@pytest.mark.parametrize(
    ("shape", "block_size", "keep"),
    [
        ((3, 122, 130), 16, 400),  # several runs a sample
        ((2, 61, 100), 7, 601),
        ((20, 3, 20), 8, 4),  # several samples a program
        ((70, 1, 9), 8, 1),
        ((2, 19, 900), 64, 51),
        ((1, 3, 300), 300, 2),
        ((1, 4, 1500), 1000, 3),
        ((1, 1, 5), 5, 1),
    ],
    ids=str,
)
def test_stores_what_the_reference_does(kernel_device, shape, block_size, keep, way, dtype):
    check(oracle.integers(*shape, dtype=dtype, device=kernel_device), block_size, keep, way)


@each_way
@pytest.mark.parametrize("value_format", [name for name in FORMATS if name != "same"])
def test_scaled_blocks_are_quantized(kernel_device, value_format, way):
    for dtype in DTYPES:
        for shape, block_size, keep in (((2, 40, 70), 16, 90), ((20, 3, 20), 8, 4), ((2, 5, 100), 20, 12)):
            x = oracle.integers(*shape, dtype=dtype, device=kernel_device)
            check(x, block_size, keep, way, value_format)


@each_way
@pytest.mark.parametrize("value_format", ["same", "int4"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=["bf16", "fp16"])
def test_a_plan_that_casts_selects_by_the_rounded_copy(kernel_device, value_format, way, dtype):
    x = nearly_integers(3, 42, 103, device=kernel_device)[:, 1:, 3:]
    check(x, 16, 150, way, value_format, dtype)


@each_way
@pytest.mark.parametrize("kind", ["slice", "expanded", "expanded-rows", "batch-second"])
def test_strides(kernel_device, kind, way):
    base = oracle.integers(5, 37, 148, device=kernel_device)
    x = {
        "slice": base[:, 2:, 7:],
        "expanded": base[:1].expand(4, 37, 148),
        "expanded-rows": base[:, :1].expand(5, 37, 148),
        "batch-second": base.transpose(0, 1),
    }[kind]
    check(x, 16, 40, way)


@each_dtype
@each_way
@pytest.mark.parametrize("value_format", ["same", "int4", "fp8"])
@pytest.mark.parametrize("keep", [1, 9, 24])
def test_peculiar_blocks(kernel_device, way, keep, value_format, dtype):
    x = oracle.integers(3, 8, 24, dtype=dtype)
    most = min(torch.finfo(dtype).max, 1e18)
    x[0, 0], x[0, 1, 3], x[0, 2, 9], x[0, 3, 20] = 0.0, float("nan"), float("inf"), -float("inf")
    x[0, 4:6], x[0, 6] = most, 1e-6
    x[1] = 0.0
    x[1, 3, 10] = 1.0
    x[2, :, ::8], x[2, :, 1::8] = float("nan"), most
    x[:, :, 2::8] = -0.0
    check(x.to(kernel_device), 8, keep, way, value_format)


@pytest.mark.parametrize("scale", [2.0**-75, 2.0**-66, 2.0**60], ids=str)
@each_way
def test_keys_at_the_ends_of_the_range(kernel_device, way, scale):
    """Sums of squares that are no normal numbers, or next to it, and priorities that overflow."""
    check(scale * oracle.integers(40, 3, 40, device=kernel_device), 8, 6, way)


@pytest.mark.parametrize("selection", ["swap", "unbiased"])
def test_selection_by_several_programs(kernel_device, monkeypatch, selection):
    monkeypatch.setattr(kernels, "REGISTER_BLOCKS", 64)
    monkeypatch.setattr(rescale, "MAX_TILE", 64)
    for keep in (1, 113, 251):
        check(oracle.integers(2, 21, 96, device=kernel_device), 8, keep, selection)


@pytest.mark.parametrize("tile", [4, 64, 4096])
def test_the_largest_dropped_key_is_found(kernel_device, monkeypatch, tile):
    monkeypatch.setattr(rescale, "MAX_TILE", tile)
    for samples, blocks in ((3, 100), (37, 5), (1, 1)):
        keys = torch.randint(0, 50, (samples, blocks), dtype=torch.int32)
        kept = torch.rand(samples, blocks) < 0.3
        right = torch.where(kept, 0, keys).amax(1)
        words = torch.cat([keys.flatten(), keys.flatten(), torch.zeros(samples, dtype=torch.int32)]).to(kernel_device)
        bitmap = reference.pack_bits(kept).to(kernel_device)
        rescale.largest_dropped(samples, blocks, bitmap.shape[1])(words, bitmap)
        assert torch.equal(words[-samples:].cpu(), right)


@pytest.mark.parametrize("samples", [2, 12], ids=["three-launches", "one-launch"])
@pytest.mark.parametrize("value_format", ["same", "int4"])
def test_plan_and_pack_take_the_selection(kernel_device, monkeypatch, samples, value_format):
    monkeypatch.setattr(kernels, "takes_one_launch", lambda *_: samples > 2)
    kernels.plan.cache_clear()
    x = oracle.integers(samples, 10, 24, device=kernel_device)
    made = []
    for selection in block_selection.BLOCK_SELECTIONS:
        right = expected(x, 8, 12, value_format, selection, x.device)
        assert_same(kernels.pack(x, 8, 12, value_format, selection), right)
        plan = kernels.plan(x.shape, x.stride(), 8, 12, x.dtype, x.device, True, None, value_format, selection)
        assert isinstance(plan, PackPlan if samples == 2 or selection == "unbiased" else SamplePlan)
        made.append(right[1])
        # Nothing is left to select, and nothing to scale.
        everything = kernels.plan(x.shape, x.stride(), 8, 30, x.dtype, x.device, True, None, value_format, selection)
        assert isinstance(everything, PackPlan if samples == 2 else SamplePlan)
    kernels.plan.cache_clear()
    assert not torch.equal(made[0], made[1])
    assert not torch.equal(made[1], made[2])


def test_beside_the_keys_there_is_one_word_a_block_and_one_a_sample():
    shape = (3, 20, 64), (20 * 64, 64), 8, 50, torch.device("cpu"), False, "same"
    assert [PackPlan(*shape, name).keys for name in block_selection.BLOCK_SELECTIONS] == [480, 480, 963]


@pytest.mark.gpu
@each_dtype
@pytest.mark.parametrize("way", ["swap", "unbiased"])
@pytest.mark.parametrize("value_format", ["same", "int4", "fp8"])
@pytest.mark.parametrize(
    ("shape", "block_size"),
    [((64, 196, 384), 32), ((130, 384, 196), 16), ((7, 211, 2000), 24), ((2, 3700, 1500), 16), ((4000, 1, 384), 32)],
    ids=str,
)
def test_large_samples_on_the_gpu(shape, block_size, value_format, way, dtype):
    """Values whose sums of squares are exact, so that the reference keeps the same blocks."""
    x = (torch.randint(-64, 65, shape) / 8).to(dtype).cuda()
    blocks = shape[1] * ceil_div(shape[2], block_size)
    for keep in {max(1, blocks // 20), ceil_div(blocks, 2)}:
        plan = PackPlan(shape, x.stride()[:2], block_size, keep, x.device, False, value_format, way)
        right = expected(x, block_size, keep, value_format, way, x.device)
        for _ in range(3):  # a race need not show the first time
            assert_same(plan(x), right)


@pytest.mark.gpu
@each_dtype
@pytest.mark.parametrize(("shape", "block_size"), [((64, 196, 384), 32), ((130, 384, 196), 16)], ids=str)
def test_swap_in_one_launch_on_the_gpu(shape, block_size, dtype):
    x = (torch.randint(-64, 65, shape) / 8).to(dtype).cuda()
    blocks = shape[1] * ceil_div(shape[2], block_size)
    head = shape, x.stride()[:2], block_size, blocks // 3, x.element_size(), choose_config(blocks)
    plan = SamplePlan(*head, None, "same", "swap")
    right = expected(x, block_size, blocks // 3, "same", "swap", x.device)
    for _ in range(3):
        assert_same(plan(x), right)
