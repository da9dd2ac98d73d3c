"""Compile the kernels that normalise for real GPUs without one; see ``compile_only``."""

from __future__ import annotations

from lightning_actprune.kernels import norm
from lightning_actprune.kernels.formats import encode_format
from tests.kernels.compile_only import Specimen, print_records, rows

CASES = [(4, 32, 768, "fp32"), (2, 32, 4096, "bf16"), (4, 32, 8192, "fp32"), (4, 24, 100, "bf16")]
AFFINE = (4, 32, 384, "fp32")
"""Bits, block size, length and type: rows of 24 blocks, of a power of two, the longest, unaligned ones."""
SCALED = (2, 32, 384, "bf16")
"""The same of a branch of 16 bits that is scaled and added to an fp32 residual."""


def specimens() -> list[Specimen]:
    """Return both kernels as the launch functions use them, with everything to be computed."""
    found = []
    for case in (*CASES, AFFINE, SCALED):
        bits, size, length, value = case
        normed, added = case in CASES, case == SCALED
        sizes, warps = norm.tile_of(length, size)
        constants = rows(length, size) | sizes | {"WEIGHTED": True, "CENTRED": normed, "NORMED": normed}
        constants["FORMAT"] = encode_format(bits, size)
        of_forward = {"BIASED": not added, "ADDED": added, "ROUNDED": False}
        of_backward = {"OF_WEIGHT": True, "OF_BIAS": not added}
        for kernel, more in ((norm.normalize_kernel, of_forward), (norm.normalize_grad_kernel, of_backward)):
            label = f"{kernel.__name__.removesuffix('_kernel')}_{bits}_b{size}_{length}"
            options = {"num_warps": warps} | ({"maxnreg": norm.REGISTERS} if "OF_BIAS" in more else {})
            found.append((label, kernel, constants | more, value, options))
    return found


if __name__ == "__main__":
    print_records(lambda target: specimens())
