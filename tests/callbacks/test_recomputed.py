"""The warning of pruned layers inside activation checkpoints: once in a fit, and never without cause."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning
from tests.callbacks.test_first_batch import assert_hooks_gone
from tests.support.helpers import FEATURES, Net, trainer

BODY = "2 converted linear layers run only inside an activation checkpoint: body.0, body.2. "


class Checkpointed(Net):
    """``body`` runs in a checkpoint."""

    def __init__(self, reentrant: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.reentrant = reentrant
        self.stem = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.gelu(self.stem(nn.functional.layer_norm(x, (FEATURES,))))
        return self.head(checkpoint(self.body, h, use_reentrant=self.reentrant)).mean(1)


class Manual(Checkpointed):
    """Two backward passes a batch, past Lightning."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(2):
            nn.functional.cross_entropy(self(batch[0]), batch[1]).backward()
        self.optimizers().step()


def warnings_of(model: Net, *callbacks: ActivationPruning, **options: Any) -> list[str]:
    """Return the warnings of checkpoints in a fit."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(*callbacks, **options).fit(model)
    return [str(w.message) for w in caught if "activation checkpoint" in str(w.message)]


@pytest.mark.parametrize(
    ("make", "options", "reentrant", "skip_retained"),
    [
        (Checkpointed, {"max_epochs": 2}, True, True),
        (Checkpointed, {"accumulate_grad_batches": 3}, False, False),
        (Checkpointed, {"precision": "bf16-mixed"}, True, False),
        (Manual, {}, False, True),
        (Manual, {}, True, False),
    ],
)
def test_the_layers_are_named_once(make, options: dict, reentrant: bool, skip_retained: bool):
    model, callback = make(reentrant), ActivationPruning(sparsity=0.5, skip_retained=skip_retained)
    [text] = warnings_of(model, callback, ActivationMemoryMonitor(0), **options)
    assert text.startswith(BODY)
    assert "HINT: leave these layers out with `rules={name: None}`, or do not checkpoint them." in text
    assert [layer.fqn for layer in callback.converted] == ["body.0", "body.2", "head", "stem"]  # they stay pruned
    assert_hooks_gone(model)
    assert len(warnings_of(model, callback, **options)) == 1  # in every fit


@pytest.mark.parametrize("skip_retained", [True, False])
def test_the_remedies_silence_it(skip_retained: bool):
    callback = ActivationPruning(sparsity=0.6, rules={"body.*": None}, skip_retained=skip_retained)
    assert warnings_of(Checkpointed(not skip_retained), callback) == []
    assert warnings_of(Net(), ActivationPruning(sparsity=0.6, skip_retained=skip_retained)) == []


def test_each_callback_warns_of_its_own_layers():
    callbacks = [
        ActivationPruning(sparsity=0.6, rules=dict.fromkeys(dense))
        for dense in (["body.2", "head", "stem"], ["body.*", "stem"], ["body.0", "head"])
    ]
    found = warnings_of(Checkpointed(), *callbacks)
    assert [text.split(". Of")[0].split(": ")[1] for text in found] == ["body.0", "body.2"]


@pytest.mark.integration
@pytest.mark.parametrize("skip_retained", [True, False])
def test_a_compiled_checkpoint_is_seen_in_the_probed_batch_alone(skip_retained: bool):
    torch._dynamo.reset()
    model = Checkpointed()
    model.compile(backend="aot_eager")
    assert len(warnings_of(model, ActivationPruning(sparsity=0.6, skip_retained=skip_retained))) == skip_retained


def test_layers_in_a_checkpoint_are_not_judged_as_retained_in_its_own_backward():
    class Retained(Checkpointed):
        def make(self) -> None:
            super().make()
            self.body[1] = nn.ReLU()

    callback = ActivationPruning(sparsity=0.5)
    assert len(warnings_of(Retained(reentrant=True), callback)) == 1
    assert callback.skipped == []
