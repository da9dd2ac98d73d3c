"""What the tests of the examples share."""

import pytest
import torch

from examples.benchmarks import models, rivals, third_party
from examples.benchmarks.common import MIB
from tests.examples.image_folders import write_images
from tests.examples.stand_ins import PEAK, Blocks, Event, vectors


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images") / "tiny")


@pytest.fixture
def small_rival(monkeypatch):
    """A small model, and a made-up allocator that counts its calls: a MiB for each."""
    workload = third_party.Workload("torch", 2, Blocks, vectors, third_party._cross_entropy)
    for module in (models, rivals):
        monkeypatch.setitem(module.WORKLOADS, "small", workload)
    calls = []

    def memory_stats():
        calls.append(True)
        return {"requested_bytes.all.current": len(calls) * MIB}

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", memory_stats)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: PEAK)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 2 * PEAK)
