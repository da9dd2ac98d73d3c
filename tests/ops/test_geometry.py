"""Block arithmetic and the view of a layer input as samples, rows and values."""

from __future__ import annotations

import pytest
import torch

from lightning_actprune.ops.geometry import BlockGeometry, input_geometry, keep_count, sparsity_parts, stored_view


@pytest.mark.parametrize(
    ("blocks", "sparsity", "kept"),
    [(10, 0.6, 4), (7, 0.5, 4), (1, 0.99, 1), (5, 0.0, 5), (0, 0.5, 0), (100, 0.29, 71), (1000, 1 - 1e-12, 1)],
)
def test_keep_count(blocks, sparsity, kept):
    assert keep_count(blocks, sparsity_parts(sparsity)) == kept


@pytest.mark.parametrize("blocks", [1, 3, 999, 1000, 4704, 10**7])
def test_keep_count_takes_the_sparsity_as_the_decimal_it_is_written_as(blocks):
    for thousandths in range(1000):
        assert keep_count(blocks, sparsity_parts(thousandths / 1000)) == blocks - blocks * thousandths // 1000


def test_only_a_sparsity_of_zero_has_no_parts():
    assert sparsity_parts(0.0) == 0
    assert sparsity_parts(5e-324) == 1


@pytest.mark.parametrize(
    ("x", "shape", "transposed"),
    [
        (torch.zeros(12), (1, 1, 12), False),
        (torch.zeros(5, 12), (5, 1, 12), False),
        (torch.zeros(3, 5, 12), (3, 5, 12), False),
        (torch.zeros(3, 2, 5, 12), (3, 10, 12), False),
        (torch.zeros(3, 12, 5).transpose(1, 2), (3, 12, 5), True),
        (torch.zeros(3, 12, 2, 5).permute(0, 2, 3, 1), (3, 12, 10), True),
        (torch.zeros(12, 5).t(), (5, 1, 12), False),
        (torch.zeros(3, 7, 12)[:, 2:], (3, 5, 12), False),
        (torch.zeros(1, 1, 12).expand(3, 5, 12), (3, 5, 12), False),
        (torch.zeros(5, 3, 12).transpose(0, 1), (3, 5, 12), False),
        (torch.zeros(3, 5, 24)[..., ::2], (3, 5, 12), False),
        (torch.zeros(3, 5, 1), (3, 5, 1), False),
        (torch.zeros(0, 5, 12), (0, 5, 12), False),
        (torch.zeros(0, 12), (0, 1, 12), False),
    ],
    ids=[
        "1d", "2d", "3d", "4d", "transposed", "channels-first", "2d-transposed", "slice", "expanded", "batch-second",
        "strided-values", "one-feature", "empty-batch", "empty-rows",
    ],
)  # fmt: skip
def test_stored_view(x, shape, transposed):
    view, flag = stored_view(x, "sample")
    assert (tuple(view.shape), flag) == (shape, transposed)
    assert view.shape[-1] <= 1 or view.numel() == 0 or view.stride(-1) == 1


@pytest.mark.parametrize("kind", ["transposed", "slice", "batch-second", "expanded"])
def test_stored_view_does_not_copy(kind):
    x = {
        "transposed": torch.randn(3, 12, 5).transpose(1, 2),
        "slice": torch.randn(3, 7, 12)[:, 2:],
        "batch-second": torch.randn(5, 3, 12).transpose(0, 1),
        "expanded": torch.randn(1, 1, 12).expand(3, 5, 12),
    }[kind]
    assert stored_view(x, "sample")[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_token_scope_makes_every_row_a_sample():
    assert stored_view(torch.zeros(3, 5, 12), "token")[0].shape == (15, 1, 12)
    view, transposed = stored_view(torch.zeros(3, 12, 5).transpose(1, 2), "token")
    assert (tuple(view.shape), transposed) == ((36, 1, 5), True)


def test_block_larger_than_the_row_is_the_row():
    geometry = BlockGeometry.of(2, 3, 20, 32, 0.5)
    assert (geometry.block_size, geometry.blocks_per_row, geometry.keep) == (20, 1, 2)


def test_bytes_formula_of_the_design():
    """Values k*b*v, one bit per block, and one int32 per 128 blocks of a sample."""
    geometry = BlockGeometry.of(samples=32, rows=196, length=384, block_size=16, sparsity=0.6)
    blocks = 196 * 24
    assert geometry.keep == blocks - int(blocks * 0.6)
    values, bitmap, offsets = 32 * geometry.keep * 16 * 4, 32 * blocks // 8, 4 * 32 * 37
    assert geometry.stored_bytes(4) == values + bitmap + offsets
    assert (bitmap + offsets) / geometry.dense_bytes(2) < 0.011


def test_input_geometry_follows_the_strides():
    plain = input_geometry(torch.zeros(3, 196, 384), 32, 0.5, "sample")
    transposed = input_geometry(torch.zeros(3, 196, 384).transpose(1, 2), 32, 0.5, "sample")
    assert transposed == plain
