"""Norms and affine layers with linear layers behind them, and who keeps what."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_actprune.codec import packed
from lightning_actprune.operators.scale import Affine
from tests.support.compressed import compressed

SAMPLES, TOKENS, LENGTH, OUTPUTS = 3, 10, 72, 24
"""Blocks of 32 end short in rows of 72."""
NORMS = {
    "layer": lambda: nn.LayerNorm(LENGTH),
    "layer-plain": lambda: nn.LayerNorm(LENGTH, elementwise_affine=False),
    "layer-unshifted": lambda: nn.LayerNorm(LENGTH, bias=False),
    "rms": lambda: nn.RMSNorm(LENGTH),
    "affine": lambda: Affine(LENGTH),
    "affine-unshifted": lambda: Affine(LENGTH, bias=False),
}
READS = {
    "rows": lambda y: y,
    "flat": lambda y: y.view(-1, LENGTH),
    "turned": lambda y: y.transpose(1, 2),
}


def norm_of(name: str = "layer", bits: int = 4, device="cpu", dtype=torch.float32, **settings) -> nn.Module:
    """Return a compressed norm or affine layer with random parameters."""
    dense = NORMS[name]().to(device, dtype)
    for parameter in dense.parameters():
        nn.init.normal_(parameter, mean=1.0)
    operator = {"affine": "affine", "affine-unshifted": "scale"}.get(name, "norm")
    return compressed(dense, operator, bits=bits, **settings)


def linear(
    features=LENGTH, bits: int | None = 2, device="cpu", dtype=torch.float32, bias=True, **settings
) -> nn.Module:
    """Return a compressed linear layer."""
    return compressed(nn.Linear(features, OUTPUTS, bias, device=device, dtype=dtype), bits=bits, **settings)


def activation(device="cpu", dtype=torch.float32) -> Tensor:
    return torch.randn(SAMPLES, TOKENS, LENGTH, device=device, dtype=dtype).requires_grad_()


def kept_values(y: Tensor) -> Tensor:
    """Return the bytes that the norm whose output ``y`` is keeps."""
    [values] = [t for t in y.grad_fn.saved_tensors if t is not None and t.dtype == torch.uint8]
    return values


def reuses(z: Tensor, y: Tensor) -> bool:
    """Return whether the layer whose output ``z`` is keeps what that of ``y`` does, and no copy of it."""
    return any(t is not None and t.data_ptr() == kept_values(y).data_ptr() for t in z.grad_fn.saved_tensors)


def own_pack(z: Tensor) -> bool:
    """Return whether a layer keeps a pack with positions of its own, even if these are empty."""
    return sum(t is not None and t.dtype == torch.int32 for t in z.grad_fn.saved_tensors) == 2


def as_known(y: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is stored of ``y``, in fp64: values before they are scaled, scale and shift."""
    rows = y.numel() // LENGTH
    x = packed.unpack_all(kept_values(y).cpu(), rows, LENGTH, norm.block_size, norm.bits, torch.float32)
    x = x.reshape(y.shape).double().to(y.device)
    weight, bias = (getattr(norm, name, None) for name in ("weight", "bias"))
    one, zero = x.new_ones(LENGTH), x.new_zeros(LENGTH)
    return x, one if weight is None else weight.detach().double(), zero if bias is None else bias.detach().double()
