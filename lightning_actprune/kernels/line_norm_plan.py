"""What a batch normalisation launches, worked out once for all inputs of one kind: see ``ops.line_plan``.

The same kernels as by the functions of ``line_norm`` and ``line_norm_grad``, and so the same bits. Gradients of the
parameters are written in the types of these, and those that nobody needs are not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_actprune.kernels.formats import encode_format
from lightning_actprune.kernels.line_factors import add_launch
from lightning_actprune.kernels.line_norm import bits_start, flat_launch, normalize_lines_kernel
from lightning_actprune.kernels.line_norm_grad import SumsPlan, line_grad_kernel
from lightning_actprune.kernels.line_statistics import RunningTensors, StatisticsPlan
from lightning_actprune.ops.geometry import ceil_div


class Stored(NamedTuple):
    """How lines lie in memory, and how they are stored.

    Args:
        cut: Images, lines and length.
        block_size: Values per block, in [1, values].
        value_format: How values are stored.
        device: Where the kernels run.
        relu: Whether the output is that of a ReLU, whose bits are stored with the values.
    """

    cut: tuple[int, int, int]
    block_size: int
    value_format: str
    device: torch.device
    relu: bool

    @property
    def blocks(self) -> int:
        """Blocks in all."""
        return ceil_div(self.cut[0] * self.cut[1] * self.cut[2], self.block_size)

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored block, without the bits of the ReLU."""
        return encode_format(self.value_format, self.block_size) >> 24

    def split(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values ``[blocks, bytes]``, and of each value, in the order of memory, whether its bit is set."""
        blocks, row, count = self.blocks, self.row_bytes, self.cut[0] * self.cut[1] * self.cut[2]
        start = bits_start(blocks, row)
        bits = stored[start:].view(blocks, -1, 1) >> torch.arange(8, dtype=torch.uint8, device=stored.device) & 1
        places = bits.view(blocks, -1)[:, : self.block_size].reshape(-1)[:count]
        return stored[: blocks * row].view(blocks, row), places != 0


class ForwardPlan:
    """The launches of forward.

    Args:
        stored: The kind of input.
        eps: Added to the variance.
        parameters: Whether there are a weight and a bias.
        momentum: Of the running statistics, ``None`` if there are none to move.
        counted: Whether batches are counted.
    """

    __slots__ = ("_normalize", "_statistics", "_values")

    def __init__(
        self, stored: Stored, eps: float, parameters: tuple[bool, bool], momentum: float | None, counted: bool
    ) -> None:
        cut, block_size, value_format, device, relu = stored
        blocks, row = stored.blocks, stored.row_bytes
        self._values = (bits_start(blocks, row) + blocks * ceil_div(block_size, 8),) if relu else (blocks, row)
        self._statistics = StatisticsPlan(cut, eps, device, momentum, counted)
        self._normalize = flat_launch(normalize_lines_kernel, cut, (*parameters, relu), block_size, value_format)

    def __call__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, running: RunningTensors | None, y: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write ``y``, move ``running`` on, and return the normalised values in few bits and the statistics."""
        statistics = self._statistics(x, running)
        values = x.new_empty(self._values, dtype=torch.uint8)
        self._normalize(x, statistics, x if weight is None else weight, x if bias is None else bias, y, values)
        return values, statistics


class BackwardPlan:
    """The launches of backward.

    Args:
        stored: The kind of input.
        weighted: Whether there is a weight.
        wanted: Whether the gradients of input, weight and bias are.
    """

    __slots__ = ("_add", "_factors", "_grad", "_sums")

    def __init__(self, stored: Stored, weighted: bool, wanted: tuple[bool, bool, bool]) -> None:
        cut, block_size, value_format, device, relu = stored
        self._sums = SumsPlan(cut, block_size, value_format, device, relu)
        self._add = add_launch(self._sums.shape[1], cut, weighted, False, wanted[1:])
        self._factors = 3, cut[1]
        self._grad = flat_launch(line_grad_kernel, cut, (relu,), block_size, value_format) if wanted[0] else None

    def __call__(
        self,
        grad_y: Tensor,
        values: Tensor,
        statistics: Tensor,
        weight: Tensor | None,
        grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    ) -> None:
        """Write to ``grads``: those of input, weight and bias, or ``None`` for what is not wanted."""
        grad_x, of_weight, of_bias = grads
        partial = self._sums(grad_y, values)
        factors = grad_y.new_empty(self._factors, dtype=torch.float32)
        read = statistics, statistics if weight is None else weight
        written = factors if of_weight is None else of_weight, factors if of_bias is None else of_bias
        self._add(partial, *read, *written, factors)
        if self._grad is not None and grad_x is not None:
            self._grad(grad_y, values, factors, grad_x)
