"""What the first batch of a fit decides and warns of: retained inputs, energy that is dropped, checkpointed layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, Keep, Recompute
from lightning_actprune.analysis.first_batch import RetentionProbe
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.callbacks import first_batch
from lightning_actprune.codec import private
from lightning_actprune.operators.recompute import RecomputedModule
from lightning_actprune.schedules import LinearSchedule
from tests.support.everything import Scaled, assert_nothing_open
from tests.support.helpers import (
    BATCHES,
    FEATURES,
    ByHand,
    Net,
    assert_plain,
    fit,
    pruned_layers,
    sparsities,
    warnings_of,
)
from tests.support.stack import STEPS, TOKENS, Stack

PRUNED = ["body.0", "body.2", "head"]
LEFT = ["body.0", "body.2"]
RELU = "its input is kept for backward by 'body.3' (relu)"
LIST = "its input is kept alive by a Python reference outside autograd (such as a list of features)"


class Retained(Net):
    """``head`` reads the output of a ReLU."""

    watch = staticmethod(pruned_layers)

    def make(self) -> None:
        super().make()
        self.body[3] = nn.ReLU()


class Listed(Net):
    """``head`` reads what a list keeps."""

    watch = staticmethod(pruned_layers)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.features: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(nn.functional.layer_norm(x, (FEATURES,)))
        self.features.append(h)
        return self.head(h).mean(1)


def outcome(callback: ActivationPruning) -> dict[str, str]:
    return {layer.fqn: layer.reason for layer in callback.skipped}


def assert_hooks_gone(model: nn.Module) -> None:
    assert_plain(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert_nothing_open()


@pytest.mark.parametrize(
    ("make", "reason", "options"),
    [
        (Retained, RELU, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        (Retained, RELU, {"limit_train_batches": 1, "max_epochs": 4}),
        (Listed, LIST, {"precision": "bf16-true"}),
        (Listed, LIST, {"num_sanity_val_steps": 2, "max_epochs": 2}),
    ],
)
def test_retained_layers_are_dense_from_the_second_batch_of_each_fit_on(make, reason: str, options: dict):
    """But for a resumed one: see test_checkpoints."""
    model, callback = make(), ActivationPruning(sparsity=0.5)
    model.watch = lambda m: (pruned_layers(m), bool(m.head._forward_hooks))
    for _ in range(2):
        fit(model, callback, **options)
        assert model.seen == [(PRUNED, True)] + [(LEFT, False)] * (len(model.seen) - 1)
        assert [layer.fqn for layer in callback.converted] == LEFT
        assert outcome(callback) == {"head": reason}
        assert not {row["fqn"]: row["converted"] for row in callback.report.to_rows()}["head"]
        assert_hooks_gone(model)
        model.seen.clear()


@pytest.mark.parametrize("make", [Retained, Listed])
def test_a_schedule_that_starts_at_0_and_without_skip_retained(make):
    schedule = LinearSchedule(end=0.8)
    for skips, later in ((True, 2), (False, 3)):
        model, callback = make(), ActivationPruning(sparsity=schedule, skip_retained=skips)
        model.watch = sparsities
        fit(model, callback)
        assert model.seen == [[0.0] * 3, [0.2] * later, [0.4] * later, [pytest.approx(0.6)] * later]
        assert outcome(callback).keys() == ({"head"} if skips else set())


@pytest.mark.parametrize(("through_lightning", "kept"), [(True, False), (False, True), (False, False)])
def test_manual_optimization(through_lightning: bool, kept: bool):
    """The features live from forward to backward, or longer."""
    model, callback = type("Manual", (Listed, ByHand), {})(), ActivationPruning(sparsity=0.6)
    model.through_lightning = through_lightning
    if not kept:
        model.after_backward = model.features.clear
    fit(model, callback)
    # Without Lightning's backward there is no hook at which a list that is emptied after it could be seen.
    assert outcome(callback) == ({"head": LIST} if kept or through_lightning else {})
    assert_hooks_gone(model)


def test_the_first_batch_with_a_forward_decides():
    class Late(Retained):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 0 else None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(self.watch(self))
            return None if batch_idx == 0 else nn.functional.cross_entropy(self(batch[0]), batch[1])

    model, callback = Late(), ActivationPruning(sparsity=0.6)
    fit(model, callback, max_epochs=2)
    assert model.seen == [PRUNED] * 2 + [LEFT] * 2
    assert outcome(callback) == {"head": RELU}


class Changing(Retained):
    """Has a body whose layers have inputs that ReLUs keep if it is trained, perhaps behind an adapter."""

    adapter = nn.Identity()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.change(self, self.global_step)
        return super().training_step(batch, batch_idx)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.adapter(nn.functional.layer_norm(x, (FEATURES,))))


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        # Dense from the second batch on, also in that in which training begins, and judged in the one after the next.
        (lambda model, step: model.body.requires_grad_(step >= 2), [PRUNED, ["head"], ["head"], PRUNED, LEFT]),
        # One after the other, as in a GAN.
        (lambda model, step: model.body.requires_grad_(step % 2 == 1), [PRUNED, ["head"], PRUNED, PRUNED, LEFT]),
        (
            lambda model, step: step != 2 or setattr(model, "adapter", nn.Linear(FEATURES, FEATURES)),
            [PRUNED, LEFT, LEFT, [*LEFT, "adapter"], [*LEFT, "adapter"]],
        ),
    ],
)
def test_layers_are_judged_when_they_begin_to_keep_something(change: Callable[..., Any], seen: list[list[str]]):
    model, callback = Changing(), ActivationPruning(sparsity=0.5)
    model.change = change
    change(model, 0)
    fit(model, callback, max_epochs=2)
    assert model.seen == seen + [seen[-1]] * (len(model.seen) - len(seen))
    assert outcome(callback) == {"head": RELU}
    assert not torch.nn.modules.module._global_module_registration_hooks


class Measured(Stack):
    """Notes what its steps keep, of sequences that may grow."""

    def __init__(self, *tokens: int) -> None:
        super().__init__()
        self.tokens, self.kept = tokens or [TOKENS], list[int]()
        for block in self.body[1:-1]:
            block.act = nn.Sequential(nn.GELU(), Scaled())

    def loss(self, batch: Any) -> Tensor:
        with SavedTensorMeter(self, batch) as meter:
            loss = super().loss([part[:, : self.tokens[self.global_step % len(self.tokens)]] for part in batch])
        self.kept.append(meter.report().stored_bytes)
        return loss


class Hooked(Measured):
    """Runs all that needs gradients in a hook of backward, as cached contrastive losses do."""

    def loss(self, batch: Any) -> Tensor:
        def run_again(grad: Tensor) -> None:
            with torch.enable_grad():
                loss = Measured.loss(self, batch)
            loss.backward(grad)

        with torch.no_grad():
            loss = Stack.loss(self, batch)
        loss.requires_grad_().register_hook(run_again)
        return loss


@pytest.mark.integration
@pytest.mark.parametrize("preset", ["max", "recompute"])
def test_forwards_in_hooks_of_backward_and_of_longer_sequences_are_judged_like_others(preset: str):
    result = []
    for model in (Measured(), Hooked(), Measured(*[1] * (STEPS // 2), *[TOKENS] * (STEPS // 2))):
        callback = ActivationPruning(preset, verbose=False)
        assert warnings_of(fit, model, callback, about="activation checkpoint") == []
        result.append((model.kept, callback.report.to_rows(), list(model.parameters())))
    (kept, rows, state), (in_hooks, rows_in_hooks, state_in_hooks), (growing, *_) = result
    assert (in_hooks, rows_in_hooks) == (kept, rows)
    torch.testing.assert_close(state_in_hooks, state, rtol=0, atol=1e-3)  # norms round otherwise without gradients
    fit(dense := Measured())
    assert growing[-1] <= kept[-1] < dense.kept[-1] / 3
    assert max(growing) < dense.kept[-1]


@pytest.mark.parametrize(
    ("make", "rules", "named"),
    [
        (lambda: Retained(), {"body.*": None}, r"'body.3' \(relu\).*skip_retained"),
        (lambda: Uneven(), {"body.0": Keep(None, 0.5, max_dropped_energy=0.2), "*": None}, "max_dropped_energy"),
    ],
)
def test_no_layer_left_is_an_error_that_names_the_reason(make, rules: dict[str, Any], named: str):
    model, callback = make(), ActivationPruning(sparsity=0.6, rules=rules)
    with pytest.raises(MisconfigurationException, match=rf"(?s)No layer is left.*{named}"):
        fit(model, callback)
    assert_hooks_gone(model)


def test_two_callbacks_decide_together():
    """They share the hooks, and a layer of one holds nothing against a layer of the other."""

    class Sisters(Retained):
        def make(self) -> None:
            super().make()
            self.k = nn.Linear(128, FEATURES)

        def forward(self, x: Tensor) -> Tensor:
            h = self.body[:2](nn.functional.layer_norm(x, (FEATURES,)))  # for body.2 of one and k of the other
            return self.head(self.body[3](self.body[2](h) + self.k(h))).mean(1)

    rules = {"head": None, "k": None}, {"body.*": None}
    first, second = (ActivationPruning(sparsity=0.6, rules=each) for each in rules)
    model = Sisters()
    fit(model, first, second)
    assert model.seen == [[*PRUNED, "k"]] + [[*LEFT, "k"]] * (BATCHES - 1)
    assert [[layer.fqn for layer in callback.converted] for callback in (first, second)] == [LEFT, ["k"]]
    assert outcome(second)["head"] == RELU
    assert_hooks_gone(model)


@pytest.mark.parametrize("order", [1, -1])
def test_the_monitor_measures_the_probed_batch_and_training_is_that_with_the_layer_excluded(order: int):
    """Also in the first step: its ReLU keeps the input before the layer is called."""
    fits = []
    for options in ({}, {"rules": {"head": None}, "skip_retained": False}):
        torch.manual_seed(0)
        pruning, monitor = ActivationPruning(sparsity=0.5, **options), ActivationMemoryMonitor(0)
        fit(model := Retained(lr=0.5), *[pruning, monitor][::order])
        fits.append((model.state_dict(), pruning, monitor))
    (state, callback, monitor), (expected, _, alone) = fits
    torch.testing.assert_close(state, expected, rtol=0, atol=0)
    rows = {row.fqn: (row.sparsity, row.dense_bytes, row.stored_bytes > 0) for row in monitor.report.rows}
    assert rows == {
        "body.0": (0.5, 4 * 8 * 64 * 4, True),
        "body.2": (0.5, 4 * 8 * 128 * 4, True),
        "head": (0.0, 0, False),  # ran dense, on what the ReLU keeps
    }
    assert outcome(callback) == {"head": RELU}
    assert monitor.report.stored_bytes == alone.report.stored_bytes


def test_where_torch_does_not_say_which_hooks_are_open_nothing_is_found_out(monkeypatch):
    monkeypatch.setattr(private, "MISSING", [*private.MISSING, *RetentionProbe.needs])
    model, callback = Retained(), ActivationPruning(sparsity=0.5)
    with pytest.warns(UserWarning, match=r"Finding out in the first batch .* needs torch\._C\..* All stay converted"):
        fit(model, callback)
    assert model.seen == [PRUNED] * len(model.seen)


# Layers whose dropped blocks hold much of the energy drop none.

SPREAD, CONCENTRATED = "body.0", "body.2"


def judged(sparsity: Any = 0.5, bits: int | None = 4, limit: float = 0.2) -> dict[str, Keep | None]:
    return {
        "head": None,
        "type:linear": Keep(bits, sparsity, max_dropped_energy=limit, min_rows_for_low_bits=0),
        "*": None,
    }


class Uneven(Net):
    """``body.0`` reads what a norm has made even, ``body.2`` one large block and three of zeros."""

    watch = staticmethod(sparsities)

    def make(self) -> None:
        super().make()
        with torch.no_grad():
            self.body[0].bias.copy_(torch.where(torch.arange(128) < 32, 10.0, -10.0))


def test_spread_layers_are_only_quantised_from_the_second_batch_on(caplog):
    """Or dense, if they keep their values as they are."""
    caplog.set_level("INFO")
    model, callback = Uneven(), ActivationPruning(rules=judged(), verbose=2)
    fit(model, callback)
    assert "body.0 │ 41." in " ".join(caplog.text.split())
    assert model.seen == [[0.5, 0.5]] + [[0.0, 0.5]] * (BATCHES - 1)
    assert [(layer.fqn, layer.sparsity) for layer in callback.converted] == [(SPREAD, 0.0), (CONCENTRATED, 0.5)]
    assert list(callback.spread) == [SPREAD]
    assert 0.2 < callback.spread[SPREAD] < 0.5
    assert_plain(model)
    model, callback = Uneven(), ActivationPruning(rules=judged(bits=None))
    model.watch = pruned_layers
    fit(model, callback)
    assert model.seen == [[SPREAD, CONCENTRATED]] + [[CONCENTRATED]] * (BATCHES - 1)
    assert SPREAD in {layer.fqn for layer in callback.skipped}


def test_a_schedule_does_not_reach_them_and_they_are_judged_by_its_end():
    fit(model := Uneven(), ActivationPruning(rules=judged(LinearSchedule(end=0.5, until=0.5))))
    assert model.seen == [[0.0, sparsity] for sparsity in (0.0, 0.25, 0.5, 0.5)]


def test_nothing_is_judged_without_a_limit_or_where_what_has_one_drops_nothing(monkeypatch):
    monkeypatch.setattr(first_batch, "EnergyProbe", None)
    for callback, expected in (
        (ActivationPruning(rules=judged(limit=1.0)), [0.5, 0.5]),
        (ActivationPruning("max", rules={"head": Keep(sparsity=0.5, max_dropped_energy=1)}), [0.0, 0.0, 0.5]),
    ):
        fit(model := Uneven(), callback)
        assert model.seen == [expected] * BATCHES
        assert callback.spread == {}


# Blocks that run again in backward, and layers inside activation checkpoints, of which a warning tells.


class Dropping(Stack):
    """Residual blocks that drop out; notes the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        for block in self.body[1:-1]:
            block.act = nn.Sequential(nn.GELU(), nn.Dropout(0.1))

    def loss(self, batch: Any) -> Tensor:
        self.losses.append(super().loss(batch))
        return self.losses[-1]


