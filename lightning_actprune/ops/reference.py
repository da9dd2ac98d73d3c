"""Plain-PyTorch reference of every operator: the CPU path and the oracle of the kernels.

Selection. With ``x`` of shape ``[S, T, L]`` and block ``n = t * NB + j`` holding ``x[i, t, j*b : (j+1)*b]``, the key of
a block is its sum of squares ``q`` in fp32 (fp64 for fp64 input). Order by ``q`` is order by L2 norm. A block with a
NaN or Inf has the largest key, and so has one whose ``q`` overflows. Of each sample the ``k`` blocks
with the largest keys are kept, equal keys in order of ``n``. ``ops.block_selection`` has other keys made from ``q``.

Storage. Kept blocks are stored sample by sample in the order of ``n``; ``bitmap[i, n // 32]`` has bit ``n % 32`` set if
block ``n`` is kept; ``offsets[i, c]`` is the place in ``values`` of the first kept block of sample ``i`` from block
``128 c`` on.

Values are stored as they are or in few bits (``ops.formats``); those that read them here take them as they are.

Weight gradient. ``dW[o, f] = sum_r grad_y[r, o] * x_hat[r, f]`` with ``x_hat`` the unpacked tensor (zeros where a block
was dropped).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_actprune.ops import block_selection as selection
from lightning_actprune.ops import formats
from lightning_actprune.ops.geometry import RUN_BLOCKS, WORD_BLOCKS, ceil_div


def block_keys(blocks: Tensor) -> Tensor:
    """Return the sum of squares of each block, infinite if it is no number: ``[..., b] -> [...]``."""
    wide = blocks.to(torch.float64 if blocks.dtype == torch.float64 else torch.float32)
    return wide.square().sum(-1).nan_to_num(nan=float("inf"), posinf=float("inf"))


def keep_mask(keys: Tensor, keep: int) -> Tensor:
    """Return which entries are the ``keep`` largest of their row, ties to the lowest index: bool ``[S, N]``."""
    order = keys.sort(dim=1, descending=True, stable=True).indices
    return torch.zeros_like(keys, dtype=torch.bool).scatter_(1, order[:, :keep], True)


def split_blocks(x: Tensor, block_size: int) -> Tensor:
    """Cut the last dimension into blocks, the last one filled up with zeros: ``[..., L] -> [..., NB, b]``."""
    count = ceil_div(x.shape[-1], block_size)
    padded = F.pad(x, (0, count * block_size - x.shape[-1]))
    return padded.reshape(*x.shape[:-1], count, block_size)


def pack(
    x: Tensor, block_size: int, keep: int, value_format: str = "same", block_selection: str = "largest"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(values, bitmap, offsets)`` of ``x`` ``[S, T, L]`` with ``keep`` blocks per sample."""
    samples, rows, _ = x.shape
    blocks = split_blocks(x, block_size)
    columns = blocks.shape[2]
    squares = block_keys(blocks).reshape(samples, rows * columns)
    keys = selection.selection_keys(squares, block_selection)
    mask = keep_mask(keys, keep)
    values = blocks.reshape(samples, rows * columns, block_size)[mask]
    if block_selection == "unbiased":
        values = selection.rescale(values, selection.factors(squares, keys, mask)[mask])
    if value_format != "same":
        values = formats.quantize(values, value_format)
    return values, pack_bits(mask), run_offsets(mask)


def pack_bits(mask: Tensor) -> Tensor:
    """Return ``mask`` ``[S, N]`` as int32 words, lowest bit first: ``[S, ceil(N / 32)]``."""
    samples, blocks = mask.shape
    words = ceil_div(blocks, WORD_BLOCKS)
    bits = F.pad(mask, (0, words * WORD_BLOCKS - blocks)).reshape(samples, words, WORD_BLOCKS).long()
    unsigned = (bits << torch.arange(WORD_BLOCKS, device=mask.device)).sum(-1)
    return torch.where(unsigned >= 2**31, unsigned - 2**32, unsigned).int()


def unpack_bits(bitmap: Tensor, blocks: int) -> Tensor:
    """Undo ``pack_bits``: ``[S, W] -> bool [S, blocks]``."""
    bits = (bitmap.unsqueeze(-1) >> torch.arange(WORD_BLOCKS, device=bitmap.device, dtype=torch.int32)) & 1
    return bits.flatten(1)[:, :blocks].bool()


def run_offsets(mask: Tensor) -> Tensor:
    """Return where each run of 128 blocks starts in the stored values: int32 ``[S, ceil(N / 128)]``."""
    samples, blocks = mask.shape
    runs = ceil_div(blocks, RUN_BLOCKS)
    counts = F.pad(mask, (0, runs * RUN_BLOCKS - blocks)).reshape(samples * runs, RUN_BLOCKS).sum(-1)
    return (counts.cumsum(0) - counts).reshape(samples, runs).int()


def unpack(values: Tensor, bitmap: Tensor, rows: int, length: int) -> Tensor:
    """Return the pruned tensor ``[rows, length]`` with zeros where a block was dropped."""
    block_size, samples = values.shape[1], bitmap.shape[0]
    columns = ceil_div(length, block_size)
    mask = unpack_bits(bitmap, rows // max(samples, 1) * columns)
    blocks = values.new_zeros(*mask.shape, block_size)
    blocks[mask] = values
    return blocks.reshape(rows, columns * block_size)[:, :length]
