"""Which blocks are kept: what is random, what is certain, and that the unbiased choice is unbiased."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_actprune.ops import reference
from lightning_actprune.ops.block_selection import BLOCK_SELECTIONS, factors, selection_keys
from lightning_actprune.ops.dispatch import force_backend
from lightning_actprune.ops.formats import FORMATS
from lightning_actprune.ops.pack import pack
from tests import oracle

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
each_selection = pytest.mark.parametrize("block_selection", BLOCK_SELECTIONS)
each_random = pytest.mark.parametrize("block_selection", BLOCK_SELECTIONS[1:])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp64", "fp32", "bf16", "fp16"])


def unpacked(x, block_size, keep, block_selection):
    """Return what is read of ``x [S, T, L]`` after packing, and which blocks are kept: ``[S, N]``."""
    samples, rows, length = x.shape
    values, bitmap, _ = pack(x, block_size, keep, "same", block_selection)
    mask = reference.unpack_bits(bitmap, rows * -(-length // block_size))
    assert mask.sum(1).tolist() == [keep] * samples
    return reference.unpack(values, bitmap, samples * rows, length).view(x.shape), mask


def heavy_tailed(samples, blocks, size, seed=0):
    """Return samples ``[S, N, size]`` of one block a row, their norms over two orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(1.5 * torch.randn(samples, blocks, 1, generator=generator))
    return torch.randn(samples, blocks, size, generator=generator) * spread


def draws(x, keep, block_selection, times, dtype=torch.float32):
    """Return how much is read of each block of one sample, ``[times, N]``: alike but for their numbers."""
    read, mask = unpacked(x.to(dtype).expand(times, -1, -1), x.shape[2], keep, block_selection)
    wide = x.to(dtype).double()
    shares = (read.double() * wide).sum(2) / wide.square().sum(2)
    assert torch.equal(shares > 0, mask)
    return shares


def hashed(bits, number):
    """Return the uniform 24 bits of a block in plain Python."""
    h = (bits + number * 0xC2B2AE35) % 2**32
    h = (h ^ (h >> 16)) * 0x7FEB352D % 2**32
    h = (h ^ (h >> 15)) * 0x846CA68B % 2**32
    return h >> 8


