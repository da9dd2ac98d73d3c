"""Kept blocks found by rank are those that torch finds, in the same order."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.codec.blocks import RUN_BLOCKS, WORD_BLOCKS, ceil_div, pack_bits
from lightning_actprune.kernels import places
from lightning_actprune.kernels.formats import THREAD_VALUES
from lightning_actprune.kernels.places import run_tile


@triton.jit
def _rank_kernel(bitmap_ptr, found_ptr, kept_ptr, counts_ptr, samples, words, runs, LANES: tl.constexpr):
    """Write sample and number of the block of each rank, which lanes are kept, and how many."""
    program, lane = tl.program_id(0), tl.arange(0, 128)
    first, run = places.run_of(program, runs, LANES)
    w0, w1, w2, w3 = places.kept_words(bitmap_ptr, first, run, samples, words, LANES)
    s, n = places.blocks_of_lanes(first, run, places.lanes_of_ranks(lane, w0, w1, w2, w3), LANES)
    tl.store(found_ptr + program * 256 + 2 * lane, s)
    tl.store(found_ptr + program * 256 + 2 * lane + 1, n)
    tl.store(kept_ptr + program * 128 + lane, places.is_kept(lane, w0, w1, w2, w3).to(tl.int32))
    tl.store(counts_ptr + program, places.count_kept(w0, w1, w2, w3))


def check(kept: Tensor, device: torch.device) -> None:
    """Compare what all programs find with the non-zero entries of ``kept [S, N]``, and the counts."""
    samples, blocks = kept.shape
    bitmap, runs = pack_bits(kept).to(device), ceil_div(blocks, RUN_BLOCKS)
    (programs,), (_, _, lanes), _ = run_tile(samples, blocks, 32)
    found = torch.full((programs, RUN_BLOCKS, 2), -1, dtype=torch.int32, device=device)
    flags = torch.full((programs, RUN_BLOCKS), -1, dtype=torch.int32, device=device)
    counts = torch.full((programs,), -1, dtype=torch.int32, device=device)
    _rank_kernel[(programs,)](bitmap, found, flags, counts, samples, bitmap.shape[1], runs, lanes, num_warps=1)
    ranked = torch.arange(RUN_BLOCKS) < counts.cpu()[:, None]
    assert torch.equal(found.cpu()[ranked].long(), kept.nonzero())
    assert torch.equal(flags.cpu().sum(1), counts.cpu().long())
    in_order = flags.cpu().view((samples, -1) if lanes == RUN_BLOCKS else (-1, lanes))
    assert torch.equal(in_order[:samples, :blocks], kept.int())


@pytest.mark.parametrize(("samples", "blocks"), [(300, 1), (50, 12), (9, 32), (3, 65), (3, 129), (2, 300)])
def test_blocks_of_all_ranks(kernel_device, samples, blocks):
    """None, some or all kept: one run a sample or several, or several samples a run, the last run not filled."""
    for density in (0.0, 0.5, 1.0):
        check(torch.rand(samples, blocks) < density, kernel_device)


def test_one_block_anywhere_kept_or_dropped(kernel_device):
    """Bit 31 of a word, its sign, is a block like any other; the interpreter has those at the ends of words alone."""
    masks = torch.eye(RUN_BLOCKS, dtype=torch.bool)
    if kernel_device.type == "cpu":
        masks = masks.view(4, WORD_BLOCKS, -1)[:, [0, 1, 30, 31]].flatten(0, 1)
    for mask in (masks, ~masks, torch.eye(WORD_BLOCKS, dtype=torch.bool)):
        check(mask, kernel_device)


def test_two_tiles_a_program_cover_what_a_run_keeps_on_average():
    for block, kept in itertools.product([8, 32, 64, 128, 1024], [0.0, 1.0, 12.8, 51.2, 128.0]):
        turns = places.choose_turns(block, kept)
        assert all(number == triton.next_power_of_2(number) for number in turns)
        assert turns.tile * turns.parts <= RUN_BLOCKS
        assert 2 * turns.tile * turns.parts >= kept
        assert turns.parts == 1 or turns.tile * turns.parts < kept
        assert turns.tile * block <= max(block, THREAD_VALUES * 32 * turns.warps)
