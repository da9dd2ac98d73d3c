"""Column sums against fp64, however the rows are cut and lie."""

from __future__ import annotations

import pytest
import torch

from lightning_actprune.codec.dispatch import as_operator
from lightning_actprune.kernels import sums as kernels
from lightning_actprune.kernels.sums import AddSetsLaunch, column_sums_launch
from tests.support import oracle

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def column_sums(grad_y, dtype):
    shape = *grad_y.shape, grad_y.stride(0), grad_y.element_size()
    return column_sums_launch(*shape, dtype, grad_y.device)(grad_y)


@pytest.mark.parametrize(
    ("rows", "outputs", "dtype"),
    [(1, 1, DTYPES[0]), (64, 130, DTYPES[2]), (1000, 33, DTYPES[1]), (1031, 300, DTYPES[0])],
    ids=str,
)
def test_sums_are_exact_on_integers(kernel_device, rows, outputs, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 3)
    grad_y = oracle.integers(rows, outputs, dtype=dtype, device=kernel_device)
    assert torch.equal(column_sums(grad_y, torch.float32).double(), grad_y.double().sum(0))
    base = oracle.integers(90, 70, dtype=dtype, device=kernel_device)  # rows may have gaps and start anywhere
    for grad_y in (base[::2, 3:60], base[1:, 1:], base[:1].expand(90, 70)):
        assert torch.equal(column_sums(grad_y, torch.float32).double(), grad_y.double().sum(0))


def test_counters_serve_launches_of_any_shape_one_after_another(kernel_device, monkeypatch):
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 100)
    monkeypatch.setattr(kernels, "COUNTERS", 2)
    monkeypatch.setattr(kernels, "_counters", {})
    for rows, outputs in ((300, 40), (257, 300), (500, 64), (300, 40)):
        launch = column_sums_launch(rows, outputs, outputs, 4, torch.float32, kernel_device)
        assert launch.parts > 1
        for _ in range(2):
            grad_y = oracle.integers(rows, outputs, device=kernel_device)
            assert torch.equal(launch(grad_y), grad_y.sum(0))
            (counters,) = kernels._counters.values()
            assert not counters.any()
    assert counters.numel() == 8  # 300 columns in groups of 64, in place of 2


def test_operators_keep_no_counters(kernel_device, monkeypatch):
    monkeypatch.setattr(kernels, "_counters", {})
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 3)
    grad_y = oracle.integers(1031, 64, device=kernel_device)
    assert torch.equal(as_operator(column_sums)(grad_y, torch.float32), grad_y.sum(0))
    assert not kernels._counters  # memory that a compiler with CUDA graphs takes back
    column_sums(grad_y, torch.float32)
    assert kernels._counters


@pytest.mark.gpu
def test_streams_have_counters_of_their_own_and_recorded_graphs_none(monkeypatch):
    monkeypatch.setattr(kernels, "_counters", {})
    grads = [oracle.integers(25088, 384, device=torch.device("cuda")) for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in grads]
    torch.cuda.synchronize()
    results = [[] for _ in grads]
    for _ in range(20):
        for grad_y, stream, sums in zip(grads, streams, results, strict=True):
            with torch.cuda.stream(stream):
                sums.append(column_sums(grad_y, torch.float32))
    torch.cuda.synchronize()
    assert len(kernels._counters) == len(streams)
    for grad_y, sums in zip(grads, results, strict=True):
        assert all(torch.equal(one, grad_y.sum(0)) for one in sums)
    graph, before = torch.cuda.CUDAGraph(), dict(kernels._counters)
    with torch.cuda.graph(graph):
        recorded = column_sums(grads[0], torch.float32)
    assert kernels._counters.keys() == before.keys()
    for grad_y in grads[1:]:
        grads[0].copy_(grad_y)
        graph.replay()
        assert torch.equal(recorded, grad_y.sum(0))


def test_result_has_the_wanted_type_is_rounded_once_and_keeps_what_is_not_finite_in_its_column(kernel_device):
    grad_y = torch.full((999, 20), 0.1, dtype=torch.float16, device=kernel_device)
    expected = grad_y.double().sum(0)
    assert oracle.relative_error(column_sums(grad_y, torch.float32), expected) < 1e-6
    assert torch.equal(column_sums(grad_y, torch.float16), expected.to(torch.float16))
    grad_y[7, 3], grad_y[8, 15] = float("nan"), float("inf")
    sums = column_sums(grad_y, torch.float32)
    assert sums[3].isnan()
    assert sums[15].isinf()
    assert sums.isfinite().sum() == 18


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((25088, 1536), DTYPES[0]), ((25216, 3072), DTYPES[1]), ((128, 1000), DTYPES[2]), ((1_000_000, 64), DTYPES[1])],
    ids=str,
)
def test_large_gradients_are_summed_as_well_as_torch_sums_them(shape, dtype):
    grad_y = torch.randn(shape, device="cuda", dtype=dtype)
    exact, ours = grad_y.double().sum(0), column_sums(grad_y, torch.float32)
    theirs = oracle.relative_error(grad_y.sum(0, dtype=torch.float32), exact)
    assert oracle.relative_error(ours, exact) <= max(2 * theirs, 1e-6)
    assert torch.equal(ours, column_sums(grad_y, torch.float32))


@pytest.mark.gpu
def test_addresses_beyond_32_bits():
    x = torch.zeros(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    grad_y = x.as_strided((3, 256), (2**30, 1))
    grad_y.copy_(oracle.integers(3, 256, dtype=torch.bfloat16, device="cuda"))
    assert torch.equal(column_sums(grad_y, torch.float32).double(), grad_y.double().sum(0))


@pytest.mark.parametrize(
    ("rows", "outputs", "programs", "sets"), [(1, 33, 1, 2), (40, 70, 1, 1), (300, 130, 100, 1), (300, 130, 100, 2)]
)
def test_sets_are_added_each_to_its_own_result(kernel_device, rows, outputs, programs, sets, monkeypatch):
    """Of other types; in one part or several, whose counters are zero again for the next launch."""
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: programs)
    monkeypatch.setattr(kernels, "_counters", {})
    launch = AddSetsLaunch(rows, sets, outputs, kernel_device)
    assert (launch.scratch > rows * sets * outputs) == (programs > 1)
    for _ in range(2):
        values = oracle.integers(rows, sets, outputs, device=kernel_device)
        scratch = torch.full((launch.scratch,), float("nan"), device=kernel_device)
        scratch[: values.numel()] = values.flatten()
        first = torch.empty(outputs, device=kernel_device)
        second = torch.empty(outputs, dtype=torch.bfloat16, device=kernel_device) if sets == 2 else first
        launch(scratch, first, second)
        assert torch.equal(first, values[:, 0].sum(0))
        assert torch.equal(second, values[:, -1].sum(0).to(second.dtype))
    assert not any(counters.any() for counters in kernels._counters.values())