@pytest.mark.parametrize("block_selection", ["swap", "unbiased"])
def test_keys_are_those_of_plain_python(block_selection):
    squares = torch.exp(20 * torch.randn(4, 50)).clamp(max=1e38)
    squares[0, :6] = torch.tensor([0.0, torch.inf, 1e-45, 2.0**-126, 3.4e38, 1.0])
    found = selection_keys(squares, block_selection)
    for number, (square, key) in enumerate(zip(squares.flatten().numpy(), found.flatten().tolist(), strict=True)):
        bits, u = int(square.view(np.int32)), hashed(int(square.view(np.int32)), number)
        if bits in (0, 0x7F800000):
            assert key == (bits if block_selection == "swap" else float(square))
        elif block_selection == "swap":
            assert key == min(max(bits + 3 * u // 2 - 3 * 2**22, 1), 0x7F7FFFFF)
        else:
            share = np.float32((u + 1) / 2**24)
            with np.errstate(over="ignore"):
                assert key == min(square / (share * share), np.finfo(np.float32).max)


def test_factors_are_those_of_the_definition():
    squares = heavy_tailed(20, 40, 8).square().sum(2)
    keys = selection_keys(squares, "unbiased")
    kept = reference.keep_mask(keys, 13)
    found = factors(squares, keys, kept)
    for q, key, mask, factor in zip(squares.double(), keys.double(), kept, found.double(), strict=True):
        tau = key.sort(descending=True).values[13]
        torch.testing.assert_close(factor[mask], (tau / q).sqrt().clamp(min=1)[mask], rtol=2e-7, atol=0)


@each_dtype
def test_unbiased_means_are_the_blocks(dtype):
    """Within five standard errors for each block of a sample, those of a tail of small ones too."""
    x, times = torch.randn(1, 24, 4), 20_000
    x *= (10.0 ** torch.linspace(1, -1.8, 24) / x[0].norm(dim=1))[:, None]
    shares = draws(x, 8, "unbiased", times, dtype)
    kept = (shares > 0).double().mean(0)
    assert kept.max() > 0.999  # some are certain
    assert 0.0005 < kept.min() < 0.02  # and some rare
    error = shares.std(0) / times**0.5
    # Those that are kept without being scaled have no error but their rounding's.
    assert (
        (shares.mean(0) - 1).abs() <= 5 * error + {torch.bfloat16: 2e-3, torch.float16: 3e-4}.get(dtype, 1e-6)
    ).all()


@pytest.mark.parametrize("block_selection", ["largest", "swap"])
def test_other_selections_are_biased(block_selection):
    shares = draws(heavy_tailed(1, 24, 4), 8, block_selection, 2000)
    error = shares.std(0) / 2000**0.5
    assert ((shares.mean(0) - 1).abs() > 5 * error + 0.1).sum() >= 8
    assert set(shares.unique().round(decimals=5).tolist()) == {0.0, 1.0}


def test_many_small_blocks_have_their_say():
    """Their sum, of which the largest blocks know nothing."""
    x = torch.cat([torch.full((1, 3, 4), 50.0), 0.1 + 0.01 * torch.randn(1, 300, 4)], 1)
    read, _ = unpacked(x.expand(3000, -1, -1), 4, 20, "unbiased")
    sums = read[:, 3:].double().sum((1, 2))
    right = x[:, 3:].double().sum()
    assert (sums.mean() - right).abs() < 5 * sums.std() / 3000**0.5
    assert sums.std() < 0.3 * right
    assert torch.equal(read[:, :3], x[:, :3].expand(3000, -1, -1))
    assert unpacked(x, 4, 20, "largest")[0][:, 3:].sum() < 0.1 * right


def least_variance(norms, keep):
    """Return the least variance of an unbiased choice of ``keep`` blocks on average: likely in proportion to norms."""
    low, high = 0.0, float(norms.sum())
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if (norms / middle).clamp(max=1).sum() > keep else (low, middle)
    return float((norms * high - norms.square()).clamp(min=0).sum())


@pytest.mark.parametrize("seed", range(4))
def test_variance_is_next_to_the_least_and_far_from_that_of_a_uniform_choice(seed):
    """No more than the least of one block less (M. Szegedy, "The DLT priority sampling is essentially optimal")."""
    x, keep, times = heavy_tailed(1, 60, 4, seed), 12, 4000
    for sample in (x, x / x.norm(dim=2, keepdim=True)):
        norms = sample[0].double().norm(dim=1)
        read, _ = unpacked(sample.expand(times, -1, -1), 4, keep, "unbiased")
        errors = (read - sample).double().square().sum((1, 2))
        slack = 5 * errors.std() / times**0.5
        assert least_variance(norms, keep) - slack < errors.mean() < least_variance(norms, keep - 1) + slack
    assert least_variance(x[0].norm(dim=1), keep - 1) < 0.5 * (60 / keep - 1) * x.square().sum()


def test_choices_of_samples_and_blocks_are_independent():
    mask = unpacked(torch.ones(4000, 30, 4), 4, 10, "unbiased")[1].double() - 1 / 3
    neighbours = (mask[1:] * mask[:-1]).mean(0), (mask[:, 1:] * mask[:, :-1]).mean(0) + 2 / 9 / 29
    for means in neighbours:  # the second ones share a number of places
        assert means.abs().max() < 5 * (2 / 9) / 4000**0.5


@pytest.mark.parametrize("keep", [1, 7, 20, 39])
def test_stored_blocks_have_a_common_least_norm(keep):
    x = heavy_tailed(50, 40, 4)
    read, mask = unpacked(x, 4, keep, "unbiased")
    for stored, given in ((r[m], b[m]) for r, b, m in zip(read, x, mask, strict=True)):
        scaled = (stored != given).any(1)
        norms = stored.double().norm(dim=1)
        if scaled.any():
            torch.testing.assert_close(norms[scaled], norms[scaled][:1].expand(int(scaled.sum())), rtol=1e-6, atol=0)
            assert (norms >= norms[scaled].min() * (1 - 1e-6)).all()
            assert (stored[scaled].norm(dim=1) > given[scaled].norm(dim=1)).all()


@each_dtype
@pytest.mark.parametrize("keep", [1, 7, 20, 39])
def test_swap_changes_places_within_a_factor_of_the_norm(dtype, keep):
    x = heavy_tailed(200, 40, 4).to(dtype)
    read, mask = unpacked(x, 4, keep, "swap")
    assert torch.equal(read[mask], x[mask])
    norms = x.double().norm(dim=2)
    last = norms.sort(dim=1, descending=True).values[:, keep - 1 : keep]
    assert mask[norms > last * 2**1.5 * (1 + 1e-6)].all()
    assert not mask[norms < last / 2**1.5 * (1 - 1e-6)].any()
    assert (mask != unpacked(x, 4, keep, "largest")[1]).any(1).float().mean() > 0.1


@each_random
def test_the_same_input_gives_the_same_choice_and_another_one_another(device, block_selection):
    x = oracle.integers(2, 40, 32, device=device)
    state = torch.get_rng_state()
    first = pack(x, 8, 60, "same", block_selection)
    assert torch.equal(torch.get_rng_state(), state)
    for other in (x.clone(), x.transpose(0, 1).contiguous().transpose(0, 1)):
        assert all(map(torch.equal, pack(other, 8, 60, "same", block_selection), first))
    assert not torch.equal(pack(2 * x, 8, 60, "same", block_selection)[1], first[1])
    # A sample at another place in the batch.
    assert not torch.equal(pack(x.flip(0), 8, 60, "same", block_selection)[1].flip(0), first[1])


@each_random
@pytest.mark.parametrize("value_format", FORMATS)
def test_all_blocks_are_kept_as_they_are(device, block_selection, value_format):
    x = torch.randn(2, 5, 40, device=device)
    expected = pack(x, 16, 15, value_format)
    assert all(map(torch.equal, pack(x, 16, 15, value_format, block_selection), expected))


@each_selection
@pytest.mark.parametrize("shape", [(0, 5, 16), (2, 5, 16)], ids=str)
def test_nothing_to_keep(device, block_selection, shape):
    values, bitmap, offsets = pack(torch.randn(shape, device=device), 8, 0, "same", block_selection)
    assert values.shape == (0, 8)
    assert not bitmap.any()
    assert not offsets.any()


@each_selection
def test_zeros_are_kept_last_and_in_order(device, block_selection):
    x = torch.zeros(3, 10, 8, device=device)
    x[:, 7], x[:, 4] = 1e-15, 3.0
    for keep in (1, 2, 5):
        read, mask = unpacked(x, 8, keep, block_selection)
        if keep >= 2:
            assert torch.equal(read, x)
            assert [row.nonzero().flatten().tolist() for row in mask.cpu()] == [sorted([4, 7, *range(keep - 2)])] * 3
        assert read.isfinite().all()


@each_selection
def test_tiny_blocks_are_preferred_to_zeros(block_selection):
    x = torch.zeros(200, 10, 4)
    x[:, 6:] = 1e-22  # squares below the normal numbers
    read, mask = unpacked(x, 4, 4, block_selection)
    assert mask[:, 6:].all()
    assert torch.equal(read, x)


@each_selection
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@each_dtype
def test_blocks_without_a_finite_key_come_first_and_are_stored_as_they_are(block_selection, value, dtype):
    x = torch.randn(100, 12, 8).to(dtype)
    x[:, 5, 3], x[:, 9, 0] = value, float("nan")
    read, mask = unpacked(x, 8, 4, block_selection)
    assert mask[:, [5, 9]].all()
    assert torch.equal(read[:, [5, 9]].isnan(), x[:, [5, 9]].isnan())
    assert torch.equal(read[:, [5, 9]].nan_to_num(), x[:, [5, 9]].nan_to_num())
    assert read[:, [0, 1, 2, 3, 4, 6, 7, 8, 10, 11]].isfinite().all()
    # More of them than places: what is dropped has a key without end, and scales nothing.
    read, mask = unpacked(torch.full_like(x, value), 8, 4, block_selection)
    assert torch.equal(mask, (torch.arange(12) < 4).expand(100, 12))
    assert torch.equal(read[:, :4].nan_to_num(1, 2, 3), torch.full_like(x[:, :4], value).nan_to_num(1, 2, 3))


@each_selection
@each_dtype
def test_huge_values_stay_finite(block_selection, dtype):
    """Priorities that overflow, and in fp16 blocks that would if they were scaled."""
    most = min(torch.finfo(dtype).max, 1e18)
    read, mask = unpacked(torch.full((500, 12, 8), most, dtype=torch.float64).to(dtype), 8, 3, block_selection)
    assert read.isfinite().all()
    assert (read[mask].abs() >= most * 0.99).all()


@each_random
@pytest.mark.parametrize("kind", ["slice", "batch-second", "expanded-rows", "short-blocks"])
def test_input_with_strides_packs_like_its_copy(device, kind, block_selection):
    base = oracle.integers(5, 9, 45, device=device)
    x = {
        "slice": base[:, 2:, 8:],
        "batch-second": base.transpose(0, 1),
        "expanded-rows": base[:, :1].expand(5, 9, 45),
        "short-blocks": base,
    }[kind]
    keep = x.shape[1] * 2
    expected = reference.pack(x.contiguous().cpu(), 8, keep, "same", block_selection)
    for actual, right in zip(pack(x, 8, keep, "same", block_selection), expected, strict=True):
        assert torch.equal(actual.cpu(), right)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=["fp32", "bf16", "fp16"])
def test_kernels_are_unbiased_on_the_gpu(dtype):
    x = heavy_tailed(1, 600, 32).to(dtype).cuda()
    with force_backend("triton"):
        shares = draws(x, 100, "unbiased", 20_000, dtype)
    error = shares.std(0) / 20_000**0.5
    rounding = {torch.bfloat16: 2e-3, torch.float16: 3e-4}.get(dtype, 1e-6)
    assert ((shares.mean(0) - 1).abs() <= 5 * error + rounding).all()
