"""Beside Lightning's own callbacks, and in its own models, a fit at sparsity 0 is the one without ours, bit for bit."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, ManualOptimBoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, Keep
from lightning_actprune.schedules import LinearSchedule
from tests.support.helpers import ConfiguredNet, all_traces, assert_plain, fit
from tests.support.marks import only

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


@pytest.mark.parametrize("name", only(MADE, "ModelCheckpoint", "BatchSizeFinder", "ModelPruning", rest="integration"))
def test_a_fit_is_the_same_with_ours_in_front_and_behind(name: str, tmp_path: Path, recwarn):
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
        made = fit(
            model, *{"without": [other], "front": [*ours, other], "behind": [other, *ours]}[place],
            max_epochs=EPOCHS, limit_train_batches=3, num_sanity_val_steps=0, log_every_n_steps=1,
            enable_checkpointing="Checkpoint" in name, default_root_dir=folder, logger=CSVLogger(folder),
        )  # fmt: skip
        assert set(map(tuple, model.seen)) == {("Linear" if place == "without" else "ActivationPrunedLinear",) * 3}
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        fits.append((made.global_step, made.current_epoch, all_traces(model), logged(made), files))
        states.append(model.state_dict())
    for found, state in zip(fits, states, strict=True):
        assert found == fits[0]
        torch.testing.assert_close(state, states[0], rtol=0, atol=0)
    assert_plain(model)
    assert not [w for w in recwarn if "other settings" in str(w.message)]


# Hooks of Lightning's demonstration models.


OWN_HOOKS = "forward training_step validation_step backward manual_backward configure_callbacks configure_optimizers"
OWN_HOOKS += " configure_gradient_clipping optimizer_step optimizer_zero_grad lr_scheduler_step"
GIVEN = ("_dataloader", "training_step", "validation_step", "test_step", "predict_step")


def recorded(demo: type[pl.LightningModule], calls: list[str]) -> pl.LightningModule:
    """Return a model that notes every hook that Lightning calls, trained by an optimizer that has a state."""

    def noting(hook: Any) -> Any:
        def note(*args: Any, **kwargs: Any) -> Any:  # not "wraps", behind which Lightning finds its own
            calls.append(hook.__name__)
            return hook(*args, **kwargs)

        return note

    def configure_optimizers(self: pl.LightningModule) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    adam = type(demo.__name__, (demo,), {"configure_optimizers": configure_optimizers})
    hooks = [name for kind in (ModelHooks, DataHooks, CheckpointHooks) for name, f in vars(kind).items() if callable(f)]
    names = [n for n in (*hooks, *OWN_HOOKS.split()) if not n.startswith("_") and n != "configure_sharded_model"]
    # What gives data or runs a step is taken to be there if it is overridden.
    names = [name for name in names if not name.endswith(GIVEN) or is_overridden(name, adam())]
    torch.manual_seed(0)
    return type(demo.__name__, (adam,), {name: noting(getattr(adam, name)) for name in names})()


@pytest.mark.parametrize(("demo", "data"), [(BoringModel, BoringDataModule), (ManualOptimBoringModel, None)])
def test_every_hook_is_called_as_without_ours_and_parameters_move(demo, data):
    both: list[list[str]] = [[], []]
    dense, model = (recorded(demo, calls) for calls in both)
    initial = [p.detach().clone() for p in model.parameters()]
    # The one layer of the boring model reads the batch itself, which is alive anyway, and has 32 features.
    rules = {"type:linear": Keep(sparsity=0.6, block_size=8), "*": None}
    pruning = ActivationPruning(rules=rules, skip_retained=False, verbose=0)
    callbacks = pruning, ActivationMemoryMonitor(1, verbose=0)
    for each, own in ((dense, []), (model, callbacks)):
        torch.manual_seed(2)
        fit(each, *own, data=data and data(), limit_train_batches=3, limit_val_batches=2)
    assert both[0] == both[1]
    assert {"configure_model", "on_before_optimizer_step", "on_train_epoch_end", "teardown"} <= {*both[0]}
    assert pruning.converted != []
    assert callbacks[1].report.stored_bytes > 0
    assert all_traces(model) == all_traces(dense)
    assert not any(map(torch.equal, initial, model.parameters()))
