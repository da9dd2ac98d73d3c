"""Inputs pruned from one ranking of their blocks: what packing and unpacking them makes of them, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_actprune import functional
from lightning_actprune.kernels.launch import Launch
from lightning_actprune.ops import library, ranked_blocks
from lightning_actprune.ops.block_selection import BLOCK_SELECTIONS
from lightning_actprune.ops.dispatch import force_backend
from lightning_actprune.ops.formats import FORMATS
from lightning_actprune.ops.geometry import block_and_keep, sparsity_parts, stored_view
from lightning_actprune.ops.ranked_blocks import RankedBlocks
from lightning_actprune.ops.setting import BlockSetting

SPARSITIES = (0.0, 0.3, 0.9)
INPUTS = {
    "one row": lambda: torch.randn(70),
    "rows": lambda: torch.randn(5, 70),
    "samples": lambda: torch.randn(3, 7, 64),
    "four dimensions": lambda: torch.randn(2, 3, 5, 33).bfloat16(),
    "blocks along tokens": lambda: torch.randn(3, 33, 64).transpose(1, 2).half(),
    "with gaps": lambda: torch.randn(3, 7, 128)[..., 1:65],
    "expanded": lambda: torch.randn(1, 7, 64).expand(3, 7, 64),
    "short": lambda: torch.randn(6, 5, 9),
    "no samples": lambda: torch.randn(0, 7, 64),
}


def packed_and_unpacked(x: Tensor, parts: int, blocks: BlockSetting) -> Tensor:
    """Return what a layer reads in backward of what it has packed in forward."""
    stored, _ = stored_view(x, blocks.block_size, blocks.scope)
    block, keep = block_and_keep(stored, blocks.block_size, parts, blocks.value_format)
    packed = library.pack(stored, block, keep, blocks.value_format, blocks.block_selection, True)
    rows, length = stored.shape[0] * stored.shape[1], stored.shape[2]
    return library.unpack(rows, length, packed, block, blocks.value_format, x.dtype, eager=True)


def assert_same(x: Tensor, blocks: BlockSetting, formats: list[str]) -> None:
    ranked = RankedBlocks(x, blocks)
    for parts in map(sparsity_parts, SPARSITIES):
        kept = ranked.kept(parts)
        for value_format in formats:
            found = ranked.pruned(kept, value_format)
            expected = packed_and_unpacked(x, parts, blocks._replace(value_format=value_format))
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


CASES = [(kind, scope) for kind in INPUTS for scope in ("sample", "token")]
CASES += [(kind, "sample_second") for kind in ("samples", "short", "no samples")]


@pytest.mark.parametrize("selection", BLOCK_SELECTIONS)
@pytest.mark.parametrize(("kind", "scope"), CASES)
def test_it_is_what_training_keeps(kind, scope, selection, monkeypatch):
    x = INPUTS[kind]()
    monkeypatch.setattr(ranked_blocks, "CHUNK", 100)
    assert_same(x, BlockSetting(16, scope, "same", selection), ["same", "int4", "fp8"])


@pytest.mark.parametrize("value_format", FORMATS)
def test_formats_ties_and_values_that_are_not_finite(value_format):
    x = torch.randn(4, 6, 64)
    x[0, :3] = 1.0  # equal blocks
    x[1] = 0.0
    x[2, 0, 5], x[2, 1, 40], x[3, 2, 1] = float("inf"), float("nan"), 3e25
    for selection in BLOCK_SELECTIONS:
        assert_same(x, BlockSetting(16, "sample", "same", selection), [value_format])


def test_fp64_is_kept_as_it_is():
    assert_same(torch.randn(3, 5, 65).double(), BlockSetting(16, "sample"), ["same"])


def test_energy_is_that_of_the_blocks_of_least_norm():
    x = torch.randn(3, 5, 64)
    for selection in BLOCK_SELECTIONS:
        dropped, total = RankedBlocks(x, BlockSetting(16, "sample", "same", selection)).energy(sparsity_parts(0.5))
        kept = functional.pack(x, sparsity=0.5, block_size=16).unpack()
        # Two sums in fp32 of 60 blocks each: 60 roundings of 2^-24.
        assert total.item() == pytest.approx(x.double().square().sum().item(), rel=1e-5)
        assert dropped.item() == pytest.approx((x - kept).double().square().sum().item(), rel=1e-5)


@pytest.mark.parametrize("selection", ["largest", "unbiased"])
def test_kernels_make_the_same_of_it(selection, kernel_device, monkeypatch):
    monkeypatch.setattr(ranked_blocks, "ROUND", 64)
    x, blocks = torch.randn(3, 7, 40, device=kernel_device), BlockSetting(16, "sample", "same", selection)
    ranked, parts, formats = RankedBlocks(x, blocks), sparsity_parts(0.3), ("same", "int4", "fp8")
    with force_backend("reference"):
        expected = [ranked.pruned(ranked.kept(parts), name) for name in formats]
    with force_backend("triton"):
        kept = ranked.kept(parts)
        assert (len(kept.numbers), kept.nnz) == (64, 3 * 15)
        found = [ranked.pruned(kept, name) for name in formats]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_all_layers_and_sparsities_share_their_kernels(kernel_device, monkeypatch):
    seen, call = set(), Launch.__call__

    def noted(self: Launch, *tensors: Tensor) -> None:
        kernel = self._kernel.fn
        names = list(kernel.__annotations__)  # the compile-time constants, which come last
        seen.add((kernel.__name__, self._scalars[-len(names) :], *self._options.items()))
        call(self, *tensors)

    monkeypatch.setattr(Launch, "__call__", noted)
    monkeypatch.setattr(ranked_blocks, "ROUND", 128)
    for shape in ((3, 7, 40), (2, 5, 64), (9, 100)):
        ranked = RankedBlocks(torch.randn(shape, device=kernel_device), BlockSetting(16, "sample"))
        with force_backend("triton"):
            for parts in map(sparsity_parts, SPARSITIES):
                for value_format in ("same", "int4", "int2"):
                    ranked.pruned(ranked.kept(parts), value_format)
    assert sorted(name for name, *_ in seen) == ["quantize_all_kernel"] * 2 + ["unpack_kernel"] * 2
