"""The benchmark of batch sizes: its search, a case on a small model on the CPU, and its table."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from examples.benchmarks import batch_size, third_party
from tests.examples.stand_ins import Blocks

LIMIT = 3


@pytest.mark.parametrize("start", [1, 3, 64, 1000])
@pytest.mark.parametrize("limit", [1, 2, 63, 64, 65, 700])
def test_the_largest_size_is_found_to_one_in_32(start: int, limit: int):
    tried: list[int] = []
    found = batch_size.largest(lambda size: tried.append(size) or size <= limit, start)
    assert found <= limit < found + max(2, 2 * found // 32)
    assert len(tried) == len(set(tried)) < 25


def test_nothing_fits():
    assert batch_size.largest(lambda size: False, 100) == 0


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model whose loss runs out of memory above so many samples."""

    def loss(model, x, y):
        if len(x) > LIMIT:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.nn.functional.cross_entropy(model(x), y)

    small = third_party.Workload("torch", 2, Blocks, lambda n: (torch.randn(n, 4, 64), torch.arange(n)), loss)
    monkeypatch.setitem(third_party.WORKLOADS, "small", small)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("method", ["dense", "max, others"])
def test_a_case(method: str):
    found = batch_size.measure("small", method, 1.0, accelerator="cpu")
    assert found == {"batch": LIMIT, "peak_mib": None, "finder_batch": LIMIT, "finder_fits": True}


def test_the_table_names_what_failed_and_the_ratio_to_dense():
    head = {"model": "net", "peak_mib": 10.0, "finder_batch": 30, "finder_fits": True}
    records = [
        head | {"method": "dense", "batch": 20},
        head | {"method": "max", "batch": 50, "finder_batch": 60, "finder_fits": False},
        {"model": "net", "method": "paper", "error": "took over 560 s"},
    ]
    console = Console(file=io.StringIO(), width=120)
    console.print(batch_size.summary(records).rich())
    text = console.file.getvalue()
    assert "50 (2.50)" in text
    assert "60, out of memory" in text
    assert "took over 560 s" in text
