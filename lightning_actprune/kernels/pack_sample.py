"""Pack in one launch: one program per sample writes its keys, selects, and copies the kept blocks.

With about as many samples as multiprocessors this saves two launches and what lies between them, and the second read of
``x`` comes from the L2 cache. The three parts:

1. Keys, tile by tile, into the sample's scratch. A program waits for its own loads, so a tile is large: what is in
   flight on a multiprocessor decides about bandwidth. A plan that casts (see ``keys``) writes the copy here, and packs
   that.
2. All keys are read into registers, and selection writes bitmap and offsets. The numbers of the kept blocks replace the
   keys in the scratch.
3. Tiles of kept blocks, all lanes busy, are copied to where the sample's values start, the last tile first: these
   blocks were read last, and what the L2 cache has lost by then are the first. Or they are quantised; then the next
   tile is read before the arithmetic of one, since few programs run on a multiprocessor to fill in.

The scratch is the sample's own part of ``values``, or of their first plane (``ops.formats``), if that is large enough,
so that nothing has to be allocated. Copying then overwrites the list that it reads. Entry ``p`` of the list takes the
bytes from ``4 p`` on, block ``p`` those from ``p`` blocks of the plane on, which is at least twice as far (see
``SamplePlan``): a tile that starts at ``p`` destroys no entry before ``2 p``, and those before ``p`` are all that is
still needed. Only the tile at 0 destroys its own entries: all threads have read these before the first one copies.
Other planes hold no sample's scratch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.kernels.formats import THREAD_VALUES, encode_format, tile_width, values_layout
from lightning_actprune.kernels.keys import block_keys, selection_keys, stride_unit
from lightning_actprune.kernels.launch import Launch, multiprocessors
from lightning_actprune.kernels.quantize import load_blocks, quantize_tile
from lightning_actprune.kernels.select import REGISTER_BLOCKS, RUN, WORD, list_kept, store_places, threshold
from lightning_actprune.ops.block_selection import BLOCK_SELECTIONS
from lightning_actprune.ops.formats import FORMATS, plane_bytes
from lightning_actprune.ops.geometry import RUN_BLOCKS, WORD_BLOCKS, ceil_div


@triton.jit
def _values_of(
    x_ptr, n, exist, stride_row, length: tl.constexpr, columns: tl.constexpr, UNIT: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return pointers to the values of the blocks ``n`` of a sample, ``[len(n), BLOCK]``, and which there are."""
    e = tl.arange(0, BLOCK)
    start = (n // columns).to(tl.int64) * stride_row * UNIT
    column = (n % columns)[:, None] * B + e[None, :]
    inside = exist[:, None] & ((column < length) & (e < B)[None, :])
    return x_ptr + start[:, None] + column, inside


@triton.jit
def _copy_blocks(
    x_ptr, values_ptr, n, first, keep, stride_row, length: tl.constexpr, columns: tl.constexpr, UNIT: tl.constexpr,
    B: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy the blocks ``n`` to the places from ``first`` on, as long as these are below ``keep``."""
    e = tl.arange(0, BLOCK)
    p = first + tl.arange(0, TILE)
    pointers, inside = _values_of(x_ptr, n, p < keep, stride_row, length, columns, UNIT, B, BLOCK)
    x = tl.load(pointers, mask=inside, other=0.0)
    target = values_ptr + p.to(tl.int64)[:, None] * B + e[None, :]
    tl.store(target, x, mask=(p < keep)[:, None] & (e < B)[None, :])


@triton.jit
def _copy_kept(
    x_ptr, values_ptr, list_ptr, keep, stride_row, length: tl.constexpr, columns: tl.constexpr, UNIT: tl.constexpr,
    B: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Copy the listed blocks to the values."""
    p = tl.arange(0, TILE)
    tiles = tl.cdiv(keep, TILE)
    first = tl.maximum(tiles - 1, 0) * TILE
    kept = tl.load(list_ptr + first + p, mask=first + p < keep, other=0)
    for _ in tl.range(1, tiles, num_stages=STAGES):
        # One tile ahead, so that nothing waits for the numbers and then for the blocks.
        ahead = tl.load(list_ptr + (first - TILE) + p)
        tl.debug_barrier()  # a warp that ran ahead by several tiles would destroy numbers that others still need
        _copy_blocks(x_ptr, values_ptr, kept, first, keep, stride_row, length, columns, UNIT, B, BLOCK, TILE)
        kept = ahead
        first -= TILE
    tl.debug_barrier()
    _copy_blocks(x_ptr, values_ptr, kept, 0, keep, stride_row, length, columns, UNIT, B, BLOCK, TILE)


@triton.jit
def _quantize_kept(
    x_ptr, values_ptr, list_ptr, keep, start, stride_row, length: tl.constexpr, columns: tl.constexpr,
    UNIT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Write the listed blocks as bytes to the places from ``start`` on."""
    p = tl.arange(0, TILE)
    nnz = keep * tl.num_programs(0)
    tiles = tl.cdiv(keep, TILE)
    first = tl.maximum(tiles - 1, 0) * TILE
    # The numbers are read two tiles ahead, and the blocks one.
    n = tl.load(list_ptr + first + p, mask=first + p < keep, other=0)
    n_next = tl.load(list_ptr + (first - TILE) + p, mask=(first - TILE) + p >= 0, other=0)
    x = load_blocks(x_ptr, n, first + p < keep, stride_row, length, columns, UNIT, B, BLOCK)
    for _ in range(1, tiles):
        n_after = tl.load(list_ptr + (first - 2 * TILE) + p, mask=(first - 2 * TILE) + p >= 0, other=0)
        x_next = load_blocks(x_ptr, n_next, p >= 0, stride_row, length, columns, UNIT, B, BLOCK)
        tl.debug_barrier()  # a warp that ran ahead by several tiles would destroy numbers that others still need
        quantize_tile(x, values_ptr, nnz, start + first + p, first + p < keep, B, BLOCK, FORMAT)
        x, n_next = x_next, n_after
        first -= TILE
    tl.debug_barrier()
    quantize_tile(x, values_ptr, nnz, start + p, p < keep, B, BLOCK, FORMAT)


@triton.jit
def _find_threshold(keys_ptr, blocks, keep, BLOCKS: tl.constexpr):
    """Return ``(threshold, cut)`` of a sample, all its keys in registers."""
    n = tl.arange(0, BLOCKS)
    return threshold(tl.load(keys_ptr + n, mask=n < blocks, other=-1), n, blocks, keep)


@triton.jit
def _list_kept(scratch_ptr, bitmap_ptr, offsets_ptr, first, low, cut, blocks, words, runs, PIECE: tl.constexpr):
    """Write bitmap, offsets and, over the keys, the numbers of the kept blocks; the first is stored at ``first``."""
    listed = first * 0
    for piece in range(0, blocks, PIECE):
        n = piece + tl.arange(0, PIECE)
        keys = tl.load(scratch_ptr + n, mask=n < blocks, other=-1)
        kept = ((keys > low) | ((keys == low) & (n <= cut))).to(tl.int32)
        w, c = piece // WORD, piece // RUN
        store_places(kept, bitmap_ptr + w, offsets_ptr + c, first + listed, words - w, runs - c, PIECE)
        tl.debug_barrier()  # all keys of this piece are read; the list never reaches those of the next
        list_kept(kept, n, scratch_ptr + listed, PIECE)
        listed += tl.sum(kept, axis=0)


@triton.jit
def pack_sample_kernel(
    x_ptr, copy_ptr, values_ptr, bitmap_ptr, offsets_ptr, scratch_ptr, stride_sample, stride_row, stride_scratch,
    blocks, keep, words, runs, length: tl.constexpr, columns: tl.constexpr, UNIT: tl.constexpr, CAST: tl.constexpr,
    B: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PIECE: tl.constexpr, KEYS: tl.constexpr,
    KEYS_STAGES: tl.constexpr, COPIES: tl.constexpr, COPY_STAGES: tl.constexpr, FORMAT: tl.constexpr,
    SELECT: tl.constexpr,
):  # fmt: skip
    """Pack one sample of ``blocks <= BLOCKS``, by tiles of ``KEYS`` and ``COPIES`` blocks.

    ``CAST``: the values are rounded to the contiguous ``copy [S, T, L]`` for the keys, and packed from there.
    """
    s = tl.program_id(0)
    x_ptr += s.to(tl.int64) * stride_sample * UNIT
    if FORMAT == 0:  # else places are counted from the first sample's on
        values_ptr += s.to(tl.int64) * keep * B
    scratch_ptr += s.to(tl.int64) * stride_scratch
    scratch_ptr = scratch_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    if CAST:
        copy_ptr += s.to(tl.int64) * (blocks // columns) * length
    for start in tl.range(0, blocks, KEYS, num_stages=KEYS_STAGES):
        n = start + tl.arange(0, KEYS)
        pointers, inside = _values_of(x_ptr, n, n < blocks, stride_row, length, columns, UNIT, B, BLOCK)
        x = tl.load(pointers, mask=inside, other=0.0)
        if CAST:
            x = x.to(copy_ptr.dtype.element_ty)
            pointers, _ = _values_of(copy_ptr, n, n < blocks, 1, length, columns, length, B, BLOCK)
            tl.store(pointers, x, mask=inside)
        x = x.to(tl.float32)
        tl.store(scratch_ptr + n, selection_keys(block_keys(x), s * blocks + n, SELECT), mask=n < blocks)
    tl.debug_barrier()  # also makes the copy visible to the threads that will read it: they are of this program

    low, cut = _find_threshold(scratch_ptr, blocks, keep, BLOCKS)
    bitmap_ptr += s.to(tl.int64) * words
    offsets_ptr += s.to(tl.int64) * runs
    _list_kept(scratch_ptr, bitmap_ptr, offsets_ptr, s * keep, low, cut, blocks, words, runs, PIECE)
    tl.debug_barrier()

    source = copy_ptr if CAST else x_ptr
    source_row = 1 if CAST else stride_row
    SOURCE_UNIT: tl.constexpr = length if CAST else UNIT
    if FORMAT:
        _quantize_kept(
            source, values_ptr, scratch_ptr, keep, s * keep, source_row, length, columns, SOURCE_UNIT, B, BLOCK,
            COPIES, FORMAT,
        )  # fmt: skip
    else:
        _copy_kept(
            source, values_ptr, scratch_ptr, keep, source_row, length, columns, SOURCE_UNIT, B, BLOCK, COPIES,
            COPY_STAGES,
        )  # fmt: skip


class SampleConfig(NamedTuple):
    """How a program packs its sample.

    Args:
        warps: Warps of a program.
        piece: Blocks that are listed at once.
        keys_kib: KiB of a tile of which the keys are computed, as it is read.
        keys_stages: Such tiles in flight, if above 1: they wait in shared memory.
        copy_kib: KiB of a tile that is copied.
        copy_stages: Such tiles in flight, if above 1.
    """

    warps: int
    piece: int
    keys_kib: int
    keys_stages: int
    copy_kib: int
    copy_stages: int

    def constants(self, blocks: int, block_size: int, read: int, packed: int, stored: int = 0) -> dict[str, int]:
        """Return the kernel's last constants, in order, for samples of so many blocks: values of so many bytes.

        ``stored``: the kernel's ``FORMAT``.
        """
        block, padded = triton.next_power_of_2(block_size), max(RUN_BLOCKS, triton.next_power_of_2(blocks))
        # Numbers and addresses of more than 1024 blocks would fill the registers.
        tiles = (self.keys_kib, read), (self.copy_kib, packed)
        keys, copies = (max(1, min(1024, 1024 * kib // (block * size))) for kib, size in tiles)
        if stored:
            block = tile_width(block_size)
            # As many of the next tile wait in registers beside them.
            copies = max(1, min(1024, THREAD_VALUES * 32 * self.warps // block))
        return {
            "B": block_size, "BLOCK": block, "BLOCKS": padded, "PIECE": min(padded, self.piece), "KEYS": keys,
            "KEYS_STAGES": self.keys_stages, "COPIES": copies, "COPY_STAGES": self.copy_stages, "FORMAT": stored,
        }  # fmt: skip


FEWEST_BLOCKS = 513
"""Smaller samples are selected several to a program."""
BUSY = 0.75
"""Least share of the multiprocessors that have a program at all times; with 64 samples on 132 of them three launches,
each with programs for all, took 36 us where one took 45 (196 x 1536 values in bf16, H200)."""


def takes_one_launch(samples: int, blocks: int, device: torch.device) -> bool:
    """Return whether one program per sample packs about as fast as three launches."""
    at_once = multiprocessors(device)
    busy = samples / (ceil_div(samples, at_once) * at_once)
    return FEWEST_BLOCKS <= blocks <= REGISTER_BLOCKS and busy >= BUSY


def choose_config(blocks: int) -> SampleConfig:
    """Return the configuration for samples of so many blocks: the best of up to 18 for 128 samples in bf16 (H200)."""
    return SampleConfig(8 if blocks <= 4096 else 16, 8192, keys_kib=64, keys_stages=1, copy_kib=64, copy_stages=1)


class SamplePlan:
    """The launch and output shapes for one shape of input, as ``PackPlan``.

    Args:
        shape: ``(S, T, L)``.
        strides: Strides of samples and rows; the last one is 1.
        block_size: Values per block.
        keep: Blocks kept per sample.
        itemsize: Bytes of a value of the input.
        config: How a program packs its sample.
        cast: Type of the copy that is written and packed, ``None`` if the input itself is.
        value_format: How values are stored.
        block_selection: Which blocks are kept; not ``"unbiased"``, for which a program would need the sums of squares.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        strides: tuple[int, int],
        block_size: int,
        keep: int,
        itemsize: int,
        config: SampleConfig,
        cast: torch.dtype | None = None,
        value_format: str = "same",
        block_selection: str = "largest",
    ) -> None:
        (samples, rows, length), columns = shape, ceil_div(shape[2], block_size)
        blocks = rows * columns
        words, runs = ceil_div(blocks, WORD_BLOCKS), ceil_div(blocks, RUN_BLOCKS)
        stored = encode_format(value_format, block_size)
        (self.values, self.dtype), self.bitmap = values_layout(samples * keep, block_size, stored), (samples, words)
        self.offsets, packed = (samples, runs), itemsize if cast is None else cast.itemsize
        size = plane_bytes(block_size, FORMATS[value_format].planes[0]) if stored else block_size * packed
        # Keys are int32, and the list must not be overtaken by the values (see above).
        in_values = keep * size >= 4 * blocks and keep * size % 4 == 0 and size >= 8
        self.scratch = 0 if in_values else samples * blocks
        stride_scratch = keep * (size if stored else block_size) if in_values else blocks
        unit = stride_unit(*strides)
        scalars = strides[0] // unit, strides[1] // unit, stride_scratch, blocks, keep, words, runs
        tiles = config.constants(blocks, block_size, itemsize, packed, stored).values()
        constants = length, columns, unit, cast is not None, *tiles, BLOCK_SELECTIONS.index(block_selection)
        self._pack = Launch(pack_sample_kernel, (samples,), *scalars, *constants, num_warps=config.warps)

    def __call__(self, x: Tensor, copy: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(values, bitmap, offsets)``; ``copy``: memory for the contiguous copy of a plan that casts."""
        source = x if copy is None else copy
        values = source.new_empty(*self.values, dtype=self.dtype)
        bitmap = x.new_empty(*self.bitmap, dtype=torch.int32)
        offsets = x.new_empty(*self.offsets, dtype=torch.int32)
        scratch = x.new_empty(self.scratch, dtype=torch.int32) if self.scratch else values
        self._pack(x, source, values, bitmap, offsets, scratch)
        return values, bitmap, offsets
