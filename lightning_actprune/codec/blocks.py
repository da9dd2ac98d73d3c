r"""Cut a tensor into blocks, choose the blocks to keep, and pack and unpack them in plain torch.

Blocks
------
A layer input is read as ``[samples, rows, length]``. Rows run along the features, or along the tokens if the tensor
is contiguous that way and blocks fill up better (``stored_view``). Every row is cut into ``NB = ceil(length / b)``
blocks of ``b`` consecutive values; the last one may be shorter. A sample has ``N = rows * NB`` blocks, numbered row by
row: block ``n = t * NB + j`` of sample ``i`` holds ``x[i, t, j*b : (j+1)*b]``. At sparsity ``s``, exactly
``k = N - floor(N * s)`` of them are kept, where ``s`` is the decimal number as written, to nine digits
(``sparsity_parts``).

Bytes stored for ``samples`` samples, with values of ``v`` bytes::

    values   samples * k * b * v               kept blocks, sample by sample, in the order of their numbers; quantized,
                                               ``formats.row_bytes`` in place of b v
    bitmap   samples * ceil(N / 32) * 4        one bit per block: bit n % 32 of word n // 32
    offsets  samples * ceil(N / 128) * 4       where each run of 128 blocks starts in ``values``

If the sparsity is exactly 0 and values are quantized, ``bitmap`` and ``offsets`` have no columns and take no bytes:
block ``n``, counted over all samples, is at place ``n``. Only the sparsity decides that, not the number of blocks,
because the sparsity is fixed when a graph is compiled and shapes may not be.

Otherwise bitmap and offsets cost about 1/(8b) + 1/(32b) bytes per dense value: 0.5 % of bf16 at b = 16. Blocks have the
order of a BSR tensor. The blocks of sample ``i`` start at place ``i k``, so samples can be packed independently. The
offsets cost a quarter of the bitmap, and no reader has to count the blocks before its own.

Selection
---------
``q`` is the sum of squares of a block in fp32 (fp64 for fp64 input), and ``k`` the number of blocks to keep per sample.
Order by ``q`` is order by L2 norm. If a block contains NaN or Inf, its ``q`` is infinite.

``largest``
    Keeps the ``k`` blocks with the largest ``q``, the method of arXiv:2311.16883. Dropped blocks never contribute to
    the weight gradient: small blocks have no effect on it, however many there are.

``swap``
    Keeps the ``k`` blocks with the largest ``q 2^(3 (u - 1/2))``, ``u`` uniform in [0, 1). Blocks whose norms differ by
    a factor of up to 2^1.5 may change places. A block whose norm is more than 2^1.5 times the k-th largest is always
    kept. Values are not scaled.

``unbiased``
    Priority sampling (N. Duffield, C. Lund, M. Thorup, "Priority sampling for estimation of arbitrary subset sums",
    J. ACM 54(6), 2007) with the norms as weights. It keeps the ``k`` blocks with the largest priorities
    ``p = q / u^2``, ``u`` uniform in (0, 1], and stores each times ``max(1, sqrt(tau / q))``. ``tau`` is the largest
    priority among dropped blocks (0 if none is dropped)::

        E[stored or zero] = block        for every block, and hence E[dW] = dW of the dense layer

    because a block is kept if ``u < sqrt(q / tau)``, where ``tau`` is that of the other blocks. Stored blocks have a
    norm of at least ``sqrt(tau)``: smaller blocks are rarely kept, and scaled up if they are. The variance of sums
    over blocks is close to the least that a sampling of ``k`` blocks can have.

The random numbers are computed from the blocks, so there is no generator to seed, save or advance. The same input gives
the same choice in any process, after a resumed checkpoint, under ``torch.compile`` and in a replayed CUDA graph; other
values give another choice. With ``K`` the bits of the fp32 ``q`` and ``n`` the number of the block, counted over all
samples::

    h = mix(K + n B)        u = (h >> 8) / 2^24        (unbiased: ((h >> 8) + 1) / 2^24)

modulo 2^32, ``mix`` as in ``codec.formats``. A kernel that adds the squares in another order may get a ``q`` that
differs in its last place, and then chooses entirely different blocks.

Rounding is fixed exactly. The key of ``swap`` is ``K + floor(3 (h >> 8) / 2) - 3 2^22``: the bits of a float are its
logarithm, linear between powers of two. The key is clamped to between 1 and the largest finite key; the key of 0 stays
0. ``u^2``, ``p``, ``tau / q``, its root and the scaled values are each rounded once, scaled values to their own type
before they are quantised. Priorities that overflow become the largest finite number, and so do scaled values in fp16. A
block whose ``q`` is not finite comes before all others. It is stored unscaled, and so is a block whose ``q`` is 0.
Equal keys go in order of ``n``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_actprune.codec import formats
from lightning_actprune.codec.formats import MASK, mix

TopkGroup = Literal["sample", "token", "sample_second"]
"""A user's ``topk_over``, or ``"sample_second"`` inside attention: samples are the second dimension, so the blocks of
``x[:, i]`` compete."""
SELECTIONS = ("largest", "swap", "unbiased")
WORD_BLOCKS = 32
"""Blocks per bitmap word."""
RUN_BLOCKS = 128
"""Blocks per entry of ``offsets``; one program of the gather and unpack kernels handles as many."""
MAX_BLOCK_SIZE = 1024
"""Largest block that kernels take: one program sums its key in registers."""
MIN_ROW_BLOCKS = 16
"""Fewest blocks of a row whose length is no multiple of the block: its short last block adds at most a sixteenth."""
ALL_BLOCKS = -1
"""Value of ``keep`` that stores all blocks for any shape, without bitmap and offsets."""
SPARSITY_PARTS = 10**9
"""Parts into which a sparsity of 1 is divided. Their number times the blocks of a sample stays far below 2^63."""
NUMBER = 0xC2B2AE35
"""Multiplier ``B`` of a block's number; it differs from that of ``codec.formats``, so random numbers differ too."""
HALF_RANGE = 3 << 22
"""Half of the range by which ``swap`` moves keys: one and a half octaves of fp32 keys."""