def test_a_fit_learns_what_the_dense_one_does(caplog):
    caplog.set_level("INFO")
    options = {"max_epochs": 2, "accumulate_grad_batches": 2}
    fit(dense := Dropping(), **options)
    monitor = ActivationMemoryMonitor()
    pruning = ActivationPruning("recompute", rules={"body.4": None}, verbose=1)
    ours = Dropping()  # seeds what it drops out, too
    assert warnings_of(fit, ours, pruning, monitor, about="checkpoint", **options) == []
    # Other dropout would change the first digit; a norm in plain torch rounds as the dense one on some CPUs only.
    torch.testing.assert_close(ours.losses[0], dense.losses[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.stack(ours.losses), torch.stack(dense.losses), rtol=0.01, atol=0.01)
    assert_plain(ours)
    assert not any(isinstance(module, RecomputedModule) for module in ours.modules())
    assert [block.fqn for block in pruning.report.recomputed] == [f"body.{n}" for n in (1, 2, 3)]
    assert monitor.report.saved_fraction > 0.5
    assert "Run again in backward: body.* (3 Residual, inputs in 8 bits)." in " ".join(caplog.text.split())


def test_exact_inputs_make_it_a_checkpoint_and_a_model_without_blocks_is_an_error():
    rules = {f"body.{n}": Recompute(None) for n in (1, 2, 3, 4)} | {"*": None, "type:saved": None}
    fit(dense := Dropping())
    fit(ours := Dropping(), ActivationPruning(rules=rules))
    assert torch.equal(torch.stack(ours.losses), torch.stack(dense.losses))
    with pytest.raises(MisconfigurationException, match="no class of blocks that is repeated"):
        fit(Net(), ActivationPruning("recompute"))


# Pruned layers inside activation checkpoints.


class Checkpointed(Net):
    """``body`` runs in a checkpoint."""

    reentrant = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.stem = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.gelu(self.stem(nn.functional.layer_norm(x, (FEATURES,))))
        return self.head(checkpoint(self.body, h, use_reentrant=self.reentrant)).mean(1)


checkpoints_named = functools.partial(warnings_of, fit, about="activation checkpoint")


@pytest.mark.parametrize(
    ("by_hand", "options", "reentrant", "skip_retained"),
    [
        (False, {"max_epochs": 2}, True, True),
        (False, {"accumulate_grad_batches": 3}, False, False),
        (False, {"precision": "bf16-mixed"}, True, False),
        (True, {}, False, True),
        (True, {}, True, False),
    ],
)
def test_the_layers_are_named_once(by_hand: bool, options: dict, reentrant: bool, skip_retained: bool):
    model = type("Manual", (Checkpointed, ByHand), {})() if by_hand else Checkpointed()
    model.reentrant = reentrant
    callback = ActivationPruning(sparsity=0.5, skip_retained=skip_retained)
    [text] = checkpoints_named(model, callback, ActivationMemoryMonitor(0), **options)
    assert text.startswith("2 converted linear layers run only inside an activation checkpoint: body.0, body.2. ")
    assert "HINT" in text
    assert [layer.fqn for layer in callback.converted] == ["body.0", "body.2", "head", "stem"]  # they stay pruned
    assert_hooks_gone(model)
    assert len(checkpoints_named(model, callback, **options)) == 1  # in every fit


def test_each_callback_warns_of_its_own_layers_and_remedies_silence_it():
    dense = ["body.2", "head", "stem"], ["body.*", "stem"], ["body.0", "head"]
    callbacks = [ActivationPruning(sparsity=0.6, rules=dict.fromkeys(names)) for names in dense]
    result = checkpoints_named(Checkpointed(), *callbacks)
    assert [text.split(". A ")[0].split(": ")[1] for text in result] == ["body.0", "body.2"]
    for skips in (True, False):
        callback = ActivationPruning(sparsity=0.6, rules={"body.*": None}, skip_retained=skips)
        assert checkpoints_named(Checkpointed(), callback) == []
    assert checkpoints_named(Net(), ActivationPruning(sparsity=0.6)) == []


@pytest.mark.integration
@pytest.mark.parametrize("skip_retained", [True, False])
def test_a_compiled_checkpoint_is_seen_in_the_probed_batch_alone(skip_retained: bool):
    torch._dynamo.reset()
    model = Checkpointed()
    model.compile(backend="aot_eager")
    assert len(checkpoints_named(model, ActivationPruning(sparsity=0.6, skip_retained=skip_retained))) == skip_retained


def test_layers_in_a_checkpoint_are_not_judged_as_retained_in_its_own_backward():
    model, callback = Checkpointed(), ActivationPruning(sparsity=0.5)
    model.reentrant, model.body[1] = True, nn.ReLU()
    assert len(checkpoints_named(model, callback)) == 1
    assert callback.skipped == []
