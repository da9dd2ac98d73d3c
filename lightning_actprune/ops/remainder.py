r"""What dropped blocks leave behind: nothing, or the mean of each feature.

``zero``
    a dropped block is read as zero: the method of arXiv:2311.16883.

``mean``
    with ``mu [IN]``, one number per feature, the blocks of ``x - mu`` are selected and stored, and a dropped block is
    read as ``mu``. With ``P`` the pruning, ``g = dL/dy`` and ``1`` a column of ones::

        x_hat = P(x - 1 mu^T) + 1 mu^T          dW = g^T x_hat = g^T P(x - 1 mu^T) + (g^T 1) mu^T

    so one product of rank 1 is added to the weight gradient, whose other factor is the gradient of a bias. A kept block
    is exact but for rounding ``x - mu`` to the type of the values. At best ``mu`` takes the mean of each feature out
    of the error, which zeros leave in it whole, and with it a bias that no number of rows averages away.

Any ``mu`` is valid: a better one only leaves less behind. It is therefore estimated from few rows, evenly spaced, of
the input as the product reads it. No state and no random numbers: the same input has the same ``mu`` in any
process, after a resumed checkpoint, under ``torch.compile`` and in a replayed CUDA graph. Where the estimate is not
finite it is zero, so that a NaN or Inf in one block reaches no other; its own block has the largest key and is kept. An
``x - mu`` that overflows the type of the values is an Inf, as any overflow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_actprune.arguments import Remainder
from lightning_actprune.ops.geometry import ceil_div

SAMPLED_ROWS = 1024
"""Most rows that the mean is estimated from: of independent rows, its error is then 1/32 of a feature's standard
deviation, which adds 0.1 % to the squared remainder, and that is read of a few percent of a usual input."""


def mean_bytes(features: int, remainder: Remainder) -> int:
    """Return the bytes that are stored for the mean of so many features."""
    return 4 * features if remainder == "mean" else 0


def feature_mean(x: Tensor) -> Tensor:
    """Return the estimated mean of each feature of ``x [..., IN]`` over its rows: finite, fp32 ``[IN]``."""
    if x.numel() == 0:
        return x.new_zeros(x.shape[-1], dtype=torch.float32)
    rows = sampled_rows(x)
    mean = rows.mean(dim=tuple(range(rows.dim() - 1)), dtype=torch.float32)
    return mean.nan_to_num_(0.0, 0.0, 0.0)


def sampled_rows(x: Tensor) -> Tensor:
    """Return at most ``SAMPLED_ROWS`` rows of ``x [..., IN]``, which is not empty, as a view of two dimensions or more.

    Every dimension but the last is sliced with a step, the smaller ones first, each to at most an equal share of what
    is left: of ``[128, 196, IN]`` every 4th image and of it every 7th token. Were a dimension of samples taken whole,
    a large batch would leave one token of each sample, always the same.
    """
    if x.dim() == 1:
        return x[None]
    steps = [1] * (x.dim() - 1)
    left = SAMPLED_ROWS
    for dims, dim in zip(range(len(steps), 0, -1), sorted(range(len(steps)), key=x.shape.__getitem__), strict=True):
        steps[dim] = ceil_div(x.shape[dim], int((left + 0.5) ** (1 / dims)))
        left //= ceil_div(x.shape[dim], steps[dim])
    return x[tuple(slice(None, None, step) for step in steps)]


def centred(x: Tensor, mean: Tensor, transposed: bool) -> Tensor:
    """Return ``x - mean``, rounded once, in the type of ``x``; arguments as of ``add_mean``."""
    return add_mean(x, -mean, transposed)


def add_mean(x: Tensor, mean: Tensor, transposed: bool) -> Tensor:
    """Return ``x + mean``, rounded once, in the type of ``x``.

    Args:
        x: A tensor in its stored layout, ``[S, T, L]``.
        mean: fp32 ``[IN]``.
        transposed: Whether the features are the rows of ``x``, numbered over all samples and modulo ``IN``, and not
            its last dimension.
    """
    if x.numel() == 0:
        return x
    if not transposed:
        return (x + mean).to(x.dtype)
    rows = x.reshape(-1, mean.shape[0], x.shape[2])
    return (rows + mean[:, None]).to(x.dtype).view(x.shape)


def add_mean_term(grad_w: Tensor, column_sums: Tensor, mean: Tensor) -> Tensor:
    """Add ``(g^T 1) mu^T`` to ``grad_w [OUT, IN]``, of fp32 or wider, in place.

    Args:
        grad_w: ``g^T P(x - mu)``.
        column_sums: ``g^T 1``, ``[OUT]``, in the type of ``grad_w``.
        mean: fp32 ``[IN]``.
    """
    return grad_w.addr_(column_sums, mean.to(grad_w.dtype))
