"""How a tensor is cut into blocks: pure shape arithmetic, no data.

A layer input is seen as ``[samples, rows, length]``: along its features or, where it lies so in memory and blocks fill
up better, along its tokens (``stored_view``). Every row is cut into ``NB = ceil(length / b)`` blocks of ``b``
consecutive values (the last one may be shorter), so a sample has ``N = rows * NB`` blocks, numbered row by row. Of
these exactly ``k = N - floor(N * s)`` are kept at sparsity ``s``, where ``s`` is the decimal number as it is written,
to nine digits (see ``sparsity_parts``).

Bytes stored for ``samples`` samples, with values of ``v`` bytes::

    values   samples * k * b * v               kept blocks, sample by sample, in the order of their numbers; in few
                                               bits, ``row_bytes`` of the format in place of b v (see ``ops.formats``)
    bitmap   samples * ceil(N / 32) * 4        one bit per block
    offsets  samples * ceil(N / 128) * 4       where each run of 128 blocks starts in ``values``

At a sparsity of exactly 0 with values in few bits, ``bitmap`` and ``offsets`` have no columns and take no bytes: block
``n`` of all is stored at place ``n``. The number of blocks does not decide that, only the sparsity: it is fixed when a
graph is compiled, which shapes need not be.

Otherwise the positions cost about 1/(8b) + 1/(32b) bytes per dense value: 0.5 % of bf16 at b = 16. It is the order of
a BSR tensor; a sample starts at ``k`` times its number, so no count has to cross from sample to sample. The offsets
cost a quarter of the bitmap and spare every reader a count over the blocks before its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_actprune.arguments import Scope
from lightning_actprune.ops.formats import FORMATS

AnyScope = Scope | Literal["sample_second"]
"""A user's ``Scope``, or that the blocks of ``x[:, i]`` compete: inside attention, samples are the second dimension."""
WORD_BLOCKS = 32
"""Blocks per bitmap word."""
RUN_BLOCKS = 128
"""Blocks per entry of ``offsets``: those that one program of the gather and unpack kernels handles."""
MAX_BLOCK_SIZE = 1024
"""Largest block that kernels take: its key is summed in one program's registers."""
ALL_BLOCKS = -1
"""Given as the blocks to keep per sample: all of them, whatever the shape, and no positions."""
SPARSITY_PARTS = 10**9
"""Parts into which a sparsity of 1 is divided; times the blocks of a sample, well within 64 bits."""


