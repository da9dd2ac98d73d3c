"""How a tensor is cut into blocks, and which are kept: what is random, what is certain, and what is unbiased."""

from __future__ import annotations

import itertools

import pytest
import torch

from lightning_actprune.codec import blocks
from lightning_actprune.codec.blocks import (
    SELECTIONS,
    BlockGeometry,
    input_geometry,
    keep_count,
    sparsity_parts,
    stored_view,
)
from tests.support.marks import cover

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
each_selection = pytest.mark.parametrize("selection", SELECTIONS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp64", "fp32", "bf16", "fp16"])


@pytest.mark.parametrize(
    ("count", "sparsity", "kept"),
    [(10, 0.6, 4), (7, 0.5, 4), (1, 0.99, 1), (5, 0.0, 5), (0, 0.5, 0), (100, 0.29, 71), (1000, 1 - 1e-12, 1)],
)
def test_keep_count(count, sparsity, kept):
    assert keep_count(count, sparsity_parts(sparsity)) == kept
    assert sparsity_parts(5e-324) == 1
    for thousandths in range(1000):  # a sparsity is the decimal that it is written as
        assert keep_count(4704, sparsity_parts(thousandths / 1000)) == 4704 - 4704 * thousandths // 1000


@pytest.mark.parametrize(
    ("x", "block_size", "shape", "transposed"),
    [
        (torch.zeros(12), 8, (1, 1, 12), False),
        (torch.zeros(5, 12), 8, (5, 1, 12), False),
        (torch.zeros(3, 5, 12), 8, (3, 5, 12), False),
        (torch.zeros(3, 2, 5, 12), 8, (3, 10, 12), False),
        (torch.zeros(3, 12, 5).transpose(1, 2), 8, (3, 12, 5), True),  # 12 * 5 values or 5 * 16
        (torch.zeros(3, 12, 5).transpose(1, 2), 4, (3, 5, 12), False),  # 12 * 8 or 5 * 12
        (torch.zeros(3, 12, 5).transpose(1, 2), 99, (3, 5, 12), False),  # the same: cut to a row
        (torch.zeros(4, 769, 15).transpose(1, 2), 32, (4, 15, 769), False),  # blocks are not cut to a few tokens
        (torch.zeros(4, 769, 16).transpose(1, 2), 32, (4, 769, 16), True),
        (torch.zeros(3, 12, 2, 5).permute(0, 2, 3, 1), 5, (3, 12, 10), True),
        (torch.zeros(3, 7, 12)[:, 2:], 8, (3, 5, 12), False),
        (torch.zeros(1, 1, 12).expand(3, 5, 12), 8, (3, 5, 12), False),
        (torch.zeros(5, 3, 12).transpose(0, 1), 8, (3, 5, 12), False),
        (torch.zeros(3, 5, 24)[..., ::2], 8, (3, 5, 12), False),
        (torch.zeros(0, 5, 12), 8, (0, 5, 12), False),
    ],
)
def test_stored_view(x, block_size, shape, transposed):
    view, flag = stored_view(x, block_size, "sample")
    assert (tuple(view.shape), flag) == (shape, transposed)
    assert view.numel() == 0 or view.stride(-1) == 1
    if transposed or x.stride(-1) == 1:
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    rows, along = stored_view(x, 99, "token")  # every row is a sample
    assert along or tuple(rows.shape) == (x.numel() // x.shape[-1], 1, x.shape[-1])


def test_bytes_formula_of_the_design():
    """Values k*b*v, one bit per block, and one int32 per 128 blocks of a sample."""
    geometry = BlockGeometry.of(2, 3, 20, 32, 0.5)  # a block larger than the row is the row
    assert (geometry.block_size, geometry.blocks_per_row, geometry.keep) == (20, 1, 2)
    geometry = BlockGeometry.of(samples=32, rows=196, length=384, block_size=16, sparsity=0.6)
    competing = 196 * 24
    assert geometry.keep == competing - int(competing * 0.6)
    values, bitmap, offsets = 32 * geometry.keep * 16 * 4, 32 * competing // 8, 4 * 32 * 37
    assert geometry.stored_bytes(4) == values + bitmap + offsets
    assert (bitmap + offsets) / geometry.dense_bytes(2) < 0.011
    assert geometry.stored_bytes(4, 4) == 32 * geometry.keep * 10 + bitmap + offsets
    everything = BlockGeometry.of(samples=32, rows=196, length=384, block_size=16, sparsity=0.0)
    assert everything.stored_bytes(4, 4) == 32 * competing * 10


@pytest.mark.parametrize("topk_over", ["sample", "token"])
def test_a_transposed_input_takes_no_more_than_either_orientation(topk_over):
    sizes = [(196, 384), (384, 196), (64, 128), (5, 12), (2, 7), (0, 8)]
    for (tokens, features), block_size in itertools.product(sizes, (1, 4, 32, 100, 999)):
        geometry = input_geometry(torch.zeros(2, features, tokens).transpose(1, 2), block_size, 0.0, topk_over)
        filled = [geometry.kept_blocks * geometry.block_size]
        for shape in ((2, tokens, features), (2, features, tokens)):
            other = input_geometry(torch.zeros(shape), block_size, 0.0, topk_over)
            filled.append(other.kept_blocks * other.block_size)
        assert filled[0] == min(filled)
        if filled[1] == filled[2]:
            assert geometry.length == features


def unpacked(x, block_size, keep, selection):
    """Return what is read of ``x [S, T, L]`` after packing, and which blocks are kept: ``[S, N]``."""
    samples, rows, length = x.shape
    values, bitmap, _ = blocks.pack(x, block_size, keep, 0, selection)
    mask = blocks.unpack_bits(bitmap, rows * -(-length // block_size))
    assert mask.sum(1).tolist() == [keep] * samples
    return blocks.unpack(values, bitmap, samples * rows, length, block_size, 0, x.dtype).view(x.shape), mask


def heavy_tailed(samples, count, size):
    """Return samples ``[S, N, size]`` of one block a row, their norms over two orders of magnitude."""
    return torch.randn(samples, count, size) * torch.exp(1.5 * torch.randn(samples, count, 1))


@each_dtype
def test_unbiased_means_are_the_blocks(dtype):
    """Within five standard errors for each block of a sample, those of a tail of small ones too."""
    x, times = torch.randn(1, 24, 4), 20_000
    x = (x * (10.0 ** torch.linspace(1, -1.8, 24) / x[0].norm(dim=1))[:, None]).to(dtype)
    read, mask = unpacked(x.expand(times, -1, -1), 4, 8, "unbiased")
    shares = (read.double() * x.double()).sum(2) / x.double().square().sum(2)
    assert torch.equal(shares > 0, mask)
    kept = mask.double().mean(0)
    assert kept.max() > 0.999  # some are certain
    assert 0.0005 < kept.min() < 0.02  # and some rare
    # Those that are kept without being scaled have no error but their rounding's.
    bound = 5 * shares.std(0) / times**0.5 + {torch.bfloat16: 2e-3, torch.float16: 3e-4}.get(dtype, 1e-6)
    assert ((shares.mean(0) - 1).abs() <= bound).all()


def least_variance(norms, keep):
    """Return the least variance of an unbiased choice of ``keep`` blocks on average: likely in proportion to norms."""
    low, high = 0.0, float(norms.sum())
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if (norms / middle).clamp(max=1).sum() > keep else (low, middle)
    return float((norms * high - norms.square()).clamp(min=0).sum())


def test_variance_is_next_to_the_least_and_far_from_that_of_a_uniform_choice():
    """No more than the least of one block less (M. Szegedy, "The DLT priority sampling is essentially optimal")."""
    x, keep, times = heavy_tailed(1, 60, 4), 12, 4000
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


@pytest.mark.parametrize("keep", [1, 20, 39])
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


@pytest.mark.parametrize(("dtype", "keep"), list(zip(DTYPES, (20, 1, 20, 39), strict=True)), ids=str)
def test_swap_changes_places_within_a_factor_of_the_norm(dtype, keep):
    x = heavy_tailed(200, 40, 4).to(dtype)
    read, mask = unpacked(x, 4, keep, "swap")
    assert torch.equal(read[mask], x[mask])
    norms = x.double().norm(dim=2)
    last = norms.sort(dim=1, descending=True).values[:, keep - 1 : keep]
    assert mask[norms > last * 2**1.5 * (1 + 1e-6)].all()
    assert not mask[norms < last / 2**1.5 * (1 - 1e-6)].any()
    assert (mask != unpacked(x, 4, keep, "largest")[1]).any(1).float().mean() > 0.1


@pytest.mark.parametrize(
    ("selection", "value", "dtype"),
    cover(list(SELECTIONS), (float("nan"), float("inf"), -float("inf")), DTYPES),
    ids=str,
)
def test_blocks_without_a_finite_key_come_first_and_are_stored_as_they_are(selection, value, dtype):
    x = torch.randn(100, 12, 8).to(dtype)
    x[:, 5, 3], x[:, 9, 0] = value, float("nan")
    read, mask = unpacked(x, 8, 4, selection)
    assert mask[:, [5, 9]].all()
    assert torch.equal(read[:, [5, 9]].isnan(), x[:, [5, 9]].isnan())
    assert torch.equal(read[:, [5, 9]].nan_to_num(), x[:, [5, 9]].nan_to_num())
    assert read[:, [0, 1, 2, 3, 4, 6, 7, 8, 10, 11]].isfinite().all()
    # More of them than places: what is dropped has a key without end, and scales nothing.
    read, mask = unpacked(torch.full_like(x, value), 8, 4, selection)
    assert torch.equal(mask, (torch.arange(12) < 4).expand(100, 12))
    assert torch.equal(read[:, :4].nan_to_num(1, 2, 3), torch.full_like(x[:, :4], value).nan_to_num(1, 2, 3))


@each_selection
@each_dtype
def test_huge_values_stay_finite(selection, dtype):
    """Priorities that overflow, and in fp16 blocks that would if they were scaled."""
    most = min(torch.finfo(dtype).max, 1e18)
    read, mask = unpacked(torch.full((500, 12, 8), most, dtype=torch.float64).to(dtype), 8, 3, selection)
    assert read.isfinite().all()
    assert (read[mask].abs() >= most * 0.99).all()
