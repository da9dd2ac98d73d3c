"""Host time of one pruned layer in eager mode, part by part: what keeps a small model's step waiting for Python.

    python examples/benchmarks/host.py --out host.json

Tensors are small, so the GPU is never waited for. ``us`` is the median over rounds of the time to issue one call.

``least forward + backward`` is what no implementation as a Python ``autograd.Function`` can do without: the dense
layer's three products, one launch each to pack, to unpack and to sum the bias gradient, and the buffers that these
write, with nothing to decide. What it takes more than ``dense forward + backward`` is the least tax of a layer on the
host; ``pruned forward + backward`` shows how much of the real one can still be saved.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import environment, write_records
from lightning_actprune import ActivationPrunedLinear
from lightning_actprune import functional as pruned
from lightning_actprune.codec import packed as pack_module
from lightning_actprune.codec.blocks import BlockGeometry
from lightning_actprune.kernels.launch import Launch
from lightning_actprune.operators import weight_grad as weight_grad_module


@triton.jit
def nothing_kernel(a_ptr, b_ptr, c_ptr, d_ptr, one, two, three, four, five, six):
    """Take as many arguments as the real kernels and store one of them."""
    tl.store(b_ptr, one + two + three + four + five + six)


class LeastFunction(torch.autograd.Function):
    """A pruned layer of the fewest launches, which compute nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, launch: Launch) -> Tensor:
        """Multiply, and launch one kernel on three new buffers."""
        values = x.new_empty(1024, 32)
        bitmap, offsets = x.new_empty(8, 24, dtype=torch.int32), x.new_empty(8, 6, dtype=torch.int32)
        launch(x, values, bitmap, offsets)
        ctx.launch = launch
        ctx.save_for_backward(weight, values, bitmap, offsets)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Two products, and two launches with a new buffer each."""
        weight, values, bitmap, offsets = ctx.saved_tensors
        flat = grad.view(-1, grad.shape[-1])
        dense = values.new_empty(flat.shape[0], weight.shape[1])
        ctx.launch(values, bitmap, offsets, dense)
        sums = grad.new_empty(grad.shape[-1])
        ctx.launch(flat, sums, bitmap, offsets)
        return torch.matmul(grad, weight), torch.mm(flat.t(), dense), sums, None


def host_us(call: Callable[[], Any], calls: int = 200, rounds: int = 7) -> float:
    """Return the median microseconds the host needs to issue ``call``."""
    found = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(found[1:])


def calls() -> dict[str, Callable[[], Any]]:
    """Return what is timed, by name."""
    x = torch.randn(8, 64, 384, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(384, 384, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(384, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    launch = Launch(nothing_kernel, (1,), *range(2, 8))
    data, grad = x.detach(), torch.randn(8, 64, 384, device="cuda", dtype=torch.bfloat16)
    flat = grad.flatten(0, 1)
    dense = nn.Linear(384, 384, device="cuda", dtype=torch.bfloat16)
    module = ActivationPrunedLinear(384, 384, sparsity=0.6, device="cuda", dtype=torch.bfloat16)
    keep = BlockGeometry.of_stored(data, 32, 0.6).keep
    packed = torch.ops.actprune.pack(data, 32, keep)
    rest = (1, 512, 384, False, torch.bfloat16, 32)
    return {
        "new_empty": lambda: data.new_empty(100),
        "dense forward": lambda: F.linear(x, weight),
        "pruned forward": lambda: pruned.linear(x, weight, sparsity=0.6),
        "dense module forward": lambda: dense(x),
        "pruned module forward": lambda: module(x),  # whose settings were checked when they were set
        "pack operator": lambda: torch.ops.actprune.pack(data, 32, keep),
        "pack function": lambda: pack_module.pack(data, 32, keep),
        "weight gradient operator": lambda: torch.ops.actprune.weight_grad(flat, *packed, *rest),
        "weight gradient function": lambda: weight_grad_module.weight_grad(flat, *packed, *rest),
        "dense forward + backward": lambda: F.linear(x, weight, bias).backward(grad),
        "least forward + backward": lambda: LeastFunction.apply(x, weight, bias, launch).backward(grad),
        "pruned forward + backward": lambda: pruned.linear(x, weight, bias, sparsity=0.6).backward(grad),
    }


def main() -> None:
    """Time everything, write the records, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("host.json"))
    args = parser.parse_args()
    records = [{"part": name, "us": round(host_us(call), 1), **environment()} for name, call in calls().items()]
    write_records(args.out, records)
    table = Table("part", "us")
    for record in records:
        table.add_row(record["part"], f"{record['us']:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
