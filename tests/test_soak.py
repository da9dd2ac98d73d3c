"""Three thousand steps: memory stays as it is, and the loss falls as the dense model's does.

Both models train in processes of their own, where nothing but the training makes objects or lets them go.
"""

from __future__ import annotations

import gc
import multiprocessing
import resource
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune.codec.dispatch import LaunchCache
from lightning_actprune.config import Config, PresetName
from lightning_actprune.convert import attached_saved, convert_layers, new_owner

STEPS, SETTLED, SHOWN = 3_000, 1_500, 300
"""Steps in all, those after which nothing may grow, and those of which a mean loss is taken."""
TOKENS, FEATURES = 16, 64
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Student(nn.Module):
    """Has a linear layer, a norm, an activation function, and a product whose factors saved-tensor hooks keep."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 128), nn.GELU()
        self.down, self.gate = nn.Linear(128, FEATURES), nn.Parameter(torch.ones(TOKENS, FEATURES))
        self.head = nn.Linear(FEATURES, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.down(self.act(self.up(self.norm(x))))
        return self.head((y * self.gate).mean(1))


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs, and what a network that nobody sees makes of them, with noise."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Flatten(), nn.Linear(TOKENS * 32, 4)).eval()
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(8, TOKENS, FEATURES, generator=generator)
        yield x, teacher(x).detach() + 0.3 * torch.randn(8, 4, generator=generator)


def resident() -> int:
    """Return the bytes of memory that the process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def held() -> tuple[int, int, int]:
    """Return what Python holds: its objects, tensors among them, and launches that are kept."""
    gc.collect()
    objects = gc.get_objects()
    caches = [entry for entry in objects if type(entry) is LaunchCache]
    tensors = sum(issubclass(type(entry), Tensor) for entry in objects)
    return len(objects), tensors, sum(map(len, caches))


def train(preset: PresetName | None) -> list[float]:
    """Return the mean losses of the last steps, during which nothing has grown."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Student()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if preset is not None:
        owner = new_owner("soak")
        convert_layers(model, Config(preset), owner)
        saved = attached_saved(model, owner)
        assert saved is not None
        saved.min_values = 1024
    losses, found = [0.0] * (STEPS // SHOWN), []
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses[step // SHOWN] += loss.item() / SHOWN
        if step in (SETTLED, STEPS - 1):
            found.append((*held(), resident()))
    settled, last = found
    assert abs(last[0] - settled[0]) < 100, found
    assert last[1:3] == settled[1:3], found
    assert last[3] - settled[3] < 4 * 2**20, found
    return losses[SETTLED // SHOWN :]


def test_three_thousand_steps():
    """How the dense loss varies from three hundred steps to the next, once it has settled, says what noise is."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        dense, ours = pool.map(train, (None, "max"))
    mean, spread = sum(dense) / len(dense), max(dense) - min(dense)
    assert abs(sum(ours) / len(ours) - mean) < spread, (ours, dense)
