"""An error in a fit, a fit inside it or beside it in a thread: model, torch and callbacks are as by themselves."""

from __future__ import annotations

import copy
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BatchSizeFinder, LambdaCallback, LearningRateFinder, OnExceptionCheckpoint
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning
from lightning_actprune.analysis import first_batch, memory, recorder
from lightning_actprune.operators import regions
from lightning_actprune.operators.base import CompressedLayer
from lightning_actprune.operators.hooks import backward_runs
from tests.support import everything
from tests.support.everything import Everything, assert_nothing_open, sample
from tests.support.helpers import all_traces, fit, trainer

pytestmark = pytest.mark.integration


class Model(Everything):
    def __init__(self, seed: int = 0, dropout: float = 0.1) -> None:
        super().__init__(seed, dropout)
        self.kind, self.batch_size = (seed, dropout), 4

    def configure_model(self) -> None:
        """Might make layers."""


def ours() -> list[pl.Callback]:
    """The first batch is probed, in the second memory is measured, then nothing."""
    return [ActivationPruning("max", sparsity=0.5, verbose=False), ActivationMemoryMonitor(1, verbose=False)]


def seeded_fit(model: Model, *callbacks: pl.Callback, **options: Any) -> None:
    torch.manual_seed(1)
    fit(model, *callbacks, limit_val_batches=1, **options)


def surroundings(model: Model) -> Any:
    hooked = [name for name, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    return all_traces(model), hooked, torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()


def outcome(model: Model, callbacks: list[pl.Callback]) -> Any:
    """Return all that a fit has come to, but for its parameters."""
    pruning, monitor = callbacks
    reports = pruning.report.to_rows(), pruning.spread, monitor.report.totals(), monitor.report.to_rows()
    return reports, surroundings(model)


@pytest.fixture(scope="module")
def whole() -> dict[Any, tuple[dict[str, Tensor], Any]]:
    """The weights and the outcome of fits without an error, by the kind of the model."""
    results = {}
    for kind in ((0, 0.1), (0, 0.0), (1, 0.0)):
        model, callbacks = Model(*kind), ours()
        seeded_fit(model, *callbacks)
        results[kind] = model.state_dict(), outcome(model, callbacks)
    return results


def assert_as_any(whole: Any, model: Model, callbacks: list[pl.Callback]) -> None:
    state, expected = whole[model.kind]
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert outcome(model, callbacks) == expected


def assert_next_is_as_any(whole: Any, model: Model, callbacks: list[pl.Callback], initial: Any) -> None:
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
            seeded_fit(model, *callbacks)
            assert_as_any(whole, model, callbacks)


# Errors.


class Trap:
    """Raises an error once: in the first call in a step of the training, or in the first of all (``step=None``)."""

    def __init__(self, model: Model, error: type[BaseException], step: int | None = None) -> None:
        self.model, self.error, self.step, self.armed = model, error, step, True
        self.undo: list[Callable[[], Any]] = []

    def __call__(self, *args: Any) -> None:
        made = self.model._trainer
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


def failed(model: Model, callbacks: list[pl.Callback], trap: Trap, **options: Any) -> Any:
    """Return what a fit that ends in the trap leaves: traces on the model, and the state of the generator."""
    with pytest.raises((trap.error, SystemExit)):
        seeded_fit(model, *callbacks, **options)
    assert not trap.armed
    for undo in reversed(trap.undo):
        undo()
    return surroundings(model), torch.get_rng_state().tolist()


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
    "setup of the model": (in_model("setup"), RuntimeError, None),
    "setup of a callback": (in_callback("setup"), KeyboardInterrupt, None),
    "making layers": (in_model("configure_model"), RuntimeError, None),
    "making optimizers": (in_model("configure_optimizers"), RuntimeError, None),
    "start of a fit": (in_callback("on_fit_start"), RuntimeError, None),
    "gradients": (in_model("on_after_backward"), RuntimeError, 0),
    "state of a checkpoint": (in_callback("state_dict"), RuntimeError, None),
    "validation": (in_callback("on_validation_end"), torch.OutOfMemoryError, None),
    "end of training": (in_callback("on_train_end"), RuntimeError, None),
    "teardown": (in_callback("teardown"), KeyboardInterrupt, None),
}
"""Lays a trap for an error in a step, or in the first call of all."""


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.filterwarnings("ignore:.*run only inside an activation checkpoint:UserWarning")
def test_an_error_leaves_what_it_leaves_without_ours(whole, name: str, tmp_path: Path):
    """And if it is in a step, a checkpoint, which the plain model can load."""
    (lay, error, step), left = PLACES[name], []
    save = [] if step is None else [OnExceptionCheckpoint(tmp_path)]
    for callbacks in ([], ours()):
        model = Model()
        trap, initial = Trap(model, error, step), copy.deepcopy(model.state_dict())
        other = lay(model, trap)
        others = [] if other is None else [other]
        own = others + callbacks if step == 0 else callbacks + others
        left.append(failed(model, own + save, trap, enable_checkpointing=True))
        for at_exception in save:
            saved = torch.load(at_exception.ckpt_path, weights_only=True)["state_dict"]
            Model().load_state_dict(saved)
            torch.testing.assert_close(saved, dict(model.state_dict()), rtol=0, atol=0)
            Path(at_exception.ckpt_path).unlink()
    assert left[1] == left[0]
    assert_next_is_as_any(whole, model, callbacks, initial)


