"""Compile the kernels that quantize, or read what is quantized, for real GPUs without one; see ``compile_only``."""

from __future__ import annotations

import itertools

from lightning_actprune.kernels import linear, pack, unpack
from lightning_actprune.kernels.formats import encode_format, tile_width, whole_blocks
from lightning_actprune.kernels.places import choose_turns, run_tile
from tests.kernels.compile_only import UNSCALED, Specimen, in_turn, print_records, rows

CASES = [(4, 32), (4, 64), (2, 32), (2, 64), (8, 32), (3, 32), (4, 24), (4, 128), (4, 256), (2, 16)]
"""Bits and block sizes; of 24, a quarter of the tile is masked."""
WIDE = (4, 1024)
"""The largest block, which no weight gradient reads as numbers alone."""
SPARSE = [64, 1000]
"""Block sizes at which next to nothing is kept."""


def specimens(target: int) -> list[Specimen]:
    """Return what the launch functions use, values in bf16 and in fp32 in turn."""
    found = []
    for (bits, size), value in itertools.product((*CASES, WIDE), ("bf16", "fp32")):
        found.extend(quantize(bits, size, value))
        found.append(unpacked(bits, size, value))
    for (bits, size), value in itertools.product(CASES, ("bf16", "fp32")):
        found.append(decoded(bits, size, value))
        found.append(whole(bits, size, value))
    found.append(whole(4, 32, "bf16", casts=True))
    found.append(unpacked(4, 32, "bf16", everything=True))
    found.extend(one_block(4, 32, "bf16"))
    found.extend(sparse(size, value) for size, value in itertools.product(SPARSE, ("bf16", "fp32")))
    return in_turn(found, target)


def quantize(bits: int, size: int, value: str) -> list[Specimen]:
    """Return the kernel that packs the kept blocks of a run, as they are and scaled."""
    constants, options = turned(bits, size)
    return [
        (f"quantize_{bits}_b{size}", pack.quantize_kernel, constants | UNSCALED, value, options),
        (f"quantize_scaled_{bits}_b{size}", pack.quantize_kernel, constants, value, options),
    ]


def turned(
    bits: int, size: int, kept: float = 51.2, length: int | None = None
) -> tuple[dict[str, int], dict[str, int]]:
    """Return constants and options of the kernels that find kept blocks by rank: so many of 128, by default at .6."""
    _, (_, _, lanes), _ = run_tile(64, 4704, size)
    turns = choose_turns(tile_width(size), kept)
    tile = {"B": size, "BLOCK": tile_width(size), "TILE": turns.tile, "PARTS": turns.parts, "LANES": lanes}
    stored = tile | {"FORMAT": encode_format(bits, size)}
    return stored | rows(length or 6 * size, size), {"num_warps": turns.warps}


def sparse(size: int, value: str) -> Specimen:
    """Return the kernel that unpacks a run with few kept blocks and rows that are not aligned."""
    constants, options = turned(4, size, 6.4, 6 * size + 6)
    return f"sparse_unpack_4_b{size}", unpack.unpack_kept_kernel, constants, value, options


def whole(bits: int, size: int, value: str, casts: bool = False) -> Specimen:
    """Return the kernel that stores all blocks."""
    block, tile = whole_blocks(size)
    constants = {"CAST": casts, "B": size, "BLOCK": block, "TILE": tile, "FORMAT": encode_format(bits, size)}
    label = f"quantize_all{'_cast' * casts}_{bits}_b{size}"
    return label, pack.quantize_all_kernel, constants | rows(6 * size, size), value, {"num_warps": 4}


def unpacked(bits: int, size: int, value: str, everything: bool = False) -> Specimen:
    """Return the kernel that unpacks a run, of kept blocks or where all are."""
    if not everything:
        constants, options = turned(bits, size)
        return f"unpack_{bits}_b{size}", unpack.unpack_kept_kernel, constants, value, options
    _, (_, _, lanes), options = run_tile(64, 4704, size)
    tile = {"B": size, "BLOCK": min(64, tile_width(size)), "LANES": lanes, "FORMAT": encode_format(bits, size)}
    return f"unpack_all_{bits}_b{size}", unpack.unpack_kernel, tile | rows(6 * size, size), value, options


def one_block(bits: int, size: int, value: str) -> list[Specimen]:
    """Return the kernels that store and read rows of one block, as those of a convolution."""
    return [
        (f"{label}_block", kernel, constants | rows(size, size), *others)
        for label, kernel, constants, *others in (whole(bits, size, value), unpacked(bits, size, value, True))
    ]


def decoded(bits: int, size: int, value: str) -> Specimen:
    """Return the kernel that makes stored blocks numbers, and counts."""
    block, blocks = whole_blocks(size)
    constants = {"TILE": 128, "COLS": 16, "B": size, "BLOCK": block, "BLOCKS": blocks}
    constants["FORMAT"] = encode_format(bits, size)
    kernel = linear.count_and_dequantize_kernel
    return f"count_and_dequantize_{bits}_b{size}", kernel, constants, value, {"num_warps": 4}


if __name__ == "__main__":
    print_records(specimens)
