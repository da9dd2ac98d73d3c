"""Norms and affine layers in few bits with linear layers behind them, and who keeps what."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_actprune import ActivationPrunedLinear, convert
from lightning_actprune.nn.affine import Affine

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


def few_bit(make=NORMS["layer"], value_format="int4", device="cpu", dtype=torch.float32, **settings) -> nn.Module:
    """Return a norm or an affine layer with random parameters that keeps what it does in few bits."""
    model = nn.Sequential(make()).to(device, dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=1.0)
    convert(model, sparsity=0.0, others=dict.fromkeys(("norm", "affine", "scale"), value_format), **settings)
    return model[0]


def linear(features=LENGTH, value_format="int2", device="cpu", dtype=torch.float32, **settings) -> nn.Module:
    given = {"sparsity": 0.0, "value_format": value_format, "device": device, "dtype": dtype} | settings
    return ActivationPrunedLinear(features, OUTPUTS, **given)


def activation(device="cpu", dtype=torch.float32) -> Tensor:
    return torch.randn(SAMPLES, TOKENS, LENGTH, device=device, dtype=dtype).requires_grad_()


def kept_values(y: Tensor) -> Tensor:
    """Return the bytes that the few-bit layer whose output ``y`` is keeps."""
    return y.grad_fn.saved_tensors[0]


def derives(z: Tensor, y: Tensor) -> bool:
    """Return whether the layer whose output ``z`` is keeps what that of ``y`` does, and no copy of it."""
    return any(t is not None and t.data_ptr() == kept_values(y).data_ptr() for t in z.grad_fn.saved_tensors)


def own_pack(z: Tensor) -> bool:
    """Return whether a layer keeps a pack with positions of its own, even if these are empty."""
    return sum(t is not None and t.dtype == torch.int32 for t in z.grad_fn.saved_tensors) == 2