OURS = {
    "conversion": (sys.modules["lightning_actprune.convert"], "_convert_layer", torch.OutOfMemoryError, None),
    "packing": (regions, "quantize", torch.OutOfMemoryError, 2),
    "unpacking": (regions, "dequantize", KeyboardInterrupt, 1),
    "opening": (recorder.SavedTensorRecorder, "_follow", torch.OutOfMemoryError, 1),
    "judging energy": (first_batch, "dropped_energy", torch.OutOfMemoryError, 0),
    "deciding": (first_batch.RetentionProbe, "apply", KeyboardInterrupt, 1),
    "a report": (memory.SavedTensorMeter, "report", torch.OutOfMemoryError, 1),
}
"""Where code of this package may run out of memory or be interrupted, with a step in which it runs."""


@pytest.mark.parametrize("name", OURS)
def test_an_error_in_our_own_code(whole, name: str):
    at, method, error, step = OURS[name]
    model, callbacks = Model(), ours()
    trap, initial = Trap(model, error, step), copy.deepcopy(model.state_dict())
    trap.lay(at, method)
    (traces, *others), _ = failed(model, callbacks, trap)
    expected, *same = whole[model.kind][1][1]
    traces[""] = expected[""]  # which says how far Lightning came
    assert (traces, others) == (expected, same)
    assert_next_is_as_any(whole, model, callbacks, initial)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_trial_that_runs_out_of_memory_or_is_interrupted(whole, error, tmp_path: Path, monkeypatch):
    """In the former case the fit goes on with what a later batch shows."""
    monkeypatch.chdir(tmp_path)  # where tuners write
    model, callbacks = Model(), ours()
    trap, initial = Trap(model, error, 0), copy.deepcopy(model.state_dict())
    trap.lay(model, "forward" if error is torch.OutOfMemoryError else "on_before_backward")
    if error is torch.OutOfMemoryError:
        seeded_fit(model, BatchSizeFinder(steps_per_trial=2, init_val=4, max_trials=2), *callbacks)
        assert not trap.armed
        trap.undo[0]()
        assert [layer for layer in callbacks[0].report.to_rows() if layer["converted"]]
        assert surroundings(model) == whole[model.kind][1][1]
    else:
        failed(model, [LearningRateFinder(num_training_steps=3), *callbacks], trap)
    assert_next_is_as_any(whole, model, callbacks, initial)


