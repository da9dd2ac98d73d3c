"""Arguments, what is converted and when, the summary, schedules."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import BitsandbytesPrecision, TransformerEnginePrecision
from torch import nn

from lightning_actprune import (
    ActivationPrunedLinear,
    ActivationPruning,
    LayerSettings,
    LinearSchedule,
)
from tests.helpers import BARS, BATCHES, ConfiguredNet, Net, Recorder, assert_plain, sparsities, trainer

LAYERS = ["body.0", "body.2", "head"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sparsity": 60}, r"`sparsity` must be in \[0, 1\), got 60. HINT"),
        ({"sparsity": "0.6"}, r"`sparsity` must be a number in \[0, 1\), got '0.6'"),
        ({"block_size": 0}, "`block_size` must be a positive int, got 0. HINT"),
        ({"scope": "batch"}, '`scope` must be "sample" or "token", got \'batch\'. HINT'),
        ({"block_selection": "l2"}, '`block_selection` must be "largest", "swap" or "unbiased", got .l2.. HINT'),
        ({"include": 3}, "`include` must be a glob pattern or a list of them, got 3. HINT"),
        ({"exclude": [""]}, "`exclude` must be a glob pattern"),
        ({"min_features": -1}, "`min_features` must be an int >= 0, got -1. HINT"),
        ({"schedule": 0.5}, "`schedule` must be a SparsitySchedule or None, got 0.5. HINT"),
        ({"total_steps": 0}, "`total_steps` must be a positive int or None, got 0. HINT"),
        ({"total_steps": 1.5}, "`total_steps` must be a positive int or None, got 1.5. HINT"),
        ({"skip_held": "no"}, "`skip_held` must be a bool, got 'no' of type str. HINT"),
        ({"layers": {}}, "`layers` must have at least one pattern or be None, got {}. HINT"),
        ({"layers": {"head": {"sparsity": 3}}}, r"`layers\['head'\]`: `sparsity` must be in \[0, 1\), got 3. HINT"),
        ({"block_size": 4}, "`block_size` must be at least 8 with value_format='int4', got 4. HINT: .*preset='paper'"),
    ],
)
def test_arguments_are_checked_at_construction(arguments: dict, message: str):
    with pytest.raises(MisconfigurationException, match=message):
        ActivationPruning(**arguments)


def test_arguments_are_stored_as_given():
    arguments = {
        "sparsity": 0.5,
        "block_size": 16,
        "scope": "token",
        "include": ["body.*"],
        "exclude": "head",
        "min_features": 32,
        "schedule": LinearSchedule(0.5),
        "total_steps": 10,
        "skip_held": False,
        "value_format": "int4",
        "block_selection": "unbiased",
        "max_dropped_energy": 0.3,
        "preset": "max",
        "others": {"activation": "int2"},
        "layers": {"head": LayerSettings(sparsity=0.2)},
        "exclude_first": 1,
        "exclude_last": 2,
        "verbose": False,
    }
    assert arguments.keys() == inspect.signature(ActivationPruning).parameters.keys()
    callback = ActivationPruning(**arguments)
    assert {name: getattr(callback, name) for name in arguments} == arguments


def test_arguments_cannot_be_changed_later():
    """A fit would go by the old ones."""
    callback = ActivationPruning(sparsity=0.5)
    for name in inspect.signature(ActivationPruning).parameters.keys() - {"verbose"}:
        with pytest.raises(MisconfigurationException, match=f"`{name}` of ActivationPruning cannot be changed.*HINT"):
            setattr(callback, name, 0.9)
    callback.verbose = 0
    assert (callback.sparsity, callback.verbose) == (0.5, 0)
    trainer(pickle.loads(pickle.dumps(copy.deepcopy(callback)))).fit(Net())


@pytest.mark.parametrize("make", [Net, lambda: Net("setup"), ConfiguredNet], ids=["init", "setup", "configure_model"])
def test_layers_are_converted_wherever_they_are_made(make):
    model, callback = make(), ActivationPruning(sparsity=0.5, block_size=16, exclude="head")
    trainer(callback).fit(model)
    assert model.seen == [["ActivationPrunedLinear", "ActivationPrunedLinear", "Linear"]] * BATCHES
    assert [(c.fqn, c.sparsity, c.block_size) for c in callback.converted] == [("body.0", 0.5, 16), ("body.2", 0.5, 16)]
    assert [(s.fqn, s.reason) for s in callback.skipped] == [("head", "matches the `exclude` pattern 'head'")]
    assert_plain(model)


@pytest.mark.parametrize(
    ("make", "in_setup"),
    [(Net, LAYERS), (lambda: Net("setup"), []), (ConfiguredNet, [])],
    ids=["init", "setup", "model"],
)
def test_order_of_conversion(make, in_setup: list[str]):
    """Converted as early as the layers exist, pruned in all of fit, plain in ``teardown`` and outside of fit."""
    model, before, after = make(), Recorder(), Recorder()
    made = trainer(before, ActivationPruning(sparsity=0.5), after)
    made.fit(model)
    made.test(model)
    made.predict(model)
    during = "on_sanity_check_start", "on_train_start", "on_train_batch_start", "on_validation_start", "on_fit_end"
    assert before.pruned["setup"] == []
    assert after.pruned["setup"] == in_setup
    assert after.pruned["on_fit_start"] == LAYERS
    assert all(before.pruned[hook] == LAYERS for hook in during)
    assert before.pruned["teardown"] == LAYERS
    assert after.pruned["teardown"] == []
    assert after.pruned["on_test_start"] == after.pruned["on_predict_start"] == []


def test_configure_model_is_the_users_own_again_and_sees_conversion_once():
    model = ConfiguredNet()
    seen_by_optimizer: list[list[str]] = []
    configure_optimizers = model.configure_optimizers

    def configure() -> torch.optim.Optimizer:
        seen_by_optimizer.append([type(m).__name__ for m in model.modules() if isinstance(m, nn.Linear)])
        assert "configure_model" not in vars(model)
        return configure_optimizers()

    model.configure_optimizers = configure
    trainer(ActivationPruning(sparsity=0.5)).fit(model)
    assert seen_by_optimizer == [["ActivationPrunedLinear"] * 3]
    assert "configure_model" not in vars(model)


def test_a_configure_model_set_on_the_instance_is_put_back():
    model = Net("setup")
    hook = model.configure_model = lambda: model.make()
    trainer(ActivationPruning(sparsity=0.5)).fit(model)
    assert model.configure_model is hook


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_stages_are_untouched(stage: str):
    model, callback, recorder = Net(), ActivationPruning(sparsity=0.5), Recorder()
    getattr(trainer(callback, recorder), stage)(model)
    assert recorder.pruned["setup"] == []
    assert callback.converted == []
    assert_plain(model)


@pytest.mark.parametrize("plugin", [BitsandbytesPrecision, TransformerEnginePrecision])
def test_precision_plugins_that_replace_linear_layers_are_refused(plugin: type):
    model = Net()
    made = SimpleNamespace(precision_plugin=object.__new__(plugin))  # their packages are not installed
    with pytest.raises(MisconfigurationException, match=f"cannot work with {plugin.__name__}.*HINT"):
        ActivationPruning(0.6).setup(made, model, "fit")
    assert_plain(model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"include": ["body.*", "boddy"]},
            "`include` pattern 'boddy' matches no linear layer. HINT.*body.0, body.2, head",
        ),
        ({"exclude": "neck"}, "`exclude` pattern 'neck' matches no linear layer"),
        (
            {"min_features": 500},
            r"(?s)No layer was converted.*body.0 \(Linear\): in_features=64 is below min_features=500",
        ),
    ],
)
@pytest.mark.parametrize("made_in", ["init", "setup"])
def test_a_conversion_that_cannot_be_meant_is_an_error(arguments: dict, message: str, made_in: str):
    model = Net(made_in)
    with pytest.raises(MisconfigurationException, match=message):
        trainer(ActivationPruning(**arguments)).fit(model)
    assert_plain(model)
    assert model.seen == []


def test_two_instances_with_layers_of_their_own():
    model = Net()
    model.watch = sparsities
    callbacks = ActivationPruning(sparsity=0.25, include="body.*"), ActivationPruning(sparsity=0.75, exclude="body.*")
    trainer(*callbacks).fit(model)
    assert model.seen == [[0.25, 0.25, 0.75]] * BATCHES
    assert [[c.fqn for c in callback.converted] for callback in callbacks] == [["body.0", "body.2"], ["head"]]
    assert_plain(model)


@pytest.mark.parametrize("make", [Net, ConfiguredNet])
def test_a_layer_claimed_twice_is_an_error_that_names_both(make):
    model = make()
    callbacks = ActivationPruning(0.6, include="body.*"), ActivationPruning(0.6, include=["*.2", "head"])
    first, second = r"include=\['body.\*'\]", r"include=\['\*.2', 'head'\]"
    both = rf"'body.2' is already converted by ActivationPruning\({first}.*ActivationPruning\({second}"
    with pytest.raises(MisconfigurationException, match=both):
        trainer(*callbacks).fit(model)
    assert_plain(model)
    assert "configure_model" not in vars(model)


def test_layers_built_pruned_stay_pruned():
    class Built(Net):
        def make(self) -> None:
            super().make()
            self.body[2] = ActivationPrunedLinear(128, 64, sparsity=0.1, block_size=8)

    model, callback = Built(), ActivationPruning(sparsity=0.5)
    trainer(callback).fit(model)
    assert type(model.body[2]) is ActivationPrunedLinear
    assert (model.body[2].sparsity, model.body[2].block_size) == (0.1, 8)
    assert [c.fqn for c in callback.converted] == ["body.0", "head"]


def test_the_report_is_that_of_the_last_fit_with_what_the_first_batch_showed():
    class Held(Net):
        def make(self) -> None:
            super().make()
            self.body[3] = nn.ReLU()

    callback = ActivationPruning(0.5, exclude="body.0", others={"activation": "int4"}, skip_held=True, verbose=False)
    assert callback.report.to_rows() == []
    trainer(callback).fit(Net())
    assert (callback.report.converted, callback.report.skipped) == (callback.converted, callback.skipped)
    assert callback.report.few_bit == callback.few_bit
    outcomes = {row["fqn"]: row["outcome"] for row in callback.report.to_rows()}
    expected = dict.fromkeys(("body.2", "head"), "pruned") | dict.fromkeys(("body.1", "body.3"), "few_bit")
    assert outcomes == expected | {"body.0": "skipped"}
    table = callback.report.to_dict()
    assert json.loads(json.dumps(table)) == table
    callback = ActivationPruning(0.5, verbose=False)
    trainer(callback).fit(Held())
    assert {row["fqn"]: row["outcome"] for row in callback.report.to_rows()}["head"] == "skipped"
    with pytest.raises(AttributeError):
        callback.report = None


@pytest.mark.parametrize("bar", BARS)
def test_the_summary_names_converted_and_skipped_layers_once(bar, capsys, caplog):
    callbacks = [ActivationPruning(sparsity=0.5, exclude="head"), *([bar()] if bar else [])]
    with caplog.at_level("INFO"):
        trainer(*callbacks, enable_progress_bar=bar is not None).fit(Net())
    text = capsys.readouterr().out + ("" if bar else caplog.text)
    assert text.count("2 linear layers converted, 1 skipped") == 1
    assert "49." in text  # sparsity 0.5 less the positions
    assert "body.2" in text
    assert "exclude" in text


def test_a_quiet_callback_prints_nothing(capsys, caplog):
    with caplog.at_level("INFO"):
        trainer(ActivationPruning(0.6, verbose=False), enable_progress_bar=True).fit(Net())
    assert "converted" not in capsys.readouterr().out + caplog.text


def test_a_long_summary_is_cut(caplog):
    class Deep(Net):
        def make(self) -> None:
            super().make()
            self.extra = nn.ModuleList(nn.Linear(64, 64) for _ in range(60))

    with caplog.at_level("INFO"):
        trainer(ActivationPruning(0.6), max_steps=1).fit(Deep())
    out = caplog.text
    assert "63 linear layers converted" in out
    assert "... and 23 more" in out
    assert "extra.36" in out
    assert "extra.37" not in out


def test_pruning_changes_the_weight_gradient_and_nothing_else():
    losses: dict[float, list[float]] = {}
    for sparsity in (0.0, 0.9):
        torch.manual_seed(0)
        model = Net(lr=0.1)
        model.watch = lambda m: m.trainer.callback_metrics.get("loss", torch.tensor(0.0)).item()
        trainer(ActivationPruning(sparsity=sparsity)).fit(model)
        losses[sparsity] = model.seen
    assert losses[0.0][1] == losses[0.9][1]  # the first forward
    assert losses[0.0][2:] != losses[0.9][2:]
