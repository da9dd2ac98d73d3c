"""What tests of activation functions share: an oracle in fp64 from torch's own autograd, and settings to test."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_actprune.operators.activation import ACTIVATIONS, StoredDerivative

PARAMETERS = {"softplus": (1.5, 20.0), "elu": (0.7,), "hardtanh": (-0.5, 0.75), "leaky_relu": (0.125,)}
"""Of functions that have some; hardtanh's and leaky_relu's are exact in any type."""
ORACLES = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": lambda x: F.softplus(x, 1.5, 20.0),
    "elu": lambda x: F.elu(x, 0.7),
    "hardswish": F.hardswish,
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.75),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.125),
    "hardsigmoid": F.hardsigmoid,
}
"""As torch has them, by name."""
EXACT = [name for name, function in ACTIVATIONS.items() if function.exact]
SMOOTH = [name for name, function in ACTIVATIONS.items() if not function.exact]
BITS = [8, 4, 3, 2]


def stored_of(name: str, bits: int = 4) -> StoredDerivative:
    return StoredDerivative(name, PARAMETERS.get(name, ()), bits)


def oracle(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``f(x)`` and ``f'(x)`` in fp64, on the CPU."""
    wide = x.detach().double().cpu().requires_grad_()
    y = ORACLES[name](wide)
    (derivative,) = torch.autograd.grad(y.sum(), wide)
    return y.detach(), derivative


def gated_oracle(name: str, a: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``z``, q and p in fp64, on the CPU."""
    wide = [x.detach().double().cpu().requires_grad_() for x in (a, u)]
    z = ORACLES[name](wide[0]) * wide[1]
    q, p = torch.autograd.grad(z.sum(), wide)
    return z.detach(), q, p


def inputs(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return values of all sizes: those around zero, tails, zeros of both signs and where pieces meet."""
    special = [0.0, -0.0, 1e-6, -1e-6, 3.0, -3.0, 6.0, 0.75, -0.5, 100.0, -100.0, math.sqrt(2), -math.sqrt(2)]
    generator = torch.Generator().manual_seed(1)
    x = 3 * torch.randn(max(count, len(special)), generator=generator)
    x[: len(special)] = torch.tensor(special)
    return x[:count].to(dtype)
