"""Weight gradient straight from the kept blocks.

For column block ``j`` with kept rows ``r_0 .. r_{K-1}`` (K differs from column to column)::

    dW[o, j*b + e] = sum_p  grad_y[r_p, o] * values[place_p, e]

a matrix product over ``p`` of gathered rows.

Columns
-------
Values are stored row by row; the weight gradient of a column block reduces over the rows in which it is kept. Each
column gets a list with room for all ``R`` rows: row and place in the values of each of its kept blocks, in order of
rows. Two launches, since a list entry's position depends on all rows above: the first counts per 128 rows or more (a
``chunk``), the second adds up the counts of the chunks above its own and writes. A program handles one chunk of some
columns as one tile, without a loop, since what counts is how many reads follow each other.

Quantized blocks become numbers ``[nnz, b]`` here: the product meets a block once for every tile of outputs, and would
decode it as often. The numbers wait for nothing and only the product waits for them, so that they need no launch of
their own: further programs of the first make them, beside those that count. Such a program needs 32 to 40 registers a
thread (Triton 3.6, sm_90), and one that counts 80: all programs of a launch would get as many, and fewer of them run at
once. So beside numbers a program counts half as many columns, for which 32 to 40 are enough. In the second launch all
would get 212.

``work`` holds the rows ``[NB, R]``, the places ``[NB, R]``, and at ``counts`` those of the chunks ``[chunks, NB]`` and
the length of each list ``[NB]``. It lives only as long as one weight gradient.

Product
-------
A program computes a tile of ``BM`` outputs x one block and walks ``BK`` kept rows a turn; the list entries of the next
turn are loaded one turn ahead, so that the gathers can be issued early (a scalar dependency inside the turn would stall
the pipeline). The reduced dimension is cut into parts when there are too few tiles to fill the GPU, and longer columns
into more parts than short ones. Parts go to memory in fp32 and a second launch adds them in their order, so the result
is deterministic. (Adding them in the program that finishes last saved that launch, but made the loop itself slower.)

For ``b >= 64`` the tile is computed as ``[b, BM]`` (values first), else as ``[BM, b]``: tensor cores take tiles of at
least 64 x 8, and the longer side should be the one that is not the block.

Tile sizes and the number of parts are constants that were measured, none searched: no kernel is tuned while a model
trains. They were found on an H200; other GPUs differ in the shared memory, to which the tiles are cut down, in the
number of multiprocessors, to which the parts are fitted, and in how their tensor cores take operands.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.codec.blocks import RUN_BLOCKS, WORD_BLOCKS, ceil_div
from lightning_actprune.kernels.formats import dequantize_tile, encode_format, whole_blocks
from lightning_actprune.kernels.launch import INTERPRETED, Launch
from lightning_actprune.kernels.places import RUN, WORD, set_bits

MIN_ROWS = 128
"""Least rows of a chunk."""
MAX_CHUNKS = 256
"""Chunks up to which they stay small: the second launch reads half of all counts on average."""
MAX_TILE = 4096
"""Most blocks of a program."""


class Config(NamedTuple):
    """Tile sizes and launch parameters of ``weight_grad_kernel``."""

    bm: int
    bk: int
    warps: int
    stages: int
    values_first: bool


class Machine(NamedTuple):
    """What the choice of a configuration needs to know about a device."""

    multiprocessors: int
    shared_memory: int
    major: int


@functools.cache
def machine(device: torch.device) -> Machine:
    """Return the limits of ``device``; for the CPU's interpreter, few multiprocessors."""
    if device.type != "cuda":
        return Machine(4, 232448, 9)
    found: Any = torch.cuda.get_device_properties(device)  # of which not all versions of torch declare everything
    return Machine(found.multi_processor_count, found.shared_memory_per_block_optin, found.major)


