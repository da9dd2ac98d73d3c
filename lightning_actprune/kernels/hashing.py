"""Random numbers made of what is there, as in ``ops.formats``: a hash of 32 bits."""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_actprune.ops import formats

MIX_A, MIX_FIRST, MIX_B, MIX_SECOND = (tl.constexpr(constant) for constant in formats.MIX)


@triton.jit
def mix(h):
    """Return a hash of each uint32, good in its highest 16 bits and more."""
    h = (h ^ (h >> MIX_A)) * MIX_FIRST
    return (h ^ (h >> MIX_B)) * MIX_SECOND
