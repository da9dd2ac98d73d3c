"""What tests of gated products share: an oracle in fp64 from torch's own autograd, and what few bits may be off by."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.activations import ORACLES
from tests.support.oracle import half_a_step


def oracle(name: str, a: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``z``, q and p in fp64, on the CPU."""
    wide = [x.detach().double().cpu().requires_grad_() for x in (a, u)]
    z = ORACLES[name](wide[0]) * wide[1]
    q, p = torch.autograd.grad(z.sum(), wide)
    return z.detach(), q, p


def largest_error(factor: Tensor, block_size: int, bits: int) -> Tensor:
    """Return by what each value that is read of ``factor [..., L]`` (fp64) may be off: half a step of its block.

    The maths of fp32 adds a few units in the last place.
    """
    length = factor.shape[-1]
    blocks = F.pad(factor, (0, -length % block_size)).unflatten(-1, (-1, block_size))
    rounding = 2**-20 * blocks.abs().amax(-1, keepdim=True) + 1e-12
    bound = half_a_step(blocks, bits) * (1 + 8e-6) + rounding
    return bound.expand_as(blocks).flatten(-2)[..., :length]
