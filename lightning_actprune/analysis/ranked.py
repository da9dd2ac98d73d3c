r"""What an input of a layer would be after packing and unpacking, for many settings from one ranking of its blocks.

Training packs with kernels whose constants are the rows of a layer and its number of kept blocks: fast, and compiled
anew for each layer, sparsity and number of bits. To look at all of them once, compiling is what takes long. Here the
blocks are sorted once, as in ``codec.blocks``, each sparsity takes the first of them, and one sparsity has the same
choice for any number of bits:

1. ``squares`` and keys of all blocks and their order: by torch, once;
2. the numbers of the blocks that a sparsity keeps, in their order, which is that of their places;
3. their values, copied side by side, and quantized as in training, as a tensor of which each row is one block and none
   is dropped: what is stored of a block depends on its values and its place alone, so this is what training would store
   of it, bit for bit. One shape of row, so two variants for each number of bits;
4. the packed input as it is read: these values at their old places, zero elsewhere.

Where torch and a kernel add squares in another order, blocks whose norms agree to 24 bits may change places. For
``"largest"`` that is next to no difference. The random choice of ``"swap"`` and ``"unbiased"`` depends on every bit
of every square (``codec.blocks``), and there a GPU's is another one of the same distribution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_actprune.analysis.sensitivity_grid import GridSetting
from lightning_actprune.codec.blocks import (
    ALL_BLOCKS,
    Blocks,
    block_and_keep,
    block_keys,
    ceil_div,
    factors,
    input_geometry,
    rescale,
    selection_keys,
    stored_shape,
    stored_view,
)
from lightning_actprune.codec.dispatch import (
    as_dtype,
    autocast_dtype,
    cast,
    cast_input,
    choose_backend,
)
from lightning_actprune.codec.packed import pack, unpack
from lightning_actprune.operators.convolution import (
    Convolution,
    input_rows,
    rows_of,
    weight_grad,
    windows_of,
    without_gaps,
)
from lightning_actprune.operators.linear import weight_grad_of

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
        blocks: How it is cut into blocks and which are kept; the bits do not matter.
    """

    def __init__(self, x: Tensor, blocks: Blocks) -> None:
        stored, self.transposed = stored_view(x, blocks.block_size, blocks.scope)
        self.shape = stored_shape(x, self.transposed)
        """``[batch, rows, length]`` as stored."""
        self._stored, self._blocks = stored, blocks
        self._size, every = block_and_keep(stored, blocks.block_size, 0, 0)
        short = -stored.shape[2] % self._size
        filled = F.pad(stored, (0, short)) if short else stored
        self._values = filled.reshape(-1, self._size)
        pieces = torch.split(self._values, CHUNK // self._size + 1)
        self._squares = torch.cat([block_keys(piece) for piece in pieces]).view(len(stored), every)
        self._keys = selection_keys(self._squares, blocks.selection)
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
        """Return the blocks that are kept at a sparsity of ``parts`` (see ``codec.blocks``)."""
        (samples, every), keep = self._order.shape, self._keep(parts)
        nnz, device, scales = samples * keep, self._order.device, None
        if keep == every:
            numbers = torch.arange(nnz, device=device)
        else:
            first = torch.arange(0, samples * every, every, device=device)[:, None]
            numbers = (self._order[:, :keep].sort(dim=1).values + first).flatten()
        if choose_backend(self._values.shape, self._values.dtype, device, self._size, 1) == "triton":
            numbers = F.pad(numbers, (0, -nnz % ROUND))
        if self._blocks.selection == "unbiased" and keep < every:
            chosen = torch.zeros_like(self._keys, dtype=torch.bool).scatter_(1, self._order[:, :keep], True)
            scales = factors(self._squares, self._keys, chosen).flatten()[numbers]
        return KeptBlocks(numbers, nnz, scales)

    def packed(self, kept: KeptBlocks, bits: int) -> Tensor:
        """Return the packed input as it is read, ``[batch * rows, length]``; rows may have gaps between them."""
        values = self._read(kept, bits)
        if kept.nnz == len(self._values):
            blocks = values
        else:
            blocks = self._values.new_zeros(self._values.shape).index_copy_(0, kept.numbers[: kept.nnz], values)
        batch, rows, length = self.shape
        return blocks.view(batch * rows, ceil_div(length, self._size) * self._size)[:, :length]

    def _read(self, kept: KeptBlocks, bits: int) -> Tensor:
        """Return the values of kept blocks as they are read again, ``[nnz, block]``."""
        everything = len(kept.numbers) == kept.nnz == len(self._values)
        values = self._values if everything else self._values.index_select(0, kept.numbers)
        if kept.factors is not None:
            values = rescale(values, kept.factors)
        if bits:
            (rows, size), dtype = values.shape, values.dtype
            stored = pack(values[None], size, ALL_BLOCKS, bits)
            del values  # so that one copy of them is in memory
            values = unpack(*stored, rows, size, size, bits, dtype)
        return values[: kept.nnz]

    def _keep(self, parts: int) -> int:
        return block_and_keep(self._stored, self._blocks.block_size, parts, 0)[1]


class LayerInput(ABC):
    """The input of a layer, as backward of the dense layer would read it.

    Args:
        x: The input, cast as by autocast.
    """

    def __init__(self, x: Tensor) -> None:
        self.x = x

    @abstractmethod
    def ranked(self, grad_y: Tensor, setting: GridSetting) -> RankedCall:
        """Return this call with its blocks ranked; the sparsity and the bits of ``setting`` do not matter."""

    @abstractmethod
    def cut(self, setting: GridSetting) -> Tensor:
        """Return the input with the dimensions from which blocks are cut."""

    def blocks(self, setting: GridSetting) -> Blocks:
        """Return how that is cut."""
        return setting.blocks

    def stored_bytes(self, setting: GridSetting) -> int:
        """Return the bytes that a layer with this setting keeps, by formula."""
        if not setting.keep.changes:
            return self.x.nbytes
        blocks = self.blocks(setting)
        geometry = input_geometry(self.cut(setting), blocks.block_size, setting.sparsity, blocks.scope)
        return geometry.stored_bytes(self.x.itemsize, blocks.bits)


class RankedCall:
    """A call of a layer whose gradient has arrived: what each setting makes of its weight gradient.

    Args:
        blocks: The blocks of its input.
        weight_grad: Computes its weight gradient.
    """

    def __init__(self, blocks: RankedBlocks, weight_grad: Callable[[Tensor], Tensor]) -> None:
        self.blocks = blocks
        self._weight_grad = weight_grad

    def exact(self) -> Tensor:
        """Return the weight gradient of the dense layer, in fp32, or fp64 of fp64."""
        return self._weight_grad(self.blocks.whole())

    def packed(self, kept: KeptBlocks, bits: int) -> Tensor:
        """Return the weight gradient of a layer that keeps these blocks in so many bits, 0 for values as they are."""
        return self._weight_grad(self.blocks.packed(kept, bits))


class LinearInput(LayerInput):
    """The input of a linear layer, or of a projection inside attention.

    Args:
        x: The input.
        turned: Whether it is ``[T, N, E]``, samples second, as inside attention.
        block_size: Values per block, on which it depends how autocast's copy lies in memory.
    """

    def __init__(self, x: Tensor, turned: bool, block_size: int) -> None:
        super().__init__(cast_input(x.detach(), autocast_dtype(x), block_size))
        self._turned = turned

    def ranked(self, grad_y: Tensor, setting: GridSetting) -> RankedCall:
        """Return this call with its blocks ranked."""
        x, blocks = self.cut(setting), self.blocks(setting)
        ranked = RankedBlocks(x, blocks)
        grad_y = grad_y.reshape(*x.shape[:-1], grad_y.shape[-1])
        return RankedCall(ranked, weight_grad_of(grad_y, blocks, ranked.shape, ranked.transposed))

    def cut(self, setting: GridSetting) -> Tensor:
        """Return the input, inside attention a copy if that has the samples first in memory, as torch makes one."""
        return self.x.contiguous() if self._turned else self.x

    def blocks(self, setting: GridSetting) -> Blocks:
        """Return how that is cut."""
        return setting.turned_blocks if self._turned else setting.blocks


class ConvolutionInput(LayerInput):
    """The input of a convolution.

    Args:
        x: The input, a batch or one sample.
        layer: The convolution.
    """

    def __init__(self, x: Tensor, layer: Convolution) -> None:
        autocast, x = autocast_dtype(x), x.detach()
        self._is_sample = x.dim() == layer.weight.dim() - 1
        x = x.unsqueeze(0) if self._is_sample else x
        super().__init__(x if autocast is None else cast(x, autocast))
        self._sizes, self._windows = layer.weight.shape, windows_of(layer)

    def ranked(self, grad_y: Tensor, setting: GridSetting) -> RankedCall:
        """Return this call with its blocks ranked."""
        x, blocks = without_gaps(self.x), setting.blocks
        grad_y = grad_y.unsqueeze(0) if self._is_sample else grad_y

        def grad_of(stored: Tensor) -> Tensor:
            as_read = stored.contiguous().as_strided(x.shape, x.stride())
            grad = weight_grad(as_read, grad_y, self._sizes, self._windows)
            return as_dtype(grad, torch.promote_types(grad.dtype, torch.float32))

        return RankedCall(RankedBlocks(rows_of(x, blocks.block_size, blocks.scope), blocks), grad_of)

    def cut(self, setting: GridSetting) -> Tensor:
        """Return the rows of the input, which is as it lies in memory."""
        return input_rows(self.x, setting.blocks.block_size, setting.blocks.scope)
