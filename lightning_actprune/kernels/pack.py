"""Pack: from a dense tensor to kept blocks, bitmap and offsets, with static shapes and no host synchronisation.

Three launches:

1. ``block_keys_kernel``  reads ``x`` once and writes one int32 key per block (4 / (b * itemsize) of ``x``);
2. ``select_*_kernel``    per sample: threshold and cut, then the sample's bits and counts; the program that finishes
   last turns the counts into the offsets;
3. ``gather_kernel``      per 128 rows of one column: copies the kept blocks to their places.

Samples matter only in step 2; the others see ``R = S * T`` rows. Bytes moved: ``x`` twice (the second time only its
kept blocks, and often from L2), the values once, keys three times. Everything but the tensors is worked out once per
shape and kept in a ``PackPlan``.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.kernels.keys import block_keys_kernel
from lightning_actprune.kernels.launch import Launch, multiprocessors
from lightning_actprune.kernels.mark import CHUNK, WORD
from lightning_actprune.kernels.select import (
    CONTROL_WORDS,
    MAX_PARTS,
    REGISTER_BLOCKS,
    select_kernel,
    select_rows_kernel,
    select_shared_kernel,
)
from lightning_actprune.ops.geometry import CHUNK_ROWS, WORD_ROWS, ceil_div


@triton.jit
def kept_slots(bitmap_ptr, offsets_ptr, chunk, j, total_rows, words, chunks):
    """Return, for ``CHUNK`` rows of column ``j``: row numbers, whether each block is kept, and its place in values."""
    r = chunk * CHUNK + tl.arange(0, CHUNK)
    word = tl.load(bitmap_ptr + j.to(tl.int64) * words + r // WORD, mask=r < total_rows, other=0)
    kept = (word >> (r % WORD)) & 1
    slot = tl.load(offsets_ptr + j * chunks + chunk) + tl.cumsum(kept, axis=0) - kept
    return r, kept == 1, slot


@triton.jit
def gather_kernel(
    x_ptr, bitmap_ptr, offsets_ptr, values_ptr, stride_sample, stride_row, total_rows, rows, length, words, chunks,
    B: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the kept blocks of ``CHUNK`` rows of one column to their places in ``values [nnz, B]``."""
    j = tl.program_id(1)
    r, kept, slot = kept_slots(bitmap_ptr, offsets_ptr, tl.program_id(0), j, total_rows, words, chunks)
    e = tl.arange(0, BLOCK)
    start = (r // rows).to(tl.int64) * stride_sample + (r % rows).to(tl.int64) * stride_row
    column = j * B + e
    stored = kept[:, None] & (e < B)[None, :]
    x = tl.load(x_ptr + start[:, None] + column[None, :], mask=stored & (column < length)[None, :], other=0.0)
    tl.store(values_ptr + slot.to(tl.int64)[:, None] * B + e[None, :], x, mask=stored)


class PackPlan:
    """Launches and output shapes for one shape of input.

    Args:
        shape: ``(S, T, L)``.
        strides: Strides of samples and rows; the last one is 1.
        block_size: Values per block.
        keep: Blocks kept per sample.
        device: Where the kernels run.
    """

    def __init__(
        self, shape: tuple[int, int, int], strides: tuple[int, int], block_size: int, keep: int, device: torch.device
    ) -> None:
        samples, rows, length = shape
        total, columns = samples * rows, ceil_div(length, block_size)
        words, chunks = ceil_div(total, WORD_ROWS), ceil_div(total, CHUNK_ROWS)
        block = triton.next_power_of_2(block_size)
        self.values = (samples * keep, block_size)
        self.bitmap = (columns, words)
        self.offsets = columns * chunks + 1
        self._select, control = _select(samples, rows, columns, keep, device)
        self.scratch = total * columns + control
        self._keys = _keys(shape, strides, block_size, (control, columns * words, self.offsets))
        self._gather = Launch(
            gather_kernel, (chunks, columns), *strides, total, rows, length, words, chunks, block_size, block,
            num_warps=4,
        )  # fmt: skip

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(values, bitmap, offsets)``."""
        scratch = x.new_empty(self.scratch, dtype=torch.int32)
        bitmap = x.new_empty(self.bitmap, dtype=torch.int32)
        offsets = x.new_empty(self.offsets, dtype=torch.int32)
        values = x.new_empty(self.values)
        self._keys(x, scratch, bitmap, offsets)
        self._select(scratch, bitmap, offsets)
        self._gather(x, bitmap, offsets, values)
        return values, bitmap, offsets


def _keys(
    shape: tuple[int, int, int], strides: tuple[int, int], block_size: int, zeroed: tuple[int, int, int]
) -> Launch:
    """Return the launch that writes the keys and zeroes so many words of control, bitmap and offsets."""
    samples, rows, length = shape
    columns, block = ceil_div(length, block_size), triton.next_power_of_2(block_size)
    # 4096 values a program, 32 a thread at 4 warps: whole rows first, so that a warp reads along memory.
    cols = max(1, min(triton.next_power_of_2(columns), 4096 // block))
    tile_rows = max(1, 4096 // (block * cols))
    grid = ceil_div(samples * rows, tile_rows), ceil_div(columns, cols)
    zeros = triton.next_power_of_2(ceil_div(max(zeroed), grid[0] * grid[1]))
    scalars = (*strides, samples * rows, rows, length, columns, samples * rows * columns, *zeroed)
    return Launch(block_keys_kernel, grid, *scalars, block_size, block, tile_rows, cols, zeros, num_warps=4)


def _select(samples: int, rows: int, columns: int, keep: int, device: torch.device) -> tuple[Launch, int]:
    """Return the launch that selects and marks, and how many control words it needs behind the keys."""
    blocks, total = rows * columns, samples * rows
    padded = triton.next_power_of_2(blocks)
    scalars = (total * columns, keep, rows, columns, ceil_div(total, WORD_ROWS), ceil_div(total, CHUNK_ROWS))
    cols = min(64, triton.next_power_of_2(columns))
    if blocks > REGISTER_BLOCKS:
        # One program per 8192 keys, as long as all of them are on the GPU together: they wait for each other.
        parts = max(1, min(ceil_div(blocks, 8192), rows, MAX_PARTS.value, multiprocessors(device) // samples))
        cooperative = {"launch_cooperative_grid": True} if parts > 1 else {}
        launch = Launch(select_shared_kernel, (samples, parts), *scalars, cols, 8192, num_warps=16, **cooperative)
        return launch, 1 + samples * CONTROL_WORDS
    if padded <= 512:
        group = max(1, min(4096 // padded, triton.next_power_of_2(samples)))
        grid = (ceil_div(samples, group),)
        launch = Launch(
            select_rows_kernel, grid, *scalars, samples, group, padded, min(32, cols), 4096, num_warps=4
        )  # fmt: skip
        return launch, 1 + 2 * samples
    warps = min(16, padded // 256)
    return Launch(select_kernel, (samples,), *scalars, padded, cols, 512 * warps, num_warps=warps), 1


@functools.lru_cache(maxsize=1024)
def _plan(
    shape: tuple[int, int, int],
    strides: tuple[int, int, int],
    block_size: int,
    keep: int,
    dtype: torch.dtype,
    device: torch.device,
    aligned: bool,
) -> PackPlan:
    """Return the plan for an input; dtype and alignment matter only to the compiled kernels that the plan keeps."""
    return PackPlan(shape, strides[:2], block_size, keep, device)


def pack(x: Tensor, block_size: int, keep: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(values, bitmap, offsets)`` of ``x [S, T, L]``, last stride 1; see ``ops.reference.pack``."""
    return _plan(x.shape, x.stride(), block_size, keep, x.dtype, x.device, x.data_ptr() % 16 == 0)(x)
