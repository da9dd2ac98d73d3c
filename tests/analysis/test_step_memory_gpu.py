"""StepMemoryRecorder on a GPU: its peaks are the allocator's, and it changes none of them."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from lightning_actprune.analysis.first_batch import RetentionProbe
from lightning_actprune.analysis.step_memory import PHASES
from lightning_actprune.convert import convert
from tests.support.recorded import recorded_step

pytestmark = pytest.mark.gpu

WIDTH = 256


class Mlp(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(6)
        )
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def autocast_loss(model, x):
    with torch.autocast("cuda", torch.bfloat16):
        return model(x).float().square().mean()


def plain_step(model, x, optimizer):
    loss = autocast_loss(model, x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def slack(step):
    """Return by how much bytes in use may differ: a cached block is handed out whole if less than 1 MiB is left."""
    return 2**20 * sum(storage.nbytes >= 2**20 for storage in step.retained)


@pytest.mark.parametrize(("sparsity", "outputs"), [(None, 8192), (0.6, 16), (0.6, 8192)])
def test_peak_and_parts(sparsity: float | None, outputs: int):
    torch.manual_seed(0)
    model, x = Mlp(outputs).cuda(), torch.randn(16, 196, WIDTH, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    if sparsity is not None:
        report = convert(model, sparsity=sparsity)
        with RetentionProbe(model, x) as probe:
            model(x).sum().backward()
        probe.apply(report)
    for _ in range(3):
        plain_step(model, x, optimizer)
    gc.collect()  # tensors of other tests would go at any moment
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    plain_step(model, x, optimizer)
    plain = torch.cuda.max_memory_allocated()
    step = recorded_step(model, x, optimizer, autocast_loss)
    assert step.measured
    assert abs(step.peak_bytes - plain) <= slack(step)
    for index, moment in enumerate(step.moments):
        assert moment.peak_bytes >= moment.used_bytes
        assert sum(step.parts(index).values()) == step.interval_bytes[index]
    first, last = step.moments[0], step.moments[step.forward_end]
    start, end = (
        sum(nbytes for name, nbytes in step.parts(index).items() if name != "other") for index in (0, step.forward_end)
    )
    assert abs(last.used_bytes - first.used_bytes - (end - start)) <= slack(step)
    assert step.activation_bytes[-1] == 0
    assert None not in map(step.peak_in, PHASES)
    # A wide head makes the gradient of its output the peak, which fewer activations move only so far.
    if outputs == 8192:
        assert step.moments[step.peak_in()].phase == "backward"
    assert step.peak_without(1.0) < step.peak_without(0.5) < step.peak_bytes


def test_the_peak_of_the_optimizer_step():
    """With little kept for backward the temporary tensors of a foreach optimizer are the peak."""
    model, x = Mlp(16).cuda(), torch.randn(1, 8, WIDTH, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        plain_step(model, x, optimizer)
    step = recorded_step(model, x, optimizer, autocast_loss)
    index = step.peak_in()
    assert step.moments[index].phase == "optimizer"
    assert step.parts(index)["other"] > 0
    assert step.peak_without(1.0) == step.peak_bytes
