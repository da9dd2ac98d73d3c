"""ActivationPruning(sparsity=mapping, layers=..., exclude_first=...): settings of layers by their names, in a fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_actprune import (
    ActivationPruning,
    ConstantSchedule,
    CosineSchedule,
    LayerSettings,
    LinearSchedule,
    StepSchedule,
)
from tests.callbacks.test_dropped_energy import CONCENTRATED, SPREAD, Uneven
from tests.helpers import BATCHES, ConfiguredNet, Net, assert_plain, loader, sparsities, trainer

OWN = {
    "body.0": LayerSettings(schedule=StepSchedule([0.1, 0.7], [0.6])),
    "body.2": LayerSettings(sparsity=0.3, value_format="int4", block_size=16),
    "head": LayerSettings(schedule=CosineSchedule(end=0.8)),
}
EPOCHS = 2


def watched(make: Any = Net) -> Net:
    model = make()
    model.watch = lambda m: (m.trainer.global_step, *sparsities(m))
    return model


def pruning(**arguments: Any) -> ActivationPruning:
    return ActivationPruning(0.5, layers=OWN, verbose=False, **arguments)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, list[Any]]:
    """An uninterrupted run with a schedule per layer: its checkpoints and its (step, sparsities)."""
    path = tmp_path_factory.mktemp("run")
    save = ModelCheckpoint(path, "{step}", every_n_train_steps=1, save_top_k=-1)
    model = watched()
    trainer(save, pruning(), enable_checkpointing=True, max_epochs=EPOCHS, default_root_dir=path).fit(model)
    return path, model.seen


def test_each_layer_follows_its_own_schedule(run):
    points = [step / (BATCHES * EPOCHS) for step in range(BATCHES * EPOCHS)]
    first, last = OWN["body.0"].schedule, OWN["head"].schedule
    assert run[1] == [(step, first(p), 0.3, last(p)) for step, p in enumerate(points)]


@pytest.mark.parametrize("make", [Net, ConfiguredNet])
@pytest.mark.parametrize("step", [3, 5])
def test_a_run_resumed_in_the_middle_of_an_epoch_goes_on_as_without_the_interruption(run, make, step, recwarn):
    path, uninterrupted = run
    model = watched(make)
    trainer(pruning(), max_epochs=EPOCHS).fit(model, ckpt_path=path / f"step={step}.ckpt")
    assert model.seen == uninterrupted[step:]
    assert not [w for w in recwarn if "other settings" in str(w.message)]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"layers": dict(reversed(OWN.items()))}, r"\(settings_by_name: \[\['body.0'.*-> \[\['head', 'LayerSettings"),
        ({"layers": {**OWN, "body.0": LayerSettings()}}, r"\(settings_by_name: .*StepSchedule.*'LayerSettings\(\)'\]"),
        (
            {"layers": OWN, "sparsity": {"head": 0.2, "*": 0.1}},
            r"\(sparsity: 0.5 -> \[\['head', 0.2\], \['\*', 0.1\]",
        ),
        ({"layers": {"body.0": OWN["body.0"], "body.2": OWN["body.2"]}, "exclude_last": 1}, "exclude_last: 0 -> 1"),
    ],
    ids=["order", "settings", "sparsity", "ends"],
)
def test_other_settings_than_those_of_the_checkpoint_are_reported(run, other, message):
    callback = ActivationPruning(**({"sparsity": 0.5} | other), verbose=False)
    with pytest.warns(UserWarning, match=f"other settings .*{message}"):
        trainer(callback, max_epochs=EPOCHS).fit(Net(), ckpt_path=run[0] / "step=7.ckpt")


def test_a_checkpoint_holds_primitives_only(run):
    saved = torch.load(run[0] / "step=6.ckpt", weights_only=True)["callbacks"]
    [state] = [state for key, state in saved.items() if "ActivationPruning" in key]
    assert state["settings_by_name"] == [[pattern, repr(settings)] for pattern, settings in OWN.items()]


def test_sparsities_are_constant_while_gradients_accumulate():
    model = watched()
    trainer(pruning(), accumulate_grad_batches=2).fit(model)
    assert [seen[0] for seen in model.seen] == [0, 0, 1, 1]
    assert [seen[1:] for seen in model.seen[::2]] == [seen[1:] for seen in model.seen[1::2]]
    assert model.seen[2][3] == OWN["head"].schedule(0.5)


def test_progress_stops_at_one_with_two_optimizers():
    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.body, self.head)]

    model = watched(Manual)
    trainer(pruning()).fit(model)
    assert [seen[0] for seen in model.seen] == [0, 2, 4, 6]
    assert [seen[1] for seen in model.seen] == [0.1, 0.1, 0.7, 0.7]
    assert [seen[3] for seen in model.seen] == [OWN["head"].schedule(p) for p in (0.0, 0.5, 1.0, 1.0)]


def test_the_length_of_the_training_is_needed_only_if_a_layer_has_a_schedule_that_changes():
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            trainer.should_stop = True

    def fit(**arguments: Any) -> None:
        trainer(ActivationPruning(**arguments, verbose=False), Stop(), max_epochs=-1).fit(Net(), loader(8, 4))

    line = LinearSchedule(end=0.5)
    with pytest.raises(MisconfigurationException, match=r"LinearSchedule\(end=0.5.*needs the length.*HINT: set"):
        fit(sparsity=0.5, layers={"head": LayerSettings(schedule=line)})
    fit(sparsity=0.5, layers={"head": LayerSettings(schedule=line)}, total_steps=4)
    fit(sparsity=0.5, layers={"head": LayerSettings(schedule=ConstantSchedule(0.2))})
    fit(schedule=line, layers={"*": LayerSettings(sparsity=0.2)})
    fit(sparsity=0.5, layers={"head": LayerSettings(schedule=line)}, exclude="head")


@pytest.mark.parametrize("make", [Net, lambda: Net("setup"), ConfiguredNet], ids=["init", "setup", "configure_model"])
def test_layers_at_the_ends_are_dense_wherever_layers_are_made(make):
    model = make()
    callback = ActivationPruning({"body.*": 0.5, "head": 0.2}, exclude_first=1)
    trainer(callback, max_steps=1).fit(model)
    assert model.seen == [["Linear", "ActivationPrunedLinear", "ActivationPrunedLinear"]]
    assert [(layer.fqn, layer.sparsity) for layer in callback.converted] == [("body.2", 0.5), ("head", 0.2)]
    assert [(layer.fqn, layer.reason) for layer in callback.skipped] == [
        ("body.0", "is the first layer (exclude_first=1)")
    ]
    assert_plain(model)


def test_a_layer_left_out_at_an_end_is_free_for_another_callback():
    model = Net()
    model.watch = sparsities
    callbacks = ActivationPruning(0.25, exclude_last=1), ActivationPruning(0.75, include="head")
    trainer(*callbacks, max_steps=1).fit(model)
    assert model.seen == [[0.25, 0.25, 0.75]]


def test_presets_are_what_layers_do_not_say():
    callback = ActivationPruning(preset="max", layers={"head": LayerSettings(block_size=16)}, max_dropped_energy=1)
    trainer(callback, max_steps=1).fit(Net())
    assert [(made.sparsity, made.block_size, made.value_format) for made in callback.converted] == [
        (0.5, 32, "int2"),
        (0.5, 32, "int2"),
        (0.5, 16, "int2"),
    ]
    assert ActivationPruning({"head": 0.5}).value_format == "same"  # the paper's, as with a number
    assert ActivationPruning(layers={"head": LayerSettings(0.5)}).value_format == "int4"  # balanced


@pytest.mark.parametrize(
    ("own", "spread"),
    [
        (LayerSettings(schedule=StepSchedule([0.0, 0.5, 0.0], [0.97, 0.98])), [SPREAD]),
        (LayerSettings(sparsity=0.5), [SPREAD]),
        (LayerSettings(sparsity=0.0), []),
        (LayerSettings(schedule=LinearSchedule(end=0.25)), [SPREAD]),
    ],
    ids=["peak", "constant", "none", "end"],
)
def test_dropped_energy_is_judged_at_the_highest_sparsity_of_each_layer(own, spread):
    model = Uneven()  # of four blocks, half of the energy of a spread layer is in two
    callback = ActivationPruning(
        0.75,
        value_format="int4",
        max_dropped_energy=0.1,
        include="body.*",
        layers={SPREAD: own, CONCENTRATED: LayerSettings(sparsity=0.5)},
    )
    trainer(callback).fit(model)
    assert list(callback.spread) == spread
    assert [seen[1] for seen in model.seen] == [0.5] * BATCHES
    if spread:
        assert [seen[0] for seen in model.seen[1:]] == [0.0] * (BATCHES - 1)


def test_a_layer_is_held_or_not_by_its_own_highest_sparsity():
    class Held(Net):
        def make(self) -> None:
            super().make()
            self.body[3] = nn.ReLU()

    callback = ActivationPruning(0.0, layers={"head": LayerSettings(schedule=LinearSchedule(end=0.5))})
    model = Held()
    trainer(callback, max_steps=2).fit(model)
    assert [layer.fqn for layer in callback.skipped] == ["head"]
    assert model.seen[1][-1] == "Linear"


def test_precision_is_checked_for_the_formats_of_layers():
    own = {"body.*": LayerSettings(sparsity=0.2), "head": LayerSettings(value_format="int8")}
    message = r"64-true.*`layers\['head'\]`, of value_format='int8'.*HINT"
    with pytest.raises(MisconfigurationException, match=message):
        trainer(ActivationPruning(0.5, layers=own), precision="64-true").fit(Net())
    own["head"] = LayerSettings(value_format="same")
    trainer(ActivationPruning(0.5, layers=own), precision="64-true", max_steps=1).fit(Net())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sparsity": {"*": 60}}, r"`sparsity\['\*'\]` must be in \[0, 1\), got 60. HINT"),
        (
            {"sparsity": {"*": 0.5}, "schedule": ConstantSchedule(0.5)},
            "number or None beside a `schedule`.*HINT",
        ),
        ({"layers": {"head": 0.5}}, r"`layers\['head'\]` must be LayerSettings.*HINT"),
        ({"exclude_first": -1}, "`exclude_first` must be an int >= 0, got -1. HINT"),
        ({"exclude_last": 0.5}, "`exclude_last` must be an int >= 0, got 0.5. HINT"),
    ],
)
def test_arguments_are_checked_at_construction(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        ActivationPruning(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sparsity": {"body.*": 0.5, "hat": 0.1}}, "`sparsity` pattern 'hat' matches no layer.*body.0, body.2, head"),
        ({"sparsity": 0.5, "layers": {"*": LayerSettings(), "head": LayerSettings()}}, "'head' never counts"),
        ({"layers": {"head": LayerSettings(block_size=4)}}, "Layer 'head', which has .*at least 8.*HINT"),
        ({"sparsity": 0.5, "exclude_last": 3}, "(?s)No layer was converted.*one of the last 3 layers"),
    ],
)
def test_what_cannot_be_meant_is_an_error_when_the_fit_begins(arguments, message):
    model = Net("setup")
    with pytest.raises(MisconfigurationException, match=message):
        trainer(ActivationPruning(**arguments)).fit(model)
    assert_plain(model)
    assert model.seen == []


def test_the_summary_shows_the_settings_in_which_layers_differ(caplog):
    caplog.set_level("INFO")
    trainer(ActivationPruning(0.5, layers=OWN), max_steps=1).fit(Net())
    text = " ".join(caplog.text.split())
    assert "At sparsity 0.3 to 0.8 each keeps" in text
    rows = {row.split()[1]: row.split() for row in caplog.text.splitlines() if row.startswith("│")}
    assert rows["body.0"][9:14] == ["0.1", "to", "0.7", "│", "same"]
    assert rows["body.2"][7:12] == ["16", "│", "0.3", "│", "int4"]
    assert "Selection" not in text
    caplog.clear()
    trainer(ActivationPruning(0.5), max_steps=1).fit(Net())
    assert "At sparsity 0.5 each keeps" in " ".join(caplog.text.split())
    assert "Sparsity" not in caplog.text


def test_attention_projections_have_schedules_of_their_own():
    class AttentionNet(Net):
        def make(self) -> None:
            self.body = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
            self.head = nn.Linear(64, 4)

    model = AttentionNet()
    model.watch = lambda m: (m.body.self_attn.sparsity, m.body.self_attn.out_proj.sparsity)
    own = {"*.out_proj": LayerSettings(schedule=LinearSchedule(end=0.4)), "*": LayerSettings(sparsity=0.2)}
    trainer(ActivationPruning(layers=own, include="body.self_attn*", skip_held=False)).fit(model)
    assert model.seen == [(0.2, pytest.approx(0.4 * step / BATCHES)) for step in range(BATCHES)]
    assert type(model.body.self_attn) is nn.MultiheadAttention
