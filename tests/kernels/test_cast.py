"""Packing that casts on the way: the copy is what torch casts, and what is stored follows from the copy."""

from __future__ import annotations

import pytest
import torch

from lightning_actprune.kernels import pack as kernels
from lightning_actprune.kernels.pack import PackPlan
from lightning_actprune.kernels.pack_sample import SamplePlan, choose_config
from lightning_actprune.ops import reference
from lightning_actprune.ops.geometry import ceil_div
from tests import oracle
from tests.kernels.test_pack_sample import SMALL, STAGED

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
PLANS = pytest.mark.parametrize("config", [None, SMALL, STAGED], ids=["three-launches", "one-launch", "staged"])


def cast_and_pack(x, block_size, keep, dtype, config):
    """Return the copy and what is stored, by three launches or, with a configuration, by one."""
    arguments = x.shape, x.stride()[:2], block_size, keep
    copy = torch.empty(x.shape, dtype=dtype, device=x.device)
    if config is None:
        plan = PackPlan(*arguments, x.device, True)
    else:
        plan = SamplePlan(*arguments, x.element_size(), config, dtype)
    return copy, plan(x, copy)


def assert_same(actual, expected):
    """Compare what may hold NaN."""
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(0, torch.inf, -torch.inf), expected.nan_to_num(0, torch.inf, -torch.inf))


def check(x, block_size, keep, dtype, config):
    copy, packed = cast_and_pack(x, block_size, keep, dtype, config)
    assert_same(copy, x.to(dtype))
    for actual, expected in zip(packed, reference.pack(x.to(dtype).cpu(), block_size, keep), strict=True):
        assert_same(actual.cpu(), expected)


def nearly_integers(*shape, device):
    """Values that differ and are integers in 16 bits, rounded or cut off: keys of what is not rounded have no ties."""
    return oracle.integers(*shape, device=device) * (1 + 2**-14 * torch.rand(shape, device=device))


@DTYPES
@PLANS
@pytest.mark.parametrize(
    ("shape", "block_size", "keep"),
    [
        ((3, 122, 130), 16, 400),
        ((2, 61, 100), 7, 601),
        ((2, 300, 33), 1, 3000),
        ((2, 19, 900), 32, 551),
        ((1, 3, 300), 300, 2),
        ((70, 3, 20), 8, 4),  # several samples a program
        ((1, 1, 5), 8, 1),
    ],
    ids=str,
)
def test_keys_are_those_of_the_rounded_values(kernel_device, shape, block_size, keep, config, dtype):
    check(nearly_integers(*shape, device=kernel_device), block_size, keep, dtype, config)


@DTYPES
@PLANS
@pytest.mark.parametrize("kind", ["slice", "expanded", "expanded-rows", "batch-second", "gaps-of-a-sample"])
def test_input_with_strides_has_a_copy_without(kernel_device, kind, config, dtype):
    base = nearly_integers(5, 37, 148, device=kernel_device)
    x = {
        "slice": base[:, 2:, 7:],
        "expanded": base[:1].expand(4, 37, 148),
        "expanded-rows": base[:, :1].expand(5, 37, 148),
        "batch-second": base.transpose(0, 1),
        "gaps-of-a-sample": base[:, 1:],
    }[kind]
    check(x, 16, 40, dtype, config)


@DTYPES
@PLANS
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2.0**100], ids=str)
def test_values_that_are_not_finite_or_will_not_be(kernel_device, value, config, dtype):
    x = nearly_integers(2, 40, 130, device=kernel_device)
    x[:, 20:, 65], x[1, 3, 5] = value, float("nan")
    check(x, 8, 30, dtype, config)


@DTYPES
def test_selection_by_several_programs(kernel_device, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "REGISTER_BLOCKS", 64)
    check(nearly_integers(2, 21, 96, device=kernel_device), 8, 113, dtype, None)


@DTYPES
@PLANS
def test_every_value_is_rounded_as_torch_does(kernel_device, config, dtype):
    """Any 32 bits: NaN, subnormals, what 16 bits cannot hold, and in every other value a tie."""
    if kernel_device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter cuts fp32 off to bf16 where a GPU rounds")
    bits = torch.randint(-(2**31), 2**31, (2, 64, 130), dtype=torch.int32)
    bits[..., 0] = bits[..., 0] & ~0x7F800000  # no exponent
    tie = 0x8000 if dtype == torch.bfloat16 else 0x1000
    bits[..., ::2] = bits[..., ::2] & ~(2 * tie - 1) | tie
    x = bits.view(torch.float32).to(kernel_device)
    halfs = torch.randn(2, 64, 130).to(dtype).float().view(torch.int32) | tie
    for values in (x, halfs.view(torch.float32).to(kernel_device), torch.randn_like(x) * 2.0**-20):
        copy, _ = cast_and_pack(values, 16, 200, dtype, config)
        assert_same(copy, values.to(dtype))


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("sparsity", [0.1, 0.6, 0.97])
@pytest.mark.parametrize(
    ("shape", "block_size"),
    [((64, 196, 384), 32), ((64, 196, 1536), 32), ((64, 196, 1536), 16), ((130, 384, 196), 32), ((7, 211, 2000), 24)],
    ids=str,
)
def test_large_samples_on_the_gpu(shape, block_size, sparsity, dtype):
    """Random values: what is stored is bit for bit that of the copy, packed by the same plan without a cast."""
    x = torch.randn(shape, device="cuda")
    blocks = shape[1] * ceil_div(shape[2], block_size)
    keep, config = round(blocks * (1 - sparsity)), choose_config(blocks)
    head = shape, x.stride()[:2], block_size, keep
    plain = {None: PackPlan(*head, x.device), config: SamplePlan(*head, 2, config)}
    for way, plan in plain.items():
        expected = plan(x.to(dtype))
        for _ in range(3):  # a race need not show the first time
            copy, packed = cast_and_pack(x, block_size, keep, dtype, way)
            assert torch.equal(copy, x.to(dtype))
            assert all(torch.equal(a, b) for a, b in zip(packed, expected, strict=True))
