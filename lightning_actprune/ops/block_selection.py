r"""Which blocks of a sample are kept: its largest, or a random choice in which large ones are likelier.

With ``q`` the sum of squares of a block in fp32 (fp64 for fp64 input) and ``k`` the blocks kept per sample:

``largest``
    the ``k`` blocks with the largest ``q``, the method of arXiv:2311.16883. What a sample does not keep leaves its
    gradient for good: small blocks have no say in the weight gradient, however many there are.

``swap``
    the ``k`` blocks with the largest ``q 2^(3 (u - 1/2))``, ``u`` uniform in [0, 1): blocks whose norms are up to a
    factor of 2^1.5 apart may change places. A block whose norm is more than 2^1.5 times the k-th largest is always
    kept. Values stay as they are.

``unbiased``
    priority sampling (N. Duffield, C. Lund, M. Thorup, "Priority sampling for estimation of arbitrary subset sums",
    J. ACM 54(6), 2007) with the norms as weights: the ``k`` blocks with the largest priorities ``p = q / u^2``, ``u``
    uniform in (0, 1], each stored times ``max(1, sqrt(tau / q))`` with ``tau`` the largest priority that is dropped
    (0 if none is)::

        E[stored or zero] = block        for every block, and hence E[dW] = dW of the dense layer

    since a block is kept if ``u < sqrt(q / tau)``, ``tau`` then being that of the others. What is stored has a norm of
    ``sqrt(tau)`` at least: blocks below are kept rarely and count for more. Of all samplings of ``k`` blocks, sums over
    blocks have next to the least variance.

The random numbers come from the blocks, so there is no generator to seed, to save or to advance: the same input gives
the same choice, in any process, after a resumed checkpoint, under ``torch.compile`` and in a replayed CUDA graph, but
another one as soon as values change. With ``K`` the bits of the fp32 ``q`` and ``n`` the number of the block among
those of all samples::

    h = mix(K + n B)        u = (h >> 8) / 2^24        (unbiased: ((h >> 8) + 1) / 2^24)

modulo 2^32, ``mix`` as in ``ops.formats``. Where squares are added in another order, as by another kernel, ``q`` may
differ in its last place, and then the choice differs altogether.

Exactly: the key of ``swap`` is ``K + floor(3 (h >> 8) / 2) - 3 2^22``, the logarithm being linear between powers of two
as the bits of a float are, within 1 and the largest finite key; that of 0 stays 0. ``u^2``, ``p``, ``tau / q``, its
root and the scaled values are rounded once each, the last ones to the type of the values, before they are quantised;
priorities, and in fp16 scaled values, that overflow become the largest finite number. A block whose ``q`` is not finite
comes before all others, and is, like one whose ``q`` is 0, stored as it is. Equal keys go in order of ``n``.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from lightning_actprune.arguments import BlockSelection
from lightning_actprune.ops.formats import MASK, mix

BLOCK_SELECTIONS = get_args(BlockSelection)
NUMBER = 0xC2B2AE35
"""Multiplier of a block's number; not that of ``ops.formats``, whose random numbers are to be others."""
HALF_RANGE = 3 << 22
"""Half of the range by which keys are moved: one and a half octaves of fp32 keys."""


def selection_keys(squares: Tensor, block_selection: str) -> Tensor:
    """Return keys ``[S, N]``, the largest of which are kept, of sums of squares ``[S, N]`` that are no NaN."""
    if block_selection == "largest":
        return squares
    return _moved(squares) if block_selection == "swap" else _priorities(squares)


def factors(squares: Tensor, keys: Tensor, kept: Tensor) -> Tensor:
    """Return by what blocks are multiplied if they are ``kept`` (bool ``[S, N]``) by the keys of ``unbiased``."""
    dropped = torch.where(kept, 0.0, keys)
    largest = torch.cat([dropped.new_zeros(len(dropped), 1), dropped], 1).amax(1, keepdim=True)
    scaled = (squares > 0) & squares.isfinite()
    # In fp64 and then rounded, since the root of fp32 on the CPU is often not the nearest number.
    roots = (largest / torch.where(scaled, squares, 1.0)).double().sqrt().to(squares.dtype)
    return torch.where(scaled, roots.clamp(min=1.0), 1.0)


def rescale(values: Tensor, by: Tensor) -> Tensor:
    """Return blocks ``[nnz, b]`` times ``by [nnz]`` in their own type, and as they are where that is 1.

    Of those that are scaled no value overflows, and no zero has a sign.
    """
    most = torch.finfo(values.dtype).max
    wide = (values.to(by.dtype) * by[:, None] + 0.0).clamp(-most, most)
    return torch.where(by[:, None] > 1, wide.to(values.dtype), values)


def _hash(squares: Tensor) -> Tensor:
    """Return the highest 24 bits of ``h`` of all blocks, as int64."""
    bits = squares.float().view(torch.int32).long()
    numbers = torch.arange(squares.numel(), device=squares.device).view_as(squares)
    return mix((bits + numbers * NUMBER) & MASK) >> 8


def _moved(squares: Tensor) -> Tensor:
    """Return the keys of ``swap``, int64."""
    wide = squares.dtype == torch.float64
    bits = squares.contiguous().view(torch.int64 if wide else torch.int32).long()
    infinity = 0x7FF << 52 if wide else 0xFF << 23
    by = (_hash(squares) * 3 >> 1) - HALF_RANGE
    by = by << 29 if wide else by  # fp64 has 29 more places
    moved = (torch.minimum(bits, infinity - 1 - by.clamp(min=0)) + by).clamp(min=1)
    return torch.where((squares > 0) & squares.isfinite(), moved, bits)


def _priorities(squares: Tensor) -> Tensor:
    """Return the keys of ``unbiased``, floats like the sums of squares."""
    u = (_hash(squares) + 1).to(squares.dtype) * 2.0**-24
    priorities = (squares / (u * u)).clamp(max=torch.finfo(squares.dtype).max)
    return torch.where(squares.isfinite(), priorities, squares)
