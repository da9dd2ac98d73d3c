"""A training step whose memory is recorded, in the way that the callback does it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_actprune.analysis.step_memory import StepMemory, StepMemoryRecorder


def recorded_step(
    model: nn.Module,
    x: Tensor,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x).square().mean(),
) -> StepMemory:
    """Return the record of a step that frees the gradients of the one before when its forward is over."""
    with StepMemoryRecorder(model, x, [optimizer]) as recorder:
        value = loss(model, x)
        recorder.moment()
        optimizer.zero_grad()
        recorder.mark("backward")
        value.backward()
        recorder.mark("optimizer")
        optimizer.step()
    return recorder.result()
