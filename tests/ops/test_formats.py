"""Blocks in few bits: bytes, error bounds, unbiasedness, and where the random numbers come from."""

from __future__ import annotations

import pytest
import torch

from lightning_actprune.ops import formats
from lightning_actprune.ops.formats import FORMATS, dequantize, dither, quantize

QUANTIZED = [name for name in FORMATS if name != "same"]
INTEGERS = [name for name in QUANTIZED if name.startswith("int")]
each_format = pytest.mark.parametrize("value_format", QUANTIZED)


def made_blocks(count: int, size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = 10.0 ** torch.randint(-3, 4, (count, 1), generator=generator)
    return torch.randn(count, size, generator=generator) * spread + torch.randn(count, 1, generator=generator)


def back(blocks: torch.Tensor, value_format: str, first: int = 0) -> torch.Tensor:
    numbers = torch.arange(first, first + len(blocks))
    return dequantize(quantize(blocks, numbers, value_format), blocks.shape[1], value_format, torch.float32)


@each_format
@pytest.mark.parametrize("size", [1, 7, 8, 16, 20, 33, 64, 100, 1024])
def test_bytes_of_a_row(value_format: str, size: int):
    rows = quantize(made_blocks(5, size), torch.arange(5), value_format)
    bits = {"fp8": 8}.get(value_format) or int(value_format[3:])
    header = 2 if value_format == "fp8" else 4
    exact = header + size * bits / 8
    assert rows.dtype == torch.uint8
    assert rows.shape == (5, FORMATS[value_format].row_bytes(size, 99))
    assert exact <= rows.shape[1] < exact + 4  # planes end with a byte, rows with an even one
    assert rows.shape[1] % 2 == 0


@pytest.mark.parametrize("value_format", INTEGERS)
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


@pytest.mark.parametrize("value_format", INTEGERS)
def test_rounding_is_unbiased(value_format: str):
    """The mean over 4,000 numbers of a block is its value, within five standard errors."""
    blocks, draws = made_blocks(20, 32, seed=3), 4000
    repeated = blocks.repeat(draws, 1)
    found = back(repeated, value_format).view(draws, 20, 32).double()
    error = found.std(0) / draws**0.5
    mean = found.mean(0) - blocks.double()
    # A value next to a step is rounded away from it a handful of times, or never.
    step = (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / (2 ** FORMATS[value_format].bits - 1)
    assert (mean.abs() <= 5 * error + 10 / draws * step).all()
    # Together: the squared z-scores of 640 means average to 1.
    z = (mean / error.clamp_min(1e-12))[error > 0.1 * step / draws**0.5]
    assert z.square().mean() == pytest.approx(1, abs=0.35)


def test_dither_is_uniform_and_blocks_are_independent():
    blocks = made_blocks(20_000, 16)
    u = dither(blocks, torch.arange(20_000))
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.histc(u, 50, 0, 1) / u.numel()
    assert (counts - 0.02).abs().max() < 0.001
    centred = (u - 0.5) * 12**0.5
    neighbours = (centred[1:] * centred[:-1]).mean(0)  # of blocks that follow each other, value by value
    assert neighbours.abs().max() < 0.04


def test_equal_blocks_are_rounded_independently():
    """Padding tokens, say: their errors must not add up."""
    u = dither(torch.ones(5000, 32), torch.arange(5000))
    assert u.mean(0).sub(0.5).abs().max() < 0.02
    assert (u[1:] - 0.5).mul(u[:-1] - 0.5).mean(0).abs().max() < 0.005


@each_format
def test_the_same_block_gives_the_same_bytes(value_format: str):
    blocks = made_blocks(50, 32)
    numbers = torch.arange(50)
    first = quantize(blocks, numbers, value_format)
    torch.rand(7)  # no generator is asked
    assert torch.equal(quantize(blocks.clone(), numbers, value_format), first)
    order = torch.randperm(50)
    assert torch.equal(quantize(blocks[order], numbers[order], value_format), first[order])
    if value_format != "fp8":
        assert not torch.equal(quantize(blocks, numbers + 1, value_format), first)


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
    mean = torch.stack([back(blocks, value_format, first) for first in range(0, 4000, 8)]).double().mean(0).mean(1)
    tolerance = 2**-4 if value_format == "fp8" else 2e-3
    torch.testing.assert_close(mean, values.double(), rtol=tolerance, atol=2.0**-126)


@each_format
def test_no_blocks(value_format: str):
    rows = quantize(torch.empty(0, 32), torch.empty(0, dtype=torch.long), value_format)
    assert rows.shape == (0, FORMATS[value_format].row_bytes(32, 4))
    assert dequantize(rows, 32, value_format, torch.bfloat16).shape == (0, 32)


def test_names_are_those_of_the_arguments():
    from typing import get_args

    from lightning_actprune.arguments import ValueFormatName

    assert tuple(FORMATS) == get_args(ValueFormatName)
    assert formats.FORMATS["same"].row_bytes(32, 2) == 64
