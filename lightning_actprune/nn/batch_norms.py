"""Batch and group normalisation layers that keep their normalised input in few bits; made by ``convert``.

Same parameters, buffers, ``state_dict`` and output (to rounding) as the layers they replace; running statistics are
updated as theirs are. Input and weight gradient are computed from values of few bits (``ops.normalize_lines``). Where
neither input nor weight needs a gradient, they are those layers in every respect.

Batch normalisation in eval mode, where the running statistics are constants, has an exact input gradient. It keeps its
input in few bits for the gradient of the weight alone, and one number a channel if the weight is frozen.

Where torch itself refuses an input, such as one with a single value per channel, its own error is raised.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_actprune.nn.norms import FewBitNorm
from lightning_actprune.ops.line_norm import (
    LineNormSetting,
    few_bit_batch_norm,
    few_bit_batch_norm_relu,
    few_bit_line_norm,
    frozen_batch_norm,
)
from lightning_actprune.ops.line_plan import Running
from lightning_actprune.ops.norm import output_dtype


class FewBitBatchNorm(FewBitNorm):
    """Mixin of batch normalisation layers; see ``FewBitNorm``."""

    training: bool
    num_features: int
    eps: float
    momentum: float | None
    track_running_stats: bool
    weight: Any
    bias: Any
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input: ``[N, C, ...]``."""
        if not self.keeps_batch(input):
            return cast(Tensor, super().forward(input))  # type: ignore[misc]
        return self.normalized(input)

    def keeps_batch(self, x: Tensor) -> bool:
        """Return whether anything is kept of ``x``; what torch refuses is left to torch."""
        if x.dim() < 2 or x.shape[1] != self.num_features:
            return False
        if (self.running_mean is None) != (self.running_var is None):
            return False
        if x.numel() <= self.num_features or not self.keeps(x, self.weight, tuple(x.shape)):
            return False
        self._check_input_dim(x)  # type: ignore[attr-defined]
        return True

    def normalized(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised, and update the running statistics, or, in eval mode, use them if there are any."""
        weight, bias, setting, dtype = self._arguments(x)
        mean, var = self.running_mean, self.running_var
        if not self.training and mean is not None and var is not None:
            if weight is None or not weight.requires_grad:
                return frozen_batch_norm(x, weight, bias, (mean, var), self.eps)
            fixed = torch.stack([mean.float(), torch.rsqrt(var.float() + self.eps), var.float()])
            return few_bit_line_norm(x, weight, bias, setting, dtype, fixed)[0]
        return few_bit_batch_norm(x, weight, bias, setting, dtype, self._running())

    def rectified(self, x: Tensor) -> Tensor | None:
        """Return the ReLU of the normalised ``x`` from the same pass, or ``None``, and do nothing, where there is none.

        There is one in training, where kernels normalise ``x``.
        """
        if not self.training or not self.keeps_batch(x):
            return None
        return few_bit_batch_norm_relu(x, *self._arguments(x), self._running())

    def _arguments(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, LineNormSetting, torch.dtype]:
        """Return weight, bias, setting and output type."""
        settings = self._few_bit
        setting = LineNormSetting(0, self.eps, settings.block_size, settings.value_format)
        return self.weight, self.bias, setting, output_dtype(x, "batch_norm")

    def _running(self) -> Running | None:
        """Return the running statistics that this batch moves."""
        if not self.training or not self.track_running_stats:
            return None
        return Running(self.running_mean, self.running_var, self.num_batches_tracked, self.momentum)


class FewBitBatchNorm1d(FewBitBatchNorm, nn.BatchNorm1d):
    """``nn.BatchNorm1d`` that keeps its normalised input in few bits; see ``FewBitNorm``."""

    dense_class = nn.BatchNorm1d


class FewBitBatchNorm2d(FewBitBatchNorm, nn.BatchNorm2d):
    """``nn.BatchNorm2d`` that keeps its normalised input in few bits; see ``FewBitNorm``."""

    dense_class = nn.BatchNorm2d


class FewBitBatchNorm3d(FewBitBatchNorm, nn.BatchNorm3d):
    """``nn.BatchNorm3d`` that keeps its normalised input in few bits; see ``FewBitNorm``."""

    dense_class = nn.BatchNorm3d


class FewBitTimmBatchNormAct2d(FewBitBatchNorm):
    """Mixin of timm's ``BatchNormAct2d``: batch normalisation, then a dropping layer and an activation function."""

    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised and activated input: ``[N, C, H, W]``."""
        if not self.keeps_batch(x):
            return cast(Tensor, self.dense_class.forward(self, x))
        return cast(Tensor, self.act(self.drop(self.normalized(x))))


class FewBitGroupNorm(FewBitNorm, nn.GroupNorm):
    """``nn.GroupNorm`` that keeps its normalised input in few bits; see ``FewBitNorm``.

    Its output is contiguous, as torch's is on a GPU; another input is copied.
    """

    dense_class = nn.GroupNorm

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input: ``[N, C, ...]``."""
        return self.normalized(input) if self.keeps_groups(input) else super().forward(input)

    def normalized(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised."""
        settings = self._few_bit
        setting = LineNormSetting(self.num_groups, self.eps, settings.block_size, settings.value_format)
        y, _ = few_bit_line_norm(x, self.weight, self.bias, setting, output_dtype(x, "group_norm"))
        return y

    def keeps_groups(self, x: Tensor) -> bool:
        """Return whether anything is kept of ``x``; what torch refuses is left to torch."""
        if x.dim() < 2 or x.shape[1] != self.num_channels or not x.numel():
            return False
        values = x.shape[0] * math.prod(x.shape[2:]) * self.num_channels // self.num_groups
        return values > 1 and self.keeps(x, self.weight, tuple(x.shape))


class FewBitTimmGroupNorm(FewBitGroupNorm):
    """Mixin of timm's ``GroupNorm`` and ``GroupNorm1``, which are that of torch unless "fast norm" is switched on."""

    _fast_norm: bool

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input: ``[N, C, ...]``."""
        return self.dense_class.forward(self, x) if self._fast_norm else super().forward(x)


class FewBitTimmGroupNormAct(FewBitTimmGroupNorm):
    """Mixin of timm's ``GroupNormAct``: group normalisation, then a dropping layer and an activation function."""

    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised and activated input: ``[N, C, ...]``."""
        if self._fast_norm or not self.keeps_groups(x):
            return self.dense_class.forward(self, x)
        return cast(Tensor, self.act(self.drop(self.normalized(x))))
