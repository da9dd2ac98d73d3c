"""Pack: from a dense tensor to kept blocks, bitmap and offsets, with static shapes and no host synchronisation.

Where no block is dropped, one launch (``quantize_all``). One launch with one program per sample where that is faster
(``pack_sample``), otherwise three:

1. ``block_keys_kernel``  reads ``x`` once and writes one int32 key per block (4 / (b * itemsize) of ``x``), and, if the
                          plan casts, the 16-bit copy of ``x`` that all else reads;
2. ``select_*_kernel``    per sample: threshold, bitmap and offsets;
3. ``gather_kernel``      per run of 128 blocks: copies the kept ones to their places. If values are stored in few bits,
                          ``quantize_kernel`` does, see ``quantize_kept``.

Bytes moved: ``x`` twice (the second time only its kept blocks, and often from L2), the values once, the keys two or
three times. Selection without bias has one more launch before the last, see ``rescale``, and as many sums of squares as
keys. Everything but the tensors is worked out once per shape and kept in a ``PackPlan`` or ``SamplePlan``.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.kernels.formats import encode_format, tile_width, values_layout
from lightning_actprune.kernels.keys import block_keys_kernel, stride_unit
from lightning_actprune.kernels.launch import Launch, multiprocessors
from lightning_actprune.kernels.pack_sample import SamplePlan, choose_config, takes_one_launch
from lightning_actprune.kernels.quantize_all import QuantizePlan
from lightning_actprune.kernels.quantize_kept import quantize_kernel
from lightning_actprune.kernels.ranks import blocks_of_lanes, choose_turns, run_of
from lightning_actprune.kernels.rescale import block_factors, largest_dropped, rescaled
from lightning_actprune.kernels.select import (
    CONTROL_WORDS,
    MOST_PARTS,
    REGISTER_BLOCKS,
    RUN,
    WORD,
    select_kernel,
    select_rows_kernel,
    select_shared_kernel,
)
from lightning_actprune.ops.block_selection import BLOCK_SELECTIONS
from lightning_actprune.ops.geometry import RUN_BLOCKS, WORD_BLOCKS, ceil_div, keeps_all


@triton.jit
def kept_places(bitmap_ptr, offsets_ptr, samples, blocks, words, runs, LANES: tl.constexpr):
    """Return, for one run of blocks: samples, block numbers, which exist, which are kept, and their places."""
    lane = tl.arange(0, RUN)
    first, run = run_of(tl.program_id(0), runs, LANES)
    s, n = blocks_of_lanes(first, run, lane, LANES)
    exists = (s < samples) & (n < blocks)
    word = tl.load(bitmap_ptr + s.to(tl.int64) * words + n // WORD, mask=exists, other=0)
    kept = (word >> (n % WORD)) & 1
    place = tl.load(offsets_ptr + first.to(tl.int64) * runs + run) + tl.cumsum(kept, axis=0) - kept
    return s, n, exists, kept == 1, place


@triton.jit
def gather_kernel(
    x_ptr, bitmap_ptr, offsets_ptr, values_ptr, keys_ptr, stride_sample, stride_row, samples, blocks, words, runs,
    length: tl.constexpr, columns: tl.constexpr, UNIT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Copy the kept blocks of one run to their places in ``values [nnz, B]``, scaled if there are keys."""
    s, n, _, kept, place = kept_places(bitmap_ptr, offsets_ptr, samples, blocks, words, runs, LANES)
    start = s.to(tl.int64) * stride_sample * UNIT + (n // columns).to(tl.int64) * stride_row * UNIT
    if keys_ptr is not None:
        factors = block_factors(keys_ptr, s, n, kept, samples, blocks)
    for piece in range(0, B, BLOCK):
        e = piece + tl.arange(0, BLOCK)
        column = (n % columns)[:, None] * B + e[None, :]
        stored = kept[:, None] & (e < B)[None, :]
        x = tl.load(x_ptr + start[:, None] + column, mask=stored & (column < length), other=0.0)
        if keys_ptr is not None:
            x = rescaled(x, factors)
        tl.store(values_ptr + place.to(tl.int64)[:, None] * B + e[None, :], x, mask=stored)


class PackPlan:
    """Three launches and output shapes for one shape of input.

    Args:
        shape: ``(S, T, L)``.
        strides: Strides of samples and rows; the last one is 1.
        block_size: Values per block.
        keep: Blocks kept per sample.
        device: Where the kernels run.
        casts: Whether a copy in another dtype is written and packed.
        value_format: How values are stored.
        block_selection: Which blocks are kept.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        strides: tuple[int, int],
        block_size: int,
        keep: int,
        device: torch.device,
        casts: bool = False,
        value_format: str = "same",
        block_selection: str = "largest",
    ) -> None:
        samples, rows, length = shape
        columns = ceil_div(length, block_size)
        blocks = rows * columns
        words, runs = ceil_div(blocks, WORD_BLOCKS), ceil_div(blocks, RUN_BLOCKS)
        stored = encode_format(value_format, block_size)
        self.values, self.dtype = values_layout(samples * keep, block_size, stored)
        self.bitmap, self.offsets = (samples, words), (samples, runs)
        unbiased = block_selection == "unbiased"
        self.keys = (2 * blocks + 1) * samples if unbiased else samples * blocks
        parts = _parts(samples, blocks, device)
        self.control = samples * CONTROL_WORDS if parts else 0
        select = BLOCK_SELECTIONS.index(block_selection)
        self._keys = _keys(shape, strides, block_size, self.control, casts, select)
        self._select = _select(samples, blocks, keep, parts)
        self._rescale = largest_dropped(samples, blocks, words) if unbiased else None
        tile: tuple[int, ...]
        grid, tile, options = run_tile(samples, blocks, block_size)
        gathered = (rows * length, length) if casts else strides
        unit = stride_unit(*gathered)
        scalars = (gathered[0] // unit, gathered[1] // unit, samples, blocks, words, runs)
        # The keys come before them, or None, of which the compiled kernel has no trace.
        keys = () if unbiased else (None,)
        layout = length, columns, unit
        if stored:
            block, turns = tile_width(block_size), choose_turns(tile_width(block_size), RUN_BLOCKS * keep / blocks)
            tiles = block_size, block, turns.tile, turns.parts, tile[2], stored
            grid, options = (grid[0] * turns.parts,), {"num_warps": turns.warps}
            self._gather = Launch(quantize_kernel, grid, *keys, *scalars, samples * keep, *layout, *tiles, **options)
        else:
            self._gather = Launch(gather_kernel, grid, *keys, *scalars, *layout, *tile, **options)

    def __call__(self, x: Tensor, copy: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(values, bitmap, offsets)``; ``copy``: memory for the contiguous copy of a plan that casts."""
        source = x if copy is None else copy
        keys = x.new_empty(self.keys, dtype=torch.int32)
        bitmap = x.new_empty(*self.bitmap, dtype=torch.int32)
        offsets = x.new_empty(*self.offsets, dtype=torch.int32)
        values = source.new_empty(*self.values, dtype=self.dtype)
        if self.control:
            control = x.new_empty(self.control, dtype=torch.int32)
            self._keys(x, source, keys, control)
            self._select(keys, bitmap, offsets, control)
        else:
            self._keys(x, source, keys, keys)
            self._select(keys, bitmap, offsets)
        if self._rescale is None:
            self._gather(source, bitmap, offsets, values)
        else:
            self._rescale(keys, bitmap)
            self._gather(source, bitmap, offsets, values, keys)
        return values, bitmap, offsets


def run_tile(samples: int, blocks: int, block_size: int) -> tuple[tuple[int], tuple[int, int, int], dict[str, int]]:
    """Return grid, ``(B, BLOCK, LANES)`` and options of the kernels that handle one run of blocks a program."""
    block, lanes = min(64, triton.next_power_of_2(block_size)), min(RUN_BLOCKS, triton.next_power_of_2(max(blocks, 1)))
    programs = samples * ceil_div(blocks, RUN_BLOCKS) if lanes == RUN_BLOCKS else ceil_div(samples * lanes, RUN_BLOCKS)
    # At most 64 values a thread, so that they stay in registers; longer blocks are copied piece by piece.
    return (programs,), (block_size, block, lanes), {"num_warps": 4}


def _keys(
    shape: tuple[int, int, int], strides: tuple[int, int], block_size: int, control: int, casts: bool, select: int
) -> Launch:
    """Return the launch that writes the keys, and the copy if it casts, and zeroes so many words of control."""
    samples, rows, length = shape
    columns, block = ceil_div(length, block_size), triton.next_power_of_2(block_size)
    # 4096 values a program, 32 a thread at 4 warps: whole rows first, so that a warp reads along memory.
    cols = max(1, min(triton.next_power_of_2(columns), 4096 // block))
    tile_rows = max(1, 4096 // (block * cols))
    grid = ceil_div(samples * rows, tile_rows), ceil_div(columns, cols)
    zeros = triton.next_power_of_2(ceil_div(control, grid[0] * grid[1])) if control else 0
    unit = stride_unit(*strides)
    scalars = (strides[0] // unit, strides[1] // unit, samples * rows, rows, control)
    tile = (length, columns, unit, casts, block_size, block, tile_rows, cols, zeros, select)
    return Launch(block_keys_kernel, grid, *scalars, *tile, num_warps=4)


def _parts(samples: int, blocks: int, device: torch.device) -> int:
    """Return how many programs share a sample, 0 if its keys fit into the registers of one.

    One per 8192 keys, as long as all of them are on the GPU together: they wait for each other.
    """
    if blocks <= REGISTER_BLOCKS:
        return 0
    return max(1, min(ceil_div(blocks, 8192), MOST_PARTS, multiprocessors(device) // max(samples, 1)))


def _select(samples: int, blocks: int, keep: int, parts: int) -> Launch:
    """Return the launch that selects and writes bitmap and offsets."""
    padded = triton.next_power_of_2(blocks)
    scalars = (blocks, keep, ceil_div(blocks, WORD_BLOCKS), ceil_div(blocks, RUN_BLOCKS))
    if parts:
        cooperative = {"launch_cooperative_grid": True} if parts > 1 else {}
        return Launch(select_shared_kernel, (samples, parts), *scalars, 8192, num_warps=16, **cooperative)
    if padded <= 512:
        group = max(1, min(4096 // padded, triton.next_power_of_2(samples)))
        return Launch(select_rows_kernel, (ceil_div(samples, group),), *scalars, samples, group, padded, num_warps=4)
    # 8 warps were faster than 4, 16 and 32 for 2,352 to 9,408 blocks: what counts is the way between the warps.
    warps, piece = (16, 8192) if padded == REGISTER_BLOCKS else (min(8, padded // 256), padded)
    return Launch(select_kernel, (samples,), *scalars, padded, piece, num_warps=warps)


@functools.lru_cache(maxsize=1024)
def plan(
    shape: tuple[int, int, int],
    strides: tuple[int, int, int],
    block_size: int,
    keep: int,
    dtype: torch.dtype,
    device: torch.device,
    aligned: bool,
    cast: torch.dtype | None = None,
    value_format: str = "same",
    block_selection: str = "largest",
) -> PackPlan | SamplePlan | QuantizePlan:
    """Return the plan for an input of ``dtype``, packed as it is or as its ``cast``, stored in ``value_format``.

    Alignment matters only to the compiled kernels that the plan keeps; memory for the copy is new, hence aligned.
    """
    if keeps_all(keep):
        return QuantizePlan(shape, strides[:2], block_size, cast is not None, value_format)
    samples, blocks = shape[0], shape[1] * ceil_div(shape[2], block_size)
    if keep == blocks:
        block_selection = "largest"  # all are kept as they are
    stored = value_format, block_selection
    if block_selection != "unbiased" and takes_one_launch(samples, blocks, device):
        config = choose_config(blocks)
        return SamplePlan(shape, strides[:2], block_size, keep, dtype.itemsize, config, cast, *stored)
    return PackPlan(shape, strides[:2], block_size, keep, device, cast is not None, *stored)


def pack(
    x: Tensor, block_size: int, keep: int, value_format: str = "same", block_selection: str = "largest"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(values, bitmap, offsets)`` of ``x [S, T, L]``, last stride 1; see ``ops.reference.pack``.

    In another ``value_format`` than ``"same"``, the values are bytes; see ``ops.formats.quantize``.
    """
    aligned = x.data_ptr() % 16 == 0
    stored = value_format, block_selection
    return plan(x.shape, x.stride(), block_size, keep, x.dtype, x.device, aligned, None, *stored)(x)
