"""Keep(max_dropped_energy=...): layers whose dropped blocks hold much of their input drop none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_actprune import ActivationPruning, Keep
from lightning_actprune.callbacks import first_batch
from lightning_actprune.schedules import LinearSchedule
from tests.support.helpers import BATCHES, Net, assert_plain, pruned_layers, sparsities, trainer

NAMES = ["body.0", "body.2", "head"]
SPREAD, CONCENTRATED = "body.0", "body.2"


def judged(sparsity: Any = 0.5, bits: int | None = 4, limit: float = 0.2) -> dict[str, Keep | None]:
    return {"head": None, "type:linear": Keep(bits, sparsity, max_dropped_energy=limit), "*": None}


class Uneven(Net):
    """``body.0`` reads what a norm has made even, ``body.2`` one large block and three of zeros."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.watch = sparsities

    def make(self) -> None:
        super().make()
        with torch.no_grad():
            self.body[0].bias.copy_(torch.where(torch.arange(128) < 32, 10.0, -10.0))


def test_spread_layers_are_only_quantised_from_the_second_batch_on():
    model, callback = Uneven(), ActivationPruning(rules=judged())
    trainer(callback).fit(model)
    assert model.seen == [[0.5, 0.5]] + [[0.0, 0.5]] * (BATCHES - 1)
    assert [(layer.fqn, layer.sparsity) for layer in callback.converted] == [(SPREAD, 0.0), (CONCENTRATED, 0.5)]
    assert list(callback.spread) == [SPREAD]
    assert 0.2 < callback.spread[SPREAD] < 0.5
    assert_plain(model)


def test_spread_layers_that_keep_their_values_as_they_are_become_dense():
    model, callback = Uneven(), ActivationPruning(rules=judged(bits=None))
    model.watch = pruned_layers
    trainer(callback).fit(model)
    assert model.seen == [NAMES[:2]] + [[CONCENTRATED]] * (BATCHES - 1)
    [skipped] = [layer for layer in callback.skipped if layer.fqn == SPREAD]
    assert skipped.reason.startswith("the blocks that would be dropped hold ")


def test_a_schedule_does_not_reach_them_and_they_are_judged_by_its_end():
    schedule = LinearSchedule(end=0.5, until=0.5)
    model = Uneven()
    trainer(ActivationPruning(rules=judged(schedule))).fit(model)
    assert [seen[0] for seen in model.seen] == [0.0] * BATCHES
    assert [seen[1] for seen in model.seen] == [0.0, 0.25, 0.5, 0.5]


def test_without_a_limit_nothing_is_judged():
    model, callback = Uneven(), ActivationPruning(rules=judged(limit=1.0))
    trainer(callback).fit(model)
    assert model.seen == [[0.5, 0.5]] * BATCHES
    assert callback.spread == {}


def test_nothing_is_judged_where_what_drops_has_no_limit_and_what_has_one_drops_nothing(monkeypatch):
    monkeypatch.setattr(first_batch, "EnergyProbe", None)
    model, callback = Uneven(), ActivationPruning("max", rules={"head": Keep(sparsity=0.5)})
    trainer(callback).fit(model)
    assert model.seen == [[0.0, 0.0, 0.5]] * BATCHES
    assert callback.spread == {}


def test_a_resumed_fit_goes_on_with_what_the_first_one_found(tmp_path, recwarn):
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    first = ActivationPruning(rules=judged())
    trainer(first, save, enable_checkpointing=True).fit(Uneven())
    resumed, callback = Uneven(), ActivationPruning(rules=judged())
    with torch.no_grad():
        resumed.body[0].weight.zero_()
    trainer(callback).fit(resumed, ckpt_path=tmp_path / "step=2.ckpt")
    assert resumed.seen == [[0.0, 0.5]] * (BATCHES - 2)
    assert callback.spread == first.spread
    assert not [w for w in recwarn if "other settings" in str(w.message)]


@pytest.mark.parametrize(("sparsity", "limit", "found"), [(0.5, 0.9, [0.5, 0.5]), (0.9, 0.2, [0.0, 0.0])])
def test_other_settings_than_those_of_the_checkpoint_are_judged_anew(tmp_path, sparsity, limit, found):
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer(ActivationPruning(rules=judged()), save, enable_checkpointing=True).fit(Uneven())
    resumed = Uneven()
    with pytest.warns(UserWarning, match=r"max_dropped_energy=0.2\) -> Keep\("):
        trainer(ActivationPruning(rules=judged(sparsity, limit=limit))).fit(resumed, ckpt_path=tmp_path / "step=2.ckpt")
    assert resumed.seen == [[sparsity] * 2, found]


def test_no_layer_left_is_an_error():
    model = Uneven()
    with pytest.raises(MisconfigurationException, match=r"(?s)No layer is left to convert.*max_dropped_energy"):
        trainer(ActivationPruning(rules={SPREAD: Keep(sparsity=0.5, max_dropped_energy=0.2), "*": None})).fit(model)
    assert_plain(model)
