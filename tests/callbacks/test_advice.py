"""What a fit is warned of: before its first step, and of tensors too small to be packed after it has seen some."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BatchSizeFinder
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, Keep, convert
from lightning_actprune.codec import dispatch
from lightning_actprune.schedules import LinearSchedule
from tests.support.compression import top_hooks
from tests.support.helpers import assert_plain, trainer


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


class Attending(L.LightningModule):
    """Attention of four heads, of which query, key and value lie in one storage; a linear layer in front of it."""

    def __init__(self, batch_size: int = 4, fails_at: int | None = None) -> None:
        super().__init__()
        self.batch_size, self.fails_at = batch_size, fails_at
        self.net = nn.Sequential(nn.Linear(64, 64), nn.MultiheadAttention(64, 4, batch_first=True))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.fails_at:
            raise KeyError("as asked for")
        return self(batch).square().mean()

    def forward(self, x: Any) -> Any:
        x = self.net[0](x)
        return self.net[1](x, x, x, need_weights=False)[0]

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.randn(4 * self.batch_size, 32, 64), self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def warned_of_small_tensors(model: L.LightningModule, *callbacks: L.Callback) -> list[str]:
    """Return what a fit says of small tensors."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(*callbacks).fit(model)
    return [text for warning in caught if "are not packed" in (text := str(warning.message))]


def test_small_tensors_that_hold_much_of_what_is_kept_are_counted_once_a_fit():
    callback, monitor = ActivationPruning(verbose=0), ActivationMemoryMonitor(1, verbose=0)
    for _ in range(2):
        found = warned_of_small_tensors(Attending(), callback, monitor)
        assert len(found) == 1
        small = 4 * 32 * (3 * 64 + 64) * 4  # query, key and value, and the result
        step = monitor.report.step
        share = small / step.activation_bytes[step.forward_end]
        assert "fewer than 65,536 values" in found[0]
        assert (
            f"keeps up to 2 of these for backward: {small / 2**20:.2f} MiB, {share:.1%}".replace("%", " %") in found[0]
        )
        assert "HINT: train on a larger batch" in found[0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"preset": "paper"},
        {"rules": {"type:saved": None}},
        {"rules": {"net.1*": None}},
        {"skip_retained": False},
    ],
    ids=str,
)
def test_small_tensors_are_no_matter_where_nothing_packs_their_like_or_hooks_may_not_look(arguments: Any):
    assert warned_of_small_tensors(Attending(), ActivationPruning(**arguments, verbose=0)) == []


def test_the_hint_about_small_tensors_helps():
    assert warned_of_small_tensors(Attending(batch_size=32), ActivationPruning(verbose=0)) == []


def test_small_tensors_that_hold_little_are_no_matter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lightning_actprune.callbacks.advice.MOST_IN_SMALL_TENSORS", 0.99)
    assert warned_of_small_tensors(Attending(), ActivationPruning(verbose=0)) == []


@pytest.mark.slow
def test_small_tensors_are_those_of_the_fit_not_of_a_tuners_trials():
    finder = BatchSizeFinder(steps_per_trial=1, init_val=2, max_trials=5)
    model = Attending()
    assert warned_of_small_tensors(model, ActivationPruning(verbose=0), finder) == []
    assert model.batch_size == 32


class Sines(nn.Module):
    """Operations that no layer is known for, behind a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x: Any) -> Any:
        return (self.fc(x).sin() * x.cos()).sin()


class WithSines(Attending):
    """A block inside a module that is not compiled."""

    def __init__(self, compiled: bool = False, **options: Any) -> None:
        super().__init__(**options)
        block = torch.compile(Sines(), backend="aot_eager") if compiled else Sines()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Sequential(block))

    def forward(self, x: Any) -> Any:
        return self.net(x)


@pytest.mark.parametrize("compiled", [False, True])
def test_small_tensors_of_compiled_modules_are_the_compilers(compiled: bool):
    found = warned_of_small_tensors(WithSines(compiled), ActivationPruning(verbose=0))
    assert len(found) == (not compiled)


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_counting_small_tensors_leaves_nothing_behind_after_an_exception(fails_at: int):
    model = WithSines(fails_at=fails_at)
    with pytest.raises(KeyError, match="as asked for"):
        trainer(ActivationPruning(verbose=0)).fit(model)
    assert_plain(model)
    assert top_hooks() is None


def test_the_length_of_no_schedule():
    with pytest.raises(MisconfigurationException, match=r"`total_steps`.*got 100.*HINT"):
        ActivationPruning("paper", total_steps=100)


def test_a_state_dict_is_no_model_and_is_not_printed():
    with pytest.raises(TypeError, match="state_dict") as error:
        convert(nn.Linear(64, 64).state_dict())  # type: ignore[arg-type]
    assert len(str(error.value)) < 250
