"""Kernels on one GPU: time and bytes of pack, the weight gradient, number formats, activations, norms and attention.

    python benchmarks/bench_kernels.py --quick
    python benchmarks/bench_kernels.py
    python benchmarks/bench_kernels.py --kinds weight_grad --dtypes bfloat16 --blocks 32 --sparsities 0.6

README.md says what each kind measures. Times are those of the GPU (``common.device_us``): CUDA graphs, inputs rotated
through several times the L2 cache, medians.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Record, RecordFile, device_us, environment, host_us, parser_for, require, show
from lightning_actprune import Keep, convert, functional
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.codec import packed as packing
from lightning_actprune.codec.blocks import BlockGeometry, block_and_keep, sparsity_parts
from lightning_actprune.operators import weight_grad as gradients
from lightning_actprune.operators.saved import SavedTensorCompression
from lightning_actprune.operators.weight_grad import MAX_GATHER_BLOCK, force_method, fp32_is_exact, gather_is_faster

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROTATED_BYTES = 3 * 2**26
"""Inputs together: several times the 50 MB L2 cache of an H100 or H200."""
CASES = [(128, 64, 384, 1536), (64, 196, 384, 1536), (64, 196, 1536, 384), (64, 196, 768, 3072), (8, 1024, 4096, 4096)]
"""Samples, rows, input and output features of linear layers."""
ACTIVATIONS = {"gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "silu": nn.SiLU(), "relu": nn.ReLU()}
SHAPES = [(128, 197, 3072), (16384, 11008)]
"""The MLP of a ViT-B at batch 128, and that of a language model of 7B parameters with 16384 tokens."""
NORMS = [("layer_norm", 128 * 197, 768, "float32"), ("layer_norm", 64 * 196, 384, "float32")]
NORMS += [("rms_norm", 8192, 4096, "bfloat16")]
"""Operator, rows, length, dtype: a ViT-B and a small ResMLP under autocast, a language model in bf16."""
ATTENTION = [("ViT-B/16", 8, 12, 197, 64, False), ("GPT-2", 2, 12, 1024, 64, True)]
"""Name, samples, heads, tokens, channels of a head, whether causal."""
LOGIT_STDS = (1.0, 3.0, 8.0)
STORED = [("int8", ("query", "key", "value", "attention_out"))]
STORED += [("int4", stored) for stored in (("query", "key"), ("value",), ("attention_out",))]
STORED += [("int3", ("value",)), ("int3", ("attention_out",))]
BITS = {"same": None, "int8": 8, "int4": 4, "int3": 3, "int2": 2}
Tensors = list[Tensor]
Pairs = list[tuple[Tensor, Tensor]]
KEYS = ("kind", "case", "dtype", "block_size", "sparsity", "value_format", "block_selection", "function", "shape")
KEYS += ("operator", "rows", "length", "logit_std", "stored", "part")


def rotated(*shapes: tuple[int, ...], dtype: str) -> list[Tensors]:
    """Return random tensors of these shapes, as often as it takes to sweep the cache."""
    nbytes = sum(map(math.prod, shapes)) * getattr(torch, dtype).itemsize
    count = max(2, math.ceil(ROTATED_BYTES / nbytes)) if DEVICE == "cuda" else 1
    return [[torch.randn(s, device=DEVICE, dtype=getattr(torch, dtype)) for s in shapes] for _ in range(count)]


def timed(call: Callable[..., Any], arguments: Sequence[Any], **options: Any) -> float:
    """Return the microseconds of a call, on one after the other of the arguments."""
    return round(device_us([functools.partial(call, *each) for each in arguments], **options), 2)


# === Linear layers ====================================================================================


def inputs(case: Sequence[int], dtype: str) -> Pairs:
    """Return pairs of an input and an output gradient of a linear layer."""
    samples, rows, length, outputs = case
    return [(x, g) for x, g in rotated((samples, rows, length), (samples * rows, outputs), dtype=dtype)]


def gradient(grad_y: Tensor, packed: Tensors, length: int, block: int, bits: int = 0) -> Tensor:
    """Return the weight gradient from a packed input."""
    layout = 1, grad_y.shape[0], length, False, grad_y.dtype, block, bits
    return torch.ops.actprune.weight_grad(grad_y, *packed, *layout)


def chosen_method(grad_y: Tensor, packed: Tensors, length: int, block: int) -> str:
    """Return the method that the cost model takes; without positions all blocks are stored, and unpacked."""
    may_gather = packed[1].shape[1] > 0 and block <= MAX_GATHER_BLOCK
    exact = grad_y.dtype != torch.float32 or fp32_is_exact()
    sizes = tuple(grad_y.shape), (packed[0].shape[0], block), length, grad_y.itemsize
    return "gather" if may_gather and gather_is_faster(*sizes, exact) else "unpack"


def weight_grads(args: argparse.Namespace) -> Iterator[tuple[Record, Callable[[], Record]]]:
    """Yield the heads of the records of pack and weight gradient, and what measures each."""
    for case, dtype in itertools.product(args.cases, args.dtypes):
        shared = functools.cache(functools.partial(_dense, case, dtype))
        for block, sparsity in itertools.product(args.blocks, args.sparsities):
            head = {"case": list(case), "dtype": dtype, "block_size": block, "sparsity": sparsity}
            yield head, functools.partial(_weight_grad, shared, block, sparsity)


def _dense(case: Sequence[int], dtype: str) -> tuple[Pairs, Record]:
    pairs = inputs(case, dtype)
    dense = timed(lambda x, g: g.t() @ x.flatten(0, 1), pairs)
    copy = timed(lambda x, g: x.clone(), pairs)
    scratch = torch.empty_like(pairs[0][0])
    rebuild = timed(lambda x, g: g.t() @ scratch.zero_().flatten(0, 1), pairs)
    return pairs, {"dense_us": dense, "copy_us": copy, "rebuild_us": rebuild}


def _weight_grad(shared: Callable[[], tuple[Pairs, Record]], block: int, sparsity: float) -> Record:
    pairs, figures = shared()
    keep = BlockGeometry.of_stored(pairs[0][0], block, sparsity).keep
    packed = [torch.ops.actprune.pack(x, block, keep) for x, _ in pairs]
    length, repeats = pairs[0][0].shape[2], 1 if figures["dense_us"] > 1000 else 3
    backend = chosen_method(pairs[0][1], packed[0], length, block)
    found = {**figures, "backend": backend}
    found["pack_us"] = timed(lambda x, g: torch.ops.actprune.pack(x, block, keep), pairs, repeats=repeats)
    arguments = [(g, p, length, block) for (_, g), p in zip(pairs, packed, strict=True)]
    for method in ("gather", "unpack"):
        with force_method(method):
            found[f"{method}_us"] = timed(gradient, arguments, repeats=repeats)
    return {**found, "ours_us": found[f"{backend}_us"]}


def formats(args: argparse.Namespace) -> Iterator[tuple[Record, Callable[[], Record]]]:
    """Yield the heads of the records of number formats and selections, and what measures each."""
    stored = [*((name, "largest") for name in BITS), ("same", "swap"), ("same", "unbiased")]
    for case in args.cases:
        pairs = functools.cache(functools.partial(inputs, case, "bfloat16"))
        for sparsity, (value_format, selection) in itertools.product((0.0, 0.6, 0.9), stored):
            head = {"case": list(case), "dtype": "bfloat16", "block_size": 32, "sparsity": sparsity}
            head |= {"value_format": value_format, "block_selection": selection}
            yield head, functools.partial(_format, pairs, sparsity, BITS[value_format] or 0, selection)


def _format(pairs: Callable[[], Pairs], sparsity: float, bits: int, selection: str) -> Record:
    x, grad_y = pairs()[0]
    _, keep = block_and_keep(x, 32, sparsity_parts(sparsity), bits)
    pack = functools.partial(torch.ops.actprune.pack, block_size=32, keep=keep, bits=bits, selection=selection)
    packed = [pack(x) for x, _ in pairs()]
    arguments = [(g, p, x.shape[2], 32, bits) for (_, g), p in zip(pairs(), packed, strict=True)]
    return {
        "method": chosen_method(grad_y, packed[0], x.shape[2], 32),
        "pack_us": timed(lambda x, g: pack(x), pairs()),
        "grad_us": timed(gradient, arguments),
        "stored_bytes": sum(tensor.nbytes for tensor in packed[0]),
    }


# === Other layers =====================================================================================


def layer_figures(layer: nn.Module, pairs: Sequence[Tensors], rule: Keep | None) -> Record:
    """Return times and kept bytes of a layer, dense without a rule."""
    layer = layer.to(DEVICE, pairs[0][0].dtype)
    if rule is not None:
        convert(layer, rules={"*": rule})
    leaves = list(layer.parameters())

    def step(x: Tensor, grad: Tensor) -> Any:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(layer(x), [x, *leaves], grad)

    forward = timed(lambda x, grad: layer(x.detach().requires_grad_()), pairs)
    both = timed(step, pairs)
    with SavedTensorMeter(layer, ()) as meter:
        output = layer(pairs[0][0].detach().requires_grad_())
    del output
    small = [tensor.flatten(0, -2)[:8] for tensor in pairs[0]]
    host = host_us(lambda: step(*small), *((300, 5) if DEVICE == "cuda" else (5, 1)))
    backward = round(both - forward, 2)
    kept = meter.report().stored_bytes
    return {"forward_us": forward, "backward_us": backward, "kept_bytes": kept, "host_us": round(host, 1)}


def activations(args: argparse.Namespace) -> Iterator[tuple[Record, Callable[[], Record]]]:
    """Yield the heads of the records of activation functions, and what measures each."""
    for shape, dtype, function in itertools.product(args.shapes, ("bfloat16", "float32"), ACTIVATIONS):
        pairs = functools.cache(functools.partial(rotated, shape, shape, dtype=dtype))
        for value_format in ("dense", "int4") if function == "relu" else ("dense", "int8", "int4", "int3", "int2"):
            head = {"function": function, "shape": list(shape), "dtype": dtype, "value_format": value_format}
            yield head, functools.partial(_activation, pairs, function, value_format)


def _activation(pairs: Callable[[], list[Tensors]], function: str, value_format: str) -> Record:
    rule = None if value_format == "dense" else Keep(bits=BITS[value_format], min_rows_for_low_bits=0)
    layer = type(ACTIVATIONS[function])(**({"approximate": "tanh"} if function == "gelu_tanh" else {}))
    figures = layer_figures(layer, pairs(), rule)
    return {**figures, "kept_bytes": round(figures["kept_bytes"] / pairs()[0][0].numel(), 4)}


def norms(args: argparse.Namespace) -> Iterator[tuple[Record, Callable[[], Record]]]:
    """Yield the heads of the records of norms, and what measures each."""
    for operator, rows, length, dtype in args.norms:
        for value_format in ("dense", "int8", "int4", "int2"):
            head = {"operator": operator, "rows": rows, "length": length, "dtype": dtype}
            head |= {"value_format": value_format, "block_size": 32}
            yield head, functools.partial(_norm, operator, (rows, length), dtype, value_format)


def _norm(operator: str, shape: tuple[int, int], dtype: str, value_format: str) -> Record:
    layer = nn.LayerNorm(shape[1]) if operator == "layer_norm" else nn.RMSNorm(shape[1])
    rule = None if value_format == "dense" else Keep(bits=BITS[value_format], min_rows_for_low_bits=0)
    return layer_figures(layer, rotated(shape, shape, dtype=dtype), rule)


# === Attention ========================================================================================


class Attention(nn.Module):
    """Fused attention of a joint projection ``[3, SAMPLES, HEADS, TOKENS, CHANNELS]``."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, qkv: Tensor) -> Tensor:
        """Return ``[SAMPLES, HEADS, TOKENS, CHANNELS]``."""
        return F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=self.causal)


