"""Normalisation layers that keep their input quantized, beside torch's own, on one GPU.

    python examples/benchmarks/norms.py

Time of forward (`forward_us`) and backward (`backward_us`, gradients of input, weight and bias), and the bytes kept for
backward (`kept_bytes`), of torch's own kernels ("dense") and of each format. GPU time by CUDA graph,
inputs rotated through several times the L2 cache, medians. `host_us`: what forward and backward of the module cost the
host.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import environment, require_gpu, write_records
from examples.benchmarks.summaries import Records, Summary, groups
from examples.benchmarks.timing import gpu_us
from examples.benchmarks.vocabulary import BITS
from lightning_actprune import Keep, convert
from lightning_actprune.operators.norm import NormFunction, NormSetting, _gradients

CASES = [
    ("layer_norm", 128 * 197, 768, "float32"),
    ("layer_norm", 64 * 196, 384, "float32"),
    ("rms_norm", 8192, 4096, "bfloat16"),
]
"""Operator, rows, length, dtype: ViT-B/16 and a small ResMLP under autocast, a language model in bf16."""
FORMATS = ("dense", "int8", "int4", "int2")
BLOCK_SIZE, EPS = 32, 1e-6
SEVERAL_CACHES = 200 * 2**20
"""Bytes of inputs that are rotated through."""


Tensors = list[Tensor]
Parameters = tuple[Tensor, Tensor | None]
"""Weight and bias; RMS norm has no bias."""


def inputs(case: tuple[str, int, int, str]) -> tuple[Tensors, Tensors, Parameters]:
    """Return inputs and gradients of a case, together several times the L2 cache, and the parameters."""
    operator, rows, length, name = case
    dtype = getattr(torch, name)
    count = max(2, -(-SEVERAL_CACHES // (rows * length * dtype.itemsize)))
    xs, grads = ([torch.randn(rows, length, device="cuda", dtype=dtype) for _ in range(count)] for _ in range(2))
    weight, bias = torch.randn(2, length, device="cuda", dtype=dtype)
    return xs, grads, (weight, bias if operator == "layer_norm" else None)


def measure(case: tuple[str, int, int, str], value_format: str) -> dict[str, Any]:
    """Return the figures of one way to keep the inputs of a case."""
    xs, grads, parameters = inputs(case)
    calls = dense(xs, *parameters) if value_format == "dense" else quantized(xs, *parameters, BITS[value_format])
    forward, backward, kept = calls
    return {
        "forward_us": round(gpu_us([functools.partial(forward, x) for x in xs]), 2),
        "backward_us": round(gpu_us([functools.partial(backward, *pair) for pair in zip(grads, kept, strict=True)]), 2),
        "kept_bytes": sum(tensor.nbytes for tensor in kept[0]),
        "host_us": round(host_us(case, value_format), 1),
    }


Calls = tuple[Callable[[Tensor], Any], Callable[[Tensor, Tensors], Any], list[Tensors]]
"""Forward of an input, backward of a gradient and what was kept, and what is kept of each input."""


def dense(xs: Tensors, weight: Tensor, bias: Tensor | None) -> Calls:
    """Return torch's own kernels, called as autograd calls them (RMS norm: from torch 2.9 on)."""
    shape, aten = list(xs[0].shape[1:]), torch.ops.aten
    if bias is None:
        forward = functools.partial(aten._fused_rms_norm, normalized_shape=shape, weight=weight, eps=EPS)

        def backward(grad: Tensor, kept: Tensors) -> Any:
            return aten._fused_rms_norm_backward(grad, kept[0], shape, kept[1], weight, [True, True])

    else:
        forward = functools.partial(aten.native_layer_norm, normalized_shape=shape, weight=weight, bias=bias, eps=EPS)

        def backward(grad: Tensor, kept: Tensors) -> Any:
            return aten.native_layer_norm_backward(grad, kept[0], shape, *kept[1:], weight, bias, [True, True, True])

    return forward, backward, [[x, *forward(x)[1:]] for x in xs]


class Context(list[Tensor]):
    """Stands for what autograd hands on from forward to backward; its items are the tensors kept of an input."""

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing: all gradients are there."""

    def save_for_backward(self, values: Tensor, rstd: Tensor, weight: Tensor) -> None:
        """Take what is saved, of which the weight is there anyway."""
        self[:] = values, rstd
        self.saved_tensors = values, rstd, weight


def quantized(xs: Tensors, weight: Tensor, bias: Tensor | None, bits: int) -> Calls:
    """Return the layer that keeps so many bits, without autograd."""
    shape, setting = tuple(weight.shape), NormSetting(bias is not None, False, EPS, BLOCK_SIZE, bits)

    def forward(x: Tensor, context: Any = None) -> Tensor:
        context = Context() if context is None else context
        return NormFunction.forward(context, x, weight, bias, None, shape, setting, x.dtype, True)

    def backward(grad: Tensor, kept: Tensors) -> Any:
        return _gradients(kept, grad, True, bias is not None, True)

    contexts: list[Tensors] = [Context() for _ in xs]
    for x, context in zip(xs, contexts, strict=True):
        forward(x, context)
    return forward, backward, contexts


def host_us(case: tuple[str, int, int, str], value_format: str, calls: int = 1000) -> float:
    """Return what forward and backward of a module cost the host, of an input so small that it never waits."""
    operator, _, length, name = case
    dtype = getattr(torch, name)
    layer = (nn.LayerNorm if operator == "layer_norm" else nn.RMSNorm)(length, device="cuda", dtype=dtype)
    if value_format != "dense":
        convert(layer, rules={"type:norm": Keep(BITS[value_format], block_size=BLOCK_SIZE)})
    x = torch.randn(8, length, device="cuda", dtype=dtype, requires_grad=True)
    grad_y, leaves, start = torch.randn_like(x), (x, *layer.parameters()), 0.0
    for number in range(calls + 100):
        if number == 100:
            torch.cuda.synchronize()
            start = time.perf_counter()
        torch.autograd.grad(layer(x), leaves, grad_y)
    return (time.perf_counter() - start) / calls * 1e6


def summary(records: Records, figure: str, title: str) -> Summary:
    """Return a figure of all formats, and over that of the dense layer in brackets."""
    rows = []
    for case, group in groups(records, "operator", "rows", "length", "dtype").items():
        found = {record["value_format"]: record[figure] for record in group}
        cells = [f"{found[name]:.1f} ({found[name] / found['dense']:.2f})" for name in found]
        rows.append(["{} [{}, {}] {}".format(*case), *cells])
    names = list(dict.fromkeys(record["value_format"] for record in records))
    return Summary(title, ("case", *names), rows)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))))
    parser.add_argument("--out", type=Path, default=Path("norms.json"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measure everything, write records and print tables."""
    args = parse(argv)
    require_gpu()
    records: list[dict[str, Any]] = []
    for number, value_format in itertools.product(args.cases, FORMATS):
        head = dict(zip(("operator", "rows", "length", "dtype"), CASES[number], strict=True))
        head |= {"value_format": value_format, "block_size": BLOCK_SIZE}
        records.append({**head, **measure(CASES[number], value_format), **environment()})
        write_records(args.out, records)
    console = Console(width=160)
    for figure in ("forward_us", "backward_us", "host_us", "kept_bytes"):
        console.print(summary(records, figure, f"{figure} (over dense)").rich())


if __name__ == "__main__":
    main()
