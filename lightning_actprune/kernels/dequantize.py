"""Stored blocks in few bits to numbers ``[nnz, b]``, for a product that reads each of them many times.

A kernel of its own, since the gather kernel meets a block once for every tile of outputs, and would decode it as often.
This one reads the bytes and writes the numbers once: at a sparsity of .9 the weight gradient from few bits takes 1.02
to 1.11 of the time that it takes from blocks that are stored as they are (H200, ``formats.json``).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.kernels.formats import dequantize_tile, encode_format, whole_blocks
from lightning_actprune.kernels.launch import Launch, aligned
from lightning_actprune.ops.geometry import ceil_div


@triton.jit
def dequantize_kernel(
    values_ptr, out_ptr, kept, B: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """Write ``TILE`` of the ``kept`` blocks to ``out [kept, B]``."""
    p = tl.program_id(0) * TILE + tl.arange(0, TILE)
    e = tl.arange(0, BLOCK)
    x = dequantize_tile(values_ptr, kept, p, p < kept, 0, B, BLOCK, FORMAT).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + p.to(tl.int64)[:, None] * B + e[None, :], x, mask=(p < kept)[:, None] & (e < B)[None, :])


@functools.lru_cache(maxsize=1024)
def _launch(kept: int, block_size: int, value_format: str, *key: object) -> Launch:
    """Return the launch for so many blocks; ``key`` holds what a compiled kernel depends on besides."""
    block, tile = whole_blocks(block_size)
    stored = encode_format(value_format, block_size)
    return Launch(dequantize_kernel, (ceil_div(kept, tile),), kept, block_size, block, tile, stored, num_warps=4)


def dequantize(values: Tensor, block_size: int, value_format: str, dtype: torch.dtype) -> Tensor:
    """Return the numbers ``[nnz, block_size]`` of stored blocks ``uint8 [nnz, row_bytes]``, of which there are some."""
    out = values.new_empty(values.shape[0], block_size, dtype=dtype)
    _launch(values.shape[0], block_size, value_format, dtype, values.device, aligned(values, out))(values, out)
    return out
