"""What ActivationMemoryMonitor measures, in which batch, and what it leaves alone."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning
from lightning_actprune.analysis.step_memory import StepMemory
from lightning_actprune.schedules import LinearSchedule
from tests.callbacks.test_loggers import TOTALS
from tests.support.by_hand import ByHand
from tests.support.helpers import BATCHES, Net, assert_plain, fit, loader


def measured(model: Net, *callbacks: Any, **options: Any) -> tuple[ActivationMemoryMonitor, StepMemory]:
    """Return the monitor of a fit, and the step that it has measured."""
    monitor = ActivationMemoryMonitor(verbose=False)
    fit(model, *callbacks, monitor, **options)
    assert monitor.report.step is not None
    return monitor, monitor.report.step


@pytest.mark.parametrize(
    "arguments", [*({"measure_batch": value} for value in (-1, 1.5, "3", True)), {"log_layers": "no"}, {"verbose": 3}]
)
def test_arguments_are_checked(arguments: dict[str, Any]):
    [(name, value)] = arguments.items()
    with pytest.raises(MisconfigurationException, match=f"`{name}` must be .* got {value!r}"):
        ActivationMemoryMonitor(**arguments)


def test_two_in_one_trainer_are_refused():
    model = Net()
    with pytest.raises(MisconfigurationException, match="takes one ActivationMemoryMonitor, got 2"):
        fit(model, ActivationPruning(sparsity=0.5), ActivationMemoryMonitor(0), ActivationMemoryMonitor(1))
    assert_plain(model)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_a_pruned_run_saves_what_it_announces_against_the_dense_one(precision: str):
    """With the 16-bit copies of weights that autocast makes, and the phases of the step."""
    dense, itemsize = None, {"32-true": 4, "bf16-mixed": 2, "64-true": 8}[precision]
    for callbacks in ([], [ActivationPruning(sparsity=0.5, verbose=False)]):
        monitor, step = measured(Net(), *callbacks, precision=precision)
        report = monitor.report
        kept = report.stored_bytes - report.other_bytes if callbacks else 0
        assert step.activation_bytes[step.forward_end] == report.stored_bytes
        assert step.packed_bytes[step.forward_end] == kept
        assert step.activation_bytes[-1] == 0
        assert report.measured_peak_bytes is None
        assert [row.dense_bytes for row in report.rows] == [4 * 8 * width * itemsize for width in (64, 128, 64)]
        assert [row.stored_bytes for row in report.rows] == [row.accounted_bytes for row in report.rows]
        phases = [moment.phase for moment in step.moments]
        assert phases == sorted(phases, key=["forward", "backward", "optimizer"].index)
        assert len(set(phases)) == 3
        dense = dense or report
    assert report.dense_bytes == dense.stored_bytes
    assert dense.stored_bytes - report.stored_bytes == report.saved_bytes > 0 == dense.saved_bytes
    assert [row.fqn for row in report.rows] == [row.fqn for row in dense.rows]


def test_gradients_of_the_step_before_are_there_in_the_forward():
    model = Net()
    trained = sum(parameter.nbytes for parameter in model.parameters())
    _, step = measured(model)
    assert {moment.gradient_bytes for moment in step.moments[: step.forward_end]} == {trained}
    assert step.moments[step.forward_end].gradient_bytes == 0  # Lightning zeroes them once the forward is over
    assert step.moments[-1].gradient_bytes == trained
    assert step.moments[step.peak_in()].phase == "forward"
    _, step = measured(model, accumulate_grad_batches=4)
    assert {moment.gradient_bytes for moment in step.moments} == {trained}


class Counting(ActivationMemoryMonitor):
    """Notes the batches that it measures."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.measured: list[tuple[int, int]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._meter is not None:
            self.measured.append((trainer.current_epoch, batch_idx))

    def on_train_batch_end(self, *args):
        super().on_train_batch_end(*args)
        assert not args[1].head._forward_hooks


@pytest.mark.parametrize(
    ("measure_batch", "options", "expected"),
    [
        (0, {"max_epochs": 2}, [(0, 0), (1, 0)]),
        (2, {"val_check_interval": 1}, [(0, 2)]),
        (100, {"max_epochs": 2}, [(0, 3), (1, 3)]),
        (3, {"max_steps": 6}, [(0, 3), (1, 1)]),
        (3, {"max_steps": 8}, [(0, 3), (1, 3)]),
        # Of the last step, the batch that ends it.
        (3, {"max_steps": 1, "accumulate_grad_batches": 4}, [(0, 3)]),
        (3, {"max_steps": 3, "accumulate_grad_batches": 2}, [(0, 3), (1, 1)]),
        (3, {"fast_dev_run": 2}, [(0, 1)]),
        (3, {"overfit_batches": 1, "gradient_clip_val": 0.1, "precision": "bf16-mixed"}, [(0, 0)]),
    ],
    ids=str,
)
def test_one_step_an_epoch_is_measured(measure_batch: int, options: dict[str, Any], expected: list[tuple[int, int]]):
    monitor, model = Counting(measure_batch), Net()
    epochs = {"max_epochs": -1} if "max_steps" in options else {}
    made = fit(model, ActivationPruning(sparsity=0.6), monitor, **epochs | options)
    assert monitor.measured == expected
    if "accumulate_grad_batches" not in options:
        assert [row["step"] for row in monitor.history] == [epoch * BATCHES + batch for epoch, batch in expected]
    assert made.callback_metrics.keys() >= TOTALS
    assert_plain(model)


