"""Implementation of ``actprune::pack``: arguments checked, then kernels or reference."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_actprune.ops import formats, reference
from lightning_actprune.ops.dispatch import choose_backend, on_device_of
from lightning_actprune.ops.geometry import ceil_div, keeps_all

MAX_KEPT_BLOCKS = 2**31 - 1
"""Places in the values are int32."""


def pack(
    x: Tensor, block_size: int, keep: int, value_format: str = "same", block_selection: str = "largest"
) -> tuple[Tensor, Tensor, Tensor]:
    """Keep ``keep`` blocks of each sample of ``x``.

    Args:
        x: Floating tensor ``[S, T, L]``; read in place if its last stride is 1.
        block_size: Values per block, in [1, max(L, 1)].
        keep: Blocks kept per sample, in [0, T * ceil(L / block_size)], or ``ALL_BLOCKS`` in a format of few bits.
        value_format: How their values are stored (``ops.formats``).
        block_selection: Which ones they are (``ops.block_selection``).

    Returns:
        ``values [S * keep, block_size]``, or the bytes of each block in a format of few bits, ``bitmap int32
        [S, ceil(N / 32)]`` and ``offsets int32 [S, ceil(N / 128)]`` with ``N = T * ceil(L / block_size)``; with
        ``ALL_BLOCKS`` the latter two are ``[S, 0]``.
    """
    if x.stride(-1) != 1:  # a compiler may have changed the strides that the caller looked at
        x = x.contiguous()
    if value_format != "same" and x.dtype == torch.float64:
        raise TypeError(
            f"float64 values cannot be stored as {value_format!r}, whose scales have 8 bits of precision. HINT: use "
            'value_format="same", or train in float32 or 16 bits.'
        )
    columns, kept = ceil_div(x.shape[2], block_size), kept_blocks(x.shape, block_size, keep)
    if kept > MAX_KEPT_BLOCKS:
        raise ValueError(
            f"{x.shape[0]} samples of {kept // x.shape[0]} kept blocks are more than 2^31 - 1, the most that can be "
            f"numbered. HINT: take a larger `block_size` than {block_size}."
        )
    if x.numel() > 0 and kept > 0 and choose_backend(x.shape, x.dtype, x.device, block_size, columns) == "triton":
        from lightning_actprune.kernels import pack as kernels

        with on_device_of(x):
            return kernels.pack(x, block_size, keep, value_format, block_selection)
    if keeps_all(keep):
        blocks = reference.split_blocks(x, block_size).reshape(-1, block_size)
        bitmap, offsets = (x.new_empty(x.shape[0], 0, dtype=torch.int32) for _ in range(2))
        return formats.quantize(blocks, value_format), bitmap, offsets
    return reference.pack(x, block_size, keep, value_format, block_selection)


def kept_blocks(shape: torch.Size, block_size: int, keep: int) -> int:
    """Return how many blocks of a tensor ``[S, T, L]`` are kept."""
    samples, rows, length = shape
    return samples * (rows * ceil_div(length, block_size) if keeps_all(keep) else keep)
