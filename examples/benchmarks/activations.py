"""Activation functions with their derivative quantized, beside those of torch, on one GPU.

    python examples/benchmarks/activations.py

GPU time of forward (`forward_us`) and of backward (`backward_us`) by CUDA graph, inputs rotated through several times
the L2 cache, medians. The torch of a function is its own operator, which keeps the input (of ReLU the output) for
backward. `kept_bytes` is what is kept for backward of each value.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import environment, require_gpu, write_records
from examples.benchmarks.summaries import Records, Summary, groups
from examples.benchmarks.timing import gpu_us
from examples.benchmarks.vocabulary import BITS
from lightning_actprune.operators.activation import ACTIVATIONS, StoredDerivative, activate_eagerly, activation_grad

SHAPES = [(128, 197, 3072), (16384, 11008)]
"""The MLP of a ViT-B at batch 128, and that of a 7B language model with 16384 tokens."""
DTYPES = ["bfloat16", "float32"]
FORMAT_NAMES = ("int8", "int4", "int3", "int2")
FUNCTIONS = ["gelu", "gelu_tanh", "silu", "relu"]
ROTATED_BYTES = 2**28
"""What the inputs are together, at least: five times the L2 cache of an H200."""

aten = torch.ops.aten
DENSE_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": aten.gelu_backward,
    "gelu_tanh": functools.partial(aten.gelu_backward, approximate="tanh"),
    "silu": aten.silu_backward,
    "relu": functools.partial(aten.threshold_backward, threshold=0),
}
"""What autograd calls with `g` and what was kept."""


def measure(pairs: list[tuple[Tensor, Tensor]], function: str, value_format: str) -> dict[str, Any]:
    """Return the figures of one function; `dense`: as torch has it."""
    x = pairs[0][0]
    if value_format == "dense":
        forward = ACTIVATIONS[function].forward
        backward = [functools.partial(DENSE_BACKWARD[function], g, x) for x, g in pairs]
        kept_bytes = float(x.element_size())
        return times([functools.partial(forward, x) for x, _ in pairs], backward, kept_bytes)
    stored = StoredDerivative(function, (), BITS[value_format])
    calls = [functools.partial(activate_eagerly, x, stored, x.dtype) for x, _ in pairs]
    codes = [call()[1] for call in calls]
    backward = [
        functools.partial(activation_grad, g, c, x.stride(), stored, x.dtype, True)
        for (x, g), c in zip(pairs, codes, strict=True)
    ]
    return times(calls, backward, codes[0].nbytes / x.numel())


def times(forward: list[Callable[[], Any]], backward: list[Callable[[], Any]], kept_bytes: float) -> dict[str, Any]:
    """Return the time of a call each way, and what is kept of a value."""
    figures = {"forward_us": round(gpu_us(forward), 2), "backward_us": round(gpu_us(backward), 2)}
    return {**figures, "kept_bytes": round(kept_bytes, 4)}


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return as many `x` and `g` as it takes to be larger than the L2 cache."""
    count = max(2, math.ceil(ROTATED_BYTES / (math.prod(shape) * dtype.itemsize)))
    return [tuple(torch.randn(2, *shape, device="cuda", dtype=dtype)) for _ in range(count)]


def formats_of(function: str) -> tuple[str, ...]:
    """Return the ways to keep the derivative of a function."""
    return ("dense", "int4") if ACTIVATIONS[function].exact else ("dense", *FORMAT_NAMES)


def summary(records: Records, figure: str, title: str) -> Summary:
    """Return the times of a figure, and over that of torch; of an exact function, one bit stands where int4 does."""
    names = ["dense", *FORMAT_NAMES]
    rows = []
    for (function, shape, dtype), group in groups(records, "function", "shape", "dtype").items():
        by_name = {record["value_format"]: record[figure] for record in group}
        cells = [
            f"{by_name[name]:.1f} ({by_name[name] / by_name['dense']:.2f})" if name in by_name else "-"
            for name in names
        ]
        rows.append([f"{function}, {' x '.join(map(str, shape))}, {dtype}", *cells])
    return Summary(title, ("case", *names), rows)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", nargs="+", default=FUNCTIONS, choices=FUNCTIONS)
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--shapes", type=int, nargs="+", default=list(range(len(SHAPES))))
    parser.add_argument("--out", type=Path, default=Path("activations.json"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measure everything, write records and print tables."""
    args = parse(argv)
    require_gpu()
    start, records = time.perf_counter(), []
    for number, dtype in itertools.product(args.shapes, args.dtypes):
        pairs = inputs(SHAPES[number], getattr(torch, dtype))
        for function in args.functions:
            head = {"function": function, "shape": list(SHAPES[number]), "dtype": dtype}
            for value_format in formats_of(function):
                figures = measure(pairs, function, value_format)
                records.append({**head, "value_format": value_format, **figures, **environment()})
        write_records(args.out, records)
        del pairs
    report(records, Console(width=160))
    print(f"Measured in {time.perf_counter() - start:.0f} s; wrote {args.out}")


def report(records: Records, console: Console) -> None:
    """Print the tables."""
    console.print(summary(records, "forward_us", "Forward, us (over torch)").rich())
    console.print(summary(records, "backward_us", "Backward, us (over torch)").rich())


if __name__ == "__main__":
    main()
