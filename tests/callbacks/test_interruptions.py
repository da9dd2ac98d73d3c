"""An error anywhere in a fit leaves the model, torch and the callbacks as before, and the next fit is as any."""

from __future__ import annotations

import copy
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning
from lightning_actprune.analysis import first_batch, memory, recorder
from lightning_actprune.operators import regions
from lightning_actprune.operators.hooks import backward_runs
from tests.support import everything
from tests.support.everything import Everything, assert_nothing_open
from tests.support.helpers import all_traces, trainer

pytestmark = pytest.mark.integration


class Trap:
    """Raises an error once: in the first call in a step of the training, or in the first of all (``step=None``)."""

    def __init__(self, error: type[BaseException], step: int | None = None) -> None:
        self.error, self.step, self.armed = error, step, True
        self.trainer: pl.Trainer | None = None
        self.undo: list[Callable[[], Any]] = []

    def __call__(self, *args: Any) -> None:
        made = self.trainer
        if self.armed and (self.step is None or (made.training and made.global_step == self.step)):
            self.armed = False
            raise self.error("CUDA out of memory.")  # which tuners know by these words

    def lay(self, at: Any, name: str) -> None:
        """Call the trap before a method of an object, or a function of a module."""
        own, original = name in vars(at), getattr(at, name)

        def trapped(*args: Any, **kwargs: Any) -> Any:
            self()
            return original(*args, **kwargs)

        setattr(at, name, trapped)
        self.undo.append(lambda: setattr(at, name, original) if own else delattr(at, name))


class Model(Everything):
    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.batch_size = 4


def ours() -> list[pl.Callback]:
    """The first batch is probed, in the second memory is measured, then nothing."""
    return [ActivationPruning("max", sparsity=0.5, verbose=False), ActivationMemoryMonitor(1, verbose=False)]


def fit(model: Model, callbacks: list[pl.Callback], folder: Path, trap: Trap | None = None) -> None:
    torch.manual_seed(1)
    save = ModelCheckpoint(folder, every_n_train_steps=2)
    made = trainer(*callbacks, save, enable_checkpointing=True, default_root_dir=folder, limit_val_batches=1)
    if trap is not None:
        trap.trainer = made
    made.fit(model)


def failed(model: Model, callbacks: list[pl.Callback], trap: Trap, folder: Path) -> Any:
    """Return what a fit that ends in the trap leaves: traces on the model, and the state of the generator."""
    with pytest.raises((trap.error, SystemExit)):
        fit(model, callbacks, folder, trap)
    assert not trap.armed
    for undo in reversed(trap.undo):
        undo()
    return surroundings(model), torch.get_rng_state().tolist()


def surroundings(model: Model) -> Any:
    hooked = [name for name, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    return all_traces(model), hooked, torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()


def outcome(model: Model, callbacks: list[pl.Callback]) -> Any:
    pruning, monitor = callbacks
    return (pruning.report.to_rows(), pruning.spread, monitor.report.totals()), surroundings(model)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], Any]:
    """The weights and the outcome of a fit without an error."""
    model, callbacks = Model(), ours()
    fit(model, callbacks, tmp_path_factory.mktemp("whole"))
    return model.state_dict(), outcome(model, callbacks)


