"""Cost model: is the gather kernel faster than unpacking and a dense matrix product?

In 16 bits a gathered row of ``grad_y`` is reused for ``b`` columns only, so gathering wins below a density that grows
with ``b``. The limits are estimates from a prototype on an H200, not fitted to these kernels yet (see the benchmark
notes).
"""

from __future__ import annotations

import torch
from torch import Tensor


def fp32_is_exact() -> bool:
    """Return whether torch's fp32 matrix products on CUDA use no TF32."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # raised once somebody has set the newer, per-backend switch
        return bool(torch.backends.cuda.matmul.fp32_precision != "tf32")


def gather_is_faster(grad_y: Tensor, values: Tensor, length: int) -> bool:
    """Return whether the gather kernel is expected to beat unpack + matrix product."""
    rows = grad_y.shape[0]
    density = values.numel() / max(1, rows * length)
    block = values.shape[1]
    if values.dtype == torch.float32:
        # Against TF32 on tensor cores the exact gather kernel cannot win.
        return block >= 16 and fp32_is_exact()
    limit = {16: 0.12, 32: 0.25, 64: 0.4}.get(block, 0.5 if block > 64 else 0.0)
    return density < limit and grad_y.shape[1] % 16 == 0
