"""Totals and layers that ActivationMemoryMonitor logs, its history and its figures."""

from __future__ import annotations

import csv
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning
from lightning_actprune.analysis.memory import MemoryReport
from lightning_actprune.callbacks import memory
from lightning_actprune.schedules import LinearSchedule
from tests.support.helpers import BATCHES, Net, fit

STEPS = [BATCHES - 1, 2 * BATCHES - 1]
"""Where Lightning logs the ends of two epochs."""
LAYERS = ["body.0", "body.2", "head"]
MIB = 2**20
TOTALS = {f"actprune/{name}" for name in ("dense_mib", "stored_mib", "saved_mib", "saved_frac", "sparsity")}


class Noting(Logger):
    """A logger with another separator; it notes the rank, the step and the metrics that it gets."""

    group_separator = "."
    name = version = "noting"

    def __init__(self) -> None:
        super().__init__()
        self.got: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.got.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A fit with two loggers, and what each of them got as (step, metrics)."""
    monitor, noting = ActivationMemoryMonitor(verbose=False, log_layers=True), Noting()
    table = CSVLogger(tmp_path_factory.mktemp("csv"))
    pruning = ActivationPruning(sparsity=LinearSchedule(0.8), verbose=False)
    torch.manual_seed(0)
    made = fit(Net(), pruning, monitor, logger=[table, noting], max_epochs=2)
    with (Path(table.log_dir) / "metrics.csv").open() as file:
        rows = [(int(row.pop("step")), {k: float(v) for k, v in row.items() if v}) for row in csv.DictReader(file)]
    return SimpleNamespace(monitor=monitor, trainer=made, got={"csv": rows, "noting": noting.got})


def series(got: list[tuple[int, dict[str, Any]]], name: str) -> list[tuple[int, Any]]:
    return [(step, metrics[name]) for step, metrics in got if name in metrics]


@pytest.mark.parametrize(("logger", "separator"), [("csv", "/"), ("noting", ".")])
def test_every_logger_gets_totals_and_layers_at_the_same_steps(fitted, logger: str, separator: str):
    got, history, rows = fitted.got[logger], fitted.monitor.history, fitted.monitor.report.rows
    assert [row.fqn for row in rows] == LAYERS
    for name in ("dense", "stored", "saved"):
        expected = [(step, row[f"{name}_bytes"] / MIB) for step, row in zip(STEPS, history, strict=True)]
        assert series(got, f"actprune/{name}_mib") == expected
    for name, column in (("saved_frac", "saved_fraction"), ("sparsity", "sparsity")):
        values = [value for _, value in series(got, f"actprune/{name}")]
        assert values == pytest.approx([row[column] for row in history])
        assert values[0] < values[1]  # the schedule
    for row in rows:
        of_layer = {
            name: series(got, separator.join(("actprune_layers", row.fqn, name)))
            for name in ("dense_mib", "stored_mib", "sparsity")
        }
        assert all([step for step, _ in found] == STEPS for found in of_layer.values())
        assert [value for _, value in of_layer["sparsity"]] == [total["sparsity"] for total in history]
        assert of_layer["dense_mib"][-1][1] * MIB == row.dense_bytes
        assert of_layer["stored_mib"][-1][1] * MIB == row.stored_bytes


def test_callback_metrics_have_the_totals_of_the_report_alone(fitted):
    metrics = {name: float(value) for name, value in fitted.trainer.callback_metrics.items() if "actprune" in name}
    report = fitted.monitor.report
    nbytes = {"dense": report.dense_bytes, "stored": report.stored_bytes, "saved": report.saved_bytes}
    expected = {f"actprune/{name}_mib": value / MIB for name, value in nbytes.items()}
    expected |= {"actprune/saved_frac": report.saved_fraction, "actprune/sparsity": 0.8 * 7 / 8}
    assert metrics == pytest.approx(expected)
    on_gpu = MemoryReport(measured_activation_bytes=MIB, measured_peak_bytes=2 * MIB)
    found = memory._totals(on_gpu, known=False)
    assert found == {"actprune/stored_mib": 0, "actprune/activations_mib": 1, "actprune/peak_mib": 2}


def test_the_history_is_plain_rows_of_the_measured_batches_of_the_last_fit_and_bounded(fitted, monkeypatch):
    monitor = fitted.monitor
    history = monitor.history
    expected = [(0, 3, 0.8 * 3 / 8), (1, 7, 0.8 * 7 / 8)]
    assert [(row["epoch"], row["step"], row["sparsity"]) for row in history] == expected
    assert json.loads(json.dumps(history)) == history
    assert history[-1] == {"epoch": 1, "step": 7} | monitor.report.totals()
    history[0]["epoch"] = 7
    assert monitor.history[0]["epoch"] == 0  # a copy
    monkeypatch.setattr(memory, "MAX_EPOCHS", 2)
    monitor, model = ActivationMemoryMonitor(verbose=False, measure_batch=0), Net()
    for epochs, last in ((3, [1, 2]), (1, [0])):
        fit(model, monitor, limit_train_batches=1, max_epochs=epochs)
        assert [row["epoch"] for row in monitor.history] == last


def test_figures_are_written_on_rank_zero(fitted, tmp_path, monkeypatch):
    files = fitted.monitor.save_figures(tmp_path / "made" / "here")
    assert [path.name for path in files] == ["layers.png", "epochs.png", "step.png"]
    assert all(path.stat().st_size > 1000 for path in files)
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert fitted.monitor.save_figures(tmp_path / "other") == []
    assert not (tmp_path / "other").exists()
    with pytest.raises(MisconfigurationException, match=r"HINT: call `trainer.fit`"):
        ActivationMemoryMonitor().save_figures("nowhere")


def test_a_barebones_fit_logs_nothing_and_says_nothing_of_it():
    """Lightning warns of each attempt to log in such a fit, also of the model's own."""
    said, monitor = [], ActivationMemoryMonitor(verbose=False, log_layers=True)
    for callbacks in ([], [ActivationPruning(sparsity=0.6, verbose=False), monitor]):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = pl.Trainer(callbacks=callbacks, barebones=True, accelerator="cpu", max_epochs=1)
            made.fit(Net())
        said.append(sorted(str(warning.message) for warning in caught))
    assert said[0] == said[1] != []
    assert monitor.report.saved_bytes > 0
    assert made.callback_metrics == {}