def test_a_resumed_epoch_is_measured(tmp_path):
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    fit(Net(), save, enable_checkpointing=True, max_epochs=2)
    monitor = Counting(1)
    fit(Net(), monitor, max_epochs=2, ckpt=tmp_path / "step=6.ckpt")
    assert monitor.measured == [(1, 2)]


class Stream(IterableDataset):
    """Three batches, of a length that nobody knows."""

    def __iter__(self):
        yield from loader(12, 12).dataset


class Skipping(Net):
    """Skips a batch in the training step, or in the hook of the batch."""

    def __init__(self, nothing: int | None = None, hook: int | None = None) -> None:
        super().__init__()
        self.nothing, self.hook = nothing, hook

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == self.nothing else super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.hook else None


@pytest.mark.parametrize(
    ("measure_batch", "model", "data", "found"),
    [
        (2, Net, DataLoader(Stream(), batch_size=4, num_workers=1), True),
        (3, Net, DataLoader(Stream(), batch_size=4), False),  # of a loader that turns out to be shorter
        (1, lambda: Skipping(nothing=1), None, True),
        (3, lambda: Skipping(nothing=3), None, False),
        (3, lambda: Skipping(hook=3), None, False),
    ],
)
def test_where_a_step_is_missing_the_next_is_measured_or_a_warning_says_so(measure_batch, model, data, found):
    monitor, trained = ActivationMemoryMonitor(measure_batch), model()
    with nullcontext() if found else pytest.warns(UserWarning, match="measured no step: .* `measure_batch`"):
        made = fit(trained, ActivationPruning(sparsity=0.5), monitor, data=data)
    assert (monitor.report is not None) is found
    assert [row["sparsity"] for row in monitor.history] == [0.5] * found
    assert {name for name in made.callback_metrics if "actprune" in name} == (TOTALS if found else set())
    assert_plain(trained)


def test_no_training_batches():
    monitor, model = ActivationMemoryMonitor(), Net()
    fit(model, ActivationPruning(sparsity=LinearSchedule(0.5)), monitor, limit_train_batches=0)
    assert monitor.report is None
    assert_plain(model)


@pytest.mark.parametrize("through_lightning", [True, False])
def test_manual_optimization(through_lightning: bool):
    model = ByHand()
    model.through_lightning = through_lightning
    monitor, step = measured(model, ActivationPruning(sparsity=0.5, verbose=False), max_steps=4)
    assert [row["step"] for row in monitor.history] == [2]  # every optimizer counts as a step
    assert [row.calls for row in monitor.report.rows] == [1 if through_lightning else 2] * 3
    if through_lightning:
        assert step.moments[-1].optimizer_bytes == sum(parameter.nbytes for parameter in model.parameters())
        phases = [moment.phase for moment in step.moments]
        changes = [phase for i, phase in enumerate(phases) if i == 0 or phases[i - 1] != phase]
        assert changes == ["forward", "backward", "optimizer"] * 2


class Lbfgs(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


def test_a_closure_of_several_forwards_is_measured_as_any():
    found, usual = (measured(model, ActivationPruning(verbose=False), max_epochs=2)[0] for model in (Lbfgs(), Net()))
    assert [row.calls for row in found.report.rows] == [1] * 3
    assert [row["epoch"] for row in found.history] == [0, 1]
    assert [row["saved_bytes"] for row in found.history] == [row["saved_bytes"] for row in usual.history]


def test_no_tensor_is_kept_from_step_to_step_and_gradients_are_those_of_an_unmeasured_step():
    weights, counts = [], list[int]()

    def count(*args: Any) -> None:
        gc.collect()
        counts.append(sum(isinstance(o, Tensor) for o in gc.get_objects()))

    for callbacks in ([], [ActivationMemoryMonitor(0, verbose=False), LambdaCallback(on_train_epoch_end=count)]):
        torch.manual_seed(0)
        model = Net(lr=0.5)
        pruning = ActivationPruning(sparsity=LinearSchedule(0.5), verbose=False)
        fit(model, pruning, *callbacks, data=loader(8, 4), max_epochs=4)
        weights.append([p.clone() for p in model.parameters()])
    assert counts[-1] <= counts[1]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


class Mlp(pl.LightningModule):
    """Eight residual blocks of the kind that pruning is for."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(8)
        )

    def training_step(self, batch, batch_idx):
        for block in self.blocks:
            batch = batch + block(batch)
        return batch.square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), capturable=True)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_measured_saving_is_the_announced_one(precision):
    data = DataLoader(torch.randn(96, 196, 256), batch_size=16)
    options = {"data": data, "accelerator": "gpu", "precision": precision}
    pruning = ActivationPruning(sparsity=0.6, block_size=32, verbose=False)
    dense, pruned = (measured(Mlp(), *callbacks, **options)[0].report for callbacks in ([], [pruning]))
    assert len(pruned.rows) == 16
    assert [row.stored_bytes for row in pruned.rows] == [row.accounted_bytes for row in pruned.rows]
    # Under autocast the dense layers also keep a 16-bit copy of each weight, which the pruned ones do not.
    assert pruned.dense_bytes == dense.stored_bytes
    for report in (dense, pruned):
        assert report.measured_activation_bytes == pytest.approx(report.stored_bytes, rel=0.02)
    saved = dense.measured_activation_bytes - pruned.measured_activation_bytes
    assert saved == pytest.approx(pruned.saved_bytes, rel=0.02)
    assert pruned.measured_activation_bytes < pruned.measured_peak_bytes < dense.measured_peak_bytes
