"""The mean that dropped blocks are read as: from which rows it is made, how it is taken away and given back."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_actprune.ops.remainder import (
    SAMPLED_ROWS,
    add_mean,
    add_mean_term,
    centred,
    feature_mean,
    mean_bytes,
    sampled_rows,
)
from tests import oracle

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    "shape",
    [(5,), (1, 5), (1024, 5), (1025, 5), (7, 100_000, 2), (3000, 3000, 1), (2048, 50, 3), (33, 14, 15, 4), (9,) * 6],
    ids=str,
)
def test_rows_are_few_and_spread_over_every_dimension(shape):
    x = torch.empty(1).expand(shape)
    rows = sampled_rows(x)
    *counts, features = rows.shape
    assert features == shape[-1]
    assert math.prod(counts) <= SAMPLED_ROWS
    assert rows._is_view()
    assert sampled_rows(rows).shape == rows.shape  # so rows can be cast before they are added up
    for count, size in zip(counts, shape[:-1], strict=False):
        assert count >= min(size, 2)
    # A step takes more than half of what it might.
    assert math.prod(counts) >= min(math.prod(shape[:-1]), SAMPLED_ROWS) / 2 ** (len(shape) - 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turned", [False, True])
def test_it_is_the_mean_of_these_rows(dtype, turned):
    x = 3 + torch.randn(40, 50, 6, dtype=torch.float64).to(dtype)
    x = x.transpose(0, 1).contiguous().transpose(0, 1) if turned else x
    mean = feature_mean(x)
    assert mean.dtype == torch.float32
    # 40 images, more than a share of 32: every other one of them; 51 rows are left for each, so all tokens.
    torch.testing.assert_close(mean.double(), x[::2].double().mean((0, 1)), rtol=1e-5, atol=0)
    assert (mean - x.double().mean((0, 1))).abs().max() < 5 / 32


def test_it_is_finite_and_zero_where_the_rows_are_not():
    x = torch.ones(4, 3, 8)
    x[0, 0, 2], x[1, 1, 3], x[2, 2, 4] = float("nan"), float("inf"), float("-inf")
    expected = torch.ones(8)
    expected[2:5] = 0
    assert torch.equal(feature_mean(x), expected)
    assert torch.equal(feature_mean(torch.full((9, 3), 3e38)), torch.zeros(3))  # whose sum overflows
    assert torch.equal(feature_mean(torch.full((900, 3), 65504.0, dtype=torch.float16)), torch.full((3,), 65504.0))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0, 4), (3, 2, 0), (0,)], ids=str)
def test_it_is_zero_without_rows(shape):
    mean = feature_mean(torch.empty(shape, dtype=torch.bfloat16))
    assert (mean.dtype, mean.shape) == (torch.float32, shape[-1:])
    assert not mean.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 8), (15, 1, 8), (3, 0, 8)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_the_mean_is_taken_away_and_given_back_rounded_once(shape, transposed, dtype):
    x, mean = torch.randn(shape).to(dtype), torch.randn(5 if transposed else 8)
    offsets = mean.repeat(3)[: shape[0] * shape[1]].reshape(*shape[:2], 1) if transposed else mean
    wide = torch.promote_types(dtype, torch.float32)
    assert torch.equal(centred(x, mean, transposed), (x.to(wide) - offsets.to(wide)).to(dtype))
    assert torch.equal(add_mean(x, mean, transposed), (x.to(wide) + offsets.to(wide)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_term_of_the_mean_is_added_in_place(dtype):
    grad, sums, mean = torch.randn(4, 6, dtype=dtype), torch.randn(4, dtype=dtype), torch.randn(6)
    expected = grad.double() + sums.double()[:, None] * mean.double()
    found = add_mean_term(grad, sums, mean)
    assert found is grad
    assert oracle.relative_error(found, expected) <= 2 * torch.finfo(dtype).eps


def test_bytes_of_a_mean():
    assert mean_bytes(96, "mean") == feature_mean(torch.randn(2, 96)).nbytes == 384
    assert mean_bytes(96, "zero") == 0
