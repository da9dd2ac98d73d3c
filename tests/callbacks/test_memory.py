"""What ActivationMemoryMonitor measures, in which batch, what it logs and shows, and what it leaves alone."""

from __future__ import annotations

import copy
import csv
import gc
import json
import re
from contextlib import nullcontext
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
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning
from lightning_actprune.analysis.memory import (
    LayerFootprint,
    MemoryReport,
    describe_memory,
    describe_uncovered,
    tabulate_memory,
)
from lightning_actprune.analysis.step_memory import MemoryMoment, Retained, Retainer, StepMemory
from lightning_actprune.callbacks import display, memory
from lightning_actprune.compiled.decision_log import Row
from lightning_actprune.report import as_text
from lightning_actprune.schedules import LinearSchedule
from tests.support.helpers import BATCHES, ByHand, Net, assert_plain, fit, loader, warnings_of

STEPS = [BATCHES - 1, 2 * BATCHES - 1]
"""Where Lightning logs the ends of two epochs."""
LAYERS = ["body.0", "body.2", "head"]
MIB = 2**20
TOTALS = {f"actprune/{name}" for name in ("dense_mib", "stored_mib", "saved_mib", "saved_frac", "sparsity")}


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

    def _begin(self, pl_module, *args):
        super()._begin(pl_module, *args)
        self.measured.append((pl_module.trainer.current_epoch, pl_module.trainer.fit_loop.epoch_loop.batch_idx))

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
        (3, {"limit_train_batches": 0}, []),
        (3, {"overfit_batches": 1, "gradient_clip_val": 0.1, "precision": "bf16-mixed"}, [(0, 0)]),
    ],
    ids=str,
)
def test_one_step_an_epoch_is_measured(measure_batch: int, options: dict[str, Any], expected: list[tuple[int, int]]):
    monitor, model = Counting(measure_batch), Net()
    epochs = {"max_epochs": -1} if "max_steps" in options else {}
    run = fit(model, ActivationPruning(sparsity=LinearSchedule(0.6)), monitor, **epochs | options)
    assert monitor.measured == expected
    if "accumulate_grad_batches" not in options:
        assert [row["step"] for row in monitor.history] == [epoch * BATCHES + batch for epoch, batch in expected]
    assert (run.callback_metrics.keys() >= TOTALS) is (monitor.report is not None) is (expected != [])
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
        run = fit(trained, ActivationPruning(sparsity=0.5), monitor, data=data)
    assert (monitor.report is not None) is found
    assert [row["sparsity"] for row in monitor.history] == [0.5] * found
    assert {name for name in run.callback_metrics if "actprune" in name} == (TOTALS if found else set())
    assert_plain(trained)


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


def test_a_closure_of_several_forwards_is_measured_as_any():
    model = Net()
    model.configure_optimizers = lambda: torch.optim.LBFGS(model.parameters(), max_iter=3)
    result, usual = (measured(each, ActivationPruning(verbose=False), max_epochs=2)[0] for each in (model, Net()))
    assert [row.calls for row in result.report.rows] == [1] * 3
    assert [row["epoch"] for row in result.history] == [0, 1]
    assert [row["saved_bytes"] for row in result.history] == [row["saved_bytes"] for row in usual.history]


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

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(8))

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


# Totals and layers that are logged, the history and the figures.


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
    run = fit(Net(), pruning, monitor, logger=[table, noting], max_epochs=2)
    with (Path(table.log_dir) / "metrics.csv").open() as file:
        rows = [(int(row.pop("step")), {k: float(v) for k, v in row.items() if v}) for row in csv.DictReader(file)]
    return SimpleNamespace(monitor=monitor, trainer=run, got={"csv": rows, "noting": noting.got})


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
        assert all([step for step, _ in result] == STEPS for result in of_layer.values())
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
    result = memory._compute_totals(on_gpu, has_dense=False)
    assert result == {"actprune/stored_mib": 0, "actprune/activations_mib": 1, "actprune/peak_mib": 2}


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
        run = pl.Trainer(callbacks=callbacks, barebones=True, accelerator="cpu", max_epochs=1)
        said.append(sorted(warnings_of(run.fit, Net(), about="")))
    assert said[0] == said[1] != []
    assert monitor.report.saved_bytes > 0
    assert run.callback_metrics == {}


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
    run = fit(Net(), *ours, save, stop, enable_checkpointing=True, max_epochs=9)
    assert save.best_model_score > 0
    assert run.current_epoch == 2  # the saving does not improve


def test_totals_that_a_rank_lacks_are_not_logged():
    strategy = SimpleNamespace(reduce_boolean_decision=lambda measured, all=True: not all)  # what all ranks are told
    ranks: Any = SimpleNamespace(strategy=strategy, current_epoch=3, barebones=False, world_size=2, callback_metrics={})
    for report in (MemoryReport(), None):
        with pytest.warns(UserWarning, match=r"totals of epoch 3 are not logged, .* HINT: give `measure_batch`"):
            memory._log_totals(ranks, Net(), report, in_bar=False)
    strategy.reduce_boolean_decision = lambda measured, all=True: False
    memory._log_totals(ranks, Net(), None, in_bar=False)  # nobody has measured: nothing to warn of


