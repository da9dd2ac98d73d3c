"""The benchmark of batch sizes: its search, a case on a small model on the CPU, and its table."""

from __future__ import annotations

import gc
import io
import weakref

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
    if abs(start - limit) <= limit / 32:
        assert len(tried) <= 4


def test_nothing_fits_and_everything_fits():
    assert batch_size.largest(lambda size: False, 100) == 0
    assert batch_size.largest(lambda size: True, 100) == batch_size.LARGEST


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model whose loss runs out of memory above so many samples."""

    def loss(model, x, y):
        if len(x) > LIMIT:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.nn.functional.cross_entropy(model(x), y)

    small = third_party.Workload("torch", 2, Blocks, lambda n: (torch.randn(n, 4, 64), torch.arange(n)), loss)
    monkeypatch.setitem(third_party.WORKLOADS, "small", small)


class Line(batch_size.Case):
    """A case whose peak is a straight line, up to the cap."""

    def fit(self, batch_size: int, *callbacks: object, steps: int = batch_size.STEPS) -> float | None:
        peak = 100.0 + 3.0 * batch_size
        return peak if peak <= 1000 else None


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("method", ["dense", "max, others", "recompute"])
@pytest.mark.slow
def test_a_case(method: str, capfd):
    found = batch_size.measure("small", method, 1.0, accelerator="cpu")
    assert found.pop("seconds") < 60
    assert found == {"batch": LIMIT, "peak_mib": None, "trials": 4, "finder_batch": LIMIT, "finder_fits": True}
    assert f"small, {method}: 4 samples, out of memory" in capfd.readouterr().err


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("size", [LIMIT, batch_size.SAMPLES + 1])
def test_the_next_trial_has_the_memory_of_a_batch(size: int):
    batches: list[weakref.ref[torch.Tensor]] = []

    class Noting(batch_size.Training):
        def training_step(self, batch, batch_idx):
            batches.append(weakref.ref(batch[0]))
            return super().training_step(batch, batch_idx)

    case = batch_size.Case("small, dense", Noting("small", "dense"), list, "cpu")
    assert (case.fit(size) is None) == (size > LIMIT)
    gc.collect()
    assert [batch() for batch in batches] == [None] * len(batches) != []


@pytest.mark.usefixtures("_small")
def test_two_small_sizes_say_where_the_cap_is():
    case = Line("small, dense", batch_size.Training("small", "dense"), list, "cpu")
    assert batch_size.search(case, 8, 1000 / 1024) == 300
    assert len(case.peaks) == 4


def test_batches_are_as_large_as_they_say_and_of_the_given_samples(monkeypatch: pytest.MonkeyPatch):
    data = torch.arange(4)[:, None].expand(4, 3), torch.arange(4)
    monkeypatch.setitem(
        third_party.WORKLOADS, "small", third_party.Workload("torch", 2, Blocks, lambda n: data, lambda *_: None)
    )
    training = batch_size.Training("small", "dense")
    batch = next(iter(training.train_dataloader()))
    for size in (1, 4, 6):
        training.batch_size = size
        x, y = training.on_after_batch_transfer(batch, 0)
        assert x.shape == (size, 3)
        assert y.tolist() == x[:, 0].tolist() == [0, 1, 2, 3, 0, 1][:size]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_what_counts_as_out_of_memory(message: str, expected: bool):
    assert batch_size.out_of_memory(RuntimeError(message)) is expected


def test_the_table_names_what_failed_and_how_many_times_the_dense_batch_fits():
    head = {"model": "net", "peak_mib": 10.0, "finder_batch": 30, "finder_fits": True}
    records = [
        head | {"method": "dense", "batch": 20},
        head | {"method": "max", "batch": 50, "finder_batch": 60, "finder_fits": False},
        {"model": "net", "method": "paper", "error": "took over 560 s"},
    ]
    console = Console(file=io.StringIO(), width=120)
    console.print(batch_size.summary(records).rich())
    text = console.file.getvalue()
    assert "50 (2.50 times)" in text
    assert "60, out of memory" in text
    assert "took over 560 s" in text
