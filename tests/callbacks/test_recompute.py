"""Fits whose blocks run again in backward, and the warning of pruned layers inside activation checkpoints."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, Recompute
from lightning_actprune.operators.recompute import RecomputedModule
from tests.callbacks.test_first_batch import assert_hooks_gone
from tests.support.by_hand import ByHand
from tests.support.helpers import FEATURES, Net, assert_plain, fit
from tests.support.stack import Stack


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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(ours := Dropping(), pruning, monitor, **options)  # seeds what it drops out, too
    assert not [str(w.message) for w in caught if "checkpoint" in str(w.message)]
    assert torch.equal(ours.losses[0], dense.losses[0])
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


def warnings_of(model: Net, *callbacks: ActivationPruning, **options: Any) -> list[str]:
    """Return the warnings of checkpoints in a fit."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, *callbacks, **options)
    return [str(w.message) for w in caught if "activation checkpoint" in str(w.message)]


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
    [text] = warnings_of(model, callback, ActivationMemoryMonitor(0), **options)
    assert text.startswith("2 converted linear layers run only inside an activation checkpoint: body.0, body.2. ")
    assert "HINT" in text
    assert [layer.fqn for layer in callback.converted] == ["body.0", "body.2", "head", "stem"]  # they stay pruned
    assert_hooks_gone(model)
    assert len(warnings_of(model, callback, **options)) == 1  # in every fit


def test_each_callback_warns_of_its_own_layers_and_remedies_silence_it():
    callbacks = [
        ActivationPruning(sparsity=0.6, rules=dict.fromkeys(dense))
        for dense in (["body.2", "head", "stem"], ["body.*", "stem"], ["body.0", "head"])
    ]
    found = warnings_of(Checkpointed(), *callbacks)
    assert [text.split(". Of")[0].split(": ")[1] for text in found] == ["body.0", "body.2"]
    for skips in (True, False):
        callback = ActivationPruning(sparsity=0.6, rules={"body.*": None}, skip_retained=skips)
        assert warnings_of(Checkpointed(), callback) == warnings_of(Net(), ActivationPruning(sparsity=0.6)) == []


@pytest.mark.integration
@pytest.mark.parametrize("skip_retained", [True, False])
def test_a_compiled_checkpoint_is_seen_in_the_probed_batch_alone(skip_retained: bool):
    torch._dynamo.reset()
    model = Checkpointed()
    model.compile(backend="aot_eager")
    assert len(warnings_of(model, ActivationPruning(sparsity=0.6, skip_retained=skip_retained))) == skip_retained


def test_layers_in_a_checkpoint_are_not_judged_as_retained_in_its_own_backward():
    class Retained(Checkpointed):
        reentrant = True

        def make(self) -> None:
            super().make()
            self.body[1] = nn.ReLU()

    callback = ActivationPruning(sparsity=0.5)
    assert len(warnings_of(Retained(), callback)) == 1
    assert callback.skipped == []
