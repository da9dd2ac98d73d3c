"""Cost model: is the gather kernel faster than unpacking and a dense matrix product?

Microseconds, with ``F`` the operations of the dense product, ``d`` the density and ``X`` the bytes of the dense input::

    gather  g + c_b d F / rate                   c_b: what a gathered operation costs, in dense ones
    unpack  u + F / rate + (1 + d) X / bandwidth  dense product, after writing X and reading d X

Fitted on an H200 (Triton 3.6, inputs not in the cache) by ``examples/benchmarks/fit_cost.py`` to the records of
``kernels.py``, not to the least error but to the least regret: what a wrong choice costs in the worst case. The
constants of both sides scale alike from GPU to GPU, so the choice carries over. The inputs were normal random numbers,
whose columns keep about the same number of rows each; where columns differ, gathering takes up to twice as long, which
a choice from shapes alone cannot know.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Costs(NamedTuple):
    """Constants for one size of value.

    Args:
        gather_base: Microseconds of a gather without operations.
        gather: Largest block size first: from which size on a gathered operation costs how many dense ones.
        unpack_base: Microseconds of unpacking and multiplying next to nothing.
        rate: Operations per microsecond of the dense product.
        bandwidth: Bytes per microsecond.
    """

    gather_base: float
    gather: tuple[tuple[int, float], ...]
    unpack_base: float
    rate: float
    bandwidth: float

    def gather_us(self, product: float, density: float, block_size: int) -> float:
        """Return the time of the gather kernel; ``product`` is the number of operations of the dense product."""
        cost = next(cost for size, cost in self.gather if block_size >= size)
        return self.gather_base + cost * density * product / self.rate

    def unpack_us(self, product: float, density: float, size: int) -> float:
        """Return the time of unpacking to ``size`` bytes and multiplying."""
        return self.unpack_base + product / self.rate + (1 + density) * size / self.bandwidth


COSTS = {
    2: Costs(19.5, ((128, 2.08), (64, 2.57), (32, 4.86), (16, 7.41)), 12.3, 868e6, 3.34e6),
    4: Costs(36.7, ((128, 1.25), (64, 1.23), (32, 1.31), (16, 1.43)), 14.2, 52e6, 3.08e6),
}
"""By bytes per value."""


def fp32_is_exact() -> bool:
    """Return whether torch's fp32 matrix products on CUDA use no TF32."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # raised once somebody has set the newer, per-backend switch
        return bool(torch.backends.cuda.matmul.fp32_precision != "tf32")


def gather_is_faster(grad_y: tuple[int, int], values: tuple[int, int], length: int, itemsize: int, exact: bool) -> bool:
    """Return whether the gather kernel is expected to beat unpack + matrix product.

    Args:
        grad_y: Rows and outputs of the output gradient.
        values: Kept blocks and values per block.
        length: Values per row of the input.
        itemsize: Bytes per value.
        exact: What ``fp32_is_exact`` returns.
    """
    (rows, outputs), (kept, block) = grad_y, values
    # In 16 bits, rows of grad_y that do not start at 16 bytes are gathered in 4-byte pieces, at a fraction of the
    # speed.
    # The exact fp32 kernel cannot win against TF32 on tensor cores.
    if block < 16 or (itemsize == 2 and outputs % 16) or (itemsize == 4 and not exact):
        return False
    costs, product, density = COSTS[itemsize], 2.0 * rows * length * outputs, kept * block / (rows * length)
    size = rows * length * itemsize
    return costs.gather_us(product, density, block) < costs.unpack_us(product, density, size)
