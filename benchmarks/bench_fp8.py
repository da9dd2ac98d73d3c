"""Weight gradients from 2 bits on one GPU: unpacked to bf16 for cuBLAS, or to e4m3 for `torch._scaled_mm`.

    python benchmarks/bench_fp8.py

An 8-bit product needs both factors with their rows (tokens) last. So the input is unpacked turned, and the gradient is
cast and turned, each in one pass that also rounds with mean zero. Factors have one scale (`tensor`), one for each
feature (`row`), or one for each feature and 128 rows, which the same pass finds (`block`). README.md says what the
fields mean; times are microseconds of a block of the model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_kernels import DEVICE, rotated, timed
from benchmarks.common import Record, RecordFile, environment, parser_for, require, show
from lightning_actprune.codec.packed import ALL_BLOCKS
from lightning_actprune.kernels.formats import dequantize_tile, encode_format, mix

Inputs = list[tuple[int, tuple[int, ...]]]
_MLP: Inputs = [(768, (2304,)), (768, (768,)), (768, (3072,)), (3072, (768,))]
MODELS: dict[str, tuple[int, int, Inputs]] = {
    "ViT-B": (128 * 197, 12, _MLP),
    "ResMLP-12": (128 * 196, 12, [(384, (1536,)), (1536, (384,))]),
    "GPT-2": (16 * 1024, 12, _MLP),
    "Llama 1.1B": (10 * 1024, 22, [(2048, (2048, 256, 256)), (2048, (2048,)), (2048, (5632, 5632)), (5632, (2048,))]),
    "Llama 7B": (16 * 1024, 32, [(4096, (4096,) * 3), (4096, (4096,)), (4096, (11008, 11008)), (11008, (4096,))]),
}
"""Rows, number of blocks, and the inputs of a block: their length and the outputs of the layers that share one."""
SIZE, BITS, ROWS = 32, 2, 128
TILES = [(32, 4), (64, 4), (64, 8), (128, 8)]
"""Columns of a tile, and warps."""


@triton.jit
def store_turned(x, out_ptr, scales_ptr, row, column, padded, L: tl.constexpr, SCALED: tl.constexpr):
    """Write ``x [128, COLS]``, whose first row and column are given, to ``out_ptr: [L, padded]`` in e4m3.

    ``scales_ptr: [padded / 128, L]`` gets the scales if ``SCALED``, else it is one number.
    """
    c = column + tl.arange(0, x.shape[1])
    if SCALED:
        most = tl.max(tl.abs(x), axis=0)
        scale = tl.where(most > 0, 448.0 / most, 1.0)
        tl.store(scales_ptr + (row // 128) * L + c, 1 / scale)
        x = x * scale[None, :]
    else:
        x = tl.minimum(tl.maximum(x * tl.load(scales_ptr), -448.0), 448.0)
    # A random part of a last place is added, so that the mean of what is rounded is right.
    r = row + tl.arange(0, 128)
    noise = mix((r[:, None] * L + c[None, :]).to(tl.uint32)).to(tl.int32).to(tl.float32) * 2.0**-32
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    x = tl.where(x == 0, 0.0, x + noise * tl.maximum(power, 2.0**-6) * 2.0**-3)
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    target = out_ptr + c.to(tl.int64)[:, None] * padded + r[None, :]
    tl.store(target, tl.trans(x.to(out_ptr.dtype.element_ty)), mask=(r < padded)[None, :])


@triton.jit
def unpack_turned_kernel(
    values_ptr, out_ptr, scales_ptr, rows, padded, L: tl.constexpr, FORMAT: tl.constexpr, COLS: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Write a tile of the turned input; ``values_ptr``: the bytes of ``rows * L / 32`` blocks."""
    BLOCKS: tl.constexpr = COLS // 32
    lane = tl.arange(0, 128 * BLOCKS)
    r = tl.program_id(0) * 128 + lane // BLOCKS
    place = r * (L // 32) + tl.program_id(1) * BLOCKS + lane % BLOCKS
    x = dequantize_tile(values_ptr, rows * (L // 32), place, r < rows, 0, 32, 32, FORMAT)
    x = tl.reshape(x, [128, COLS])
    store_turned(x, out_ptr, scales_ptr, tl.program_id(0) * 128, tl.program_id(1) * COLS, padded, L, SCALED)


@triton.jit
def turn_kernel(
    g_ptr, out_ptr, scales_ptr, rows, padded, L: tl.constexpr, COLS: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    """Write a tile of the turned gradient; ``g_ptr: [rows, L]``."""
    r = tl.program_id(0) * 128 + tl.arange(0, 128)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    g = tl.load(g_ptr + r.to(tl.int64)[:, None] * L + c[None, :], mask=(r < rows)[:, None], other=0.0).to(tl.float32)
    store_turned(g, out_ptr, scales_ptr, tl.program_id(0) * 128, tl.program_id(1) * COLS, padded, L, SCALED)


def turn(read: Tensor, out: Tensor, scales: Tensor, tile: tuple[int, int]) -> None:
    """Write what `read` holds, stored blocks or a gradient `[rows, L]`, to `out` `[L, padded]`."""
    (length, padded), is_stored = out.shape, read.dtype == torch.uint8
    kernel: Any = unpack_turned_kernel if is_stored else turn_kernel
    rows = len(read) * SIZE // length if is_stored else len(read)
    how = *((encode_format(BITS, SIZE),) if is_stored else ()), tile[0], scales.numel() > 1
    kernel[padded // ROWS, length // tile[0]](read, out, scales, rows, padded, length, *how, num_warps=tile[1])


def turned(rows: int, length: int, scaled: bool) -> tuple[Tensor, Tensor]:
    """Return memory for a turned factor and its scales."""
    padded = -(-rows // ROWS) * ROWS
    dtype = torch.float8_e4m3fn if DEVICE == "cuda" else torch.float32
    out = torch.empty(length, padded, device=DEVICE, dtype=dtype)
    return out, torch.ones(padded // ROWS, length, device=DEVICE) if scaled else torch.ones((), device=DEVICE)


def quickest(arguments: Sequence[Any]) -> float:
    """Return the time of turning with the tile that is best for it."""
    length = arguments[0][1].shape[0]
    return min(timed(partial(turn, tile=tile), arguments) for tile in TILES if length % tile[0] == 0)


def product(g: Tensor, x: Tensor, scales: tuple[Tensor, Tensor]) -> Tensor:
    """Return the gradient `[outputs, inputs]` of turned factors `g` `[outputs, rows]` and `x` `[inputs, rows]`."""
    return torch._scaled_mm(g, x.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=False)


def measure_input(rows: int, length: int) -> Record:
    """Return the times of what a product needs from its input, once for all layers that share it."""
    xs = [x for (x,) in rotated((1, rows, length), dtype="bfloat16")]
    packed = [torch.ops.actprune.pack(x, SIZE, ALL_BLOCKS, BITS) for x in xs]
    how = rows, length, SIZE, BITS, torch.bfloat16
    figures = {"unpack_us": timed(lambda *parts: torch.ops.actprune.unpack(*parts, *how), packed)}
    for scaled, name in enumerate(("unpack_turned_us", "unpack_turned_block_us")):
        figures[name] = quickest([(values, *turned(rows, length, bool(scaled))) for values, *_ in packed])
    return figures


def measure_layer(rows: int, length: int, outputs: int) -> Record:
    """Return the times of products and of what they need from the gradient, and the error of one with blocks."""
    pairs = rotated((rows, outputs), (rows, length), dtype="bfloat16")
    figures: Record = {"bf16_us": timed(lambda g, x: g.t() @ x, pairs)}
    for scaled, name in enumerate(("turn_us", "turn_block_us")):
        figures[name] = quickest([(g, *turned(rows, outputs, bool(scaled))) for g, _ in pairs])
    eight = []
    for g, x in pairs:
        factors = [turned(rows, size, scaled=True) for size in (outputs, length)]
        for (out, scales), each in zip(factors, (g, x), strict=True):
            turn(each, out, scales, TILES[0])
        eight.append([part for factor in factors for part in factor])
    one = torch.ones((), device=DEVICE)
    columns = torch.ones(outputs, 1, device=DEVICE), torch.ones(1, length, device=DEVICE)
    figures["write_us"] = timed(lambda g, *_: g.view(torch.uint8).zero_(), [[each[0].clone()] for each in eight])
    figures["tensor_us"] = timed(lambda g, _, x, __: product(g, x, (one, one)), eight)
    figures["row_us"] = timed(lambda g, _, x, __: product(g, x, columns), eight)
    figures["block_us"] = timed(lambda g, s, x, t: product(g, x, (s.t(), t)), eight)
    (g, x), (g8, s, x8, t) = pairs[0], eight[0]
    exact = g.t().double() @ x.double()
    error = (product(g8, x8, (s.t(), t)).double() - exact).norm() / exact.norm()
    return {**figures, "block_error": round(float(error), 5)}


def total(inputs: Sequence[Record], layers: Sequence[Record], *names: str) -> float:
    """Return the sum of fields of the inputs and layers of a block."""
    return round(float(sum(part.get(name, 0.0) for part in (*inputs, *layers) for name in names)), 1)


def measure(rows: int, inputs: Inputs) -> Record:
    """Return the times of the weight gradients of a block."""
    read = [{"inputs": length, **measure_input(rows, length)} for length, _ in inputs]
    sizes = [(length, each) for length, outputs in inputs for each in outputs]
    layers = [{"inputs": length, "outputs": each, **measure_layer(rows, length, each)} for length, each in sizes]
    return {
        "bf16_us": total(read, layers, "unpack_us", "bf16_us"),
        "tensor_us": total(read, layers, "unpack_turned_us", "turn_us", "tensor_us"),
        "row_us": total(read, layers, "unpack_turned_us", "turn_us", "row_us"),
        "block_us": total(read, layers, "unpack_turned_block_us", "turn_block_us", "block_us"),
        "joined_us": total(read, layers, "unpack_turned_us", "write_us", "tensor_us"),
        "read": read,
        "layers": layers,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the file lacks, and print a table."""
    args = parser_for(__doc__, "fp8").parse_args(argv)
    require(DEVICE == "cuda", False)
    file, facts = RecordFile(args.out, ("model",), args.again), environment()
    for model, (rows, blocks, inputs) in MODELS.items():
        head = {"model": model, "rows": rows, "blocks": blocks}
        if file.lacks(head):
            file.add({**head, **measure(rows, inputs), **facts})
    columns = "model rows blocks bf16_us tensor_us row_us block_us joined_us"
    show("microseconds a block", list(file.records.values()), columns.split())


if __name__ == "__main__":
    main()
