"""Arguments, what is converted and when, the summary."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.plugins.precision import BitsandbytesPrecision, TransformerEnginePrecision
from torch import nn

from lightning_actprune import (
    ActivationMemoryMonitor,
    ActivationPruning,
    Keep,
)
from lightning_actprune.operators.base import CompressedLayer
from lightning_actprune.schedules import ConstantSchedule, LinearSchedule
from tests.support.helpers import BATCHES, ConfiguredNet, Net, Recorder, assert_plain, sparsities, trainer

LAYERS = ["body.0", "body.2", "head"]


class Retained(Net):
    """The last layer reads what a ReLU keeps, which the first batch shows."""

    def make(self) -> None:
        super().make()
        self.body[3] = nn.ReLU()


def compressed(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, CompressedLayer)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sparsity": 60}, r"`sparsity` must be in \[0, 1\), got 60. HINT"),
        ({"sparsity": "0.6"}, r"`sparsity` must be a number in \[0, 1\), got '0.6'"),
        ({"block_size": 0}, "`block_size` must be a positive int, got 0. HINT"),
        ({"block_size": 4}, "`block_size` must be at least 8 with bits=4, got 4. HINT"),
        (
            {"preset": "best"},
            "`preset` must be one of 'paper', .*'max' and 'recompute' or None, got 'best'.*HINT",
        ),
        ({"preset": 0.6}, "`preset` must be one of .*HINT: .*`sparsity=0.6`"),
        ({"total_steps": 0}, "`total_steps` must be a positive int or None, got 0. HINT"),
        ({"total_steps": 1.5}, "`total_steps` must be a positive int or None, got 1.5. HINT"),
        ({"skip_retained": "no"}, "`skip_retained` must be a bool, got 'no' of type str. HINT"),
        ({"rules": {"head": {"sparsity": 3}}}, r"`rules\['head'\]`: `sparsity` must be in \[0, 1\), got 3. HINT"),
        ({"rules": {"head": "int4"}}, r"`rules\['head'\]` must be one of 'dense', .*HINT"),
        ({"rules": {"head": {"max_dropped_energy": 1.1}}}, r"`max_dropped_energy` must be in .* got 1.1"),
        ({"rules": {"head": {"max_dropped_energy": "0.2"}}}, r"`max_dropped_energy` must be a number in .* got '0.2'"),
        ({"preset": "paper", "total_steps": 100}, r"`total_steps`.*got 100.*HINT"),
        *(({"verbose": value}, "`verbose` must be a bool, 0, 1 or 2, got .* HINT: 0") for value in (3, 1.0, "1", None)),
    ],
)
def test_arguments_are_checked_at_construction(arguments: dict[str, Any], message: str):
    with pytest.raises(MisconfigurationException, match=message):
        ActivationPruning(**arguments)


def test_arguments_are_stored_as_given_and_cannot_be_changed_later():
    arguments: dict[str, Any] = {
        "preset": "max",
        "sparsity": LinearSchedule(0.5),
        "block_size": 16,
        "rules": {"head": Keep(sparsity=0.2), "type:norm": None},
        "memory_budget": None,
        "total_steps": 10,
        "skip_retained": False,
        "verbose": False,
    }
    assert arguments.keys() == inspect.signature(ActivationPruning).parameters.keys()
    callback = ActivationPruning(**arguments)
    assert {name: getattr(callback, name) for name in arguments} == arguments
    for name in arguments.keys() - {"verbose"}:
        with pytest.raises(MisconfigurationException, match=f"`{name}` of ActivationPruning cannot be changed.*HINT"):
            setattr(callback, name, 0.9)
    callback.verbose = 0
    assert (callback.block_size, callback.verbose) == (16, 0)
    trainer(pickle.loads(pickle.dumps(copy.deepcopy(callback)))).fit(Net())


def test_without_a_preset_it_is_balanced_or_with_a_sparsity_the_paper():
    assert ActivationPruning().preset == "balanced"
    assert ActivationPruning(rules={"head": None}).preset == "balanced"
    assert ActivationPruning(sparsity=0.6).preset == ActivationPruning(sparsity=ConstantSchedule(0.3)).preset == "paper"


@pytest.mark.parametrize(
    ("make", "in_setup"),
    [(Net, LAYERS[:2]), (lambda: Net("setup"), []), (ConfiguredNet, [])],
    ids=["init", "setup", "configure_model"],
)
def test_layers_are_converted_as_early_as_they_exist_and_plain_outside_of_the_fit(make, in_setup: list[str]):
    callback = ActivationPruning(sparsity=0.5, block_size=16, rules={"head": None})
    model, before, after = make(), Recorder(), Recorder()
    made = trainer(before, callback, after)
    made.fit(model)
    made.test(model)
    made.predict(model)
    assert model.seen == [["ActivationPrunedLinear", "ActivationPrunedLinear", "Linear"]] * BATCHES
    assert [(c.fqn, c.sparsity, c.keep) for c in callback.converted] == [
        (name, 0.5, Keep(sparsity=0.5, block_size=16)) for name in LAYERS[:2]
    ]
    assert [(s.fqn, s.reason) for s in callback.skipped] == [("head", "the rule 'head' keeps it dense")]
    during = "on_sanity_check_start", "on_train_start", "on_train_batch_start", "on_validation_start", "on_fit_end"
    assert before.pruned["setup"] == []
    assert after.pruned["setup"] == in_setup
    assert after.pruned["on_fit_start"] == LAYERS[:2]
    assert all(before.pruned[hook] == LAYERS[:2] for hook in (*during, "teardown"))
    assert after.pruned["teardown"] == after.pruned["on_test_start"] == after.pruned["on_predict_start"] == []
    assert_plain(model)


def test_all_operators_are_converted_for_the_time_of_a_fit_that_learns_as_the_dense_one():
    losses = []
    for callbacks in ([], [callback := ActivationPruning(verbose=False)]):
        torch.manual_seed(0)
        model = Net()
        model.watch = compressed
        fitted = trainer(*callbacks, max_epochs=3)
        fitted.fit(model)
        losses.append(fitted.callback_metrics["loss"])
    assert model.seen == [["body.0", "body.1", "body.2", "body.3", "head"]] * 3 * BATCHES
    assert callback.report.saved == Keep(bits=8)
    torch.testing.assert_close(losses[1], losses[0], rtol=0.02, atol=0)
    assert_plain(model)
    assert compressed(model) == []
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    fitted.validate(model, verbose=False)


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


def test_other_stages_are_untouched():
    model, callback, recorder = Net(), ActivationPruning(sparsity=0.5), Recorder()
    trainer(callback, recorder).validate(model)
    assert recorder.pruned["setup"] == recorder.pruned["on_validation_start"] == []
    assert callback.converted == []
    assert_plain(model)


@pytest.mark.parametrize("plugin", [BitsandbytesPrecision, TransformerEnginePrecision])
def test_precision_plugins_that_replace_linear_layers_are_refused(plugin: type):
    model = Net()
    made = trainer()
    made.strategy._precision_plugin = object.__new__(plugin)  # their packages are not installed
    with pytest.raises(MisconfigurationException, match=f"cannot work with {plugin.__name__}.*HINT"):
        ActivationPruning(sparsity=0.6).setup(made, model, "fit")
    assert_plain(model)


def test_quantized_values_and_double_precision_do_not_go_together():
    for arguments in ({}, {"sparsity": 0.5, "rules": {"head": Keep(bits=4)}}):
        with pytest.raises(MisconfigurationException, match=r"64-true'\) in \d bits.*HINT: set `preset='paper'`"):
            trainer(ActivationPruning(**arguments), precision="64-true").fit(Net())
    trainer(ActivationPruning("paper"), precision="64-true", max_steps=1).fit(Net())


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"boddy": None}, "`rules` pattern 'boddy' matches no layer.*body.0"),
        ({"*": Keep(bits=4), "head": None}, "`rules` pattern 'head' never counts"),
        (
            {"type:linear": None},
            r"(?s)No layer was converted.*body.0 \(Linear\): the rule 'type:linear' keeps it dense",
        ),
    ],
)
def test_a_conversion_that_cannot_be_meant_is_an_error(rules: dict[str, Any], message: str):
    model = Net("setup")
    with pytest.raises(MisconfigurationException, match=message):
        trainer(ActivationPruning("paper", rules=rules)).fit(model)
    assert_plain(model)
    assert model.seen == []


def test_two_instances_with_layers_of_their_own():
    model = Net()
    model.watch = sparsities
    callbacks = (
        ActivationPruning(sparsity=0.25, rules={"head": None}),
        ActivationPruning(sparsity=0.75, rules={"body.*": None}),
    )
    trainer(*callbacks).fit(model)
    assert model.seen == [[0.25, 0.25, 0.75]] * BATCHES
    assert [[c.fqn for c in callback.converted] for callback in callbacks] == [["body.0", "body.2"], ["head"]]
    assert callbacks[0].state_key != callbacks[1].state_key
    assert callbacks[0].state_key is callbacks[0].state_key  # no text is made in each hook of each step
    assert_plain(model)


def test_a_layer_claimed_twice_is_an_error_that_names_both():
    model = ConfiguredNet()
    callbacks = [ActivationPruning(sparsity=0.6, rules={name: None}) for name in ("head", "body.0")]
    first, second = r"rules=\['head \(dense\)'\]", r"rules=\['body.0 \(dense\)'\]"
    both = rf"'body.2' is already converted by ActivationPruning\({first}.*ActivationPruning\({second}"
    with pytest.raises(MisconfigurationException, match=both):
        trainer(*callbacks).fit(model)
    assert_plain(model)
    assert "configure_model" not in vars(model)


def test_the_report_is_that_of_the_last_fit_with_what_the_first_batch_showed():
    callback = ActivationPruning(sparsity=0.5, rules={"body.0": None, "type:activation": Keep(bits=4)}, verbose=False)
    assert callback.report.to_rows() == []
    trainer(callback).fit(Net())
    assert (callback.report.converted, callback.report.skipped) == (callback.converted, callback.skipped)
    found = {row["fqn"]: row["converted"] for row in callback.report.to_rows()}
    assert found == {"body.0": False, "body.1": True, "body.2": True, "body.3": True, "head": True}
    table = callback.report.to_dict()
    assert json.loads(json.dumps(table)) == table
    callback = ActivationPruning(sparsity=0.5, verbose=False)
    trainer(callback).fit(Retained())
    assert not {row["fqn"]: row["converted"] for row in callback.report.to_rows()}["head"]
    with pytest.raises(AttributeError):
        callback.report = None  # type: ignore[misc]


@pytest.mark.parametrize(("verbose", "level"), [(False, 0), (np.int64(1), 1), (True, 2)])
def test_verbose_means_the_same_to_both_callbacks(verbose: Any, level: int, capsys):
    ours = ActivationPruning(sparsity=0.5, verbose=verbose), ActivationMemoryMonitor(verbose=verbose)
    made = trainer(*ours, TQDMProgressBar(), enable_progress_bar=True, max_epochs=3)
    made.fit(Retained())
    text = capsys.readouterr().out
    once = (
        "Activation pruning: 3",
        "1 linear layer stays dense",
        "MiB dense ->",
        "Peak of the step",
    )
    assert [text.count(part) for part in once] == [min(level, 1)] * len(once)
    in_detail = "Layers that stay dense", "by who keeps", "Memory of the step"
    assert [text.count(part) for part in in_detail] == [level == 2] * len(in_detail)
    tables = [text.count(f"Kept for backward, epoch {epoch}") for epoch in range(3)]
    assert tables == {0: [0, 0, 0], 1: [1, 0, 0], 2: [1, 1, 1]}[level]
    assert ("actprune/saved_frac" in made.progress_bar_metrics) is (level > 0)
    assert made.callback_metrics["actprune/saved_frac"] > 0
