"""Cost model: is the gather kernel faster than unpacking and a dense matrix product?

In 16 bits the gather kernel takes about ``a + c d`` of the dense product's time at density ``d``, unpack + product about
1.17 whatever the density. On an H200 (Triton 3.6, ViT- and ResMLP-sized layers; ``tune_weight_grad.py``): a = .31, c = 4.7
for b = 16; .45 and 2.3 for 32; .38 and 1.7 for 64. The densities where the two meet are the limits below. In exact fp32
there are no tensor cores to keep busy, and gathering wins as soon as it saves anything.
"""

from __future__ import annotations

import torch
from torch import Tensor


LIMITS = ((128, 0.6), (64, 0.45), (32, 0.3), (16, 0.18), (0, 0.0))
"""From which block size on gathering wins below which density, largest blocks first."""


def gather_is_faster(grad_y: Tensor, values: Tensor, length: int) -> bool:
    """Return whether the gather kernel is expected to beat unpack + matrix product."""
    rows = grad_y.shape[0]
    density = values.numel() / max(1, rows * length)
    block = values.shape[1]
    if values.dtype == torch.float32:
        return torch.get_float32_matmul_precision() == "highest" and block >= 16
    # Rows of grad_y that do not start at 16 bytes are gathered in 4-byte pieces, at a fraction of the speed.
    return density < next(limit for size, limit in LIMITS if block >= size) and grad_y.shape[1] % 16 == 0
