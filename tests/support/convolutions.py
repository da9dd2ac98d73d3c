"""Inputs of convolutions in both memory formats."""

from __future__ import annotations

from torch import Tensor


def laid_out(x: Tensor, last: bool) -> Tensor:
    """Return ``x`` with its channels last in memory, or with the innermost dimension last."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x.contiguous()