CONFIGS = {
    2: {
        16: Config(128, 64, 8, 3, False),
        32: Config(128, 32, 4, 3, False),
        64: Config(128, 64, 8, 3, True),
        128: Config(128, 64, 8, 3, True),
        256: Config(128, 64, 8, 3, True),
    },
    4: {
        16: Config(128, 16, 2, 3, False),
        32: Config(128, 32, 4, 3, False),
        64: Config(64, 32, 4, 3, True),
        128: Config(64, 32, 4, 3, False),
        256: Config(64, 16, 8, 3, True),
    },
}
"""By bytes per value and block size: the best on an H200 of up to 12 each, in the geometric mean over five layers at
s = .6 and .9 (``benchmarks/tune.py weight_grad``); b = 256 by the reuse of a tile."""


FP32_BEFORE_HOPPER = {32: Config(128, 16, 4, 3, True), 128: Config(64, 16, 4, 3, True)}
"""Where the fp32 choice spills on compute capability 8.0 with Triton 3.9; not timed there."""


def choose_config(block_size: int, outputs: int, itemsize: int, machine: Machine) -> Config:
    """Return tile sizes for a block size, cut down until the pipeline's buffers fit into the shared memory."""
    block = max(16, triton.next_power_of_2(block_size))
    config = CONFIGS[itemsize][block]
    if itemsize == 4 and machine.major < 9:
        config = FP32_BEFORE_HOPPER.get(block, config)
    if itemsize == 4 and outputs <= 64:
        config = config._replace(bm=64)
    if itemsize == 2 and block <= 32 and machine.major not in (9, 10):
        # mma.sync takes a turned operand from registers only, so that grad_y could not be copied asynchronously.
        config = Config(128, 64, 8, 3, True)
    while config.stages * config.bk * (config.bm + block) * itemsize > machine.shared_memory and config.stages > 2:
        config = config._replace(stages=config.stages - 1)
    while config.stages * config.bk * (config.bm + block) * itemsize > machine.shared_memory and config.bk > 16:
        config = config._replace(bk=config.bk // 2)
    return config


MAX_IMBALANCE = 2.5
"""How many times the parts of a mean column one may have; a matter of memory for the partial tiles."""


FP32_ROWS = 512
"""Most rows that a part adds up one after another in fp32 where the reduction is cut at all.

The vendor's product cuts such reductions too; with 1,025 to 2,090 rows a part the error was 2.2 times its own. Where it
has tiles enough to fill the GPU it adds all rows one after another, more than are kept here. The bound on the memory of
the parts comes first: with some thousand outputs and few columns, a part may add up several times as many.
"""


class SplitRule(NamedTuple):
    """When and how far the reduction is cut into parts.

    Args:
        full: Warps of tiles per multiprocessor from which on it is not cut: further parts then cost up to twice the
            time, by the writing and reading of partial results.
        aim: Warps per multiprocessor wanted otherwise.
        most: Largest number of parts.
        turns: Least turns of the loop that a part is worth.
    """

    full: int
    aim: int
    most: int
    turns: int


SPLIT_RULES = {2: SplitRule(8, 12, 6, 4), 4: SplitRule(12, 32, 8, 8)}
"""By bytes per value."""


def choose_split(tiles: int, kept_per_column: int, config: Config, multiprocessors: int, rule: SplitRule) -> int:
    """Return into how many parts the reduction of a column of average length is cut."""
    warps = tiles * config.warps
    if warps >= rule.full * multiprocessors:
        return 1
    wanted = ceil_div(rule.aim * multiprocessors, warps)
    return max(1, min(wanted, rule.most, kept_per_column // (rule.turns * config.bk)))


@triton.jit
def _tile(r, j, stop, bitmap_ptr, rows, columns, words):
    """Return samples and first block numbers of rows ``r``, and their bits ``[COLS, TILE]`` in columns ``j``.

    Rows run along the last axis: neighbouring lanes then store to neighbouring places of the same list.
    """
    s, t = (r // rows).to(tl.int64), r % rows
    n = (t * columns)[None, :] + j[:, None]
    inside = (r < stop)[None, :] & (j < columns)[:, None]
    word = tl.load(bitmap_ptr + (s * words)[None, :] + n // WORD, mask=inside, other=0)
    return s, t * columns, (word >> (n % WORD)) & 1


@triton.jit
def _kept_before(n, s, inside, bitmap_ptr, offsets_ptr, words, runs):
    """Return the place of block ``n`` if it is kept: offset of its run, whole words of the run, bits before it."""
    place = tl.load(offsets_ptr + s * runs + n // RUN, mask=inside, other=0)
    word = tl.load(bitmap_ptr + s * words + n // WORD, mask=inside, other=0)
    place += set_bits(word & ((1 << (n % WORD)) - 1))
    for q in tl.static_range(RUN // WORD - 1):
        before = inside & (n % RUN // WORD > q)
        place += set_bits(tl.load(bitmap_ptr + s * words + n // RUN * (RUN // WORD) + q, mask=before, other=0))
    return place


@triton.jit
def count_columns_kernel(
    bitmap_ptr, work_ptr, total_rows, rows, columns, words, counts, TILE: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Count the kept blocks of ``TILE`` rows in each column; grid ``(chunks, NB / COLS)``."""
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    r = tl.program_id(0) * TILE + tl.arange(0, TILE)
    _, _, kept = _tile(r, j, total_rows, bitmap_ptr, rows, columns, words)
    tl.store(work_ptr + counts + tl.program_id(0) * columns + j, tl.sum(kept, axis=1), mask=j < columns)


@triton.jit
def count_and_dequantize_kernel(
    bitmap_ptr, work_ptr, values_ptr, numbers_ptr, total_rows, rows, columns, words, counts, chunks, kept,
    TILE: tl.constexpr, COLS: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Count, and write the ``kept`` blocks to ``numbers [kept, B]``; grid ``(chunks + more, NB / COLS)``.

    A program past the chunks writes ``BLOCKS`` blocks.
    """
    if tl.program_id(0) < chunks:
        count_columns_kernel(bitmap_ptr, work_ptr, total_rows, rows, columns, words, counts, TILE, COLS)
    else:
        tile = (tl.program_id(0) - chunks) * tl.num_programs(1) + tl.program_id(1)
        p = tile * BLOCKS + tl.arange(0, BLOCKS)
        exist = (p >= 0) & (p < kept)  # of nearly 2^31 blocks, the last tiles reach beyond int32
        e = tl.arange(0, BLOCK)
        x = dequantize_tile(values_ptr, kept, p, exist, 0, B, BLOCK, FORMAT).to(numbers_ptr.dtype.element_ty)
        inside = exist[:, None] & (e < B)[None, :]
        tl.store(numbers_ptr + p.to(tl.int64)[:, None] * B + e[None, :], x, mask=inside)


@triton.jit
def list_columns_kernel(
    bitmap_ptr, offsets_ptr, work_ptr, total_rows, rows, columns, words, runs, size, counts,
    TILE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write the list entries of ``TILE`` rows; ``size`` is ``NB * R``, the distance from the rows to the places.

    A block's place is that of its row's first block in the tile, plus the kept blocks between them.
    """
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    r = chunk * TILE + tl.arange(0, TILE)
    # Read before the counts, whose sum would have to be waited for.
    s, n, kept = _tile(r, j, total_rows, bitmap_ptr, rows, columns, words)
    place = _kept_before(n + tl.program_id(1) * COLS, s, r < total_rows, bitmap_ptr, offsets_ptr, words, runs)
    above = tl.zeros([COLS, TILE], tl.int32)
    for start in range(0, chunk, TILE):
        c = start + tl.arange(0, TILE)
        read = (c < chunk)[None, :] & (j < columns)[:, None]
        above += tl.load(work_ptr + counts + (c * columns)[None, :] + j[:, None], mask=read, other=0)
    entry = tl.sum(above, axis=1)
    places = place[None, :] + tl.cumsum(kept, axis=0) - kept
    target = (j.to(tl.int64) * total_rows + entry)[:, None] + tl.cumsum(kept, axis=1) - kept
    tl.store(work_ptr + target, tl.broadcast_to(r[None, :], [COLS, TILE]), mask=kept == 1)
    tl.store(work_ptr + size + target, places, mask=kept == 1)
    if chunk == chunks - 1:
        tl.store(work_ptr + counts + chunks * columns + j, entry + tl.sum(kept, axis=1), mask=j < columns)


class ColumnsLaunch:
    """Lists the columns of packed inputs of one shape.

    Args:
        samples: Samples of the packed input.
        rows: Rows of each.
        columns: Blocks per row.
        stored: Number of kept blocks, values of each, and to how many bits they are quantized.
    """

    def __init__(self, samples: int, rows: int, columns: int, stored: tuple[int, int, int]) -> None:
        total = samples * rows
        tile = min(MAX_TILE, max(MIN_ROWS, triton.next_power_of_2(ceil_div(total, MAX_CHUNKS))))
        cols = min(32, MAX_TILE // tile, triton.next_power_of_2(columns))
        chunks = ceil_div(total, tile)
        words, runs = ceil_div(rows * columns, WORD_BLOCKS), ceil_div(rows * columns, RUN_BLOCKS)
        size = columns * total
        counts = ceil_div(2 * size, 16) * 16
        self.lengths = counts + chunks * columns
        self.work = self.lengths + columns
        grid, scalars = (chunks, ceil_div(columns, cols)), (total, rows, columns, words, counts)
        kept, block_size, bits = stored
        self._numbers = (kept, block_size) if bits else None
        if self._numbers is None:
            self._count = Launch(count_columns_kernel, grid, *scalars, tile, cols, num_warps=4)
        else:
            block, blocks = whole_blocks(block_size)
            counted = max(1, min(cols, MAX_TILE // 2 // tile))
            groups = ceil_div(columns, counted)
            self._count = Launch(
                count_and_dequantize_kernel, (chunks + ceil_div(kept, blocks * groups), groups), *scalars, chunks, kept,
                tile, counted, block_size, block, blocks, encode_format(bits, block_size), num_warps=4,
            )  # fmt: skip
        self._list = Launch(
            list_columns_kernel, grid, total, rows, columns, words, runs, size, counts, tile, cols, num_warps=8
        )

    def __call__(self, values: Tensor, bitmap: Tensor, offsets: Tensor, work: Tensor, dtype: torch.dtype) -> Tensor:
        """Write the lists into ``work``; return the values as numbers, of ``dtype`` if they are quantized."""
        if self._numbers is None:
            self._count(bitmap, work)
        else:
            stored, values = values, values.new_empty(self._numbers, dtype=dtype)
            self._count(bitmap, work, stored, values)
        self._list(bitmap, offsets, work)
        return values


@triton.jit
def parts_of(kept, share, most):
    """Return into how many parts a column of ``kept`` rows is cut."""
    return tl.maximum(1, tl.minimum((kept + share // 2) // share, most))


@triton.jit
def weight_grad_kernel(
    grad_ptr, values_ptr, work_ptr, out_ptr, stride_grad, outputs, length, total_rows, lengths, share,
    B: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    NARROW: tl.constexpr, VALUES_FIRST: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write ``out[part, BM outputs, one column block]``; grid ``(NB, outputs / BM, parts)``.

    ``work`` holds the lists of the columns and, at ``lengths``, their lengths ``K``. If ``SPLIT``, a column is cut into
    ``K / share`` parts (rounded), at most the grid's.
    ``NARROW``: offsets into ``grad_y`` and the values fit 32 bits, which saves half the instructions around the copies.
    """
    j, part = tl.program_id(0), tl.program_id(2)
    low = j * 0
    high = tl.load(work_ptr + lengths + j)
    if SPLIT:
        parts = parts_of(high, share, tl.num_programs(2))
        if part >= parts:
            return
        rows_each = tl.cdiv(tl.cdiv(high, parts), BK) * BK
        low += part * rows_each
        high = tl.minimum(low + rows_each, high)
    o = tl.program_id(1) * BM + tl.arange(0, BM)
    e = tl.arange(0, BLOCK)
    k = tl.arange(0, BK)
    if VALUES_FIRST:
        acc = tl.zeros([BLOCK, BM], tl.float32)
    else:
        acc = tl.zeros([BM, BLOCK], tl.float32)
    last = tl.maximum(high - 1, low)
    rows_ptr = work_ptr + j.to(tl.int64) * total_rows
    places_ptr = rows_ptr + tl.num_programs(0).to(tl.int64) * total_rows
    # A comparison of blocks: Triton 3.9's interpreter makes integers of a scalar one, and takes no integers for a mask.
    some = tl.broadcast_to(high, [BK]) > tl.broadcast_to(low, [BK])
    rows = tl.load(rows_ptr + tl.minimum(low + k, last), mask=some, other=0)
    places = tl.load(places_ptr + tl.minimum(low + k, last), mask=some, other=0)
    for p in range(low, high, BK):
        # Past the end the last row is read again, and only the values are masked: grad_y needs no mask of its own.
        r, place = (rows, places) if NARROW else (rows.to(tl.int64), places.to(tl.int64))
        grad = tl.load(grad_ptr + (r[:, None] * stride_grad + o[None, :]), mask=(o < outputs)[None, :], other=0.0)
        stored = (p + k < high)[:, None] & (e < B)[None, :]
        values = tl.load(values_ptr + (place[:, None] * B + e[None, :]), mask=stored, other=0.0)
        rows = tl.load(rows_ptr + tl.minimum(p + BK + k, last))
        places = tl.load(places_ptr + tl.minimum(p + BK + k, last))
        if UPCAST:
            grad, values = grad.to(tl.float32), values.to(tl.float32)
        if VALUES_FIRST:
            acc = tl.dot(tl.trans(values), grad, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(tl.trans(grad), values, acc, input_precision=PRECISION)
    if VALUES_FIRST:
        column, o, e = (j * B + e)[:, None], o[None, :], e[:, None]
    else:
        column, o, e = (j * B + e)[None, :], o[:, None], e[None, :]
    inside = (o < outputs) & (column < length) & (e < B)
    target = out_ptr + part.to(tl.int64) * outputs * length + o.to(tl.int64) * length + column
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_parts_kernel(
    partial_ptr, work_ptr, out_ptr, outputs, length, lengths, share, most,
    B: tl.constexpr, OUTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Add the parts of ``OUTS`` outputs x ``COLS`` values in their order: ``[parts, OUT, L] -> [OUT, L]``."""
    o = (tl.program_id(0) * OUTS + tl.arange(0, OUTS))[:, None]
    f = tl.program_id(1) * COLS + tl.arange(0, COLS)
    parts = parts_of(tl.load(work_ptr + lengths + f // B, mask=f < length, other=0), share, most)
    inside = (o < outputs) & (f < length)[None, :]
    n = o.to(tl.int64) * length + f[None, :]
    total = tl.zeros([OUTS, COLS], tl.float32)
    for part in range(0, tl.max(parts, axis=0)):
        total += tl.load(partial_ptr + n, mask=inside & (part < parts)[None, :], other=0.0)
        partial_ptr += outputs * length
    tl.store(out_ptr + n, total.to(out_ptr.dtype.element_ty), mask=inside)


class Shape(NamedTuple):
    """What a weight gradient's launches depend on.

    Args:
        outputs: Columns of the output gradient.
        stride: Its row stride.
        samples: Samples of the packed input.
        rows: Its rows, of all samples.
        length: Its values per row.
        kept: Its kept blocks.
        block_size: Values per block.
        itemsize: Bytes per value that is multiplied.
        bits: To how many bits values are quantized, 0 for values as they are.
    """

    outputs: int
    stride: int
    samples: int
    rows: int
    length: int
    kept: int
    block_size: int
    itemsize: int
    bits: int = 0


class WeightGradLaunch:
    """Computes weight gradients from gradients and packed inputs of one shape.

    Args:
        shape: The sizes.
        dtype: Type of the result.
        config: Tile sizes.
        split: Parts of the reduction of a column of average length.
        balance: Whether longer columns get more parts even if ``split`` is 1.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, config: Config, split: int, balance: bool = False) -> None:
        rows, outputs, length = shape.rows, shape.outputs, shape.length
        columns, block = ceil_div(length, shape.block_size), max(16, triton.next_power_of_2(shape.block_size))
        # A column may hold many more kept rows than the mean, and gets as many more parts: behind a GELU some columns
        # keep all their rows, and without parts of their own they took 458 us where the mean would have taken 180.
        mean = max(1.0, shape.kept / columns)
        parts = math.ceil(split * min(rows / mean, MAX_IMBALANCE)) if split > 1 or balance else 1
        # What the parts take for a moment is bounded by twice what unpacking the input would.
        parts = max(1, min(parts, 2 * rows * shape.itemsize // (4 * outputs)))
        share = ceil_div(max(1, round(mean / split)), 16) * 16
        self.out, self.dtype, self.parts, self.share = (outputs, length), dtype, parts, share
        stored = shape.kept, shape.block_size, shape.bits
        self.list_columns = ColumnsLaunch(shape.samples, rows // shape.samples, columns, stored)
        lengths = self.list_columns.lengths
        narrow = max(rows * shape.stride + config.bm, (shape.kept + 1) * block) < 2**31
        self.product = Launch(
            weight_grad_kernel, (columns, ceil_div(outputs, config.bm), parts), shape.stride, outputs, length, rows,
            lengths, share, shape.block_size, block, config.bm, config.bk, parts > 1, narrow, config.values_first,
            INTERPRETED, "ieee", num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        self._add = Launch(
            add_parts_kernel, (ceil_div(outputs, 16), ceil_div(length, 128)), outputs, length, lengths, share, parts,
            shape.block_size, 16, 128, num_warps=4,
        )  # fmt: skip

    def __call__(self, grad_y: Tensor, values: Tensor, bitmap: Tensor, offsets: Tensor) -> Tensor:
        """Return the weight gradient ``[OUT, length]``."""
        work = values.new_empty(self.list_columns.work, dtype=torch.int32)
        out = values.new_empty(*self.out, dtype=self.dtype)
        values = self.list_columns(values, bitmap, offsets, work, grad_y.dtype)
        if self.parts == 1:
            self.product(grad_y, values, work, out)
            return out
        partial = values.new_empty(self.parts, *self.out, dtype=torch.float32)
        self.product(grad_y, values, work, partial)
        self._add(partial, work, out)
        return out


def weight_grad_launch(shape: Shape, dtype: torch.dtype, device: torch.device) -> WeightGradLaunch:
    """Return what computes ``grad_y^T @ x_hat`` as ``[OUT, length]`` in ``dtype``.

    It is called with ``grad_y [R, OUT]``, whose columns lie side by side, and values, bitmap and offsets, of quantized
    values as the type of ``grad_y``. It depends on their dtypes and on which of the four start at a multiple of 16
    bytes, too, but only in the compiled kernels that it keeps.
    """
    limits = machine(device)
    config = choose_config(shape.block_size, shape.outputs, shape.itemsize, limits)
    columns = ceil_div(shape.length, shape.block_size)
    tiles = columns * ceil_div(shape.outputs, config.bm)
    rule = SPLIT_RULES[shape.itemsize]
    split = choose_split(tiles, shape.kept // columns, config, limits.multiprocessors, rule)
    if shape.itemsize == 4 and split > 1:
        split = max(split, ceil_div(shape.kept // columns, FP32_ROWS))
    # From 48 warps of tiles per multiprocessor on, the long columns' programs find others to run beside.
    return WeightGradLaunch(shape, dtype, config, split, tiles * config.warps < 48 * limits.multiprocessors)
