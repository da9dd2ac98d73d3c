"""SavedTensorMeter and torch.compile."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from lightning_actprune import convert
from lightning_actprune.footprint import SavedTensorMeter
from tests.test_footprint import measure, mlp


def test_compiled_modules_are_not_seen_but_their_bytes_are():
    model = nn.Sequential(mlp(), nn.Linear(8, 64))
    model[0] = torch.compile(model[0], backend="aot_eager")
    x = torch.randn(4, 64)
    model(x).sum().backward()
    report = measure(model, x)
    assert [row.fqn for row in report.rows] == ["1"]
    assert report.other_bytes >= 4 * 4 * (64 + 96 + 128)


def test_measuring_a_compiled_step_compiles_nothing_anew():
    model, x = mlp(), torch.randn(4, 64)
    convert(model, sparsity=0.5)
    counter = CompileCounter()

    @torch.compile(backend=counter)
    def step(x: Tensor) -> Tensor:
        return model(x).sum()

    step(x).backward()
    compiled = counter.frame_count
    for _ in range(2):
        with SavedTensorMeter(model) as meter:
            step(x).backward()
        step(x).backward()
    assert counter.frame_count == compiled
    assert meter.report().total_bytes > 0
