"""Compile the kernel of an affine layer's gradients for real GPUs without one; see ``compile_only``."""

from __future__ import annotations

from lightning_actprune.kernels import affine
from lightning_actprune.kernels.formats import encode_format
from lightning_actprune.kernels.norm import tile_of
from tests.kernels.compile_only import Specimen, print_records, rows

CASES = [
    ("same", 32, 384, "fp32", 1),
    ("same", 32, 384, "fp32", 2),
    ("same", 16, 768, "bf16", 2),
    ("same", 32, 8192, "fp32", 2),
    ("int4", 32, 384, "fp32", 2),
    ("int2", 32, 384, "bf16", 1),
    ("fp8", 32, 8192, "fp32", 2),
    ("int3", 24, 100, "bf16", 2),
]
"""Format, block size, length, type and sums: with a bias and without, the longest rows, unaligned ones."""


def label_of(name: str, size: int, length: int, value: str, sums: int) -> str:
    """Return how the kernel of a case is called."""
    return f"affine_grad_{name}_b{size}_{length}_{value}_{sums}"


def specimens() -> list[Specimen]:
    """Return the kernel as the launch function uses it."""
    found = []
    for name, size, length, value, sums in CASES:
        sizes, warps = tile_of(length, size)
        constants = rows(length, size) | sizes | {"INPUT": True, "SUMS": sums}
        constants["FORMAT"] = encode_format(name, size)
        options = {"num_warps": warps, "maxnreg": affine.REGISTERS}
        found.append((label_of(name, size, length, value, sums), affine.affine_grad_kernel, constants, value, options))
    return found


if __name__ == "__main__":
    print_records(lambda target: specimens())
