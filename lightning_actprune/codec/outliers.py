"""Outliers: values so large that the others of their block are lost when the block is quantized.

``codec.saved_ops`` says what eager mode and compiled code do about them.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing

from lightning_actprune.codec.blocks import ALL_BLOCKS
from lightning_actprune.codec.dispatch import simulated_gpu
from lightning_actprune.codec.packed import FLEXIBLE, LIBRARY, Quantize, pack, quantize, unpack

_SAMPLE = 2**20
"""Values of a tensor in which outliers are looked for, the first of them: masks recur in each sample."""
_LOST_SHARE = 1 / 4
"""Share of a block's values that may be off by more than half of themselves."""
_FIRST_CALLS = 1, 2, 4, 8, 16, 32, 64
CHECKED_EVERY = 127
"""Outliers are looked for in these first calls, and then in multiples of a prime, since blocks may share a graph."""


def is_check_due(call: int) -> bool:
    """Return True if a forward or a call of compiled code, counted from 1, looks for outliers."""
    return call in _FIRST_CALLS or call % CHECKED_EVERY == 0


def loses_values(x: Tensor, block: int) -> bool:
    """Return whether a block of ``x`` would lose values to an outlier, or is not finite; waits for the device.

    That is a block of which a quarter of the values that are not zero would be off by more than half of themselves if
    they were stored in eight bits.

    Args:
        x: ``[samples, rows, length]``, values side by side in the last dimension.
        block: Values per block, of the last dimension.
    """
    if simulated_gpu() is not None:  # there are no values
        return False
    _, rows, length = x.shape
    x = x[: max(_SAMPLE // (rows * length), 1), : max(_SAMPLE // length, 1)]
    values, none, _ = pack(x, block, ALL_BLOCKS, 8)
    read = unpack(values, none, none, x.shape[0] * x.shape[1], length, block, 8, x.dtype).view(x.shape)
    off = ~((read - x).abs() <= x.abs() / 2)  # True for NaN, too
    lost = torch.nn.functional.pad((off & (x != 0)).float(), (0, -length % block)).view(-1, block).mean(-1)
    return not bool(((lost <= _LOST_SHARE).all() & x.isfinite().all()).item())


def is_captured(tensor: Tensor) -> bool:
    """Return whether a CUDA graph of what is done with ``tensor`` is being made: then nobody may wait for values."""
    return tensor.is_cuda and is_current_stream_capturing()


class CheckedQuantize(Quantize):
    """``Quantize`` that warns of outliers in its first calls, and in some later ones.

    Args:
        block_size: Values per block.
        bits: Bits of a stored value.
        operation: Name of the operation whose backward reads the values.
    """

    def __init__(self, block_size: int, bits: int, operation: str) -> None:
        super().__init__(block_size, bits)
        self._block_size, self._operation, self._calls = block_size, operation, 0

    def __call__(self, x: Tensor, *sizes: int, out: Tensor) -> None:
        """Write ``quantize(x, block_size, bits)`` to ``out``."""
        self._calls += 1
        if is_check_due(self._calls):
            _warn_of_outliers(x, self._block_size, self._operation)
        super().__call__(x, *sizes, out=out)


def _warn_of_outliers(x: Tensor, block_size: int, operation: str) -> None:
    if not is_captured(x) and loses_values(x, block_size):
        warnings.warn(
            f"In compiled code {operation!r} saves values with outliers, such as a mask's, and stores them in few bits "
            f"all the same: its gradients may be wrong. HINT: `rules={{'operation:{operation}': None}}` leaves them "
            "uncompressed.",
            stacklevel=3,
        )


def _quantize_checked(x: Tensor, block_size: int, bits: int, operation: str) -> Tensor:
    _warn_of_outliers(x, block_size, operation)
    return quantize(x, block_size, bits)


LIBRARY.define("quantize_checked(Tensor x, int block_size, int bits, str operation) -> Tensor", tags=FLEXIBLE)
LIBRARY.impl("quantize_checked", _quantize_checked, "CompositeExplicitAutograd")


@torch.library.register_fake("actprune::quantize_checked", lib=LIBRARY)
def _quantize_checked_fake(x: Tensor, block_size: int, bits: int, operation: str) -> Tensor:
    fake: Tensor = torch.ops.actprune.quantize(x, block_size, bits)
    return fake
