"""The gather kernel itself: shapes around its tile sizes, and the parts of a split reduction."""

from __future__ import annotations

import pytest
import torch

from lightning_actprune.kernels import columns, weight_grad
from lightning_actprune.kernels.tiles import Config, Machine, SplitRule, choose_config, choose_split
from lightning_actprune.kernels.weight_grad import Shape, WeightGradPlan
from lightning_actprune.ops import reference
from lightning_actprune.ops.geometry import BlockGeometry
from tests import oracle


def run(device, shape, block_size, outputs, config, split, dtype=torch.float32):
    x = oracle.integers(*shape, dtype=dtype, device=device)
    geometry = BlockGeometry.of(*shape, block_size, 0.5)
    values, bitmap, offsets = reference.pack(x, geometry.block_size, geometry.keep)
    total = geometry.total_rows
    grad_y = torch.randn(total, outputs, device=device).to(dtype)
    plan = WeightGradPlan(
        Shape(outputs, outputs, shape[0], total, shape[2], *values.shape, values.element_size()),
        torch.float32,
        config,
        split,
    )
    actual = plan(grad_y, values, bitmap, offsets)
    expected = grad_y.double().t() @ oracle.pruned(x, block_size, 0.5).flatten(0, 1).double()
    return oracle.relative_error(actual, expected)


@pytest.mark.parametrize("values_first", [False, True])
@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize(
    ("shape", "block_size", "outputs"), [((2, 65, 70), 16, 33), ((1, 31, 48), 24, 16), ((1, 1, 16), 16, 1)], ids=str
)
def test_equals_the_oracle(kernel_device, shape, block_size, outputs, split, values_first):
    config = Config(bm=32, bk=16, warps=4, stages=3, values_first=values_first)
    assert run(kernel_device, shape, block_size, outputs, config, split) < 1e-6


def test_parts_take_at_most_twice_the_memory_of_the_input():
    config = Config(bm=64, bk=32, warps=4, stages=3, values_first=True)
    for rows, length, outputs in ((2**20, 1024, 1024), (12544, 384, 1536), (100, 64, 64)):
        plan = WeightGradPlan(
            Shape(outputs, outputs, 1, rows, length, rows, 64, 4), torch.float32, config, split=800, balance=True
        )
        assert plan.parts == 1 or 1 < plan.parts * outputs * length <= 2 * rows * length


def test_fp32_sums_that_are_cut_at_all_are_cut_short(kernel_device):
    """The error of 4000 equal terms in parts of 512 is far below that of one sum."""
    x = torch.full((1, 4000, 16), 0.1, device=kernel_device)
    values, bitmap, offsets = reference.pack(x, 16, 4000)
    grad_y = torch.full((4000, 16), 0.3, device=kernel_device)
    exact = grad_y.double().t() @ x[0].double()
    whole = WeightGradPlan(Shape(16, 16, 1, 4000, 16, 4000, 16, 4), torch.float32, Config(16, 16, 4, 3, False), 1)
    error = oracle.relative_error(whole(grad_y, values, bitmap, offsets), exact)
    cut = weight_grad.weight_grad(grad_y, values, bitmap, offsets, 16, torch.float32)
    assert oracle.relative_error(cut, exact) < error / 2


def test_column_without_kept_blocks_has_zero_gradient(kernel_device):
    x = torch.zeros(1, 40, 48, device=kernel_device)
    x[..., :16] = 1.0
    values, bitmap, offsets = reference.pack(x, 16, 40)
    grad_y = torch.randn(40, 16, device=kernel_device)
    config = Config(bm=16, bk=16, warps=4, stages=3, values_first=False)
    out = WeightGradPlan(Shape(16, 16, 1, 40, 48, 40, 16, 4), torch.float32, config, 2)(grad_y, values, bitmap, offsets)
    assert oracle.relative_error(out[:, :16], grad_y.double().sum(0)[:, None].expand(16, 16)) < 1e-6
    assert not out[:, 16:].any()


def test_columns_of_unequal_length_have_unequal_parts(kernel_device):
    x = torch.randn(1, 300, 64, device=kernel_device)
    x[:, :, :16] *= 100  # the first column keeps all 300 rows, the others share 100
    values, bitmap, offsets = reference.pack(x, 16, 400)
    grad_y = torch.randn(300, 32, device=kernel_device)
    config = Config(bm=16, bk=16, warps=4, stages=3, values_first=False)
    plan = WeightGradPlan(Shape(32, 32, 1, 300, 64, 400, 16, 4), torch.float32, config, 4)
    assert plan.parts == 10
    out = plan(grad_y, values, bitmap, offsets)
    expected = grad_y.double().t() @ reference.unpack(values, bitmap, 300, 64).double()
    assert oracle.relative_error(out, expected) < 1e-6
    assert torch.equal(out, plan(grad_y, values, bitmap, offsets))


def test_non_finite_gradient_of_a_dropped_row_does_not_reach_the_column(kernel_device):
    x = torch.ones(1, 40, 32, device=kernel_device)
    x[:, 0, :16], x[:, 1:, 16:] = 0.0, 0.5  # row 0 is dropped of the first column, and of the second all but row 0
    values, bitmap, offsets = reference.pack(x, 16, 40)
    grad_y = torch.randn(40, 16, device=kernel_device)
    grad_y[0] = float("inf")
    config = Config(bm=16, bk=16, warps=4, stages=3, values_first=False)
    out = WeightGradPlan(Shape(16, 16, 1, 40, 32, 40, 16, 4), torch.float32, config, 2)(grad_y, values, bitmap, offsets)
    assert out[:, :16].isfinite().all()
    assert not out[:, 16:].isfinite().any()


@pytest.mark.parametrize(("least", "most"), [(16, 5), (16, 1000), (128, 256)])
def test_columns_are_listed_over_several_programs_and_samples(kernel_device, monkeypatch, least, most):
    """Chunks of 16 rows are more in number than what one turn adds up the counts of."""
    monkeypatch.setattr(columns, "MIN_ROWS", least)
    monkeypatch.setattr(columns, "MAX_CHUNKS", most)
    config = Config(bm=16, bk=16, warps=4, stages=3, values_first=False)
    assert run(kernel_device, (3, 1100, 24), 8, 16, config, 2) < 1e-6
    assert run(kernel_device, (700, 5, 24), 8, 16, config, 1) < 1e-6


@pytest.mark.parametrize("shared_memory", [101376, 166912, 232448])
@pytest.mark.parametrize("block_size", [1, 16, 24, 32, 64, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_configuration_fits_the_shared_memory(block_size, itemsize, shared_memory):
    config = choose_config(block_size, 1536, itemsize, Machine(132, shared_memory, 8))
    block = max(16, 1 << (block_size - 1).bit_length())
    assert config.stages * config.bk * (config.bm + block) * itemsize <= shared_memory
    assert config.bk >= 16
    assert config.bm >= 16


def test_split_fills_the_machine_but_keeps_parts_long():
    config = Config(bm=128, bk=64, warps=8, stages=3, values_first=True)
    rule = SplitRule(full=8, aim=16, most=6, turns=4)

    def split(tiles, kept_per_column):
        return choose_split(tiles, kept_per_column, config, 132, rule)

    assert split(tiles=72, kept_per_column=5000) == 4
    assert split(tiles=36, kept_per_column=5000) == 6
    assert split(tiles=144, kept_per_column=5000) == 1
    assert split(tiles=1, kept_per_column=100) == 1
