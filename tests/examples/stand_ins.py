"""What takes the place of large models, and of the CUDA allocator, in tests of the benchmarks."""

import time

import torch
from torch import nn

from examples.benchmarks.common import MIB
from lightning_actprune.analysis.memory import SavedTensorMeter

PEAK = 50 * MIB


class Blocks(nn.Module):
    """Three residual blocks and a head; what a block's second layer reads is large in a quarter of its features."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3)
        )
        self.head = nn.Linear(64, 10)
        for block in self.blocks:
            nn.init.constant_(block[1].bias, -3.0)
            nn.init.constant_(block[1].bias[:32], 3.0)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(1))


class Event:
    """A point in time of a device that does everything at once."""

    def __init__(self, enable_timing=True, time=0.0):
        assert enable_timing
        self.time = time

    def record(self):
        self.time = time.perf_counter()

    def elapsed_time(self, end):
        return (end.time - self.time) * 1e3


def vectors(size):
    """Return inputs of ``Blocks`` and labels."""
    return torch.randn(size, 256, 64), torch.randint(10, (size,))


def counted(training, pruned_extra=0):
    """Take the place of the allocator: what is really kept, and ``pruned_extra`` bytes on top if pruned."""
    with SavedTensorMeter(training.model, training.batch) as meter:
        training.finish(training.forward())
    bytes_ = meter.report().stored_bytes + (pruned_extra if training.conversion else 0)
    return {"activations_mib": bytes_, "peak_mib": bytes_ + PEAK}
