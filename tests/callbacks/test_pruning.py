"""ActivationPruning: arguments, what is converted and when, the sparsity of each step, and what every exit restores."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import pickle
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback, RichProgressBar, TQDMProgressBar
from lightning.pytorch.plugins.precision import TransformerEnginePrecision
from packaging.version import Version
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, Keep, convert
from lightning_actprune.callbacks.fit import warn_of_optimizers, warn_of_surroundings
from lightning_actprune.codec import dispatch
from lightning_actprune.operators.base import CompressedLayer
from lightning_actprune.schedules import ConstantSchedule, LinearSchedule, SparsitySchedule
from tests.callbacks.test_first_batch import Retained
from tests.support.helpers import (
    BATCHES,
    ByHand,
    ConfiguredNet,
    Net,
    assert_plain,
    fit,
    loader,
    pruned_layers,
    sparsities,
    trainer,
    warnings_of,
)

LAYERS = ["body.0", "body.2", "head"]
PRUNED = ["ActivationPrunedLinear"] * 3


def compressed(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, CompressedLayer)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sparsity": 60}, r"`sparsity` must be in \[0, 1\), got 60. HINT"),
        ({"total_steps": 0}, "`total_steps` must be a positive int or None, got 0. HINT"),
        ({"skip_retained": "no"}, "`skip_retained` must be a bool, got 'no' of type str. HINT"),
        ({"cuda_graphs": 1}, "`cuda_graphs` must be a bool, got 1 of type int. HINT"),
        ({"rules": {"head": {"sparsity": 3}}}, r"`rules\['head'\]`: `sparsity` must be in \[0, 1\), got 3. HINT"),
        ({"rules": {"head": "int4"}}, r"`rules\['head'\]` must be one of 'dense', .*HINT"),
        ({"preset": "paper", "total_steps": 100}, r"`total_steps`.*got 100.*HINT"),
        *(({"verbose": value}, "`verbose` must be a bool, 0, 1 or 2, got .* HINT: 0") for value in (3, "1")),
        ({"memory_budget": "lots"}, "`memory_budget` must be a size, got 'lots'.*HINT"),
        ({"memory_budget": True}, "`memory_budget` must be a size, got True of type bool.*HINT"),
        ({"memory_budget": 0.5, "preset": "max"}, "`preset` must be left out.*got 'max'. HINT"),
        ({"memory_budget": 0.5, "offload": True}, "`offload` must be False with a `memory_budget`.*got True.*HINT"),
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
        "offload": False,
        "memory_budget": None,
        "max_error": None,
        "total_steps": 10,
        "skip_retained": False,
        "cuda_graphs": True,
        "verbose": False,
    }
    assert ActivationPruning().preset == ActivationPruning(rules={"head": None}).preset == "balanced"
    assert ActivationPruning(sparsity=0.6).preset == ActivationPruning(sparsity=ConstantSchedule(0.3)).preset == "paper"
    assert arguments.keys() == inspect.signature(ActivationPruning).parameters.keys()
    callback = ActivationPruning(**arguments)
    assert {name: getattr(callback, name) for name in arguments} == arguments
    for name in arguments.keys() - {"verbose"}:
        with pytest.raises(MisconfigurationException, match=f"`{name}` of ActivationPruning cannot be changed.*HINT"):
            setattr(callback, name, 0.9)
    callback.verbose = 0
    assert (callback.block_size, callback.verbose) == (16, 0)
    fit(Net(), pickle.loads(pickle.dumps(copy.deepcopy(callback))))


def noting(found: dict[str, list[str]]) -> LambdaCallback:
    """Return a callback that notes which layers are pruned when its hooks are first called."""

    def in_hook(hook: str) -> Callable[..., None]:
        return lambda trainer, model, *args, **kwargs: found.setdefault(hook, pruned_layers(model))

    started = "fit", "sanity_check", "train", "train_batch", "validation", "test", "predict"
    names = "setup", *(f"on_{name}_start" for name in started), "on_fit_end", "teardown"
    return LambdaCallback(**{name: in_hook(name) for name in names})


@pytest.mark.parametrize(
    ("make", "in_setup", "at_start"),
    [(Net, LAYERS[:2], LAYERS[:2]), (lambda: Net("setup"), [], []), (ConfiguredNet, [], LAYERS[:2])],
    ids=["init", "setup", "configure_model"],
)
def test_layers_are_converted_as_early_as_they_exist_and_plain_outside_of_the_fit(make, in_setup, at_start):
    callback = ActivationPruning(sparsity=0.5, block_size=16, rules={"head": None})
    model, before, after = make(), dict[str, list[str]](), dict[str, list[str]]()
    run = fit(model, noting(before), callback, noting(after))
    run.test(model)
    run.predict(model)
    run.fit_loop.max_epochs = 2
    run.fit(model)  # goes on
    assert model.seen == [["ActivationPrunedLinear", "ActivationPrunedLinear", "Linear"]] * 2 * BATCHES
    assert [(c.fqn, c.sparsity, c.keep) for c in callback.converted] == [
        (name, 0.5, Keep(sparsity=0.5, block_size=16)) for name in LAYERS[:2]
    ]
    assert [(s.fqn, s.reason) for s in callback.skipped] == [("head", "the rule 'head' keeps it dense")]
    during = "on_sanity_check_start", "on_train_start", "on_train_batch_start"
    assert before["setup"] == []
    assert after["setup"] == in_setup
    assert before["on_fit_start"] == at_start  # where tuners run their trials
    assert after["on_fit_start"] == LAYERS[:2]
    assert all(before[hook] == LAYERS[:2] for hook in during)
    assert after["on_validation_start"] == before["on_fit_end"] == before["teardown"] == []  # until training goes on
    assert "configure_model" not in vars(model)
    assert after["teardown"] == after["on_test_start"] == after["on_predict_start"] == []
    assert_plain(model)


def test_all_operators_are_converted_for_the_time_of_a_fit_that_learns_as_the_dense_one():
    losses, callback = [], ActivationPruning(verbose=False)
    assert callback.report.to_rows() == []
    for callbacks in ([], [callback]):
        torch.manual_seed(0)
        model = Net()
        model.watch = compressed
        fitted = fit(model, *callbacks, max_epochs=3)
        losses.append(fitted.callback_metrics["loss"])
    assert model.seen == [["body.0", "body.1", "body.2", "body.3", "head"]] * 3 * BATCHES
    assert callback.report.saved == Keep(bits=8)
    table = callback.report.to_dict()
    assert json.loads(json.dumps(table)) == table
    torch.testing.assert_close(losses[1], losses[0], rtol=0.02, atol=0)
    assert_plain(model)
    assert compressed(model) == []
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    fitted.validate(model, verbose=False)


def test_a_precision_plugin_that_replaces_linear_layers_is_refused():
    model = Net()
    run = trainer()
    run.strategy._precision_plugin = object.__new__(TransformerEnginePrecision)  # its package is not installed
    with pytest.raises(MisconfigurationException, match=r"cannot work with TransformerEnginePrecision.*HINT"):
        ActivationPruning(sparsity=0.6).setup(run, model, "fit")
    assert_plain(model)


def test_quantized_values_and_double_precision_do_not_go_together():
    for arguments in ({}, {"sparsity": 0.5, "rules": {"head": Keep(bits=4)}}):
        with pytest.raises(MisconfigurationException, match=r"64-true'\) in \d bits.*HINT: set `preset='paper'`"):
            fit(Net(), ActivationPruning(**arguments), precision="64-true")
    fit(Net(), ActivationPruning("paper"), precision="64-true", max_steps=1)


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("precision", ["32-true", "16-true", "bf16-true", "16-mixed", "64-true"])
def test_sparsity_0_is_the_dense_fit(precision: str, accelerator: str):
    """With accumulation and clipping; on CPU Lightning takes "16-mixed" for "bf16-mixed" and says so."""
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    fits, gradients = [], list[list[Tensor]]()
    note = LambdaCallback(
        on_before_optimizer_step=lambda _, model, *args: gradients.append([p.grad.clone() for p in model.parameters()])
    )
    for pruning in ([], [ActivationPruning(sparsity=0.0, verbose=False)]):
        torch.manual_seed(0)
        fit(model := Net(), *pruning, note, accelerator=accelerator, precision=precision, **options)
        fits.append([gradients.copy(), model.state_dict()])
        gradients.clear()
    torch.testing.assert_close(fits[1], fits[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"boddy": None}, "`rules` pattern 'boddy' matches no layer.*body.0"),
        ({"*": Keep(bits=4), "head": None}, "`rules` pattern 'head' never counts"),
        (
            {"type:linear": None},
            r"(?s)No layer was converted.*body.0, body.2, head \(Linear\): the rule 'type:linear' keeps",
        ),
    ],
)
def test_a_conversion_that_cannot_be_meant_is_an_error(rules: dict[str, Any], message: str):
    model = Net("setup")
    with pytest.raises(MisconfigurationException, match=message):
        fit(model, ActivationPruning("paper", rules=rules))
    assert_plain(model)
    assert model.seen == []


def test_a_layer_claimed_twice_is_an_error_that_names_both():
    model = ConfiguredNet()
    callbacks = [ActivationPruning(sparsity=0.6, rules={name: None}) for name in ("head", "body.0")]
    first, second = r"rules=\['head \(dense\)'\]", r"rules=\['body.0 \(dense\)'\]"
    both = rf"'body.2' is already converted by ActivationPruning\({first}.*ActivationPruning\({second}"
    with pytest.raises(MisconfigurationException, match=both):
        fit(model, *callbacks)
    assert_plain(model)
    assert "configure_model" not in vars(model)
    twice = ActivationPruning("max")
    for other in twice, ActivationPruning("balanced"):
        with pytest.raises(MisconfigurationException, match=r"takes one ActivationPruning.*got 2.*HINT"):
            fit(Net(), twice, other)


@pytest.mark.parametrize("callback", [ActivationPruning("max"), ActivationMemoryMonitor()])
def test_trainers_of_another_package_and_fabric_are_refused(callback: pl.Callback):
    other = type("Trainer", (), {"__module__": "pytorch_lightning.trainer.trainer"})()
    with pytest.raises(MisconfigurationException, match=r"`lightning\.pytorch`.*`pytorch_lightning`.*HINT"):
        callback.setup(other, Net(), "fit")
    with pytest.raises(MisconfigurationException, match=r"Fabric.*HINT.*lightning_actprune"):
        Fabric(accelerator="cpu", devices=1, callbacks=[callback]).setup(nn.Linear(2, 2))


RICH = pytest.mark.skipif(
    Version(pl.__version__) < Version("2.6"), reason="RichProgressBar of this Lightning fails with this rich"
)


@pytest.mark.parametrize(
    ("verbose", "level", "bar"),
    [
        (False, 0, TQDMProgressBar),
        (np.int64(1), 1, TQDMProgressBar),
        (True, 2, TQDMProgressBar),
        (True, 2, None),
        pytest.param(True, 2, RichProgressBar, marks=RICH),
    ],
)
def test_verbose_means_the_same_to_both_callbacks(verbose: Any, level: int, bar: type | None, capsys, caplog):
    caplog.set_level("INFO")
    ours = ActivationPruning(sparsity=0.5, verbose=verbose), ActivationMemoryMonitor(verbose=verbose)
    bars = [bar()] if bar else []
    run = fit(Retained(), *ours, *bars, enable_progress_bar=bool(bar), max_epochs=3)
    text = capsys.readouterr().out + ("" if bar else caplog.text)
    once = "Activation pruning: 3", "1 linear layer dense now", "MiB dense ->", "Peak of the step"
    assert [text.count(part) for part in once] == [min(level, 1)] * len(once)
    in_detail = "Layers that stay dense", "by who keeps", "Memory of the step"
    assert [text.count(part) for part in in_detail] == [level == 2] * len(in_detail)
    tables = [text.count(f"Kept for backward, epoch {epoch}") for epoch in range(3)]
    assert tables == {0: [0, 0, 0], 1: [1, 0, 0], 2: [1, 1, 1]}[level]
    assert ("actprune/saved_frac" in run.progress_bar_metrics) is (level > 0)
    assert run.callback_metrics["actprune/saved_frac"] > 0


def test_the_summary_has_how_each_layer_is_kept(caplog):
    class Deep(Net):
        def make(self) -> None:
            super().make()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64)) for _ in range(60))
            self.extra = nn.ModuleList(nn.Linear(64, 64) for _ in range(60))

    caplog.set_level("INFO")
    rules = {"head": None, "body.2": Keep(bits=2, sparsity=LinearSchedule(end=0.5)), "blocks.7.*": Keep(bits=4)}
    fit(Deep(), ActivationPruning(sparsity=0.5, rules=rules, verbose=2), max_steps=1)
    text = " ".join(caplog.text.split())
    for part in (
        "120 linear layers (uncompressed values, drops 50 %)", "1 linear layer (2 bits, drops 0 to 50 %)", "1 dense",
        "head │ Linear │ dense: the rule 'head' keeps it dense", "2 activation functions", "... and 2",
        "blocks.7.0 │ Linear │ 4 bits, drops 50 % │",
        "blocks.*.0 (59) │ Linear │ uncompressed values, drops 50 % │", "body.2 │ Linear │ 2 bits, drops 0 to 50 % │",
    ):  # fmt: skip
        assert part in text, part


# The sparsity of each step.


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
    fit(model, *callbacks, max_epochs=2, **options)
    assert model.seen == [pytest.approx([sparsity] * 3) for sparsity in expected]


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(8, 64), 1


@pytest.mark.parametrize("endless", ["epochs", "batches"])
def test_an_unknown_length_is_an_error_only_if_it_is_needed(endless: str):
    data = loader(8, 4) if endless == "epochs" else torch.utils.data.DataLoader(Endless(), batch_size=2)
    options = {"max_epochs": -1} if endless == "epochs" else {}
    stop = LambdaCallback(on_train_batch_end=lambda *_: 1 / 0)
    schedule = LinearSchedule(end=0.5)
    with pytest.raises(MisconfigurationException, match=r"needs the length of the training.*HINT: set .*total_steps"):
        fit(Net(), ActivationPruning(sparsity=schedule), data=data, **options)
    for fine in ({"sparsity": schedule, "total_steps": 3}, {"sparsity": ConstantSchedule(0.5)}):
        with pytest.raises(ZeroDivisionError):
            fit(Net(), ActivationPruning(**fine), stop, data=data, **options)
    fit(Net(), ActivationPruning(sparsity=schedule), data=data, max_steps=2, **options)


def test_a_schedule_of_ones_own_is_checked():
    class Percent(SparsitySchedule):
        def __call__(self, progress: float) -> float:
            return 60 * progress

    model = Net()
    with pytest.raises(MisconfigurationException, match=r"`Percent\(\)\(0.017\)` must be in \[0, 1\), got 1.02"):
        fit(model, ActivationPruning(sparsity=Percent(), verbose=False))
    assert_plain(model)
    assert model.seen == []  # the highest sparsity is needed, and so known, before the first step


def test_schedule_reaches_both_projections_of_attention():
    class AttentionNet(Net):
        def make(self) -> None:
            self.body = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
            self.head = nn.Linear(64, 4)

    model, attention = AttentionNet(), ["body.self_attn", "body.self_attn.out_proj"]
    model.watch = lambda m: [m.get_submodule(name).sparsity for name in attention]
    rules = {"body.self_attn*": Keep(sparsity=LinearSchedule(end=0.8)), "*": None}
    fit(model, callback := ActivationPruning(rules=rules, skip_retained=False))
    assert model.seen == [pytest.approx([0.8 * step / BATCHES] * 2) for step in range(BATCHES)]
    assert [layer.fqn for layer in callback.converted] == attention
    assert type(model.body.self_attn) is nn.MultiheadAttention
    assert "_pruning" not in vars(model.body.self_attn)


# What is left of a fit; see test_interruptions for errors in it.


def test_a_fit_without_a_usable_module_raises_lightnings_own_error():
    with pytest.raises(TypeError, match="LightningModule"):
        fit(nn.Linear(3, 3), ActivationPruning(sparsity=0.6), ActivationMemoryMonitor())


def test_nothing_is_left_alive_after_the_fit():
    model, callback, monitor = ConfiguredNet(), ActivationPruning(sparsity=0.6), ActivationMemoryMonitor()
    run = fit(model, callback, monitor)
    alive = weakref.ref(model)
    for ours in callback, monitor:
        del ours.log, ours.log_dict  # which Lightning put there
    del run, model
    gc.collect()
    assert alive() is None
    assert len(callback.converted) == 3
    assert monitor.report is not None


# Warnings before the first step of a fit.


CPU = torch.device("cpu")


def test_a_fit_warns_once_of_each(monkeypatch: pytest.MonkeyPatch):
    def fit(**options: Any) -> list[str]:
        callback = ActivationPruning(sparsity=LinearSchedule(end=0.5), verbose=0, **options)
        return warnings_of(trainer(callback, max_steps=4).fit, ByHand())

    assert fit(rules={"head": Keep(bits=4)}, total_steps=8) == []
    monkeypatch.setattr(dispatch, "_interpreting", lambda: False)
    kernels, optimizers, idle = fit(rules={"head": Keep(sparsity=0.0)})
    assert "device cpu is not cuda" in kernels
    assert "compute capability 8.0" in kernels
    assert "all 2 optimizers" in optimizers
    assert "saves nothing: head." in idle


def test_the_dtype_and_an_open_dispatch_mode_are_named():
    [text] = warnings_of(warn_of_surroundings, SimpleNamespace(precision="64-true"), CPU)
    assert "dtype torch.float64" in text
    with FlopCounterMode(display=False):
        [text] = warnings_of(warn_of_surroundings, SimpleNamespace(precision="32-true"), CPU)
    assert "FlopCounterMode" in text


@pytest.mark.parametrize(
    ("optimizers", "total_steps", "horizon", "count"),
    [(2, None, 8, 1), (2, 8, 8, 0), (1, None, 8, 0), (2, None, None, 0)],
)
def test_schedules_that_would_end_early_for_several_optimizers(optimizers, total_steps, horizon, count):
    run = SimpleNamespace(optimizers=[None] * optimizers)
    assert len(warnings_of(warn_of_optimizers, run, total_steps, horizon)) == count


def test_a_state_dict_is_no_model_and_is_not_printed():
    with pytest.raises(TypeError, match="state_dict") as error:
        convert(nn.Linear(64, 64).state_dict())  # type: ignore[arg-type]
    assert len(str(error.value)) < 250
