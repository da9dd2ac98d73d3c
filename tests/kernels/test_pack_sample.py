"""Packing in one launch stores what the reference does, wherever its keys and lists lie."""

from __future__ import annotations

import pytest
import torch

from lightning_actprune.kernels import pack as kernels
from lightning_actprune.kernels.pack_sample import SampleConfig, SamplePlan, choose_config
from lightning_actprune.kernels.select import REGISTER_BLOCKS
from lightning_actprune.ops import reference
from lightning_actprune.ops.geometry import ceil_div
from tests import oracle
from tests.kernels.test_select import KINDS, distribution

SMALL = SampleConfig(warps=4, piece=256, keys_kib=4, keys_stages=1, copy_kib=2, copy_stages=1)
STAGED = SampleConfig(warps=4, piece=512, keys_kib=2, keys_stages=3, copy_kib=4, copy_stages=2)

each_config = pytest.mark.parametrize("config", [SMALL, STAGED], ids=["small", "staged"])


def check(x, block_size, keep, config=SMALL):
    """Compare with the reference, and return how many words of scratch were allocated."""
    plan = SamplePlan(x.shape, x.stride()[:2], block_size, keep, x.element_size(), config)
    for actual, expected in zip(plan(x), reference.pack(x.cpu(), block_size, keep), strict=True):
        assert torch.equal(actual.cpu().nan_to_num(1e4), expected.nan_to_num(1e4))
    return plan.scratch


@each_config
@pytest.mark.parametrize(
    ("shape", "block_size", "keep", "dtype", "allocated"),
    [
        ((3, 122, 130), 16, 400, torch.bfloat16, False),
        ((3, 122, 130), 16, 100, torch.bfloat16, True),  # keys larger than the values
        ((2, 61, 100), 7, 600, torch.bfloat16, False),
        ((2, 61, 100), 7, 601, torch.bfloat16, True),  # values of the second sample not aligned to keys
        ((2, 61, 100), 7, 601, torch.float32, False),
        ((2, 300, 33), 1, 9000, torch.bfloat16, True),
        ((2, 300, 33), 1, 9899, torch.float32, True),  # a block is as long as its number
        ((2, 300, 33), 2, 5000, torch.float32, False),
        ((2, 19, 900), 32, 551, torch.float16, False),
        ((2, 19, 900), 32, 1, torch.float16, True),
        ((2, 19, 900), 32, 0, torch.bfloat16, True),
        ((1, 3, 300), 300, 2, torch.float32, False),
        ((1, 1, 5), 8, 1, torch.float32, False),
    ],
    ids=str,
)
def test_stores_what_the_reference_does(kernel_device, config, shape, block_size, keep, dtype, allocated):
    x = oracle.integers(*shape, dtype=dtype, device=kernel_device)
    assert check(x, block_size, keep, config) == (shape[0] * shape[1] * ceil_div(shape[2], block_size)) * allocated


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [7, 513, 1100])
def test_ties_and_extremes(kernel_device, blocks, kind):
    # The key of a block of one value and zero is the square of that.
    roots = distribution(kind, blocks).view(torch.float32).sqrt()
    x = torch.stack([roots, torch.zeros_like(roots)], 2).to(kernel_device)
    for keep in sorted({1, blocks // 3, blocks - 1, blocks}):
        assert check(x, 2, keep) == (0 if 2 * keep >= blocks else 3 * blocks)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30], ids=str)
@pytest.mark.parametrize("keep", [10, 300])
def test_blocks_without_a_finite_key_come_first(kernel_device, value, keep):
    x = oracle.integers(2, 40, 130, device=kernel_device)
    x[:, 20:, 65], x[1, 3, 5] = value, float("nan")
    check(x, 8, keep)


@pytest.mark.parametrize("kind", ["slice", "expanded", "expanded rows", "batch-second"])
def test_strides(kernel_device, kind):
    base = oracle.integers(5, 37, 148, dtype=torch.bfloat16, device=kernel_device)
    x = {
        "slice": base[:, 2:, 7:],
        "expanded": base[:1].expand(4, 37, 148),
        "expanded rows": base[:, :1].expand(5, 37, 148),
        "batch-second": base.transpose(0, 1),
    }[kind]
    check(x, 16, 40)


def test_plan_takes_one_launch_with_enough_samples(kernel_device, monkeypatch):
    def plan(samples, blocks):
        kernels.plan.cache_clear()
        return type(kernels.plan((samples, blocks, 8), (8, 8, 1), 8, 1, torch.float32, kernel_device, True))

    monkeypatch.setattr("lightning_actprune.kernels.pack_sample.multiprocessors", lambda device: 100)
    assert plan(75, 513) is plan(100, REGISTER_BLOCKS) is plan(150, 5000) is SamplePlan
    assert plan(74, 513) is plan(100, 512) is plan(100, REGISTER_BLOCKS + 1) is kernels.PackPlan
    assert plan(149, 5000) is kernels.PackPlan  # the second hundred would be half empty


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("sparsity", [0.1, 0.6, 0.97])
@pytest.mark.parametrize(
    ("shape", "block_size"),
    [((64, 196, 384), 32), ((64, 196, 1536), 32), ((64, 196, 1536), 16), ((130, 384, 196), 32), ((7, 211, 2000), 24)],
    ids=str,
)
def test_large_samples_on_the_gpu(shape, block_size, sparsity, dtype):
    x = oracle.integers(*shape, dtype=dtype, device="cuda")
    blocks = shape[1] * ceil_div(shape[2], block_size)
    for _ in range(3):  # a race need not show the first time
        check(x, block_size, round(blocks * (1 - sparsity)), choose_config(blocks))


@pytest.mark.gpu
def test_addresses_beyond_32_bits():
    x = torch.zeros(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    view = x.as_strided((2, 256, 128), (2**31, 128, 1))
    view.copy_(oracle.integers(2, 256, 128, dtype=torch.bfloat16, device="cuda"))
    check(view, 16, 800)
