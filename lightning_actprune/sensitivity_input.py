"""The input of one call whose sensitivity is measured, and what a setting makes of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from lightning_actprune.nn.convolutions import windows_of
from lightning_actprune.ops import convolution, linear
from lightning_actprune.ops.autocast import as_dtype, autocast_dtype, cast, cast_input
from lightning_actprune.ops.convolution_plan import input_rows, rows_of, without_gaps
from lightning_actprune.ops.geometry import input_geometry
from lightning_actprune.ops.library import in_plain_eager_mode
from lightning_actprune.ops.linear import WeightGradOf
from lightning_actprune.ops.ranked_blocks import KeptBlocks, RankedBlocks
from lightning_actprune.ops.setting import BlockSetting
from lightning_actprune.sensitivity_grid import GridSetting, SensitivityGrid


class LayerInput(ABC):
    """The input of a layer, as backward of the dense layer would read it.

    Args:
        x: The input, cast as by autocast.
    """

    def __init__(self, x: Tensor) -> None:
        self.x = x

    @abstractmethod
    def ranked(self, grad_y: Tensor, setting: GridSetting) -> RankedCall:
        """Return this call with its blocks ranked; the sparsity and the format of ``setting`` do not matter."""

    @abstractmethod
    def cut(self, setting: GridSetting) -> Tensor:
        """Return the input with the dimensions from which blocks are cut."""

    def blocks(self, setting: GridSetting) -> BlockSetting:
        """Return how that is cut."""
        return setting.blocks

    def stored_bytes(self, setting: GridSetting) -> int:
        """Return the bytes that a layer with this setting keeps, by formula."""
        if setting.is_dense:
            return self.x.nbytes
        blocks = self.blocks(setting)
        geometry = input_geometry(self.cut(setting), blocks.block_size, setting.sparsity, blocks.scope)
        return geometry.stored_bytes(self.x.itemsize, blocks.value_format)


class RankedCall:
    """A call of a layer whose gradient has arrived: what each setting makes of its weight gradient.

    Args:
        blocks: The blocks of its input.
        weight_grad: Computes its weight gradient.
    """

    def __init__(self, blocks: RankedBlocks, weight_grad: WeightGradOf) -> None:
        self.blocks = blocks
        self._weight_grad = weight_grad

    def exact(self) -> Tensor:
        """Return the weight gradient of the dense layer, in fp32, or fp64 of fp64."""
        return self._weight_grad(self.blocks.whole())

    def pruned(self, kept: KeptBlocks, value_format: str) -> Tensor:
        """Return the weight gradient of a layer that keeps these blocks in this format."""
        return self._weight_grad(self.blocks.pruned(kept, value_format))


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
        return RankedCall(ranked, linear.weight_grad_of(grad_y, blocks, ranked.shape, ranked.transposed))

    def cut(self, setting: GridSetting) -> Tensor:
        """Return the input, inside attention a copy if that has the samples first in memory, as torch makes one."""
        return self.x.contiguous() if self._turned else self.x

    def blocks(self, setting: GridSetting) -> BlockSetting:
        """Return how that is cut."""
        return setting.turned_blocks if self._turned else setting.blocks


class ConvolutionInput(LayerInput):
    """The input of a convolution.

    Args:
        x: The input, a batch or one sample.
        layer: The convolution.
    """

    def __init__(self, x: Tensor, layer: _ConvNd) -> None:
        autocast, x = autocast_dtype(x), x.detach()
        self._is_sample = x.dim() == layer.weight.dim() - 1
        x = x.unsqueeze(0) if self._is_sample else x
        super().__init__(x if autocast is None else cast(x, autocast))
        self._sizes, self._windows = layer.weight.shape, windows_of(layer)

    def ranked(self, grad_y: Tensor, setting: GridSetting) -> RankedCall:
        """Return this call with its blocks ranked."""
        x, blocks = without_gaps(self.x), setting.blocks
        grad_y = grad_y.unsqueeze(0) if self._is_sample else grad_y

        def weight_grad(stored: Tensor) -> Tensor:
            as_read = stored.contiguous().as_strided(x.shape, x.stride())
            grad = convolution.weight_grad(as_read, grad_y, self._sizes, self._windows)
            return as_dtype(grad, torch.promote_types(grad.dtype, torch.float32))

        return RankedCall(RankedBlocks(rows_of(x, blocks.block_size, blocks.scope), blocks), weight_grad)

    def cut(self, setting: GridSetting) -> Tensor:
        """Return the rows of the input, which is as it lies in memory."""
        return input_rows(self.x, setting.blocks.block_size, setting.blocks.scope)


def unreadable(x: Any, y: Any, grid: SensitivityGrid) -> str | None:
    """Return why a call with this input and this output cannot be measured."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return "its input or output is no tensor"
    if x.is_nested or x.layout != torch.strided or not x.is_floating_point() or x.dim() == 0:
        return f"its input is no dense floating-point tensor with features ({x.dtype}, {x.layout})"
    if not in_plain_eager_mode(x.detach()):
        return "its input is a tensor of another class (a DTensor, say), or it runs inside a transform such as vmap"
    if x.dtype == torch.float64 and any(setting.value_format != "same" for setting in grid.settings):
        return "its input is float64, which cannot be stored in few bits; measure value_formats=['same'] alone"
    return None
