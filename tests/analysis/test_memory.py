"""SavedTensorMeter: what one forward keeps, byte for byte, and what a dense model would."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_actprune.analysis.memory import MemoryReport, SavedTensorMeter
from lightning_actprune.codec.blocks import input_geometry
from lightning_actprune.convert import convert
from lightning_actprune.operators.attention import watchers
from lightning_actprune.operators.linear import ActivationPrunedLinear
from tests.support.attention import Case
from tests.support.compressed import compressed, converted


def measure(model: nn.Module, *inputs: Tensor, batch: object = None) -> MemoryReport:
    with SavedTensorMeter(model, batch) as meter:
        model(*inputs)
    return meter.report()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 128), nn.GELU(), nn.Linear(128, 8))


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        return self.out(torch.relu(self.q(x) + self.k(x) + self.v(x)))


def test_dense_bytes_of_a_transposed_input():
    class Mixing(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x * 2).transpose(1, 2)).transpose(1, 2)

    model, x = Mixing(nn.Linear(64, 64)), torch.randn(4, 64, 96)
    assert measure(model, x).rows[0].dense_bytes == x.nbytes  # F.linear keeps a copy with contiguous features
    convert(model, sparsity=0.5)
    [row] = measure(model, x).rows
    assert row.dense_bytes == x.nbytes
    assert row.stored_bytes == row.accounted_bytes


def test_a_shared_input_counts_once_and_one_kept_elsewhere_not_at_all():
    model, x = Siblings(), torch.randn(4, 6, 64)
    convert(model, sparsity=0.5)
    rows = {row.fqn: row for row in measure(model, x).rows}
    assert [rows[name].dense_bytes for name in ("q", "k", "v", "out")] == [x.nbytes, 0, 0, 0]
    stored = {name: row.stored_bytes for name, row in rows.items()}
    assert stored == {"q": stored["out"], "k": 0, "v": 0, "out": stored["out"]}
    assert all(row.accounted_bytes == row.stored_bytes for row in rows.values())
    assert rows["out"].saved_bytes < 0


def test_each_distinct_storage_counts_once():
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            return y.exp() * y.view(-1).view_as(y) + y.sin()

    x = torch.randn(8, 64, requires_grad=True)
    assert measure(Twice(), x).other_bytes == 2 * x.nbytes  # exp(x) by three operations, exp(exp(x)) by two


@pytest.mark.parametrize("in_batch", [False, True])
def test_the_batch_does_not_count(in_batch: bool):
    model, x = mlp(), torch.randn(4, 64)
    report = measure(model, x, batch={"input": [x[:, :]]} if in_batch else None)
    assert report.rows[0].stored_bytes == (0 if in_batch else x.nbytes)
    convert(model, sparsity=0.5)
    report = measure(model, x, batch=(x, 3) if in_batch else None)
    assert report.rows[0].dense_bytes == (0 if in_batch else x.nbytes)


def test_a_layer_called_twice_sums_its_calls():
    layer = ActivationPrunedLinear(64, 64, sparsity=0.6, block_size=24, scope="token")
    model, x = nn.Sequential(layer, nn.GELU(), layer), torch.randn(2, 4, 64)
    [row] = measure(model, x).rows
    assert (row.kind, row.sparsity) == ("ActivationPrunedLinear", 0.6)
    assert (row.calls, row.dense_bytes) == (2, 2 * x.nbytes)
    once = input_geometry(x, 24, 0.6, "token").stored_bytes(4)
    assert row.stored_bytes == row.accounted_bytes == 2 * once


def test_inactive_layers():
    model, x = mlp(), torch.randn(4, 64)
    converted(model, sparsity=0.0)
    report = measure(model, x)
    assert [(row.sparsity, row.saved_bytes) for row in report.rows] == [(0.0, 0)] * 3
    assert sum(row.dense_bytes for row in report.rows) == 4 * (64 + 96 + 128) * 4
    report = measure(model.requires_grad_(False), x)
    assert report == MemoryReport()
    assert report.saved_fraction == 0.0


def test_reused_addresses_are_not_mistaken_for_seen_storages():
    x = torch.randn(256, 64, requires_grad=True)
    with SavedTensorMeter(nn.Identity()) as meter:
        for _ in range(20):
            x.exp()  # freed at once, so that the next result may lie at the same address
    assert meter.report().other_bytes == 20 * x.nbytes


def test_a_caught_exception_does_not_shift_the_attribution():
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError

    class Tolerant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.broken, self.fine = Broken(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            with suppress(RuntimeError):
                self.broken(x)
            return self.fine(x).sin()

    x = torch.randn(4, 64)
    report = measure(nn.Sequential(Tolerant(), nn.Linear(64, 64)), x)
    assert {row.fqn: row.stored_bytes for row in report.rows} == {"0.fine": x.nbytes, "1": x.nbytes}


def test_other_models_are_not_seen_and_a_failed_call_leaves_no_trace():
    case = Case()
    other, model = compressed(case.make(), sparsity=0.5), compressed(case.make(), sparsity=0.5)
    with SavedTensorMeter(other) as unused:
        rows = measure(model, *case.tensors()).rows
    assert [(row.fqn, row.calls, row.sparsity) for row in rows] == [("(root)", 1, 0.5), ("out_proj", 1, 0.5)]
    assert unused.report().rows == []
    with pytest.raises(AssertionError), SavedTensorMeter(other):
        other(*(x[..., 1:] for x in case.tensors()))
    assert watchers == []
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in other.modules())


def test_a_compiled_part_compiles_nothing_anew_and_is_counted_in_bytes():
    counter = CompileCounterWithBackend("aot_eager")
    model, x = nn.Sequential(mlp(), nn.Linear(8, 64)), torch.randn(4, 64)
    convert(model, sparsity=0.5)
    model[0].compile(backend=counter)
    model(x).sum().backward()
    compiled = counter.frame_count
    for _ in range(2):
        report = measure(model, x)
        model(x).sum().backward()
    assert counter.frame_count == compiled
    assert [row.fqn for row in report.rows] == ["1"]
    assert report.other_bytes >= 2 * 4 * (64 + 96 + 128)
