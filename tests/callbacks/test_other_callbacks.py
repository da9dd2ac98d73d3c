"""Beside each of Lightning's own callbacks a fit at sparsity 0 is the one without ours: bits, hooks, logs and files."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer import call
from torch import nn

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning
from lightning_actprune.schedules import LinearSchedule
from tests.support.helpers import ConfiguredNet, all_traces, assert_plain, fit
from tests.support.marks import only

pytestmark = pytest.mark.filterwarnings("error:.*other settings:UserWarning")

EPOCHS = 2


class Backboned(ConfiguredNet):
    """``body`` is what Lightning's finetuning freezes at first."""

    @property
    def backbone(self) -> nn.Module:
        return self.body

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=self.lr)


MADE: dict[str, Callable[[Path], pl.Callback]] = {
    "ModelCheckpoint": lambda folder: theirs.ModelCheckpoint(folder, "{epoch}", "val_loss", save_top_k=2),
    "EMAWeightAveraging": lambda folder: theirs.EMAWeightAveraging(decay=0.5),
    "StochasticWeightAveraging": lambda folder: theirs.StochasticWeightAveraging(0.01, swa_epoch_start=1),
    "LearningRateFinder": lambda folder: theirs.LearningRateFinder(num_training_steps=3),
    "BatchSizeFinder": lambda folder: theirs.BatchSizeFinder(steps_per_trial=1, init_val=2, max_trials=2),
    "GradientAccumulationScheduler": lambda folder: theirs.GradientAccumulationScheduler({0: 1, 1: 2}),
    "BackboneFinetuning": lambda folder: theirs.BackboneFinetuning(1, backbone_initial_lr=0.01, verbose=False),
    "ModelPruning": lambda folder: theirs.ModelPruning("l1_unstructured", amount=0.5),
    "RichModelSummary": lambda folder: theirs.RichModelSummary(max_depth=2),
}
LOOK_IN_SETUP = "StochasticWeightAveraging", "BackboneFinetuning", "ModelPruning"
"""For the model's layers, before ``configure_model``."""
CHANGE_THE_MODEL = *LOOK_IN_SETUP, "EMAWeightAveraging", "LearningRateFinder", "BatchSizeFinder"
"""Or copy it, so that the order might matter."""


def logged(made: pl.Trainer) -> tuple[list[str], list[str]]:
    """Return the columns that were logged, without ours, and the losses as they were written."""
    with (Path(made.logger.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    columns = sorted(name for name in rows[0] if not name.startswith("actprune/"))
    return columns, [row["val_loss"] for row in rows if row["val_loss"]]


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hooks of models and strategies, in the order in which Lightning calls them."""
    noted = list[str]()
    for kind in ("lightning_module", "strategy"):
        original = getattr(call, f"_call_{kind}_hook")

        def note(trainer: pl.Trainer, name: str, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            noted.append(name)
            return original(trainer, name, *args, **kwargs)

        monkeypatch.setattr(call, f"_call_{kind}_hook", note)
    return noted


@pytest.mark.parametrize("name", only(MADE, "ModelCheckpoint", "BatchSizeFinder", "ModelPruning", rest="integration"))
def test_a_fit_is_the_same_with_ours_in_front_and_behind(name: str, hooks, tmp_path: Path):
    """In all steps, trials too, layers are pruned, which ``configure_model`` makes."""
    fits, states = [], []
    for place in ("without", "front", "behind")[: 3 if name in CHANGE_THE_MODEL else 2]:
        folder, schedule = tmp_path / place, LinearSchedule(end=0.0)
        folder.mkdir()
        other = MADE[name](folder)
        ours = [ActivationPruning(sparsity=schedule, verbose=False), ActivationMemoryMonitor(1, verbose=False)]
        torch.manual_seed(0)
        model = Backboned()
        if name in LOOK_IN_SETUP:
            model.make()
        run = fit(
            model, *{"without": [other], "front": [*ours, other], "behind": [other, *ours]}[place],
            max_epochs=EPOCHS, limit_train_batches=3, num_sanity_val_steps=0, log_every_n_steps=1,
            enable_checkpointing="Checkpoint" in name, default_root_dir=folder, logger=CSVLogger(folder),
        )  # fmt: skip
        assert set(map(tuple, model.seen)) == {("Linear" if place == "without" else "ActivationPrunedLinear",) * 3}
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        fits.append((run.global_step, run.current_epoch, all_traces(model), logged(run), files, hooks.copy()))
        assert {"configure_model", "training_step", "on_before_optimizer_step", "on_train_epoch_end"} < set(hooks)
        hooks.clear()
        states.append(model.state_dict())
    for result, state in zip(fits, states, strict=True):
        assert result == fits[0]
        torch.testing.assert_close(state, states[0], rtol=0, atol=0)
    assert_plain(model)
