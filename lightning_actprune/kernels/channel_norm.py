"""Normalisation of channels: ``[images, channels, length]`` in memory, by the maths of ``operators.channel_norm``.

**Statistics**, two launches. Programs that each read a part of some channels write its mean and squared deviations,
from sums of differences to the mean of the part's first tile. A small kernel then merges the parts of a channel in a
fixed order, so the same input gives the same statistics. It also moves the running statistics,
``running += momentum (new - running)``.

Let d be the distance between that first mean and the mean of the part, which has t times as many values. The variance
of the part is at least d^2 / t. So subtracting d^2 from the mean of squares loses at most a factor of t + 1 in
precision.

**Forward**, one pass over the flat memory after these: it normalises, writes the output and quantizes. The channels of
a block follow from its place alone. If lengths and block size fit, a block has one channel, or one for each value.

**Backward**, three launches. Programs that each read a part of some channels, of gradient and codes, write their sums
of ``g`` and ``g x~``. A small kernel adds the parts in a fixed order, and turns the sums into gradients of the
parameters and three factors for each channel. One pass over the flat memory then writes ``grad_x = f0 g + f1 x~ + f2``.
If channels have one value each (channels last), a row of blocks is as many pixels as it takes for both to end together;
a program keeps its columns and goes through the rows. Longer channels are covered by blocks. The first and the last one
may be shared with the next channel, and are then read for each of the two.

Bytes moved per value of 16 bits with 4 bits in blocks of 32: 2 for the statistics, then 2 + 2 + 0.56 (torch: 2, then
2 + 2); backward 2 + 0.56, then 2 + 0.56 + 2 (torch: 2 + 2, then 2 + 2 + 2). A fused ReLU adds 0.125 to each pass for
its bits, which are stored behind the values in whole bytes for each block (passes of its own: 2 + 2 + 0.125 and
2 + 0.125 + 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.codec.blocks import ceil_div
from lightning_actprune.kernels.formats import (
    dequantize_tile,
    encode_format,
    load_rows,
    quantize_tile,
    whole_blocks,
)
from lightning_actprune.kernels.launch import Launch, multiprocessors

TILE_VALUES = 4096
"""Values of a tile of the statistics: two sums for each of 32 a thread."""
MOST_CHANNEL, MOST_CHANNELS = 1024, 64
"""Most values of a channel, and most channels, in such a tile."""
STAGES = 4
"""Tiles in shared memory, of which all but one are being loaded, as in ``sums``."""
PROGRAMS = 4
"""Programs per multiprocessor, of four warps each."""
MOST_PARTS = 1024
"""Most parts, since one program merges those of a channel, all in registers."""
MERGED_VALUES = 2048
"""Parts times channels of such a program: three numbers for each of 16 a thread."""
MOST_COLS = 32
"""Most blocks side by side in a tile of the sums."""
ADDED_ROWS, ADDED_CHANNELS = 256, 8
"""Parts and channels that are added at once: where there are few channels, there are hundreds of parts."""

RunningTensors = tuple[Tensor, Tensor, Tensor | None]
"""Running mean and variance ``[channels]`` in fp32, and the number of batches in int64, all contiguous."""
Spread = Callable[[Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor | None, Tensor | None]]
"""Turns statistics of sets, weight and bias into numbers for each channel."""


@triton.jit
def channel_statistics_kernel(
    x_ptr, partial_ptr, images, channels, units, share, LENGTH: tl.constexpr, PIXEL: tl.constexpr,
    CHANNELS: tl.constexpr, VALUES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write mean, squared deviations and number of values of ``share`` units of each channel.

    ``x_ptr: [images, channels, LENGTH]``, ``partial_ptr: [3, parts, channels]`` in fp32; grid
    ``(channels / CHANNELS, parts)``. A unit is a piece of a channel of one image, or ``VALUES`` images of channels of
    one value.
    """
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, units)
    at, inside, count = _unit(first, channel, images, channels, LENGTH, PIXEL, VALUES)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    shift = tl.sum(x, axis=1) / count
    sums = tl.zeros([CHANNELS, VALUES], tl.float32)
    squares = tl.zeros([CHANNELS, VALUES], tl.float32)
    total = count * 0
    for u in tl.range(first, last, num_stages=STAGES):
        at, inside, count = _unit(u, channel, images, channels, LENGTH, PIXEL, VALUES)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(inside, x - shift[:, None], 0.0)
        sums += x
        squares += x * x
        total += count
    mean = tl.sum(sums, axis=1) / total
    deviations = tl.sum(squares, axis=1) - mean * mean * total
    out_ptr = partial_ptr + tl.program_id(1).to(tl.int64) * channels + channel
    size = tl.num_programs(1).to(tl.int64) * channels
    tl.store(out_ptr, shift + mean, mask=channel < channels)
    tl.store(out_ptr + size, tl.where(deviations < 0.0, 0.0, deviations), mask=channel < channels)
    tl.store(out_ptr + 2 * size, mean * 0.0 + total, mask=channel < channels)