def ceil_div(a: int, b: int) -> int:
    """Return ``a / b`` rounded up."""
    return -(-a // b)


def sparsity_parts(sparsity: float) -> int:
    """Return ``sparsity`` in [0, 1) as the nearest number of ``SPARSITY_PARTS``; 0 only if the sparsity is 0.

    Integers because a compiler can compute with them symbolically, and because 0.29 of 100 blocks is then 29: the
    float product is 28.999999999999996.
    """
    return min(max(round(sparsity * SPARSITY_PARTS), int(sparsity > 0)), SPARSITY_PARTS - 1)


def keep_count(blocks: int, parts: int) -> int:
    """Return how many of ``blocks`` blocks are kept at a sparsity of ``parts``: blocks - floor(blocks * sparsity)."""
    return blocks - blocks * parts // SPARSITY_PARTS


def _cut(block_size: int, length: int) -> int:
    """Return the block size cut to a row."""
    return max(1, min(block_size, length))


def _block_and_keep(rows: int, length: int, block_size: int, parts: int) -> tuple[int, int]:
    block = _cut(block_size, length)
    return block, keep_count(rows * ceil_div(length, block), parts)


def block_and_keep(stored: Tensor, block_size: int, parts: int, value_format: str) -> tuple[int, int]:
    """Return the block size cut to the rows of ``stored [samples, rows, length]``, and the blocks kept per sample."""
    block, keep = _block_and_keep(stored.shape[1], stored.shape[2], block_size, parts)
    return block, ALL_BLOCKS if parts == 0 and value_format != "same" else keep


def keeps_all(keep: int) -> bool:
    """Return whether ``keep`` is ``ALL_BLOCKS``: never of a compiler's symbol, of which asking would be a guard."""
    return isinstance(keep, int) and keep == ALL_BLOCKS


@dataclass(frozen=True)
class BlockGeometry:
    """The block structure of one packed tensor.

    Args:
        samples: Number of samples; blocks compete within one sample.
        rows: Rows per sample.
        length: Values per row.
        block_size: Values per block, already cut to ``length``.
        keep: Blocks kept per sample, in [0, rows * blocks_per_row].
        everything: Whether the sparsity is 0, so that blocks in few bits are stored without positions.
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
        """Return the geometry of a tensor in its stored layout ``[samples, rows, length]``."""
        samples, rows, length = stored.shape
        return cls.of(samples, rows, length, block_size, sparsity)

    @property
    def total_rows(self) -> int:
        """Rows of all samples."""
        return self.samples * self.rows

    @property
    def blocks_per_row(self) -> int:
        """Column blocks, ``NB``."""
        return ceil_div(self.length, self.block_size)

    @property
    def blocks_per_sample(self) -> int:
        """Blocks that compete, ``N``."""
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
        """Return the bytes of the unpruned tensor with values of ``itemsize`` bytes."""
        return self.total_rows * self.length * itemsize

    def stored_bytes(self, itemsize: int, value_format: str = "same") -> int:
        """Return the bytes of the packed tensor: values, bitmap and offsets."""
        values = self.kept_blocks * FORMATS[value_format].row_bytes(self.block_size, itemsize)
        if self.everything and value_format != "same":
            return values
        return values + 4 * self.samples * (self.words + self.runs)


def along_tokens(x: Tensor, block_size: int) -> bool:
    """Return whether blocks of ``x [B, T, D]`` run along ``T``: it lies so in memory, and they fill up better that way.

    On a tie they run along the features: the dense product needs a copy along them anyway, so packing it costs no copy,
    and only blocks along the features can be gathered for the weight gradient. So they do if there are so few tokens
    that a block, cut to them, would be less than half as long: blocks of two values fill up well and mean little.
    """
    if _innermost_contiguous(x) or x.stride(1) != 1:
        return False
    _, tokens, features = x.shape
    if 2 * tokens < min(block_size, features):
        return False
    return _filled_up(features, tokens, block_size) < _filled_up(tokens, features, block_size)


def stored_view(x: Tensor, block_size: int, scope: AnyScope) -> tuple[Tensor, bool]:
    """Return ``x`` as ``[samples, rows, length]`` in its stored layout, and whether that is transposed.

    Args:
        x: Layer input of shape ``[..., features]`` with one dimension or more.
        block_size: Values per block, not yet cut to a row.
        scope: ``"sample"``: a sample is ``x[i]`` (3-D and more) or a row (1-D and 2-D); ``"token"``: always a row;
            ``"sample_second"``: ``x[:, i]`` of a contiguous 3-D ``x``.

    Returns:
        A tensor with stride 1 in its last dimension, and ``True`` if that is not the feature dimension. A transposed
        view ``[B, T, D]`` comes back as ``[B, D, T]`` with ``True`` if its blocks run along the tokens. Otherwise they
        run along the features: a view if the features lie side by side in memory, else a contiguous copy.
    """
    if scope == "sample_second":
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
    if scope == "token":
        x = x.reshape(x.shape[0] * x.shape[1], 1, x.shape[2])
    return x, transposed


def stored_shape(x: Tensor, transposed: bool) -> tuple[int, int, int]:
    """Return ``[batch, rows, length]`` of the stored layout of ``x``, whatever the scope in which blocks compete."""
    features = x.shape[-1]
    if not transposed:
        return 1, x.shape[:-1].numel(), features
    return x.shape[0], features, x.shape[1:-1].numel()


def _filled_up(rows: int, length: int, block_size: int) -> int:
    """Return how many values the blocks of ``rows`` rows take up, those that end short filled up."""
    block = _cut(block_size, length)
    return rows * ceil_div(length, block) * block


def _innermost_contiguous(x: Tensor) -> bool:
    return x.stride(-1) == 1 or x.shape[-1] <= 1


def input_geometry(x: Tensor, block_size: int, sparsity: float, scope: AnyScope) -> BlockGeometry:
    """Return the geometry that packing ``x`` has; only its shape and strides are looked at."""
    meta, _ = stored_view(torch.empty_strided(x.shape, x.stride(), device="meta"), block_size, scope)
    return BlockGeometry.of_stored(meta, block_size, sparsity)
