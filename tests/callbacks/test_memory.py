"""ActivationMemoryMonitor: what it measures, logs and shows, and what it survives."""

from __future__ import annotations

import csv
import gc
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning
from lightning_actprune.callbacks import memory
from lightning_actprune.schedules import LinearSchedule
from tests.support.helpers import BATCHES, ConfiguredNet, Net, assert_plain, loader, trainer
from tests.support.marks import needs_passes

NAMES = {f"actprune/{name}" for name in ("dense_mib", "stored_mib", "saved_mib", "saved_frac", "sparsity")}
MIB = 2**20


@pytest.mark.parametrize("value", [-1, 1.5, "3", True, None])
def test_arguments_are_checked(value: Any):
    with pytest.raises(MisconfigurationException, match=r"`measure_batch` must be an int >= 0, got .* HINT"):
        ActivationMemoryMonitor(measure_batch=value)


@pytest.mark.parametrize("name", ["log_layers", "log_figures"])
def test_what_is_no_bool_is_refused(name: str):
    with pytest.raises(MisconfigurationException, match=f"`{name}` must be a bool, got 'no' of type str. HINT"):
        ActivationMemoryMonitor(**{name: "no"})


def test_metrics_reach_callback_metrics_without_a_logger():
    monitor = ActivationMemoryMonitor()
    made = trainer(ActivationPruning(sparsity=0.5), monitor)
    made.fit(Net())
    metrics = {name: value.item() for name, value in made.callback_metrics.items() if name.startswith("actprune")}
    assert metrics.keys() == NAMES
    report = monitor.report
    assert metrics["actprune/dense_mib"] == pytest.approx(report.dense_bytes / MIB)
    assert metrics["actprune/stored_mib"] == pytest.approx(report.stored_bytes / MIB)
    assert metrics["actprune/saved_mib"] == pytest.approx(report.saved_bytes / MIB)
    assert metrics["actprune/saved_frac"] == pytest.approx(report.saved_fraction)
    assert metrics["actprune/sparsity"] == 0.5
    assert [row.stored_bytes for row in report.rows] == [row.accounted_bytes for row in report.rows]
    assert (report.measured_activation_bytes, report.measured_peak_bytes) == (None, None)


