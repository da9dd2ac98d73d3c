"""What Lightning's tuners find is found with the layers that the fit will have."""

from __future__ import annotations

import copy
import pickle
from itertools import groupby
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from lightning_actprune import ActivationPruning, Keep
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.schedules import LinearSchedule
from tests.callbacks.test_first_batch import CONCENTRATED, SPREAD, Retained, Uneven
from tests.support.helpers import BATCHES, assert_plain, fit, sparsities, trainer
from tests.support.marks import only

pytestmark = pytest.mark.filterwarnings("error:.*other settings:UserWarning")

SIZE = 4
QUICK = {"limit_val_batches": 0, "num_sanity_val_steps": 0}


class Judged(Uneven, Retained):
    """Of its layers one is spread, one is concentrated, and the input of the head is retained by a ReLU.

    ``kept`` has a row for each training step: whether a callback saw it, the batch size and the bytes kept. Batches
    above the ``largest`` size do not fit.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kept: list[tuple[bool, int, int]] = []
        self.largest = SIZE

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with SavedTensorMeter(self, batch) as meter:
            loss = super().training_step(batch, batch_idx)
        if len(batch[0]) > self.largest:
            raise RuntimeError("CUDA out of memory.")
        in_fit = any(isinstance(callback, ActivationPruning) for callback in self.trainer.callbacks)
        self.kept.append((in_fit, len(batch[0]), meter.report().stored_bytes))
        return loss

    @property
    def phases(self) -> list[tuple[bool, int, list[int]]]:
        """The bytes of every trial and of the fit."""
        phases = groupby(self.kept, lambda row: row[:2])
        return [(*phase, [nbytes for *_, nbytes in rows]) for phase, rows in phases]


def fitted(pruning: ActivationPruning, *others: pl.Callback, model: Judged | None = None, **options: Any) -> Judged:
    model = model or Judged()
    fit(model, pruning, *others, **(QUICK | options))
    assert_clean(model)
    return model


def assert_clean(model: Judged) -> None:
    assert_plain(model)
    assert not {"configure_model", "on_train_start"} & vars(model).keys()


@pytest.fixture(autouse=True)
def _files_in_a_temporary_folder(tmp_path, monkeypatch):
    """Tuners write their checkpoints to the working directory."""
    monkeypatch.chdir(tmp_path)


SETTINGS: dict[str, dict[str, Any]] = {
    "max that drops": {"preset": "max", "sparsity": 0.5},
    "judged, values as they are": {"rules": {"type:linear": Keep(None, 0.5, max_dropped_energy=0.2), "*": None}},
    "up": {
        "rules": {
            "type:linear": Keep(4, LinearSchedule(0.6), min_rows_for_low_bits=0, max_dropped_energy=0.2),
            "*": None,
        }
    },
    "down": {"sparsity": LinearSchedule(start=0.8, end=0.1)},
}


@pytest.mark.parametrize("name", only(SETTINGS, "max that drops", "up", rest="integration"))
def test_no_step_of_the_fit_keeps_more_than_the_trial_of_its_batch_size(name: str):
    model, pruning = Judged(batch_size=SIZE // 2), ActivationPruning(**SETTINGS[name], verbose=False)
    fitted(pruning, BatchSizeFinder(steps_per_trial=2, init_val=SIZE // 2), model=model)
    *_, (_, tried, in_trial), (_, size, in_fit) = model.phases
    assert [phase[0] for phase in model.phases] == [False, False, True]
    assert tried == size == SIZE
    assert max(in_fit) <= max(in_trial)
    assert len(in_fit) == BATCHES
    if name not in ("up", "down"):
        assert set(in_fit) == set(in_trial)


def judged() -> ActivationPruning:
    keep = Keep(4, 0.5, min_rows_for_low_bits=0, max_dropped_energy=0.2)
    return ActivationPruning(rules={"type:linear": keep, "*": None}, verbose=False)


def test_both_tuners_and_the_checkpoint_know_what_was_found(tmp_path, caplog):
    """Layers made in ``LightningModule.setup`` are found before the first trial."""
    caplog.set_level("INFO")
    pruning = judged()
    pruning.verbose = True
    tuners = LearningRateFinder(num_training_steps=2), BatchSizeFinder(steps_per_trial=1, init_val=SIZE)
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    model = fitted(pruning, *tuners, save, model=Judged(made_in="setup"), enable_checkpointing=True)
    assert model.seen == [[0.0] * 3] + [[0.0, 0.5]] * (len(model.seen) - 1)
    assert len(model.seen) > BATCHES
    assert "1 linear layer without dropped blocks" in " ".join(caplog.text.split())
    assert pruning.spread.keys() == {SPREAD}
    assert {layer.fqn: layer.sparsity for layer in pruning.converted} == {SPREAD: 0.0, CONCENTRATED: 0.5}
    assert [layer.fqn for layer in pruning.skipped if layer.operator == "linear"] == ["head"]
    state = torch.load(tmp_path / "step=2.ckpt", weights_only=True)["callbacks"][pruning.state_key]
    assert state["spread"] == pruning.spread


def sparsities_of_a_copy(model: Judged) -> list[float]:
    twin = copy.deepcopy(model)
    assert "on_train_start" not in vars(twin)
    return sparsities(twin)


@pytest.mark.parametrize("before", [False, True])
def test_a_resumed_fit_with_a_tuner_goes_on_with_what_was_found(tmp_path, before: bool):
    """What its own checkpoint says counts more than what a tuner has found before the checkpoint was loaded."""
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    first = judged()
    fitted(first, save, enable_checkpointing=True)
    resumed, pruning = Judged(), judged()
    resumed.watch = sparsities_of_a_copy  # in trials too
    with torch.no_grad():
        resumed.body[0].weight.zero_()  # nothing would be found now
        if before:
            resumed.body[0].bias.fill_(1.0)  # and now both
    finder = BatchSizeFinder(steps_per_trial=1, init_val=SIZE)
    run = trainer(pruning) if before else trainer(pruning, finder)
    if before:
        Tuner(run).lr_find(resumed, num_training=3)
        assert pruning.spread != first.spread
    run.fit(resumed, ckpt_path=tmp_path / "step=2.ckpt")
    assert pruning.spread == first.spread
    assert resumed.seen[-1] == [0.0, 0.5]


def test_what_a_tuner_of_its_own_found_holds_for_the_next_fit_and_no_longer():
    model, pruning = Judged(), judged()
    run = trainer(pruning, **QUICK)
    Tuner(run).scale_batch_size(model, steps_per_trial=1, init_val=SIZE)
    assert_clean(model)
    pickle.loads(pickle.dumps(pruning))
    other = Judged()
    fit(other, pickle.loads(pickle.dumps(pruning)))
    assert other.seen == [[0.5] * 3] + [[0.0, 0.5]] * (BATCHES - 1)
    for expected in ([0.0, 0.5], [0.5] * 3):
        model.seen.clear()
        fit(model, pruning, **QUICK)
        assert model.seen == [expected] + [[0.0, 0.5]] * (BATCHES - 1)
