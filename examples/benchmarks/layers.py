"""The linear layers of a training step one by one: what pruning adds to each on the GPU, and the least it could add.

    python examples/benchmarks/layers.py --out layers.json

For every kind of converted layer (same input shape and strides, same outputs): GPU time of forward and backward, dense
and pruned, and of a device copy of the input. From the copy follows ``bytes_us``, the time of the bytes that pruning
cannot avoid moving where the weight gradient is a dense product: read the input and write its kept part in forward,
read that and write the input in backward; with density ``d`` that is ``1 + d`` copies (a copy reads and writes). What
``pruned_us - dense_us`` is above it is overhead; a step whose allowance is below its sum cannot be had this way.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import environment, require_gpu, write_records
from examples.benchmarks.step import MODELS, build
from examples.benchmarks.timing import gpu_us
from lightning_actprune import functional as pruned
from lightning_actprune.nn import ActivationPrunedLinear

CACHE_BYTES = 200 << 20
"""Inputs are rotated through several times the L2 cache."""

Kind = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape and strides of a layer's input, and its outputs."""


def kinds(name: str, args: argparse.Namespace) -> Counter[Kind]:
    """Return how many pruned layers of each kind a model has."""
    model_name, batch, precision = MODELS[name]
    model, _ = build(model_name, "pruned", args.sparsity, args.block_size)
    found: Counter[Kind] = Counter()

    def note(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        x = inputs[0]
        found[tuple(x.shape), tuple(x.stride()), output.shape[-1]] += 1

    for layer in model.modules():
        if isinstance(layer, ActivationPrunedLinear):
            layer.register_forward_hook(note)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16-mixed"):
        model(torch.randn(batch, 3, 224, 224, device="cuda"))
    return found


def measure(kind: Kind, dtype: torch.dtype, args: argparse.Namespace) -> dict[str, float]:
    """Return the times of one kind of layer."""
    shape, strides, outputs = kind
    weight = torch.randn(outputs, shape[-1], device="cuda", dtype=dtype, requires_grad=True)
    bias = torch.randn(outputs, device="cuda", dtype=dtype, requires_grad=True)
    count = max(2, CACHE_BYTES // (torch.Size(shape).numel() * dtype.itemsize))
    xs = [
        torch.empty_strided(shape, strides, device="cuda", dtype=dtype).normal_().requires_grad_() for _ in range(count)
    ]
    grad = torch.randn(*shape[:-1], outputs, device="cuda", dtype=dtype)

    def dense(x: Tensor) -> Any:
        return torch.autograd.grad(F.linear(x, weight, bias), (x, weight, bias), grad)

    def ours(x: Tensor) -> Any:
        y = pruned.linear(x, weight, bias, sparsity=args.sparsity, block_size=args.block_size)
        return torch.autograd.grad(y, (x, weight, bias), grad)

    return {
        "dense_us": round(gpu_us([lambda x=x: dense(x) for x in xs]), 2),
        "pruned_us": round(gpu_us([lambda x=x: ours(x) for x in xs]), 2),
        "copy_us": round(gpu_us([lambda x=x: x.detach().clone() for x in xs]), 2),
    }


def summary(records: list[dict[str, Any]]) -> Table:
    """Return the sums over a step's layers."""
    table = Table("model", "precision", "layers", "dense ms", "pruned - dense ms", "bytes alone ms")
    for model, precision in dict.fromkeys((r["model"], r["precision"]) for r in records):
        rows = [r for r in records if (r["model"], r["precision"]) == (model, precision)]

        def total(key: str, rows: list[dict[str, Any]] = rows) -> float:
            return sum(r["layers"] * r[key] for r in rows) / 1e3

        cells = total("dense_us"), total("pruned_us") - total("dense_us"), total("bytes_us")
        table.add_row(model, precision, str(sum(r["layers"] for r in rows)), *[f"{cell:.2f}" for cell in cells])
    return table


def main() -> None:
    """Measure, print and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--sparsity", type=float, default=0.6)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("layers.json"))
    args = parser.parse_args()
    require_gpu()
    records: list[dict[str, Any]] = []
    for name in args.models:
        model, batch, precision = MODELS[name]
        dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
        head = {"model": model, "batch": batch, "precision": precision}
        head |= {"sparsity": args.sparsity, "block_size": args.block_size}
        for kind, layers in kinds(name, args).items():
            times = measure(kind, dtype, args)
            times["bytes_us"] = round(times["copy_us"] * (2 - args.sparsity), 2)
            shape = {"shape": list(kind[0]), "strides": list(kind[1]), "outputs": kind[2], "layers": layers}
            records.append({**head, **shape, **times, **environment()})
        torch.cuda.empty_cache()
    write_records(args.out, records)
    Console().print(summary(records))


if __name__ == "__main__":
    main()
