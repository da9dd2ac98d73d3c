"""``Packed``: a pruned tensor as a value that can be inspected."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_actprune.arguments import ValueFormatName
from lightning_actprune.ops import formats, reference
from lightning_actprune.ops import library as library  # registers the operators
from lightning_actprune.ops.geometry import BlockGeometry


@dataclass(frozen=True)
class Packed:
    """The kept blocks of a tensor and their positions.

    Args:
        values: Kept blocks, ``[samples * keep, block_size]``, row by row; in few bits, the bytes of each.
        bitmap: One bit per block, int32 ``[samples, ceil(N / 32)]``; ``[samples, 0]`` of blocks in few bits at a
            sparsity of 0, where all are stored.
        offsets: Start of each run of 128 blocks in ``values``, int32 ``[samples, ceil(N / 128)]`` or ``[samples, 0]``.
        geometry: Shape of the packed tensor and of its blocks.
        dtype: Type of the values that were packed.
        value_format: How they are stored.
    """

    values: Tensor
    bitmap: Tensor
    offsets: Tensor
    geometry: BlockGeometry
    dtype: torch.dtype
    value_format: ValueFormatName = "same"

    @property
    def nbytes(self) -> int:
        """Bytes of everything stored."""
        return self.values.nbytes + self.bitmap.nbytes + self.offsets.nbytes

    def mask(self) -> Tensor:
        """Return which blocks were kept, bool ``[R, NB]``."""
        g = self.geometry
        if self.bitmap.shape[1] == 0:
            return self.bitmap.new_ones(g.total_rows, g.blocks_per_row, dtype=torch.bool)
        return reference.unpack_bits(self.bitmap, g.blocks_per_sample).reshape(g.total_rows, g.blocks_per_row)

    def unpack(self) -> Tensor:
        """Return the pruned tensor ``[samples, rows, length]`` with zeros where a block was dropped."""
        g = self.geometry
        stored, blocks = (self.values, self.bitmap, self.offsets), (g.block_size, self.value_format, self.dtype)
        dense: Tensor = torch.ops.actprune.unpack(*stored, g.total_rows, g.length, *blocks)
        return dense.reshape(g.samples, g.rows, g.length)

    def to_bsr(self) -> Tensor:
        """Return the pruned tensor as ``torch.sparse_bsr`` ``[R, NB * b]`` with blocks ``(1, b)``.

        A row whose length is no multiple of ``b`` is filled up with zeros, as its last block is. Kept blocks stay
        explicit even if all their values are zero.
        """
        g = self.geometry
        mask = self.mask()
        row_starts = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
        values = self.values
        if self.value_format != "same":
            values = formats.dequantize(values, g.block_size, self.value_format, self.dtype)
        columns, values = mask.nonzero()[:, 1], values.unsqueeze(1)
        with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
            return torch.sparse_bsr_tensor(
                row_starts, columns, values, size=(g.total_rows, g.blocks_per_row * g.block_size)
            )
