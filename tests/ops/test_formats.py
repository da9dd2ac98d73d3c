"""Blocks in few bits: bytes, error bounds, unbiasedness, and where the random numbers come from."""

from __future__ import annotations

import pytest
import torch

from lightning_actprune.ops import formats
from lightning_actprune.ops.formats import FORMATS, MASK, dequantize, dither, quantize

QUANTIZED = [name for name in FORMATS if name != "same"]
INTEGERS = [name for name in QUANTIZED if name.startswith("int")]
each_format = pytest.mark.parametrize("value_format", QUANTIZED)
each_integer = pytest.mark.parametrize("value_format", INTEGERS)


def made_blocks(count: int, size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = 10.0 ** torch.randint(-3, 4, (count, 1), generator=generator)
    return torch.randn(count, size, generator=generator) * spread + torch.randn(count, 1, generator=generator)


def back(blocks: torch.Tensor, value_format: str) -> torch.Tensor:
    return dequantize(quantize(blocks, value_format), blocks.shape[1], value_format, torch.float32)


def headers(values: torch.Tensor) -> torch.Tensor:
    """The 16 bits of each stored block."""
    return values.flatten()[-2 * len(values) :].view(torch.int16).long() & 0xFFFF


def scales(values: torch.Tensor) -> torch.Tensor:
    """The scales of stored integers, by the formula of the module's docstring, in fp64."""
    code = (headers(values) & 511) - 1
    return 2.0**-40 * (1 + (code % 8).double() / 8) * 2.0 ** (code // 8).double()


@each_format
@pytest.mark.parametrize("size", [1, 7, 8, 16, 20, 33, 64, 100, 1024])
def test_bytes_of_a_row(value_format: str, size: int):
    rows = quantize(made_blocks(5, size), value_format)
    bits = {"fp8": 8}.get(value_format) or int(value_format[3:])
    exact = 2 + size * bits / 8
    assert rows.dtype == torch.uint8
    assert rows.shape == (5, FORMATS[value_format].row_bytes(size, 99))
    assert exact <= rows.shape[1] < exact + 4  # planes end with a byte, rows with an even one
    assert rows.shape[1] % 2 == 0


@pytest.mark.parametrize(("value_format", "expected"), [("int2", 10), ("int3", 14), ("int4", 18), ("int8", 34)])
def test_bytes_of_a_block_of_32_values(value_format: str, expected: int):
    assert FORMATS[value_format].row_bytes(32, 4) == expected


@each_integer
@pytest.mark.parametrize("size", [8, 20, 32, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_uniform_within_half_a_step(value_format: str, size: int, dtype: torch.dtype):
    """Whatever the values are, and wherever they lie: within +-scale/2, of mean zero and of variance scale^2/12."""
    blocks = (made_blocks(1000, size) / 8).to(dtype)
    stored = quantize(blocks, value_format)
    exact, scale = blocks.double(), scales(stored)[:, None]
    error = (back(blocks, value_format).double() - exact) / scale
    # A number read is rounded once, to 24 bits; dithers are multiples of 2^-11 or less.
    assert (error.abs() <= 0.5 * (1 + 2**-10) + exact.abs() / scale * 2**-24).all()
    count = error.numel()
    # Within a block dithers depend on each other, so that few standard errors would be too strict.
    assert error.mean().abs() < 5 * (12 * count) ** -0.5
    assert error.square().mean() == pytest.approx(1 / 12, abs=5 * (1 / 180 / 1000) ** 0.5)
    low, spread = exact.amin(1, keepdim=True), exact.amax(1, keepdim=True) - exact.amin(1, keepdim=True)
    need = torch.maximum(spread * 32 / 31, low.abs() * 32 / 63) / (2 ** FORMATS[value_format].bits - 1)
    assert (scale >= need).all()
    assert (scale <= need * 1.126).all()  # three bits of mantissa


def test_fp8_is_rounded_to_nearest():
    blocks = made_blocks(300, 32)
    found, largest = back(blocks, "fp8"), blocks.abs().amax(1, keepdim=True)
    # Three bits of mantissa; the least normal number is 2^-6 of 448, and the scale is rounded up by at most 2^-7.
    assert ((found - blocks).abs() <= blocks.abs() * 2**-4 + largest / 448 * 2**-9).all()
    assert torch.equal(
        back(torch.tensor([[448.0, -224.0, 1.0, 0.0] * 2]), "fp8"), torch.tensor([[448.0, -224.0, 1.0, 0.0] * 2])
    )


@each_integer
def test_the_mean_over_places_is_the_value(value_format: str):
    """Over 4,000 places of a block, within five standard errors, and its errors have the variance of uniform ones."""
    blocks, draws = made_blocks(60, 32, seed=3), 4000
    repeated = blocks.repeat(draws, 1)
    scale = scales(quantize(blocks, value_format))[:, None]
    error = (back(repeated, value_format).view(draws, 60, 32).double() - blocks.double()) / scale
    z = error.mean(0) * (12 * draws) ** 0.5
    assert z.abs().max() < 5
    # Together: the squared z-scores of 60 independent blocks of 32 means average to 1, give or take 0.09.
    assert z.square().mean() == pytest.approx(1, abs=0.35)
    assert (error.square().mean(0) * 12 - 1).abs().max() < 5 * (0.8 / draws) ** 0.5


@each_integer
def test_dither_is_uniform_and_blocks_are_independent(value_format: str):
    u = dither(headers(quantize(made_blocks(20_000, 16), value_format)), 16, FORMATS[value_format].bits)
    assert u.min() > 0
    assert u.max() < 1
    counts = torch.histc(u, 50, 0, 1) / u.numel()
    assert (counts - 0.02).abs().max() < 0.001
    centred = (u - 0.5) * 12**0.5
    for lag in (1, 2, 3, 16, 1000):  # of blocks that follow each other, value by value: 4.5 standard errors
        assert (centred[lag:] * centred[:-lag]).mean(0).abs().max() < 4.5 * (20_000 - lag) ** -0.5


@each_integer
def test_dither_of_a_block_is_spread_evenly(value_format: str):
    """Of b equal parts of [0, 1), each holds one of the b values."""
    u = dither(headers(quantize(made_blocks(50, 32), value_format)), 32, FORMATS[value_format].bits)
    assert torch.equal((32 * u).floor().sort(1).values, torch.arange(32.0).expand(50, 32))


@each_integer
def test_equal_blocks_are_rounded_independently(value_format: str):
    """Padding tokens, say: their errors must not add up."""
    u = dither(headers(quantize(torch.ones(5000, 32), value_format)), 32, FORMATS[value_format].bits)
    assert u.mean(0).sub(0.5).abs().max() < 4.5 * (12 * 5000) ** -0.5
    for lag in (1, 2, 7, 64):
        assert (12 * (u[lag:] - 0.5) * (u[:-lag] - 0.5)).mean(0).abs().max() < 4.5 * (5000 - lag) ** -0.5


def test_places_near_each_other_never_share_a_hash():
    """Whatever their headers are: of 2^16 places all hashes differ (here their highest bits, which mix last)."""
    each = torch.randint(0, 2**16, (2**16,), generator=torch.Generator().manual_seed(0))
    assert len((((each << 16) + torch.arange(2**16) * formats.PLACE) & MASK).unique()) == 2**16


@each_integer
def test_dither_of_a_place_changes_with_the_header(value_format: str):
    """A parameter's next step must not repeat the errors of the last one, though its blocks have the same places."""
    before = made_blocks(20_000, 16)
    after = before * (1 + torch.rand(20_000, 1))
    bits = FORMATS[value_format].bits
    first, second = (headers(quantize(blocks, value_format)) for blocks in (before, after))
    changed = first != second
    assert changed.float().mean() > 0.8
    u, v = dither(first, 16, bits)[changed] - 0.5, dither(second, 16, bits)[changed] - 0.5
    assert (12 * u * v).mean(0).abs().max() < 4.5 * changed.sum().item() ** -0.5


@each_integer
def test_codes_never_leave_their_bits(value_format: str):
    """The largest and least values with any dither: of blocks of two, far from zero and near to it, any way.

    A code too large or too small would be off by a whole range.
    """
    spread = torch.rand(200_000, 1) * 10.0 ** torch.randint(-11, 3, (200_000, 1))
    low = spread * torch.randn(200_000, 1) * 10.0 ** torch.randint(-3, 4, (200_000, 1))
    low[:20_000] = (low[:20_000] / spread[:20_000]).round() * spread[:20_000]
    low[:2000] = 0.0
    blocks = torch.cat([low, low + spread], 1)
    scale = scales(quantize(blocks, value_format))[:, None]
    error = back(blocks, value_format).double() - blocks.double()
    assert (error.abs() <= scale * (0.5 + 2**-10) + blocks.abs().double() * 2**-23).all()


def test_inverse_of_a_scale_is_the_same_from_any_approximation():
    """Whichever way 1 / scale was rounded: off by up to 8 units in the last place, of all values of bf16's mantissa."""
    scale = torch.arange(128, 256).float()[:, None] * 2.0 ** torch.tensor([-133, -40.0, -7, 0, 60, 118])
    nearest = 1 / scale
    refined = formats._refine(nearest, scale)
    assert ((refined.double() * scale - 1).abs() <= 2**-23).all()
    for off in range(-8, 9):
        approximate = (nearest.view(torch.int32) + off).view(torch.float32)
        assert torch.equal(formats._refine(approximate, scale), refined)


@each_format
def test_the_same_block_gives_the_same_bytes(value_format: str):
    blocks = made_blocks(50, 32)
    first = quantize(blocks, value_format)
    torch.rand(7)  # no generator is asked
    assert torch.equal(quantize(blocks.clone(), value_format), first)
    assert torch.equal(back(blocks[:20], value_format), back(blocks, value_format)[:20])
    assert torch.equal(back(blocks[1:], value_format), back(blocks, value_format)[1:]) is (value_format == "fp8")


@each_format
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_block_that_is_not_finite_is_nan(value_format: str, value: float):
    blocks = made_blocks(3, 16)
    blocks[1, 5] = value
    found = back(blocks, value_format)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


@each_format
def test_constant_and_extreme_blocks(value_format: str):
    values = torch.tensor([0.0, -0.0, 1.0, -3.7, 1e-40, 3e7, -3e7, 65504.0, -1e-9])
    blocks = values[:, None].repeat(1, 32)
    found = back(blocks, value_format)
    assert (found[:2] == 0).all()
    assert value_format == "fp8" or not found[:2].signbit().any()
    assert found.isfinite().all()
    mean = back(blocks.repeat(500, 1), value_format).view(500, 9, 32).double().mean((0, 2))
    tolerance = 2**-4 if value_format == "fp8" else 2e-3
    torch.testing.assert_close(mean, values.double(), rtol=tolerance, atol=2.0**-46)


@each_integer
def test_range_of_scales(value_format: str):
    """The least scale serves all that is smaller, and above the largest a block is lost rather than wrong."""
    most = 2 ** FORMATS[value_format].bits - 1
    tiny = torch.randn(100, 32) * 10.0 ** -torch.arange(11, 41, 30 / 100)[:100, None]
    assert ((back(tiny, value_format) - tiny).abs().amax(1) <= scales(quantize(tiny, value_format)) * 0.5005).all()
    assert scales(quantize(tiny, value_format))[-30:].eq(2.0**-40).all()
    ends = formats.MOST_SCALE * most / 32 * torch.tensor([[0.0, 31.0], [-31.0, 0.0], [63.0, 64.0], [-63.0, -62.0]])
    assert back(ends * 0.999, value_format).isfinite().all()
    assert back(ends * 1.001, value_format).isnan().all()


@each_format
def test_no_blocks(value_format: str):
    rows = quantize(torch.empty(0, 32), value_format)
    assert rows.shape == (0, FORMATS[value_format].row_bytes(32, 4))
    assert dequantize(rows, 32, value_format, torch.bfloat16).shape == (0, 32)


def test_names_are_those_of_the_arguments():
    from typing import get_args

    from lightning_actprune.arguments import ValueFormatName

    assert tuple(FORMATS) == get_args(ValueFormatName)
    assert formats.FORMATS["same"].row_bytes(32, 2) == 64