class Watching(pl.Callback):
    """Notes the totals after each batch, in the metrics and in the progress bar."""

    def __init__(self) -> None:
        self.seen: list[tuple[set[str], set[str]]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        metrics = ({*trainer.callback_metrics}, {*trainer.progress_bar_metrics})
        self.seen.append(tuple({name for name in names if "actprune" in name} for names in metrics))


def test_totals_are_there_as_soon_as_a_step_was_measured():
    watching, monitor = Watching(), ActivationMemoryMonitor(measure_batch=1)
    trainer(ActivationPruning(), monitor, watching, max_epochs=2).fit(Net())
    nothing, all_of_them = (set(), set()), (NAMES, {"actprune/saved_frac"})
    assert watching.seen == [nothing] * 2 + [all_of_them] * (2 * BATCHES - 2)


@needs_passes
@pytest.mark.parametrize("part", ["all", "body"])
@pytest.mark.slow
def test_a_compiled_model_shows_its_total(part: str, caplog):
    wide = 256  # samples: what compiled code keeps of smaller tensors stays as it is
    model, monitor, dense = Net(batch_size=wide), ActivationMemoryMonitor(), ActivationMemoryMonitor()
    trainer(dense).fit(Net(batch_size=wide))
    if part == "body":
        model.body = torch.compile(model.body, backend="aot_eager")
    whole = torch.compile(model, backend="aot_eager") if part == "all" else model
    caplog.set_level("INFO")
    made = trainer(ActivationPruning(), monitor)
    made.fit(whole)
    report = monitor.report
    assert 0 < report.compiled_bytes <= report.stored_bytes < dense.report.stored_bytes
    assert (report.dense_bytes, report.saved_fraction) == (None, None)
    logged = {name: value for name, value in made.callback_metrics.items() if "actprune" in name}
    assert logged == {"actprune/stored_mib": pytest.approx(report.stored_bytes / MIB)}
    assert made.progress_bar_metrics["actprune/stored_mib"] > 0
    text = " ".join(caplog.text.split())
    assert "of it kept by compiled code, whose backward reads " in text
    assert " 0.00 " not in text.partition("Activations: ")[2].partition("MiB")[0]


def test_two_in_one_trainer_are_refused_since_loggers_would_get_their_means():
    model = Net()
    with pytest.raises(MisconfigurationException, match=r"takes one ActivationMemoryMonitor, got 2.*HINT: keep one"):
        trainer(ActivationPruning(sparsity=0.5), ActivationMemoryMonitor(0), ActivationMemoryMonitor(1)).fit(model)
    assert_plain(model)


@pytest.mark.parametrize("make", [Net, ConfiguredNet])
def test_a_dense_run_shows_the_same_layers_and_dense_bytes(make):
    dense, pruned = ActivationMemoryMonitor(), ActivationMemoryMonitor()
    trainer(dense).fit(make())
    trainer(ActivationPruning(sparsity=0.5), pruned).fit(make())
    assert [(row.fqn, row.dense_bytes) for row in dense.report.rows] == [
        (row.fqn, row.dense_bytes) for row in pruned.report.rows
    ]
    assert (dense.report.saved_bytes, dense.report.other_bytes) == (0, pruned.report.other_bytes)
    assert pruned.report.saved_bytes > 0
    assert [row.dense_bytes for row in dense.report.rows] == [4 * 8 * width * 4 for width in (64, 128, 64)]


@pytest.mark.parametrize("order", [1, -1])
def test_the_sparsity_of_the_measured_step_is_shown(order: int):
    monitor = ActivationMemoryMonitor(measure_batch=2)
    callbacks = [ActivationPruning(sparsity=LinearSchedule(end=0.8)), monitor][::order]
    trainer(*callbacks, max_epochs=1).fit(Net())
    assert {row.sparsity for row in monitor.report.rows} == {0.8 * 2 / BATCHES}


def test_csv_rows_one_an_epoch(tmp_path):
    log = CSVLogger(tmp_path)
    trainer(ActivationPruning(sparsity=0.6), ActivationMemoryMonitor(), logger=log, max_epochs=3).fit(Net())
    with (Path(log.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["actprune/saved_mib"]]
    assert [(row["epoch"], row["step"]) for row in rows] == [("0", "3"), ("1", "7"), ("2", "11")]
    assert all(float(row["actprune/saved_frac"]) > 0 for row in rows)


def test_other_callbacks_can_monitor_the_metrics(tmp_path):
    save = ModelCheckpoint(tmp_path, monitor="actprune/saved_mib", mode="max")
    stop = EarlyStopping("actprune/saved_mib", patience=1, mode="max")
    made = trainer(
        ActivationMemoryMonitor(), ActivationPruning(sparsity=0.6), save, stop, enable_checkpointing=True, max_epochs=9
    )
    made.fit(Net())
    assert save.best_model_score > 0
    assert made.current_epoch == 2  # the saving does not improve


def says_so() -> Any:
    """Expect the warning of a fit in which nothing was measured."""
    return pytest.warns(UserWarning, match=r"measured no step: .* before batch \d of .* HINT: lower `measure_batch`")


class Counting(ActivationMemoryMonitor):
    """Notes the batches that were measured and how often the model was hooked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.measured: list[tuple[int, int]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if pl_module.head._forward_hooks:
            self.measured.append((trainer.current_epoch, batch_idx))

    def on_after_backward(self, trainer, pl_module):
        assert self._meter is None  # counting ends with the forward

    def on_train_batch_end(self, *args):
        super().on_train_batch_end(*args)
        assert not args[1].head._forward_hooks


@pytest.mark.parametrize(("max_steps", "expected"), [(2, [(0, 1)]), (6, [(0, 3), (1, 1)]), (8, [(0, 3), (1, 3)])])
def test_the_last_step_is_measured_if_the_fit_ends_before_the_batch(max_steps: int, expected: list[tuple[int, int]]):
    monitor = Counting(3)
    trainer(monitor, max_steps=max_steps, max_epochs=-1).fit(Net())
    assert monitor.measured == expected
    assert [row["step"] for row in monitor.history] == [epoch * BATCHES + batch for epoch, batch in expected]


@pytest.mark.parametrize(("measure_batch", "expected"), [(0, 0), (2, 2), (3, 3), (100, BATCHES - 1)])
def test_one_step_an_epoch_is_measured(measure_batch: int, expected: int):
    monitor, model = Counting(measure_batch), Net()
    trainer(monitor, max_epochs=2).fit(model)
    assert monitor.measured == [(0, expected), (1, expected)]
    trainer(monitor, max_epochs=1).fit(model)
    assert monitor.measured[2:] == [(0, expected)]


def test_a_resumed_epoch_is_measured(tmp_path):
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer(save, enable_checkpointing=True, max_epochs=2).fit(Net())
    monitor = Counting(1)
    trainer(monitor, max_epochs=2).fit(Net(), ckpt_path=tmp_path / "step=6.ckpt")
    assert monitor.measured == [(1, 2)]
    assert monitor.report is not None


@pytest.mark.parametrize(
    "options",
    [
        {"fast_dev_run": True},
        {"fast_dev_run": 2},
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.1},
        {"limit_train_batches": 1},
        {"val_check_interval": 1},
        {"overfit_batches": 1},
        {"precision": "bf16-mixed"},
        {"max_steps": 2, "max_epochs": -1},
        {"max_steps": 2, "max_epochs": -1, "accumulate_grad_batches": 2, "limit_train_batches": 3},
    ],
    ids=str,
)
def test_trainer_options(options: dict):
    monitor, model = ActivationMemoryMonitor(), Net()
    made = trainer(ActivationPruning(sparsity=0.6), monitor, **options)
    made.fit(model)
    assert_plain(model)
    assert monitor.report.dense_bytes > 0
    assert made.callback_metrics.keys() >= NAMES


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_steps": 1, "accumulate_grad_batches": 4}, [(0, 3)]),
        ({"max_steps": 3, "accumulate_grad_batches": 2}, [(0, 3), (1, 1)]),
    ],
)
def test_of_the_last_step_the_batch_that_ends_it_is_measured(options: dict[str, Any], expected: list[tuple[int, int]]):
    monitor = Counting(3)
    trainer(monitor, max_epochs=9, **options).fit(Net())
    assert monitor.measured == expected


def test_no_training_batches():
    monitor, model = ActivationMemoryMonitor(), Net()
    trainer(ActivationPruning(sparsity=LinearSchedule(0.5)), monitor, limit_train_batches=0).fit(model)
    assert monitor.report is None
    assert_plain(model)


class Manual(Net):
    """Two optimizers by hand; ``backward`` through Lightning or not at all through it."""

    def __init__(self, through_lightning: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.through_lightning = through_lightning

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for optimizer in self.optimizers():
            loss = nn.functional.cross_entropy(self(x), y)
            optimizer.zero_grad()
            if self.through_lightning:
                self.manual_backward(loss)
            else:
                loss.backward()
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.body.parameters(), 0.1), torch.optim.SGD(self.head.parameters(), 0.1)]


def test_every_optimizer_counts_as_a_step():
    monitor = ActivationMemoryMonitor()
    trainer(monitor, max_steps=4).fit(Manual(True))
    assert [row["step"] for row in monitor.history] == [2]


@pytest.mark.parametrize("through_lightning", [True, False])
def test_manual_optimization(through_lightning: bool):
    monitor, model = ActivationMemoryMonitor(), Manual(through_lightning)
    trainer(ActivationPruning(sparsity=0.5), monitor).fit(model)
    assert_plain(model)
    assert [row.calls for row in monitor.report.rows] == [1 if through_lightning else 2] * 3


def test_a_closure_that_runs_several_forwards_is_measured_once():
    class Lbfgs(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=3)

    monitor, model = ActivationMemoryMonitor(), Lbfgs()
    trainer(monitor).fit(model)
    assert len(model.seen) > BATCHES
    assert [row.calls for row in monitor.report.rows] == [1] * 3


def test_skipped_steps():
    class Skipping(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None

    for measure_batch, measured in ((1, True), (3, False)):
        monitor, model = ActivationMemoryMonitor(measure_batch), Skipping()
        with nullcontext() if measured else says_so():
            trainer(monitor).fit(model)
        assert (monitor.report is not None) is measured
        assert_plain(model)


@pytest.mark.parametrize("forward", [True, False])
def test_in_the_place_of_a_skipped_step_the_next_is_measured(forward: bool):
    class Skipping(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx != 1:
                return super().training_step(batch, batch_idx)
            if forward:
                super().training_step(batch, batch_idx)
            return None

    monitors = ActivationMemoryMonitor(1), ActivationMemoryMonitor(2)
    for monitor in monitors:
        trainer(ActivationPruning(sparsity=0.5), monitor).fit(Skipping())
    of_next, expected = (monitor.history for monitor in monitors)
    assert of_next == expected
    assert of_next[0]["sparsity"] == 0.5


class Fetching(Net):
    """Takes its batches from the loader itself: Lightning cannot see how large they are, and counts them too late."""

    def training_step(self, dataloader_iter) -> torch.Tensor:
        (x, y), _, _ = next(dataloader_iter)
        return nn.functional.cross_entropy(self(x), y)


@pytest.mark.parametrize("preset", ["paper", "max"])
def test_steps_that_fetch_their_batch(preset: str):
    monitor, usual = ActivationMemoryMonitor(1), ActivationMemoryMonitor(1)
    made = trainer(ActivationPruning(preset, verbose=False), monitor, max_epochs=2)
    made.fit(Fetching())
    assert made.callback_metrics.keys() >= NAMES
    assert [row["epoch"] for row in monitor.history] == [0, 1]
    trainer(ActivationPruning(preset, verbose=False), usual, max_epochs=2).fit(Net())
    # What is kept of the batch itself, the labels, counts here.
    assert [row["saved_bytes"] for row in monitor.history] == [row["saved_bytes"] for row in usual.history]


def test_where_all_steps_are_skipped_nothing_is_measured_or_logged():
    class Skipping(Net):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)

    monitor = ActivationMemoryMonitor(1)
    made = trainer(monitor, max_epochs=2)
    with says_so():
        made.fit(Skipping())
    assert (monitor.report, monitor.history) == (None, [])
    assert not [name for name in made.callback_metrics if name.startswith("actprune")]


def test_steps_without_gradients():
    monitor, model = ActivationMemoryMonitor(), Net()
    model.body.requires_grad_(False)
    trainer(ActivationPruning(sparsity=0.5), monitor).fit(model)
    assert [row.fqn for row in monitor.report.rows] == ["head"]


def test_an_unsized_loader_is_measured_once_it_is_long_enough():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from loader(12, 12).dataset

    data = torch.utils.data.DataLoader(Stream(), batch_size=4)
    for measure_batch, measured in ((2, True), (3, False)):
        monitor = ActivationMemoryMonitor(measure_batch)
        made = trainer(monitor)
        with nullcontext() if measured else says_so():
            made.fit(Net(), data)
        assert (monitor.report is not None) is measured
        assert (made.callback_metrics.keys() >= NAMES) is measured


def test_the_meter_does_not_disturb_hooks_of_the_step_itself():
    class Offloading(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with torch.autograd.graph.save_on_cpu():
                return super().training_step(batch, batch_idx)

    monitor, model = ActivationMemoryMonitor(), Offloading()
    trainer(ActivationPruning(sparsity=0.6), monitor).fit(model)
    assert monitor.report.rows == []  # all of it is handed to the step's own hooks
    x = torch.randn(3, requires_grad=True)
    x.exp().sum().backward()


def test_the_hooks_are_gone_after_an_exception_in_the_step():
    class Failing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise RuntimeError("in the step")

    monitor, model = ActivationMemoryMonitor(measure_batch=0), Failing()
    with pytest.raises(RuntimeError, match="in the step"):
        trainer(monitor, num_sanity_val_steps=0).fit(model)
    assert_plain(model)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.detach(), lambda t: t):
        torch.randn(3, requires_grad=True).exp()
    assert len(packed) == 1
    trainer(monitor).fit(Net())
    assert monitor.report is not None


@pytest.mark.slow
def test_no_tensor_is_kept_from_step_to_step():
    counts: list[int] = []

    class Count(pl.Callback):
        def on_train_epoch_end(self, *args: Any) -> None:
            gc.collect()
            counts.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))

    monitors = ActivationMemoryMonitor(verbose=False, measure_batch=1), Count()
    data = loader(8, 4)
    trainer(ActivationPruning(sparsity=LinearSchedule(0.5), verbose=False), *monitors, max_epochs=6).fit(Net(), data)
    assert counts[-1] <= counts[1]


def test_gradients_are_those_of_an_unmeasured_step():
    weights = []
    for callbacks in ([], [ActivationMemoryMonitor(measure_batch=0)]):
        torch.manual_seed(0)
        model = Net(lr=0.5)
        trainer(ActivationPruning(sparsity=0.5, verbose=False), *callbacks).fit(model)
        weights.append([p.clone() for p in model.parameters()])
    torch.testing.assert_close(*weights, rtol=0, atol=0)


@pytest.mark.gpu
def test_the_allocator_agrees_with_the_count():
    monitor = ActivationMemoryMonitor()
    data = loader(256, 64, tokens=196)
    made = trainer(ActivationPruning(sparsity=0.6), monitor, accelerator="gpu")
    made.fit(Net(), data)
    report = monitor.report
    assert report.measured_activation_bytes == pytest.approx(report.stored_bytes, rel=0.02)
    assert report.measured_peak_bytes > report.measured_activation_bytes
    assert made.callback_metrics.keys() >= NAMES | {"actprune/activations_mib", "actprune/peak_mib"}


def test_without_lightnings_own_names_the_step_is_the_trainers_and_there_is_no_prefix():
    loop = SimpleNamespace(epoch_loop=SimpleNamespace())
    assert memory._step(SimpleNamespace(fit_loop=loop, global_step=5)) == 4
    assert memory._prefixed(SimpleNamespace(), "name") == "name"
