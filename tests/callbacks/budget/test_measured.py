"""Predictions of a budget are corrected by what was measured; a stand-in for a GPU measures."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LambdaCallback

from lightning_actprune import ActivationPruning
from lightning_actprune.analysis.allocation import Allocator
from lightning_actprune.callbacks import budget as module
from lightning_actprune.callbacks import pruning as pruning_module
from tests.support.budgets import HALF, MIB
from tests.support.helpers import trainer
from tests.support.stack import DEPTH, STEPS, Stack


def measured_fit(
    monkeypatch: pytest.MonkeyPatch, measure: Any, budget: float | str = HALF, share: float = 1.0
) -> tuple[Any, list[int]]:
    """Fit on a device of 100 MiB whose most bytes in use are ``measure(allocator, setting)``; return settings by step.

    ``share`` is what torch may take of it.
    """
    pruning, model, numbers = ActivationPruning(memory_budget=budget, verbose=0), OnDevice(), list[int]()
    monkeypatch.setattr(pruning_module, "warn_of_surroundings", lambda *_: None)  # which asks the GPU
    own = pruning._budget
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: measure(own._allocator, own.number))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100 * MIB))
    note = LambdaCallback(on_train_batch_end=lambda *_: numbers.append(own.number))
    trainer(pruning, note, max_epochs=2).fit(model)
    return pruning, numbers


class OnDevice(Stack):
    """Says that it is on a GPU in hooks of callbacks."""

    device = property(lambda self: SimpleNamespace(type="cuda"))


FIRST = 8 * MIB


def off_by_the_first(allocator: Allocator | None, number: int | None) -> int:
    """What is predicted and what the first step took beyond that."""
    return FIRST if number is None else allocator.step(number).peak_bytes + FIRST - allocator.step(0).peak_bytes


def test_predictions_are_corrected_by_what_was_measured(monkeypatch):
    uncorrected = []

    def measure(allocator: Allocator | None, number: int | None) -> int:
        if number is not None:
            uncorrected.append(allocator.fit(12 * MIB).number)
        return off_by_the_first(allocator, number)

    pruning, numbers = measured_fit(monkeypatch, measure, 12 * MIB)
    allocator, off = pruning._budget._allocator, FIRST - pruning._budget._allocator.step(0).peak_bytes
    assert off > MIB
    assert numbers == [None] + [allocator.fit(12 * MIB, off).number] * (2 * STEPS - 1)
    assert numbers[-1] < uncorrected[0]


@pytest.mark.integration
def test_a_step_that_takes_more_than_predicted_warns_and_what_fits_by_it_is_taken(monkeypatch):
    def measure(allocator: Allocator | None, number: int | None) -> int:
        if number not in (None, *seen):
            seen.append(number)
        above = 0 if number is None else (2, 3, 3)[seen.index(number)] * MIB
        return off_by_the_first(allocator, number) + above

    seen: list[int] = []
    with pytest.warns(UserWarning, match="predicted a step peak .* and 14 MiB were measured. HINT"):
        pruning, numbers = measured_fit(monkeypatch, measure, 12 * MIB)
    # Of the two steps after each change the first is probed, and the second measured.
    first, second, third = dict.fromkeys(numbers[1:])
    assert numbers == [None, first, first, second, second] + [third] * (2 * STEPS - 5)
    assert first > second > third > 0
    assert measure(pruning._budget._allocator, third) == pruning.allocation.peak_bytes <= 12 * MIB


@pytest.mark.integration
def test_a_step_that_is_above_whatever_setting_ends_with_the_fewest_bytes(monkeypatch):
    with pytest.warns(UserWarning, match="no setting takes less, and a step takes 40 MiB, where 12 MiB are allowed"):
        _, numbers = measured_fit(monkeypatch, lambda _, number: FIRST if number is None else 40 * MIB, 12 * MIB)
    assert numbers[1] > DEPTH
    assert numbers[3:] == [DEPTH] * (2 * STEPS - 3)  # all in few bits


def test_an_error_of_rank_zero_is_one_of_all_ranks():
    """The others do not wait for a number that never comes."""
    sent: list[Any] = []

    def decide() -> int:
        raise MisconfigurationException("made up")

    def rank(zero: bool) -> Any:
        strategy = SimpleNamespace(broadcast=lambda found: sent.append(found) or sent[0])
        return SimpleNamespace(is_global_zero=zero, strategy=strategy)

    for zero in (True, False):
        with pytest.raises(MisconfigurationException, match="made up"):
            module._by_rank_zero(rank(zero), decide)
    sent.clear()
    assert [module._by_rank_zero(rank(zero), lambda: 3) for zero in (True, False)] == [3, 3]


@pytest.mark.integration
@pytest.mark.parametrize("budget", [1.0, "12MiB"])
def test_what_torch_may_take_of_the_device_is_a_budget(monkeypatch, budget: float | str):
    """Less what lies idle between tensors; the setting of the fewest bytes is taken even if that is above it."""
    taken = []
    for share in (1.0, 0.12, 0.02):
        least = pytest.warns(UserWarning, match="finds no setting that takes at most 85%")
        told = nullcontext() if share > 0.1 else least
        with monkeypatch.context() as context, told:
            pruning, numbers = measured_fit(context, off_by_the_first, budget, share)
        assert len(set(numbers[1:])) == 1
        taken.append((numbers[-1], pruning.allocation.peak_bytes))
    (all_of_it, _), (some, peak), (least, _) = taken
    assert 9 * MIB < peak <= 0.85 * 12 * MIB
    assert all_of_it > some > least == DEPTH
