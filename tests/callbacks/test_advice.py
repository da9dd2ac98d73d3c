"""What a fit is warned of before its first step."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_actprune import ActivationPruning, Keep, convert
from lightning_actprune.codec import dispatch
from lightning_actprune.schedules import LinearSchedule


class Module(L.LightningModule):
    """Two linear layers, trained by as many optimizers as one asks for."""

    def __init__(self, optimizers: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
        self.optimizers_made = optimizers
        self.automatic_optimization = optimizers == 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch).square().mean()
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.net[0], self.net[2])][
            : self.optimizers_made
        ]


def fit(callback: ActivationPruning, module: Module | None = None, **options: Any) -> list[str]:
    """Return what a fit of two steps warns of."""
    settings = {"max_steps": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    trainer = L.Trainer(callbacks=[callback], enable_progress_bar=False, **settings | options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module or Module(), torch.utils.data.DataLoader(torch.randn(16, 64), batch_size=4))
    return [str(warning.message) for warning in caught]


def test_a_fit_without_kernels_is_told_so_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "_interpreting", lambda: False)
    found = [text for text in fit(ActivationPruning("max", verbose=0)) if "kernels" in text]
    assert len(found) == 1
    assert "device cpu is not cuda" in found[0]
    assert "compute capability 8.0" in found[0]


def test_a_fit_in_fp64_is_told_the_reason():
    found = fit(ActivationPruning(sparsity=0.5, verbose=0), Module().double(), precision="64-true")
    assert [text for text in found if "dtype torch.float64" in text]


def test_a_dispatch_mode_around_the_fit_is_named():
    with FlopCounterMode(display=False):
        found = fit(ActivationPruning(sparsity=0.5, verbose=0))
    assert [text for text in found if "FlopCounterMode" in text]


def test_schedules_that_would_end_early_for_several_optimizers():
    def found(total_steps: int | None, optimizers: int) -> list[str]:
        callback = ActivationPruning(sparsity=LinearSchedule(end=0.5), total_steps=total_steps, verbose=0)
        return [text for text in fit(callback, Module(optimizers)) if "optimizers" in text]

    assert len(found(None, 2)) == 1
    assert found(8, 2) == []
    assert found(None, 1) == []


@pytest.mark.parametrize("sparsity", [0.0, LinearSchedule(end=0.5)])
def test_layers_that_save_nothing_are_named(sparsity: Any):
    found = [text for text in fit(ActivationPruning(sparsity=sparsity, verbose=0)) if "saves nothing" in text]
    assert len(found) == (sparsity == 0.0)
    assert all("net.0, net.2" in text for text in found)


def test_an_ordinary_fit_is_warned_of_none_of_it():
    rules = {"net.2": Keep(bits=4)}
    found = fit(ActivationPruning(sparsity=0.5, rules=rules, verbose=0))
    assert not [text for text in found if "HINT" in text]


def test_the_length_of_no_schedule():
    with pytest.raises(MisconfigurationException, match=r"`total_steps`.*got 100.*HINT"):
        ActivationPruning("paper", total_steps=100)


def test_a_state_dict_is_no_model_and_is_not_printed():
    with pytest.raises(TypeError, match="state_dict") as error:
        convert(nn.Linear(64, 64).state_dict())  # type: ignore[arg-type]
    assert len(str(error.value)) < 250
