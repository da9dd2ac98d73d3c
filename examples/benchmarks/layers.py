"""The linear layers of a training step one by one: what pruning adds to each on the GPU, and the least it could add.

    python examples/benchmarks/layers.py --out layers.json

For every kind of converted layer (same layout of input and gradient, same outputs): GPU time of forward and backward,
dense and pruned, and of a device copy of the input. From the copy follows ``bytes_us``, the time at memory bandwidth of
what pruning moves where the weight gradient is a dense product: read the input and write its kept part in forward, read
that and write the input in backward; with density ``d`` that is ``1 + d`` copies (a copy reads and writes). It can be
less in so far as the cache still holds what is read, and ``pruned_us`` less than ``dense_us`` where the pruned layer
saves elsewhere (sums for the bias, copies of transposed tensors, casts).
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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
"""Inputs and gradients are rotated through several times the L2 cache."""


class Kind(NamedTuple):
    """What a layer's time depends on: shape, strides and type of its input; outputs, and strides of their gradient."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    outputs: int
    grad_strides: tuple[int, ...]


def kinds(name: str, args: argparse.Namespace) -> Counter[Kind]:
    """Return how many pruned layers of each kind a model has, by one forward and backward."""
    model_name, batch, precision = MODELS[name]
    model, _ = build(model_name, "pruned", args.sparsity, args.block_size)
    found: Counter[Kind] = Counter()

    def note(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        head = tuple(inputs[0].shape), inputs[0].stride(), inputs[0].dtype, output.shape[-1]
        output.register_hook(lambda grad: found.update([Kind(*head, grad.stride())]))

    for layer in model.modules():
        if isinstance(layer, ActivationPrunedLinear):
            layer.register_forward_hook(note)
    labels = torch.randint(1000, (batch,), device="cuda")
    with autocast(precision):
        loss = F.cross_entropy(model(torch.randn(batch, 3, 224, 224, device="cuda")), labels)
    loss.backward()
    return found


def autocast(precision: str) -> torch.autocast:
    """Return the context in which forward runs."""
    return torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16-mixed")


def measure(kind: Kind, precision: str, args: argparse.Namespace) -> dict[str, float]:
    """Return the times of one kind of layer, with fp32 parameters."""
    computed = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    layer = nn.Linear(kind.shape[-1], kind.outputs, device="cuda")
    settings = {"sparsity": args.sparsity, "block_size": args.block_size}
    values = torch.Size(kind.shape).numel()
    count = max(2, CACHE_BYTES // (values * computed.itemsize))

    def some(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        return [torch.empty_strided(shape, strides, device="cuda", dtype=dtype).normal_() for _ in range(count)]

    xs = [x.requires_grad_() for x in some(kind.shape, kind.strides, kind.dtype)]
    grads = some((*kind.shape[:-1], kind.outputs), kind.grad_strides, computed)

    def step(x: Tensor, grad: Tensor, linear: Callable[..., Tensor]) -> Any:
        with autocast(precision):
            y = linear(x, layer.weight, layer.bias)
        return torch.autograd.grad(y, (x, layer.weight, layer.bias), grad)

    def timed(linear: Callable[..., Tensor]) -> float:
        return round(gpu_us([lambda x=x, g=g: step(x, g, linear) for x, g in zip(xs, grads, strict=True)]), 2)

    packed = [x.detach().to(computed) for x in xs]
    return {
        "dense_us": timed(F.linear),
        "pruned_us": timed(functools.partial(pruned.linear, **settings)),
        "copy_us": round(gpu_us([x.clone for x in packed]), 2),
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
        head = {"model": model, "batch": batch, "precision": precision}
        head |= {"sparsity": args.sparsity, "block_size": args.block_size}
        for kind, layers in kinds(name, args).items():
            times = measure(kind, precision, args)
            times["bytes_us"] = round(times["copy_us"] * (2 - args.sparsity), 2)
            shape = {**kind._asdict(), "dtype": str(kind.dtype).removeprefix("torch."), "layers": layers}
            records.append({**head, **shape, **times, **environment()})
        torch.cuda.empty_cache()
    write_records(args.out, records)
    Console().print(summary(records))


if __name__ == "__main__":
    main()