def attentions(args: argparse.Namespace) -> Iterator[tuple[Record, Callable[[], Record]]]:
    """Yield the heads of the records of attention's errors, and what measures each."""
    names = "case", "samples", "heads", "tokens", "channels", "causal"
    for case, logit_std in itertools.product(args.attention, LOGIT_STDS):
        for value_format, stored in [("dense", ()), *STORED]:
            head = dict(zip(names, case, strict=True)) | {"logit_std": logit_std, "value_format": value_format}
            bits = None if value_format == "dense" else dict.fromkeys(stored, BITS[value_format])
            yield {**head, "stored": ", ".join(stored)}, functools.partial(_attention, case, logit_std, bits)


def _attention(case: tuple[Any, ...], logit_std: float, bits: dict[str, int] | None) -> Record:
    *_, samples, heads, tokens, channels, causal = case
    generator, module = torch.Generator().manual_seed(0), Attention(causal)
    qkv = torch.randn(3, samples, heads, tokens, channels, generator=generator)
    qkv[:2] *= logit_std**0.5  # a logit is q k / sqrt(d): its standard deviation is the product of theirs
    grad = torch.randn(samples, heads, tokens, channels, generator=generator)
    qkv, grad = qkv.to(DEVICE, torch.bfloat16), grad.to(DEVICE, torch.bfloat16)

    def gradient_of(dtype: torch.dtype) -> Tensor:
        leaf = qkv.to(dtype).requires_grad_()
        module(leaf * 1).backward(grad.to(dtype))
        return leaf.grad.double()

    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        exact = gradient_of(torch.float64)
    if bits is None:
        ours = gradient_of(torch.bfloat16)
    else:
        with SavedTensorCompression(module, Keep(bits=8), min_values=1, attention=bits):
            ours = gradient_of(torch.bfloat16)
    return {"error": round(((ours - exact).norm() / exact.norm()).item(), 5)}