# The numbers in tables and texts.

LINEAR = "ActivationPrunedLinear"


def cells(table: object) -> list[list[str]]:
    rows = [line for line in as_text(table).splitlines() if "│" in line or "┃" in line]
    return [[cell.strip() for cell in row.strip("│┃").replace("┃", "│").split("│")] for row in rows]


def test_corresponding_layers_are_one_row_and_the_rest_is_everything_else():
    rows = [
        LayerFootprint("a.0.fc", LINEAR, 0.6, 1, 6 * MIB, 3 * MIB, 3 * MIB, bits=4),
        LayerFootprint("b", LINEAR, 0.6, 1, 0, MIB, MIB),
        LayerFootprint("a.1.fc", LINEAR, 0.6, 1, 4 * MIB, MIB, MIB, bits=4),
        LayerFootprint("c", "Linear", 0.0, 1, 2 * MIB, 2 * MIB, 2 * MIB),
    ]
    report = MemoryReport(rows, 3 * MIB, 20 * MIB, 11 * MIB)
    result = {name: (kept, *numbers) for name, kept, *numbers in cells(tabulate_memory(report, 7))[1:]}
    assert result["a.*.fc (2)"] == ("4 bits, drops 60 %", "10.00", "4.00", "60.0 %")
    assert result["b"][1:] == ("0.00", "1.00", "kept anyway")
    assert result["c"][1:] == ("2.00", "2.00", "0.0 %")
    assert result["Everything else"] == ("", "8.00", "3.00", "62.5 %")
    assert result["Whole model"] == ("", "20.00", "10.00", "50.0 %")
    assert result["Measured after forward"][2] == "11.00"
    assert re.findall(r"-?[0-9.]+ [M%]", describe_memory(report)) == ["20.00 M", "10.00 M", "-50.0 %"]
    assert {describe_memory(report), *as_text(tabulate_memory(report)).splitlines()} == set(str(report).splitlines())
    many = [LayerFootprint(f"layer.{i}", "Linear", 0.5, 1, 2 * MIB, MIB, MIB) for i in range(200)]
    [last] = [row for row in cells(tabulate_memory(MemoryReport(many), 0)) if "more" in row[0]]
    assert ("160 more" in last[0], last[2:4]) == (True, ["320.00", "160.00"])


def test_what_compiled_code_keeps_is_listed_and_no_part_of_everything_else():
    compiled = [
        *2 * [Row("a.*.act", ("aten.gelu_backward",), (8,), torch.bfloat16, 4 * MIB, MIB, "packed", 3)],
        Row("c", ("aten.mm",), (8,), torch.float32, 2 * MIB, 0, "again", 0, "from another"),
        Row("aten.where", ("aten.mul",), (8,), torch.float32, MIB, MIB, "uncompressed", 0, "it is a mask"),
    ]
    report = MemoryReport([], 6 * MIB, None, compiled_bytes=4 * MIB, compiled=compiled)
    result = {name: numbers for name, _, *numbers in cells(tabulate_memory(report, 7))}
    assert result["a.*.act (2)"] == ["8.00", "2.00", "75.0 %"]
    assert result["aten.where"] == ["1.00", "1.00", "0.0 %"]
    assert result["c"] == ["2.00", "0.00", "100.0 %"]
    assert (result["Everything else"][1], result["Whole model"][1]) == ("3.00", "6.00")


def step_of(*peaks: int | None) -> StepMemory:
    """Two blocks that keep 4 MiB packed and 6 MiB as they are, each; parameters 1, gradients 2, state 3, batch 5."""
    phases = "forward", "forward", "forward", "backward", "backward", "optimizer"
    names = ("", None), ("block.0", None), ("block.1", None), ("block.1", "gelu"), ("block.0", "gelu"), ("", None)
    moments = [
        MemoryMoment(phase, *name, gradient * MIB, 3 * MIB, None if peak is None else peak * MIB, peak and peak * MIB)
        for phase, name, gradient, peak in zip(phases, names, (0, 0, 0, 0, 1, 2), peaks or (None,) * 6, strict=True)
    ]
    holdings = []
    for block in range(2):
        for nbytes, packed, operator in ((4 * MIB, True, "pruned_linear_function"), (6 * MIB, False, "gelu")):
            holdings.append(Retained(nbytes, packed, 1 + block, 5 - block, [Retainer(f"block.{block}", operator)]))
    return StepMemory(MIB, 5 * MIB, moments, holdings)


MEASURED = 9, 20, 30, 45, 30, 44


def test_the_peak_is_that_of_now_and_about_that_of_the_dense_model():
    for step, sizes in ((step_of(), ["49.00", "29.00"]), (step_of(*MEASURED), ["65.00", "45.00"])):
        [_, peak] = MemoryReport(other_bytes=20 * MIB, dense_bytes=40 * MIB, step=step).describe_sizes()
        assert re.findall(r"([0-9.]+) MiB", peak) == sizes
        assert [word in peak for word in ("counted", "measured")] == [not step.measured, step.measured]
        assert ("block.1" in peak) is step.measured  # else at the end of the forward
        [_, peak] = MemoryReport(other_bytes=20 * MIB, dense_bytes=None, step=step).describe_sizes()
        assert re.findall(r"([0-9.]+) MiB", peak) == sizes[1:]


