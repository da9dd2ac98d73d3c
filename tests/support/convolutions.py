"""Inputs of convolutions in both memory formats, and an oracle of what is kept of them."""

from __future__ import annotations

from torch import Tensor

from tests.support import oracle

BLOCK, SPARSITY = 8, 0.6


def laid_out(x: Tensor, last: bool) -> Tensor:
    """Return ``x`` with its channels last in memory, or with the innermost dimension last."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x.contiguous()


def in_memory(x: Tensor, last: bool) -> Tensor:
    """Return the values of each sample in the order of memory: ``[N, P]``."""
    return (x.movedim(1, -1) if last else x).reshape(x.shape[0], -1)


def pruned(x: Tensor, last: bool, block_size: int = BLOCK, sparsity: float = SPARSITY) -> Tensor:
    """Return ``x`` with the dropped blocks, cut from its samples as they lie in memory, set to zero."""
    x = x.detach().movedim(1, -1) if last else x.detach()
    kept = oracle.pruned(in_memory(x, False).unsqueeze(1), block_size, sparsity).reshape(x.shape)
    return kept.movedim(-1, 1) if last else kept
