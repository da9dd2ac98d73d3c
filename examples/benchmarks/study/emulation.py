r"""What could be kept of a layer's input instead: formats, remainders and selections in plain PyTorch, before kernels.

A layer's input is replaced, for its weight gradient alone, by what a way of storing would give back, and is kept dense:
the gradients are those of the real thing, memory and speed are not. That decides what is worth a kernel. A variant is
written as options between commas, `s0.5,b32,v2,mean` for example:

`sX`, `bX`, `vX`
    sparsity, block size, bits per value of a kept block (16: as they are)
`sr`, `sub`, `near`
    how codes are rounded: stochastically (default); by subtractive dither, `q = floor(x / d + u)`, read as
    `(q + 1/2 - u) d`, whose error is uniform with half the mean variance; to nearest
`h32`, `h16`, `sym`
    header of a block: scale and offset in 16 bits each (default); scale in 8 bits (eighths of an octave) and offset
    in 8 (eighths of the scale); a scale alone in 16, levels symmetric around zero
`rot`
    a Hadamard rotation of the block with fixed random signs before it is quantised
`zero`, `mean`, `block`, `sign`
    what a dropped block is read as: zero (default); the mean of each feature; its own mean (8 bits); its signs times
    its mean magnitude, both about the mean of each feature (1 bit a value and 16)
`l2`, `l1`, `max`, `swap`, `unbiased`, `random`
    which blocks are kept: the largest by L2 norm (default), by L1 norm, by largest magnitude; by L2 norm times
    `exp(0.3 z)`, z normal, so that places near the threshold are swapped; by priority sampling (Duffield, Lund and
    Thorup 2007): the largest `|x| / u`, and what is kept below the next one, `tau`, is scaled up to the norm `tau`,
    which makes the whole unbiased; at random, scaled by `1 / (1 - s)`

Options may differ by kind of layer: `fc2:s0.5,v2/*:v3` gives `fc2` its own.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.benchmarks.study.settings import block_layers, kind
from lightning_actprune.codec.blocks import block_and_keep, sparsity_parts, stored_view

ROUNDINGS, HEADERS = ("sr", "sub", "near"), ("h32", "h16", "sym")
REMAINDERS = ("zero", "mean", "block", "sign")
SELECTIONS = ("l2", "l1", "max", "swap", "unbiased", "random")
MEAN_BITS = 8


@dataclass(frozen=True)
class Variant:
    """A way to store an input; see the module."""

    sparsity: float = 0.0
    block_size: int = 32
    bits: int = 16
    rounding: str = "sr"
    header: str = "h32"
    rotated: bool = False
    remainder: str = "zero"
    selection: str = "l2"

    @property
    def bits_per_value(self) -> float:
        """Stored bits per value: codes, headers, positions and what is left of dropped blocks."""
        header = 0.0 if self.bits == 16 else {"h32": 32, "h16": 16, "sym": 16}[self.header] / self.block_size
        dropped = {"block": MEAN_BITS / self.block_size, "sign": 1 + 16 / self.block_size}.get(self.remainder, 0.0)
        positions = 1.25 / self.block_size
        return (1 - self.sparsity) * (self.bits + header) + self.sparsity * dropped + positions


def parse_variant(text: str) -> Variant:
    """Return the variant of options between commas."""
    variant = Variant()
    numbers = {"s": ("sparsity", float), "b": ("block_size", int), "v": ("bits", int)}
    names = {"rounding": ROUNDINGS, "header": HEADERS, "remainder": REMAINDERS, "selection": SELECTIONS}
    for option in text.split(","):
        number = re.fullmatch(r"([sbv])([\d.]+)", option)
        field = next((field for field, known in names.items() if option in known), None)
        if number is not None:
            name, of = numbers[number[1]]
            variant = replace(variant, **{name: of(number[2])})
        elif field is not None:
            variant = replace(variant, **{field: option})
        elif option == "rot":
            variant = replace(variant, rotated=True)
        elif option:
            known = ", ".join([*ROUNDINGS, *HEADERS, "rot", *REMAINDERS, *SELECTIONS])
            raise ValueError(f"an option of a variant must be sX, bX, vX or one of {known}, got {option!r}")
    return variant


def parse_variants(text: str) -> dict[str, Variant]:
    """Return the variants by kind of layer, `*` for all others."""
    parts = [part.rpartition(":") for part in text.split("/")]
    return {name or "*": parse_variant(options) for name, _, options in parts}


class _Emulated(torch.autograd.Function):
    """`F.linear` whose weight gradient sees what a variant gives back of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, variant: Variant) -> Tensor:
        ctx.save_for_backward(approximate(x, variant), weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        return grad @ weight, flat.t() @ kept.reshape(-1, kept.shape[-1]), flat.sum(0), None


class _EmulatedLinear(nn.Linear):
    """A linear layer that keeps a `variant` of its input; made of one, which it turns into again."""

    variant: Variant

    def forward(self, x: Tensor) -> Tensor:
        """Return the exact output."""
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
        if not torch.is_grad_enabled():
            return F.linear(x, weight, bias)
        return _Emulated.apply(x, weight, bias, self.variant)


def emulate(model: nn.Module, variants: dict[str, Variant], skipped: set[str]) -> None:
    """Let the linear layers of the blocks of `model` see variants of their inputs, but for some kinds of layers."""
    for name, layer in block_layers(model).items():
        if kind(name) not in skipped:
            layer.__class__, layer.variant = _EmulatedLinear, variants.get(kind(name), variants["*"])


def restore(model: nn.Module) -> None:
    """Undo `emulate`."""
    for layer in model.modules():
        if isinstance(layer, _EmulatedLinear):
            layer.__class__ = nn.Linear
            del layer.variant


def approximate(x: Tensor, variant: Variant) -> Tensor:
    """Return what `variant` gives back of `x`."""
    stored, transposed = stored_view(x, variant.block_size, "sample")
    block_size, keep = block_and_keep(stored, variant.block_size, sparsity_parts(variant.sparsity), 0)
    wide = stored.float()
    mean = wide.mean((0, 2) if transposed else (0, 1), keepdim=True) if variant.remainder in ("mean", "sign") else 0.0
    length = wide.shape[2]
    blocks = F.pad(wide - mean, (0, -length % block_size)).reshape(len(wide), -1, block_size)
    kept, factor = select(blocks, keep, variant.selection)
    back = blocks if variant.bits == 16 else quantised(blocks, variant)
    back = torch.where(kept, back * factor, remainder(blocks, variant.remainder))
    back = back.reshape(*wide.shape[:2], -1)[..., :length] + mean
    back = back.transpose(1, 2) if transposed else back
    return back.reshape(x.shape).to(x.dtype)


def select(blocks: Tensor, keep: int, selection: str) -> tuple[Tensor, Tensor | float]:
    """Return which blocks `[S, N, b]` are kept, `[S, N, 1]`, and what the kept ones are multiplied by."""
    count = blocks.shape[1]
    norm = blocks.norm(dim=2)
    if keep == count:
        return torch.ones_like(norm, dtype=torch.bool).unsqueeze(2), 1.0
    u = torch.rand_like(norm).clamp(min=1e-7)
    key = {
        "l1": lambda: blocks.abs().sum(2),
        "max": lambda: blocks.abs().amax(2),
        "swap": lambda: norm * torch.exp(0.3 * torch.randn_like(norm)),
        "unbiased": lambda: norm / u,
        "random": lambda: u,
    }.get(selection, lambda: norm)()
    ordered = key.sort(dim=1, descending=True).values
    kept = (key >= ordered[:, keep - 1 : keep]).unsqueeze(2)
    if selection == "unbiased":
        return kept, (ordered[:, keep : keep + 1] / norm.clamp(min=1e-30)).clamp(min=1).unsqueeze(2)
    return kept, count / keep if selection == "random" else 1.0


def remainder(blocks: Tensor, name: str) -> Tensor | float:
    """Return what dropped blocks are read as."""
    if name == "block":
        return blocks.mean(2, keepdim=True)
    return blocks.sign() * blocks.abs().mean(2, keepdim=True) if name == "sign" else 0.0


def quantised(blocks: Tensor, variant: Variant) -> Tensor:
    """Return the blocks as they are read again from codes of so many bits."""
    if variant.rotated:
        turn = _rotation(blocks.shape[2], blocks.device)
        return quantised(blocks @ turn, replace(variant, rotated=False)) @ turn.t()
    most = 2**variant.bits - 1
    low, high = blocks.amin(2, keepdim=True), blocks.amax(2, keepdim=True)
    if variant.header == "sym":
        high = torch.maximum(high, -low)
        low = -high
    scale = ((high - low) / most).clamp(min=1e-30)
    if variant.header == "h16":
        scale = torch.maximum(scale * (1 + 1 / (8 * most)), low.abs() / 16)
        scale = torch.exp2((scale.log2() * 8).ceil() / 8)
        low = (low / scale * 8).floor() * scale / 8
    place = (blocks - low) / scale
    if variant.rounding == "near":
        return low + scale * (place + 0.5).floor().clamp(0, most)
    u = torch.rand_like(place)
    code = (place + u).floor().clamp(0, most)
    return low + scale * (code if variant.rounding == "sr" else code + 0.5 - u)


@functools.lru_cache
def _rotation(size: int, device: torch.device) -> Tensor:
    """Return an orthogonal matrix, Hadamard's with random signs: `size` is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(2, (size, 1), generator=torch.Generator().manual_seed(0)) * 2 - 1
    return (signs * matrix / size**0.5).to(device)
