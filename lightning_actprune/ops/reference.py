"""Plain-PyTorch reference of every operator: the CPU path and the oracle of the kernels.

Selection. With ``x`` of shape ``[S, T, L]`` and block ``n = t * NB + j`` holding ``x[i, t, j*b : (j+1)*b]``, the key of
a block is its sum of squares ``q`` in fp32 (fp64 for fp64 input). Order by ``q`` is order by L2 norm. A block with a
NaN or Inf gets the largest key, a finite block whose ``q`` overflows the next largest. Of each sample the ``k`` blocks
with the largest keys are kept, equal keys in order of ``n``.

Storage. Kept blocks are stored in the order (column block j, row r) with ``r = i * T + t``, the order in which the
weight gradient reduces; ``bitmap[j, r // 32]`` has bit ``r % 32`` set if block (r, j) is kept; ``offsets[j * C + c]``
is the number of kept blocks before row ``128 c`` of column ``j``, the last entry the number of all of them.

Weight gradient. ``dW[o, f] = sum_r grad_y[r, o] * x_hat[r, f]`` with ``x_hat`` the unpacked tensor (zeros where a block
was dropped).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_actprune.ops.geometry import CHUNK_ROWS, WORD_ROWS, ceil_div


def block_keys(blocks: Tensor) -> Tensor:
    """Return the sort key of each block: ``[..., b] -> [...]``, larger means kept first."""
    wide = blocks.to(torch.float64 if blocks.dtype == torch.float64 else torch.float32)
    squares = wide.square().sum(-1).clamp(max=torch.finfo(wide.dtype).max)
    return squares.masked_fill(~wide.isfinite().all(-1), float("inf"))


def keep_mask(keys: Tensor, keep: int) -> Tensor:
    """Return which entries are the ``keep`` largest of their row, ties to the lowest index: bool ``[S, N]``."""
    order = keys.sort(dim=1, descending=True, stable=True).indices
    return torch.zeros_like(keys, dtype=torch.bool).scatter_(1, order[:, :keep], True)


def split_blocks(x: Tensor, block_size: int) -> Tensor:
    """Cut the last dimension into blocks, the last one filled up with zeros: ``[..., L] -> [..., NB, b]``."""
    count = ceil_div(x.shape[-1], block_size)
    padded = F.pad(x, (0, count * block_size - x.shape[-1]))
    return padded.reshape(*x.shape[:-1], count, block_size)


def pack(x: Tensor, block_size: int, keep: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(values, bitmap, offsets)`` of ``x`` ``[S, T, L]`` with ``keep`` blocks per sample."""
    samples, rows, _ = x.shape
    blocks = split_blocks(x, block_size)
    columns = blocks.shape[2]
    mask = keep_mask(block_keys(blocks).reshape(samples, rows * columns), keep)
    by_column = mask.reshape(samples * rows, columns).t()
    values = blocks.reshape(samples * rows, columns, block_size).transpose(0, 1)[by_column]
    return values, pack_bits(by_column), chunk_offsets(by_column)


def pack_bits(mask: Tensor) -> Tensor:
    """Return ``mask`` ``[NB, R]`` as int32 words, lowest bit first: ``[NB, ceil(R / 32)]``."""
    columns, rows = mask.shape
    words = ceil_div(rows, WORD_ROWS)
    bits = F.pad(mask, (0, words * WORD_ROWS - rows)).reshape(columns, words, WORD_ROWS).long()
    unsigned = (bits << torch.arange(WORD_ROWS, device=mask.device)).sum(-1)
    return torch.where(unsigned >= 2**31, unsigned - 2**32, unsigned).int()


def unpack_bits(bitmap: Tensor, rows: int) -> Tensor:
    """Undo ``pack_bits``: ``[NB, W] -> bool [NB, rows]``."""
    bits = (bitmap.unsqueeze(-1) >> torch.arange(WORD_ROWS, device=bitmap.device, dtype=torch.int32)) & 1
    return bits.flatten(1)[:, :rows].bool()


def chunk_offsets(mask: Tensor) -> Tensor:
    """Return where each run of 128 rows of each column starts in the stored values: int32 ``[NB * C + 1]``."""
    columns, rows = mask.shape
    chunks = ceil_div(rows, CHUNK_ROWS)
    counts = F.pad(mask, (0, chunks * CHUNK_ROWS - rows)).reshape(columns * chunks, CHUNK_ROWS).sum(-1)
    return F.pad(counts.cumsum(0), (1, 0)).int()


def unpack(values: Tensor, bitmap: Tensor, rows: int, length: int) -> Tensor:
    """Return the pruned tensor ``[rows, length]`` with zeros where a block was dropped."""
    mask = unpack_bits(bitmap, rows)
    blocks = values.new_zeros(*mask.shape, values.shape[1])
    blocks[mask] = values
    return blocks.transpose(0, 1).flatten(1)[:, :length]
