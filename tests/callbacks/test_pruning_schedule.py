"""The sparsity that ActivationPruning sets in each step."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn

from lightning_actprune import ActivationPrunedLinear, ActivationPruning, Keep
from lightning_actprune.schedules import ConstantSchedule, CubicSchedule, LinearSchedule, SparsitySchedule
from tests.support.helpers import BATCHES, Net, assert_plain, loader, sparsities, trainer


@pytest.mark.parametrize(
    ("schedule", "scheduling", "options", "expected"),
    [
        (LinearSchedule(0.8, start=0.4), None, {}, [0.4 + 0.4 * step / 8 for step in range(8)]),
        (LinearSchedule(0.8), None, {"accumulate_grad_batches": 2}, [0.0, 0.0, 0.2, 0.2, 0.4, 0.4, 0.6, 0.6]),
        # A callback that accumulates another number of batches each epoch.
        (LinearSchedule(0.8), {0: 4}, {}, [0.0] * 4 + [0.4] * 4),
        (LinearSchedule(0.8), {1: 3}, {}, [0.8 * step / 6 for step in (0, 1, 2, 3, 4, 4, 4, 5)]),
        (LinearSchedule(0.8), {0: 2}, {"max_steps": 2}, [0.0, 0.0, 0.4, 0.4]),
        # The progress stops at one.
        (LinearSchedule(0.8), None, {"total_steps": 2}, [0.0, 0.4] + [0.8] * 6),
        (LinearSchedule(0.6), {0: 1, 1: 2}, {"total_steps": 6}, [step / 10 for step in (0, 1, 2, 3, 4, 4, 5, 5)]),
    ],
)
def test_the_sparsity_follows_the_optimizer_step(schedule, scheduling, options, expected):
    model, options = Net(), dict(options)
    model.watch = sparsities
    callbacks = [ActivationPruning(sparsity=schedule, total_steps=options.pop("total_steps", None))]
    callbacks += [GradientAccumulationScheduler(scheduling)] if scheduling else []
    trainer(*callbacks, max_epochs=2, **options).fit(model)
    assert model.seen == [pytest.approx([sparsity] * 3) for sparsity in expected]


def test_layers_are_assigned_only_when_the_sparsity_changes(monkeypatch):
    assigned: list[float] = []
    original = ActivationPrunedLinear.__setattr__

    def spy(layer: nn.Module, name: str, value: object) -> None:
        if name == "sparsity":
            assigned.append(value)
        original(layer, name, value)

    callback = ActivationPruning(sparsity=CubicSchedule(end=0.5, until=0.5), rules={"body.*": None})
    monkeypatch.setattr(ActivationPrunedLinear, "__setattr__", spy)
    trainer(callback, max_epochs=2).fit(Net())
    assert assigned[-4:] == [callback.sparsity(p) for p in (0.125, 0.25, 0.375, 0.5)]
    assert assigned.count(0.5) == 1


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(8, 64), 1


@pytest.mark.parametrize("endless", ["epochs", "batches"])
def test_an_unknown_length_is_an_error_only_if_it_is_needed(endless: str):
    data = loader(8, 4) if endless == "epochs" else torch.utils.data.DataLoader(Endless(), batch_size=2)
    options = {"max_epochs": -1} if endless == "epochs" else {}

    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            trainer.should_stop = True
            if not trainer.num_training_batches < float("inf"):
                trainer.limit_train_batches = 1

    schedule = LinearSchedule(end=0.5)
    with pytest.raises(MisconfigurationException, match=r"needs the length of the training.*HINT: set .*total_steps"):
        trainer(ActivationPruning(sparsity=schedule), **options).fit(Net(), data)
    for fine in (
        {"sparsity": schedule, "total_steps": 3},
        {"sparsity": ConstantSchedule(0.5)},
        {"sparsity": 0.5},
    ):
        trainer(ActivationPruning(**fine), Stop(), **options).fit(Net(), data)
    trainer(ActivationPruning(sparsity=schedule), max_steps=2, **options).fit(Net(), data)


def test_a_schedule_of_ones_own_is_checked():
    class Percent(SparsitySchedule):
        def __call__(self, progress: float) -> float:
            return 60 * progress

    model = Net()
    with pytest.raises(MisconfigurationException, match=r"`Percent\(\)\(0.017\)` must be in \[0, 1\), got 1.02"):
        trainer(ActivationPruning(sparsity=Percent(), verbose=False)).fit(model)
    assert_plain(model)
    assert model.seen == []  # the highest sparsity is needed, and so known, before the first step


def test_schedule_reaches_both_projections_of_attention():
    class AttentionNet(Net):
        def make(self) -> None:
            self.body = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
            self.head = nn.Linear(64, 4)

    model = AttentionNet()
    model.watch = lambda m: (m.body.self_attn.sparsity, m.body.self_attn.out_proj.sparsity)
    callback = ActivationPruning(
        rules={"body.self_attn*": Keep(sparsity=LinearSchedule(end=0.8)), "*": None}, skip_retained=False
    )
    trainer(callback).fit(model)
    assert model.seen == [pytest.approx((0.8 * step / BATCHES,) * 2) for step in range(BATCHES)]
    assert [layer.fqn for layer in callback.converted] == ["body.self_attn", "body.self_attn.out_proj"]
    assert type(model.body.self_attn) is nn.MultiheadAttention
    assert "_pruning" not in vars(model.body.self_attn)