@triton.jit
def _unit(u, channel, images, channels, LENGTH: tl.constexpr, PIXEL: tl.constexpr, VALUES: tl.constexpr):
    """Return positions and existence of the values ``[CHANNELS, VALUES]`` of unit ``u``, and their number in a channel.

    ``PIXEL`` is the number of channels if they have one value each: the compiler knows it, and so how much to read at
    once.
    """
    v = tl.arange(0, VALUES)
    if LENGTH == 1:
        n = (v * 0 + u).to(tl.int64) * VALUES + v
        at = n[None, :] * PIXEL + channel[:, None]
        inside = (n < images)[None, :] & (channel < PIXEL)[:, None]
        count = tl.minimum(images - u * VALUES, VALUES)
    else:
        PIECES: tl.constexpr = (LENGTH + VALUES - 1) // VALUES
        i = (u % PIECES) * VALUES + v
        plane = (channel * 0 + u // PIECES).to(tl.int64) * channels + channel
        at = plane[:, None] * LENGTH + i[None, :]
        inside = (channel < channels)[:, None] & (i < LENGTH)[None, :]
        count = tl.minimum(LENGTH - (u % PIECES) * VALUES, VALUES)
    return at, inside, count


@triton.jit(do_not_specialize_on_alignment=["mean_ptr", "var_ptr", "batches_ptr"])
def merge_statistics_kernel(
    partial_ptr, out_ptr, mean_ptr, var_ptr, batches_ptr, parts, channels, eps, momentum, TRACKED: tl.constexpr,
    COUNTED: tl.constexpr, PARTS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write mean, rstd and unbiased variance of the parts.

    ``partial_ptr: [3, parts, channels]``, ``out_ptr: [3, channels]``, fp32. ``TRACKED``: also move the running mean and
    variance, ``mean_ptr`` and ``var_ptr: [channels]`` in fp32, towards them. ``COUNTED``: also count the batch.
    """
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    p = tl.arange(0, PARTS)
    inside = (p < parts)[:, None] & (channel < channels)[None, :]
    at_ptr = partial_ptr + p.to(tl.int64)[:, None] * channels + channel[None, :]
    size = tl.cast(parts, tl.int64) * channels
    means = tl.load(at_ptr, mask=inside, other=0.0)
    deviations = tl.load(at_ptr + size, mask=inside, other=0.0)
    counts = tl.load(at_ptr + 2 * size, mask=inside, other=0.0)
    count = tl.sum(counts, axis=0)
    mean = tl.sum(means * counts, axis=0) / tl.maximum(count, 1.0)
    off = tl.where(inside, means - mean[None, :], 0.0)
    total = tl.sum(deviations + off * off * counts, axis=0)
    unbiased = total / tl.maximum(count - 1.0, 1.0)
    out_ptr += channel
    tl.store(out_ptr, mean, mask=channel < channels)
    tl.store(out_ptr + channels, tl.rsqrt(total / tl.maximum(count, 1.0) + eps), mask=channel < channels)
    tl.store(out_ptr + 2 * channels, unbiased, mask=channel < channels)
    if TRACKED:
        _move(mean_ptr + channel, mean, momentum, channel < channels)
        _move(var_ptr + channel, unbiased, momentum, channel < channels)
    if COUNTED:
        first = tl.program_id(0) == 0
        tl.store(batches_ptr, tl.load(batches_ptr, mask=first, other=0) + 1, mask=first)


@triton.jit
def _move(running_ptr, found, share, mask):
    """Move running numbers by ``share`` of the way towards new ones, as ``torch.lerp`` does."""
    running = tl.load(running_ptr, mask=mask, other=0.0)
    way = found - running
    tl.store(running_ptr, tl.where(share < 0.5, running + share * way, found - way * (1.0 - share)), mask=mask)


def statistics_tile(channels: int, length: int) -> tuple[int, int]:
    """Return ``(CHANNELS, VALUES)``."""
    if length == 1:
        group = min(MOST_CHANNELS, int(triton.next_power_of_2(channels)))
        return group, TILE_VALUES // group
    values = least_waste(length, MOST_CHANNEL)
    # Unaligned channels are read one value at a time, with an address for each in registers.
    most = TILE_VALUES if length % 8 == 0 else TILE_VALUES // 2
    return min(max(most // values, 1), int(triton.next_power_of_2(channels))), values


def merge_tile(parts: int) -> tuple[int, int]:
    """Return ``(PARTS, CHANNELS)`` of the kernel that merges ``parts`` parts."""
    padded = int(triton.next_power_of_2(parts))
    return padded, min(max(1, MERGED_VALUES // padded), 16)


def least_waste(count: int, most: int) -> int:
    """Return the power of two up to ``most``, and from a quarter of it on, whose multiples exceed ``count`` least."""
    sizes = [min(most // part, int(triton.next_power_of_2(count))) for part in (1, 2, 4)]
    return min(sizes, key=lambda size: ceil_div(count, size) * size)


def parts_of(units: int, groups: int, device: torch.device) -> tuple[int, int]:
    """Return the number of parts into which ``units`` are cut, for each of ``groups``, and the units of a part."""
    wanted = min(MOST_PARTS, ceil_div(PROGRAMS * multiprocessors(device), groups), units)
    share = ceil_div(units, wanted)
    return ceil_div(units, share), share


class StatisticsLaunch:
    """The launches that compute the statistics of one kind of input.

    Args:
        cut: Images, channels and length.
        eps: Added to the variance.
        device: Where the kernels run.
        momentum: Momentum of the running statistics, ``None`` if there are none.
        counted: Whether batches are counted.
    """

    def __init__(
        self,
        cut: tuple[int, int, int],
        eps: float,
        device: torch.device,
        momentum: float | None = None,
        counted: bool = False,
    ) -> None:
        images, channels, length = cut
        group, values = statistics_tile(channels, length)
        units = ceil_div(images, values) if length == 1 else images * ceil_div(length, values)
        groups = ceil_div(channels, group)
        parts, share = parts_of(units, groups, device)
        self.partial, self.shape = (3, parts, channels), (3, channels)
        sizes = images, channels, units, share, length, channels if length == 1 else 0, group, values, STAGES
        self._find = Launch(channel_statistics_kernel, (groups, parts), *sizes, num_warps=4)
        padded, merged = merge_tile(parts)
        grid = (ceil_div(channels, merged),)
        moved = float(momentum or 0.0), momentum is not None, counted
        self._merge = Launch(merge_statistics_kernel, grid, parts, channels, eps, *moved, padded, merged, num_warps=4)

    def __call__(self, x: Tensor, running: RunningTensors | None = None) -> Tensor:
        """Return mean, rstd and unbiased variance ``[3, channels]``, and update ``running``."""
        partial = x.new_empty(self.partial, dtype=torch.float32)
        found = x.new_empty(self.shape, dtype=torch.float32)
        self._find(x, partial)
        if running is None:
            self._merge(partial, found, found, found, found)
        else:
            mean, var, batches = running
            self._merge(partial, found, mean, var, mean if batches is None else batches)
        return found


@triton.jit
def normalize_channels_kernel(
    x_ptr, statistics_ptr, weight_ptr, bias_ptr, y_ptr, values_ptr, count, nnz, channels, WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr, RELU: tl.constexpr, CHANNELS: tl.constexpr, LENGTH: tl.constexpr, EXACT: tl.constexpr,
    B: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Write ``y`` and the quantized normalised values of ``TILE`` blocks.

    ``x_ptr`` and ``y_ptr: [count]``, flat; ``statistics_ptr: [2 or more, channels]``, mean and rstd; ``weight_ptr`` and
    ``bias_ptr: [channels]``; ``values_ptr``: bytes of ``nnz`` blocks, then the bits of the ReLU. ``CHANNELS`` is 0 for
    one image, whose number of channels the compiler need not know. ``EXACT``: the last block is whole. ``RELU``:
    negative values of ``y`` are zero.
    """
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exist = (place >= 0) & (place < nnz)  # of nearly 2^31 blocks, the last tile reaches beyond int32
    inside = inside_flat(place, exist, count, EXACT, B, BLOCK)
    channel = channels_at(place, CHANNELS, LENGTH, B, BLOCK)
    x = load_flat(x_ptr, place, exist, inside, EXACT, B, BLOCK).to(tl.float32)
    mean = per_channel(statistics_ptr, channel, exist, inside)
    x = (x - mean) * per_channel(row_of(statistics_ptr, 1, channels, CHANNELS), channel, exist, inside)
    x = tl.where(inside, x, 0.0)
    y = x
    if WEIGHTED:
        y *= per_channel(weight_ptr, channel, exist, inside)
    if BIASED:
        y += per_channel(bias_ptr, channel, exist, inside)
    if RELU:
        higher = (y.to(y_ptr.dtype.element_ty).to(tl.float32) <= 0.0) == 0  # NaN stays NaN
        y = tl.where(higher, y, 0.0)
        store_bits(values_ptr, nnz, place, higher, exist, B, BLOCK, FORMAT)
    store_flat(y_ptr, y, place, inside, B, BLOCK)
    quantize_tile(x, values_ptr, nnz, place, exist, B, BLOCK, FORMAT)


@triton.jit
def channels_at(place, CHANNELS: tl.constexpr, LENGTH: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
    """Return the channel of each value of blocks, ``[R, BLOCK]``, or ``[R, 1]`` if no block has two."""
    e = tl.arange(0, BLOCK)[None, :]
    first = place.to(tl.int64) * B
    plane = first // LENGTH
    if CHANNELS > 0:
        plane = (plane % CHANNELS).to(tl.int32)
    if LENGTH % B == 0:
        channel = plane[:, None]
    elif LENGTH == 1 and CHANNELS > 0 and CHANNELS % B == 0:
        channel = plane[:, None] + e
    else:
        channel = plane[:, None] + ((first % LENGTH).to(tl.int32)[:, None] + e) // LENGTH
        if CHANNELS > 0:
            channel = channel % CHANNELS
    return channel


@triton.jit
def row_of(ptr, row: tl.constexpr, channels, CHANNELS: tl.constexpr):
    """Return row ``row`` of a tensor ``[rows, channels]``.

    If the compiler knows the number of channels, it knows whether the row is aligned.
    """
    if CHANNELS > 0:
        row_ptr = ptr + row * CHANNELS
    else:
        row_ptr = ptr + tl.cast(channels, tl.int64) * row
    return row_ptr


@triton.jit
def per_channel(ptr, channel, exist, inside):
    """Return the fp32 number of each channel, zero where none exists."""
    mask = inside
    if channel.shape[1] == 1:
        mask = exist[:, None]
    return tl.load(ptr + channel, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def inside_flat(place, exist, count, EXACT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
    """Return which values ``[R, BLOCK]`` of blocks exist."""
    e = tl.arange(0, BLOCK)[None, :]
    inside = exist[:, None] & (e < B)
    if not EXACT:
        inside &= place.to(tl.int64)[:, None] * B + e < count
    return inside


@triton.jit
def load_flat(x_ptr, place, exist, inside, EXACT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
    """Return the values ``[R, BLOCK]`` of blocks of a flat tensor, undefined where not ``inside``."""
    first_ptr = x_ptr + place.to(tl.int64) * B
    if EXACT:
        return load_rows(first_ptr, place * 0, exist, B, B, BLOCK)
    return tl.load(first_ptr[:, None] + tl.arange(0, BLOCK)[None, :], mask=inside, other=0.0)


@triton.jit
def store_flat(y_ptr, y, place, inside, B: tl.constexpr, BLOCK: tl.constexpr):
    """Write the values of blocks to a flat tensor."""
    at = place.to(tl.int64)[:, None] * B + tl.arange(0, BLOCK)[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _bits_of(values_ptr, nnz, place, B: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    """Return pointers ``[R, units]`` to the bits of blocks, in units of 16 if these are whole, and which exist.

    They start at the first multiple of 16 bytes behind the values of ``nnz`` blocks, see ``bits_start``.
    """
    EACH: tl.constexpr = 16 if B % 16 == 0 else 8
    UNITS: tl.constexpr = (B + EACH - 1) // EACH
    start = (tl.cast(nnz, tl.int64) * (FORMAT >> 24) + 15) // 16
    bits_ptr = values_ptr + start * 16
    if EACH == 16:
        bits_ptr = bits_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    k = tl.arange(0, BLOCK // EACH)
    return bits_ptr + place.to(tl.int64)[:, None] * UNITS + k[None, :], (k < UNITS)[None, :]


@triton.jit
def store_bits(values_ptr, nnz, place, bits, exist, B: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    """Write a bit for each value of blocks, ``[R, BLOCK]``."""
    EACH: tl.constexpr = 16 if B % 16 == 0 else 8
    bits_ptr, inside = _bits_of(values_ptr, nnz, place, B, BLOCK, FORMAT)
    parts = tl.reshape(bits.to(tl.int32), [place.shape[0], BLOCK // EACH, EACH])
    joined = tl.sum(parts << tl.arange(0, EACH)[None, None, :], axis=2)
    tl.store(bits_ptr, joined.to(bits_ptr.dtype.element_ty), mask=inside & exist[:, None])


@triton.jit
def load_bits(values_ptr, nnz, place, exist, B: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    """Return the bits ``[R, BLOCK]`` of blocks as booleans."""
    EACH: tl.constexpr = 16 if B % 16 == 0 else 8
    bits_ptr, inside = _bits_of(values_ptr, nnz, place, B, BLOCK, FORMAT)
    joined = tl.load(bits_ptr, mask=inside & exist[:, None], other=0).to(tl.int32)
    bits = (joined[:, :, None] >> tl.arange(0, EACH)[None, None, :]) & 1
    return tl.reshape(bits, [place.shape[0], BLOCK]) != 0


def bits_start(blocks: int, row_bytes: int) -> int:
    """Return the byte at which the bits of a ReLU start, behind the values of ``blocks`` blocks."""
    return ceil_div(blocks * row_bytes, 16) * 16


class Stored(NamedTuple):
    """Layout of channels in memory, and format in which they are stored.

    Args:
        cut: Images, channels and length.
        block_size: Values per block, in [1, values].
        bits: Bits of a stored value.
        device: Where the kernels run.
        relu: Whether the output is that of a ReLU, whose bits are stored behind the values.
    """

    cut: tuple[int, int, int]
    block_size: int
    bits: int
    device: torch.device
    relu: bool = False

    @property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.cut)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return ceil_div(self.numel, self.block_size)

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored block, without the bits of the ReLU."""
        return encode_format(self.bits, self.block_size) >> 24

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stored bytes: those of each block, or flat if bits follow them."""
        if not self.relu:
            return self.blocks, self.row_bytes
        return (bits_start(self.blocks, self.row_bytes) + self.blocks * ceil_div(self.block_size, 8),)


def flat_constants(stored: Stored) -> dict[str, int | bool]:
    """Return the last compile-time constants of a kernel that runs over the flat memory."""
    images, channels, length = stored.cut
    block, tile = whole_blocks(stored.block_size)
    exact = stored.numel % stored.block_size == 0
    of_memory = {"CHANNELS": channels if images > 1 else 0, "LENGTH": length, "EXACT": exact}
    of_blocks = {"B": stored.block_size, "BLOCK": block, "TILE": tile}
    return of_memory | of_blocks | {"FORMAT": encode_format(stored.bits, stored.block_size)}


def flat_launch(kernel: object, stored: Stored, flags: tuple[bool, ...]) -> Launch:
    """Return the launch of such a kernel, whose numbers are those of values, blocks and channels."""
    constants = flat_constants(stored)
    grid = (ceil_div(stored.blocks, int(constants["TILE"])),)
    sizes = stored.numel, stored.blocks, stored.cut[1]
    return Launch(kernel, grid, *sizes, *flags, *constants.values(), num_warps=4)


@triton.jit
def pixel_sums_kernel(
    grad_ptr, values_ptr, partial_ptr, count, nnz, rows, tiles, share, columns: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
    """Write the sums of ``g x~`` and ``g`` over ``share`` tiles of rows; grid ``(columns / COLS, parts)``.

    ``grad_ptr: [count]``, flat; ``values_ptr`` as in ``normalize_channels_kernel``;
    ``partial_ptr: [2, parts, columns * B]`` in fp32. Rows have ``columns`` blocks, and the last one may be cut off.
    ``RELU``: ``g`` is zero where its bit is zero.
    """
    n = tl.arange(0, ROWS * COLS)
    j = tl.program_id(0) * COLS + n % COLS
    along = tl.zeros([ROWS * COLS, BLOCK], tl.float32)
    sums = tl.zeros([ROWS * COLS, BLOCK], tl.float32)
    first = tl.program_id(1) * share
    for tile in range(first, tl.minimum(first + share, tiles)):
        r = tile * ROWS + n // COLS
        place = r * columns + j
        exist = (r < rows) & (j < columns) & (place >= 0) & (place < nnz)
        inside = inside_flat(place, exist, count, EXACT, B, BLOCK)
        grad = load_flat(grad_ptr, place, exist, inside, EXACT, B, BLOCK).to(tl.float32)
        if RELU:
            inside &= load_bits(values_ptr, nnz, place, exist, B, BLOCK, FORMAT)
        grad = tl.where(inside, grad, 0.0)
        x = dequantize_tile(values_ptr, nnz, place, exist, 0, B, BLOCK, FORMAT)
        along += grad * x
        sums += grad
    column = (tl.program_id(0) * COLS + tl.arange(0, COLS))[:, None] * B + tl.arange(0, BLOCK)[None, :]
    inside = (column < columns * B) & (tl.arange(0, BLOCK) < B)[None, :]
    out_ptr = partial_ptr + tl.program_id(1).to(tl.int64) * (columns * B) + column
    tl.store(out_ptr, tl.sum(tl.reshape(along, [ROWS, COLS, BLOCK]), axis=0), mask=inside)
    out_ptr += tl.num_programs(1).to(tl.int64) * (columns * B)
    tl.store(out_ptr, tl.sum(tl.reshape(sums, [ROWS, COLS, BLOCK]), axis=0), mask=inside)


@triton.jit
def channel_sums_kernel(
    grad_ptr, values_ptr, partial_ptr, nnz, channels, units, share, LENGTH: tl.constexpr, PIECES: tl.constexpr,
    CHANNELS: tl.constexpr, COLS: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
    """Write the sums of ``g x~`` and ``g`` over ``share`` units of each channel; grid ``(channels / CHANNELS, parts)``.

    ``grad_ptr: [images, channels, LENGTH]``; ``values_ptr`` as in ``normalize_channels_kernel``;
    ``partial_ptr: [2, parts, channels]`` in fp32. A unit is one of ``PIECES`` of a channel of an image: ``COLS`` of the
    blocks that cover it.
    """
    n = tl.arange(0, CHANNELS * COLS)
    channel = tl.program_id(0) * CHANNELS + n // COLS
    along = tl.zeros([CHANNELS * COLS, BLOCK], tl.float32)
    sums = tl.zeros([CHANNELS * COLS, BLOCK], tl.float32)
    first = tl.program_id(1) * share
    for u in range(first, tl.minimum(first + share, units)):
        start = ((n * 0 + u // PIECES).to(tl.int64) * channels + channel) * LENGTH
        place = (start // B).to(tl.int32) + (u % PIECES) * COLS + n % COLS
        at = place.to(tl.int64) * B - start  # position of a block's first value in its channel
        exist = (channel < channels) & (place >= 0) & (place < nnz) & (at < LENGTH)
        if LENGTH % B == 0:
            inside = inside_flat(place, exist, 0, True, B, BLOCK)
            grad = load_flat(grad_ptr, place, exist, inside, True, B, BLOCK).to(tl.float32)
        else:
            e = at[:, None] + tl.arange(0, BLOCK)[None, :]
            inside = inside_flat(place, exist, 0, True, B, BLOCK) & (e >= 0) & (e < LENGTH)
            grad = load_flat(grad_ptr, place, exist, inside, False, B, BLOCK).to(tl.float32)
        if RELU:
            inside &= load_bits(values_ptr, nnz, place, exist, B, BLOCK, FORMAT)
        grad = tl.where(inside, grad, 0.0)
        x = dequantize_tile(values_ptr, nnz, place, exist, 0, B, BLOCK, FORMAT)
        along += grad * x
        sums += grad
    group = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    out_ptr = partial_ptr + tl.program_id(1).to(tl.int64) * channels + group
    tl.store(out_ptr, _of_channels(along, CHANNELS, COLS), mask=group < channels)
    out_ptr += tl.num_programs(1).to(tl.int64) * channels
    tl.store(out_ptr, _of_channels(sums, CHANNELS, COLS), mask=group < channels)


@triton.jit
def _of_channels(x, CHANNELS: tl.constexpr, COLS: tl.constexpr):
    """Return the sum of each channel of a tile."""
    return tl.sum(tl.reshape(tl.sum(x, axis=1), [CHANNELS, COLS]), axis=1)


@triton.jit
def channel_grad_kernel(
    grad_ptr, values_ptr, factors_ptr, grad_x_ptr, count, nnz, channels, RELU: tl.constexpr, CHANNELS: tl.constexpr,
    LENGTH: tl.constexpr, EXACT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Write ``grad_x = scale g + slope x~ + shift`` for ``TILE`` blocks.

    ``grad_ptr`` and ``grad_x_ptr: [count]``, flat; ``factors_ptr: [3, channels]`` in fp32; all else as in
    ``normalize_channels_kernel``.
    """
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exist = (place >= 0) & (place < nnz)
    inside = inside_flat(place, exist, count, EXACT, B, BLOCK)
    channel = channels_at(place, CHANNELS, LENGTH, B, BLOCK)
    grad = load_flat(grad_ptr, place, exist, inside, EXACT, B, BLOCK).to(tl.float32)
    if RELU:
        grad = tl.where(load_bits(values_ptr, nnz, place, exist, B, BLOCK, FORMAT), grad, 0.0)
    x = dequantize_tile(values_ptr, nnz, place, exist, 0, B, BLOCK, FORMAT)
    slope = per_channel(row_of(factors_ptr, 1, channels, CHANNELS), channel, exist, inside)
    rest = x * slope + per_channel(row_of(factors_ptr, 2, channels, CHANNELS), channel, exist, inside)
    store_flat(grad_x_ptr, grad * per_channel(factors_ptr, channel, exist, inside) + rest, place, inside, B, BLOCK)


def pixel_tile(channels: int, block_size: int) -> dict[str, int]:
    """Return the compile-time sizes of ``pixel_sums_kernel`` for pixels of ``channels`` channels."""
    block, tile = whole_blocks(block_size)
    columns = math.lcm(channels, block_size) // block_size
    cols = min(least_waste(columns, MOST_COLS), tile)
    return {"columns": columns, "ROWS": tile // cols, "COLS": cols, "B": block_size, "BLOCK": block}


def channel_tile(channels: int, length: int, block_size: int) -> dict[str, int]:
    """Return the compile-time sizes of ``channel_sums_kernel``."""
    block, tile = whole_blocks(block_size)
    # The most blocks that a channel touches, wherever it starts.
    cover = length // block_size if length % block_size == 0 else (length + block_size - 2) // block_size + 1
    cols = min(least_waste(cover, MOST_COLS), tile)
    group = min(tile // cols, int(triton.next_power_of_2(channels)))
    sizes = {"LENGTH": length, "PIECES": ceil_div(cover, cols), "CHANNELS": group, "COLS": cols}
    return sizes | {"B": block_size, "BLOCK": block}


class SumsLaunch:
    """The launch that sums the channels of one kind of gradient, in parts ``[2, parts, channels]``.

    Args:
        stored: Layout and format of the input that the gradient belongs to.
    """

    def __init__(self, stored: Stored) -> None:
        (images, channels, length), block_size, bits, device, relu = stored
        count, blocks = stored.numel, stored.blocks
        if length == 1:
            sizes = pixel_tile(channels, block_size)
            columns = sizes["columns"]
            rows = ceil_div(blocks, columns)
            groups, tiles = ceil_div(columns, sizes["COLS"]), ceil_div(rows, sizes["ROWS"])
            parts, share = parts_of(tiles, groups, device)
            scalars = count, blocks, rows, tiles, share, columns, count % block_size == 0, *list(sizes.values())[1:]
            kernel, folded = pixel_sums_kernel, parts * (columns * block_size // channels)
        else:
            sizes = channel_tile(channels, length, block_size)
            groups, units = ceil_div(channels, sizes["CHANNELS"]), images * sizes["PIECES"]
            parts, share = parts_of(units, groups, device)
            scalars = blocks, channels, units, share, *sizes.values()
            kernel, folded = channel_sums_kernel, parts
        self.shape = 2, folded, channels
        self._sum = Launch(kernel, (groups, parts), *scalars, encode_format(bits, block_size), relu, num_warps=4)

    def __call__(self, grad_y: Tensor, values: Tensor) -> Tensor:
        """Return the sums of ``g x~`` and of ``g``, in parts."""
        partial = grad_y.new_empty(self.shape, dtype=torch.float32)
        self._sum(grad_y, values, partial)
        return partial


@triton.jit(do_not_specialize_on_alignment=["of_weight_ptr", "of_bias_ptr"])
def add_sums_kernel(
    partial_ptr, statistics_ptr, weight_ptr, of_weight_ptr, of_bias_ptr, factors_ptr, rows, channels, each,
    WEIGHTED: tl.constexpr, FIXED: tl.constexpr, OF_WEIGHT: tl.constexpr, OF_BIAS: tl.constexpr, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Add ``rows`` sums of each channel, and write the factors and the gradients of the parameters.

    ``partial_ptr: [2, rows, channels]`` and ``factors_ptr: [3, channels]``, fp32;
    ``statistics_ptr: [2 or more, channels]``; ``weight_ptr``, ``of_weight_ptr`` and ``of_bias_ptr: [channels]``.
    ``each``: values of a channel. ``FIXED``: mean and rstd were passed in, and get no gradient. ``OF_WEIGHT``,
    ``OF_BIAS``: whether these gradients are written.
    """
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    along = tl.zeros([ROWS, CHANNELS], tl.float32)
    sums = tl.zeros([ROWS, CHANNELS], tl.float32)
    size = tl.cast(rows, tl.int64) * channels
    for start in range(0, rows, ROWS):
        r = start + tl.arange(0, ROWS)
        inside = (r < rows)[:, None] & (channel < channels)[None, :]
        at_ptr = partial_ptr + r.to(tl.int64)[:, None] * channels + channel[None, :]
        along += tl.load(at_ptr, mask=inside, other=0.0)
        sums += tl.load(at_ptr + size, mask=inside, other=0.0)
    of_weight, of_bias = tl.sum(along, axis=0), tl.sum(sums, axis=0)
    if OF_WEIGHT:
        tl.store(of_weight_ptr + channel, of_weight.to(of_weight_ptr.dtype.element_ty), mask=channel < channels)
    if OF_BIAS:
        tl.store(of_bias_ptr + channel, of_bias.to(of_bias_ptr.dtype.element_ty), mask=channel < channels)
    scale = tl.load(statistics_ptr + channels + channel, mask=channel < channels, other=0.0)
    if WEIGHTED:
        scale *= tl.load(weight_ptr + channel, mask=channel < channels, other=0.0).to(tl.float32)
    tl.store(factors_ptr + channel, scale, mask=channel < channels)
    slope, shift = -scale * of_weight / each, -scale * of_bias / each
    if FIXED:
        slope, shift = tl.zeros_like(slope), tl.zeros_like(shift)
    tl.store(factors_ptr + channels + channel, slope, mask=channel < channels)
    tl.store(factors_ptr + 2 * channels + channel, shift, mask=channel < channels)


def add_launch(rows: int, cut: tuple[int, int, int], weighted: bool, fixed: bool, wanted: tuple[bool, bool]) -> Launch:
    """Return the launch that adds ``rows`` sums of each channel; ``wanted``: the gradients of weight and bias."""
    images, channels, length = cut
    constants = rows, channels, float(images * length), weighted, fixed, *wanted, ADDED_ROWS, ADDED_CHANNELS
    return Launch(add_sums_kernel, (ceil_div(channels, ADDED_CHANNELS),), *constants, num_warps=4)


class ChannelNormLaunch:
    """The launches of forward.

    Args:
        stored: Layout and format of the input.
        sets: Images, sets and length: a set is the values that share a mean, a channel or a group.
        eps: Added to the variance.
        parameters: Whether there are a weight and a bias.
        momentum: Momentum of the running statistics, ``None`` if there are none.
        counted: Whether batches are counted.
        dtype: Type of the output.
        copied: Whether the input has to be made contiguous.
        spread: Turns numbers of sets into numbers of channels, ``None`` if sets are channels.
    """

    __slots__ = ("_copied", "_dtype", "_normalize", "_shape", "_spread", "_statistics")

    def __init__(
        self,
        stored: Stored,
        sets: tuple[int, int, int],
        eps: float,
        parameters: tuple[bool, bool],
        momentum: float | None,
        counted: bool,
        *,
        dtype: torch.dtype,
        copied: bool,
        spread: Spread | None,
    ) -> None:
        self._shape, self._dtype, self._copied, self._spread = stored.shape, dtype, copied, spread
        self._statistics = StatisticsLaunch(sets, eps, stored.device, momentum, counted)
        self._normalize = flat_launch(normalize_channels_kernel, stored, (*parameters, stored.relu))

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        fixed: Tensor | None,
        running: RunningTensors | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``y``, the bytes of the normalised values and the statistics of the sets, and update ``running``.

        ``fixed``: statistics to use instead of those of ``x``.
        """
        if self._copied:
            x = x.contiguous()
        y = torch.empty_like(x, dtype=self._dtype)
        each = statistics = self._statistics(x, running) if fixed is None else fixed
        if self._spread is not None:
            each, weight, bias = self._spread(statistics, weight, bias)
        values = x.new_empty(self._shape, dtype=torch.uint8)
        self._normalize(x, each, x if weight is None else weight, x if bias is None else bias, y, values)
        if running is not None:  # autograd would not notice what a kernel writes
            mean, var, batches = running
            torch.autograd.graph.increment_version((mean, var) if batches is None else (mean, var, batches))
        return y, values, statistics


class ChannelNormGradLaunch:
    """The launches of backward.

    Args:
        stored: Layout and format of the input.
        weighted: Whether there is a weight.
        fixed: Whether mean and rstd were passed in, and get no gradient.
        wanted: Whether the gradients of input, weight and bias are wanted.
    """

    __slots__ = ("_add", "_factors", "_grad", "sums")

    def __init__(self, stored: Stored, weighted: bool, fixed: bool, wanted: tuple[bool, bool, bool]) -> None:
        self.sums = SumsLaunch(stored)
        """Sums of ``g x~`` and ``g`` of each channel, in parts."""
        self._add = add_launch(self.sums.shape[1], stored.cut, weighted, fixed, wanted[1:])
        self._factors = 3, stored.cut[1]
        self._grad = flat_launch(channel_grad_kernel, stored, (stored.relu,)) if wanted[0] else None

    def factors(
        self,
        partial: Tensor,
        statistics: Tensor,
        weight: Tensor | None,
        of_weight: Tensor | None,
        of_bias: Tensor | None,
    ) -> Tensor:
        """Write the gradients of the parameters that are wanted, and return the factors of the input gradient."""
        factors = partial.new_empty(self._factors)
        written = factors if of_weight is None else of_weight, factors if of_bias is None else of_bias
        self._add(partial, statistics, statistics if weight is None else weight, *written, factors)
        return factors

    def input_grad(self, grad_y: Tensor, values: Tensor, factors: Tensor, grad_x: Tensor) -> None:
        """Write the input gradient, if it is wanted."""
        if self._grad is not None:
            self._grad(grad_y, values, factors, grad_x)
