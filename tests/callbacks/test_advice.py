"""Warnings before the first step of a fit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_actprune import ActivationPruning, Keep, convert
from lightning_actprune.callbacks.advice import warn_of_optimizers, warn_of_surroundings
from lightning_actprune.codec import dispatch
from lightning_actprune.schedules import LinearSchedule
from tests.support.by_hand import ByHand
from tests.support.helpers import trainer

CPU = torch.device("cpu")


def warnings_of(function: Callable[..., Any], *arguments: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*arguments)
    return [str(warning.message) for warning in caught if "HINT" in str(warning.message)]


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
    made = SimpleNamespace(optimizers=[None] * optimizers)
    assert len(warnings_of(warn_of_optimizers, made, total_steps, horizon)) == count


def test_a_state_dict_is_no_model_and_is_not_printed():
    with pytest.raises(TypeError, match="state_dict") as error:
        convert(nn.Linear(64, 64).state_dict())  # type: ignore[arg-type]
    assert len(str(error.value)) < 250
