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


@each_format
@pytest.mark.parametrize("size", [1, 7, 8, 16, 20, 33, 64, 100, 1024])
def test_bytes_of_a_row(value_format: str, size: int):
    rows = quantize(made_blocks(5, size), value_format)
    bits = {"fp8": 8}.get(value_format) or int(value_format[3:])
    header = 2 if value_format == "fp8" else 4
    exact = header + size * bits / 8
    assert rows.dtype == torch.uint8
    assert rows.shape == (5, FORMATS[value_format].row_bytes(size, 99))
    assert exact <= rows.shape[1] < exact + 4  # planes end with a byte, rows with an even one
    assert rows.shape[1] % 2 == 0


@each_integer
@pytest.mark.parametrize("size", [8, 20, 32, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_below_a_step_and_what_lies_on_a_step_is_exact(value_format: str, size: int, dtype: torch.dtype):
    blocks = (made_blocks(300, size) / 8).to(dtype)
    wide = blocks.float()
    found = back(blocks, value_format)
    step = (wide.amax(1, keepdim=True) - wide.amin(1, keepdim=True)) / (2 ** FORMATS[value_format].bits - 1)
    # Scale and offset are rounded outwards to bf16's 8 bits.
    rounded = step * (1 + 2**-6) + wide.abs().amax(1, keepdim=True) * 2**-7
    assert ((found - wide).abs() <= rounded).all()
    grid = torch.tensor([[0.0, 1.0, 2.0, 3.0] * 5]).repeat(10, 1) * 2.0 ** torch.arange(10)[:, None]
    torch.testing.assert_close(back(grid, "int2"), grid, rtol=0, atol=0)


def test_fp8_is_rounded_to_nearest():
    blocks = made_blocks(300, 32)
    found, largest = back(blocks, "fp8"), blocks.abs().amax(1, keepdim=True)
    # Three bits of mantissa; the least normal number is 2^-6 of 448, and the scale is rounded up by at most 2^-7.
    assert ((found - blocks).abs() <= blocks.abs() * 2**-4 + largest / 448 * 2**-9).all()
    assert torch.equal(
        back(torch.tensor([[448.0, -224.0, 1.0, 0.0] * 2]), "fp8"), torch.tensor([[448.0, -224.0, 1.0, 0.0] * 2])
    )


@each_integer
def test_rounding_is_unbiased(value_format: str):
    """The mean over 4,000 places of a block is its value, within five standard errors."""
    blocks, draws = made_blocks(60, 32, seed=3), 4000
    repeated = blocks.repeat(draws, 1)
    found = back(repeated, value_format).view(draws, 60, 32).double()
    error = found.std(0) / draws**0.5
    mean = found.mean(0) - blocks.double()
    # A value next to a step is rounded away from it a handful of times, or never.
    step = (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / (2 ** FORMATS[value_format].bits - 1)
    assert (mean.abs() <= 5 * error + 10 / draws * step).all()
    # Together: the squared z-scores of 60 independent blocks of 32 means average to 1, give or take 0.09.
    z = (mean / error.clamp_min(1e-12))[error > 0.1 * step / draws**0.5]
    assert z.square().mean() == pytest.approx(1, abs=0.35)


def headers(blocks: torch.Tensor, value_format: str) -> torch.Tensor:
    """The 32 bits of scale and offset of stored blocks."""
    return quantize(blocks, value_format)[:, :4].contiguous().view(torch.int32).flatten().long() & MASK


@each_integer
def test_dither_is_uniform_and_blocks_are_independent(value_format: str):
    u = dither(headers(made_blocks(20_000, 16), value_format), 16, FORMATS[value_format].bits)
    assert u.min() > 0
    assert u.max() < 1
    counts = torch.histc(u, 50, 0, 1) / u.numel()
    assert (counts - 0.02).abs().max() < 0.001
    centred = (u - 0.5) * 12**0.5
    for lag in (1, 2, 3, 16, 1000):  # of blocks that follow each other, value by value: 4.5 standard errors
        assert (centred[lag:] * centred[:-lag]).mean(0).abs().max() < 4.5 * (20_000 - lag) ** -0.5


@each_integer
def test_equal_blocks_are_rounded_independently(value_format: str):
    """Padding tokens, say: their errors must not add up."""
    u = dither(headers(torch.ones(5000, 32), value_format), 32, FORMATS[value_format].bits)
    assert u.mean(0).sub(0.5).abs().max() < 4.5 * (12 * 5000) ** -0.5
    for lag in (1, 2, 7, 64):
        assert (12 * (u[lag:] - 0.5) * (u[:-lag] - 0.5)).mean(0).abs().max() < 4.5 * (5000 - lag) ** -0.5


@each_integer
def test_dither_of_a_place_changes_with_the_header(value_format: str):
    """A parameter's next step must not repeat the errors of the last one, though its blocks have the same places."""
    before = made_blocks(20_000, 16)
    after = before * (1 + 0.05 * torch.rand(20_000, 1))
    bits = FORMATS[value_format].bits
    first, second = headers(before, value_format), headers(after, value_format)
    changed = first != second
    assert changed.float().mean() > 0.9
    u, v = dither(first, 16, bits)[changed] - 0.5, dither(second, 16, bits)[changed] - 0.5
    assert (12 * u * v).mean(0).abs().max() < 4.5 * changed.sum().item() ** -0.5


@each_integer
def test_codes_never_leave_their_bits(value_format: str):
    """The largest values with the largest dither: of blocks of two values, one of which is the maximum, any way."""
    spread = torch.rand(100_000, 1) * 10.0 ** torch.randint(-30, 30, (100_000, 1))
    low = spread * torch.randn(100_000, 1) * 10.0 ** torch.randint(-3, 4, (100_000, 1))
    blocks = torch.cat([low, low + spread], 1)
    found, most = back(blocks, value_format), 2 ** FORMATS[value_format].bits - 1
    step = (blocks.amax(1) - blocks.amin(1)) / most + blocks.abs().amax(1) * 2**-6
    assert ((found - blocks).abs().amax(1) <= 2 * step).all()  # a code too large would be cut to zero


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
    assert torch.equal(quantize(blocks[:20], value_format), first[:20])
    if value_format != "fp8":
        assert not torch.equal(quantize(blocks[1:], value_format), first[1:])


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
    values = torch.tensor([0.0, -0.0, 1.0, -3.7, 1e-40, 1e30, -1e30, 65504.0])
    blocks = values[:, None].repeat(1, 32)
    found = back(blocks, value_format)
    assert (found[:2] == 0).all()
    assert found.isfinite().all()
    mean = back(blocks.repeat(500, 1), value_format).view(500, 8, 32).double().mean((0, 2))
    tolerance = 2**-4 if value_format == "fp8" else 2e-3
    torch.testing.assert_close(mean, values.double(), rtol=tolerance, atol=2.0**-126)


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
