"""Weight gradient straight from the kept blocks.

For column block ``j`` with kept rows ``r_0 .. r_{K-1}`` (K differs from column to column)::

    dW[o, j*b + e] = sum_p  grad_y[r_p, o] * values[place_p, e]

a matrix product over ``p`` of gathered rows. Bytes read: the values once for every ``BM`` outputs, and for each column
the kept rows of ``grad_y``. The lists of kept rows take 8 bytes a kept block.

Columns
-------
Values are stored row by row, but the gradient of a column block sums over the rows in which that block is kept. So each
column gets a list, with room for all ``R`` rows, of the row and the place of each of its kept blocks, in the order of
rows. The position of an entry depends on all rows above it, so this takes two launches. The first counts kept blocks
per chunk of 128 rows or more; the second adds up the counts of the chunks above its own, and writes. A program handles
one chunk of some columns as one tile without a loop, since the number of dependent reads decides its time.

Quantized blocks become numbers ``[nnz, b]`` here, since the product reads a block once for every tile of outputs and
would decode it as often. Only the product waits for these numbers, and they wait for nothing. So further programs of
the first launch write them, beside those that count. Such a program needs 32 to 40 registers a thread (Triton 3.6,
sm_90), and one that counts needs 80; all programs of a launch get as many, and fewer of them run at once. So beside
numbers, a program counts half as many columns, for which 32 to 40 are enough. In the second launch all would get 212.

``work`` holds the rows ``[NB, R]``, the places ``[NB, R]``, and from ``counts`` on the counts ``[chunks, NB]`` and the
length of each list ``[NB]``. It lives only as long as one weight gradient.

Product
-------
A program computes a tile of ``BM`` outputs x one block, and reads ``BK`` kept rows a turn. List entries are loaded one
turn ahead, so the gathers can be issued early (a scalar dependency inside the turn would stall the pipeline). If there
are too few tiles to fill the GPU, the sum is cut into parts, longer columns into more parts than short ones. Parts are
written in fp32, and a second launch adds them in their order, so the result is deterministic. (If the program that
finishes last adds them, that saves this launch but makes the loop itself slower.)

For ``b >= 64`` the tile is computed as ``[b, BM]`` (values first), else as ``[BM, b]``: tensor cores take tiles of at
least 64 x 8, and the longer side should not be the block.

Tile sizes and the number of parts are measured constants: no kernel is tuned while a model trains. They were found on
an H200. Other GPUs differ in shared memory, to which tiles are cut down, in the number of multiprocessors, to which
parts are fitted, and in how their tensor cores take operands.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.codec.blocks import RUN_BLOCKS, WORD_BLOCKS, ceil_div
from lightning_actprune.codec.dispatch import Machine, simulated_gpu
from lightning_actprune.kernels.formats import dequantize_tile, encode_format, whole_blocks
from lightning_actprune.kernels.launch import INTERPRETED, Launch
from lightning_actprune.kernels.places import RUN, WORD, set_bits

MIN_ROWS = 128
"""Fewest rows of a chunk."""
MAX_CHUNKS = 256
"""Chunks up to which these stay small: the second launch reads half of all counts on average."""
MAX_TILE = 4096
"""Most blocks of a program."""


class Config(NamedTuple):
    """Tile sizes and launch parameters of ``weight_grad_kernel``."""

    bm: int
    bk: int
    warps: int
    stages: int
    values_first: bool


def machine(device: torch.device) -> Machine:
    """Return the properties of ``device``; the interpreter has few multiprocessors."""
    gpu = simulated_gpu()
    if gpu is not None:
        return gpu.machine
    if device.type != "cuda":
        return Machine(4, 232448, 9)
    found: Any = torch.cuda.get_device_properties(device)  # not all versions of torch declare all of them
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
"""By bytes per value and block size: the fastest on an H200 of up to 12 each, by the geometric mean over five layers at
s = .6 and .9 (``benchmarks/tune.py weight_grad``); for b = 256 chosen by the reuse of a tile."""


FP32_BEFORE_HOPPER = {32: Config(128, 16, 4, 3, True), 128: Config(64, 16, 4, 3, True)}
"""Replaces fp32 choices that spill registers on compute capability 8.0 with Triton 3.9; not timed there."""


def choose_config(block_size: int, outputs: int, itemsize: int, machine: Machine) -> Config:
    """Return tile sizes for a block size, cut down until the buffers of the pipeline fit into shared memory."""
    block = max(16, triton.next_power_of_2(block_size))
    config = CONFIGS[itemsize][block]
    if itemsize == 4 and machine.major < 9:
        config = FP32_BEFORE_HOPPER.get(block, config)
    if itemsize == 4 and outputs <= 64:
        config = config._replace(bm=64)
    if itemsize == 2 and block <= 32 and machine.major not in (9, 10):
        # mma.sync takes a transposed operand from registers only, so grad_y could not be copied asynchronously.
        config = Config(128, 64, 8, 3, True)
    while config.stages * config.bk * (config.bm + block) * itemsize > machine.shared_memory and config.stages > 2:
        config = config._replace(stages=config.stages - 1)
    while config.stages * config.bk * (config.bm + block) * itemsize > machine.shared_memory and config.bk > 16:
        config = config._replace(bk=config.bk // 2)
    return config


MAX_IMBALANCE = 2.5
"""Most parts of a column, relative to those of an average one. It bounds the memory of partial tiles."""


FP32_ROWS = 512
"""Most rows that a part adds up one after another in fp32, if the sum is cut into parts at all. The vendor's product
cuts such sums too; with 1,025 to 2,090 rows a part the error was 2.2 times its own. Where it has enough tiles to fill
the GPU, it adds all rows one after another, and these may be more than are kept here. The bound on the memory of parts
comes first: with some thousand outputs and few columns, a part may add up several times as many."""


class SplitRule(NamedTuple):
    """When and how far the sum is cut into parts.

    Args:
        full: Warps of tiles per multiprocessor from which on it is not cut: parts then take up to twice the time, for
            writing and reading partial results.
        aim: Warps per multiprocessor to reach otherwise.
        most: Largest number of parts.
        turns: Fewest turns of the loop that are worth a part.
    """

    full: int
    aim: int
    most: int
    turns: int


SPLIT_RULES = {2: SplitRule(8, 12, 6, 4), 4: SplitRule(12, 32, 8, 8)}
"""By bytes per value."""


def choose_split(tiles: int, kept_per_column: int, config: Config, multiprocessors: int, rule: SplitRule) -> int:
    """Return the number of parts into which the sum of a column of average length is cut."""
    warps = tiles * config.warps
    if warps >= rule.full * multiprocessors:
        return 1
    wanted = ceil_div(rule.aim * multiprocessors, warps)
    return max(1, min(wanted, rule.most, kept_per_column // (rule.turns * config.bk)))


@triton.jit
def _tile(r, j, stop, bitmap_ptr, rows, columns, words):
    """Return samples and first block numbers of rows ``r [TILE]``, and their bits ``[COLS, TILE]`` in columns ``j``.

    Rows run along the last axis, so that neighbouring lanes store to neighbouring places of the same list.
    """
    s, t = (r // rows).to(tl.int64), r % rows
    n = (t * columns)[None, :] + j[:, None]
    inside = (r < stop)[None, :] & (j < columns)[:, None]
    word = tl.load(bitmap_ptr + (s * words)[None, :] + n // WORD, mask=inside, other=0)
    return s, t * columns, (word >> (n % WORD)) & 1


@triton.jit
def _kept_before(n, s, inside, bitmap_ptr, offsets_ptr, words, runs):
    """Return the place of block ``n`` if it is kept: its run's offset, and the kept blocks before it in the run."""
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
    """Count the kept blocks of ``TILE`` rows in each of ``COLS`` columns; grid ``(chunks, NB / COLS)``.

    ``bitmap_ptr: [S, words]`` and ``work_ptr``, int32.
    """
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
    """Count, and write all blocks as numbers; grid ``(chunks + more, NB / COLS)``.

    A program past the chunks writes ``BLOCKS`` blocks. ``values_ptr``: bytes of ``kept`` blocks;
    ``numbers_ptr: [kept, B]``.
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
    """Write the list entries of ``TILE`` rows; grid ``(chunks, NB / COLS)``.

    ``bitmap_ptr: [S, words]``, ``offsets_ptr: [S, runs]`` and ``work_ptr``, int32; ``size`` is ``NB * R``, the distance
    from the rows to the places. A block's place is that of its row's first block in the tile, plus the kept blocks
    between.
    """
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    r = chunk * TILE + tl.arange(0, TILE)
    # Loaded before the counts, so that it does not wait for their sum.
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
        rows: Rows of each sample.
        columns: Blocks per row.
        stored: Number of kept blocks, values of a block, and bits of a value, 0 for unchanged values.
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
        """Write the lists into ``work``, and return the values as numbers, in ``dtype`` if they are quantized."""
        if self._numbers is None:
            self._count(bitmap, work)
        else:
            stored, values = values, values.new_empty(self._numbers, dtype=dtype)
            self._count(bitmap, work, stored, values)
        self._list(bitmap, offsets, work)
        return values


@triton.jit
def parts_of(kept, share, most):
    """Return the number of parts into which a column of ``kept`` rows is cut."""
    return tl.maximum(1, tl.minimum((kept + share // 2) // share, most))


@triton.jit
def weight_grad_kernel(
    grad_ptr, values_ptr, work_ptr, out_ptr, stride_grad, outputs, length, total_rows, lengths, share,
    B: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    NARROW: tl.constexpr, VALUES_FIRST: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write ``BM`` outputs x one column block of a part; grid ``(NB, OUT / BM, parts)``.

    ``grad_ptr: [R, OUT]``, with rows ``stride_grad`` apart; ``values_ptr: [nnz, B]``; ``work_ptr``: the lists and, from
    ``lengths`` on, their lengths ``K``; ``out_ptr: [parts, OUT, L]``. ``SPLIT``: a column is cut into ``K / share``
    parts, rounded, and at most the grid's. ``NARROW``: offsets into ``grad_y`` and values fit into 32 bits, which saves
    half of the instructions around the copies.
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
    # Compares blocks: for scalars, Triton 3.9's interpreter returns integers, which it does not accept as a mask.
    some = tl.broadcast_to(high, [BK]) > tl.broadcast_to(low, [BK])
    rows = tl.load(rows_ptr + tl.minimum(low + k, last), mask=some, other=0)
    places = tl.load(places_ptr + tl.minimum(low + k, last), mask=some, other=0)
    for p in range(low, high, BK):
        # Past the end, the last row is read again and the values are masked, so grad_y needs no mask.
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
    """Add the parts of ``OUTS`` outputs x ``COLS`` values in their order.

    ``partial_ptr: [parts, OUT, L]`` in fp32, ``work_ptr`` as in ``weight_grad_kernel``, ``out_ptr: [OUT, L]``.
    """
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
    """Sizes that the launches of a weight gradient depend on.

    Args:
        outputs: Columns of the output gradient.
        stride: Row stride of the output gradient.
        samples: Samples of the packed input.
        rows: Rows of all samples.
        length: Values of a row.
        kept: Kept blocks.
        block_size: Values per block.
        itemsize: Bytes per value in the product.
        bits: Bits of a stored value, 0 for unchanged values.
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
        split: Parts of the sum of a column of average length.
        balance: Whether longer columns get more parts even if ``split`` is 1.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, config: Config, split: int, balance: bool = False) -> None:
        rows, outputs, length = shape.rows, shape.outputs, shape.length
        columns, block = ceil_div(length, shape.block_size), max(16, triton.next_power_of_2(shape.block_size))
        # A column with many more kept rows than the mean gets as many more parts. Behind a GELU, some columns keep all
        # their rows: without more parts these took 458 us, and the mean would have taken 180.
        mean = max(1.0, shape.kept / columns)
        parts = math.ceil(split * min(rows / mean, MAX_IMBALANCE)) if split > 1 or balance else 1
        # For a moment, the parts take at most twice the memory that the unpacked input would.
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
    """Return the launches that compute ``grad_y^T @ x_hat`` as ``[OUT, length]`` in ``dtype``.

    They take ``grad_y [R, OUT]``, with stride 1 along columns, and values, bitmap and offsets; quantized values stand
    for numbers in the type of ``grad_y``. The compiled kernels that they keep also depend on the dtypes of these four
    tensors and on which of them start at a multiple of 16 bytes.
    """
    limits = machine(device)
    config = choose_config(shape.block_size, shape.outputs, shape.itemsize, limits)
    columns = ceil_div(shape.length, shape.block_size)
    tiles = columns * ceil_div(shape.outputs, config.bm)
    rule = SPLIT_RULES[shape.itemsize]
    split = choose_split(tiles, shape.kept // columns, config, limits.multiprocessors, rule)
    if shape.itemsize == 4 and split > 1:
        split = max(split, ceil_div(shape.kept // columns, FP32_ROWS))
    # From 48 warps of tiles per multiprocessor on, other programs run beside those of the long columns.
    return WeightGradLaunch(shape, dtype, config, split, tiles * config.warps < 48 * limits.multiprocessors)
