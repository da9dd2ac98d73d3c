"""ActivationMemoryMonitor and loggers: totals, numbers per layer and figures, to several at once and to none."""

from __future__ import annotations

import csv
import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning
from lightning_actprune.analysis.memory import MemoryReport
from lightning_actprune.callbacks import memory
from lightning_actprune.callbacks.memory import _log_totals
from lightning_actprune.schedules import LinearSchedule
from tests.support.helpers import BATCHES, Net, assert_plain, trainer

EPOCHS = 2
STEPS = [BATCHES - 1, 2 * BATCHES - 1]
"""Where Lightning logs what is logged at the end of an epoch."""
LAYERS = ["body.0", "body.2", "head"]
MIB = 2**20
TOTALS = {f"actprune/{name}" for name in ("dense_mib", "stored_mib", "saved_mib", "saved_frac", "sparsity")}


class Noting(Logger):
    """A logger of another separator that notes what it gets and on which rank."""

    group_separator = "."
    name = version = "noting"

    def __init__(self) -> None:
        super().__init__()
        self.got: list[tuple[int, int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.got.append((rank_zero_only.rank, step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Board(TensorBoardLogger):
    """Lightning's logger with a writer that notes: no package that writes TensorBoard's files is a dependency."""

    log_dir = "board"

    def __init__(self, prefix: str = "") -> None:
        Logger.__init__(self)
        self._prefix, self.scalars, self.figures = prefix, [], []

    @property
    def experiment(self) -> Any:
        return SimpleNamespace(
            add_scalar=lambda name, value, step: self.scalars.append((step, {name: value})),
            add_figure=lambda name, figure, global_step: self.figures.append((global_step, name, figure)),
        )

    def save(self, *args: Any) -> None:
        pass

    log_graph = log_hyperparams = finalize = save


class Wandb(WandbLogger):
    """Lightning's logger with a run that notes, and a module in place of wandb's."""

    name = version = save_dir = "wandb"

    def __init__(self) -> None:
        Logger.__init__(self)
        self._prefix, self._wandb_init, self.logged = "", {}, []

    @property
    def experiment(self) -> Any:
        return SimpleNamespace(log=lambda metrics: self.logged.append((metrics.pop("trainer/global_step"), metrics)))

    def finalize(self, status: str) -> None:
        pass

    log_hyperparams = finalize


@pytest.fixture(scope="session")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A fit with four loggers, and what each of them got as (step, metrics)."""
    pytest.importorskip("matplotlib")
    monitor = ActivationMemoryMonitor(verbose=False, log_layers=True, log_figures=True)
    table = CSVLogger(tmp_path_factory.mktemp("csv"))
    noting, board, wandb = Noting(), Board(), Wandb()
    torch.manual_seed(0)
    made = trainer(
        ActivationPruning(sparsity=LinearSchedule(0.8), verbose=False),
        monitor,
        logger=[table, noting, board, wandb],
        max_epochs=EPOCHS,
    )
    stand_in = SimpleNamespace(Image=lambda image: image, Table=lambda **contents: contents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", stand_in)
        made.fit(Net())
    with (Path(table.log_dir) / "metrics.csv").open() as file:
        rows = [(int(row.pop("step")), {k: float(v) for k, v in row.items() if v}) for row in csv.DictReader(file)]
    got = {"csv": rows, "tensorboard": board.scalars, "wandb": wandb.logged}
    got["noting"] = [(step, metrics) for _, step, metrics in noting.got]
    return SimpleNamespace(monitor=monitor, trainer=made, got=got, board=board, wandb=wandb)


def series(got: list[tuple[int, dict[str, Any]]], name: str) -> list[tuple[int, Any]]:
    return [(step, metrics[name]) for step, metrics in got if name in metrics]


LOGGERS = pytest.mark.parametrize("logger", ["csv", "tensorboard", "wandb", "noting"])


@LOGGERS
def test_every_logger_gets_the_totals(fitted, logger: str):
    history = fitted.monitor.history
    for name, column in (("dense_mib", "dense_bytes"), ("stored_mib", "stored_bytes"), ("saved_mib", "saved_bytes")):
        expected = [(step, row[column] / MIB) for step, row in zip(STEPS, history, strict=True)]
        assert series(fitted.got[logger], f"actprune/{name}") == expected
    for name, column in (("saved_frac", "saved_fraction"), ("sparsity", "sparsity")):
        values = [value for _, value in series(fitted.got[logger], f"actprune/{name}")]
        assert values == pytest.approx([row[column] for row in history])
        assert values[0] < values[1]  # the schedule


@LOGGERS
def test_every_logger_gets_the_layers_at_the_same_steps(fitted, logger: str):
    separator = "." if logger == "noting" else "/"
    got = fitted.got[logger]
    for name, column in (("dense_mib", "dense_bytes"), ("stored_mib", "stored_bytes"), ("sparsity", None)):
        values = {layer: series(got, separator.join(("actprune_layers", layer, name))) for layer in LAYERS}
        assert all([step for step, _ in found] == STEPS for found in values.values())
        for epoch, total in enumerate(fitted.monitor.history):
            if column is None:
                assert [values[layer][epoch][1] for layer in LAYERS] == [total["sparsity"]] * len(LAYERS)
        if column is not None:
            sizes = [values[layer][-1][1] * MIB for layer in LAYERS]
            assert sizes == [getattr(row, column) for row in fitted.monitor.report.rows]
    last = fitted.monitor.report.rows
    assert [row.fqn for row in last] == LAYERS


def test_other_callbacks_see_the_totals_alone(fitted):
    metrics = fitted.trainer.callback_metrics
    assert {name for name in metrics if "actprune" in name} == TOTALS


def test_loggers_that_take_figures_get_them(fitted):
    names = ["actprune/layers", "actprune/epochs"]
    assert [(step, name) for step, name, _ in fitted.board.figures] == [(s, name) for s in STEPS for name in names]
    titles = [figure.axes[0].get_title() for _, name, figure in fitted.board.figures if name == names[0]]
    assert titles == ["Kept for backward, epoch 0", "Kept for backward, epoch 1"]
    for name in names:
        found = series(fitted.wandb.logged, name)
        assert [step for step, _ in found] == STEPS
        assert all(min(image.size) > 100 for _, (image,) in found)
    tables = series(fitted.wandb.logged, "actprune/layers_table")
    assert [step for step, _ in tables] == STEPS
    contents = tables[-1][1]
    rows = [dict(zip(contents["columns"], values, strict=True)) for values in contents["data"]]
    assert rows == fitted.monitor.report.to_rows()


def test_a_loggers_prefix_stands_before_everything():
    pytest.importorskip("matplotlib")
    board = Board("run")
    monitor = ActivationMemoryMonitor(verbose=False, log_layers=True, log_figures=True)
    trainer(monitor, logger=board).fit(Net())
    names = {name for _, metrics in board.scalars for name in metrics} | {name for _, name, _ in board.figures}
    assert all(name.startswith("run-") for name in names)
    assert names >= {"run-actprune/saved_mib", "run-actprune_layers/head/stored_mib", "run-actprune/epochs"}


def test_a_barebones_fit_logs_nothing_and_says_nothing_of_it():
    """Lightning warns of every attempt to log in such a fit; what is left is what the model's own attempts cause."""
    said, model = [], Net()
    monitor = ActivationMemoryMonitor(verbose=False, log_layers=True)
    for callbacks in ([], [ActivationPruning(sparsity=0.6, verbose=False), monitor]):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = pl.Trainer(callbacks=callbacks, barebones=True, accelerator="cpu", max_epochs=1)
            made.fit(model)
        said.append(sorted(str(warning.message) for warning in caught))
    assert said[0] == said[1]
    assert said[0]
    assert monitor.report.saved_bytes > 0
    assert made.callback_metrics == {}


def test_a_model_that_logs_its_own_step_moves_the_totals_alone():
    class Stepping(Net):
        def on_train_epoch_end(self) -> None:
            self.log("step", float(self.current_epoch))

    noting = Noting()
    trainer(ActivationMemoryMonitor(verbose=False, log_layers=True), logger=noting, max_epochs=EPOCHS).fit(Stepping())
    got = [(step, metrics) for _, step, metrics in noting.got]
    assert [step for step, _ in series(got, "actprune/saved_mib")] == list(range(EPOCHS))  # as all that Lightning logs
    assert [step for step, _ in series(got, "actprune_layers.head.stored_mib")] == STEPS


def test_the_history_is_plain_rows(fitted, tmp_path):
    history = fitted.monitor.history
    assert [(row["epoch"], row["step"]) for row in history] == [(0, 3), (1, 7)]  # of the measured batches
    assert [row["sparsity"] for row in history] == [0.8 * 3 / 8, 0.8 * 7 / 8]
    assert json.loads(json.dumps(history)) == history
    last = fitted.monitor.report.totals()
    assert {name: value for name, value in history[-1].items() if name not in ("epoch", "step")} == last
    history[0]["epoch"] = 7
    assert fitted.monitor.history[0]["epoch"] == 0  # a copy
    with (tmp_path / "history.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(history[0]))
        writer.writerows(history)
    assert len({tuple(row) for row in history}) == 1


def test_figures_are_written_on_rank_zero(fitted, tmp_path, monkeypatch):
    files = fitted.monitor.save_figures(tmp_path / "made" / "here")
    assert [path.name for path in files] == ["layers.png", "epochs.png", "step.png"]
    assert all(path.stat().st_size > 1000 for path in files)
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert fitted.monitor.save_figures(tmp_path / "other") == []
    assert not (tmp_path / "other").exists()


def test_nothing_to_draw_yet():
    with pytest.raises(MisconfigurationException, match=r"no step to draw yet. HINT: call `trainer.fit`"):
        ActivationMemoryMonitor().save_figures("nowhere")


def test_layers_and_figures_are_not_logged_unasked():
    noting, board = Noting(), Board()
    trainer(ActivationMemoryMonitor(verbose=False), logger=[noting, board]).fit(Net())
    names = {name for _, _, metrics in noting.got for name in metrics}
    assert {name for name in names if name.startswith("actprune")} == TOTALS
    assert board.figures == []


@pytest.mark.parametrize("verbose", [True, False])
def test_the_bar_shows_one_number_unless_quiet(verbose: bool, capsys):
    made = trainer(ActivationMemoryMonitor(verbose=verbose), TQDMProgressBar(), enable_progress_bar=True)
    made.fit(Net())
    assert {name for name in made.progress_bar_metrics if "actprune" in name} == (
        {"actprune/saved_frac"} if verbose else set()
    )
    assert ("Kept for backward" in capsys.readouterr().out) is verbose
    assert made.callback_metrics.keys() >= TOTALS


def test_no_logger_takes_figures():
    monitor = ActivationMemoryMonitor(log_layers=True, log_figures=True)
    with pytest.warns(UserWarning, match=r"no effect: none of the loggers \[\] takes figures. HINT: .*save_figures"):
        trainer(monitor, logger=False).fit(Net())
    assert monitor.history[0]["dense_bytes"] > 0


def test_a_fast_dev_run_replaces_the_loggers(recwarn):
    board = Board()
    monitor = ActivationMemoryMonitor(log_layers=True, log_figures=True)
    trainer(monitor, logger=board, fast_dev_run=True).fit(Net())
    assert (board.scalars, board.figures, len(monitor.history)) == ([], [], 1)
    assert not [warning for warning in recwarn if "log_figures" in str(warning.message)]


def test_without_matplotlib_the_fit_does_not_begin(monkeypatch, fitted, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    model = Net()
    with pytest.raises(MisconfigurationException, match=r"`log_figures=True` does not work: .* HINT: pip install"):
        trainer(ActivationMemoryMonitor(log_figures=True), logger=Board()).fit(model)
    assert model.seen == []
    assert_plain(model)
    with pytest.raises(ImportError, match=r"needs matplotlib. HINT: pip install"):
        fitted.monitor.save_figures(tmp_path)


def test_the_history_is_that_of_the_last_fit_and_bounded(monkeypatch):
    monkeypatch.setattr(memory, "MAX_EPOCHS", 2)
    monitor, model = ActivationMemoryMonitor(verbose=False, measure_batch=0), Net()
    trainer(monitor, limit_train_batches=1, max_epochs=3).fit(model)
    assert [row["epoch"] for row in monitor.history] == [1, 2]
    trainer(monitor, limit_train_batches=1).fit(model)
    assert [row["epoch"] for row in monitor.history] == [0]


def test_totals_that_a_rank_lacks_are_not_logged():
    strategy = SimpleNamespace(reduce_boolean_decision=lambda measured, all=True: not all)  # what all ranks are told
    ranks: Any = SimpleNamespace(strategy=strategy, current_epoch=3, barebones=False, world_size=2, callback_metrics={})
    for report in (MemoryReport(), None):
        with pytest.warns(UserWarning, match=r"totals of epoch 3 are not logged, .* HINT: give `measure_batch`"):
            _log_totals(ranks, Net(), report, in_bar=False)
    strategy.reduce_boolean_decision = lambda measured, all=True: False
    _log_totals(ranks, Net(), None, in_bar=False)  # nobody has measured: nothing to warn of


class MeasuresAlone(ActivationMemoryMonitor):
    """Measures the first epoch on rank zero only."""

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank == 0 or trainer.current_epoch > 0:
            super().on_train_batch_start(trainer, *args)


class Longer(Net):
    """On rank one an input three times as long, so that the ranks do not store the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.repeat(1, 1 + 2 * self.global_rank, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class Writing(pl.Callback):
    """Writes down what this process has got."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        monitor = next(one for one in trainer.callbacks if isinstance(one, ActivationMemoryMonitor))
        totals = [metrics["actprune/dense_mib"] for _, _, metrics in trainer.logger.got if metrics.keys() >= TOTALS]
        layers = [step for _, step, metrics in trainer.logger.got if "actprune_layers.head.sparsity" in metrics]
        noted = {"totals": totals, "layers": layers, "bytes": [row["dense_bytes"] for row in monitor.history]}
        noted["monitored"] = trainer.callback_metrics["actprune/dense_mib"].item()
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(noted))


@pytest.mark.slow
def test_ranks_that_measure_different_things_wait_for_each_other(tmp_path):
    monitor = MeasuresAlone(verbose=False, log_layers=True)
    options = {"strategy": "ddp_spawn", "devices": 2, "max_epochs": 2, "num_sanity_val_steps": 0, "logger": Noting()}
    trainer(monitor, Writing(tmp_path), default_root_dir=tmp_path, **options).fit(Longer())
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    ((_, alone), (other,)) = first["bytes"], second["bytes"]
    mean = (alone + other) / 2 / MIB
    assert 2.9 * alone < other < 3.1 * alone
    assert first["totals"] == second["totals"] == [first["monitored"]] == [second["monitored"]] == [mean]
    assert (len(first["layers"]), second["layers"]) == (2, [])  # of rank zero, which has measured twice