def test_a_callback_that_keeps_the_exception_from_ours(whole):
    """Lightning then tells no other callback that the fit is over; the next one puts in order what that has left."""
    model, callbacks, other = Model(), ours(), pl.Callback()
    initial, traps = copy.deepcopy(model.state_dict()), [Trap(model, RuntimeError, 0), Trap(model, KeyError)]
    traps[0].lay(model, "on_before_backward")
    traps[1].lay(other, "on_exception")
    with pytest.raises(KeyError):
        seeded_fit(model, other, *callbacks)
    for trap in traps:
        trap.undo[0]()
    model.load_state_dict(initial)
    seeded_fit(model, *callbacks)
    assert_as_any(whole, model, callbacks)


# Fits inside others, and in two threads.


def compressed(model: Model) -> int:
    return sum(isinstance(module, CompressedLayer) for module in model.modules())


def once(hook: str, action: Callable[[pl.Trainer], Any], step: int = 0) -> pl.Callback:
    """Return a callback that does something in one call of a hook, without drawing random numbers."""
    called = list[bool]()

    def act(trainer: pl.Trainer, *args: Any) -> None:
        if not called and trainer.global_step == step:
            called.append(True)
            with torch.random.fork_rng():
                action(trainer)

    return LambdaCallback(**{hook: act}, teardown=lambda *_, **__: called.remove(True))


@pytest.mark.parametrize(("hook", "step", "first"), [("on_before_backward", 0, True), ("on_train_batch_end", 1, False)])
def test_a_fit_inside_a_fit(whole, hook: str, step: int, first: bool):
    """Also while the outer one probes its first batch."""
    outer, inner, models = ours(), ours(), (Model(0, 0.0), Model(1, 0.0))
    other = once(hook, lambda _: seeded_fit(models[1], *inner), step)
    seeded_fit(models[0], *([other, *outer] if first else [*outer, other]))
    assert_as_any(whole, models[0], outer)
    assert_as_any(whole, models[1], inner)
    assert_nothing_open()


def test_a_callback_or_a_model_of_a_running_fit_is_refused_to_another_fit(whole):
    """The fit that they are in goes on as if nothing had happened, also when the callback hears of another stage."""
    callbacks, model, other = ours(), Model(0, 0.0), Model(1, 0.0)

    def start_others(outer: pl.Trainer) -> None:
        for shared in callbacks:
            with pytest.raises(MisconfigurationException, match=f"{type(shared).__name__} is in a fit of another .*"):
                seeded_fit(other, shared)
        trainer(*callbacks).validate(other, DataLoader([sample(0)]))
        with pytest.raises(MisconfigurationException, match=r"is already converted by ActivationPruning.* HINT: "):
            seeded_fit(model, ActivationPruning("max"))
        model.trainer = outer

    seeded_fit(model, *callbacks, once("on_before_backward", start_others))
    assert_as_any(whole, model, callbacks)
    assert compressed(other) == 0
    seeded_fit(Model(1, 0.0), *callbacks)
    assert_nothing_open()


def test_two_threads_train_two_models(whole):
    """The compiler's stance, which is the process's, is as it was, though the first to ask for another leaves first."""
    meeting = threading.Barrier(2, timeout=60)

    def meet(times: dict[int, int]) -> Callable[..., None]:
        """Wait for the other thread as often as is said for the number of a batch."""

        def wait(trainer: pl.Trainer, model: Any, batch: Tensor, number: int) -> None:
            for _ in range(times.get(number, 0)):
                meeting.wait()

        return wait

    # The second starts when the first is in its first batch, which waits for that of the second, which waits for the
    # second batch of the first.
    starts = LambdaCallback(on_fit_start=lambda *_: meeting.wait(), on_train_batch_start=meet({0: 2}))
    orders = LambdaCallback(on_train_batch_start=meet({0: 2, 1: 1})), starts
    models, callbacks = [Model(seed, 0.0) for seed in range(2)], [ours(), ours()]
    threads = [
        threading.Thread(target=fit, args=(model, *own, order))
        for model, own, order in zip(models, callbacks, orders, strict=True)
    ]
    for act in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            act(thread)
    assert_nothing_open()
    for seed in range(2):
        assert_as_any(whole, models[seed], callbacks[seed])
