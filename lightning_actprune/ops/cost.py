"""Cost model: is the gather kernel faster than unpacking and a dense matrix product?"""

from __future__ import annotations

import torch
from torch import Tensor


def gather_is_faster(grad_y: Tensor, values: Tensor, length: int) -> bool:
    """Return whether the gather kernel is expected to beat unpack + matrix product."""
    rows = grad_y.shape[0]
    density = values.numel() / max(1, rows * length)
    block = values.shape[1]
    if values.dtype == torch.float32:
        return torch.get_float32_matmul_precision() == "highest" and block >= 16
    limit = {16: 0.12, 32: 0.25, 64: 0.4}.get(block, 0.5 if block > 64 else 0.0)
    return density < limit and grad_y.shape[1] % 16 == 0
