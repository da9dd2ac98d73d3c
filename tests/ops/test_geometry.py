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
    ("x", "block_size", "shape", "transposed"),
    [
        (torch.zeros(12), 8, (1, 1, 12), False),
        (torch.zeros(5, 12), 8, (5, 1, 12), False),
        (torch.zeros(3, 5, 12), 8, (3, 5, 12), False),
        (torch.zeros(3, 2, 5, 12), 8, (3, 10, 12), False),
        (torch.zeros(3, 12, 5).transpose(1, 2), 8, (3, 12, 5), True),  # 12 * 5 values or 5 * 16
        (torch.zeros(3, 12, 5).transpose(1, 2), 4, (3, 5, 12), False),  # 12 * 8 or 5 * 12
        (torch.zeros(3, 12, 8).transpose(1, 2), 4, (3, 8, 12), False),  # the same
        (torch.zeros(3, 12, 5).transpose(1, 2), 99, (3, 5, 12), False),  # the same: cut to a row
        (torch.zeros(3, 12, 2, 5).permute(0, 2, 3, 1), 5, (3, 12, 10), True),
        (torch.zeros(3, 12, 2, 5).permute(0, 2, 3, 1), 4, (3, 10, 12), False),
        (torch.zeros(12, 5).t(), 8, (5, 1, 12), False),
        (torch.zeros(3, 7, 12)[:, 2:], 8, (3, 5, 12), False),
        (torch.zeros(1, 1, 12).expand(3, 5, 12), 8, (3, 5, 12), False),
        (torch.zeros(5, 3, 12).transpose(0, 1), 8, (3, 5, 12), False),
        (torch.zeros(3, 5, 24)[..., ::2], 8, (3, 5, 12), False),
        (torch.zeros(3, 5, 1), 8, (3, 5, 1), False),
        (torch.zeros(0, 5, 12), 8, (0, 5, 12), False),
        (torch.zeros(0, 12), 8, (0, 1, 12), False),
    ],
    ids=[
        "1d", "2d", "3d", "4d", "transposed", "transposed-features", "transposed-tie", "transposed-cut",
        "channels-first", "channels-first-features", "2d-transposed", "slice", "expanded", "batch-second",
        "strided-values", "one-feature", "empty-batch", "empty-rows",
    ],
)  # fmt: skip
def test_stored_view(x, block_size, shape, transposed):
    view, flag = stored_view(x, block_size, "sample")
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
    assert stored_view(x, 8, "sample")[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_token_scope_makes_every_row_a_sample():
    assert stored_view(torch.zeros(3, 5, 12), 8, "token")[0].shape == (15, 1, 12)
    for block_size, shape, along in ((8, (36, 1, 5), True), (4, (15, 1, 12), False)):
        view, transposed = stored_view(torch.zeros(3, 12, 5).transpose(1, 2), block_size, "token")
        assert (tuple(view.shape), transposed) == (shape, along)


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
    assert (plain.rows, plain.length) == (196, 384)
    # Blocks of 32 fill rows of 384 values and not of 196: in token mixing, [B, 384, 196], they run along memory; in
    # [B, 196, 384] with the channels first in memory they run along the channels.
    for x in (torch.zeros(3, 196, 384).transpose(1, 2), torch.zeros(3, 384, 196).transpose(1, 2)):
        for device in ("cpu", "meta"):
            assert input_geometry(x.to(device), 32, 0.5, "sample") == plain


@pytest.mark.parametrize("scope", ["sample", "token"])
@pytest.mark.parametrize(("tokens", "features"), [(196, 384), (384, 196), (64, 128), (5, 12), (2, 7), (0, 8)])
@pytest.mark.parametrize("block_size", [1, 4, 32, 100, 999])
def test_a_transposed_input_takes_no_more_than_either_orientation(tokens, features, block_size, scope):
    geometry = input_geometry(torch.zeros(2, features, tokens).transpose(1, 2), block_size, 0.0, scope)
    filled = [geometry.kept_blocks * geometry.block_size]
    for shape in ((2, tokens, features), (2, features, tokens)):
        other = input_geometry(torch.zeros(shape), block_size, 0.0, scope)
        filled.append(other.kept_blocks * other.block_size)
    assert filled[0] == min(filled)
    if filled[1] == filled[2]:
        assert geometry.length == features


def test_blocks_are_not_cut_to_a_few_tokens():
    """Along two tokens 769 features would make blocks of two values."""
    for tokens, along in ((2, False), (15, False), (16, True)):
        x = torch.zeros(4, 769, tokens).transpose(1, 2)
        assert stored_view(x, 32, "sample")[1] is along