def assert_next_is_as_any(whole: Any, model: Model, callbacks: list[pl.Callback], initial: Any, folder: Path) -> None:
    """The callbacks are closed, and the next fit with the weights of before comes to what any does."""
    for again in (True, False):
        pruning, monitor = callbacks
        probes = pruning._probe._retention, pruning._probe._energy, pruning._probe._recomputations
        assert {*probes, monitor._meter, monitor._recorder} == {None}
        assert pruning._trials._undo == pruning._progress._layers == []
        assert_nothing_open()
        if again:
            model.load_state_dict(initial)
            model.train()  # Lightning does not after a validation that failed
            fit(model, callbacks, folder)
            torch.testing.assert_close(model.state_dict(), whole[0], rtol=0, atol=0)
            assert outcome(model, callbacks) == whole[1]


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    """Lightning ignores Ctrl-C from an interrupt on."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def in_model(name: str) -> Any:
    return lambda model, trap: trap.lay(model, name)


def in_callback(name: str) -> Any:
    def lay(model: Model, trap: Trap) -> pl.Callback:
        other = pl.Callback()
        trap.lay(other, name)
        return other

    return lay


def on_forward(name: str) -> Any:
    """In a hook that was there before ours."""
    return lambda model, trap: trap.undo.append(model.get_submodule(name).register_forward_hook(trap).remove)


def on_gradient(name: str) -> Any:
    """In backward, when it has the gradient of what a module returns."""

    def lay(model: Model, trap: Trap) -> None:
        def ask(module: Any, args: Any, output: Tensor) -> None:
            if output.requires_grad:  # not in a validation
                output.register_hook(trap)

        trap.undo.append(model.get_submodule(name).register_forward_hook(ask).remove)

    return lay


def on_recomputation(model: Model, trap: Trap) -> None:
    """In the forward that an activation checkpoint runs in backward."""
    part = model.spread
    forward = part.forward
    part.forward = lambda x: checkpoint(forward, x, use_reentrant=True)
    trap.undo.append(lambda: delattr(part, "forward"))
    trap.undo.append(part[1].register_forward_hook(lambda *_: trap() if backward_runs() else None).remove)


def on_optimizer(model: Model, trap: Trap) -> None:
    trap.undo.append(register_optimizer_step_pre_hook(trap).remove)


PLACES: dict[str, tuple[Any, type[BaseException], int | None]] = {
    "forward": (on_forward("attention"), KeyboardInterrupt, 0),
    "forward of the measured batch": (on_forward("convolution"), torch.OutOfMemoryError, 1),
    "backward": (on_gradient("spread"), torch.OutOfMemoryError, 1),
    "backward of the first batch": (on_gradient("late"), RuntimeError, 0),
    "checkpoint": (on_recomputation, RuntimeError, 2),
    "optimizer": (on_optimizer, torch.OutOfMemoryError, 1),
    "loader": (lambda model, trap: trap.lay(everything, "sample"), RuntimeError, 2),
    "start of a batch": (in_callback("on_train_batch_start"), KeyboardInterrupt, 0),
    "before backward": (in_callback("on_before_backward"), KeyboardInterrupt, 0),
    "end of a batch": (in_callback("on_train_batch_end"), torch.OutOfMemoryError, 2),
    "making optimizers": (in_model("configure_optimizers"), RuntimeError, None),
    "validation": (in_callback("on_validation_end"), torch.OutOfMemoryError, None),
    "end of training": (in_callback("on_train_end"), RuntimeError, None),
    "teardown": (in_callback("teardown"), KeyboardInterrupt, None),
}
"""Lays a trap for an error in a step, or in the first call of all."""


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.filterwarnings("ignore:.*run only inside an activation checkpoint:UserWarning")
def test_an_error_leaves_what_it_leaves_without_ours(whole, name: str, tmp_path: Path):
    (lay, error, step), left = PLACES[name], []
    for callbacks in ([], ours()):
        model, trap = Model(), Trap(error, step)
        initial, other = copy.deepcopy(model.state_dict()), lay(model, trap)
        others = [] if other is None else [other]
        left.append(failed(model, others + callbacks if step == 0 else callbacks + others, trap, tmp_path))
    assert left[1] == left[0]
    assert_next_is_as_any(whole, model, callbacks, initial, tmp_path)


OURS = {
    "conversion": (sys.modules["lightning_actprune.convert"], "_convert_layer", torch.OutOfMemoryError, None),
    "packing": (regions, "pack", torch.OutOfMemoryError, 2),
    "unpacking": (regions, "unpack", KeyboardInterrupt, 1),
    "opening": (recorder.SavedTensorRecorder, "_follow", torch.OutOfMemoryError, 1),
    "judging energy": (first_batch, "dropped_energy", torch.OutOfMemoryError, 0),
    "deciding": (first_batch.RetentionProbe, "apply", KeyboardInterrupt, 1),
    "a report": (memory.SavedTensorMeter, "report", torch.OutOfMemoryError, 1),
}
"""Where code of this package may run out of memory or be interrupted, with a step in which it runs."""


@pytest.mark.parametrize("name", OURS)
def test_an_error_in_our_own_code(whole, name: str, tmp_path: Path):
    at, method, error, step = OURS[name]
    model, callbacks, trap = Model(), ours(), Trap(error, step)
    initial = copy.deepcopy(model.state_dict())
    trap.lay(at, method)
    (traces, *others), _ = failed(model, callbacks, trap, tmp_path)
    expected, *same = whole[1][1]
    traces[""] = expected[""]  # which says how far Lightning came
    assert (traces, others) == (expected, same)
    assert_next_is_as_any(whole, model, callbacks, initial, tmp_path)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_trial_that_runs_out_of_memory_or_is_interrupted(whole, error, tmp_path: Path, monkeypatch):
    """In the former case the fit goes on with what a later batch shows."""
    monkeypatch.chdir(tmp_path)  # where tuners write
    model, callbacks, trap = Model(), ours(), Trap(error, 0)
    initial = copy.deepcopy(model.state_dict())
    trap.lay(model, "forward" if error is torch.OutOfMemoryError else "on_before_backward")
    if error is torch.OutOfMemoryError:
        fit(model, [BatchSizeFinder(steps_per_trial=2, init_val=4, max_trials=2), *callbacks], tmp_path, trap)
        assert not trap.armed
        trap.undo[0]()
        assert [layer for layer in callbacks[0].report.to_rows() if layer["converted"]]
        assert surroundings(model) == whole[1][1]
    else:
        failed(model, [LearningRateFinder(num_training_steps=3), *callbacks], trap, tmp_path)
    assert_next_is_as_any(whole, model, callbacks, initial, tmp_path)


def test_a_callback_that_keeps_the_exception_from_ours(whole, tmp_path: Path):
    """Lightning then tells no other callback that the fit is over; the next one puts in order what that has left."""
    model, callbacks, other = Model(), ours(), pl.Callback()
    initial, traps = copy.deepcopy(model.state_dict()), [Trap(RuntimeError, 0), Trap(KeyError)]
    traps[0].lay(model, "on_before_backward")
    traps[1].lay(other, "on_exception")
    with pytest.raises(KeyError):
        fit(model, [other, *callbacks], tmp_path, traps[0])
    for trap in traps:
        trap.undo[0]()
    model.load_state_dict(initial)
    fit(model, callbacks, tmp_path)
    torch.testing.assert_close(model.state_dict(), whole[0], rtol=0, atol=0)
    assert outcome(model, callbacks) == whole[1]
