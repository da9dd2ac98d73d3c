"""Implementation of ``actprune::pack``: arguments checked, then kernels or reference."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_actprune.ops import reference
from lightning_actprune.ops.dispatch import choose_backend, on_device_of
from lightning_actprune.ops.geometry import ceil_div

MAX_KEPT_BLOCKS = 2**31 - 1
"""Places in the values are int32."""


def pack(
    x: Tensor, block_size: int, keep: int, value_format: str = "same", block_selection: str = "largest"
) -> tuple[Tensor, Tensor, Tensor]:
    """Keep ``keep`` blocks of each sample of ``x``.

    Args:
        x: Floating tensor ``[S, T, L]``; read in place if its last stride is 1.
        block_size: Values per block, in [1, max(L, 1)].
        keep: Blocks kept per sample, in [0, T * ceil(L / block_size)].
        value_format: How their values are stored (``ops.formats``).
        block_selection: Which ones they are (``ops.block_selection``).

    Returns:
        ``values [S * keep, block_size]``, or the bytes of each block in a format of few bits, ``bitmap int32
        [S, ceil(N / 32)]`` and ``offsets int32 [S, ceil(N / 128)]`` with ``N = T * ceil(L / block_size)``.
    """
    if x.stride(-1) != 1:  # a compiler may have changed the strides that the caller looked at
        x = x.contiguous()
    if value_format != "same" and x.dtype == torch.float64:
        raise TypeError(
            f"float64 values cannot be stored as {value_format!r}, whose scales have 8 bits of precision. HINT: use "
            'value_format="same", or train in float32 or 16 bits.'
        )
    columns = ceil_div(x.shape[2], block_size)
    if x.shape[0] * keep > MAX_KEPT_BLOCKS:
        raise ValueError(
            f"{x.shape[0]} samples of {keep} kept blocks are more than 2^31 - 1, the most that can be numbered. HINT: "
            f"take a larger `block_size` than {block_size}."
        )
    if x.numel() > 0 and keep > 0 and choose_backend(x.shape, x.dtype, x.device, block_size, columns) == "triton":
        from lightning_actprune.kernels import pack as kernels

        with on_device_of(x):
            return kernels.pack(x, block_size, keep, value_format)
    return reference.pack(x, block_size, keep, value_format)
