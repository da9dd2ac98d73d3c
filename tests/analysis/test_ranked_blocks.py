"""Inputs pruned from one ranking of their blocks: what packing and unpacking them makes of them, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_actprune import functional
from lightning_actprune.analysis import ranked as ranked_blocks
from lightning_actprune.analysis.ranked import RankedBlocks
from lightning_actprune.codec.blocks import SELECTIONS, Blocks, block_and_keep, sparsity_parts, stored_view
from lightning_actprune.codec.dispatch import force_backend
from lightning_actprune.codec.packed import pack, unpack
from lightning_actprune.config import BITS

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


def packed_and_unpacked(x: Tensor, parts: int, blocks: Blocks) -> Tensor:
    """Return what a layer reads in backward of what it has packed in forward."""
    stored, _ = stored_view(x, blocks.block_size, blocks.scope)
    block, keep = block_and_keep(stored, blocks.block_size, parts, blocks.bits)
    packed = pack(stored, block, keep, blocks.bits, blocks.selection)
    rows, length = stored.shape[0] * stored.shape[1], stored.shape[2]
    return unpack(*packed, rows, length, block, blocks.bits, x.dtype)


def assert_same(x: Tensor, blocks: Blocks, several: list[int]) -> None:
    ranked = RankedBlocks(x, blocks)
    for parts in map(sparsity_parts, SPARSITIES):
        kept = ranked.kept(parts)
        for bits in several:
            expected = packed_and_unpacked(x, parts, blocks._replace(bits=bits))
            torch.testing.assert_close(ranked.packed(kept, bits), expected, rtol=0, atol=0, equal_nan=True)


CASES = [(kind, scope) for kind in INPUTS for scope in ("sample", "token")]
CASES += [(kind, "sample_second") for kind in ("samples", "short", "no samples")]


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize(("kind", "scope"), CASES)
def test_it_is_what_training_keeps(kind, scope, selection, monkeypatch):
    x = INPUTS[kind]()
    monkeypatch.setattr(ranked_blocks, "CHUNK", 100)
    assert_same(x, Blocks(16, scope, 0, selection), [0, 4, 3])


@pytest.mark.parametrize("bits", BITS)
def test_ties_and_values_that_are_not_finite(bits):
    x = torch.randn(4, 6, 64)
    x[0, :3] = 1.0  # equal blocks
    x[1] = 0.0
    x[2, 0, 5], x[2, 1, 40], x[3, 2, 1] = float("inf"), float("nan"), 3e25
    for selection in SELECTIONS:
        assert_same(x, Blocks(16, "sample", 0, selection), [bits])


def test_fp64_is_kept_as_it_is():
    assert_same(torch.randn(3, 5, 65).double(), Blocks(16, "sample"), [0])


def test_energy_is_that_of_the_blocks_of_least_norm():
    x = torch.randn(3, 5, 64)
    for selection in SELECTIONS:
        dropped, total = RankedBlocks(x, Blocks(16, "sample", 0, selection)).energy(sparsity_parts(0.5))
        kept = functional.pack(x, sparsity=0.5, block_size=16).unpack()
        # Two sums in fp32 of 60 blocks each: 60 roundings of 2^-24.
        assert total.item() == pytest.approx(x.double().square().sum().item(), rel=1e-5)
        assert dropped.item() == pytest.approx((x - kept).double().square().sum().item(), rel=1e-5)


@pytest.mark.parametrize("selection", ["largest", "unbiased"])
def test_kernels_make_the_same_of_it(selection, kernel_device, monkeypatch):
    monkeypatch.setattr(ranked_blocks, "ROUND", 64)
    x, blocks = torch.randn(3, 7, 40, device=kernel_device), Blocks(16, "sample", 0, selection)
    ranked, parts, several = RankedBlocks(x, blocks), sparsity_parts(0.3), (0, 4, 3)
    with force_backend("reference"):
        expected = [ranked.packed(ranked.kept(parts), bits) for bits in several]
    with force_backend("triton"):
        kept = ranked.kept(parts)
        assert (len(kept.numbers), kept.nnz) == (64, 3 * 15)
        found = [ranked.packed(kept, bits) for bits in several]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