def test_the_largest_of_what_is_kept_is_named():
    [line] = MemoryReport(other_bytes=20 * MIB, dense_bytes=40 * MIB, step=step_of()).describe_rest()
    assert [float(size) for size in re.findall(r"([0-9.]+) MiB", line)] == [12, 8]
    assert "block.* (gelu)" in line
    step = step_of()
    step.parameter_bytes = 99 * MIB  # of a peak of 127 MiB, in which the state of the optimizer takes 3
    [_, hint] = MemoryReport(other_bytes=20 * MIB, dense_bytes=40 * MIB, step=step).describe_rest()
    assert "80.3 %" in hint


def test_tables_of_the_step_and_of_who_keeps_what():
    assert [row[1:] for row in cells(display.tabulate_step(step_of(*MEASURED), 2))[1:]] == [
        ["1.00", "1.00", "1.00"],  # parameters
        ["0.00", "0.00", "2.00"],  # gradients
        ["3.00", "3.00", "3.00"],  # state of the optimizer
        ["5.00", "5.00", "5.00"],  # batch
        ["8.00", "8.00", "0.00"],  # packed
        ["12.00", "12.00", "0.00"],  # other saved tensors
        ["1.00", "16.00", "33.00"],  # temporary ones
        ["30.00", "45.00", "44.00"],
    ]
    assert "Temporary" not in as_text(display.tabulate_step(step_of(), 2))
    gelu, packed = cells(display.tabulate_keepers(step_of(), 2))[1:]
    assert gelu == ["block.* (gelu)", "2", "12.00", "60.0 %"]
    assert packed[1:] == ["2", "8.00", "40.0 %"]


def advice(other: int, dense: int | None, step: StepMemory) -> str:
    dense_bytes = None if dense is None else dense * MIB
    return describe_uncovered(MemoryReport(other_bytes=other * MIB, dense_bytes=dense_bytes, step=step))


@pytest.mark.parametrize(("operator", "hint"), [("cudnn_rnn", "Recurrent"), ("log_softmax", "loss"), ("mul", "preset")])
def test_what_nothing_covers_is_named_if_it_is_more_than_a_third(operator, hint):
    step = step_of()
    for storage in step.retained:
        storage.covered = storage.packed
    step.retained.append(Retained(9 * MIB, False, 2, 4, [Retainer("head", operator)]))
    parts = "21.00 MiB, 50.0 %", "block.* (gelu) 12.00 MiB", f"head ({operator}) 9.00 MiB", hint
    assert all(part in advice(29, 42, step) for part in parts)
    assert advice(29, 63, step) == advice(29, None, step) == advice(29, 30, step_of()) == ""


def with_logits(nbytes: int, *operators: str | None, peaks: tuple[int | None, ...] = ()) -> StepMemory:
    """The two blocks, of which nothing is kept as it is, and a loss that keeps one tensor in the last forward part."""
    step = step_of(*peaks)
    step.retained = [storage for storage in step.retained if storage.packed]
    for storage in step.retained:
        storage.covered = True
    step.retained.append(Retained(nbytes, False, 2, 4, [Retainer("", operator) for operator in operators]))
    return step


def test_logits_are_named_if_they_are_more_than_a_third_of_what_is_kept():
    for operators in (("log_softmax", "nll_loss"), ("nll_loss2_d",), ("cross_entropy_loss",)):
        assert advice(14, 60, with_logits(6 * MIB, *operators)).startswith("Logits are 6.00 MiB (42.9 %)")
        assert advice(12, 60, with_logits(4 * MIB - 1, *operators)) == ""
    for operator in ("linear_cross_entropy", "reduced_linear_cross_entropy", "softmax", "mul", None):
        assert "ogits are" not in advice(68, 300, with_logits(60 * MIB, operator))
    dense = with_logits(6 * MIB, "log_softmax")
    for storage in dense.retained:
        storage.covered = storage.packed = False
    assert all("Logits are" in advice(14, of_dense, dense) for of_dense in (14, None))


def test_temporary_tensors_of_the_loss_count_at_the_peak():
    step = with_logits(4 * MIB, "log_softmax", peaks=MEASURED)
    # 21 MiB are known by name where the loss begins to run, in the forward and in backward.
    cases = (3, "log_softmax", 4 + 24), (3, "gelu", 4), (2, None, 4 + 9), (4, None, 4), (5, None, 0)
    for index, operator, result in cases:
        step.moments[index].operator = operator
        assert step.logits_bytes(index) == result * MIB
    assert advice(12, 60, step) == ""
    step.moments[3].operator = "log_softmax"
    assert advice(12, 60, step).startswith("Logits are 28.00 MiB (62.2 %)")
