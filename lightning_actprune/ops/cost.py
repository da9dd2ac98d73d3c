"""Cost model: is the gather kernel faster than unpacking and a dense matrix product?

Microseconds on an H200 (Triton 3.6, 16-bit values, inputs not in the cache; ``examples/benchmarks/kernels.py``), with
``F`` the operations of the dense product, ``d`` the density and ``X`` the bytes of the dense input::

    dense   8 + F / 800e6                        the vendor's library, 464 to 823 TFLOP/s on the measured shapes
    gather  16 + c_b d F / 800e6                 c_b = 5.6, 3.1, 2.2, 1.9 for b = 16, 32, 64, 128
    unpack  dense + 3 + (1 + d) X / 4.3e6        writes X, reads d X

The constants of both sides scale alike from GPU to GPU, so the choice carries over. In exact fp32 there are no tensor
cores to keep busy, and gathering wins as soon as it saves anything; in fp32 with TF32 the dense product wins.
"""

from __future__ import annotations

import torch
from torch import Tensor

RATE = 800e6
"""Operations per microsecond of a large 16-bit product."""
BANDWIDTH = 4.3e6
"""Bytes per microsecond."""
GATHER_COST = ((128, 1.9), (64, 2.2), (32, 3.1), (16, 5.6))
"""From which block size on a gathered operation costs how many dense ones."""


def fp32_is_exact() -> bool:
    """Return whether torch's fp32 matrix products on CUDA use no TF32."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # raised once somebody has set the newer, per-backend switch
        return bool(torch.backends.cuda.matmul.fp32_precision != "tf32")


def gather_is_faster(grad_y: Tensor, values: Tensor, length: int) -> bool:
    """Return whether the gather kernel is expected to beat unpack + matrix product."""
    rows, outputs = grad_y.shape
    kept, block = values.shape
    if values.dtype == torch.float32:
        # Against TF32 on tensor cores the exact gather kernel cannot win.
        return block >= 16 and fp32_is_exact()
    # Rows of grad_y that do not start at 16 bytes are gathered in 4-byte pieces, at a fraction of the speed.
    if block < 16 or outputs % 16:
        return False
    density = kept * block / (rows * length)
    product = 2 * rows * length * outputs / RATE
    gather = 16 + next(cost for size, cost in GATHER_COST if block >= size) * density * product
    unpack = 8 + product + 3 + (1 + density) * rows * length * values.element_size() / BANDWIDTH
    return gather < unpack