class Blocks(NamedTuple):
    """Settings for cutting a tensor into blocks and storing them: a ``Keep`` without its sparsity.

    Args:
        block_size: Values per block; shorter rows shorten it.
        topk_over: Part of the input within which blocks compete.
        bits: Bits of a stored value, 0 for values in their own type.
        selection: Which blocks are kept, one of ``SELECTIONS``.
    """

    block_size: int
    topk_over: TopkGroup
    bits: int = 0
    selection: str = "largest"


def ceil_div(a: int, b: int) -> int:
    """Return ``a / b`` rounded up."""
    return -(-a // b)


def sparsity_parts(sparsity: float) -> int:
    """Return ``sparsity`` in [0, 1) as the nearest number of ``SPARSITY_PARTS``; 0 only if the sparsity is 0.

    Integers, because a compiler can compute with them symbolically, and because 0.29 of 100 blocks is then 29: the
    float product is 28.999999999999996.
    """
    return min(max(round(sparsity * SPARSITY_PARTS), int(sparsity > 0)), SPARSITY_PARTS - 1)


def keep_count(blocks: int, parts: int) -> int:
    """Return the number of ``blocks`` to keep at a sparsity of ``parts``: blocks - floor(blocks * sparsity)."""
    return blocks - blocks * parts // SPARSITY_PARTS


def _cut(block_size: int, length: int) -> int:
    """Return ``block_size``, but at most the length of a row, and at least 1."""
    return max(1, min(block_size, length))


def _block_and_keep(rows: int, length: int, block_size: int, parts: int) -> tuple[int, int]:
    block = _cut(block_size, length)
    return block, keep_count(rows * ceil_div(length, block), parts)


def block_and_keep(stored: Tensor, block_size: int, parts: int, bits: int) -> tuple[int, int]:
    """Return the block size and the blocks to keep per sample of ``stored [samples, rows, length]``."""
    block, keep = _block_and_keep(stored.shape[1], stored.shape[2], block_size, parts)
    return block, ALL_BLOCKS if parts == 0 and bits else keep


def keeps_all(keep: int) -> bool:
    """Return True if ``keep`` is ``ALL_BLOCKS``. A symbol never is, and comparing it would add a guard to a graph."""
    return isinstance(keep, int) and keep == ALL_BLOCKS


@dataclass(frozen=True)
class BlockGeometry:
    """Sizes of one packed tensor, and the bytes that it takes.

    Args:
        samples: Number of samples; blocks compete within one sample.
        rows: Rows per sample.
        length: Values per row.
        block_size: Values per block, at most ``length``.
        keep: Blocks to keep per sample, in [0, rows * blocks_per_row].
        everything: True if the sparsity is 0: quantized blocks then have no bitmap and offsets.
    """

    samples: int
    rows: int
    length: int
    block_size: int
    keep: int
    everything: bool = False

    @classmethod
    def of(cls, samples: int, rows: int, length: int, block_size: int, sparsity: float) -> BlockGeometry:
        """Return the geometry of ``[samples, rows, length]`` at ``sparsity``; a block is at most one row."""
        parts = sparsity_parts(sparsity)
        return cls(samples, rows, length, *_block_and_keep(rows, length, block_size, parts), parts == 0)

    @classmethod
    def of_stored(cls, stored: Tensor, block_size: int, sparsity: float) -> BlockGeometry:
        """Return the geometry of a tensor ``[samples, rows, length]``, as ``stored_view`` returns it."""
        samples, rows, length = stored.shape
        return cls.of(samples, rows, length, block_size, sparsity)

    @property
    def total_rows(self) -> int:
        """Rows of all samples."""
        return self.samples * self.rows

    @property
    def blocks_per_row(self) -> int:
        """Blocks of a row, ``NB``."""
        return ceil_div(self.length, self.block_size)

    @property
    def blocks_per_sample(self) -> int:
        """Blocks of a sample, ``N``."""
        return self.rows * self.blocks_per_row

    @property
    def kept_blocks(self) -> int:
        """Blocks stored for all samples."""
        return self.samples * self.keep

    @property
    def words(self) -> int:
        """Bitmap words per sample."""
        return ceil_div(self.blocks_per_sample, WORD_BLOCKS)

    @property
    def runs(self) -> int:
        """Runs of ``RUN_BLOCKS`` blocks per sample."""
        return ceil_div(self.blocks_per_sample, RUN_BLOCKS)

    def dense_bytes(self, itemsize: int) -> int:
        """Return the bytes of the dense tensor with values of ``itemsize`` bytes."""
        return self.total_rows * self.length * itemsize

    def stored_bytes(self, itemsize: int, bits: int = 0) -> int:
        """Return the bytes of the packed tensor: values, bitmap and offsets."""
        values = self.kept_blocks * formats.row_bytes(self.block_size, bits, itemsize)
        if self.everything and bits:
            return values
        return values + 4 * self.samples * (self.words + self.runs)


def along_tokens(x: Tensor, block_size: int) -> bool:
    """Return True if blocks of ``x [B, T, D]`` run along ``T``: tokens are contiguous and fill up blocks better.

    On a tie, blocks run along the features. The dense product needs a copy along them anyway, so packing that copy
    costs nothing, and the weight gradient can gather only blocks along the features. So they do if there are so few
    tokens that a block would be cut to less than half: blocks of two values fill up well but mean little.
    """
    if _innermost_contiguous(x) or x.stride(1) != 1:
        return False
    _, tokens, features = x.shape
    if 2 * tokens < min(block_size, features):
        return False
    return _count_padded(features, tokens, block_size) < _count_padded(tokens, features, block_size)


def stored_view(x: Tensor, block_size: int, topk_over: TopkGroup) -> tuple[Tensor, bool]:
    """Return ``x`` as ``[samples, rows, length]``, and True if its rows run along the tokens.

    Args:
        x: Layer input ``[..., features]`` with at least one dimension.
        block_size: Values per block; shorter rows shorten it.
        topk_over: ``"sample"``: a sample is ``x[i]`` (3-D and more) or a row (1-D and 2-D); ``"token"``: always a row;
            ``"sample_second"``: ``x[:, i]`` of a contiguous 3-D ``x``.

    Returns:
        A tensor with stride 1 in its last dimension, and True if that is not the feature dimension. A transposed view
        ``[B, T, D]`` is returned as ``[B, D, T]`` with True if its blocks run along the tokens. Otherwise blocks run
        along the features: the tensor is a view if features are contiguous, else a contiguous copy.
    """
    if topk_over == "sample_second":
        return x.transpose(0, 1), False
    if x.dim() <= 2:
        rows = x.reshape(x.shape[0] if x.dim() == 2 else 1, 1, x.shape[-1])
        return (rows if _innermost_contiguous(rows) else rows.contiguous()), False
    if x.dim() > 3:
        x = x.flatten(1, -2)
    transposed = along_tokens(x, block_size)
    if transposed:
        x = x.transpose(1, 2)
    elif not _innermost_contiguous(x):
        x = x.contiguous()
    if topk_over == "token":
        x = x.reshape(x.shape[0] * x.shape[1], 1, x.shape[2])
    return x, transposed


def stored_shape(x: Tensor, transposed: bool) -> tuple[int, int, int]:
    """Return ``[batch, rows, length]`` of the stored layout of ``x``, which does not depend on ``topk_over``."""
    features = x.shape[-1]
    if not transposed:
        return 1, x.shape[:-1].numel(), features
    return x.shape[0], features, x.shape[1:-1].numel()


def _count_padded(rows: int, length: int, block_size: int) -> int:
    """Return the number of values in the blocks of ``rows`` rows, padding of short last blocks included."""
    block = _cut(block_size, length)
    return rows * ceil_div(length, block) * block


def _innermost_contiguous(x: Tensor) -> bool:
    return x.stride(-1) == 1 or x.shape[-1] <= 1


def input_geometry(x: Tensor, block_size: int, sparsity: float, topk_over: TopkGroup) -> BlockGeometry:
    """Return the geometry of ``x`` once packed, from its shape and strides alone."""
    meta, _ = stored_view(torch.empty_strided(x.shape, x.stride(), device="meta"), block_size, topk_over)
    return BlockGeometry.of_stored(meta, block_size, sparsity)


def selection_keys(squares: Tensor, selection: str) -> Tensor:
    """Return the keys ``[S, N]``, the largest of which are kept, from sums of squares ``[S, N]`` without NaN."""
    if selection == "largest":
        return squares
    return _make_swap_keys(squares) if selection == "swap" else _priorities(squares)


def factors(squares: Tensor, keys: Tensor, kept: Tensor) -> Tensor:
    """Return the factors ``[S, N]`` by which ``unbiased`` scales the ``kept`` blocks (bool); ``keys`` are its own."""
    dropped = torch.where(kept, 0.0, keys)
    largest = torch.cat([dropped.new_zeros(len(dropped), 1), dropped], 1).amax(1, keepdim=True)
    scaled = (squares > 0) & squares.isfinite()
    # Computed in fp64 and then rounded: the fp32 square root on the CPU is often not the nearest number.
    roots = (largest / torch.where(scaled, squares, 1.0)).double().sqrt().to(squares.dtype)
    return torch.where(scaled, roots.clamp(min=1.0), 1.0)


def rescale(values: Tensor, by: Tensor) -> Tensor:
    """Return blocks ``[nnz, b]`` times ``by [nnz]`` in their own type, bit for bit unchanged where the factor is 1.

    Scaled values do not overflow, and a scaled zero is +0.
    """
    most = torch.finfo(values.dtype).max
    wide = (values.to(by.dtype) * by[:, None] + 0.0).clamp(-most, most)
    return torch.where(by[:, None] > 1, wide.to(values.dtype), values)


def _hash(squares: Tensor) -> Tensor:
    """Return the highest 24 bits of ``h`` of all blocks ``[S, N]``, as int64."""
    bits = squares.float().view(torch.int32).long()
    numbers = torch.arange(squares.numel(), device=squares.device).view_as(squares)
    return mix((bits + numbers * NUMBER) & MASK) >> 8


def _make_swap_keys(squares: Tensor) -> Tensor:
    """Return the keys of ``swap``, int64 ``[S, N]``."""
    wide = squares.dtype == torch.float64
    bits = squares.contiguous().view(torch.int64 if wide else torch.int32).long()
    infinity = 0x7FF << 52 if wide else 0xFF << 23
    by = (_hash(squares) * 3 >> 1) - HALF_RANGE
    by = by << 29 if wide else by  # fp64 has 29 more bits of mantissa
    moved = (torch.minimum(bits, infinity - 1 - by.clamp(min=0)) + by).clamp(min=1)
    return torch.where((squares > 0) & squares.isfinite(), moved, bits)


def _priorities(squares: Tensor) -> Tensor:
    """Return the keys of ``unbiased``, in the type of the sums of squares ``[S, N]``."""
    u = (_hash(squares) + 1).to(squares.dtype) * 2.0**-24
    priorities = (squares / (u * u)).clamp(max=torch.finfo(squares.dtype).max)
    return torch.where(squares.isfinite(), priorities, squares)


def block_keys(blocks: Tensor) -> Tensor:
    """Return the sum of squares of each block, infinite if the block has NaN or Inf: ``[..., b] -> [...]``."""
    wide = blocks.to(torch.float64 if blocks.dtype == torch.float64 else torch.float32)
    return wide.square().sum(-1).nan_to_num(nan=float("inf"), posinf=float("inf"))


def keep_mask(keys: Tensor, keep: int) -> Tensor:
    """Return a mask of the ``keep`` largest entries of each row, ties to the lowest index: bool ``[S, N]``."""
    order = keys.sort(dim=1, descending=True, stable=True).indices
    return torch.zeros_like(keys, dtype=torch.bool).scatter_(1, order[:, :keep], True)


def split_blocks(x: Tensor, block_size: int) -> Tensor:
    """Cut the last dimension into blocks, the last one padded with zeros: ``[..., L] -> [..., NB, b]``."""
    count = ceil_div(x.shape[-1], block_size)
    padded = F.pad(x, (0, count * block_size - x.shape[-1]))
    return padded.reshape(*x.shape[:-1], count, block_size)


def pack(
    x: Tensor, block_size: int, keep: int, bits: int = 0, selection: str = "largest"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(values, bitmap, offsets)`` of ``x [S, T, L]`` with ``keep`` blocks per sample, or ``ALL_BLOCKS``."""
    samples, rows, _ = x.shape
    blocks = split_blocks(x, block_size)  # [S, T, NB, b]
    blocks = blocks.reshape(samples, rows * blocks.shape[2], block_size)
    if keeps_all(keep):
        bitmap, offsets = (x.new_empty(samples, 0, dtype=torch.int32) for _ in range(2))
        return formats.quantize(blocks.flatten(0, 1), bits), bitmap, offsets
    squares = block_keys(blocks)  # [S, N]
    keys = selection_keys(squares, selection)
    mask = keep_mask(keys, keep)
    values = blocks[mask]  # [S * keep, b]
    if selection == "unbiased":
        values = rescale(values, factors(squares, keys, mask)[mask])
    if bits:
        values = formats.quantize(values, bits)
    return values, pack_bits(mask), run_offsets(mask)


def pack_bits(mask: Tensor) -> Tensor:
    """Return ``mask [S, N]`` as int32 words ``[S, ceil(N / 32)]``, lowest bit first."""
    samples, blocks = mask.shape
    padded = F.pad(mask, (0, -blocks % WORD_BLOCKS)).to(torch.uint8)
    return formats.join(padded, 1).flatten().view(torch.int32).view(samples, ceil_div(blocks, WORD_BLOCKS))


def unpack_bits(bitmap: Tensor, blocks: int) -> Tensor:
    """Undo ``pack_bits``: ``[S, W] -> bool [S, blocks]``."""
    return formats.split(bitmap.view(torch.uint8), 1, blocks).bool()


def run_offsets(mask: Tensor) -> Tensor:
    """Return the place of each run's first block in the stored values: int32 ``[S, ceil(N / 128)]``."""
    samples, blocks = mask.shape
    runs = ceil_div(blocks, RUN_BLOCKS)
    counts = F.pad(mask, (0, runs * RUN_BLOCKS - blocks)).reshape(samples * runs, RUN_BLOCKS).sum(-1)
    return (counts.cumsum(0) - counts).reshape(samples, runs).int()


def unpack(
    values: Tensor, bitmap: Tensor, rows: int, length: int, block_size: int, bits: int, dtype: torch.dtype
) -> Tensor:
    """Return the pruned tensor ``[rows, length]`` in ``dtype``, zero in dropped blocks."""
    columns = ceil_div(length, block_size)
    if bits:
        values = formats.dequantize(values, block_size, bits, dtype)
    if bitmap.shape[1] == 0:
        blocks = values
    else:
        mask = unpack_bits(bitmap, rows // max(bitmap.shape[0], 1) * columns)
        blocks = values.new_zeros(*mask.shape, block_size)
        blocks[mask] = values
    return blocks.reshape(rows, columns * block_size)[:, :length]
