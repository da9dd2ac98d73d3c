"""Many steps: memory stays as it is, and the loss falls as the dense model's does."""

from __future__ import annotations

import gc
import resource
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune.codec.dispatch import LaunchCache
from lightning_actprune.config import Config, PresetName
from lightning_actprune.convert import convert_layers, find_hooks, new_owner
from tests.support.compression import Runs

TOKENS, FEATURES = 16, 64


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs, and what a network that nobody sees makes of them, with noise."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Flatten(), nn.Linear(TOKENS * 32, 4)).eval()
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8, TOKENS, FEATURES, generator=generator)
        yield x, teacher(x).detach() + 0.3 * torch.randn(8, 4, generator=generator)


def held() -> tuple[int, int, int, int, int]:
    """Return what is held: objects, tensors, launches that are kept, and bytes, by Python and by the process."""
    gc.collect()
    objects = gc.get_objects()
    caches = [entry for entry in objects if type(entry) is LaunchCache]
    tensors = sum(issubclass(type(entry), Tensor) for entry in objects)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return len(objects), tensors, sum(map(len, caches)), tracemalloc.get_traced_memory()[0], resident


def train(preset: PresetName | None, steps: int) -> list[float]:
    """Return the mean losses of each tenth of the steps; in the second half nothing may grow."""
    torch.manual_seed(0)
    layers = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 128), nn.GELU(), nn.Linear(128, FEATURES)
    gate = Runs(lambda x, gate: x * gate, (TOKENS, FEATURES))  # a product, whose factors saved-tensor hooks keep
    model = nn.Sequential(*layers, gate, nn.Flatten(), nn.Linear(TOKENS * FEATURES, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if preset is not None:
        owner = new_owner("soak")
        convert_layers(model, Config(preset), owner)
        saved = find_hooks(model, owner)
        assert saved is not None
        saved.min_values = 1024
    losses, found = [0.0] * 10, []
    for step, (x, y) in enumerate(batches(steps)):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses[10 * step // steps] += loss.item() * 10 / steps
        if step in (steps // 2, steps - 1):
            found.append(held())
    settled, last = found
    assert abs(last[0] - settled[0]) < 100, found
    assert last[1:3] == settled[1:3], found
    assert last[3] - settled[3] < 2**15, found
    assert last[4] - settled[4] < 4 * 2**20, found
    return losses


@pytest.mark.integration
def test_three_hundred_steps_leave_nothing_behind():
    tracemalloc.start()
    try:
        losses = train("max", 300)
    finally:
        tracemalloc.stop()
    assert max(losses[1:]) < losses[0]
    assert losses == pytest.approx(train(None, 300), rel=0.01)
