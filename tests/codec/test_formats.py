"""Quantized blocks: bytes, error bounds, unbiasedness, and where the random numbers come from."""

from __future__ import annotations

import pytest
import torch

from lightning_actprune.codec import formats
from lightning_actprune.codec.formats import DITHER_BITS, MASK, PLANES, dequantize, quantize, row_bytes
from tests.support.marks import cover
from tests.support.packing import DTYPES, each_bits


def made_blocks(count: int, size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = 10.0 ** torch.randint(-3, 4, (count, 1), generator=generator)
    return torch.randn(count, size, generator=generator) * spread + torch.randn(count, 1, generator=generator)


def back(blocks: torch.Tensor, bits: int) -> torch.Tensor:
    return dequantize(quantize(blocks, bits), blocks.shape[1], bits, torch.float32)


def dither(headers: torch.Tensor, size: int, bits: int) -> torch.Tensor:
    """The uniform numbers of blocks in [0, 1), fp32."""
    return (formats.dither(headers, size, bits).float() + 0.5) * 2.0 ** (bits - DITHER_BITS)


def headers(values: torch.Tensor) -> torch.Tensor:
    """The 16 bits of each stored block, ``[nnz, 1]``."""
    return values.flatten()[-2 * len(values) :].view(torch.int16)[:, None].long() & 0xFFFF


def scales(values: torch.Tensor) -> torch.Tensor:
    """The scales of stored integers, by the formula of the module's docstring, in fp64."""
    code = (headers(values) & 511) - 1
    return 2.0**-40 * (1 + (code % 8).double() / 8) * 2.0 ** (code // 8).double()


@pytest.mark.parametrize(("bits", "size", "dtype"), cover(list(PLANES), (8, 20, 32, 100), DTYPES), ids=str)
def test_errors_are_uniform_within_half_a_step(bits: int, size: int, dtype: torch.dtype):
    """Whatever the values are, and wherever they lie: within +-scale/2, of mean zero and of variance scale^2/12."""
    blocks = (made_blocks(1000, size) / 8).to(dtype)
    stored = quantize(blocks, bits)
    exact, scale = blocks.double(), scales(stored)
    error = (back(blocks, bits).double() - exact) / scale
    # A number read is rounded once, to 24 bits; dithers are multiples of 2^-11 or less.
    assert (error.abs() <= 0.5 * (1 + 2**-10) + exact.abs() / scale * 2**-24).all()
    assert stored.shape == (1000, row_bytes(size, bits, 99))
    assert 0 <= stored.shape[1] - (2 + size * bits / 8) < 4  # planes end with a byte, rows with an even one
    assert stored.shape[1] % 2 == 0
    count = error.numel()
    # Within a block dithers depend on each other, so that few standard errors would be too strict.
    assert error.mean().abs() < 5 * (12 * count) ** -0.5
    assert error.square().mean() == pytest.approx(1 / 12, abs=5 * (1 / 180 / 1000) ** 0.5)
    low, spread = exact.amin(1, keepdim=True), exact.amax(1, keepdim=True) - exact.amin(1, keepdim=True)
    need = torch.maximum(spread * 32 / 31, low.abs() * 32 / 63) / (2**bits - 1)
    assert (scale >= need).all()
    assert (scale <= need * 1.126).all()  # three bits of mantissa


@each_bits
def test_the_mean_over_places_is_the_value(bits: int):
    """Over 4,000 places of a block, within five standard errors, and its errors have the variance of uniform ones."""
    blocks, draws = made_blocks(60, 32, seed=3), 4000
    repeated = blocks.repeat(draws, 1)
    scale = scales(quantize(blocks, bits))
    error = (back(repeated, bits).view(draws, 60, 32).double() - blocks.double()) / scale
    z = error.mean(0) * (12 * draws) ** 0.5
    assert z.abs().max() < 5
    # Together: the squared z-scores of 60 independent blocks of 32 means average to 1, give or take 0.09.
    assert z.square().mean() == pytest.approx(1, abs=0.35)
    assert (error.square().mean(0) * 12 - 1).abs().max() < 5 * (0.8 / draws) ** 0.5


@pytest.mark.parametrize("kind", ["random", "equal"])
@each_bits
def test_dither_is_uniform_and_blocks_are_independent(bits: int, kind: str):
    """Equal blocks too: padding tokens, say, whose errors must not add up."""
    blocks = made_blocks(20_000, 16) if kind == "random" else torch.ones(20_000, 16)
    u = dither(headers(quantize(blocks, bits)), 16, bits)
    assert u.min() > 0
    assert u.max() < 1
    # Of 16 equal parts of [0, 1), each holds one of the values of a block.
    assert torch.equal((16 * u).floor().sort(1).values, torch.arange(16.0).expand(20_000, 16))
    counts = torch.histc(u, 50, 0, 1) / u.numel()
    assert (counts - 0.02).abs().max() < 0.001
    centred = (u - 0.5) * 12**0.5
    for lag in (1, 2, 3, 16, 64, 1000):  # of blocks that follow each other, value by value: 4.5 standard errors
        assert (centred[lag:] * centred[:-lag]).mean(0).abs().max() < 4.5 * (20_000 - lag) ** -0.5


def test_places_near_each_other_never_share_a_hash():
    """Whatever their headers are: of 2^16 places all hashes differ (here their highest bits, which mix last)."""
    each = torch.randint(0, 2**16, (2**16,), generator=torch.Generator().manual_seed(0))
    assert len((((each << 16) + torch.arange(2**16) * formats.PLACE) & MASK).unique()) == 2**16


@each_bits
def test_dither_of_a_place_changes_with_the_header(bits: int):
    """A parameter's next step must not repeat the errors of the last one, though its blocks have the same places."""
    before = made_blocks(20_000, 16)
    after = before * (1 + torch.rand(20_000, 1))
    first, second = (headers(quantize(blocks, bits)) for blocks in (before, after))
    changed = (first != second).flatten()
    assert changed.float().mean() > 0.8
    u, v = dither(first, 16, bits)[changed] - 0.5, dither(second, 16, bits)[changed] - 0.5
    assert (12 * u * v).mean(0).abs().max() < 4.5 * changed.sum().item() ** -0.5


@each_bits
def test_codes_never_leave_their_bits(bits: int):
    """Of blocks of two, far from zero and near to it: one too large or too small would be off by a whole range."""
    spread = torch.rand(200_000, 1) * 10.0 ** torch.randint(-11, 3, (200_000, 1))
    low = spread * torch.randn(200_000, 1) * 10.0 ** torch.randint(-3, 4, (200_000, 1))
    low[:20_000] = (low[:20_000] / spread[:20_000]).round() * spread[:20_000]
    low[:2000] = 0.0
    blocks = torch.cat([low, low + spread], 1)
    scale = scales(quantize(blocks, bits))
    error = back(blocks, bits).double() - blocks.double()
    assert (error.abs() <= scale * (0.5 + 2**-10) + blocks.abs().double() * 2**-23).all()


@each_bits
def test_constant_and_extreme_blocks(bits: int):
    rows = quantize(torch.empty(0, 32), bits)
    assert dequantize(rows, 32, bits, torch.bfloat16).shape == (0, 32)
    values = torch.tensor([0.0, -0.0, 1.0, -3.7, 1e-40, 3e7, -3e7, 65504.0, -1e-9])
    blocks = values[:, None].repeat(1, 32)
    found = back(blocks, bits)
    assert (found[:2] == 0).all()
    assert not found[:2].signbit().any()
    assert found.isfinite().all()
    mean = back(blocks.repeat(500, 1), bits).view(500, 9, 32).double().mean((0, 2))
    torch.testing.assert_close(mean, values.double(), rtol=2e-3, atol=2.0**-46)


@each_bits
def test_range_of_scales(bits: int):
    """The least scale serves all that is smaller, and above the largest a block is lost rather than wrong."""
    most = 2**bits - 1
    tiny = torch.randn(100, 32) * 10.0 ** -torch.arange(11, 41, 30 / 100)[:100, None]
    assert ((back(tiny, bits) - tiny).abs().amax(1, keepdim=True) <= scales(quantize(tiny, bits)) * 0.5005).all()
    assert scales(quantize(tiny, bits))[-30:].eq(2.0**-40).all()
    ends = formats.MOST_SCALE * most / 32 * torch.tensor([[0.0, 31.0], [-31.0, 0.0], [63.0, 64.0], [-63.0, -62.0]])
    assert back(ends * 0.999, bits).isfinite().all()
    assert back(ends * 1.001, bits).isnan().all()
    for value in (float("nan"), float("inf"), -float("inf")):
        blocks = made_blocks(3, 16)
        blocks[1, 5] = value
        assert torch.equal(back(blocks, bits).isnan().sum(1), torch.tensor([0, 16, 0]))
