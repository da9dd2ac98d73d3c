"""How far gradients of fused attention are off if query, key, value and result are quantized.

    python examples/benchmarks/attention.py --out attention.json

Query and key have normal values scaled so that the logits have a standard deviation of `logit_std`; from 3 or so on a
softmax attends to few keys. `error` is that of the gradients of query, key and value together, relative to the exact
ones of fp64, by root of sums of squares; of "dense" it is what the 16-bit kernel itself is off. `stored` says what is
kept in the format: the others are in eight bits. Without a GPU, the fused attention of the CPU.

With weights `P`, the logits get `P (dP - D)`, of which `dP` are products with the value and `D` those with the result.
A sharp softmax makes a small difference of them, in which errors of value and result stand alone.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import environment, write_records
from examples.benchmarks.summaries import Records, Summary, groups
from examples.benchmarks.vocabulary import BITS
from lightning_actprune import Keep
from lightning_actprune.operators.saved import SavedTensorCompression

CASES = [("ViT-B/16", 8, 12, 197, 64, False), ("GPT-2", 2, 12, 1024, 64, True)]
"""Name, samples, heads, tokens, channels of a head, whether causal: of models whose gradients fp64 can do beside."""
LOGIT_STDS = (1.0, 3.0, 8.0)
QUERY_AND_KEY = ("query", "key")
STORED = {
    "int8": (("query", "key", "value", "attended"),),
    "int4": (QUERY_AND_KEY, ("value",), ("attended",)),
    "int3": (("value",), ("attended",)),
}
"""What is stored in a format, beside all others in eight bits."""


class Attention(nn.Module):
    """Fused attention of a joint projection ``[3, B, H, N, d]``."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, qkv: Tensor) -> Tensor:
        """Return ``[B, H, N, d]``."""
        return F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=self.causal)


def inputs(case: tuple[Any, ...], logit_std: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a joint projection and a gradient of the result, in bf16."""
    _, samples, heads, tokens, channels, _ = case
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, samples, heads, tokens, channels, generator=generator)
    qkv[:2] *= logit_std**0.5  # a logit is q k / sqrt(d): its standard deviation is the product of theirs
    grad = torch.randn(samples, heads, tokens, channels, generator=generator)
    return qkv.to(device, torch.bfloat16), grad.to(device, torch.bfloat16)


def gradient(module: Attention, qkv: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the joint projection, in fp64."""
    leaf = qkv.detach().clone().requires_grad_()
    module(leaf * 1).backward(grad)
    assert leaf.grad is not None
    return leaf.grad.double()


def measure(case: tuple[Any, ...], logit_std: float, bits: dict[str, int] | None) -> dict[str, Any]:
    """Return the error with so many bits of what attention needs, of the dense attention without any."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module, (qkv, grad) = Attention(case[-1]), inputs(case, logit_std, device)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = gradient(module, qkv.double(), grad.double())
    if bits is None:
        found = gradient(module, qkv, grad)
    else:
        with SavedTensorCompression(module, Keep(bits=8), min_values=1, attention=bits):
            found = gradient(module, qkv, grad)
    return {"error": round(((found - exact).norm() / exact.norm()).item(), 5)}


def summary(records: Records) -> Summary:
    """Return one row per case and size of the logits."""
    rows = []
    for (name, logit_std), group in groups(records, "case", "logit_std").items():
        rows.append([name, f"{logit_std:g}", *(f"{100 * record['error']:.2f} %" for record in group)])
    names = dict.fromkeys(" of ".join(filter(None, (r["value_format"], r["stored"]))) for r in records)
    return Summary("Error of attention's gradients", ("case", "deviation of logits", *names), rows)


def main(argv: list[str] | None = None) -> None:
    """Measure everything, write records and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))))
    parser.add_argument("--out", type=Path, default=Path("attention.json"))
    args = parser.parse_args(argv)
    records: list[dict[str, Any]] = []
    for number, logit_std in itertools.product(args.cases, LOGIT_STDS):
        names = "case", "samples", "heads", "tokens", "channels", "causal"
        head = dict(zip(names, CASES[number], strict=True)) | {"logit_std": logit_std}
        records.append({**head, "value_format": "dense", "stored": "", **measure(CASES[number], logit_std, None)})
        for value_format, several in STORED.items():
            for stored in several:
                bits = dict.fromkeys(stored, BITS[value_format])
                said = {"value_format": value_format, "stored": ", ".join(stored)}
                records.append({**head, **said, **measure(CASES[number], logit_std, bits)})
    records = [{**record, **environment()} for record in records]
    write_records(args.out, records)
    Console(width=160).print(summary(records).rich())


if __name__ == "__main__":
    main()
