"""``ActivationPruning(max_error=...)``: bits by the errors of weight gradients, in fits, checkpoints and trials."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BatchSizeFinder, LambdaCallback
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_actprune import ActivationPruning, Keep, convert
from lightning_actprune.analysis import measured_bits
from lightning_actprune.analysis.measured_bits import BitsChoice, BitsProbe, choose_rules
from lightning_actprune.callbacks import first_batch
from lightning_actprune.callbacks.first_batch import FirstBatchProbe
from lightning_actprune.callbacks.pruning import _check_gradients
from lightning_actprune.config import Config
from lightning_actprune.convert import convert_layers, new_owner
from lightning_actprune.operators.attention import watchers
from tests.support.helpers import assert_plain, fit
from tests.support.oracle import mean_relative_error
from tests.support.stack import Stack, batches


def bits_of(pruning: ActivationPruning) -> dict[str, int | None]:
    of_layers = ("linear", "convolution")
    return {row.fqn: row.keep and row.keep.bits for row in pruning.report.layers if row.operator in of_layers}


def bits_of_preset() -> dict[str, int | None]:
    pruning = ActivationPruning("max")
    fit(Stack(), pruning, max_steps=1)
    return bits_of(pruning)


def error_with(model: nn.Module, pruning: ActivationPruning) -> float:
    """Return the error of gradients of the first batch, as ``max_error`` bounds it, kept as the fit does after it."""
    x, exact = next(iter(batches())), copy.deepcopy(model)
    stored = copy.deepcopy(model)
    rules = {name: n and Keep(n, min_rows_for_low_bits=0) for name, n in bits_of(pruning).items()}
    convert_layers(stored, Config("max", rules=rules).with_bits(pruning.state_dict()["operators"]), new_owner("test"))
    for each in (exact, stored):
        each.loss(x).backward()
    pairs = [(a.grad, b.grad) for a, b in zip(stored.parameters(), exact.parameters(), strict=True)]
    return mean_relative_error(pairs)


@pytest.mark.parametrize(("bound", "more"), [(0.1, False), (0.02, True)])
def test_a_fit_errs_as_much_as_it_may(bound, more):
    """What other operators bring included: they get more bits if it would be too much."""
    model = Stack()
    before, pruning = copy.deepcopy(model), ActivationPruning(max_error=bound)
    fit(model, pruning)
    assert 0.3 * bound < error_with(before, pruning) < 1.1 * bound
    assert bool(pruning.state_dict()["operators"]) == more
    norms = {row.keep.bits for row in pruning.converted if row.operator == "norm"}
    assert norms == {8 if more else 4}
    assert_plain(model)
    assert not watchers
    fewer = ActivationPruning(max_error=bound / 4)
    fit(Stack(), fewer)
    assert error_with(before, fewer) < 1.1 * bound / 4


def test_rules_for_a_plain_loop_are_those_of_a_fit_and_leave_no_trace():
    pruning, model, x = ActivationPruning(max_error=0.02), Stack(), next(iter(batches()))
    fit(Stack(), pruning)
    before, grad = copy.deepcopy(model), torch.ones(64, 64)
    model.body[0].weight.grad = grad
    rules = choose_rules(model, lambda: model.loss(x), 0.02)
    assert_plain(model)
    assert all(map(torch.equal, model.state_dict().values(), before.state_dict().values()))
    assert [p.grad for p in model.parameters() if p.grad is not None] == [grad]
    assert torch.equal(grad, torch.ones(64, 64))
    report, bits = convert(model, "max", rules=rules), bits_of(pruning)
    assert {row.fqn: row.keep and row.keep.bits for row in report.layers if row.fqn in bits} | {"body.0": None} == bits
    assert {row.keep.bits for row in report.converted if row.operator == "norm"} == {8}


def test_the_batch_that_is_measured_trains_as_others_do():
    dense, measured = Stack(), Stack()
    fit(dense, ActivationPruning("max"), max_steps=1)
    fit(measured, ActivationPruning(max_error=0.02), max_steps=1)
    assert all(map(torch.equal, measured.state_dict().values(), dense.state_dict().values()))


@pytest.mark.integration
def test_a_resumed_fit_has_the_same_bits_and_the_same_losses(tmp_path):
    """And does not measure again."""
    whole, first, resumed = Stack(), Stack(), Stack()
    pruning, again, opened = ActivationPruning(max_error=0.02), ActivationPruning(max_error=0.02), []
    fit(whole, pruning, max_epochs=2)
    assert pruning.state_dict()["operators"]
    fit(first, ActivationPruning(max_error=0.02), max_epochs=1).save_checkpoint(tmp_path / "one.ckpt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BitsProbe, "open", opened.append)
        fit(resumed, again, ckpt=tmp_path / "one.ckpt", max_epochs=2)
    assert opened == []
    assert bits_of(again) == bits_of(pruning)
    assert all(map(torch.equal, resumed.state_dict().values(), whole.state_dict().values()))


@pytest.fixture
def measured(monkeypatch) -> list[int]:
    """Let fits measure again after two and eight steps; return how many probes were opened."""
    opened, before = [], BitsProbe.open
    monkeypatch.setattr(first_batch, "points_of", lambda _: [2, 8])
    monkeypatch.setattr(BitsProbe, "open", lambda self: (opened.append(1), before(self)))
    return opened


@pytest.mark.integration
def test_bits_are_measured_again_and_stay_where_they_do_well(measured, monkeypatch):
    monkeypatch.setattr(measured_bits, "TOO_LARGE", 9.0)
    monkeypatch.setattr(measured_bits, "_WORTH", 0.0)
    pruning, often, once = ActivationPruning(max_error=0.1), Stack(), Stack()
    fit(often, pruning, max_epochs=2)
    assert len(measured) == 3
    assert pruning.state_dict()["again"] == 2
    monkeypatch.setattr(first_batch, "points_of", lambda _: [])
    fit(once, ActivationPruning(max_error=0.1), max_epochs=2)
    assert len(measured) == 4
    assert all(map(torch.equal, often.state_dict().values(), once.state_dict().values()))


@pytest.mark.integration
def test_bits_that_err_too_much_change_once_and_a_resumed_fit_does_the_same(measured, monkeypatch, tmp_path):
    choose, seen = BitsProbe.choose, []

    def wrong_at_first(self: BitsProbe, *arguments: Any) -> BitsChoice | None:
        choice = choose(self, *arguments)
        if choice is None or arguments[-1]:
            return choice
        return choice._replace(bits=dict.fromkeys(choice.bits, 2), operators={})

    monkeypatch.setattr(BitsProbe, "choose", wrong_at_first)
    pruning, model, again, resumed = (
        ActivationPruning(max_error=0.02),
        Stack(),
        ActivationPruning(max_error=0.02),
        Stack(),
    )
    note = LambdaCallback(
        on_train_batch_end=lambda *_: seen.append((bits_of(pruning), pruning.state_dict()["operators"]))
    )
    one_batch = {"limit_train_batches": 1}
    fit(model, pruning, note, max_epochs=10, **one_batch)
    # A batch for all, for activation functions and for norms, twice, and one that changes nothing.
    assert len(measured) == 7
    assert [bool(operators) for _, operators in seen[:6]] == [False] * 5 + [True]
    assert set(seen[2][0].values()) - {None} == {2}
    assert seen[2][0] == seen[4][0] != seen[5][0]
    assert seen[5] == seen[-1]
    for epochs in (2, 5, 7):
        half = fit(Stack(), ActivationPruning(max_error=0.02), max_epochs=epochs, **one_batch)
        half.save_checkpoint(tmp_path / "one.ckpt")
        fit(resumed, again, ckpt=tmp_path / "one.ckpt", max_epochs=10, **one_batch)
        assert all(map(torch.equal, resumed.state_dict().values(), model.state_dict().values()))


def test_trainings_of_many_steps_measure_six_times_more():
    assert first_batch.points_of(20000) == [200, 600, 2000, 4000, 7000, 12000]
    assert first_batch.points_of(1000) == [100, 200, 350, 600]
    assert first_batch.points_of(50) == []
    assert first_batch.points_of(float("inf")) == [100, 300, 1000, 3000, 10000, 30000]


def test_a_gpu_without_room_for_a_step_like_the_first_does_not_measure_again(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (50, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 100)
    trainer, gpu = SimpleNamespace(optimizers=[SimpleNamespace(state={})]), torch.device("cuda")
    assert [first_batch._has_room(peak, trainer, gpu) for peak in (0, 130, 131)] == [False, True, False]
    assert first_batch._has_room(0, trainer, torch.device("cpu"))


def test_bits_that_a_gpu_has_no_room_for_stay_as_they_are(measured, monkeypatch):
    monkeypatch.setattr(measured_bits, "TOO_LARGE", 0.0)
    monkeypatch.setattr(measured_bits, "_WORTH", 0.0)
    monkeypatch.setattr(FirstBatchProbe, "_may_take", lambda *_: False)
    pruning, change = ActivationPruning(max_error=0.1), LambdaCallback(on_train_batch_start=halve_the_bound)
    with pytest.warns(UserWarning, match="no room for .* MiB more"):
        fit(Stack(), pruning, change)
    once = ActivationPruning(max_error=0.1)
    monkeypatch.setattr(first_batch, "points_of", lambda _: [])
    fit(Stack(), once, max_steps=1)
    assert bits_of(pruning) == bits_of(once)


def halve_the_bound(trainer: Any, *_: Any) -> None:
    trainer.callbacks[0]._probe._max_error = 0.1 if trainer.global_step == 0 else 0.03


def test_only_the_first_batch_of_a_step_is_measured(measured):
    seen: list[int] = []
    note = LambdaCallback(on_train_batch_start=lambda *of: seen.append((of[-1], len(measured))))
    fit(Stack(), ActivationPruning(max_error=0.02), note, accumulate_grad_batches=3, max_epochs=2)
    before = [0, *(count for _, count in seen)]
    opens = [place for (place, count), last in zip(seen, before, strict=False) if count > last]
    assert opens == [0, 3, 0, 3]


def test_a_batch_whose_gradients_are_not_finite_is_not_judged_by():
    """As with a loss scale that is too large at first."""
    seen: list[dict[str, int | None]] = []
    pruning, model = ActivationPruning(max_error=0.1), Stack()
    loss, factors = model.loss, iter([float("inf"), 1.0, 1.0])
    model.loss = lambda batch: loss(batch) * next(factors)
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), 0.0)
    kept = LambdaCallback(on_before_optimizer_step=lambda *_: [p.grad.nan_to_num_() for p in model.parameters()])
    end = LambdaCallback(on_train_batch_end=lambda *_: seen.append(bits_of(pruning)))
    fit(model, pruning, kept, end, max_steps=3)
    assert seen[0] == bits_of_preset()
    assert seen[1] == seen[2] != seen[0]


RULES = {"body.1.first": Keep(bits=3), "body.*.second": Keep(block_size=16)}


def test_a_batch_without_a_step_is_not_judged_by_and_a_rule_that_names_bits_stands():
    pruning, model = ActivationPruning(max_error=0.02, rules=RULES), Stack()
    step = model.training_step
    model.training_step = lambda batch, batch_idx: step(batch, batch_idx) if batch_idx else None
    fit(model, pruning, max_epochs=1)
    bits = bits_of(pruning)
    assert bits.pop("body.1.first") == 3
    assert {bits[name] for name in bits if name.endswith("second")} != {2}
    assert max(n or 16 for n in bits.values()) > 3
    assert {row.keep.block_size for row in pruning.converted if row.fqn.endswith("second")} == {16}


class Sized(Stack):
    """A stack with a batch size for a tuner."""

    batch_size = 2

    def train_dataloader(self) -> Any:
        return DataLoader(batches().dataset, self.batch_size)


@pytest.mark.integration
def test_trials_of_a_tuner_measure_for_the_fit():
    model, pruning, opened = Sized(), ActivationPruning(max_error=0.1), []
    with pytest.MonkeyPatch.context() as patch:
        before = BitsProbe.open
        patch.setattr(BitsProbe, "open", lambda self: (opened.append(self), before(self)))
        fit(model, pruning, BatchSizeFinder(max_trials=1, steps_per_trial=1, init_val=2))
    assert len(opened) == 1
    assert len(set(bits_of(pruning).values())) > 1


class Rank:
    """What one rank measures of two linear layers behind an embedding, of which it may call the first alone."""

    def __init__(self, seed: int, both: bool) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 64, sparse=True), nn.Linear(64, 64), nn.Linear(64, 64))
        convert_layers(model, Config("max"), "me")
        self.probe = BitsProbe(model, "me", Config("max"))
        self.probe.open()
        tokens = torch.randint(8, (32,), generator=torch.Generator().manual_seed(seed))
        loss = model[: 3 if both else 2](tokens).square().mean()
        self.probe.backward_starts(loss)
        loss.backward()
        self.probe.backward_ends()
        self.probe.close()

    def choose(self, others: Callable[[Tensor], Tensor], ranks: int, bound: float = 1.0) -> BitsChoice:
        choice = copy.copy(self.probe).choose(bound, others, ranks)
        assert choice is not None
        return choice

    def numbers(self) -> Tensor:
        seen: list[Tensor] = []
        self.choose(lambda numbers: seen.append(numbers.clone()) or numbers, 2)
        return seen[0]


def test_means_of_more_ranks_err_less():
    """Gradients of four ranks with errors of their own: the error of their mean has half the norm."""
    rank = Rank(0, both=True)
    one, four = rank.choose(lambda t: t, 1), rank.choose(lambda t: 4 * t, 4)
    assert four.bits == one.bits
    assert four.error == pytest.approx(one.error / 2, rel=0.1)  # not quite: the errors in the gradient count less, too


def test_ranks_that_have_seen_other_inputs_choose_the_same_bits():
    ranks = Rank(0, both=True), Rank(1, both=False)
    total = ranks[0].numbers() + ranks[1].numbers()
    found, other = (rank.choose(lambda _: total, 2, 0.05) for rank in ranks)
    assert found == other
    assert list(found.bits) == ["1", "2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_error": 2.0}, "`max_error` must be a number in"),
        ({"max_error": 0.1, "memory_budget": 0.5}, "`memory_budget`"),
        ({"max_error": 0.1, "sparsity": 0.5}, "`sparsity`"),
        ({"max_error": 0.1, "preset": "paper"}, "quantizes none"),
    ],
)
def test_errors_name_the_argument(options, message):
    with pytest.raises(MisconfigurationException, match=message):
        ActivationPruning(**options)


def test_sharded_weights_are_refused():
    with pytest.raises(MisconfigurationException, match="FSDPStrategy"):
        _check_gradients(SimpleNamespace(strategy=FSDPStrategy()))
