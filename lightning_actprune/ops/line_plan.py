"""How the kernels normalise the batch of one layer, worked out once per layout and setting.

As ``ops.plan`` for linear layers: what follows from shapes, strides, types, alignment and settings alone is one look-up
in plain eager mode, which backward is handed with it. A gradient that is laid out, or typed, in another way than the
output was copied, or looked up anew.

Running statistics in fp32 move on in the launch that merges the statistics of the batch. A ReLU that follows is part of
the passes that there are: its bits are stored with the values.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_actprune.ops import normalize_lines
from lightning_actprune.ops.activate import in_memory
from lightning_actprune.ops.dispatch import Backend, choose_backend, forced_backend, on_device_of
from lightning_actprune.ops.geometry import ceil_div
from lightning_actprune.ops.pack import MAX_KEPT_BLOCKS

if TYPE_CHECKING:
    from lightning_actprune.kernels.line_norm_plan import BackwardPlan, ForwardPlan, Stored
    from lightning_actprune.ops.line_norm import LineNormSetting

Needed = tuple[bool, bool, bool]
"""Whether the gradients of input, weight and bias are needed."""


class Running(NamedTuple):
    """The running statistics of a layer.

    Args:
        mean: fp32 or 16 bits, ``[C]``, or ``None``.
        var: As ``mean``.
        batches: Number of batches, or ``None``.
        momentum: Share of a batch; ``None``: all batches count the same.
    """

    mean: Tensor | None
    var: Tensor | None
    batches: Tensor | None
    momentum: float | None


class LinePlan:
    """What is launched for inputs of one kind.

    Args:
        forward: The launches of forward.
        stored: How the kernels see the input.
        strides: Of output and input gradient.
        output: Type of the output.
        types: Those of input, weight and bias, ``None`` where there is none.
    """

    __slots__ = ("_backward", "_forward", "_stored", "output", "strides", "types")

    def __init__(
        self,
        forward: ForwardPlan,
        stored: Stored,
        strides: tuple[int, ...],
        output: torch.dtype,
        types: tuple[torch.dtype, torch.dtype | None, torch.dtype | None],
    ) -> None:
        self._forward, self._stored = forward, stored
        self._backward: dict[Needed, BackwardPlan] = {}
        self.strides, self.output, self.types = strides, output, types

    @property
    def stored(self) -> tuple[bool, int, int, str]:
        """What the operator of backward gets told: statistics of the input, of no groups, and how it is stored."""
        return False, 0, self._stored.block_size, self._stored.value_format

    def without_relu(self, grad_y: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of what a ReLU was given, if there is one, and the values without its bits."""
        if not self._stored.relu:
            return grad_y, values
        values, bits = self._stored.split(values)
        passed = torch.empty_strided(grad_y.shape, self.strides, dtype=torch.bool, device=grad_y.device)
        in_memory(passed).copy_(bits)
        return torch.where(passed, grad_y, 0), values

    def forward(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, running: Running | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``y``, the normalised values in few bits and the statistics, and move ``running`` on."""
        y = torch.empty_like(x, dtype=self.output)
        with on_device_of(x):
            moved = None if running is None else running[:3]
            values, statistics = self._forward(x, weight, bias, moved, y)  # type: ignore[arg-type]  # see `_movable`
        return y, values, statistics

    def backward(
        self, grad_y: Tensor, values: Tensor, statistics: Tensor, weight: Tensor | None, needed: Needed
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
        """Return the gradients of input, weight and bias that are needed, or ``None`` if the plan is for others.

        ``grad_y``: laid out as the output.
        """
        addresses = grad_y.data_ptr() | values.data_ptr() | statistics.data_ptr()
        if grad_y.dtype != self.output or (addresses if weight is None else addresses | weight.data_ptr()) % 16:
            return None
        plan = self._backward.get(needed)
        if plan is None:
            from lightning_actprune.kernels.line_norm_plan import BackwardPlan

            plan = self._backward[needed] = BackwardPlan(self._stored, weight is not None, needed)
        grad_x = of_weight = of_bias = None
        of_x, *types = self.types
        if needed[0]:
            grad_x = torch.empty_strided(grad_y.shape, self.strides, dtype=of_x, device=grad_y.device)
        if needed[1]:
            of_weight = statistics.new_empty(statistics.shape[1], dtype=types[0])
        if needed[2]:
            of_bias = statistics.new_empty(statistics.shape[1], dtype=types[1])
        grads = grad_x, of_weight, of_bias
        with on_device_of(grad_y):
            plan(grad_y, values, statistics, weight, grads)
        return grads


def plan_of(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    setting: LineNormSetting,
    dtype: torch.dtype,
    running: Running | None,
    relu: bool = False,
) -> LinePlan | None:
    """Return how the kernels normalise the channels of ``x``, or ``None`` if that is not for them, or not for a plan.

    That is: they take it as it lies in memory, and all of ``running`` that there is. ``relu``: negative outputs are
    zero.
    """
    if not x.is_cuda and choose_backend(x.shape, x.dtype, x.device, 1, 1) == "reference":
        return None  # and no address is asked for, which not every device has, and which ends a lazy copy
    device, momentum, counted = x.device, None, False
    if running is not None:
        if not _movable(running, x.shape[1], device):
            return None
        momentum, counted = running.momentum, running.batches is not None
    addresses = x.data_ptr()
    weight_type = bias_type = None
    if weight is not None:
        addresses, weight_type = addresses | weight.data_ptr(), weight.dtype
    if bias is not None:
        addresses, bias_type = addresses | bias.data_ptr(), bias.dtype
    if addresses % 16:
        return None
    types = x.dtype, weight_type, bias_type
    return _plan(x.shape, x.stride(), types, device, setting, dtype, momentum, counted, relu, forced_backend())


def _movable(running: Running, channels: int, device: torch.device) -> bool:
    """Return whether the kernels can move the running statistics on."""
    mean, var, batches, momentum = running
    if mean is None or var is None or momentum is None:
        return False
    if not mean.dtype == var.dtype == torch.float32 or not mean.device == var.device == device:
        return False
    if not type(mean) is type(var) is Tensor or not mean.numel() == var.numel() == channels:
        return False
    if not (mean.is_contiguous() and var.is_contiguous()):
        return False
    return batches is None or (batches.dtype == torch.int64 and batches.device == device and type(batches) is Tensor)


@functools.lru_cache(maxsize=1024)
def _plan(
    shape: torch.Size,
    strides: tuple[int, ...],
    types: tuple[torch.dtype, torch.dtype | None, torch.dtype | None],
    device: torch.device,
    setting: LineNormSetting,
    dtype: torch.dtype,
    momentum: float | None,
    counted: bool,
    relu: bool,
    forced: Backend | None,
) -> LinePlan | None:
    groups, eps, block_size, value_format = setting
    x = torch.empty_strided(shape, strides, dtype=types[0], device="meta")
    count = x.numel()
    block = max(1, min(block_size, count))
    if groups or not count or ceil_div(count, block) > MAX_KEPT_BLOCKS or normalize_lines.readable(x, 0) is not x:
        return None
    if choose_backend(shape, types[0], device, block, 1) == "reference":
        return None
    from lightning_actprune.kernels.line_norm_plan import ForwardPlan, Stored

    images, lines, length = normalize_lines.lines_of(x)
    stored = Stored((images, lines, length), block, value_format, device, relu)
    forward = ForwardPlan(stored, eps, (types[1] is not None, types[2] is not None), momentum, counted)
    return LinePlan(forward, stored, torch.empty_like(x).stride(), dtype, types)
