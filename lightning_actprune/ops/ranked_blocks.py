r"""What one input would be after packing and unpacking it, for many settings, from one ranking of its blocks.

Training packs with kernels whose constants are the rows of a layer and its number of kept blocks: fast, and compiled
anew for each layer, sparsity and format. To look at all of them once, compiling is what takes long. Here the blocks
are sorted once, as in ``ops.reference``, each sparsity takes the first of them, and all formats of one sparsity share
that choice:

1. ``squares`` and keys of all blocks and their order: by torch, once;
2. the numbers of the blocks that a sparsity keeps, in their order, which is that of their places;
3. their values, copied side by side, and for a format of few bits through the operators of training, as a tensor of
   which each row is one block and none is dropped: what is stored of a block depends on its values and its place alone,
   so this is what training would store of it, bit for bit. One shape of row, so two variants for each format;
4. the pruned input: these values at their old places, zero elsewhere.

Where torch and a kernel add squares in another order, blocks whose norms agree to 24 bits may change places. For
``"largest"`` that is next to no difference. The random choice of ``"swap"`` and ``"unbiased"`` depends on every bit
of every square (``ops.block_selection``), and there a GPU's is another one of the same distribution.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_actprune.ops import block_selection as selection
from lightning_actprune.ops import library, reference
from lightning_actprune.ops.dispatch import choose_backend
from lightning_actprune.ops.geometry import ALL_BLOCKS, block_and_keep, ceil_div, stored_shape, stored_view
from lightning_actprune.ops.setting import BlockSetting

CHUNK = 2**22
"""Values whose squares are in memory at once."""
ROUND = 2048
"""Kernels that go through kept blocks get a multiple of so many: with 1, 32 and 128 blocks a program, Triton compiles
the same for each, but something else for a number of programs that 16 does not divide."""


class KeptBlocks(NamedTuple):
    """The blocks that a sparsity keeps.

    Args:
        numbers: Their numbers among the blocks of all samples, in the order of their places, then zeros.
        nnz: How many they are.
        factors: What each is multiplied with, ``None`` if nothing is.
    """

    numbers: Tensor
    nnz: int
    factors: Tensor | None


class RankedBlocks:
    """The blocks of an input, in the order in which they are kept.

    Args:
        x: The input of a layer, ``[..., features]``.
        blocks: How it is cut into blocks and which are kept; the format does not matter.
    """

    def __init__(self, x: Tensor, blocks: BlockSetting) -> None:
        stored, self.transposed = stored_view(x, blocks.block_size, blocks.scope)
        self.shape = stored_shape(x, self.transposed)
        """``[batch, rows, length]`` as stored."""
        self._stored, self._blocks = stored, blocks
        self._size, every = block_and_keep(stored, blocks.block_size, 0, "same")
        short = -stored.shape[2] % self._size
        filled = F.pad(stored, (0, short)) if short else stored
        self._values = filled.reshape(-1, self._size)
        pieces = torch.split(self._values, CHUNK // self._size + 1)
        self._squares = torch.cat([reference.block_keys(piece) for piece in pieces]).view(len(stored), every)
        self._keys = selection.selection_keys(self._squares, blocks.block_selection)
        self._sorted, self._order = self._keys.sort(dim=1, descending=True, stable=True)
        if self._keys is not self._squares:
            self._sorted = self._squares.sort(dim=1, descending=True).values

    def energy(self, parts: int) -> Tensor:
        """Return the energy of the blocks of least norm, as many as are dropped, and of all, ``[2]``."""
        total = self._sorted.sum()
        return torch.stack([total - self._sorted[:, : self._keep(parts)].sum(), total])

    def whole(self) -> Tensor:
        """Return the input as stored, ``[batch * rows, length]``."""
        batch, rows, length = self.shape
        return self._stored.reshape(batch * rows, length)

    def kept(self, parts: int) -> KeptBlocks:
        """Return the blocks that are kept at a sparsity of ``parts`` (see ``ops.geometry``)."""
        (samples, every), keep = self._order.shape, self._keep(parts)
        nnz, device, factors = samples * keep, self._order.device, None
        if keep == every:
            numbers = torch.arange(nnz, device=device)
        else:
            first = torch.arange(0, samples * every, every, device=device)[:, None]
            numbers = (self._order[:, :keep].sort(dim=1).values + first).flatten()
        if choose_backend(self._values.shape, self._values.dtype, device, self._size, 1) == "triton":
            numbers = F.pad(numbers, (0, -nnz % ROUND))
        if self._blocks.block_selection == "unbiased" and keep < every:
            chosen = torch.zeros_like(self._keys, dtype=torch.bool).scatter_(1, self._order[:, :keep], True)
            factors = selection.factors(self._squares, self._keys, chosen).flatten()[numbers]
        return KeptBlocks(numbers, nnz, factors)

    def pruned(self, kept: KeptBlocks, value_format: str) -> Tensor:
        """Return the pruned input as it is unpacked, ``[batch * rows, length]``; rows may have gaps between them."""
        values = self._read(kept, value_format)
        if kept.nnz == len(self._values):
            blocks = values
        else:
            blocks = self._values.new_zeros(self._values.shape).index_copy_(0, kept.numbers[: kept.nnz], values)
        batch, rows, length = self.shape
        return blocks.view(batch * rows, ceil_div(length, self._size) * self._size)[:, :length]

    def _read(self, kept: KeptBlocks, value_format: str) -> Tensor:
        """Return the values of kept blocks as they are read again, ``[nnz, block]``."""
        everything = len(kept.numbers) == kept.nnz == len(self._values)
        values = self._values if everything else self._values.index_select(0, kept.numbers)
        if kept.factors is not None:
            values = selection.rescale(values, kept.factors)
        if value_format != "same":
            (rows, size), dtype, eager = values.shape, values.dtype, library.in_plain_eager_mode(values)
            packed = library.pack(values[None], size, ALL_BLOCKS, value_format, "largest", eager)
            del values  # so that one copy of them is in memory
            values = library.unpack(rows, size, packed, size, value_format, dtype, eager=eager)
        return values[: kept.nnz]

    def _keep(self, parts: int) -> int:
        return block_and_keep(self._stored, self._blocks.block_size, parts, "same")[1]
