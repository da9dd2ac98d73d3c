"""Weight gradients from few bits on one GPU: unpacked to bf16 for cuBLAS, or to e4m3 for `torch._scaled_mm`.

    python benchmarks/bench_fp8.py

An 8-bit product needs both factors with their rows (tokens) last, and scales. Nothing is kept from the step before:
each row of the gradient is divided by its largest value, and the same row of the input is multiplied by it. So three
passes precede the product: one reads the gradient and finds these values, one rounds and turns the gradient, and one
unpacks, rounds and turns the input. README.md says what the fields mean; times are microseconds of a block of the
model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_kernels import DEVICE, rotated, timed
from benchmarks.common import Record, RecordFile, environment, parser_for, require, show
from lightning_actprune.kernels.formats import _scale_and_start, dequantize_tile, encode_format, headers_of

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
SIZE, BITS, LARGEST = 32, 2, tl.constexpr(416.0)
"""Values of a stored block, bits of one, and the largest value of a factor: rounding up keeps it below e4m3's 448."""


# === Kernels ==========================================================================================


@triton.jit
def rows_kernel(
    g_ptr, values_ptr, most_ptr, bounds_ptr, rows, OUT: tl.constexpr, IN: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """Write the largest value of 8 rows of the gradient ``g_ptr: [rows, OUT]`` to ``most_ptr: [rows]``.

    ``bounds_ptr`` gets a bound of their products with the values of the same rows of the input, for each program.
    """
    r = tl.program_id(0) * 8 + tl.arange(0, 8)
    inside, lane, largest = (r < rows)[:, None], tl.arange(0, 512), tl.zeros([8, 512], tl.float32)
    for first in range(0, OUT, 512):
        c = first + lane[None, :]
        g = tl.load(g_ptr + r.to(tl.int64)[:, None] * OUT + c, mask=inside & (c < OUT), other=0.0)
        largest = tl.maximum(largest, tl.abs(g.to(tl.float32)))
    most = tl.max(largest, axis=1)
    tl.store(most_ptr + r, most, mask=r < rows)
    BITS_OF: tl.constexpr = (FORMAT >> 4 & 15) + (FORMAT & 15)
    largest = tl.zeros([8, 512], tl.float32)
    for first in range(0, IN // 32, 512):
        n = first + lane[None, :]
        stored = inside & (n < IN // 32)
        place = r[:, None] * (IN // 32) + n
        header = tl.load(headers_of(values_ptr, rows * (IN // 32), place, FORMAT), mask=stored, other=0)
        scale, start = _scale_and_start(header.to(tl.int32), BITS_OF)
        ends = tl.maximum(tl.abs(start + scale * (1 << BITS_OF)), tl.abs(start + scale * (2 << BITS_OF)))
        largest = tl.maximum(largest, tl.where(stored, ends, 0.0))
    tl.store(bounds_ptr + tl.program_id(0), tl.max(tl.max(largest, axis=1) * most, axis=0))


@triton.jit
def turn_gradient_kernel(g_ptr, most_ptr, out_ptr, rows, padded, OUT: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Write a tile of the turned gradient to ``out_ptr: [OUT, padded]``, its rows divided by their largest values."""
    r, column = tl.program_id(0) * R + tl.arange(0, R // 4) * 4, tl.program_id(1) * C
    word = _gradient_byte(g_ptr, most_ptr, r, column, rows, OUT, C)
    for n in tl.static_range(1, 4):
        word |= _gradient_byte(g_ptr, most_ptr, r + n, column, rows, OUT, C) << 8 * n
    _store_words(word, out_ptr, r, column, padded, OUT)


@triton.jit
def _gradient_byte(g_ptr, most_ptr, r, column, rows, OUT: tl.constexpr, C: tl.constexpr):
    """Return values in e4m3, as the lowest bits of integers. A random part of a last place makes the mean right."""
    c, inside = column + tl.arange(0, C), r < rows
    stored = inside[:, None] & (c < OUT)[None, :]
    g = tl.load(g_ptr + r.to(tl.int64)[:, None] * OUT + c[None, :], mask=stored, other=0.0)
    most = tl.load(most_ptr + r, mask=inside, other=0.0)
    x = g.to(tl.float32) * tl.where(most > 0, LARGEST / most, 0.0)[:, None]
    h = (r * -1640531527)[:, None] + (c * 1013904223)[None, :]
    noise = (((h >> 9) & 0x7FFFFF) | 0x3E000000).to(tl.float32, bitcast=True)  # in [1/8, 1/4)
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.maximum(power, 2.0**-6)
    return _as_byte(tl.fma(noise, power, tl.fma(power, -3 / 16, x)))


@triton.jit
def _as_byte(x):
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def _store_words(word, out_ptr, r, column, padded, L):
    """Write the bytes of four rows at a time to ``out_ptr: [L, padded]``."""
    c = column + tl.arange(0, word.shape[1])
    words_ptr = out_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + c.to(tl.int64)[None, :] * (padded // 4)
    tl.store(words_ptr + (r // 4)[:, None], word, mask=(r < padded)[:, None] & (c < L)[None, :])


@triton.jit
def turn_input_kernel(
    values_ptr, most_ptr, bounds_ptr, out_ptr, scale_ptr, rows, padded, count, IN: tl.constexpr, R: tl.constexpr,
    FORMAT: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Write ``R`` rows of a column of blocks to ``out_ptr: [IN, padded]``, multiplied by the gradient's values.

    Stored values have random errors already, so they are rounded to nearest. ``scale_ptr`` gets the root of the scale.
    """
    n = tl.arange(0, COUNT)
    bound = tl.max(tl.load(bounds_ptr + n, mask=n < count, other=0.0), axis=0)
    factor = tl.where(bound > 0, LARGEST / bound, 0.0)
    r = tl.program_id(0) * R + tl.arange(0, R // 4) * 4
    word = _input_byte(values_ptr, most_ptr, factor, r, rows, IN, FORMAT)
    for n in tl.static_range(1, 4):
        word |= _input_byte(values_ptr, most_ptr, factor, r + n, rows, IN, FORMAT) << 8 * n
    _store_words(word, out_ptr, r, tl.program_id(1) * 32, padded, IN)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(scale_ptr, tl.sqrt(bound) / LARGEST)


@triton.jit
def _input_byte(values_ptr, most_ptr, factor, r, rows, IN: tl.constexpr, FORMAT: tl.constexpr):
    inside, place = r < rows, r * (IN // 32) + tl.program_id(1)
    x = dequantize_tile(values_ptr, rows * (IN // 32), place, inside, 0, 32, 32, FORMAT, True)
    return _as_byte(x * (tl.load(most_ptr + r, mask=inside, other=0.0) * factor)[:, None])


# === Calls ============================================================================================


class Case(NamedTuple):
    """A layer, and memory for what it turns: rows are padded to a multiple of 16.

    Args:
        g: ``[rows, outputs]``, the gradient.
        x: ``[rows, inputs]``, the input.
        values: The bytes of the input.
        g8: ``[outputs, padded]``, the turned gradient.
        x8: ``[inputs, padded]``, the turned input.
        most: ``[rows]``, the largest values of the gradient's rows.
        bounds: Bounds of products, one of each program.
        scale: The root of the scale of the product.
    """

    g: Tensor
    x: Tensor
    values: Tensor
    g8: Tensor
    x8: Tensor
    most: Tensor
    bounds: Tensor
    scale: Tensor

    def find_rows(self) -> None:
        """Find the largest values and the bounds."""
        (rows, outputs), length = self.g.shape, self.x.shape[1]
        out = self.most, self.bounds, rows, outputs, length, encode_format(BITS, SIZE)
        rows_kernel[(len(self.bounds),)](self.g, self.values, *out, num_warps=8)

    def turn_gradient(self) -> None:
        """Write the turned gradient."""
        (rows, outputs), padded = self.g.shape, self.g8.shape[1]
        grid = -(-padded // 32), -(-outputs // 256)
        turn_gradient_kernel[grid](self.g, self.most, self.g8, rows, padded, outputs, 32, 256, num_warps=8)

    def turn_input(self) -> None:
        """Write the turned input and the scale."""
        (rows, length), padded, count = self.x.shape, self.x8.shape[1], len(self.bounds)
        numbers = rows, padded, count, length, 256, encode_format(BITS, SIZE), triton.next_power_of_2(count)
        turn_input_kernel[-(-padded // 256), length // 32](
            self.values, self.most, self.bounds, self.x8, self.scale, *numbers, num_warps=2
        )

    def multiply(self) -> Tensor:
        """Return the gradient ``[outputs, inputs]`` of the turned factors."""
        scales = self.scale, self.scale
        return torch._scaled_mm(self.g8, self.x8.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=False)

    def unpack(self) -> Tensor:
        """Return the stored input ``[rows, inputs]``."""
        how = *self.x.shape, SIZE, BITS, self.x.dtype
        dense: Tensor = torch.ops.actprune.dequantize(self.values, *how)
        return dense


def case_of(g: Tensor, x: Tensor) -> Case:
    """Return a case with an input that is packed."""
    rows, padded = len(g), -(-len(g) // 16) * 16
    values = torch.ops.actprune.quantize(x[None], SIZE, BITS)
    g8, x8 = (torch.empty(each.shape[1], padded, device=DEVICE, dtype=torch.float8_e4m3fn) for each in (g, x))
    most, bounds, scale = (torch.empty(size, device=DEVICE) for size in ((rows,), (-(-rows // 8),), ()))
    return Case(g, x, values, g8, x8, most, bounds, scale)


@cache
def measure_layer(rows: int, length: int, outputs: int) -> Record:
    """Return the times of all parts, and the error of the 8-bit product against an exact one of the stored input."""
    cases = [[case_of(g, x)] for g, x in rotated((rows, outputs), (rows, length), dtype="bfloat16")]
    parts = Case.unpack, Case.find_rows, Case.turn_gradient, Case.turn_input, Case.multiply
    figures: Record = {"mm_us": timed(lambda case: case.g.t() @ case.x, cases)}
    figures.update({f"{part.__name__}_us": timed(part, cases) for part in parts})
    ((case,), *_) = cases
    exact = case.g.t().double() @ case.unpack().double()
    error = (case.multiply().double() - exact).norm() / exact.norm()
    return {"inputs": length, "outputs": outputs, **figures, "error": round(float(error), 4)}


def total(layers: Sequence[Record], *names: str) -> float:
    """Return the sum of times of layers."""
    return round(float(sum(layer[f"{name}_us"] for layer in layers for name in names)), 1)


def measure(rows: int, inputs: Inputs) -> Record:
    """Return the times of the weight gradients of a block."""
    layers = [measure_layer(rows, length, each) for length, outputs in inputs for each in outputs]
    read = [measure_layer(rows, length, outputs[0]) for length, outputs in inputs]
    turned = "turn_gradient", "turn_input", "multiply"
    return {
        "bf16_us": round(total(read, "unpack") + total(layers, "mm"), 1),
        "fp8_us": total(layers, "find_rows", *turned),
        "joined_us": total(layers, *turned),
        "product_us": total(layers, "multiply"),
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
    columns = "model rows blocks bf16_us fp8_us joined_us product_us"
    show("microseconds a block", list(file.records.values()), columns.split())


if __name__ == "__main__":
    main()