@pytest.mark.parametrize("log_layers", [True, False])
def test_a_model_that_logs_its_own_step_moves_the_totals_alone(log_layers: bool):
    """Lightning takes what is logged as "step" for the x-axis."""
    noting, model = Noting(), Net()
    model.on_train_epoch_end = lambda: model.log("step", float(model.current_epoch))
    fit(model, ActivationMemoryMonitor(verbose=False, log_layers=log_layers), logger=noting, max_epochs=2)
    assert [step for step, _ in series(noting.got, "actprune/saved_mib")] == [0, 1]
    expected = STEPS if log_layers else []
    assert [step for step, _ in series(noting.got, "actprune_layers.head.stored_mib")] == expected


@pytest.mark.parametrize("verbose", [True, False])
def test_totals_are_there_as_soon_as_a_step_was_measured(verbose: bool, capsys):
    seen = []

    def note(made: pl.Trainer, *args: Any) -> None:
        metrics = made.callback_metrics, made.progress_bar_metrics
        seen.append(tuple({name for name in names if "actprune" in name} for names in metrics))

    ours = ActivationPruning(verbose=0), ActivationMemoryMonitor(measure_batch=1, verbose=verbose)
    others = LambdaCallback(on_train_batch_start=note), TQDMProgressBar()
    fit(Net(), *ours, *others, enable_progress_bar=True, max_epochs=2)
    shown = TOTALS, {"actprune/saved_frac"} if verbose else set()
    assert seen == [(set(), set())] * 2 + [shown] * (2 * BATCHES - 2)
    assert ("Kept for backward" in capsys.readouterr().out) is verbose


def test_other_callbacks_can_monitor_the_metrics(tmp_path):
    save = ModelCheckpoint(tmp_path, monitor="actprune/saved_mib", mode="max")
    stop = EarlyStopping("actprune/saved_mib", patience=1, mode="max")
    ours = ActivationMemoryMonitor(), ActivationPruning(sparsity=0.6)
    made = fit(Net(), *ours, save, stop, enable_checkpointing=True, max_epochs=9)
    assert save.best_model_score > 0
    assert made.current_epoch == 2  # the saving does not improve


def test_totals_that_a_rank_lacks_are_not_logged():
    strategy = SimpleNamespace(reduce_boolean_decision=lambda measured, all=True: not all)  # what all ranks are told
    ranks: Any = SimpleNamespace(strategy=strategy, current_epoch=3, barebones=False, world_size=2, callback_metrics={})
    for report in (MemoryReport(), None):
        with pytest.warns(UserWarning, match=r"totals of epoch 3 are not logged, .* HINT: give `measure_batch`"):
            memory._log_totals(ranks, Net(), report, in_bar=False)
    strategy.reduce_boolean_decision = lambda measured, all=True: False
    memory._log_totals(ranks, Net(), None, in_bar=False)  # nobody has measured: nothing to warn of