# === Host =============================================================================================


def hosts(args: argparse.Namespace) -> Iterator[tuple[Record, Callable[[], Record]]]:
    """Yield the heads of the records of the host's times, and what measures each."""
    options = {"device": DEVICE, "dtype": torch.bfloat16}
    x, grad = torch.randn(8, 64, 384, **options, requires_grad=True), torch.randn(8, 64, 384, **options)
    dense = nn.Linear(384, 384, **options)
    weight, bias, data, flat = dense.weight, dense.bias, x.detach(), grad.flatten(0, 1)
    pruned = nn.Linear(384, 384, **options)
    convert(pruned, rules={"*": Keep(bits=None, sparsity=0.6)})
    keep = BlockGeometry.of_stored(data, 32, 0.6).keep
    packed, layout = torch.ops.actprune.pack(data, 32, keep), (1, 512, 384, False, torch.bfloat16, 32)
    calls: dict[str, Callable[[], Any]] = {
        "dense module forward": lambda: dense(x),
        "pruned module forward": lambda: pruned(x),
        "pack operator": lambda: torch.ops.actprune.pack(data, 32, keep),
        "pack function": lambda: packing.pack(data, 32, keep),
        "weight gradient operator": lambda: torch.ops.actprune.weight_grad(flat, *packed, *layout),
        "weight gradient function": lambda: gradients.weight_grad(flat, *packed, *layout),
        "dense forward + backward": lambda: F.linear(x, weight, bias).backward(grad),
        "pruned forward + backward": lambda: functional.linear(x, weight, bias, sparsity=0.6).backward(grad),
    }
    rounds = (200, 7) if DEVICE == "cuda" else (2, 1)
    for part, call in calls.items():
        yield {"part": part}, lambda call=call: {"us": round(host_us(call, *rounds), 1)}


