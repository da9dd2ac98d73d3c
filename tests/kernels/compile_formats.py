"""Compile the kernels that quantise, or read what is quantised, for real GPUs without one; see ``compile_only``."""

from __future__ import annotations

import itertools

from lightning_actprune.kernels import columns, pack, pack_sample, quantize_all, quantize_kept, unpack
from lightning_actprune.kernels.formats import encode_format, tile_width, whole_blocks
from lightning_actprune.kernels.ranks import choose_turns
from tests.kernels.compile_only import UNSCALED, Specimen, print_records, rows

CASES = [("int4", 32), ("int4", 64), ("int2", 32), ("int2", 64), ("int8", 32), ("int3", 32), ("fp8", 32)]
CASES += [("int4", 24), ("int4", 128), ("int4", 256), ("int2", 16)]
"""Formats and block sizes; of 24, a quarter of the tile is masked."""
WIDE = ("int4", 1024)
"""The largest block, which no weight gradient reads as numbers alone."""
SPARSE = [64, 1000]
"""Block sizes at which next to nothing is kept."""
SAMPLES = [("int4", 32, 2352), ("int4", 32, 9408), ("int2", 64, 9408), ("fp8", 32, 9408)]
"""Format, block size and blocks of a sample that is packed in one launch: one of each number of warps."""


def specimens() -> list[Specimen]:
    """Return what the launch functions use."""
    found = []
    for (name, size), value in itertools.product((*CASES, WIDE), ("bf16", "fp32")):
        found.extend(quantize(name, size, value))
        found.append(unpacked(name, size, value))
    for (name, size), value in itertools.product(CASES, ("bf16", "fp32")):
        found.append(decoded(name, size, value))
        found.append(whole(name, size, value))
    found.append(whole("int4", 32, "bf16", casts=True))
    found.append(unpacked("int4", 32, "bf16", everything=True))
    found.extend(one_block("int4", 32, "bf16"))
    found.extend(sparse(size, value) for size, value in itertools.product(SPARSE, ("bf16", "fp32")))
    for (name, size, blocks), value in itertools.product(SAMPLES, ("bf16", "fp32")):
        found.append(sample(name, size, blocks, value))
    return found


def quantize(name: str, size: int, value: str) -> list[Specimen]:
    """Return the kernel that packs the kept blocks of a run, as they are and scaled."""
    constants, options = turned(name, size)
    return [
        (f"quantize_{name}_b{size}", quantize_kept.quantize_kernel, constants | UNSCALED, value, options),
        (f"quantize_scaled_{name}_b{size}", quantize_kept.quantize_kernel, constants, value, options),
    ]


def turned(
    name: str, size: int, kept: float = 51.2, length: int | None = None
) -> tuple[dict[str, int], dict[str, int]]:
    """Return constants and options of the kernels that find kept blocks by rank: so many of 128, by default at .6."""
    _, (_, _, lanes), _ = pack.run_tile(64, 4704, size)
    turns = choose_turns(tile_width(size), kept)
    tile = {"B": size, "BLOCK": tile_width(size), "TILE": turns.tile, "PARTS": turns.parts, "LANES": lanes}
    stored = tile | {"FORMAT": encode_format(name, size)}
    return stored | rows(length or 6 * size, size), {"num_warps": turns.warps}


def sparse(size: int, value: str) -> Specimen:
    """Return the kernel that unpacks a run with few kept blocks and rows that are not aligned."""
    constants, options = turned("int4", size, 6.4, 6 * size + 6)
    return f"sparse_unpack_int4_b{size}", unpack.unpack_kept_kernel, constants, value, options


def whole(name: str, size: int, value: str, casts: bool = False) -> Specimen:
    """Return the kernel that stores all blocks."""
    block, tile = whole_blocks(size)
    constants = {"CAST": casts, "B": size, "BLOCK": block, "TILE": tile, "FORMAT": encode_format(name, size)}
    label = f"quantize_all{'_cast' * casts}_{name}_b{size}"
    return label, quantize_all.quantize_all_kernel, constants | rows(6 * size, size), value, {"num_warps": 4}


def unpacked(name: str, size: int, value: str, everything: bool = False) -> Specimen:
    """Return the kernel that unpacks a run, of kept blocks or where all are."""
    if not everything:
        constants, options = turned(name, size)
        return f"unpack_{name}_b{size}", unpack.unpack_kept_kernel, constants, value, options
    _, (_, _, lanes), options = pack.run_tile(64, 4704, size)
    tile = {"B": size, "BLOCK": min(64, tile_width(size)), "LANES": lanes, "FORMAT": encode_format(name, size)}
    return f"unpack_all_{name}_b{size}", unpack.unpack_kernel, tile | rows(6 * size, size), value, options


def one_block(name: str, size: int, value: str) -> list[Specimen]:
    """Return the kernels that store and read rows of one block, as ``ops.ranked_blocks`` has them."""
    return [
        (f"{label}_block", kernel, constants | rows(size, size), *others)
        for label, kernel, constants, *others in (whole(name, size, value), unpacked(name, size, value, True))
    ]


def decoded(name: str, size: int, value: str) -> Specimen:
    """Return the kernel that makes stored blocks numbers, and counts."""
    block, blocks = whole_blocks(size)
    constants = {"TILE": 128, "COLS": 16, "B": size, "BLOCK": block, "BLOCKS": blocks}
    constants["FORMAT"] = encode_format(name, size)
    kernel = columns.count_and_dequantize_kernel
    return f"count_and_dequantize_{name}_b{size}", kernel, constants, value, {"num_warps": 4}


def sample(name: str, size: int, blocks: int, value: str) -> Specimen:
    """Return the kernel that packs a sample in one launch, the keys in the values."""
    config, itemsize = pack_sample.choose_config(blocks), 4 if value == "fp32" else 2
    constants = config.constants(blocks, size, itemsize, itemsize, encode_format(name, size))
    constants |= rows(48 * size, size) | {"CAST": False, "SELECT": 0}
    return f"sample_{name}_b{size}", pack_sample.pack_sample_kernel, constants, value, {"num_warps": config.warps}


if __name__ == "__main__":
    print_records(lambda target: specimens())
