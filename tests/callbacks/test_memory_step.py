"""Where the peak of a step is, as ActivationMemoryMonitor reports it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning
from lightning_actprune.analysis.recorder import unpack_listeners
from lightning_actprune.analysis.step_memory import StepMemory
from tests.support.helpers import Net, assert_plain, trainer


def fit(*callbacks: Any, model: Net | None = None, **options: Any) -> tuple[ActivationMemoryMonitor, StepMemory]:
    monitor = ActivationMemoryMonitor(verbose=False)
    trainer(*callbacks, monitor, **options).fit(model or Net())
    step = monitor.report.step
    assert step is not None
    return monitor, step


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("pruned", [False, True])
def test_the_step_holds_what_the_report_counts(pruned: bool, precision: str):
    callbacks = [ActivationPruning(sparsity=0.5, verbose=False)] if pruned else []
    monitor, step = fit(*callbacks, precision=precision)
    report = monitor.report
    assert step.activation_bytes[step.forward_end] == report.stored_bytes
    assert step.packed_bytes[step.forward_end] == (report.stored_bytes - report.other_bytes if pruned else 0)
    assert step.activation_bytes[-1] == 0
    assert report.measured_peak_bytes is None
    phases = [moment.phase for moment in step.moments]
    assert phases == sorted(phases, key=["forward", "backward", "optimizer"].index)
    assert set(phases) == {"forward", "backward", "optimizer"}


def test_gradients_of_the_step_before_are_there_in_the_forward():
    model = Net()
    _, step = fit(model=model)
    trained = sum(parameter.nbytes for parameter in model.parameters())
    forward = [moment.gradient_bytes for moment in step.moments[: step.forward_end]]
    assert set(forward) == {trained}  # Lightning zeroes them once the forward is over
    assert step.moments[step.forward_end].gradient_bytes == 0
    assert step.moments[-1].gradient_bytes == trained
    assert step.moments[step.peak_in()].phase == "forward"


def test_accumulated_gradients_stay():
    model = Net()
    _, step = fit(model=model, accumulate_grad_batches=4)
    trained = sum(parameter.nbytes for parameter in model.parameters())
    assert {moment.gradient_bytes for moment in step.moments} == {trained}


def test_state_of_all_optimizers():
    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            body = torch.optim.SGD(self.body.parameters(), 0.1, momentum=0.9)
            return [body, torch.optim.SGD(self.head.parameters(), 0.1, momentum=0.9)]

    model = Two()
    _, step = fit(ActivationPruning(sparsity=0.5, verbose=False), model=model)
    assert step.moments[-1].optimizer_bytes == sum(parameter.nbytes for parameter in model.parameters())
    phases = [moment.phase for moment in step.moments]
    changes = [phase for i, phase in enumerate(phases) if i == 0 or phases[i - 1] != phase]
    assert changes == ["forward", "backward", "optimizer"] * 2


def test_nothing_is_left_after_an_exception_in_backward():
    class Failing(Net):
        def on_after_backward(self) -> None:
            raise RuntimeError("after backward")

    model, monitor = Failing(), ActivationMemoryMonitor(measure_batch=0)
    with pytest.raises(RuntimeError, match="after backward"):
        trainer(ActivationPruning(sparsity=0.6), monitor).fit(model)
    assert unpack_listeners == []
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert_plain(model)