# === Command line =====================================================================================


KINDS = {
    "weight_grad": (weight_grads, "case dtype block_size sparsity dense_us copy_us pack_us backend ours_us gather_us"),
    "format": (formats, "case sparsity value_format block_selection method pack_us grad_us stored_bytes"),
    "activation": (activations, "function shape dtype value_format forward_us backward_us kept_bytes host_us"),
    "norm": (norms, "operator rows length dtype value_format forward_us backward_us kept_bytes host_us"),
    "attention": (attentions, "case logit_std value_format stored error"),
    "host": (hosts, "part us"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the file lacks, and print a table for each kind."""
    parser = parser_for(__doc__, "kernels")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--cases", type=int, nargs="+", choices=range(len(CASES)), help="of linear layers")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9])
    args = parser.parse_args(argv)
    require(DEVICE == "cuda", args.quick)
    args.cases = [CASES[number] for number in args.cases or range(len(CASES))]
    args.shapes, args.norms, args.attention = SHAPES, NORMS, ATTENTION
    if args.quick:
        args.cases, args.shapes, args.attention = [(2, 24, 64, 32)], [(4, 40, 64)], [("small", 1, 2, 16, 8, True)]
        args.norms = [(operator, 16, 64, dtype) for operator, _, _, dtype in NORMS[1:]]
        args.dtypes, args.blocks, args.sparsities = ["float32"], [32], [0.6]
    file, facts = RecordFile(args.out, KEYS, args.again), environment()
    for kind in args.kinds:
        cases, columns = KINDS[kind]
        records = []
        for head, measure in cases(args):
            head = {"kind": kind, **head}
            if file.lacks(head):
                file.add({**head, **measure(), **facts})
            records.append(file.records[file.key(head)])
        show(kind, records, columns.split())


if __name__ == "__main__":
    main()
